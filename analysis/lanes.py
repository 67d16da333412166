"""Figures over the time of one step: what every resource did, and how full every memory tier was.

Both timelines are laid out so that the compute resource's last operation ends with the step. A steady step repeats:
what reaches over the step's edge (a host update, a batch loaded ahead) goes on at the other side.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes

from analysis.style import (
    BLACK,
    KINDS,
    LANE_GREY,
    MEMORY_FILL,
    VERMILLION,
    Drawing,
    Look,
    edge_colour,
    legend_columns,
    looks,
    new_figure,
    settings,
)
from analysis.tables import format_duration, memory_limits, peak_bytes, time_unit
from executor.run_directory import Run
from simulator.errors import InputError
from simulator.timeline import MemoryPoint, Span, Timeline
from simulator.units import GIB, KIB, MIB, format_bytes

LANES = {
    "compute": "compute",
    "h2d": "h2d",
    "d2h": "d2h",
    "host": "host",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
}
TIERS = {"device": "Device memory", "host": "Host memory", "nvme": "NVMe"}

# Operations narrower than this share of a step get no outline of their own: outlines would be all one sees.
_OUTLINED_SHARE = 0.004
# What is shorter than this share of a step would be less than half a pixel: bars are drawn this wide, gaps closed.
_SEEN_SHARE = 0.0004
# An SVG with more shapes than this is slow to show: the shapes are drawn as pixels, the text stays text.
_MAX_SHAPES = 4000


def timelines(run: Run) -> Drawing:
    """Predicted and measured lanes of one step one above the other. Raises InputError for a run without timelines."""
    present = _present(run)
    spans = [span for timeline in present.values() for span in timeline.spans]
    resources = _ordered({span.resource for span in spans}, LANES)
    kinds = looks({span.kind for span in spans}, KINDS)
    outlined = _outlined(present.values(), kinds)
    end = max(timeline.step_seconds for timeline in present.values())
    unit, scale = time_unit(end)
    with settings():
        figure = new_figure(1.1 + (0.25 + 0.3 * len(resources)) * len(present))
        axes = figure.subplots(len(present), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (title, timeline) in zip(axes, present.items(), strict=True):
            _draw_lanes(axis, timeline, resources, kinds, outlined, scale, rasterized=len(spans) > _MAX_SHAPES)
            which = "the recorded step, " if title == "measured" else ""
            axis.set_title(f"{title}: {which}{format_duration(timeline.step_seconds)}")
            axis.set_xlim(0, end * scale)
        axes[-1].set_xlabel(f"time since the step began ({unit})")
        named: dict[Look, list[str]] = {}
        for kind, look in kinds.items():
            named.setdefault(look, []).append(kind.replace("_", " "))
        labels = [", ".join(names) for names in named.values()]
        handles = [look.patch(label) for look, label in zip(named, labels, strict=True)]
        figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns(labels))
    caption = (
        "One steady step: what each resource ran, and how much of the step it was busy. Grey "
        "is idle. What reaches over an edge of the step goes on at the other."
    )
    alt = " ".join(
        f"{title.capitalize()}, {format_duration(timeline.step_seconds)} a step: "
        + ", ".join(f"{LANES.get(name, name)} busy {_busy(timeline, name)}" for name in resources)
        + "."
        for title, timeline in present.items()
    )
    return Drawing(f"{run.name}-timelines", "One step, operation by operation", caption, alt, figure)


def memory(run: Run) -> Drawing:
    """Bytes over one step, a panel a tier, with the plan's limits. Raises InputError for a run without timelines."""
    present = _present(run)
    tiers = _ordered({tier for timeline in present.values() for tier in timeline.memory}, TIERS)
    if not tiers:
        raise InputError(f"{run.name}: its timelines say nothing of memory")
    limits = memory_limits(run.record)
    end = max(timeline.step_seconds for timeline in present.values())
    unit, scale = time_unit(end)
    with settings():
        figure = new_figure(0.8 + 1.7 * len(tiers))
        axes = figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0]
        for axis, tier in zip(axes, tiers, strict=True):
            curves = {title: _curve(timeline, tier) for title, timeline in present.items()}
            _draw_memory(axis, curves, scale, limits.get(tier))
            axis.set_title(_memory_title(run, tier, limits.get(tier)), fontsize=9)
            axis.set_xlim(0, end * scale)
        axes[-1].set_xlabel(f"time since the step began ({unit})")
        handles, labels = axes[0].get_legend_handles_labels()
        for axis in axes[1:]:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles.append(handle)
                    labels.append(label)
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    caption = (
        "Memory over one steady step: what the step's buffers take. Peaks are those of the whole run, with the "
        "device's context and the bare process, which the curves leave out."
    )
    alt = ". ".join(_memory_title(run, tier, limits.get(tier)).replace("\n", ", ") for tier in tiers) + "."
    return Drawing(f"{run.name}-memory", "Memory over one step", caption, alt, figure)


