"""JSONL rows as samples: tokens, and which of them are trained."""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from executor.data.conversation import RowText, row_text
from executor.data.report import Tally
from executor.tokenizer import Encoded, TokenArray, Tokenizer
from simulator.errors import InputError

_BATCH_ROWS = 512
_SHOWN_CHARACTERS = 80  # of a skipped row


@dataclass(frozen=True)
class Samples:
    """Samples end to end: sample i is `tokens[bounds[i]:bounds[i + 1]]`; `trained` marks the targets."""

    tokens: TokenArray
    trained: npt.NDArray[np.bool_]
    bounds: npt.NDArray[np.int64]


class _Line(NamedTuple):
    where: str  # file:line
    row: RowText


def read_samples(
    files: Sequence[Path], tokenizer: Tokenizer, tally: Tally, *, sequence_length: int, skip_invalid: bool
) -> Samples:
    """Read JSONL files; one sample a row, at most `sequence_length + 1` tokens long (inputs and the last target).

    Longer samples are cut and counted. Rows without anything to train (empty text or answer, a prompt that fills the
    row) are skipped and counted. Raises InputError with file, line and column for a row that cannot be read;
    `skip_invalid` counts those too.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    tokens: list[TokenArray] = []
    trained: list[npt.NDArray[np.bool_]] = []
    for batch in _batches(_lines(files, tokenizer, tally, skip_invalid=skip_invalid)):
        encoded = tokenizer.encode_with_offsets([line.row.text for line in batch])
        for line, encoding in zip(batch, encoded, strict=True):
            sample, mask = _sample(line.row, encoding, tokenizer)
            tally.longest_tokens = max(tally.longest_tokens, len(sample))
            truncated = len(sample) > sequence_length + 1
            sample, mask = sample[: sequence_length + 1], mask[: sequence_length + 1]
            # The first token is nobody's next token.
            if not mask[1:].any():
                tally.skip(f"the prompt fills the row of {sequence_length} tokens", line.where)
                continue
            tally.num_truncated += truncated
            tally.num_untrained_turns += line.row.num_untrained_turns
            tokens.append(sample.astype(dtype))
            trained.append(mask)
    bounds = np.cumsum([0, *(len(sample) for sample in tokens)], dtype=np.int64)
    if not tokens:
        return Samples(np.zeros(0, dtype), np.zeros(0, np.bool_), bounds)
    return Samples(np.concatenate(tokens), np.concatenate(trained), bounds)


def _sample(row: RowText, encoding: Encoded, tokenizer: Tokenizer) -> tuple[TokenArray, npt.NDArray[np.bool_]]:
    """Tokens and trained marks of a row; the end of sequence closes it once, and is trained."""
    tokens, eos = encoding.tokens, tokenizer.eos_id
    trained = np.zeros(len(tokens), np.bool_)
    for begin, end in row.spans:
        # A token that straddles the border holds the answer's first characters: it is trained.
        inside = np.flatnonzero((encoding.ends > begin) & (encoding.begins < end))
        ends_of_turn = inside[tokens[inside] == eos]
        if row.starts_document or not ends_of_turn.size:
            trained[inside] = True
        else:  # what a template writes after the end of turn is nobody's to say
            trained[inside[inside <= ends_of_turn[-1]]] = True
    # Nothing after the last trained token is ever a target, or seen by one.
    last = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else 0
    tokens, trained = tokens[:last], trained[:last]
    if not (tokens.size and tokens[-1] == eos):
        tokens = np.append(tokens, np.uint32(eos))
        trained = np.append(trained, True)
    prefix = tokenizer.prefix
    if row.starts_document and not np.array_equal(tokens[: len(prefix)], prefix):
        tokens = np.concatenate([prefix, tokens])
        trained = np.concatenate([np.zeros(len(prefix), np.bool_), trained])
    return tokens, trained


def _lines(files: Sequence[Path], tokenizer: Tokenizer, tally: Tally, *, skip_invalid: bool) -> Iterator[_Line]:
    for path in files:
        tally.num_files += 1
        for number, raw in _raw_lines(path):
            tally.num_read += 1
            where = f"{path}:{number}"
            try:
                row = _row(where, raw, tokenizer)
            except InputError as error:
                if not skip_invalid:
                    raise
                tally.skip("invalid row", str(error))
                continue
            if row.skip_reason:
                tally.skip(row.skip_reason, f"{where}: {raw.decode(errors='replace').strip()[:_SHOWN_CHARACTERS]}")
            else:
                yield _Line(where, row)


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, without the byte order mark."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _row(where: str, raw: bytes, tokenizer: Tokenizer) -> RowText:
    try:
        row = json.loads(raw.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise InputError(f"{where}:{error.start + 1}: is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        # Only the last line of a file has no line end.
        cut_off = "" if raw.endswith(b"\n") else "; the last line looks half-written"
        raise InputError(f"{where}:{error.colno}: is not JSON ({error.msg}){cut_off}") from error
    except RecursionError as error:
        raise InputError(f"{where}: its JSON is nested too deeply") from error
    if not isinstance(row, dict):
        hint = ", one row a line" if isinstance(row, list) else ""
        raise InputError(f"{where}: is a JSON {type(row).__name__}; a row is an object{hint}")
    try:
        return row_text(row, tokenizer)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error


def _batches(lines: Iterator[_Line]) -> Iterator[list[_Line]]:
    while batch := list(islice(lines, _BATCH_ROWS)):
        yield batch
