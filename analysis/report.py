"""The report: figures of runs as files, and one HTML page that needs no other file and no network."""

import difflib
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas

from analysis import figures, lanes, tables
from analysis.style import Drawing
from executor.record import load_results
from executor.run_directory import RECORD, Run, load_run
from simulator.errors import InputError

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  margin: 0 auto; padding: 1rem; max-width: 56rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 0.5rem; overflow-wrap: anywhere;
  border-top: 1px solid #d9d9d9; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
p { margin: 0.5rem 0; }
a { color: #005a8c; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #e5e5e5; vertical-align: top; }
th { font-weight: 600; }
table.numbers td, table.numbers th { white-space: nowrap; }
table.comparison { font-size: 0.8rem; }
table.comparison td:nth-child(2) { min-width: 8rem; }
table.comparison div { min-width: 6.5rem; }
table.words td { overflow-wrap: anywhere; min-width: 7rem; }
table.numbers td:first-child { white-space: normal; }
figure { margin: 1rem 0; break-inside: avoid; }
figure svg { display: block; width: 100%; max-width: 38rem; height: auto; }
figcaption { font-size: 0.9rem; color: #404040; max-width: 38rem; }
.failed { border-left: 4px solid #d55e00; padding-left: 0.75rem; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; border-top: 1px solid #d9d9d9; padding-top: 0.5rem; font-size: 0.85rem; color: #404040; }
@media (max-width: 30rem) {
  table { font-size: 0.75rem; }
  th, td { padding-right: 0.4rem; }
  table.numbers td:first-child { min-width: 4.5rem; }
}
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  h3 { break-after: avoid; }
  tr, table.numbers { break-inside: avoid; }
  .scroll { overflow-x: visible; }
  table { font-size: 8pt; }
  table.comparison { font-size: 7pt; }
  table.comparison td, table.comparison th { padding-right: 0.4rem; }
  table.comparison td:nth-child(2) { min-width: 5rem; }
  table.comparison div { min-width: 0; }
}
"""


_NOTES = (
    "TFLOPS are 6 N T / seconds / 10¹² with N all parameters, the input embedding counted, and T tokens a step; with "
    "attention, 6 L heads head_dim Σs² a step are added (causal, forward and backward, s a document's length). "
    "Errors are predicted / measured − 1. Peaks are of the whole run: on the device its context and all memory "
    "reserved, on the host anonymous and pinned memory of all processes."
)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def plot(sources: Sequence[Path | str], output: Path | str) -> list[Path]:
    """Draw run directories and results files (NAME.json) into the folder `output`; returns the files written.

    The last one is report.html. Raises InputError for a source that is neither or is damaged, before anything is
    written.
    """
    runs = load_sources(sources)
    report = Report(runs)
    output = Path(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        files = [path for drawing in report.drawings for path in drawing.save(output)]
        page = output / "report.html"
        page.write_text(report.html(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error.strerror or error})") from error
    return [*files, page]


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
    """Figures and page of some runs. The comparison comes first, then a section a run."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        known = [run for run in runs if run.record.predicted is not None or run.record.measured is not None]
        self.overview = [figures.throughput(runs)] if known else []
        self.sections = [list(_drawings(run)) for run in runs]

    @property
    def drawings(self) -> list[Drawing]:
        return [*self.overview, *(drawing for section in self.sections for drawing in section)]

    def html(self) -> str:
        """The page: everything inline, no script, nothing loaded from elsewhere."""
        title = f"Conveyor: {self.runs[0].record.case}" if len(self.runs) == 1 else f"Conveyor: {len(self.runs)} runs"
        body = [f"<h1>{html.escape(title)}</h1>", "<p>Predicted and measured, from run records.</p>"]
        body += map(_figure, self.overview)
        if len(self.runs) > 1:
            body.append(_comparison(self.runs))
        for number, (run, drawings) in enumerate(zip(self.runs, self.sections, strict=True), start=1):
            body += _section(number, run, drawings, alone=len(self.runs) == 1)
        body.append(f"<footer><p>{html.escape(_NOTES)}</p></footer>")
        return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(body))


def _drawings(run: Run) -> Iterator[Drawing]:
    if run.predicted is not None or run.measured is not None:
        yield lanes.timelines(run)
    if any(f is not None and f.breakdown_seconds for f in (run.record.predicted, run.record.measured)):
        yield figures.breakdown(run)
    if any(timeline is not None and timeline.memory for timeline in (run.predicted, run.measured)):
        yield lanes.memory(run)
    if figures.losses(run):
        yield figures.loss(run)


def _section(number: int, run: Run, drawings: Sequence[Drawing], *, alone: bool) -> Iterator[str]:
    record = run.record
    heading = "The run" if alone else f"{number}. {record.case}"
    yield f'<section id="run-{number}"><h2>{html.escape(heading)}</h2>'
    if record.status != "ok":
        text = f"{tables.STATUS[record.status].capitalize()}: {record.message}"
        yield f'<p class="failed">{html.escape(text)}</p>'
    yield _table(tables.figures(record), "numbers")
    yield from map(_figure, drawings)
    yield _table(tables.deviations(run), "numbers", "Largest deviations from the prediction, by kind of operation")
    yield _table(tables.policy(record), "words", "Policy")
    yield _table(tables.origins(record), "words", "Where it comes from")
    yield "</section>"


def _figure(drawing: Drawing) -> str:
    caption = html.escape(drawing.caption)
    svg = drawing.svg.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def _table(frame: pandas.DataFrame, kind: str, title: str = "") -> str:
    if frame.empty:
        return ""
    heading = f"<h3>{html.escape(title)}</h3>\n" if title else ""
    return f'{heading}<div class="scroll">{frame.to_html(index=False, border=0, classes=kind, justify="left")}</div>'


def _comparison(runs: Sequence[Run]) -> str:
    """The table of all runs; a case leads to its section."""
    frame = tables.comparison(runs).map(html.escape)
    for column in set(frame.columns) - {"case", "device"}:
        frame[column] = frame[column].str.replace(" ", "&nbsp;")  # a figure and its unit stay on one line
    frame["device"] = [f"<div>{device}</div>" for device in frame["device"]]
    frame["case"] = [f'<a href="#run-{number}">{case}</a>' for number, case in enumerate(frame["case"], start=1)]
    table = frame.to_html(index=False, border=0, classes="comparison", justify="left", escape=False)
    return f'<div class="scroll">{table}</div>'
