"""Sweep: the plan as one thing changes, the step's size or the machine, one value after another."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from planner.plan import Plan
from planner.search import no_slower
from planner.sensitivity import Report
from planner.task import Task
from simulator.errors import InfeasiblePlan, InputError
from simulator.nearest import did_you_mean, nearest_name
from simulator.rates import link_bytes_per_second
from simulator.units import format_bytes, parse_bytes

MAX_VALUES = 64

Unit = Literal["tokens", "bytes", "bytes/s"]


class Axis(NamedTuple):
    """Something that can be swept: its unit, and a task with a value of it.

    `richer`: more of it is more to plan with, so the plan of one value serves for all larger ones.
    """

    words: str
    unit: Unit
    richer: bool
    change: Callable[[Task, int], Task]


AXES: dict[str, Axis] = {
    "tokens-per-step": Axis("tokens in a step", "tokens", False, lambda t, v: t.with_workload(tokens_per_step=v)),
    "sequence-length": Axis("tokens in a sequence", "tokens", False, lambda t, v: t.with_workload(sequence_length=v)),
    "device-memory": Axis("device memory", "bytes", True, lambda t, v: t.with_memory(device_bytes=v)),
    "host-memory": Axis("host memory", "bytes", True, lambda t, v: t.with_memory(host_bytes=v)),
    "link-bandwidth": Axis(
        "link, large copies one way", "bytes/s", True,
        lambda t, v: t.with_rates(link=v / link_bytes_per_second(t.hardware)),
    ),
    "host-bandwidth": Axis(
        "host DRAM", "bytes/s", True,
        lambda t, v: t.with_rates(host_dram=v / t.hardware.host_dram_bytes_per_second.value),
    ),
}  # fmt: skip


class Point(NamedTuple):
    """One value with its plan, or with why there is none."""

    value: int
    plan: Plan | None
    infeasible: str = ""


class Sweep(NamedTuple):
    """Points in ascending order."""

    key: str
    points: tuple[Point, ...]

    @property
    def axis(self) -> Axis:
        return AXES[self.key]


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """Key and values, ascending, of `KEY=VALUES`. Raises InputError with one sentence.

    VALUES are separated by commas; each is a value, `LOW..HIGH` (LOW, doubled until HIGH, and HIGH) or `LOW..HIGH:N` (N
    values, evenly spaced). Tokens are numbers, memory has a size (`24GiB`), bandwidth a size a second (`25GB/s`).
    """
    key, equals, values = text.partition("=")
    key = key.strip().replace("_", "-")
    if key not in AXES:
        hint = did_you_mean(nearest_name(key, list(AXES))) or f"; it takes {', '.join(AXES)}"
        raise InputError(f"--what-if {text}: there is no {key!r} to change{hint}")
    if not equals or not values.strip():
        raise InputError(f"--what-if {text}: name the values to try, as {key}={_EXAMPLES[AXES[key].unit]}")
    found: set[int] = set()
    for part in values.split(","):
        found |= set(_values(text, part.strip(), AXES[key].unit))
    if len(found) > MAX_VALUES:
        raise InputError(f"--what-if {text}: has {len(found)} values, each of them a plan; name at most {MAX_VALUES}")
    return key, tuple(sorted(found))


_EXAMPLES: dict[str, str] = {
    "tokens": "8192..131072",
    "bytes": "24GiB,48GiB..96GiB:4",
    "bytes/s": "16GB/s,32GB/s,64GB/s",
}


def _values(text: str, part: str, unit: Unit) -> Iterator[int]:
    match = re.fullmatch(r"(?P<low>[^:]+?)\.\.(?P<high>[^:]+?)(?::(?P<number>.*))?", part)
    if match is None:
        yield _value(text, part, unit)
        return
    low, high = _value(text, match["low"], unit), _value(text, match["high"], unit)
    if low >= high:
        raise InputError(f"--what-if {text}: {part!r} does not go up; write the smaller value first")
    if match["number"] is None:
        while low < high:
            yield low
            low *= 2
        yield high
        return
    number = match["number"].strip()
    if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < 2:
        raise InputError(f"--what-if {text}: {number!r} is not how many values to try, which are 2 or more")
    if int(number) > MAX_VALUES:
        raise InputError(f"--what-if {text}: has {number} values, each of them a plan; name at most {MAX_VALUES}")
    for index in range(int(number)):
        yield round(low + (high - low) * index / (int(number) - 1))


def _value(text: str, part: str, unit: Unit) -> int:
    """One value in base units."""
    if unit == "tokens":
        if not re.fullmatch(r"[0-9]{1,12}", part) or int(part) == 0:
            raise InputError(f"--what-if {text}: {part!r} is not a whole number of tokens")
        return int(part)
    size = part.removesuffix("/s") if unit == "bytes/s" else part
    if (unit == "bytes/s" and size == part) or re.fullmatch(r"[0-9.\s]*", size):
        raise InputError(f"--what-if {text}: {part!r} has no unit; write it as in {_EXAMPLES[unit]}")
    num_bytes = parse_bytes(size.strip(), name=f"--what-if {text}")
    if num_bytes == 0:
        raise InputError(f"--what-if {text}: {part!r} leaves nothing to plan with")
    return num_bytes


def sweep(task: Task, key: str, values: tuple[int, ...], *, report: Report = lambda words: None) -> Sweep:
    """Plan with each value. Raises InputError for a value with which the task makes no sense, before any planning."""
    axis = AXES[key]
    tasks: dict[int, Task] = {}
    for value in sorted(set(values)):
        try:
            tasks[value] = axis.change(task, value)
        except InputError as error:
            raise InputError(f"--what-if {key}={format_value(value, axis.unit)}: {error}") from error
    points: list[Point] = []
    for number, (value, changed) in enumerate(tasks.items(), start=1):
        report(f"{key} {format_value(value, axis.unit)}: plan {number} of {len(tasks)}")
        try:
            points.append(Point(value, changed.plan()))
        except InfeasiblePlan as error:
            points.append(Point(value, None, str(error)))
    if axis.richer:
        report(f"{key}: each plan at the values beside its own")
        points = _shared(_shared(points[::-1])[::-1])
    return Sweep(key, tuple(points))


def _shared(points: Sequence[Point]) -> list[Point]:
    """Each point with the plan of the one before where that is faster there; ascending, no curve then goes back."""
    found: list[Point] = []
    for point in points:
        if found and point.plan is not None and (before := found[-1].plan) is not None:
            point = point._replace(plan=no_slower(point.plan, [before.policy]))
        found.append(point)
    return found


def format_value(value: float, unit: Unit) -> str:
    """A value with its unit, for people."""
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    if unit == "bytes":
        return _format_bytes(value)
    return f"{value / 1e9:.4g} GB/s" if math.isfinite(value) else "endless"


def _format_bytes(value: float) -> str:
    """With as many digits as tell neighbours apart: `24.0 GiB`, `5.35 GiB`."""
    rounded = format_bytes(value)
    if value < 1024:
        return rounded
    number, unit = rounded.split()
    exact = f"{value / parse_bytes(f'1{unit}'):.4g}"
    return rounded if float(exact) == float(number) else f"{exact} {unit}"
