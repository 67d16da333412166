"""The report: figures of runs as files, and one HTML page that needs no other file and no network."""

import difflib
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from analysis import breakdown, lanes, losses, page, tables, throughput
from analysis.style import Drawing
from executor.record import load_results
from executor.run_directory import RECORD, Run, load_run
from simulator.errors import InputError

_NOTES = (
    "TFLOPS are 6 N T / seconds / 10¹² with N all parameters, the input embedding counted, and T tokens a step; with "
    "attention, 6 L heads head_dim Σs² a step are added (causal, forward and backward, s a document's length). "
    "Errors are predicted / measured − 1. Peaks are of the whole run: on the device its context and all memory "
    "reserved, on the host anonymous and pinned memory of all processes."
)


def plot(sources: Sequence[Path | str], output: Path | str) -> list[Path]:
    """Draw run directories and results files (NAME.json) into the folder `output`; returns the files written.

    The last one is report.html. Raises InputError for a source that is neither or is damaged, before anything is
    written.
    """
    runs = load_sources(sources)
    report = Report(runs)
    return write(output, report.drawings, "report.html", report.html())


def write(output: Path | str, drawings: Sequence[Drawing], name: str, text: str) -> list[Path]:
    """Write drawings and the page `name` into a folder, which is made; returns the files. Raises InputError."""
    output = Path(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        files = [path for drawing in drawings for path in drawing.save(output)]
        written = output / name
        written.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error.strerror or error})") from error
    return [*files, written]


def load_sources(sources: Sequence[Path | str]) -> list[Run]:
    """The runs of run directories, their run.json, and results files, with names that differ."""
    if not sources:
        raise InputError("plot: name at least one run directory or results file")
    runs = [run for source in sources for run in _load_source(Path(source))]
    names: set[str] = set()
    unique = []
    for run in runs:
        stem = name = re.sub(r"[^\w.-]+", "-", run.name).strip("-.") or "run"
        number = 1
        while name in names:
            number += 1
            name = f"{stem}-{number}"
        names.add(name)
        unique.append(replace(run, name=name))
    return unique


def _load_source(path: Path) -> list[Run]:
    if path.is_dir():
        return [load_run(path)]
    if not path.exists():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {str(path.parent / nearest[0])!r}?" if nearest else ""
        raise InputError(f"{path}: there is no such run directory or results file{hint}")
    if path.name == RECORD:
        return [load_run(path.parent)]
    records = load_results(path)
    if not records:
        raise InputError(f"{path}: holds no run records")
    return [Run(record.case, record) for record in records]


class Report:
    """Figures and page of some runs. What compares them comes first, then a section a run."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        known = [run for run in runs if run.record.predicted is not None or run.record.measured is not None]
        self.overview = [throughput.throughput(runs)] if known else []
        if sum(bool(losses.losses(run)) for run in runs) > 1:
            self.overview.append(losses.loss_comparison(runs))
        self.sections = [list(_drawings(run)) for run in runs]

    @property
    def drawings(self) -> list[Drawing]:
        return [*self.overview, *(drawing for section in self.sections for drawing in section)]

    def html(self) -> str:
        """The page: everything inline, no script, nothing loaded from elsewhere."""
        alone = len(self.runs) == 1
        title = f"Conveyor: {self.runs[0].record.case if alone else f'{len(self.runs)} runs'}"
        body = ["<header>", page.heading(title, 1)]
        body.append(page.paragraph("What was predicted and what was measured, from the records of the runs."))
        body += ["</header>", "<main>"]
        body += [page.figure(drawing, level=2) for drawing in self.overview[:1]]
        if not alone:
            body.append(_comparison(self.runs))
        body += [page.figure(drawing, level=2) for drawing in self.overview[1:]]
        for number, (run, drawings) in enumerate(zip(self.runs, self.sections, strict=True), start=1):
            body += _section(number, run, drawings, alone=alone)
        body += ["</main>", f"<footer>{page.paragraph(_NOTES)}</footer>"]
        return page.page(title, body)


def _drawings(run: Run) -> Iterator[Drawing]:
    if run.predicted is not None or run.measured is not None:
        yield lanes.timelines(run)
    if any(f is not None and f.breakdown_seconds for f in (run.record.predicted, run.record.measured)):
        yield breakdown.breakdown(run)
        if tables.lost_causes(run.record):
            yield breakdown.lost_time(run)
    if any(timeline is not None and timeline.memory for timeline in (run.predicted, run.measured)):
        yield lanes.memory(run)
    if losses.losses(run):
        yield losses.loss(run)


def _section(number: int, run: Run, drawings: Sequence[Drawing], *, alone: bool) -> Iterator[str]:
    record = run.record
    yield f'<section class="run" id="run-{number}">'
    yield page.heading("The run" if alone else f"{number}. {record.case}", 2)
    yield page.paragraph(tables.sentence(record))
    if record.status != "ok":
        yield page.paragraph(f"{tables.STATUS[record.status].capitalize()}: {record.message}", "failed")
    yield page.table(tables.figures(record), "numbers", "Speed and memory")
    yield from map(page.figure, drawings)
    yield page.table(tables.breakdown(record), "numbers", "A step's time in figures")
    yield page.table(tables.deviations(run), "numbers", "Largest deviations from the prediction, by kind of operation")
    yield '<div class="pair">'
    yield page.table(tables.policy(record), "words", "Policy")
    yield page.table(tables.origins(record), "words", "Where it comes from")
    yield "</div></section>"


def _comparison(runs: Sequence[Run]) -> str:
    """The table of all runs; a case leads to its section."""
    frame = tables.comparison(runs).map(html.escape)
    for column in set(frame.columns) - {"case", "device"}:
        frame[column] = frame[column].str.replace(" ", "&nbsp;")  # a figure and its unit stay on one line
    frame["device"] = [f'<div class="wide">{device}</div>' for device in frame["device"]]
    frame["case"] = [f'<a href="#run-{number}">{case}</a>' for number, case in enumerate(frame["case"], start=1)]
    return page.table(frame, "comparison", "The runs compared", level=2, escape=False)
