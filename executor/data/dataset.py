"""Batches by step: `Dataset.batch(step)` is a function of the data, the seed and the step, so resuming is exact."""

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from executor.data.report import DataReport, Tally, shown_sample
from executor.data.samples import Samples, read_samples
from executor.data.text import TEXT_SUFFIXES, find_files, read_stream
from executor.folder import require_path
from executor.tokenizer import ByteTokenizer, FolderTokenizer, TokenArray, TokenizerChoice, open_tokenizer
from simulator.errors import InputError, UnsupportedChoice

MASKED_LABEL = -100  # what torch's cross-entropy ignores
SYNTHETIC = "synthetic"
_NOT_READ = (".json", ".parquet", ".arrow", ".csv", ".tsv", ".gz", ".zst", ".zip")


@dataclass(frozen=True)
class Batch:
    """One step's rows. `labels[r, i]` is the token after `tokens[r, i]`, or -100 where nothing is to be learned.

    `positions[r, i]` is the token's place in its document, from 0: a 0 begins another document, which must not see
    those before it. Padding at a row's end is one more document. `num_tokens` counts what is not padding.
    """

    tokens: torch.Tensor  # int64 [rows, sequence]
    labels: torch.Tensor  # int64 [rows, sequence]
    num_targets: int  # labels that are not -100; at least 1
    num_tokens: int
    positions: torch.Tensor  # int64 [rows, sequence]


