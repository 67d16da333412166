"""Outlines: what is enumerated outside the program, smallest first where order is free.

Cuts into groups are as even as can be, larger groups first. A first group that is larger than all others takes as much
memory at its peak as an even cut with groups of its size, gives updates the same window, and loads streamed weights
more often: the even cut is never worse, so cuts like 3,1,1,1 are left out.

Depth-first layers are for one group: with several, all layers have sums of their own anyway, and groups of one
micro-batch are depth-first from the lowest layer to the head. How many there are the program decides.

What layers save waits on the host in groups of one micro-batch: there it comes back within its own forward and
backward, and takes the room of one micro-batch.
"""

from collections.abc import Iterator
from typing import NamedTuple

from simulator.model import ModelSpec
from simulator.policy import Policy, Workload

# Every choice below this; above it a few: what they differ in changes little.
DENSE = 8


class Outline(NamedTuple):
    """What is enumerated: rows of a micro-batch, micro-batches in each group, every how manyth layer input is kept.

    And whether the topmost layers are depth-first: at least one, and not all; and whether what a layer saves beside its
    input waits on the host: of at least one.
    """

    micro_batch_rows: int
    groups: tuple[int, ...]
    checkpoint_interval: int = 1
    depth_first: bool = False
    saved_waits: bool = False

    @classmethod
    def of(cls, policy: Policy) -> "Outline":
        """The outline that a policy belongs to."""
        kept = zip(policy.activation_homes, policy.save_levels, strict=True)
        return cls(
            policy.micro_batch_rows,
            policy.groups,
            policy.checkpoint_interval,
            depth_first=policy.depth_first_layers > 0,
            saved_waits=any(home == "host" and level != "input" for home, level in kept),
        )

    @property
    def plain(self) -> bool:
        """Whether all layers are passed alike, and only inputs wait."""
        return not self.depth_first and not self.saved_waits

    @property
    def num_micro_batches(self) -> int:
        return sum(self.groups)


def outlines(model: ModelSpec, workload: Workload) -> list[Outline]:
    """Every outline that the search considers."""
    sizes = micro_batch_sizes(workload)
    found = [
        Outline(rows, groups, interval)
        for rows in sizes
        for groups in cuts(workload.rows_per_step // rows)
        for interval in checkpoint_intervals(max(1, len(model.backward_layers)))
    ]
    if may_be_depth_first(model):
        numbers = {rows: workload.rows_per_step // rows for rows in sizes}
        found += [Outline(rows, (number,), depth_first=True) for rows, number in numbers.items() if number > 1]
        found += [Outline(rows, (1,) * number, saved_waits=True) for rows, number in numbers.items()]
    return found


def may_be_depth_first(model: ModelSpec) -> bool:
    """Whether depth-first layers, and saved activations that wait on the host, are considered: where all layers are
    alike, so that counts say which they are."""
    one_kind = len({model.kind_of_block[layer] for layer in model.layers}) == 1
    return one_kind and model.num_layers > 1 and model.block(1).trained


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
