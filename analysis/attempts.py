"""Attempts: runs with what was predicted of them, and tables of how far that lies from what was measured.

Predictions whose costs had runs folded in are calibrated, the others held out; the two are never averaged. Attempts
without a measurement, those that failed, stand beside them.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas

from analysis.tables import NOTHING, STATUS, error_share, format_duration, format_error, input_value, share_text
from executor.record import RunRecord
from executor.run_directory import Run
from simulator.errors import InputError
from simulator.predict import StepFigures
from simulator.timeline import BUSY, Timeline
from simulator.units import format_bytes

HELD_OUT, CALIBRATED = "held out", "calibrated"


class Figure(NamedTuple):
    """A figure that is predicted, with the errors that are aimed at, as shares."""

    key: str
    title: str
    write: Callable[[float], str]
    median: float
    worst: float
    never_under: bool


FIGURES = (
    Figure("step_seconds", "step time", format_duration, 0.03, 0.07, False),
    Figure("device_peak_bytes", "device peak", format_bytes, 0.02, 0.02, True),
    Figure("host_peak_bytes", "host peak", format_bytes, 0.03, 0.03, True),
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run under its number: what was predicted and, unless it failed before, what was measured."""

    number: int
    run: Run

    @property
    def record(self) -> RunRecord:
        return self.run.record

    @property
    def group(self) -> str:
        """Whether runs were folded into the costs of its prediction."""
        made_from = self.record.predicted_from
        return CALIBRATED if made_from is not None and made_from.folded_runs else HELD_OUT

    @property
    def compared(self) -> bool:
        return self.record.predicted is not None and self.record.measured is not None

    def error(self, key: str) -> float:
        """Predicted / measured - 1 of a figure of StepFigures; NaN where either is missing or 0."""
        predicted, measured = (value(figures, key) for figures in (self.record.predicted, self.record.measured))
        return error_share(predicted, measured) if predicted and measured else math.nan


def value(figures: StepFigures | None, key: str) -> float:
    return float(getattr(figures, key)) if figures is not None else 0.0


def attempts(runs: Sequence[Run]) -> list[Attempt]:
    """Runs under their numbers. Raises InputError where none has both a prediction and a measurement."""
    found = [Attempt(number, run) for number, run in enumerate(runs, start=1)]
    if not any(attempt.compared for attempt in found):
        raise InputError("plot --fidelity: no run has both a prediction and a measurement to compare")
    return found


def by_group(found: Sequence[Attempt]) -> dict[str, list[Attempt]]:
    compared = [attempt for attempt in found if attempt.compared]
    groups = {group: [a for a in compared if a.group == group] for group in (HELD_OUT, CALIBRATED)}
    return {group: members for group, members in groups.items() if members}


def summary(found: Sequence[Attempt]) -> pandas.DataFrame:
    """One row a figure and group: median of the errors' sizes, the worst error with its run, runs predicted too low.

    Where cases were tried again, one more row has the last attempt of each: earlier ones ran before what they showed
    was mended.
    """
    rows = []
    for figure in FIGURES:
        for group, members in _with_last_attempts(by_group(found)):
            errors = {a.number: a.error(figure.key) for a in members if not math.isnan(a.error(figure.key))}
            if not errors:
                continue  # a machine without this tier
            worst = max(errors, key=lambda number: abs(errors[number]))
            median = statistics.median(map(abs, errors.values()))
            under = sum(error < 0 for error in errors.values())
            holds = median <= figure.median and abs(errors[worst]) <= figure.worst
            rows.append(
                {
                    "": figure.title,
                    "predictions": group,
                    "runs": str(len(errors)),
                    "median error": share_text(median),
                    "worst error": f"{format_error(errors[worst])} (run {worst})",
                    "too low": str(under),
                    "aim": _aim(figure),
                    "met": "yes" if holds and not (figure.never_under and under) else "no",
                }
            )
    return pandas.DataFrame(rows)


def _with_last_attempts(groups: Mapping[str, Sequence[Attempt]]) -> Iterator[tuple[str, Sequence[Attempt]]]:
    for group, members in groups.items():
        yield group, members
        last = list({_case(attempt): attempt for attempt in members}.values())
        if len(last) < len(members):
            yield f"{group}, last of each case", last


