"""Rows of a sequence length: documents one a row or packed, or random tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from executor.data.documents import Documents, best_fit
from executor.data.token_cache import IntArray, Samples

MASKED_LABEL = -100  # what torch's cross-entropy ignores


class Rows(Protocol):
    """Rows of a sequence length that a data set is cut into."""

    @property
    def num_rows(self) -> int | None: ...  # None: endless

    def fill(
        self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> int:
        """Write a row over padding, masked labels and ascending positions. Returns how many tokens are no padding."""
        ...


@dataclass(frozen=True)
class SampleRows:
    """Documents in rows, padded on the right.

    A document's last token is only a target, so no label reaches over its end.
    """

    samples: Samples
    documents: Documents
    members: IntArray
    bounds: IntArray  # row r holds the documents members[bounds[r]:bounds[r + 1]]

    @property
    def num_rows(self) -> int:
        return len(self.bounds) - 1

    def fill(
        self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> int:
        at = 0
        for document in self.members[self.bounds[row] : self.bounds[row + 1]]:
            begin, end = self.documents.begins[document], self.documents.ends[document]
            text, trained = self.samples.tokens[begin:end], self.samples.trained[begin + 1 : end]
            here = slice(at, at + len(text) - 1)
            tokens[here] = text[:-1]
            labels[here][trained] = text[1:][trained]
            positions[here] = np.arange(len(text) - 1)
            at = here.stop
        positions[at:] = np.arange(len(positions) - at)
        return at


@dataclass(frozen=True)
class SyntheticRows:
    """Random tokens for benchmarks, without end."""

    vocab_size: int
    seed: int
    num_rows: None = None

    def fill(
        self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> int:
        values = np.random.default_rng([self.seed, row]).integers(0, self.vocab_size, len(tokens) + 1)
        tokens[:], labels[:] = values[:-1], values[1:]
        return len(tokens)


def sample_rows(samples: Samples, documents: Documents, *, sequence_length: int, packing: bool) -> SampleRows:
    """Documents as rows: one each, or as few rows as best fit finds."""
    if packing:
        members, bounds = best_fit(documents.sizes, sequence_length)
    else:
        members, bounds = np.arange(len(documents)), np.arange(len(documents) + 1)
    return SampleRows(samples, documents, members, bounds)