def _present(run: Run) -> dict[str, Timeline]:
    pair = {"predicted": run.predicted, "measured": run.measured}
    present = {title: timeline for title, timeline in pair.items() if timeline is not None}
    if not present:
        raise InputError(f"{run.name}: has no timelines to draw")
    return present


def size_unit(num_bytes: float) -> tuple[str, int]:
    """The binary unit in which `num_bytes` read best, and its bytes."""
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", MIB) if num_bytes >= MIB else ("KiB", KIB)


def _ordered(names: set[str], known: Mapping[str, str]) -> list[str]:
    return [name for name in known if name in names] + sorted(names - set(known))


def _origin(timeline: Timeline) -> float:
    """When the step begins, on the timeline's own clock: one period before compute's last operation ends."""
    ends = [span.end for span in timeline.spans if span.resource == "compute"]
    return max(ends) - timeline.step_seconds if ends else 0.0


def _pieces(start: float, end: float, period: float) -> Iterator[tuple[float, float]]:
    """(start, duration) of a span inside the step, cut where it reaches over the edges."""
    duration = max(end - start, 0.0)
    if duration >= period:
        yield 0.0, period
        return
    rounding = 1e-9 * period  # what lies beyond an edge by no more than this lies on it
    start -= math.floor(start / period) * period
    if period - start <= rounding:
        start = 0.0
    inside = min(duration, period - start)
    yield start, inside
    if duration - inside > rounding:
        yield 0.0, duration - inside


