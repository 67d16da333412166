"""The papers' tables as simulated, in one figure: simulated over published, a line a row."""

from collections.abc import Sequence

from matplotlib.ticker import FuncFormatter

from analysis.reproduce import ALLOCATION_GOAL, TIME_GOAL, Reproduced
from analysis.style import BLUE, LIGHT_GREY, VERMILLION, Drawing, new_figure, settings

# Quantity -> how its points look.
_POINTS = {
    "step": ("o", BLUE, "step time"),
    "speedup": ("D", BLUE, "speedup"),
    "device alloc": ("s", VERMILLION, "device allocation"),
    "device peak": ("^", VERMILLION, "device peak"),
}
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


def drawing(reproduced: Sequence[Reproduced]) -> Drawing:
    """Time and device memory, simulated over published; the bands are the goals."""
    items = [item for item in reproduced if any(c.quantity in _POINTS for c in item.comparisons)]
    with settings():
        figure = new_figure(1.3 + 0.17 * len(items))
        axis = figure.add_subplot()
        axis.axvspan(1 - TIME_GOAL, 1 + TIME_GOAL, color=LIGHT_GREY, linewidth=0, label=f"within {TIME_GOAL:.0%}")
        near = 1 - ALLOCATION_GOAL, 1 + ALLOCATION_GOAL
        axis.axvspan(*near, color="#BFBFBF", linewidth=0, label=f"within {ALLOCATION_GOAL:.0%}")
        axis.axvline(1, color="#606060", linewidth=0.8)
        for quantity, (marker, colour, label) in _POINTS.items():
            points = [
                (c.simulated / c.published, line)
                for line, item in enumerate(items)
                for c in item.comparisons
                if c.quantity == quantity
            ]
            if points:
                x, y = zip(*points, strict=True)
                axis.scatter(
                    x, y, marker=marker, s=22, label=label, zorder=3, linewidths=1.0, edgecolors=colour,
                    facecolors="none" if quantity in ("device peak", "speedup") else colour,
                )  # fmt: skip
        axis.set_yticks(range(len(items)), [_label(item) for item in items])
        axis.tick_params(axis="y", labelsize=7, length=0)
        axis.set_ylim(len(items) - 0.4, -0.6)
        axis.set_xscale("log")
        ratios = [c.simulated / c.published for item in items for c in item.comparisons if c.quantity in _POINTS]
        low, high = min([0.7, *ratios]) / 1.1, max([1.4, *ratios]) * 1.1
        axis.set_xlim(low, high)
        axis.set_xticks([tick for tick in TICKS if low <= tick <= high])
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_xlabel("simulated / published")
        axis.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=2)
    misses = [item.row.where for item in items if item.misses]
    return Drawing(
        name="reproduction",
        title="The papers' tables, simulated",
        caption="Simulated over published; grey: the goals for times and for allocations.",
        alt=f"{len(items)} rows; outside their goal: {', '.join(misses) or 'none'}.",
        figure=figure,
    )


def _label(item: Reproduced) -> str:
    row = item.row
    table = {"text": "LazyTrain", "reference": "measured"}.get(row.table, f"table {row.table}")
    return f"{table}: {row.row}"
