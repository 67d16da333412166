"""The loss by step, of one run and of many on one axis."""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill

from matplotlib.ticker import MaxNLocator

from analysis.style import BLUE, LINE_COLOURS, SKY, VERMILLION, Drawing, new_figure, settings
from executor.run_directory import Run
from simulator.errors import InputError

# A mean is of this part of a run's steps, up to each; runs of fewer steps than twice this are drawn as they are.
SMOOTHED_SHARE = 20

_LINE_STYLES = ("-", "--", "-.", ":")


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
    window = len(values) // SMOOTHED_SHARE
    smoothed = window > 1
    with settings():
        figure = new_figure(2.9)
        axis = figure.subplots()
        few = len(steps) <= 40
        axis.plot(
            steps, values, color=SKY if smoothed else BLUE, linewidth=1.0,
            marker="o" if few else None, markersize=3, label="each step",
        )  # fmt: skip
        if smoothed:
            mean = _running_mean(values, window)
            axis.plot(steps, mean, color=BLUE, linewidth=1.8, label=f"mean of the last {window} steps")
        if lost:
            axis.plot(
                lost, [min(values)] * len(lost), linestyle="none", marker="x", color=VERMILLION,
                label="not finite: skipped",
            )  # fmt: skip
        if smoothed or lost:
            axis.legend(loc="upper right")
        axis.margins(x=0.01)
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats per token)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid()
    caption = f"Training loss of {len(finite):,} steps."
    alt = f"Loss {_words(finite)}" + (f"; {len(lost):,} steps had none that is finite." if lost else ".")
    return Drawing(f"{run.name}-loss", "Loss", caption, alt, figure)


def loss_comparison(runs: Sequence[Run]) -> Drawing:
    """The losses of all runs that have some on one axis, smoothed as the shortest is, numbered as in the table.

    Raises InputError where no run has any.
    """
    curves = {number: losses(run) for number, run in enumerate(runs, start=1) if losses(run)}
    if not curves:
        raise InputError("no run has losses to draw")
    # Of as many steps in every run: equal losses are one curve.
    window = max(1, min(map(len, curves.values())) // SMOOTHED_SHARE)
    with settings():
        figure = new_figure(2.9 + 0.2 * len(curves))
        axis = figure.subplots()
        for place, (number, finite) in enumerate(curves.items()):
            values = list(finite.values())
            label = fill(f"{number}. {runs[number - 1].record.case}", 44)
            style = _LINE_STYLES[place % len(_LINE_STYLES)]  # seven colours, four styles: 28 differ
            axis.plot(
                list(finite), _running_mean(values, window), linewidth=1.6, linestyle=style,
                color=LINE_COLOURS[place % len(LINE_COLOURS)], label=label,
            )  # fmt: skip
        axis.margins(x=0.01)
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats per token)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid()
        figure.legend(loc="outside lower left", ncols=1)
    alt = ". ".join(f"Run {number}: loss {_words(finite)}" for number, finite in curves.items()) + "."
    means = f", as means of the last {window} steps" if window > 1 else ""
    caption = f"Training loss by step, a line a run{means}."
    return Drawing("losses", "Losses compared", caption, alt, figure)


def _words(finite: Mapping[int, float]) -> str:
    first, last = min(finite), max(finite)
    if first == last:
        return f"{finite[first]:.3f} at step {first:,}"
    return f"from {finite[first]:.3f} at step {first:,} to {finite[last]:.3f} at step {last:,}"


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values that end at each place."""
    found = []
    for at in range(len(values)):
        part = values[max(0, at - window + 1) : at + 1]
        found.append(sum(part) / len(part))
    return found
