"""Explanation: why a plan is as it is. What binds, what more of it would buy, and what other plans would cost."""

from rich.table import Table

from planner.alternatives import Alternative, alternatives
from planner.explain import WIDTH, rendered, seconds_text
from planner.firm import HOST_LAG, on_a_lagging_host
from planner.plan import Plan
from planner.sensitivity import Gain, Report, gains
from planner.task import Task
from simulator.schema import Schema
from simulator.units import format_bytes

# A tier of which so much is taken is full: what is left holds no layer's worth.
FULL = 0.97


class Explanation(Schema):
    """What `conveyor plan --explain` adds to a plan."""

    bottleneck: str  # the resource of which one percent more saves most
    full_tiers: tuple[str, ...]  # memory that the plan takes to its limit
    lag_share: float | None  # of the step, what a host adds whose updates lag; None without updates on the host
    gains: tuple[Gain, ...]
    alternatives: tuple[Alternative, ...]


def explanation(plan: Plan, *, report: Report = lambda words: None) -> Explanation:
    """Plan again with more of each resource, and with each decision turned another way; some seconds of searches."""
    more = gains(plan, report=report)
    limits, figures = plan.inputs.limits, plan.prediction
    taken = {"host memory": figures.host_peak_bytes / limits.host_memory_bytes}
    if plan.hardware.shared_memory:
        taken = {"memory": taken["host memory"]}
    else:
        taken["device memory"] = figures.device_peak_bytes / limits.device_memory_bytes
    return Explanation(
        bottleneck=max(more, key=lambda gain: gain.saved_per_percent).resource,
        full_tiers=tuple(tier for tier, share in sorted(taken.items()) if share >= FULL),
        lag_share=_lag_share(plan),
        gains=tuple(more),
        alternatives=tuple(alternatives(plan, report=report)),
    )


def _lag_share(plan: Plan) -> float | None:
    lagging = on_a_lagging_host(Task.of(plan).problem()) if "host" in plan.policy.optimizer_homes else None
    if lagging is None:
        return None
    return lagging.figures(plan.policy).step_seconds / plan.prediction.step_seconds - 1


def explanation_text(plan: Plan, found: Explanation, *, width: int = WIDTH) -> str:
    """The explanation as tables, `width` characters wide; every figure has its unit. It follows `plan_table`."""
    parts = [rendered(_gains(found), width), rendered(_alternatives(plan, found), width), _bottleneck(found)]
    return "\n\n".join(parts) + "\n"


def _gains(found: Explanation) -> Table:
    table = _table("what more would buy, planned again", "step time", "saves", "", "none below", "1 % more saves")
    for gain in found.gains:
        table.add_row(
            f"{gain.unit} ({gain.unit_share:.1%} more)" if gain.unit_share != 0.01 else gain.unit,
            seconds_text(gain.step_seconds),
            seconds_text(gain.saved_seconds) if _tells(gain.saved_share) else "nothing",
            f"{gain.saved_share:.2%}" if _tells(gain.saved_share) else "",
            seconds_text(gain.bound_seconds),
            f"{gain.saved_per_percent:.2%}" if _tells(gain.saved_per_percent) else "nothing",
        )
    return table


def _tells(share: float) -> bool:
    """Whether a share of the step is one that is printed."""
    return abs(share) >= 5e-5


def _alternatives(plan: Plan, found: Explanation) -> Table:
    shared = plan.hardware.shared_memory
    peaks = ("memory peak",) if shared else ("device peak", "host peak")
    table = _table("the next best of other kinds", "step time", "costs", "", *peaks)
    for other in found.alternatives:
        if other.prediction is None or other.extra_seconds is None or other.extra_share is None:
            table.add_row(other.kind, "does not fit")
            continue
        figures = other.prediction
        sizes = [figures.host_peak_bytes] if shared else [figures.device_peak_bytes, figures.host_peak_bytes]
        costs = seconds_text(other.extra_seconds) if _tells(other.extra_share) else "nothing"
        share = f"{other.extra_share:+.2%}" if _tells(other.extra_share) else ""
        table.add_row(other.kind, seconds_text(figures.step_seconds), costs, share, *map(format_bytes, sizes))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _bottleneck(found: Explanation) -> str:
    gain = next(gain for gain in found.gains if gain.resource == found.bottleneck)
    full = f"; {' and '.join(found.full_tiers)} is full" if found.full_tiers else "; no memory is full"
    binds = f"what binds: {gain.resource}, of which 1 % more saves {gain.saved_per_percent:.2%} of the step{full}"
    if found.lag_share is None:
        return binds
    longer = f"{found.lag_share:.2%} longer" if _tells(found.lag_share) else "no longer"
    return f"{binds}\nwhere updates on the host take {HOST_LAG - 1:.0%} longer than their price the step is {longer}"
