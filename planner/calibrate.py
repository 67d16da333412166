"""Calibrate: fold what operations took in real runs back into the cost table, as medians by operation key.

A cost is what an operation takes alone, and the replay slows what runs at the same time. So where an operation was seen
alone those spans count; where it never was (the links under a host update, say), all of them do, which then holds a
little of the neighbours' load too. Bytes are not in a timeline: they stay as they were measured or estimated.
"""

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.plan import Plan
from simulator.build import build
from simulator.costs import MeasuredCost, OperationCosts, Pricing, operation_key, shape_hash
from simulator.errors import InputError
from simulator.hardware import HardwareProfile
from simulator.nearest import did_you_mean, nearest_path
from simulator.program import Buffer, Kind, Operation, Resource, Role, Tier
from simulator.timeline import Span, Timeline

# What slows an operation when it runs beside it: copies share the link and host DRAM, compute shares power and HBM.
SHARED = {
    Resource.COMPUTE: {Resource.H2D, Resource.D2H},
    Resource.H2D: {Resource.D2H, Resource.HOST},
    Resource.D2H: {Resource.H2D, Resource.HOST},
    Resource.HOST: {Resource.H2D, Resource.D2H},
}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run by name: the plan it followed and the steady step it measured."""

    name: str
    plan: Plan
    timeline: Timeline


def load_run(directory: Path | str) -> MeasuredRun:
    """Read plan.json and timeline.json of a run directory. Raises InputError naming the file."""
    directory = Path(directory)
    if not directory.is_dir():
        hint = did_you_mean(nearest_path(directory))
        raise InputError(f"calibrate: {directory} is no run directory{'' if directory.exists() else hint}")
    return MeasuredRun(
        directory.resolve().name, Plan.load(directory / "plan.json"), Timeline.load(directory / "timeline.json")
    )


def require_same_device(runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> None:
    """Raise InputError for runs of another device than the one that is planned for: its times say nothing here."""
    for run in runs:
        measured = run.plan.hardware.device
        if (measured.kind, measured.name) != (hardware.device.kind, hardware.device.name):
            raise InputError(
                f"calibrate: run {run.name!r} was measured on {measured.name!r}, and {hardware.name!r} computes on "
                f"{hardware.device.name!r}; name runs of the machine that is planned for"
            )


def fold_runs(runs: Sequence[MeasuredRun], costs: OperationCosts | None = None) -> OperationCosts:
    """A cost table with the runs' medians in place of what it had; `costs` None starts an empty one.

    Raises InputError for runs of another machine, layer shape, precision or mode than the table's or each other's.
    """
    if not runs:
        raise InputError("calibrate: no runs were given")
    seconds: dict[str, list[float]] = {}
    crowded: dict[str, list[float]] = {}
    bytes_of: dict[str, MeasuredCost] = {}
    for run in runs:
        costs = _table_for(run, costs)
        pricing = Pricing(run.plan.model, run.plan.inputs.workload, run.plan.policy, run.plan.hardware, costs)
        for key, operation, span, alone in _measured_operations(run):
            (seconds if alone else crowded).setdefault(key, []).append(max(0.0, span.end - span.start))
            if key not in bytes_of:
                bytes_of[key] = _bytes(pricing, key, operation)
    assert costs is not None
    names = tuple(run.name for run in runs)
    source = f"measured: median of runs {', '.join(names)}"
    entries = {
        key: cost.model_copy(update={"seconds": statistics.median(seconds.get(key) or crowded[key]), "source": source})
        for key, cost in bytes_of.items()
    }
    new_names = tuple(name for name in dict.fromkeys(names) if name not in costs.folded_runs)
    return costs.with_entries(entries, runs=new_names)


def _table_for(run: MeasuredRun, costs: OperationCosts | None) -> OperationCosts:
    workload = run.plan.inputs.workload
    expected = {
        "hardware": run.plan.inputs.hashes.hardware,
        "shape": shape_hash(run.plan.model),
        "precision": workload.precision,
        "compiled": workload.compiled,
    }
    if costs is None:
        return OperationCosts.model_validate(expected)
    different = [field for field, value in expected.items() if getattr(costs, field) != value]
    if different:
        raise InputError(
            f"calibrate: run {run.name!r} differs from the cost table in {', '.join(different)}; "
            "fold it into a table of its own"
        )
    return costs


def _measured_operations(run: MeasuredRun) -> Iterator[tuple[str, Operation, Span, bool]]:
    """(key, operation, span, whether nothing that shares its resources ran beside it)."""
    plan, spans = run.plan, run.timeline.spans
    steady = build(plan.model, plan.inputs.workload, plan.policy).steady
    operations = {operation.name: operation for operation in steady}
    unknown = [span.name for span in spans if span.name not in operations]
    if unknown:
        raise InputError(f"calibrate: the timeline of run {run.name!r} has operations its plan lacks: {unknown[:3]}")
    working = {resource: _Working(spans, resource) for resource in Resource}
    for span in spans:
        operation = operations[span.name]
        alone = not any(working[rival].during(span) for rival in SHARED.get(operation.resource, ()))
        yield operation_key(operation, plan.model, plan.inputs.workload, plan.policy), operation, span, alone


class _Working:
    """When a resource worked. Its operations follow one another."""

    def __init__(self, spans: Sequence[Span], resource: Resource) -> None:
        ordered = sorted((span.start, span.end) for span in spans if span.resource == resource.value)
        self.starts = [start for start, _ in ordered]
        self.ends = [end for _, end in ordered]

    def during(self, span: Span) -> bool:
        before = bisect_left(self.starts, span.end)
        return before > 0 and self.ends[before - 1] > span.start


def _bytes(pricing: Pricing, key: str, operation: Operation) -> MeasuredCost:
    """The entry as it is, or one with estimated bytes: an entry without them would count as keeping nothing."""
    if key in pricing.entries:
        return pricing.entries[key]
    kept = 0
    if operation.kind is Kind.FORWARD and operation.level not in ("", "input"):
        saved = Buffer("saved", Tier.DEVICE, Role.SAVED, 0, operation.block, 0, False, operation.level)
        kept = pricing.size(saved)
    return MeasuredCost(seconds=0.0, kept_bytes=kept, source="estimated")
