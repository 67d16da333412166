"""The README's tables and figures, generated from the run records of analysis/results/*.json.

`python -m analysis.results` rewrites what stands between the markers of README.md, docs/results.md, which tells each
run in full, and docs/figures/NAME.svg.
"""

import html
from collections.abc import Iterator
from pathlib import Path

from analysis import tables
from analysis.throughput import throughput
from executor.record import RunRecord, load_results
from executor.run_directory import Run
from simulator.errors import InputError

BEGIN, END = (
    "<!-- results: generated from analysis/results by python -m analysis.results -->",
    "<!-- end of results -->",
)
FIGURES = "docs/figures"
DETAILS = "docs/results.md"

# Columns of the full comparison that a README has room for.
_COLUMNS = (
    "#",
    "case",
    "predicted TFLOPS",
    "measured TFLOPS",
    "error",
    "ideal TFLOPS",
    "measured step",
    "device",
    "parameters",
    "tokens a step",
    "device peak, measured",
    "host peak, measured",
)


def update_readme(root: Path) -> list[Path]:
    """Rewrite README.md between its markers, and the figures it shows; returns the files whose content changed.

    Raises InputError for a README without markers and for a damaged results file; then nothing is written.
    """
    readme = root / "README.md"
    results = load_all(root / "analysis" / "results")
    contents = {
        readme: _replaced(readme, results_markdown(results)),
        root / DETAILS: details_markdown(results),
    }
    for name, records in results.items():
        contents[root / FIGURES / f"{name}.svg"] = throughput(_runs(records), name).svg
    changed = []
    for path, text in contents.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        changed.append(path)
    return changed


def load_all(directory: Path) -> dict[str, list[RunRecord]]:
    """Name -> records of every results file of a folder, by name."""
    return {path.stem: load_results(path) for path in sorted(directory.glob("*.json"))}


def results_markdown(results: dict[str, list[RunRecord]]) -> str:
    """A heading, a figure and a table of each results file: the last attempt of every case."""
    return "\n".join(part for name, records in results.items() for part in _section(name, records))


def _section(name: str, records: list[RunRecord]) -> Iterator[str]:
    last = {record.case: number for number, record in enumerate(records, start=1)}
    frame = tables.comparison(_runs(records))
    devices = sorted({record.device_name for record in records})
    yield f"### {name}\n"
    yield (
        f"On {', '.join(devices)}. The table has the last attempt of every case, the figure all by number; each of the "
        f"{len(records)} in full, earlier and failed ones too: [{DETAILS}]({DETAILS}#{name}).\n"
    )
    yield f"![Predicted and measured TFLOPS of {name}]({FIGURES}/{name}.svg)\n"
    columns = [column for column in _COLUMNS if column in frame.columns and (column != "device" or len(devices) > 1)]
    yield tables.markdown(frame[frame["#"].isin(map(str, last.values()))][columns])
    for number in last.values():
        if records[number - 1].status != "ok":
            yield _failure(number, records[number - 1])


def _failure(number: int, record: RunRecord) -> str:
    return f"{number}. {record.case}: {tables.STATUS[record.status]}: {record.message}\n"


def details_markdown(results: dict[str, list[RunRecord]]) -> str:
    """A page with every attempt in a table, why some failed, and each run that was measured in full."""
    return "\n".join(
        [
            "# Results, run by run\n",
            "Generated from the run records in `analysis/results/` by `python -m analysis.results`. Errors are the "
            "prediction's.\n",
            *(part for name, records in results.items() for part in _detailed(name, records)),
        ]
    )


def _detailed(name: str, records: list[RunRecord]) -> Iterator[str]:
    yield f"## {name}\n"
    frame = tables.comparison(_runs(records))
    yield tables.markdown(frame[[column for column in _COLUMNS if column in frame.columns]])
    for number, record in enumerate(records, start=1):
        if record.status != "ok":
            yield _failure(number, record)
    for number, record in enumerate(records, start=1):
        if record.predicted is not None and record.measured is not None:
            yield from _details(number, record)


def _details(number: int, record: RunRecord) -> Iterator[str]:
    """One run: a sentence, its figures, and where its step's time went."""
    yield f"### {number}. {html.escape(record.case)}\n"
    yield f"{tables.sentence(record)}\n"
    yield tables.markdown(tables.figures(record))
    if not (breakdown := tables.breakdown(record)).empty:
        yield tables.markdown(breakdown)


def _runs(records: list[RunRecord]) -> list[Run]:
    return [Run(record.case, record) for record in records]


def _replaced(readme: Path, text: str) -> str:
    try:
        old = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{readme}: cannot be read ({error.strerror or error})") from error
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{readme}: has no place for results; add the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{text}{end}{after}"


if __name__ == "__main__":
    for path in update_readme(Path(__file__).resolve().parent.parent):
        print(path)
