"""Evaluation during a run: what it is made on, and when its losses say that training should stop."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor.data.dataset import Batch, Dataset, Rows
from simulator.errors import InputError

# Not the run's seed: runs of several seeds are compared on the same rows.
_HELD_OUT_SEED = 0x0DD


@dataclass(frozen=True)
class ChosenRows:
    """Some of a data set's rows, in a given order."""

    rows: Rows
    chosen: npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.chosen)

    def fill(self, row: int, tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> int:
        """Write a row over padding and masked labels. Returns how many tokens are not padding."""
        return self.rows.fill(int(self.chosen[row]), tokens, labels)


def hold_out(dataset: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """A data set cut in two: to train on, and `fraction` of its rows, at least one, to evaluate on, never shuffled.

    The same rows are held out in every run on the same data. Raises InputError where nothing would be left to train on.
    """
    num_rows = dataset.rows.num_rows
    if num_rows is None:
        raise InputError("eval_fraction: synthetic data has no end, so no part of it; leave eval_fraction out")
    held = max(1, math.floor(fraction * num_rows))
    if held >= num_rows:
        raise InputError(f"eval_fraction: {fraction:g} of {num_rows} rows leaves nothing to train on; add data")
    order = np.argsort(np.random.Philox(_HELD_OUT_SEED).random_raw(num_rows), kind="stable")
    kept, out = np.sort(order[held:]), np.sort(order[:held])
    trained = dataclasses.replace(dataset, rows=ChosenRows(dataset.rows, kept))
    return trained, dataclasses.replace(dataset, rows=ChosenRows(dataset.rows, out), shuffle=False)


def all_batches(dataset: Dataset) -> Iterator[Batch]:
    """Every row of a data set once."""
    if dataset.steps_per_epoch is None:
        raise InputError("eval_data: synthetic data has no end; name a file or a folder")
    return (dataset.batch(step) for step in range(dataset.steps_per_epoch))


def evaluations_without_improvement(losses: Sequence[float]) -> int:
    """How many evaluations came after the one with the lowest loss. One that is not finite improves nothing."""
    best, since = math.inf, 0
    for loss in losses:
        best, since = (loss, 0) if loss < best else (best, since + 1)
    return since
