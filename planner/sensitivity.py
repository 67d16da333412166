"""Sensitivity: what one more unit of each resource would buy, by planning again on a machine that has it.

The present plan is priced again there and stands where the search finds nothing faster: more of a resource is never
worse than what one already has. What no policy can beat there is the most that the resource can buy. All keep the
plan's micro-batch size: so they train the same numbers, and take a fraction of the outlines to search.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from planner.plan import Plan
from planner.search import no_slower
from planner.task import Task
from simulator.rates import link_bytes_per_second
from simulator.schema import Schema
from simulator.units import GIB

Report = Callable[[str], None]


class Gain(Schema):
    """The step on a machine with one more unit of a resource."""

    resource: str
    unit: str  # "1 GiB of HBM"
    unit_share: float  # of what there is now
    repriced_seconds: float  # the present plan's step there
    step_seconds: float  # the step of the plan that was found there
    bound_seconds: float  # no policy steps faster there
    saved_seconds: float  # of the present step
    saved_share: float

    @property
    def saved_per_percent(self) -> float:
        """Share of the step that one percent more of the resource saves, as far as one unit tells."""
        return 0.01 * self.saved_share / self.unit_share


class _Unit(NamedTuple):
    resource: str
    unit: str
    share: float
    task: Task


def gains(plan: Plan, *, report: Report = lambda words: None) -> list[Gain]:
    """What one more GiB of each memory, one more GB/s of link and host DRAM, and 1 % more compute would buy."""
    found = []
    task = Task.of(plan).with_workload(micro_batch_rows=plan.policy.micro_batch_rows)
    for unit in _units(task):
        report(f"planning with {unit.unit} more")
        richer = no_slower(unit.task.plan(), [plan.policy])
        seconds, step = plan.prediction.step_seconds, richer.prediction.step_seconds
        found.append(
            Gain(
                resource=unit.resource,
                unit=unit.unit,
                unit_share=unit.share,
                repriced_seconds=unit.task.problem().figures(plan.policy).step_seconds,
                step_seconds=step,
                bound_seconds=richer.bound.step_seconds,
                saved_seconds=seconds - step,
                saved_share=1 - step / seconds,
            )
        )
    return found


def _units(task: Task) -> Iterator[_Unit]:
    """The same machine with one more unit of each resource. Where memory is shared it is one resource."""
    limits, hardware = task.limits, task.hardware
    device, host = limits.device_memory_bytes, limits.host_memory_bytes
    if hardware.shared_memory:
        more = task.with_memory(device_bytes=device + GIB, host_bytes=host + GIB)
        yield _Unit("memory", "1 GiB of memory", GIB / host, more)
    else:
        more = task.with_memory(device_bytes=device + GIB)
        yield _Unit("device memory", "1 GiB of device memory", GIB / device, more)
        more = task.with_memory(host_bytes=host + GIB)
        yield _Unit("host memory", "1 GiB of host memory", GIB / host, more)
    share = 1e9 / link_bytes_per_second(hardware)
    dram_share = 1e9 / hardware.host_dram_bytes_per_second.value
    if hardware.shared_memory:
        yield _Unit(
            "copies in memory", "1 GB/s of copies in memory", share,
            task.with_rates(link=1 + share, host_dram=1 + dram_share),
        )  # fmt: skip
    else:
        yield _Unit("link", "1 GB/s of link each way", share, task.with_rates(link=1 + share))
        yield _Unit("host DRAM", "1 GB/s of host DRAM", dram_share, task.with_rates(host_dram=1 + dram_share))
    words = "GPU compute" if hardware.device.kind == "cuda" else "CPU compute"
    yield _Unit(words, f"1 % of {words}", 0.01, task.with_rates(compute=1.01))
