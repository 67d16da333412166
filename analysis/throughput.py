"""Predicted against measured TFLOPS, one run or many."""

import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from analysis.style import (
    IDEAL,
    LIGHT_GREY,
    LINE_COLOURS,
    MEASURED,
    PREDICTED,
    Drawing,
    Look,
    edge_colour,
    legend_columns,
    new_figure,
    settings,
)
from analysis.tables import STATUS, error_share, format_error, three_digits
from executor.run_directory import Run
from simulator.errors import InputError

TITLE = "Predicted against measured"
# A prediction within this share of the measurement counts as right.
BAND = 0.03
# So many runs are drawn as bars; more as points.
MAX_BARS = 3

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def throughput(runs: Sequence[Run], name: str = "throughput") -> Drawing:
    """Predicted against measured TFLOPS: bars for up to MAX_BARS runs, else points around the diagonal.

    Runs are numbered as in `tables.comparison`. Raises InputError where no run has a prediction or a measurement.
    """
    shown = [run for run in runs if run.record.predicted is not None or run.record.measured is not None]
    if not shown:
        raise InputError("no run has predicted or measured TFLOPS to draw")
    numbered = {
        number: run
        for number, run in enumerate(runs, start=1)
        if run.record.predicted is not None and run.record.measured is not None
    }
    if len(runs) <= MAX_BARS or len(numbered) < 2:
        return _bars(shown, name)
    return _scatter(numbered, name)


def _bars(runs: Sequence[Run], name: str) -> Drawing:
    bars: list[tuple[float, float, Look, str]] = []  # place, TFLOPS, look, text
    ticks: list[tuple[float, str]] = []
    place = 0.0
    for run in runs:
        first = place
        record = run.record
        error = ""
        if record.predicted is not None and record.measured is not None:
            error = f" ({format_error(error_share(record.predicted.tflops, record.measured.tflops))})"
        for figures, look in ((record.predicted, PREDICTED), (record.measured, MEASURED), (record.ideal, IDEAL)):
            if figures is not None:
                text = three_digits(figures.tflops) + (error if look == PREDICTED else "")
                bars.append((place, figures.tflops, look, text))
                place += 1
            elif look == MEASURED:
                bars.append((place, 0.0, look, record.status.replace("_", " ")))
                place += 1
        ticks.append(((first + place - 1) / 2, record.case))
        place += 0.8
    named = {"predicted": PREDICTED, "measured": MEASURED, "ideal: no optimizer": IDEAL}
    with settings():
        figure = new_figure(1.25 + 0.3 * place)
        axis = figure.subplots()
        for at, value, look, text in bars:
            axis.barh(at, value, 0.86, color=look.colour, hatch=look.hatch, edgecolor=edge_colour(look), linewidth=0.5)
            axis.annotate(text, (value, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
        axis.set_yticks([at for at, _ in ticks], [_wrapped(text, 22) for _, text in ticks])
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
        # Room for the numbers behind the longest bar.
        axis.set_xlim(0, 1.4 * max(value for _, value, _, _ in bars) or 1)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6))  # more would touch where numbers are long
        axis.set_xlabel("TFLOPS (6 N T per second)")
        axis.grid(axis="x")
        used = {look for _, _, look, _ in bars}
        figure.legend(
            handles=[look.patch(title) for title, look in named.items() if look in used],
            loc="outside lower center",
            ncols=3,
        )
    caption = "Predicted and measured TFLOPS; in brackets the error of the prediction."
    return Drawing(name, TITLE, caption, "; ".join(map(_words, runs)) + ".", figure)


def _words(run: Run) -> str:
    """One run's bars in words."""
    record = run.record
    known = {"predicted": record.predicted, "measured": record.measured, "ideal": record.ideal}
    parts = [f"{name} {three_digits(figures.tflops)} TFLOPS" for name, figures in known.items() if figures is not None]
    if record.predicted is not None and record.measured is not None:
        parts.append(f"error {format_error(error_share(record.predicted.tflops, record.measured.tflops))}")
    if record.measured is None:
        parts.append(STATUS[record.status])
    return f"{record.case}: {', '.join(parts)}"


