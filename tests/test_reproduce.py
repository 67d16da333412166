"""`conveyor reproduce`: cited values, arithmetic by hand, orders, contradictions, and what is written."""

import csv
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from analysis.cli import main
from analysis.paper_findings import Finding, findings
from analysis.paper_models import MODELS, load_models
from analysis.published import PUBLISHED, Published, PublishedRow, load_published
from analysis.reproduce import Reproduced, lazytrain_homes, rankings, reproduce
from analysis.reproduction import csv_text, text
from simulator.errors import InputError
from simulator.hardware import load_hardware
from simulator.model import load_model_spec
from simulator.schema import validated

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def published() -> Published:
    return load_published()


@pytest.fixture(scope="module")
def reproduced(published: Published) -> list[Reproduced]:
    return reproduce(published)


@pytest.fixture(scope="module")
def found(reproduced: list[Reproduced]) -> list[Finding]:
    return findings(reproduced)


def row_of(reproduced: list[Reproduced], where: str) -> Reproduced:
    (item,) = [item for item in reproduced if item.row.where == where]
    return item


def values(item: Reproduced) -> dict[str, float]:
    return {comparison.quantity: comparison.simulated for comparison in item.comparisons}


def test_every_value_is_cited_and_every_table_is_there(published: Published) -> None:
    assert {(row.paper, row.table) for row in published.rows} == {
        *(("MegaTrain", table) for table in ("4", "5", "6", "7", "9")),
        ("LazyTrain", "text"),
        ("measured", "reference"),
    }
    assert all(published.papers[row.paper] and row.row for row in published.rows)
    assert len({row.where for row in published.rows}) == len(published.rows)
    # A row without values says why there are none, in it or in the one before of the same machine.
    silent = [row for row in published.rows if not row.values.model_dump(exclude_none=True)]
    assert {row.machine for row in silent} == {"rtx-3090"}
    assert "nothing to compare" in silent[0].assumed


def test_a_value_that_nobody_is_cited_for_is_refused() -> None:
    data = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    del data["papers"]["LazyTrain"]
    with pytest.raises(InputError, match="papers: no reference for LazyTrain"):
        validated(Published, **data)
    data["papers"]["LazyTrain"] = "somewhere"
    data["rows"][0]["values"]["tflop"] = 1.0
    with pytest.raises(InputError, match=r"rows\.0\.values\.tflop"):
        validated(Published, **data)


def test_models_are_those_that_transformers_builds() -> None:
    models = load_models()
    for name in ("qwen2.5-7b", "qwen2.5-14b"):
        assert models[name].spec() == load_model_spec(ROOT / f"simulator/catalogue/models/{name}.json")
    assert {name: round(model.spec().num_parameters / 1e9, 2) for name, model in models.items()} == {
        "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76, "qwen3.6-27b": 26.90,
    }  # fmt: skip
    # LazyTrain prints both for the 27B model: 6 N tokens/s.
    assert models["qwen3.6-27b"].spec().num_parameters == pytest.approx(219.95e12 / 6 / 1361, rel=0.003)
    assert all(model["source"] for model in yaml.safe_load(MODELS.read_text(encoding="utf-8")).values())


def test_depths_have_the_published_numbers_of_parameters(reproduced: list[Reproduced]) -> None:
    for item in reproduced:
        if item.row.values.parameters_billion is not None:
            assert values(item)["parameters"] == pytest.approx(item.row.values.parameters_billion, abs=0.006)


def test_device_allocations_are_within_the_goal_and_by_hand(reproduced: list[Reproduced]) -> None:
    """Width 2: hidden 7,168, MLP 37,888, 8 key heads; two flat buffers, two templates, embedding and head, in bf16."""
    hidden, mlp, keys = 7168, 37888, 8 * 128
    layer = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * mlp + hidden + 2 * keys + 2 * hidden
    by_hand = 2 * (4 * layer + 2 * 152064 * hidden + hidden) / 2**30
    assert values(row_of(reproduced, "MegaTrain, table 6, 2.0x"))["device alloc"] == pytest.approx(by_hand)
    judged = [c for item in reproduced for c in item.comparisons if c.quantity == "device alloc"]
    assert len(judged) == 12
    assert all(comparison.inside for comparison in judged)