def _merged(pieces: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """(start, duration) of bars: neighbours no further apart than `gap` become one."""
    bars: list[tuple[float, float]] = []
    for start, duration in sorted(pieces):
        if bars and start - sum(bars[-1]) <= gap:
            first = bars[-1][0]
            bars[-1] = (first, max(sum(bars[-1]), start + duration) - first)
        else:
            bars.append((start, duration))
    return bars


def _outlined(timelines_drawn: Iterable[Timeline], kinds: Mapping[str, Look]) -> set[Look]:
    """Looks whose operations are wide enough, in the median of both timelines, to be outlined one by one."""
    shares: dict[Look, list[float]] = {}
    for timeline in timelines_drawn:
        for span in timeline.spans:
            shares.setdefault(kinds[span.kind], []).append((span.end - span.start) / timeline.step_seconds)
    return {look for look, found in shares.items() if median(found) >= _OUTLINED_SHARE}


def _draw_lanes(
    axis: Axes,
    timeline: Timeline,
    resources: Sequence[str],
    kinds: Mapping[str, Look],
    outlined: Collection[Look],
    scale: float,
    *,
    rasterized: bool,
) -> None:
    period, origin = timeline.step_seconds, _origin(timeline)
    groups: dict[tuple[int, Look], list[Span]] = {}
    for span in timeline.spans:
        groups.setdefault((resources.index(span.resource), kinds[span.kind]), []).append(span)
    for lane in range(len(resources)):
        axis.broken_barh([(0, period * scale)], (lane - 0.4, 0.8), facecolors=LANE_GREY, zorder=1)
    for (lane, look), spans in groups.items():
        pieces = [p for span in spans for p in _pieces(span.start - origin, span.end - origin, period)]
        bars = pieces if look in outlined else _merged(pieces, _SEEN_SHARE * period)
        axis.broken_barh(
            [(start * scale, max(duration, _SEEN_SHARE * period) * scale) for start, duration in bars],
            (lane - 0.4, 0.8),
            facecolors=look.colour,
            edgecolors=edge_colour(look) if look.hatch else "#FFFFFF",
            linewidths=0.4 if look in outlined else 0.0,
            hatch=look.hatch or None,
            rasterized=rasterized,
            snap=False,  # snapped to whole pixels, the narrowest would vanish
            zorder=2,
        )
    axis.axvline(period * scale, color=BLACK, linewidth=0.8)
    axis.set_ylim(len(resources) - 0.45, -0.55)
    axis.set_yticks(range(len(resources)), [LANES.get(resource, resource) for resource in resources])
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    shares = axis.secondary_yaxis("right")
    shares.set_yticks(range(len(resources)), [_busy(timeline, resource) for resource in resources])
    shares.tick_params(axis="y", length=0)
    shares.spines["right"].set_visible(False)
    axis.annotate("busy", (1, 1), xytext=(5, 4), xycoords="axes fraction", textcoords="offset points", fontsize=9)


def _busy(timeline: Timeline, resource: str) -> str:
    """The share of the step that a resource worked."""
    return f"{100 * min(timeline.busy_seconds().get(resource, 0.0) / timeline.step_seconds, 1):.0f} %"


def _curve(timeline: Timeline, tier: str) -> list[MemoryPoint]:
    """Points of a step from its first instant to its last."""
    origin, period = _origin(timeline), timeline.step_seconds
    points = sorted(timeline.memory.get(tier, ()), key=lambda point: point.seconds)
    if not points:
        return []
    before = [point for point in points if point.seconds <= origin]
    first = (before[-1] if before else points[0]).num_bytes
    inside = [
        MemoryPoint(point.seconds - origin, point.num_bytes)
        for point in points
        if origin < point.seconds < origin + period
    ]
    last = inside[-1].num_bytes if inside else first
    return [MemoryPoint(0.0, first), *inside, MemoryPoint(period, last)]


def _draw_memory(axis: Axes, curves: Mapping[str, list[MemoryPoint]], scale: float, limit: int | None) -> None:
    top = max((point.num_bytes for curve in curves.values() for point in curve), default=0)
    unit, unit_bytes = size_unit(top)
    for title, curve in curves.items():
        seconds = [point.seconds * scale for point in curve]
        sizes = [point.num_bytes / unit_bytes for point in curve]
        if title == "measured":
            axis.fill_between(seconds, sizes, step="post", color=MEMORY_FILL, linewidth=0.6, label=title, zorder=2)
        else:
            axis.step(seconds, sizes, where="post", color=VERMILLION, linewidth=0.9, label=title, zorder=3)
    # A limit far above would press the curves to the ground: the title has its figure.
    if limit is not None and limit <= 2.5 * top:
        axis.axhline(limit / unit_bytes, color=BLACK, linestyle=":", linewidth=1.4, label="limit")
        top = max(top, limit)
    axis.set_ylim(0, 1.1 * max(top / unit_bytes, 1e-9))
    axis.set_ylabel(unit)
    axis.grid(axis="y")


def _memory_title(run: Run, tier: str, limit: int | None) -> str:
    """The tier, its peaks over the whole run, and its limit."""
    peaks = [
        f"{format_bytes(peak_bytes(figures, tier))} {title}"
        for title, figures in (("predicted", run.record.predicted), ("measured", run.record.measured))
        if figures is not None
    ]
    name = TIERS.get(tier, tier) + (f", limit {format_bytes(limit)}" if limit else "")
    return f"{name}\npeak {', '.join(peaks)}" if peaks else name
