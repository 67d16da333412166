"""The papers' tables as simulated: as text, as CSV, and as a figure."""

import csv
import io
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from analysis.paper_findings import Finding
from analysis.published import Published
from analysis.reproduce import ALLOCATION_GOAL, TIME_GOAL, Comparison, Ranking, Reproduced
from simulator.datasheet import H200_DERATING
from simulator.errors import InputError
from simulator.megatrain_costs import MEGATRAIN_PHASES
from simulator.units import GIB

WIDTH = 120
COLUMNS = (
    "paper", "table", "row", "model", "machine", "tokens_of_a_row", "rows", "system", "quantity", "unit", "published",
    "simulated", "error", "goal", "inside", "source",
)  # fmt: skip
_TITLES = {"text": "abstract", "reference": "the reference host, measured by this project"}


def text(
    published: Published, reproduced: Sequence[Reproduced], ranked: Sequence[Ranking], found: Sequence[Finding]
) -> str:
    """The whole report: each table, the orders, the score, what misses and why, contradictions, sources."""
    lines: list[str] = []
    for (paper, table), items in groupby(reproduced, key=lambda item: (item.row.paper, item.row.table)):
        lines += [f"{paper}, {_TITLES.get(table, f'table {table}')}", *_table(list(items)), ""]
    if ranked:
        lines += ["order of systems, fastest first", *_orders(ranked), ""]
    lines += ["score", *_score(reproduced, ranked, found), ""]
    lines += ["rows outside the goal", *_misses(reproduced, found), ""]
    if found:
        lines.append("published values that contradict themselves or the hardware")
        lines += [*(line for one in found for line in _wrapped(f"{one.where}: {one.text}")), ""]
    if any(item.row.assumed for item in reproduced):
        lines += ["what the papers leave open", *_assumed(reproduced), ""]
    lines += ["sources", *_sources(published, reproduced)]
    return "\n".join(lines)


def _table(items: Sequence[Reproduced]) -> Iterator[str]:
    header = f"  {'row':30} {'rows':>5} {'tokens':>8}  {'quantity':20} {'published':>10} {'simulated':>10} {'error':>8}"
    yield header
    for item in items:
        first = f"{item.row.row:30} {item.simulation.rows:>5} {item.simulation.tokens:>8,}"
        lines = [_line(comparison) for comparison in item.comparisons] or list(_alone(item))
        for name in item.row.not_simulated:
            title = name.removesuffix("_gib").replace("_", " ") + ", GiB" * name.endswith("_gib")
            lines.append(f"{title:20} {_number(getattr(item.row.values, name)):>10} {'-':>10}")
        if item.row.out_of_memory_rows is not None:
            fits = item.simulation.most_rows >= item.row.out_of_memory_rows
            lines.append(
                f"{f'{item.row.out_of_memory_rows} rows':20} {'out of mem':>10} {'fit' if fits else 'out of mem':>10}"
            )
        for number, line in enumerate(lines):
            yield f"  {first if number == 0 else '':45}  {line}".rstrip()


def _line(comparison: Comparison) -> str:
    title = f"{comparison.quantity}, {comparison.unit}" if comparison.unit else comparison.quantity
    verdict = (
        "" if comparison.inside is None else f"{'inside' if comparison.inside else 'OUTSIDE'} {comparison.goal:.0%}"
    )
    error = f"{comparison.error:+.1%}" if comparison.quantity != "more rows" else ""
    return (
        f"{title:20} {_number(comparison.published):>10} {_number(comparison.simulated):>10} {error:>8}  {verdict}"
    ).rstrip()


def _alone(item: Reproduced) -> Iterator[str]:
    """A row without published values: what was simulated."""
    simulation = item.simulation
    for title, value in (
        ("most rows", float(simulation.most_rows)), ("step, s", simulation.step_seconds), ("TFLOPS", simulation.tflops),
        ("tokens/s", simulation.tokens / simulation.step_seconds), ("device peak, GiB", simulation.device_bytes / GIB),
    ):  # fmt: skip
        yield f"{title:20} {'-':>10} {_number(value):>10}"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _orders(ranked: Sequence[Ranking]) -> Iterator[str]:
    for ranking in ranked:
        if ranking.same:
            yield f"  {ranking.order}: {' > '.join(ranking.published)}: the same"
        else:
            yield f"  {ranking.order}: published {' > '.join(ranking.published)}"
            yield f"  {'':{len(ranking.order)}}  DIFFERS: {' > '.join(ranking.simulated)}"


