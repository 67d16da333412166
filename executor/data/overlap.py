"""Documents that are evaluated and trained on too: they make the loss of an evaluation better than it is."""

import hashlib

import numpy as np
import numpy.typing as npt

from executor.data.documents import Documents
from executor.data.token_cache import Samples
from executor.tokenizer import BoolArray

_PLACES = 16  # of a document, that are compared at once for all; whole documents are compared where these agree
_AT_ONCE = 2**18  # documents
_MIXER = np.uint64(0x9E3779B97F4A7C15)


def also_trained(
    evaluated: Documents, evaluated_samples: Samples, trained: Documents, trained_samples: Samples
) -> BoolArray:
    """Which of the evaluated documents [documents] are among the trained ones, token for token.

    Reads few tokens of most documents: those whose length and whose tokens at some places agree with no other's are
    not read further.
    """
    ours, theirs = _sketches(evaluated, evaluated_samples), _sketches(trained, trained_samples)
    candidates = np.flatnonzero(np.isin(theirs, ours))
    digests = {_digest(trained, trained_samples, int(i)) for i in candidates}
    found = np.zeros(len(evaluated), np.bool_)
    for index in np.flatnonzero(np.isin(ours, theirs)):
        found[index] = _digest(evaluated, evaluated_samples, int(index)) in digests
    return found


def _sketches(documents: Documents, samples: Samples) -> npt.NDArray[np.uint64]:
    """A number for each document, of its length and the tokens at `_PLACES` places: equal for equal documents."""
    sketches = np.empty(len(documents), np.uint64)
    for start in range(0, len(documents), _AT_ONCE):
        begins, ends = documents.begins[start : start + _AT_ONCE], documents.ends[start : start + _AT_ONCE]
        lengths = ends - begins
        sketch = lengths.astype(np.uint64)
        for place in range(_PLACES):
            token = samples.tokens[begins + (lengths - 1) * place // (_PLACES - 1)]
            sketch = (sketch ^ token.astype(np.uint64)) * _MIXER
            sketch ^= sketch >> np.uint64(29)
        sketches[start : start + _AT_ONCE] = sketch
    return sketches


def _digest(documents: Documents, samples: Samples, index: int) -> bytes:
    tokens = samples.tokens[documents.begins[index] : documents.ends[index]]
    return hashlib.blake2b(tokens.astype(np.uint32).tobytes(), digest_size=16).digest()
