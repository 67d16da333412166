"""Outlines: what is enumerated outside the program, smallest first where order is free.

Cuts into groups are as even as can be, larger groups first. A first group that is larger than all others takes as much
memory at its peak as an even cut with groups of its size, gives updates the same window, and loads streamed weights
more often: the even cut is never worse, so cuts like 3,1,1,1 are left out.
"""

from collections.abc import Iterator

from planner.coefficients import Outline
from simulator.model import ModelSpec
from simulator.policy import Workload

# Every choice below this; above it a few: what they differ in changes little.
DENSE = 8


def outlines(model: ModelSpec, workload: Workload) -> list[Outline]:
    """Every outline that the search considers."""
    return [
        Outline(rows, groups, interval)
        for rows in micro_batch_sizes(workload)
        for groups in cuts(workload.rows_per_step // rows)
        for interval in checkpoint_intervals(max(1, len(model.backward_layers)))
    ]


def checkpoint_intervals(num_layers: int) -> list[int]:
    """Intervals that keep fewer layer inputs at their peak than all smaller ones, which recompute less."""
    found, fewest = [], num_layers + 1
    for interval in range(1, num_layers + 1):
        segments = [min(interval, num_layers - start) for start in range(0, num_layers, interval)]
        peak = max(index + length for index, length in enumerate(segments))
        if peak < fewest:
            found.append(interval)
            fewest = peak
    return found


def micro_batch_sizes(workload: Workload) -> list[int]:
    """Rows of a micro-batch: all divisors of a step's rows, or the number that the user pinned."""
    if workload.micro_batch_rows is not None:
        return [workload.micro_batch_rows]
    rows = workload.rows_per_step
    return [size for size in range(1, rows + 1) if rows % size == 0]


def cuts(num_micro_batches: int) -> list[tuple[int, ...]]:
    """Even cuts: into one group up to one micro-batch a group."""
    return [even_cut(num_micro_batches, groups) for groups in sorted(set(_numbers_of_groups(num_micro_batches)))]


def even_cut(num_micro_batches: int, num_groups: int) -> tuple[int, ...]:
    """Groups that differ by at most one micro-batch, larger ones first."""
    size, larger = divmod(num_micro_batches, num_groups)
    return (size + 1,) * larger + (size,) * (num_groups - larger)


def _numbers_of_groups(num_micro_batches: int) -> Iterator[int]:
    yield from range(1, min(num_micro_batches, DENSE) + 1)
    for size in range(1, min(num_micro_batches, DENSE) + 1):
        yield -(-num_micro_batches // size)
    groups = DENSE
    while groups < num_micro_batches:
        yield groups
        groups *= 2