def test_published_steps_are_read_off_tflops_and_tokens(reproduced: list[Reproduced]) -> None:
    step = {item.row.where: c for item in reproduced for c in item.comparisons if c.quantity == "step"}
    full = step["MegaTrain, table 4, full"]
    assert full.published == pytest.approx(6 * 32.763876352e9 * 96 * 1024 / 266.3e12)
    assert full.error == pytest.approx(full.simulated / full.published - 1)
    assert step["MegaTrain, table 9, A6000, 7B"].published == pytest.approx(12 * 8192 / 1219)


def test_systems_rank_as_published_but_for_the_row_that_is_contradicted(
    reproduced: list[Reproduced], found: list[Finding]
) -> None:
    ranked = {ranking.order: ranking for ranking in rankings(reproduced)}
    assert set(ranked) == {"table 4", "A6000 3B", "A6000 7B", "H800 27B"}
    assert all(ranking.same for order, ranking in ranked.items() if order != "table 4")
    assert ranked["H800 27B"].published == ("H800, LazyTrain", "H800, LazyTrain's baseline")
    suspect = "w/o double buffering"
    assert any(one.where.endswith(suspect) and one.about == "time" for one in found)
    table = ranked["table 4"]
    assert table.published[-1] == suspect
    published, simulated = ([name for name in names if name != suspect] for names in (table.published, table.simulated))
    assert published == simulated == ["full", "w/o gradient slab pool", "w/ checkpoint interval 1"]


def test_the_largest_batches_are_those_that_were_published(reproduced: list[Reproduced]) -> None:
    most = {"A6000, 3B": 15, "A6000, 7B": 12, "A6000, 14B": 9}
    for name, rows in most.items():
        assert abs(row_of(reproduced, f"MegaTrain, table 9, {name}").simulation.most_rows - rows) <= 1
    interval = row_of(reproduced, "MegaTrain, table 4, w/ checkpoint interval 1").simulation
    assert 64 <= interval.most_rows < 96  # 96 is published to run out of memory
    for item in reproduced:
        assert item.row.rows == 0 or item.simulation.rows == item.row.rows


def test_table_7_contradicts_its_formula_up_to_128k_and_not_beyond(found: list[Finding]) -> None:
    def said(row: str, words: str) -> list[str]:
        return [one.text for one in found if one.where == f"MegaTrain, table 7, {row}" and words in one.text]

    # (6 x 7.6156e9 x 204,800 + 12 x 28 x 3,584 x 8,192² x 25) / 32.36 s
    by_hand = (6 * 7.6156165e9 * 204800 + 12 * 28 * 3584 * 8192**2 * 25) / 32.36 / 1e12
    (sentence,) = said("8K", "do not follow the table's formula")
    assert f"{by_hand:.1f} TFLOPS; printed are 294.5" in sentence
    for row in ("32K", "128K"):
        assert said(row, "do not follow the table's formula")
        assert said(row, "too short for the GPU")
    assert "more than the nominal peak of 989" in said("128K", "too short for the GPU")[0]
    for row in ("256K", "512K"):
        assert not said(row, "formula") + said(row, "too short")
        assert said(row, "logits")


def test_tokens_and_tflops_of_the_3b_row_contradict_each_other(found: list[Finding]) -> None:
    (sentence,) = [one.text for one in found if "TFLOPS and tokens/s" in one.text]
    assert f"{6 * 3.085938688 * 2153 / 1e3:.1f} TFLOPS with N = 3.09 B" in sentence
    assert "need N = 3.85 B" in sentence


def test_what_misses_its_goal_says_why(reproduced: list[Reproduced], found: list[Finding]) -> None:
    contradicted = {one.where for one in found if one.about == "time"}
    for item in reproduced:
        assert bool(item.row.miss) == (item.misses and item.row.where not in contradicted), item.row.where


def test_no_figure_of_a_machine_comes_from_a_table_that_is_reproduced(published: Published) -> None:
    for name in {row.machine for row in published.rows}:
        for figure in load_hardware(name).figures():
            assert not re.search(r"table (4|5|6|7|9)\b", figure.figure.source), (name, figure.label)