def _scatter(numbered: Mapping[int, Run], name: str) -> Drawing:
    points = {
        number: (run.record.measured.tflops, run.record.predicted.tflops)
        for number, run in numbered.items()
        if run.record.measured is not None and run.record.predicted is not None
    }
    devices = sorted({run.record.device_name for run in numbered.values()})
    markers = {
        device: {
            "linestyle": "none", "marker": _MARKERS[index % len(_MARKERS)], "markersize": 6,
            "color": LINE_COLOURS[index % len(LINE_COLOURS)],
            "markeredgecolor": "#FFFFFF", "markeredgewidth": 0.5,
        }
        for index, device in enumerate(devices)
    }  # fmt: skip
    with settings():
        figure = new_figure(7.2)
        axis, errors = figure.subplots(2, 1, height_ratios=[2.6, 1])
        _draw_diagonal(axis, [value for point in points.values() for value in point])
        for device, marker in markers.items():
            here = [number for number, run in numbered.items() if run.record.device_name == device]
            axis.plot(*zip(*(points[number] for number in here), strict=True), label=device, **marker)
            shares = [100 * error_share(points[number][1], points[number][0]) for number in here]
            errors.plot(here, shares, **marker)
        axis.set_xlabel("measured TFLOPS (6 N T per second)")
        axis.set_ylabel("predicted TFLOPS")
        axis.grid()
        errors.axhspan(-100 * BAND, 100 * BAND, color=LIGHT_GREY, linewidth=0)
        errors.axhline(0, color="#606060", linewidth=0.8)
        errors.set_xlabel("run, numbered as in the table")
        errors.set_ylabel("error (%)")
        errors.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
        low, high = errors.get_ylim()
        reach = max(-low, high, 200 * BAND)
        errors.set_ylim(max(-1.15 * reach, -1.15 * max(100.0, high / 4)), 1.15 * reach)  # no error is below -100 %
        errors.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=legend_columns([*devices, "predicted = measured"], most=2))
        figure.draw_without_rendering()  # the labels are placed by where the points come to lie
        outside = [number for number, (x, y) in points.items() if abs(error_share(y, x)) > BAND]
        _number_points(axis, points, outside)
    caption = (
        "Predicted against measured TFLOPS, a point a run. On the line a prediction is exact, below it the run was "
        "faster than predicted; runs outside the grey band have their number. Below: the error of every run."
    )
    errors_found = {number: error_share(y, x) for number, (x, y) in points.items()}
    worst = max(errors_found, key=lambda number: abs(errors_found[number]))
    alt = (
        f"{len(points)} runs from {three_digits(min(x for x, _ in points.values()))} to "
        f"{three_digits(max(x for x, _ in points.values()))} measured TFLOPS: {len(points) - len(outside)} predicted "
        f"within {100 * BAND:.0f} %, the largest error {format_error(errors_found[worst])} of run {worst}. "
        "The table has all figures."
    )
    return Drawing(name, TITLE, caption, alt, figure)


def _draw_diagonal(axis: Axes, values: Sequence[float]) -> None:
    """Equal square axes for all values, with the line on which a prediction is exact and the band around it."""
    logarithmic = max(values) > 20 * min(values)
    low, high = (min(values) / 1.4, max(values) * 1.4) if logarithmic else (0.0, max(values) * 1.12)
    ends = [low, high]
    axis.fill_between(
        ends, [end * (1 - BAND) for end in ends], [end * (1 + BAND) for end in ends],
        color=LIGHT_GREY, linewidth=0, label=f"within {100 * BAND:.0f} %",
    )  # fmt: skip
    axis.plot(ends, ends, color="#606060", linewidth=0.8, label="predicted = measured")
    if logarithmic:
        axis.set_xscale("log")
        axis.set_yscale("log")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # 0.1, not a power of ten
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_aspect("equal")


def _number_points(axis: Axes, points: Mapping[int, tuple[float, float]], numbers: Sequence[int]) -> None:
    """Write some points' numbers beside them, each at the first place that hits no point or number."""
    to_points = 72 / axis.figure.dpi
    at = {number: axis.transData.transform(point) * to_points for number, point in points.items()}
    taken = [Bbox.from_bounds(x - 3.5, y - 3.5, 7, 7) for x, y in at.values()]
    for number in numbers:
        x, y = at[number]
        width, height = 5.8 * len(str(number)), 8.0
        boxes = {
            (dx, dy): Bbox.from_bounds(x + dx - width / 2, y + dy - height / 2, width, height)
            for dx, dy in _places(width)
        }
        free = (place for place, box in boxes.items() if not any(box.overlaps(other) for other in taken))
        place = next(free, next(iter(boxes)))
        taken.append(boxes[place])
        far = math.hypot(*place) > 16
        axis.annotate(
            str(number), points[number], xytext=place, textcoords="offset points", ha="center", va="center",
            fontsize=8, arrowprops={"arrowstyle": "-", "linewidth": 0.4, "shrinkB": 3, "shrinkA": 0} if far else None,
        )  # fmt: skip


def _places(width: float) -> Iterator[tuple[float, float]]:
    """Offsets in points on ellipses of growing size, below and to the right first: there the diagonal is not."""
    for ring in range(1, 7):
        for degrees in (-40, 140, 0, 180, -90, 90, -65, 115):
            angle = math.radians(degrees)
            yield (5 + width / 2) * ring * math.cos(angle), 9 * ring * math.sin(angle)


def _wrapped(text: str, width: int) -> str:
    """Lines of about `width` characters, broken at blanks, dashes and commas."""
    lines = [""]
    for part in text.replace("-", "-\0").replace(" ", " \0").replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.strip() for line in lines)
