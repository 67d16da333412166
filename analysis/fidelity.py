"""Fidelity: predicted against measured over many runs: step time, peaks, and every kind of operation."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import page, tables
from analysis.attempts import (
    CALIBRATED,
    FIGURES,
    HELD_OUT,
    Attempt,
    Figure,
    KindSeconds,
    attempts,
    by_group,
    every_attempt,
    kind_seconds,
    kinds,
    summary,
    value,
)
from analysis.report import load_sources, write
from analysis.style import BLUE, LIGHT_GREY, VERMILLION, Drawing, legend_columns, new_figure, settings
from analysis.tables import share_text
from executor.run_directory import RECORD
from simulator.errors import InputError

# Kinds of operation that take less of the median step than this stand in the table only: their shares are noise.
DRAWN_SHARE = 0.005

_MARKERS: dict[str, dict[str, Any]] = {
    HELD_OUT: {"marker": "o", "color": BLUE, "markersize": 6},
    CALIBRATED: {"marker": "s", "color": VERMILLION, "markerfacecolor": "#FFFFFF", "markersize": 5.5},
}
_FAILED: dict[str, Any] = {"marker": "x", "color": "#000000", "markersize": 6, "linestyle": "none"}


def plot_fidelity(sources: Sequence[Path | str], output: Path | str) -> tuple[str, list[Path]]:
    """Draw how well runs and results files were predicted; returns the figures in words and the files written.

    The last file is fidelity.html. Raises InputError for a source that is no run or damaged, and where no run has both
    a prediction and a measurement, before anything is written.
    """
    places = [_place(Path(source)) for source in sources]
    for place, source in zip(places, sources, strict=True):
        if places.count(place) > 1:
            raise InputError(f"--fidelity: {source} is named more than once, and would count more than once")
    found = attempts(load_sources(sources))
    drawn = list(drawings(found))
    body = ["<header>", page.heading("Conveyor: how well runs were predicted", 1)]
    body += [page.paragraph(_NOTES), "</header>", "<main>"]
    body += [page.figure(drawn[0], level=2), page.table(summary(found), "numbers", "Errors", level=2)]
    body += [page.figure(drawing, level=2) for drawing in drawn[1:]]
    body.append(page.table(kinds(found), "numbers", "Errors by kind of operation, in figures", level=2))
    body.append(page.table(every_attempt(found), "comparison", "Every attempt", level=2))
    body.append("</main>")
    files = write(output, drawn, "fidelity.html", page.page("Conveyor: fidelity", body))
    return text(found), files


def _place(source: Path) -> Path:
    """Where a source lies; a run's record stands for its directory."""
    return source.resolve().parent if source.name == RECORD else source.resolve()


_NOTES = (
    "Errors are predicted / measured − 1. Calibrated predictions were made from costs that runs were folded into, "
    "those held out were not. Peaks are of the whole run, loading and saving included."
)


def text(found: Sequence[Attempt]) -> str:
    """The tables for a terminal, and the attempts that were not measured."""
    blocks = [tables.aligned(summary(found)), tables.aligned(kinds(found))]
    failed = [attempt for attempt in found if not attempt.compared]
    if failed:
        lines = [f"  run {a.number}, {a.record.case}: {_reason(a)}" for a in failed]
        blocks.append("\n".join([f"not measured: {len(failed)} of {len(found)} attempts", *lines]))
    return "\n\n".join(block for block in blocks if block)


def _reason(attempt: Attempt) -> str:
    record = attempt.record
    return tables.STATUS[record.status] + (f": {record.message}" if record.message else "")


def drawings(found: Sequence[Attempt]) -> Iterator[Drawing]:
    """Step times and errors; then errors by kind of operation, where runs tell of them."""
    yield _errors(found)
    if _drawn_kinds(found):
        yield _kind_errors(found)


def _errors(found: Sequence[Attempt]) -> Drawing:
    groups, failed = by_group(found), [attempt for attempt in found if not attempt.compared]
    shown = [figure for figure in FIGURES if any(not math.isnan(a.error(figure.key)) for a in found)]
    with settings():
        figure = new_figure(4.4 + 1.5 * len(shown))
        axes = figure.subplots(1 + len(shown), 1, height_ratios=[3.2, *[1.0] * len(shown)])
        _draw_step_times(axes[0], groups, failed)
        for axis, item in zip(axes[1:], shown, strict=True):
            _draw_errors(axis, item, groups, failed)
            axis.set_xlim(0, len(found) + 1)
            if axis is not axes[1]:
                axis.sharex(axes[1])
            if axis is not axes[-1]:
                axis.tick_params(axis="x", labelbottom=False)
        axes[-1].set_xlabel("run, numbered as in the table")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels, most=2))
    caption = (
        "Predicted against measured step time, a point a run, on the line where a prediction is exact; below, the "
        "errors of step time and peaks. Grey is what is aimed at: for peaks nothing below 0. Attempts without a "
        "measurement stand at the edge, at their prediction, and below at the lower edge."
    )
    table = summary(found)
    words = "; ".join(
        f"{row['']}, {row['predictions']}: {row['runs']} runs, median error {row['median error']}, worst "
        f"{row['worst error']}"
        for _, row in table.iterrows()
    )
    missing = f" {len(failed)} attempts have no measurement." if failed else ""
    return Drawing("fidelity", "Predicted against measured", caption, f"{words}.{missing} The table has all.", figure)