def _score(reproduced: Sequence[Reproduced], ranked: Sequence[Ranking], found: Sequence[Finding]) -> Iterator[str]:
    for title, goal in (("times and speedups", TIME_GOAL), ("device allocations", ALLOCATION_GOAL)):
        judged = [
            (item, c) for item in reproduced for c in item.comparisons
            if c.goal == goal and item.row.paper != "measured"
        ]  # fmt: skip
        if judged:
            inside = sum(c.inside is True for _, c in judged)
            contradicted = {one.where for one in found if one.about == "time"}
            against = sum(c.inside is False and item.row.where in contradicted for item, c in judged)
            words = f"; of the others {against} are contradicted by arithmetic, below" if against else ""
            yield f"  {title}: {inside} of {len(judged)} within {goal:.0%}{words}"
    if ranked:
        yield f"  orders: {sum(ranking.same for ranking in ranked)} of {len(ranked)} the same"


def _misses(reproduced: Sequence[Reproduced], found: Sequence[Finding]) -> Iterator[str]:
    for item in reproduced:
        missing = [f"{c.quantity} {c.error:+.1%}" for c in item.comparisons if c.inside is False]
        if missing:
            reason = item.row.miss or "Contradicted below."
            yield from _wrapped(f"{item.row.where}: {', '.join(missing)}. {reason}")
    if not any(item.misses for item in reproduced):
        yield "  none"


def _assumed(reproduced: Sequence[Reproduced]) -> Iterator[str]:
    for item in reproduced:
        if item.row.assumed:
            yield from _wrapped(f"{item.row.where}: {item.row.assumed}")


def _sources(published: Published, reproduced: Sequence[Reproduced]) -> Iterator[str]:
    for name, reference in published.papers.items():
        if any(item.row.paper == name for item in reproduced):
            yield from _wrapped(f"{name}: {reference}")
    for name in dict.fromkeys(item.row.machine for item in reproduced):
        machine = next(item.simulation.machine for item in reproduced if item.row.machine == name)
        shown = [figure for figure in machine.figures() if figure.label.startswith(("matmul bf16", "host DRAM, link"))]
        shown += [figure for figure in machine.figures() if figure.label.startswith("attention bf16")][:1]
        for figure in shown:
            yield from _wrapped(f"{name}, {figure.label}: {figure.figure.source}")
    yield from _wrapped(f"all derating factors: simulator/datasheet.py, {H200_DERATING.source}")
    for kind, phase in MEGATRAIN_PHASES.items():
        rate = phase.parameters_per_second
        yield from _wrapped(
            f"{kind.replace('_', ' ')} on the host: {rate.value / 1e9:.2f} G parameters/s in proportion to host DRAM; "
            f"{rate.source}"
        )


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def csv_text(published: Published, reproduced: Sequence[Reproduced]) -> str:
    """One line a published value; `error` and `goal` are shares, `inside` is empty where there is no goal."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for item in reproduced:
        row, simulation = item.row, item.simulation
        head = (row.paper, row.table, row.row, row.model, row.machine, row.length, simulation.rows, row.variant)
        for c in item.comparisons:
            goal, inside = ("", "") if c.goal is None else (c.goal, c.inside)
            numbers = (f"{c.published:.6g}", f"{c.simulated:.6g}", f"{c.error:.4f}")
            writer.writerow((*head, c.quantity, c.unit, *numbers, goal, inside, published.papers[row.paper]))
    return buffer.getvalue()


def write(directory: Path | str, published: Published, reproduced: Sequence[Reproduced], report: str) -> list[Path]:
    """Write reproduction.txt, .csv, .png and .svg; returns their paths. Raises InputError where that cannot be done."""
    from analysis.reproduction_figure import drawing

    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / "reproduction.txt", directory / "reproduction.csv"]
        paths[0].write_text(report + "\n", encoding="utf-8")
        paths[1].write_text(csv_text(published, reproduced), encoding="utf-8")
        return [*paths, *drawing(reproduced).save(directory)]
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from error