class Rows(Protocol):
    """Rows of a sequence length that a data set is cut into."""

    @property
    def num_rows(self) -> int | None: ...  # None: endless

    def fill(self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> int:
        """Write a row over padding and masked labels: one document. Returns how many tokens are not padding."""
        ...


@dataclass(frozen=True)
class StreamRows:
    """A token stream, cut: every token but the first is a target once."""

    stream: TokenArray
    sequence_length: int

    @property
    def num_rows(self) -> int:
        return max(0, -(-(len(self.stream) - 1) // self.sequence_length))

    def fill(self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> int:
        part = self.stream[row * self.sequence_length : (row + 1) * self.sequence_length + 1]
        tokens[: len(part) - 1], labels[: len(part) - 1] = part[:-1], part[1:]
        return len(part) - 1


@dataclass(frozen=True)
class SampleRows:
    """One sample a row, padded on the right: rows are not packed."""

    samples: Samples

    @property
    def num_rows(self) -> int:
        return len(self.samples.bounds) - 1

    def fill(self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> int:
        begin, end = self.samples.bounds[row : row + 2]
        sample, trained = self.samples.tokens[begin:end], self.samples.trained[begin + 1 : end]
        size = len(sample) - 1
        tokens[:size] = sample[:-1]
        labels[:size][trained] = sample[1:][trained]
        return size


@dataclass(frozen=True)
class SyntheticRows:
    """Random tokens for benchmarks, without end."""

    vocab_size: int
    seed: int
    num_rows: None = None

    def fill(self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> int:
        values = np.random.default_rng([self.seed, row]).integers(0, self.vocab_size, len(tokens) + 1)
        tokens[:], labels[:] = values[:-1], values[1:]
        return len(tokens)


@dataclass
class Dataset:
    """Rows in the order they are trained in, which is another one in every epoch.

    The last step of an epoch may have fewer rows than the others, and so may every step of a data set smaller than a
    step: it is filled up with rows that are masked throughout.
    """

    rows: Rows
    sequence_length: int
    rows_per_step: int
    seed: int
    shuffle: bool
    pad_id: int
    report: DataReport
    tokenizer: ByteTokenizer | FolderTokenizer | None  # None for synthetic data
    fingerprint: int  # of tokens and masks: another text gives another one
    _order: tuple[int, npt.NDArray[np.int64]] | None = field(default=None, init=False, repr=False)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in which every row is seen once; None for endless data."""
        return None if self.rows.num_rows is None else -(-self.rows.num_rows // self.rows_per_step)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs; the same whenever and wherever it is asked for."""
        chosen = self._rows_of_step(step)
        tokens = np.full((self.rows_per_step, self.sequence_length), self.pad_id, np.int64)
        labels = np.full_like(tokens, MASKED_LABEL)
        positions = np.tile(np.arange(self.sequence_length), (self.rows_per_step, 1))
        num_tokens = 0
        for i, row in enumerate(chosen):
            size = self.rows.fill(int(row), tokens[i], labels[i])
            positions[i, size:] -= size
            num_tokens += size
        num_targets = int((labels != MASKED_LABEL).sum())
        tensors = [torch.from_numpy(array) for array in (tokens, labels, positions)]
        return Batch(tensors[0], tensors[1], num_targets, num_tokens, tensors[2])

    def settings(self) -> dict[str, Any]:
        """All that decides the content and order of batches: equal settings give equal batches."""
        return {
            "fingerprint": self.fingerprint,
            "num_rows": self.rows.num_rows,
            "sequence_length": self.sequence_length,
            "rows_per_step": self.rows_per_step,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _rows_of_step(self, step: int) -> npt.NDArray[np.int64]:
        num_rows = self.rows.num_rows
        if num_rows is None:
            return np.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step)
        epoch, position = divmod(step, -(-num_rows // self.rows_per_step))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._order_of_epoch(epoch, num_rows))
        return self._order[1][position * self.rows_per_step : (position + 1) * self.rows_per_step]

    def _order_of_epoch(self, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(num_rows)
        # Sorted raw bits: numpy keeps bit generators' streams for ever, what shuffle() makes of them it may change.
        keys = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(num_rows)
        return np.argsort(keys, kind="stable")


def open_dataset(
    source: Path | str,
    *,
    vocab_size: int,
    sequence_length: int,
    rows_per_step: int,
    seed: int,
    model_folder: Path | str | None = None,
    tokenizer: TokenizerChoice = "auto",
    shuffle: bool = True,
    skip_invalid: bool = False,
) -> Dataset:
    """Read a data source into memory, tokenized.

    `source` is a text file, a JSONL file, a folder of either (text files make one stream, JSONL rows one sample
    each), or "synthetic": random tokens without end. `vocab_size` is the model's; `tokenizer` "auto" takes the one of
    `model_folder` and bytes where it has none. `skip_invalid` counts unreadable JSONL rows instead of refusing them.

    Raises InputError naming file, line and column for what cannot be read, the nearest name for a path that does not
    exist, and the reasons when no row is usable; UnsupportedChoice for formats not read yet.
    """
    if source == SYNTHETIC:
        return _synthetic(vocab_size, sequence_length, rows_per_step, seed)
    path = require_path(source, what="data")
    files, is_text = _source_files(path)
    opened = open_tokenizer(model_folder, vocab_size=vocab_size, choice=tokenizer)
    tally = Tally(str(path))
    rows: StreamRows | SampleRows
    if is_text:
        stream = read_stream(files, opened, tally)
        rows = StreamRows(stream, sequence_length)
        num_tokens, num_targets, fingerprint = len(stream), max(0, len(stream) - 1), zlib.crc32(stream.data)
        first, first_trained = stream[: sequence_length + 1], np.ones(sequence_length + 1, np.bool_)
    else:
        samples = read_samples(files, opened, tally, sequence_length=sequence_length, skip_invalid=skip_invalid)
        rows = SampleRows(samples)
        begins, end = samples.bounds[:-1], samples.bounds[1] if rows.num_rows else 0
        num_tokens = len(samples.tokens)
        num_targets = int(samples.trained.sum() - samples.trained[begins].sum())
        fingerprint = zlib.crc32(samples.bounds.data, zlib.crc32(samples.trained.data, zlib.crc32(samples.tokens.data)))
        first, first_trained = samples.tokens[:end], samples.trained[:end]
    tally.refuse_if_empty(rows.num_rows)
    report = DataReport(
        source=str(path),
        tokenizer=opened.name,
        num_files=tally.num_files,
        num_read=tally.num_read,
        skipped=dict(tally.skipped),
        first_skipped=tally.first_skipped,
        num_truncated=tally.num_truncated,
        longest_tokens=tally.longest_tokens,
        num_untrained_turns=tally.num_untrained_turns,
        num_rows=rows.num_rows,
        num_tokens=num_tokens,
        num_targets=num_targets,
        first_sample=shown_sample(opened, first, first_trained[: len(first)]),
    )
    return Dataset(rows, sequence_length, rows_per_step, seed, shuffle, opened.pad_id, report, opened, fingerprint)


def _source_files(path: Path) -> tuple[list[Path], bool]:
    """The files of a source, and whether they are text rather than JSONL."""
    if path.is_file():
        if path.suffix.lower() in _NOT_READ:
            raise UnsupportedChoice(
                f"{path}: {path.suffix} is not read yet; write .jsonl (one row a line) or plain text"
            )
        return [path], path.suffix.lower() != ".jsonl"
    text, rows = find_files(path, TEXT_SUFFIXES), find_files(path, (".jsonl",))
    if text and rows:
        raise InputError(
            f"{path}: holds text and JSONL ({text[0].name}, {rows[0].name}, ...); "
            "name one file, or a folder of one kind"
        )
    if not text and not rows:
        raise InputError(f"{path}: has no text files ({', '.join(TEXT_SUFFIXES[:7])}, ...) and no .jsonl")
    return (text, True) if text else (rows, False)


def _synthetic(vocab_size: int, sequence_length: int, rows_per_step: int, seed: int) -> Dataset:
    report = DataReport(
        source=SYNTHETIC,
        tokenizer="none",
        num_files=0,
        num_read=0,
        skipped={},
        first_skipped={},
        num_truncated=0,
        longest_tokens=0,
        num_untrained_turns=0,
        num_rows=0,
        num_tokens=0,
        num_targets=0,
        first_sample="random tokens",
    )
    rows = SyntheticRows(vocab_size, seed)
    return Dataset(rows, sequence_length, rows_per_step, seed, True, 0, report, None, vocab_size)