def _draw_step_times(axis: Axes, groups: Mapping[str, Sequence[Attempt]], failed: Sequence[Attempt]) -> None:
    points = {
        group: [(value(a.record.measured, "step_seconds"), value(a.record.predicted, "step_seconds")) for a in members]
        for group, members in groups.items()
    }
    lost = [value(a.record.predicted, "step_seconds") for a in failed if a.record.predicted is not None]
    values = [value for group in points.values() for point in group for value in point] + lost
    logarithmic = max(values) > 8 * min(values)
    low, high = (min(values) / 1.5, max(values) * 1.5) if logarithmic else (0.0, max(values) * 1.12)
    ends = [low, high]
    band = FIGURES[0].median
    axis.fill_between(
        ends, [end * (1 - band) for end in ends], [end * (1 + band) for end in ends],
        color=LIGHT_GREY, linewidth=0, label="aimed at",
    )  # fmt: skip
    axis.plot(ends, ends, color="#606060", linewidth=0.8, label="predicted = measured")
    for group, members in points.items():
        axis.plot(*zip(*members, strict=True), linestyle="none", label=f"{group} ({len(members)})", **_MARKERS[group])
    if failed:
        # Here and below: an empty line that is not clipped has no size, and a figure with one cannot be laid out.
        axis.plot([low] * len(lost), lost, clip_on=not lost, label=f"not measured ({len(failed)})", **_FAILED)
    if logarithmic:
        axis.set_xscale("log")
        axis.set_yscale("log")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            # Over less than two decades those of the decades alone would leave an axis with one label.
            one.set_minor_formatter(FuncFormatter(_few_labels if high < 100 * low else lambda value, _: ""))
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_xlabel("measured step time (s)")
    axis.set_ylabel("predicted step time (s)")
    axis.grid()


def _few_labels(value: float, _: int) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _draw_errors(axis: Axes, item: Figure, groups: Mapping[str, Sequence[Attempt]], failed: Sequence[Attempt]) -> None:
    axis.axhspan(0 if item.never_under else -100 * item.median, 100 * item.median, color=LIGHT_GREY, linewidth=0)
    axis.axhline(0, color="#606060", linewidth=0.8)
    for group, members in groups.items():
        shares = [100 * attempt.error(item.key) for attempt in members]
        axis.plot([attempt.number for attempt in members], shares, linestyle="none", **_MARKERS[group])
    low, high = axis.get_ylim()
    if failed:
        # At the edge: at a height of the axis' own they would look like errors.
        crosses = {**_FAILED, "transform": axis.get_xaxis_transform(), "clip_on": False}
        axis.plot([attempt.number for attempt in failed], [0.0] * len(failed), **crosses)
    reach = 1.15 * max(-low, high, 200 * item.median)
    axis.set_ylim(max(-reach, -1.15 * max(100.0, high / 4)), reach)  # no error is below -100 %
    axis.set_ylabel(f"{item.title},\nerror (%)")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axis.grid(axis="y")


def _drawn_kinds(found: Sequence[Attempt]) -> dict[str, list[KindSeconds]]:
    every = {kind: list(pairs.values()) for kind, pairs in kind_seconds(found).items()}
    return {k: pairs for k, pairs in every.items() if statistics.median(pair.share for pair in pairs) >= DRAWN_SHARE}


def _kind_errors(found: Sequence[Attempt]) -> Drawing:
    drawn = _drawn_kinds(found)
    titles = []
    with settings():
        figure = new_figure(1.3 + 0.42 * len(drawn))
        axis = figure.subplots()
        band = FIGURES[0].median
        axis.axvspan(-100 * band, 100 * band, color=LIGHT_GREY, linewidth=0, label=f"within {100 * band:.0f} %")
        axis.axvline(0, color="#606060", linewidth=0.8)
        for place, (kind, pairs) in enumerate(drawn.items()):
            titles.append(f"{kind}, {share_text(statistics.median(pair.share for pair in pairs))} of a step")
            for group, offset in ((HELD_OUT, -0.16), (CALIBRATED, 0.16)):
                shares = [100 * pair.error for pair in pairs if pair.group == group]
                axis.plot(shares, [place + offset] * len(shares), linestyle="none", **_MARKERS[group])
                if shares:
                    axis.plot(
                        [statistics.median(shares)] * 2, [place + offset - 0.16, place + offset + 0.16],
                        color=_MARKERS[group]["color"], linewidth=1.6,
                    )  # fmt: skip
        for group, members in by_group(found).items():
            axis.plot([], [], linestyle="none", label=f"{group} ({len(members)})", **_MARKERS[group])
        low, high = axis.get_xlim()
        reach = 1.05 * max(-low, high, 200 * band)
        axis.set_xlim(-reach, reach)
        axis.set_yticks(range(len(titles)), [title.replace(", ", "\n") for title in titles])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(titles) - 0.5, -0.5)
        axis.set_xlabel("error of the seconds in a step (%)")
        axis.grid(axis="x")
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels))
    caption = (
        "Errors of the seconds that each kind of operation takes in a step, a point a run, a line at the median. "
        f"Kinds below {share_text(DRAWN_SHARE)} of a step stand in the table."
    )
    table = kinds(found)
    words = "; ".join(
        f"{row['operations']}, {row['predictions']}: median error {row['median error']}, worst {row['worst error']}"
        for _, row in table.iterrows()
    )
    return Drawing("fidelity-kinds", "Errors by kind of operation", caption, f"{words}.", figure)
