"""A run directory: what a run leaves on disk, written as it goes and read back by `plot`.

plan.json                 the plan that was followed
config.yaml               the resolved configuration
predicted_timeline.json   one steady step, replayed
metrics.jsonl             a line a step
evaluations.jsonl         a line an evaluation, where there was one
timeline.json             one steady step, measured
run.json                  the RunRecord; written last, so a directory that has it is complete
checkpoints/
model/                    the trained model, as transformers loads it
"""

import errno
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.record import RunRecord, record_json
from simulator.errors import ConveyorError, InputError
from simulator.files import write_whole
from simulator.schema import Schema
from simulator.timeline import Timeline

PLAN, CONFIG, METRICS, RECORD = "plan.json", "config.yaml", "metrics.jsonl", "run.json"
EVALUATIONS = "evaluations.jsonl"
TIMELINE, PREDICTED_TIMELINE = "timeline.json", "predicted_timeline.json"
CHECKPOINTS, EXPORTED = "checkpoints", "model"


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read back. A run that did not end well may have no metrics and no timelines."""

    name: str
    record: RunRecord
    metrics: tuple[dict[str, Any], ...] = ()
    predicted: Timeline | None = None
    measured: Timeline | None = None
    evaluations: tuple[dict[str, Any], ...] = ()


def holds_run(directory: Path | str) -> bool:
    """Whether a run has left steps, checkpoints or a model here. One that was refused before its first step has not."""
    directory = Path(directory)
    kept = (METRICS, EXPORTED)
    checkpoints = directory / CHECKPOINTS
    return any((directory / name).exists() for name in kept) or (
        checkpoints.is_dir() and any(path.is_dir() for path in checkpoints.iterdir())
    )


def start_run(directory: Path | str, *, plan: Schema, config: str, predicted: Timeline) -> Path:
    """Make the directory and write what is known before the first step; returns the folder for checkpoints.

    `config` is the text of config.yaml. What an earlier run says of itself here is taken back (run.json,
    timeline.json): a resumed run is not finished. Its checkpoints stay, and its metrics, but for a last line that a
    kill left half-written. Raises InputError where the directory cannot be written.
    """
    directory = Path(directory)
    checkpoints = directory / CHECKPOINTS
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        for name in (RECORD, TIMELINE):
            (directory / name).unlink(missing_ok=True)
        plan.save(directory / PLAN)
        write_whole(directory / CONFIG, config)
        predicted.save(directory / PREDICTED_TIMELINE)
        for name in (METRICS, EVALUATIONS):
            _cut_half_line(directory / name)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from error
    return checkpoints


def _cut_half_line(path: Path) -> None:
    """Cut what follows the last line end: the next line would be glued to it."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def append_metrics(directory: Path | str, row: Mapping[str, Any], *, name: str = METRICS) -> None:
    """Add a step's line to metrics.jsonl, or to the file `name`.

    `row` has a `step`; numbers that are not finite are written as null.
    """
    if not isinstance(row.get("step"), int):
        raise ValueError(f"a line of metrics needs an integer 'step': {dict(row)}")
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    path = Path(directory) / name
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite, allow_nan=False) + "\n")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; free some disk and go on with resume=auto" if full else ""
        raise ConveyorError(f"{path}: cannot be written ({error.strerror or error}){remedy}") from error


def finish_run(directory: Path | str, record: RunRecord, *, measured: Timeline | None = None) -> None:
    """Write timeline.json where a step was measured, then run.json. The directory may be new: a refused run.

    Raises ConveyorError where the disk refuses.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if measured is not None:
            measured.save(directory / TIMELINE)
        write_whole(directory / RECORD, record_json(record))
    except OSError as error:
        raise ConveyorError(f"{directory}: cannot be written ({error.strerror or error})") from error


def load_run(directory: Path | str) -> Run:
    """Read a run directory. Raises InputError that names the file which is missing or damaged, and where."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: there is no such run directory")
    if not (directory / RECORD).is_file():
        # A plan alone may be one that `plan` wrote there.
        started = (directory / CONFIG).exists() or (directory / METRICS).exists()
        unfinished = "the run has not finished; if it was killed, train with resume=auto goes on with it"
        reason = unfinished if started else "this is not a run directory"
        raise InputError(f"{directory}: has no {RECORD}; {reason}")
    record = RunRecord.load(directory / RECORD)
    needed = (PLAN, CONFIG, METRICS, TIMELINE, PREDICTED_TIMELINE) if record.status == "ok" else ()
    missing = [name for name in needed if not (directory / name).is_file()]
    if missing:
        raise InputError(f"{directory}: has no {', '.join(missing)}, which a run with status 'ok' leaves")
    return Run(
        name=directory.resolve().name,
        record=record,
        metrics=load_lines(directory / METRICS),
        evaluations=load_lines(directory / EVALUATIONS),
        predicted=_load_timeline(directory / PREDICTED_TIMELINE),
        measured=_load_timeline(directory / TIMELINE),
    )


def load_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Lines in ascending steps. A step that stands twice was run again after a resume: what followed it is void."""
    if not path.exists():
        return ()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: is not JSON ({error})") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise InputError(f"{path}:{number}: is not an object with an integer 'step'")
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return tuple(rows)


def load_eval_losses(directory: Path | str, *, before_step: int) -> dict[int, float]:
    """Losses of the evaluations after the steps below `before_step`, by step; NaN where one was not finite.

    Raises InputError naming file and step for a line that has none.
    """
    path, losses = Path(directory) / EVALUATIONS, dict[int, float]()
    for row in load_lines(path):
        loss = row.get("eval_loss", "missing")
        if isinstance(loss, bool) or not isinstance(loss, int | float | None):
            raise InputError(f"{path}: eval_loss of step {row['step']} is {loss!r}, not a number; take the line out")
        if row["step"] < before_step:
            losses[row["step"]] = math.nan if loss is None else float(loss)
    return losses


def _load_timeline(path: Path) -> Timeline | None:
    return Timeline.load(path) if path.exists() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text") from error
