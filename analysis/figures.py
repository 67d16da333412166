"""Figures of whole runs: predicted against measured TFLOPS, the step's time by cause, the loss."""

import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from analysis.style import (
    BLACK,
    BLUE,
    BREAKDOWN,
    GREEN,
    IDEAL,
    LIGHT_GREY,
    MEASURED,
    ORANGE,
    PREDICTED,
    PURPLE,
    SKY,
    VERMILLION,
    Drawing,
    Look,
    edge_colour,
    looks,
    new_figure,
    settings,
    text_colour,
)
from analysis.tables import error_share, format_duration, format_error, three_digits, time_unit
from executor.run_directory import Run
from simulator.errors import InputError

# A prediction within this share of the measurement counts as right.
BAND = 0.03
# So many runs are drawn as bars; more as points.
MAX_BARS = 3

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARKER_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)


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
        axis.set_xlabel("TFLOPS (6 N T per second)")
        axis.grid(axis="x")
        used = {look for _, _, look, _ in bars}
        figure.legend(
            handles=[look.patch(title) for title, look in named.items() if look in used],
            loc="outside lower center",
            ncols=3,
        )
    return Drawing(name, "Predicted and measured TFLOPS; in brackets the error of the prediction.", figure)


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
            "color": _MARKER_COLOURS[index % len(_MARKER_COLOURS)],
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
        errors.set_ylim(-1.15 * reach, 1.15 * reach)
        errors.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=2)
        figure.draw_without_rendering()  # the labels are placed by where the points come to lie
        outside = [number for number, (x, y) in points.items() if abs(error_share(y, x)) > BAND]
        _number_points(axis, points, outside)
    caption = (
        "Predicted against measured TFLOPS, a point a run. On the line a prediction is exact, below it the run was "
        "faster than predicted; runs outside the grey band have their number. Below: the error of every run."
    )
    return Drawing(name, caption, figure)


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


def breakdown(run: Run) -> Drawing:
    """Seconds of a step by what the compute resource did or waited for. Raises InputError where nobody knows them."""
    pair = {"predicted": run.record.predicted, "measured": run.record.measured}
    present = {title: figures for title, figures in pair.items() if figures is not None and figures.breakdown_seconds}
    if not present:
        raise InputError(f"{run.name}: has no breakdown of its step's time")
    end = max(max(f.step_seconds, sum(f.breakdown_seconds.values())) for f in present.values())
    unit, scale = time_unit(end)
    causes = looks({cause for figures in present.values() for cause in figures.breakdown_seconds}, BREAKDOWN)
    with settings():
        figure = new_figure(1.1 + 0.42 * len(present) + 0.2 * math.ceil(len(causes) / 3))
        axis = figure.subplots()
        for row, figures in enumerate(present.values()):
            left = 0.0
            for cause, look in causes.items():
                seconds = figures.breakdown_seconds.get(cause, 0.0)
                axis.barh(
                    row, seconds * scale, 0.72, left=left * scale,
                    color=look.colour, hatch=look.hatch, edgecolor=edge_colour(look), linewidth=0.5,
                )  # fmt: skip
                if seconds > 0.08 * end:
                    background = {"facecolor": look.colour, "edgecolor": "none", "pad": 1.5} if look.hatch else None
                    axis.text(
                        (left + seconds / 2) * scale, row, three_digits(seconds * scale),
                        ha="center", va="center", fontsize=9, color=text_colour(look), bbox=background,
                    )  # fmt: skip
                left += seconds
            axis.annotate(
                format_duration(figures.step_seconds), (left * scale, row),
                xytext=(4, 0), textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
        axis.set_yticks(range(len(present)), list(present))
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.13 * end * scale)
        axis.set_xlabel(f"time of one step ({unit})")
        axis.grid(axis="x")
        figure.legend(
            handles=[look.patch(cause) for cause, look in causes.items()], loc="outside lower center", ncols=3
        )
    caption = "Where a step's time goes: coloured is work of the compute resource, white is waiting, by cause."
    return Drawing(f"{run.name}-breakdown", caption, figure)


def losses(run: Run) -> dict[int, float]:
    """Step -> loss, of the steps that have a finite one."""
    rows = {row["step"]: row.get("loss") for row in run.metrics}
    return {
        step: float(value) for step, value in rows.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def loss(run: Run) -> Drawing:
    """Loss by step, from metrics.jsonl. Raises InputError for a run without a single loss."""
    finite = losses(run)
    if not finite:
        raise InputError(f"{run.name}: has no losses to draw")
    steps, values = list(finite), list(finite.values())
    lost = [row["step"] for row in run.metrics if row["step"] not in finite]
    window = len(values) // 40  # on each side; short runs are drawn as they are
    with settings():
        figure = new_figure(2.9)
        axis = figure.subplots()
        few = len(steps) <= 40
        axis.plot(
            steps, values, color=SKY if window else BLUE, linewidth=1.0,
            marker="o" if few else None, markersize=3, label="each step",
        )  # fmt: skip
        if window:
            axis.plot(
                steps, _running_mean(values, window), color=BLUE, linewidth=1.8, label=f"mean of {2 * window + 1} steps"
            )
        if lost:
            axis.plot(
                lost, [min(values)] * len(lost), linestyle="none", marker="x", color=VERMILLION,
                label="not finite: skipped",
            )  # fmt: skip
        if window or lost:
            axis.legend(loc="upper right")
        axis.margins(x=0.01)
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats per token)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid()
    return Drawing(f"{run.name}-loss", f"Training loss of {len(finite):,} steps.", figure)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values on each side and the value itself, at each place; fewer near the ends, evenly."""
    found = []
    for at in range(len(values)):
        reach = min(window, at, len(values) - 1 - at)
        part = values[at - reach : at + reach + 1]
        found.append(sum(part) / len(part))
    return found


def _wrapped(text: str, width: int) -> str:
    """Lines of about `width` characters, broken at blanks, dashes and commas."""
    lines = [""]
    for part in text.replace("-", "-\0").replace(" ", " \0").replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.strip() for line in lines)
