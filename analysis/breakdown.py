"""Where a step's time goes: all of it by what compute did, and what it lost by cause."""

import math
from collections.abc import Mapping, Sequence

from analysis.style import (
    BREAKDOWN,
    MEASURED,
    PREDICTED,
    Drawing,
    edge_colour,
    legend_columns,
    looks,
    new_figure,
    settings,
    text_colour,
)
from analysis.tables import format_duration, lost_causes, share_text, three_digits, time_unit
from executor.run_directory import Run
from simulator.errors import InputError
from simulator.predict import StepFigures


def breakdown(run: Run) -> Drawing:
    """Seconds of a step by what the compute resource did or waited for. Raises InputError where nobody knows them."""
    present = _present(run)
    if not present:
        raise InputError(f"{run.name}: has no breakdown of its step's time")
    end = max(max(f.step_seconds, sum(f.breakdown_seconds.values())) for f in present.values())
    unit, scale = time_unit(end)
    causes = looks({cause for figures in present.values() for cause in figures.breakdown_seconds}, BREAKDOWN)
    with settings():
        columns = legend_columns(list(causes))
        figure = new_figure(1.1 + 0.42 * len(present) + 0.2 * math.ceil(len(causes) / columns))
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
            handles=[look.patch(cause) for cause, look in causes.items()], loc="outside lower center", ncols=columns
        )
    caption = "Where a step's time goes: coloured is work of the compute resource, white is waiting, by cause."
    return Drawing(f"{run.name}-breakdown", "A step's time", caption, _alt(present, list(causes)), figure)


def lost_time(run: Run) -> Drawing:
    """Seconds of a step in which compute waited, a bar a cause. Raises InputError where none were lost."""
    causes = lost_causes(run.record)
    if not causes:
        raise InputError(f"{run.name}: has lost no time that it could draw")
    present = _present(run)
    looks_of = {"predicted": PREDICTED, "measured": MEASURED}
    longest = max(figures.breakdown_seconds.get(cause, 0.0) for figures in present.values() for cause in causes)
    unit, scale = time_unit(longest)
    with settings():
        figure = new_figure(1.1 + (0.15 + 0.24 * len(present)) * len(causes))
        axis = figure.subplots()
        for row, cause in enumerate(causes):
            for place, (title, figures) in enumerate(present.items()):
                seconds, look = figures.breakdown_seconds.get(cause, 0.0), looks_of[title]
                at = row + (place - (len(present) - 1) / 2) * 0.38
                axis.barh(
                    at, seconds * scale, 0.34,
                    color=look.colour, hatch=look.hatch, edgecolor=edge_colour(look), linewidth=0.5,
                )  # fmt: skip
                share = share_text(seconds / figures.step_seconds)
                text = f"{three_digits(seconds * scale)} ({share})" if seconds else "none"
                axis.annotate(
                    text, (seconds * scale, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
                )
        axis.set_yticks(range(len(causes)), [cause.replace("waiting for ", "waiting for\n") for cause in causes])
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.45 * longest * scale)  # room for the numbers
        axis.set_xlabel(f"time lost in one step ({unit})")
        axis.grid(axis="x")
        handles = [looks_of[title].patch(title) for title in present]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    caption = "Time in which the compute resource was idle, by what it waited for; in brackets the share of its step."
    return Drawing(f"{run.name}-lost-time", "Lost time by cause", caption, _alt(present, causes), figure)


def _present(run: Run) -> dict[str, StepFigures]:
    pair = {"predicted": run.record.predicted, "measured": run.record.measured}
    return {title: figures for title, figures in pair.items() if figures is not None and figures.breakdown_seconds}


def _alt(present: Mapping[str, StepFigures], causes: Sequence[str]) -> str:
    """The bars in words."""
    return " ".join(
        f"{title.capitalize()}, of {format_duration(figures.step_seconds)}: "
        + ", ".join(
            f"{cause} {format_duration(figures.breakdown_seconds[cause])}"
            for cause in causes
            if cause in figures.breakdown_seconds
        )
        + "."
        for title, figures in present.items()
    )
