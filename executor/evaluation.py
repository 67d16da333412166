"""Evaluation during a run: its batches, and when its losses say that training should stop."""

import math
from collections.abc import Iterator, Sequence

from executor.data.dataset import Batch, Dataset
from simulator.errors import InputError


def all_batches(dataset: Dataset) -> Iterator[Batch]:
    """Every row of a data set once. Raises InputError for data without an end."""
    if dataset.steps_per_epoch is None:
        raise InputError("eval_data: synthetic data has no end; name a file or a folder")
    return (dataset.batch(step) for step in range(dataset.steps_per_epoch))


def evaluations_without_improvement(losses: Sequence[float]) -> int:
    """How many evaluations came after the one with the lowest loss. One that is not finite improves nothing."""
    best, since = math.inf, 0
    for loss in losses:
        best, since = (loss, 0) if loss < best else (best, since + 1)
    return since
