"""Batches by step: `Dataset.batch(step)` is a function of the data, the seed and the step, so resuming is exact."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor.data.corpus import Corpus, DataChoices, read_corpus
from executor.data.overlap import also_trained
from executor.data.report import DataReport
from executor.data.rows import MASKED_LABEL, Rows, SyntheticRows, sample_rows
from executor.tokenizer import BoolArray, ByteTokenizer, FolderTokenizer
from simulator.errors import InputError

SYNTHETIC = "synthetic"
_HELD_OUT_SEED = 0x0DD  # not the run's: runs of several seeds are compared on the same samples


@dataclass(frozen=True)
class Batch:
    """One step's rows. `labels[r, i]` is the token after `tokens[r, i]`, or -100 where nothing is to be learned.

    `positions[r, i]` is the token's place in its document, from 0: a 0 begins another document, which must not see
    those before it. Padding at a row's end is one more document. Without positions a row is one document.
    `num_tokens` counts what is not padding.
    """

    tokens: torch.Tensor  # int64 [rows, sequence]
    labels: torch.Tensor  # int64 [rows, sequence]
    num_targets: int  # labels that are not -100; at least 1
    num_tokens: int
    positions: torch.Tensor | None = None  # int64 [rows, sequence]


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
    content: Mapping[str, Any]  # what decides tokens, masks and how they lie in rows
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
        num_tokens = sum(self.rows.fill(int(row), tokens[i], labels[i], positions[i]) for i, row in enumerate(chosen))
        num_targets = int((labels != MASKED_LABEL).sum())
        return Batch(
            torch.from_numpy(tokens), torch.from_numpy(labels), num_targets, num_tokens, torch.from_numpy(positions)
        )

    def settings(self) -> dict[str, Any]:
        """All that decides the content and order of batches: equal settings give equal batches."""
        return {
            **self.content,
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
            order = _drawn_order(num_rows, self.seed, epoch) if self.shuffle else np.arange(num_rows)
            self._order = (epoch, order)
        return self._order[1][position * self.rows_per_step : (position + 1) * self.rows_per_step]


def open_dataset(
    source: Path | str,
    *,
    vocab_size: int,
    sequence_length: int,
    rows_per_step: int,
    seed: int,
    model_folder: Path | str | None = None,
    choices: DataChoices | None = None,
    shuffle: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """A data source as batches, tokenized into a cache on disk unless it is there already.

    `source` is a file or a folder of text or rows, `hub:owner/name`, or "synthetic": random tokens without end.
    `vocab_size` is the model's; its tokenizer lies in `model_folder`, and bytes are tokens where it has none.

    Raises InputError naming file, line and column for what cannot be read, the nearest name for a path that does not
    exist, and the reasons when no row is usable; UnsupportedChoice for formats that are not read.
    """
    if source == SYNTHETIC:
        return _synthetic(vocab_size, sequence_length, rows_per_step, seed)
    corpus = read_corpus(
        source, vocab_size=vocab_size, sequence_length=sequence_length, model_folder=model_folder,
        choices=choices or DataChoices(), say=say,
    )  # fmt: skip
    return _dataset(corpus, np.ones(len(corpus.documents), np.bool_), rows_per_step, seed, shuffle=shuffle)


def open_datasets(
    source: Path | str,
    *,
    eval_source: Path | str | None = None,
    eval_fraction: float | None = None,
    vocab_size: int,
    sequence_length: int,
    rows_per_step: int,
    seed: int,
    model_folder: Path | str | None = None,
    choices: DataChoices | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Dataset, Dataset | None]:
    """The data to train on and those to evaluate on, which are never trained on and never shuffled.

    They come from `eval_source`, read like `source`, or are held out from it: `eval_fraction` of the samples, the same
    ones in every run on the same data. Where that is not one sample, it is the last of their parts, at least one.
    None where neither is given.

    Raises InputError as `open_dataset` does, and where nothing would be left on one side, or be on both.
    """
    if eval_source is not None and eval_fraction is not None:
        raise InputError("eval_data and eval_fraction: name the data to evaluate on, or hold some out, not both")
    if SYNTHETIC in (source, eval_source) and (eval_fraction, eval_source) != (None, None):
        raise InputError("eval_data and eval_fraction: synthetic data teaches nothing that could be evaluated")
    if source == SYNTHETIC:
        return _synthetic(vocab_size, sequence_length, rows_per_step, seed), None
    choices = choices or DataChoices()

    def read(name: Path | str, what: str) -> Corpus:
        return read_corpus(
            name, what=what, vocab_size=vocab_size, sequence_length=sequence_length, model_folder=model_folder,
            choices=choices, say=say,
        )  # fmt: skip

    corpus = read(source, "data")
    every = np.ones(len(corpus.documents), np.bool_)
    if eval_source is not None:
        other = read(eval_source, "eval_data")
        _require_apart(corpus, other)
        whole = np.ones(len(other.documents), np.bool_)
        trained = _dataset(corpus, every, rows_per_step, seed, shuffle=True, evaluated=(other, whole))
        return trained, _dataset(other, whole, rows_per_step, seed, shuffle=False)
    if eval_fraction is None:
        return _dataset(corpus, every, rows_per_step, seed, shuffle=True), None
    held_out = _held_out(corpus, eval_fraction)
    return (
        _dataset(corpus, ~held_out, rows_per_step, seed, shuffle=True, evaluated=(corpus, held_out)),
        _dataset(corpus, held_out, rows_per_step, seed, shuffle=False),
    )


def _dataset(
    corpus: Corpus,
    mask: BoolArray,
    rows_per_step: int,
    seed: int,
    *,
    shuffle: bool,
    evaluated: tuple[Corpus, BoolArray] | None = None,
) -> Dataset:
    """The documents of a corpus that the mask marks, as batches. Its report counts those that are `evaluated` too."""
    choices, tokenizer = corpus.choices, corpus.tokenizer
    documents = corpus.documents.chosen(mask)
    rows = sample_rows(
        corpus.samples, documents, sequence_length=corpus.sequence_length, packing=choices.packing
    )  # fmt: skip
    content: dict[str, Any] = {"fingerprint": corpus.samples.fingerprint, "long_samples": choices.long_samples}
    content["packing"] = choices.packing
    content["held_out"] = int((~mask).sum())
    # Of what is evaluated the others are not held out: they are what is trained on.
    num_held_out = content["held_out"] if shuffle else 0
    report = corpus.report(documents, num_rows=rows.num_rows, num_held_out=num_held_out)
    if evaluated is not None:
        other, others = evaluated[0], evaluated[0].documents.chosen(evaluated[1])
        common = np.flatnonzero(also_trained(others, other.samples, documents, corpus.samples))
        if len(common):
            first = other.place(int(others.samples[common[0]]))
            report = report.model_copy(update={"num_also_trained": len(common), "first_also_trained": first})
    return Dataset(
        rows, corpus.sequence_length, rows_per_step, seed, shuffle, tokenizer.pad_id, report, tokenizer, content
    )


def _held_out(corpus: Corpus, fraction: float) -> BoolArray:
    """Which documents are held out: those of samples drawn at random, or the last parts where there are few samples."""
    if not 0 < fraction < 1:
        raise InputError(f"eval_fraction: {fraction} is no part of the data; set it between 0 and 1")
    samples = np.unique(corpus.documents.samples)
    count = round(fraction * len(samples))
    if 0 < count < len(samples):
        drawn = samples[_drawn_order(len(samples), _HELD_OUT_SEED, 0)[:count]]
        return np.isin(corpus.documents.samples, drawn)
    count = max(1, round(fraction * len(corpus.documents)))
    if count >= len(corpus.documents):
        raise InputError(
            f"eval_fraction: {fraction} of {len(samples)} samples, {len(corpus.documents)} documents of a row each, "
            "leaves nothing to train on; set another, or name eval_data"
        )
    return np.arange(len(corpus.documents)) >= len(corpus.documents) - count


def _require_apart(training: Corpus, evaluation: Corpus) -> None:
    """Raise InputError where the data to evaluate on are trained on."""
    common = {file.resolve() for file in training.source.files} & {file.resolve() for file in evaluation.source.files}
    # Parts of one file of a Hugging Face dataset may lie apart.
    if training.samples.fingerprint == evaluation.samples.fingerprint or (common and not training.source.dataset):
        what = min(common) if common else evaluation.source.name
        raise InputError(f"eval_data: {what} is also trained on; keep the two apart, or set eval_fraction")


def _drawn_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # Sorted raw bits: numpy keeps bit generators' streams for ever, what shuffle() makes of them it may change.
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable")


def _synthetic(vocab_size: int, sequence_length: int, rows_per_step: int, seed: int) -> Dataset:
    report = DataReport(
        source=SYNTHETIC,
        tokenizer="none",
        num_files=0,
        num_read=0,
        kinds={},
        skipped={},
        first_skipped={},
        num_truncated=0,
        num_split=0,
        longest_tokens=0,
        longest_at="",
        num_untrained_turns=0,
        packed=False,
        num_rows=0,
        num_tokens=0,
        num_targets=0,
        num_places=0,
        first_sample="random tokens",
    )
    rows, content = SyntheticRows(vocab_size, seed), {"fingerprint": vocab_size}
    return Dataset(rows, sequence_length, rows_per_step, seed, True, 0, report, None, content)
