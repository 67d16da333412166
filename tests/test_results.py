"""The README's tables and figures come from the committed results, and only from them."""

from pathlib import Path

import pytest
from sample_runs import failed_record, figures, record

from analysis import tables
from analysis.results import BEGIN, DETAILS, END, details_markdown, load_all, results_markdown, update_readme
from analysis.tables import markdown
from executor.record import append_result
from simulator.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path):
    (tmp_path / "README.md").write_text(f"# Title\n\n{BEGIN}\nold table\n{END}\n\n## After\n", encoding="utf-8")
    results = tmp_path / "analysis" / "results"
    append_result(results / "box.json", record("7b", ideal=figures(646.0)))
    append_result(results / "box.json", failed_record("32b | large"))
    append_result(results / "airport.json", record("other"))
    return tmp_path


def test_readme_shows_the_results_between_its_markers(project):
    changed = update_readme(project)
    assert {path.relative_to(project).as_posix() for path in changed} == {
        "README.md", "docs/results.md", "docs/figures/box.svg", "docs/figures/airport.svg",
    }  # fmt: skip
    text = (project / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\n{BEGIN}\n### airport\n")
    assert text.endswith(f"{END}\n\n## After\n")
    assert "old table" not in text
    assert "![Predicted and measured TFLOPS of box](docs/figures/box.svg)" in text
    assert "2. 32b | large: refused: host memory short by 41 GiB" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| 1 | 7b |"))
    assert [cell.strip() for cell in row.split("|")[3:8]] == ["500", "510", "−2.0 %", "646", "1.18 s"]


def test_each_run_that_was_measured_is_told_in_full(project):
    update_readme(project)
    text = (project / "docs" / "results.md").read_text(encoding="utf-8")
    assert text.count("### ") == 2  # not of the run that failed
    assert "### 1. 7b\n\nqwen2 of 7.62 B" in text
    assert "| step time | 1.20 s | 1.18 s | +2.0 % |" in text
    assert "| waiting for weights | 200 ms | 196 ms | 16.7 % |" in text


def test_readme_has_the_last_attempt_of_a_case_and_the_page_has_all(project):
    append_result(project / "analysis" / "results" / "box.json", failed_record("7b", message="ran out"))
    append_result(project / "analysis" / "results" / "box.json", record("32b | large", measured=499.0))
    update_readme(project)
    readme, page = ((project / path).read_text(encoding="utf-8") for path in ("README.md", "docs/results.md"))
    section = readme.partition("### box\n")[2]
    assert [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][2:] == ["3", "4"]
    assert "3. 7b: refused: ran out" in section
    assert "host memory short" not in section  # its case succeeded afterwards
    assert [f"\n| {number} | " in page for number in (1, 2, 3, 4)] == [True] * 4
    assert "2. 32b | large: refused: host memory short by 41 GiB" in page


def test_memory_of_an_ideal_that_nobody_measured_is_not_nothing():
    table = tables.figures(record(ideal=figures(646.0, device_peak_bytes=0, host_peak_bytes=0))).set_index("")
    assert table["ideal"].to_dict() == {
        "step time": "929 ms", "TFLOPS (6 N T)": "646", "TFLOPS with attention": "678", "tokens/s": "12,920",
        "device peak": "–", "host peak": "–",
    }  # fmt: skip


def test_every_table_row_has_as_many_cells_as_its_header(project):
    update_readme(project)
    text = "".join((project / path).read_text(encoding="utf-8") for path in ("README.md", "docs/results.md"))
    counts: list[set[int]] = [set()]
    for line in text.splitlines():
        if line.startswith("|"):
            counts[-1].add(line.replace("\\|", "").count("|"))
        else:
            counts.append(set())
    found_tables = [found for found in counts if found]
    assert len(found_tables) == 2 * 2 + 2 * 2  # a comparison a file on each page, and two of each run that was measured
    assert all(len(found) == 1 for found in found_tables)


def test_second_time_nothing_changes(project):
    update_readme(project)
    assert update_readme(project) == []


def test_readme_without_markers_is_refused_and_kept(project):
    (project / "README.md").write_text("# Title\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"README\.md: has no place"):
        update_readme(project)
    assert (project / "README.md").read_text(encoding="utf-8") == "# Title\n"
    assert not (project / "docs").exists()


def test_damaged_results_change_nothing(project):
    (project / "analysis" / "results" / "box.json").write_text("[")
    before = (project / "README.md").read_text(encoding="utf-8")
    with pytest.raises(InputError, match=r"box\.json"):
        update_readme(project)
    assert (project / "README.md").read_text(encoding="utf-8") == before


def test_cells_cannot_break_a_table():
    import pandas

    assert markdown(pandas.DataFrame([{"a": "x|y\nz", "b": "1"}])) == "| a | b |\n| --- | --- |\n| x\\|y z | 1 |\n"


def test_readme_of_this_project_is_up_to_date():
    results = load_all(ROOT / "analysis" / "results")
    if not results:
        pytest.skip("no results are committed yet")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{results_markdown(results)}{END}" in text, "run python -m analysis.results"
    assert (ROOT / DETAILS).read_text(encoding="utf-8") == details_markdown(results), "run python -m analysis.results"
