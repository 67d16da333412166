"""What if: sweeps of the planner as figures, CSV files and tables."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pandas
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.lanes import LANES, size_unit
from analysis.style import BLACK, GREY, LANE_GREY, LINE_COLOURS, Drawing, legend_columns, new_figure, settings
from planner.explain import seconds_text
from planner.plan import Plan
from planner.price import Price
from planner.sweep import Point, Sweep, format_value
from simulator.units import GIB, format_bytes

# Axis units: what a value is divided by, and how the axis is labelled.
_UNITS = {"tokens": (1.0, "{}"), "bytes": (float(GIB), "{} (GiB)"), "bytes/s": (1e9, "{} (GB/s)")}
_STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))
MAX_TICKS = 9
MOSTLY = 0.5


def frame(sweep: Sweep, price: Price | None = None) -> pandas.DataFrame:
    """A row a point, in base units that the columns name; a point without a plan has its reason and no figures."""
    rows = pandas.DataFrame([_row(sweep, point, price) for point in sweep.points])
    # Whole numbers stay whole beside points without any, and the reason stands last.
    return rows.convert_dtypes()[[*(name for name in rows if name != "infeasible"), "infeasible"]]


def _row(sweep: Sweep, point: Point, price: Price | None) -> dict[str, object]:
    name = sweep.key.replace("-", "_")
    suffix = {
        "tokens": "" if name.startswith("tokens") else "_tokens",
        "bytes": "_bytes",
        "bytes/s": "_bytes_per_second",
    }
    row: dict[str, object] = {name + suffix[sweep.axis.unit]: point.value}
    plan = point.plan
    if plan is not None:
        figures, policy = plan.prediction, plan.policy
        row |= {
            "step_seconds": figures.step_seconds,
            "bound_seconds": plan.bound.step_seconds,
            "bound_gap": plan.bound.gap,
            "tokens_per_second": figures.tokens_per_second,
            "tflops": figures.tflops,
            "tflops_with_attention": figures.tflops_with_attention,
            "device_peak_bytes": figures.device_peak_bytes,
            "host_peak_bytes": figures.host_peak_bytes,
            "micro_batch_rows": policy.micro_batch_rows,
            "num_groups": len(policy.groups),
            "streamed_layers": sum(home != "device" for home in policy.weight_homes),
            "host_updated_blocks": sum(policy.optimizer_homes[b] != "device" for b in plan.model.trained_blocks),
        }
        row |= {f"{resource}_busy_share": share for resource, share in _busy_shares(plan).items()}
        if price is not None:
            row |= {
                "cost_per_million_tokens": price.per_million_tokens(figures),
                "cost_per_token": price.per_token(figures),
            }
        row |= {"measured_price_share": plan.price_shares["measured"], "timed_out_solves": _time_outs(plan)}
    return row | {"infeasible": point.infeasible}


def _busy_shares(plan: Plan) -> dict[str, float]:
    return {resource: busy / plan.prediction.step_seconds for resource, busy in plan.busy_seconds.items()}


def _time_outs(plan: Plan) -> int:
    return plan.solver.counts.get("time limits", 0)


def table(sweep: Sweep, price: Price | None = None) -> str:
    """The sweep in plain text, every figure with its unit."""
    rows = []
    for point in sweep.points:
        value, plan = format_value(point.value, sweep.axis.unit), point.plan
        if plan is None:
            rows.append({sweep.key: value, "step time": "does not fit"})
            continue
        figures = plan.prediction
        resource, share = max(_busy_shares(plan).items(), key=lambda item: item[1])
        row = {
            sweep.key: value,
            "step time": seconds_text(figures.step_seconds),
            "tokens/s": f"{figures.tokens_per_second:,.0f}",
            "within": f"{plan.bound.gap:.2%}",
            "device peak": format_bytes(figures.device_peak_bytes),
            "host peak": format_bytes(figures.host_peak_bytes),
            "micro-batch": f"{plan.policy.micro_batch_rows} rows",
            "busiest": f"{LANES.get(resource, resource)} {share:.0%}",
        }
        if price is not None:
            row["per million tokens"] = f"{price.per_million_tokens(figures):.4g}"
        rows.append(row)
    text = pandas.DataFrame(rows).fillna("").to_string(index=False)
    return "\n".join([f"what if: {sweep.axis.words}", text, *_remarks(sweep)])


def _remarks(sweep: Sweep) -> Iterator[str]:
    """What the table has no column for."""
    for point in sweep.points:
        if point.plan is None:
            yield f"{format_value(point.value, sweep.axis.unit)}: {point.infeasible}"
        elif _time_outs(point.plan):
            value, gap = format_value(point.value, sweep.axis.unit), point.plan.bound.gap
            yield f"{value}: the best plan found, within {gap:.2%} of the bound; {point.plan.solver.status}"
    shares = [round(p.plan.price_shares["measured"], 2) for p in sweep.points if p.plan is not None]
    if shares and max(shares) - min(shares) > 0.5:
        yield (
            f"prices: {min(shares):.0%} to {max(shares):.0%} of busy time measured: points differ in what is known of "
            "them too"
        )


def drawing(sweep: Sweep, price: Price | None = None, *, name: str = "") -> Drawing:
    """Speed, what is busy, memory and, where there is a price, cost over the swept value, one above the other."""
    solved = [(point.value, point.plan) for point in sweep.points if point.plan is not None]
    scale, label = _UNITS[sweep.axis.unit]
    values = [value / scale for value, _ in solved]
    plans = [plan for _, plan in solved]
    panels: list[Callable[[Axes, list[float], list[Plan]], None]] = [_draw_speed, _draw_busy, _draw_memory]
    if price is not None:
        panels.append(lambda axis, at, plans: _draw_cost(axis, at, plans, price))
    with settings():
        figure = new_figure(0.5 + 2.1 * len(panels))
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for draw, axis in zip(panels, axes, strict=True):
            draw(axis, values, plans)
            axis.grid()
            _shade_infeasible(axis, sweep, scale)
        _ticks(axes[-1], sweep, scale)
        axes[-1].set_xlabel(label.format(sweep.axis.words))
    words = sweep.axis.words
    caption = (
        f"Each point is a plan of its own for its {words}. Speed, with the bound that no plan considered passes, a "
        "point filled where more than half of the work was priced by measurements; the share of the step that each "
        "resource works; predicted peaks. Grey: at the dotted values nothing fits; where it begins to is between those "
        "and the next."
    )
    return Drawing(name or sweep.key, f"What if: {words}", caption, _alt(sweep), figure)


def _draw_speed(axis: Axes, values: Sequence[float], plans: Sequence[Plan]) -> None:
    tokens = [plan.inputs.workload.tokens_per_step for plan in plans]
    bounds = [number / plan.bound.step_seconds for number, plan in zip(tokens, plans, strict=True)]
    axis.plot(values, bounds, color=GREY, linestyle="--", linewidth=1.2, label="bound")
    speeds = [plan.prediction.tokens_per_second for plan in plans]
    axis.plot(values, speeds, color=LINE_COLOURS[0], linewidth=1.6, zorder=2)
    # Points that are priced by measurements and by the profile do not compare to the percent.
    measured = [plan.price_shares["measured"] >= MOSTLY for plan in plans]
    for known, fill, what in ((True, LINE_COLOURS[0], "measured"), (False, "#FFFFFF", "computed")):
        at = [index for index, value in enumerate(measured) if value is known]
        if at:
            axis.plot(
                [values[index] for index in at], [speeds[index] for index in at], linestyle="none", marker="o",
                markersize=5, color=LINE_COLOURS[0], markerfacecolor=fill, zorder=3, label=f"plan, prices {what}",
            )  # fmt: skip
    axis.set_ylim(0, 1.1 * max(bounds, default=1.0))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_ylabel("tokens per second")
    axis.legend(loc="lower right")


def _draw_busy(axis: Axes, values: Sequence[float], plans: Sequence[Plan]) -> None:
    shares = [_busy_shares(plan) for plan in plans]
    resources = dict.fromkeys([*LANES, *(resource for row in shares for resource in row)])
    drawn = [resource for resource in resources if any(row.get(resource, 0.0) >= 0.005 for row in shares)]
    for place, resource in enumerate(drawn):
        marker, line = _STYLES[place % len(_STYLES)]
        axis.plot(
            values, [100 * min(row.get(resource, 0.0), 1.0) for row in shares], linestyle=line, marker=marker,
            markersize=4, linewidth=1.4, color=LINE_COLOURS[place % len(LINE_COLOURS)],
            label=LANES.get(resource, resource),
        )  # fmt: skip
    axis.set_ylim(0, 105)
    axis.set_ylabel("busy (% of the step)")
    if drawn:
        _legend_below(axis, [LANES.get(resource, resource) for resource in drawn])


def _draw_memory(axis: Axes, values: Sequence[float], plans: Sequence[Plan]) -> None:
    shared = bool(plans) and plans[0].hardware.shared_memory
    peaks = {"host": [plan.prediction.host_peak_bytes for plan in plans]}
    if shared:
        peaks = {"memory": peaks["host"]}
    else:
        peaks = {"device": [plan.prediction.device_peak_bytes for plan in plans], **peaks}
    unit, unit_bytes = size_unit(max((max(sizes, default=0) for sizes in peaks.values()), default=0))
    for place, (tier, sizes) in enumerate(peaks.items()):
        marker, line = _STYLES[place]
        axis.plot(
            values, [num_bytes / unit_bytes for num_bytes in sizes], linestyle=line, marker=marker, markersize=4,
            linewidth=1.4, color=LINE_COLOURS[place], label=tier,
        )  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.set_ylabel(f"peak ({unit})")
    _legend_below(axis, list(peaks))


def _draw_cost(axis: Axes, values: Sequence[float], plans: Sequence[Plan], price: Price) -> None:
    costs = [price.per_million_tokens(plan.prediction) for plan in plans]
    axis.plot(values, costs, color=LINE_COLOURS[1], marker="o", markersize=4, linewidth=1.6)
    axis.set_ylim(0, 1.1 * max(costs, default=1.0))
    axis.set_ylabel(f"per million tokens\n(at {price.per_hour:g} per hour)")


def _legend_below(axis: Axes, labels: Sequence[str]) -> None:
    axis.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=legend_columns(labels, most=4), frameon=False,
        borderaxespad=0.2,
    )  # fmt: skip


def _shade_infeasible(axis: Axes, sweep: Sweep, scale: float) -> None:
    """Grey from where nothing fits to half way to where something does; lines need two ends, marks one."""
    values = [point.value / scale for point in sweep.points]
    logarithmic = sweep.axis.unit == "tokens"
    middle = (lambda a, b: math.sqrt(a * b)) if logarithmic else (lambda a, b: (a + b) / 2)
    edges = [middle(a, b) for a, b in pairwise(values)]
    low, high = _ends(values, logarithmic=logarithmic)
    edges = [low, *edges, high]
    for place, point in enumerate(sweep.points):
        if point.plan is None:
            axis.axvspan(edges[place], edges[place + 1], color=LANE_GREY, linewidth=0, zorder=0)
            axis.axvline(values[place], color=BLACK, linestyle=":", linewidth=0.8)


def _ends(values: Sequence[float], *, logarithmic: bool) -> tuple[float, float]:
    """A little beyond the first and the last value."""
    low, high = values[0], values[-1]
    if logarithmic:
        reach = max(high / low, 2.0) ** 0.04
        return low / reach, high * reach
    reach = 0.04 * max(high - low, 0.1 * high)
    return low - reach, high + reach


def _ticks(axis: Axes, sweep: Sweep, scale: float) -> None:
    """A tick at each value, as far as there is room."""
    values = [point.value / scale for point in sweep.points]
    logarithmic = sweep.axis.unit == "tokens"
    if logarithmic:
        axis.set_xscale("log")
    axis.set_xlim(*_ends(values, logarithmic=logarithmic))
    every = -(-len(values) // MAX_TICKS)
    axis.xaxis.set_major_locator(FixedLocator(values[::every]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, tokens=logarithmic)))


def _tick(value: float, *, tokens: bool) -> str:
    if tokens and value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:,.0f}K"
    return f"{value:,.0f}" if tokens or value >= 100 else f"{value:.3g}"


def _alt(sweep: Sweep) -> str:
    """What the figure shows, in words."""
    solved = [point for point in sweep.points if point.plan is not None]
    lost = len(sweep.points) - len(solved)
    parts = []
    for point in solved if len(solved) < 2 else (solved[0], solved[-1]):
        assert point.plan is not None
        parts.append(
            f"{point.plan.prediction.tokens_per_second:,.0f} tokens per second at "
            f"{format_value(point.value, sweep.axis.unit)}"
        )
    if lost:
        parts.append(f"nothing fits at {lost} of {len(sweep.points)} values")
    return f"{sweep.axis.words}: {'; '.join(parts)}. The CSV file has all figures."


def save(sweep: Sweep, directory: Path, price: Price | None = None) -> list[Path]:
    """Write KEY.csv, KEY.png and KEY.svg; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = directory / f"{sweep.key}.csv"
    frame(sweep, price).to_csv(written, index=False)
    return [written, *drawing(sweep, price).save(directory)]