def test_lazytrains_homes_are_its_shares() -> None:
    homes = lazytrain_homes(64)
    assert {home: homes.count(home) for home in homes} == {"host": 22, "device": 29, "recompute": 13}
    assert homes[0] == "host"
    assert "device" not in lazytrain_homes(28, lean=True)


def test_the_report_says_everything(
    published: Published, reproduced: list[Reproduced], found: list[Finding]
) -> None:  # fmt: skip
    report = text(published, reproduced, rankings(reproduced), found)
    for row in published.rows:
        assert row.row in report
    assert "DIFFERS: full > w/o gradient slab pool" in report
    outside = sum(c.inside is False for item in reproduced for c in item.comparisons)
    assert report.count("OUTSIDE") == outside
    assert re.search(r"96 rows +out of mem out of mem", report)
    assert all(len(line) <= 120 for line in report.splitlines())


def test_the_page_tells_the_score_of_the_report(
    published: Published, reproduced: list[Reproduced], found: list[Finding]
) -> None:  # fmt: skip
    report = text(published, reproduced, rankings(reproduced), found)
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    for title, pattern in (
        ("times and speedups", r"times and speedups: (\d+ of \d+)"),
        ("device allocations, tables 5 and 6", r"device allocations: (\d+ of \d+)"),
        ("order of systems", r"orders: (\d+ of \d+)"),
    ):
        score = re.search(pattern, report)
        assert score is not None
        assert re.search(rf"^\| {title} \| {score[1]}\b", page, flags=re.MULTILINE), (title, score[1])


def test_the_csv_has_a_line_a_value(published: Published, reproduced: list[Reproduced]) -> None:
    rows = list(csv.DictReader(csv_text(published, reproduced).splitlines()))
    assert len(rows) == sum(len(item.comparisons) for item in reproduced)
    assert all(row["source"] and float(row["published"]) for row in rows)
    for row in rows:
        error = float(row["simulated"]) / float(row["published"]) - 1
        assert float(row["error"]) == pytest.approx(error, abs=1e-3)
        if row["goal"]:
            assert (row["inside"] == "True") == (abs(error) <= float(row["goal"]))


def test_the_command_writes_text_csv_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["reproduce", "--table", "6", "--table", "7", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "MegaTrain, table 6" in printed
    assert "MegaTrain, table 9" not in printed
    files = {path.suffix: path for path in output.iterdir()}
    assert set(files) == {".txt", ".csv", ".png", ".svg"}
    assert files[".txt"].read_text(encoding="utf-8") in printed + "\n"
    assert files[".png"].read_bytes().startswith(b"\x89PNG")
    assert "table 7: 128K" in files[".svg"].read_text(encoding="utf-8")
    first = files[".svg"].read_bytes()
    assert main(["reproduce", "--table", "6", "--table", "7", "--output", str(output)]) == 0
    assert files[".svg"].read_bytes() == first


def test_rows_without_a_published_value_can_stand_alone(published: Published) -> None:
    rows = tuple(row for row in published.rows if row.row == "RTX 3090, 14B" and row.table == "9")
    alone = published.model_copy(update={"rows": rows})
    items = reproduce(alone)
    assert "most rows" in text(alone, items, rankings(items), findings(items))


def test_an_unknown_table_is_refused_in_one_sentence(complaint: Callable[..., str], tmp_path: Path) -> None:
    said = complaint("reproduce", "--table", "8", "--output", tmp_path / "out")
    assert said.count("\n") <= 1
    assert "there is no table '8'; there are 4, 5, 6, 7, 9, text, reference" in said
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(complaint: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert "out" in complaint("reproduce", "--table", "5", "--output", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_nothing_of_it_needs_torch() -> None:
    code = (
        "import sys, analysis.paper_findings, analysis.reproduction, analysis.reproduction_figure; "
        "sys.exit(any(name.split('.')[0] in ('torch', 'transformers') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_row_is_called_by_paper_table_and_row() -> None:
    row = validated(
        PublishedRow, paper="P", table="text", row="R", model="m", machine="h200", length=1, rows=1,
        variant="megatrain", values={},
    )  # fmt: skip
    assert row.where == "P, abstract, R"