def _case(attempt: Attempt) -> tuple[str, ...]:
    """Its name, model and work: runs of different models may lie in folders of one name."""
    record = attempt.record
    keys = ("hashes.model", "workload.sequence_length", "workload.tokens_per_step")
    return record.case, *(str(input_value(record, key)) for key in keys)


def _aim(figure: Figure) -> str:
    if figure.never_under:
        return f"within {100 * figure.worst:.0f} %, never too low"
    return f"median {100 * figure.median:.0f} %, worst {100 * figure.worst:.0f} %"


def every_attempt(found: Sequence[Attempt]) -> pandas.DataFrame:
    """One row an attempt, failed ones with their reason."""
    rows = []
    for attempt in found:
        record = attempt.record
        row = {"#": str(attempt.number), "case": record.case, "predictions": attempt.group}
        if record.predicted is None:
            row["predictions"] = NOTHING
        for figure in FIGURES:
            predicted, measured = (value(figures, figure.key) for figures in (record.predicted, record.measured))
            row[f"{figure.title}, predicted"] = figure.write(predicted) if predicted else NOTHING
            row[f"{figure.title}, measured"] = figure.write(measured) if measured else NOTHING
            row[f"{figure.title}, error"] = format_error(attempt.error(figure.key))
        row["outcome"] = STATUS[record.status] + (f": {record.message}" if record.message else "")
        rows.append(row)
    return pandas.DataFrame(rows)


def kinds(found: Sequence[Attempt]) -> pandas.DataFrame:
    """One row a kind of operation and group: its share of a step, and the errors of its seconds."""
    rows = []
    for kind, pairs in kind_seconds(found).items():
        for group in (HELD_OUT, CALIBRATED):
            chosen = {number: pair for number, pair in pairs.items() if pair.group == group}
            if not chosen:
                continue
            errors = {number: pair.error for number, pair in chosen.items()}
            worst = max(errors, key=lambda number: abs(errors[number]))
            rows.append(
                {
                    "operations": kind,
                    "predictions": group,
                    "runs": str(len(errors)),
                    "of step": share_text(statistics.median(pair.share for pair in chosen.values())),
                    "median error": share_text(statistics.median(map(abs, errors.values()))),
                    "worst error": f"{format_error(errors[worst])} (run {worst})",
                }
            )
    return pandas.DataFrame(rows)


class KindSeconds(NamedTuple):
    """One kind's seconds in one run, and the measured ones as a share of the step."""

    group: str
    predicted: float
    measured: float
    share: float

    @property
    def error(self) -> float:
        return error_share(self.predicted, self.measured)


def kind_seconds(found: Sequence[Attempt]) -> dict[str, dict[int, KindSeconds]]:
    """Kind of operation -> number of the attempt -> its seconds, the longest kinds first.

    From timelines where a run has both; else what the record says of the compute resource. Kinds that only one side
    has are left out.
    """
    pairs: dict[str, dict[int, KindSeconds]] = {}
    for attempt in found:
        record = attempt.record
        if record.predicted is None or record.measured is None:
            continue
        if attempt.run.predicted is not None and attempt.run.measured is not None:
            predicted, measured = _timeline_seconds(attempt.run.predicted), _timeline_seconds(attempt.run.measured)
        else:
            predicted, measured = _busy_seconds(record.predicted), _busy_seconds(record.measured)
        for kind in predicted.keys() & measured.keys():
            if predicted[kind] > 0 and measured[kind] > 0:
                share = measured[kind] / record.measured.step_seconds
                seconds = KindSeconds(attempt.group, predicted[kind], measured[kind], share)
                pairs.setdefault(kind, {})[attempt.number] = seconds

    def longest(kind: str) -> tuple[float, str]:
        return -max(pair.share for pair in pairs[kind].values()), kind

    return {kind: pairs[kind] for kind in sorted(pairs, key=longest)}


def _timeline_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds of a step by kind; what computes is called as in a record's breakdown."""
    seconds: dict[str, float] = {}
    for span in timeline.spans:
        name = BUSY[span.kind] if span.resource == "compute" else span.kind.replace("_", " ")
        kind = f"{name} ({span.resource})"
        seconds[kind] = seconds.get(kind, 0.0) + span.end - span.start
    return seconds


def _busy_seconds(figures: StepFigures) -> dict[str, float]:
    busy = set(BUSY.values())
    return {f"{label} (compute)": s for label, s in figures.breakdown_seconds.items() if label in busy}
