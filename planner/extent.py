"""Extent: the deepest model and the longest sequence that a machine trains, found by bisection, and planned.

Memory grows with depth and with length, so bisection finds the edge. It asks the program for the least memory, which is
the replay's; at the edge itself policies decide: what is called the largest was planned and replayed within the limits,
and for the next size no policy was found that does.
"""

from collections.abc import Callable
from typing import NamedTuple

from planner.infeasible import close, feasible
from planner.plan import Plan
from planner.sensitivity import Report
from planner.solve import solver_version
from planner.task import Task
from simulator.errors import InputError
from simulator.model import ModelSpec

# Beyond this depth replays take minutes, and nobody trains such models.
MAX_LAYERS = 1024
MAX_SEQUENCE_LENGTH = 2**24
# Lengths that are told apart: kernels like them, and prices do not change within.
SEQUENCE_STEP = 128


class Extent(NamedTuple):
    """The largest that fits: its plan, and the next size, which does not; None where the search ended at its limit."""

    size: int
    plan: Plan
    too_large: int | None


def largest_model(
    task: Task, with_layers: Callable[[int], ModelSpec], *, report: Report = lambda words: None
) -> Extent:
    """The most layers of the model's kind that the task's machine trains at the task's workload.

    `with_layers` gives the model of a depth. Raises InfeasiblePlan where not even one layer fits.
    """

    def deep(num_layers: int) -> Task:
        return task.with_model(with_layers(num_layers))

    return _largest(deep, start=task.model.num_layers, step=1, most=MAX_LAYERS, words="{} layers", report=report)


def longest_sequence(task: Task, *, report: Report = lambda words: None) -> Extent:
    """The longest sequence, in multiples of SEQUENCE_STEP, of which the machine trains one a step.

    Models with learned positions end with those. Raises InfeasiblePlan where not even the shortest fits.
    """
    positions = task.model.positions
    most = MAX_SEQUENCE_LENGTH if positions is None else positions.shape[0]
    if most < SEQUENCE_STEP:
        raise InputError(f"--longest-sequence: the model has learned {most} positions, fewer than {SEQUENCE_STEP}")

    def long(length: int) -> Task:
        return task.with_workload(sequence_length=length, tokens_per_step=length, micro_batch_rows=None)

    start = max(1, task.workload.sequence_length // SEQUENCE_STEP) * SEQUENCE_STEP
    return _largest(
        long, start=min(start, most), step=SEQUENCE_STEP, most=most, words="a sequence of {} tokens", report=report
    )


def _largest(task_of: Callable[[int], Task], *, start: int, step: int, most: int, words: str, report: Report) -> Extent:
    """Double from `start` until nothing fits, then halve what lies between, in multiples of `step`."""
    solver = solver_version() is not None
    end = most // step + 1

    def may_fit(count: int) -> bool:
        report(f"trying {words.format(f'{step * count:,}')}")
        return close(task_of(step * count).problem(), solver=solver)

    def fits(count: int) -> bool:
        report(f"replaying {words.format(f'{step * count:,}')}")
        return feasible(task_of(step * count).problem(), solver=solver) is not None

    # `low` may fit, or is none; `high` does not, or is beyond the end.
    low, high, count = 0, end, max(1, min(start, most) // step)
    while high - low > 1:
        low, high = (count, high) if may_fit(count) else (low, count)
        count = min(2 * low, end - 1) if high == end and low else (low + high) // 2
    stride = 1
    while low and not fits(low):
        low, high, stride = max(0, low - stride), low, 2 * stride
    while high - low > 1:
        count = (low + high) // 2
        low, high = (count, high) if fits(count) else (low, count)
    low = max(low, 1)  # where not even that fits, its plan says why
    report(f"planning {words.format(f'{step * low:,}')}")
    return Extent(step * low, task_of(step * low).plan(with_suggestions=True), None if high == end else step * high)
