"""How well runs were predicted: errors by hand's arithmetic, calibrated and held-out runs apart, failures shown."""

from pathlib import Path
from typing import Any

import pandas
import pytest
from sample_runs import failed_record, moved, record, timeline, write_run

from analysis.attempts import attempts, every_attempt, kinds, summary
from analysis.cli import main
from analysis.fidelity import drawings, plot_fidelity, text
from executor.record import PredictedFrom, RunRecord, append_result
from executor.run_directory import Run
from simulator.errors import InputError

FOLDED = PredictedFrom(hardware="0123456789abcdef", costs="89abcdef", folded_runs=("first",))


def run(case: str, *, error: float = 0.0, device: float = 0.0, host: float = 0.0, **changes: Any) -> Run:
    """A run whose step time and peaks were predicted with these errors, as shares of what was measured."""
    made = record(case, predicted=500.0, measured=500.0, **changes)
    assert made.predicted is not None
    assert made.measured is not None
    predicted = made.predicted.model_copy(
        update={
            "step_seconds": made.measured.step_seconds * (1 + error),
            "device_peak_bytes": round(made.measured.device_peak_bytes * (1 + device)),
            "host_peak_bytes": round(made.measured.host_peak_bytes * (1 + host)),
        }
    )
    return Run(case, made.model_copy(update={"predicted": predicted}))


def failed(made: RunRecord | None = None) -> Run:
    made = made or failed_record()
    return Run(made.case, made)


def row(frame: pandas.DataFrame, *, predictions: str, **where: str) -> dict[str, str]:
    """The one row of a table with these cells."""
    chosen = frame[frame["predictions"] == predictions]
    for value in where.values():
        chosen = chosen[(chosen == value).any(axis=1)]
    assert len(chosen) == 1
    return dict(chosen.iloc[0])


RUNS = [
    run("a", error=0.02, device=0.01, host=0.02),
    run("b", error=-0.06, device=0.00, host=-0.01),
    run("c", error=0.01, device=0.03, host=0.01),
    run("d", error=0.10, device=0.01, host=0.01, predicted_from=FOLDED),
    failed(),
]


def test_medians_and_worst_errors_are_those_of_each_group() -> None:
    table = summary(attempts(RUNS))
    step = row(table, predictions="held out", figure="step time")
    assert (step["runs"], step["median error"], step["worst error"]) == ("3", "2.0 %", "−6.0 % (run 2)")
    assert step["met"] == "yes"  # median 2 of 3 %, worst 6 of 7 %
    step = row(table, predictions="calibrated", figure="step time")
    assert (step["runs"], step["median error"], step["worst error"]) == ("1", "10.0 %", "+10.0 % (run 4)")
    assert step["met"] == "no"


def test_a_peak_that_was_predicted_too_low_once_misses_its_aim() -> None:
    table = summary(attempts(RUNS))
    host = row(table, predictions="held out", figure="host peak")
    assert (host["too low"], host["worst error"], host["met"]) == ("1", "+2.0 % (run 1)", "no")
    assert row(table, predictions="calibrated", figure="host peak")["met"] == "yes"
    assert row(table, predictions="held out", figure="device peak")["met"] == "no"  # 3 % of 2 %, never too low


def test_the_last_attempts_of_cases_that_were_tried_again_stand_beside_all() -> None:
    table = summary(attempts([*RUNS, run("b", error=0.01), run("c", device=-0.01)]))
    assert row(table, predictions="held out", figure="step time")["runs"] == "5"
    last = row(table, predictions="held out, last of each case", figure="step time")
    assert (last["runs"], last["worst error"], last["met"]) == ("3", "+2.0 % (run 1)", "yes")
    assert row(table, predictions="held out, last of each case", figure="host peak")["too low"] == "0"
    assert row(table, predictions="held out, last of each case", figure="device peak")["too low"] == "1"
    assert not summary(attempts(RUNS))["predictions"].str.contains("last").any()


def test_every_attempt_stands_in_its_table_with_its_outcome() -> None:
    table = every_attempt(attempts(RUNS))
    assert list(table["#"]) == ["1", "2", "3", "4", "5"]
    assert table["outcome"].iloc[4] == "refused: host memory short by 41 GiB"
    assert set(table.iloc[4][["predictions", "step time, predicted", "step time, error"]]) == {"–"}
    assert "run 5, too large: refused: host memory short by 41 GiB" in text(attempts(RUNS))


def test_seconds_by_kind_come_from_timelines_and_elsewhere_from_the_record() -> None:
    slower = moved(timeline(layer_seconds=0.11), 0.3)
    alone = Run("timed", record("timed"), predicted=timeline(), measured=slower)
    table = kinds(attempts([alone]))
    errors = dict(zip(table["operations"], table["worst error"], strict=True))
    # Everything was predicted with 0.1 s a layer and took 0.11.
    assert set(errors.values()) == {"−9.1 % (run 1)"}
    assert set(errors) == {
        "forward (compute)", "backward (compute)", "loss (compute)",
        "load weights (h2d)", "store gradient (d2h)", "update (host)",
    }  # fmt: skip
    # Records alone know the compute resource: forward 200 and backward 300 of 600, each over its TFLOPS.
    table = kinds(attempts([Run("listed", record("listed", predicted=500, measured=510))]))
    assert dict(zip(table["operations"], table["worst error"], strict=True)) == {
        "backward (compute)": "+2.0 % (run 1)",
        "forward (compute)": "+2.0 % (run 1)",
    }
    assert dict(zip(table["operations"], table["of step"], strict=True))["backward (compute)"] == "50.0 %"


def test_figures_have_units_groups_and_failures() -> None:
    found = attempts([*RUNS, failed(record("full", measured=None, status="out_of_memory", message="device full"))])
    first, second = drawings(found)
    words = " ".join(label.get_text() for axis in first.figure.axes for label in (axis.xaxis.label, axis.yaxis.label))
    assert "measured step time (s)" in words
    assert "predicted step time (s)" in words
    assert words.count("error (%)") == 3
    (legend,) = first.figure.legends
    shown = {entry.get_text() for entry in legend.get_texts()}
    assert {"held out (3)", "calibrated (1)", "not measured (2)"} <= shown
    crosses = [line for line in first.figure.axes[1].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[5, 6]]
    assert "error of the seconds in a step (%)" in {axis.get_xlabel() for axis in second.figure.axes}
    assert "median error 2.0 %" in first.alt


def test_the_command_draws_prints_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_result(tmp_path / "list.json", record("listed", predicted_from=FOLDED))
    append_result(tmp_path / "list.json", failed_record())
    write_run(tmp_path / "run")
    sources = [str(tmp_path / "list.json"), str(tmp_path / "run")]
    assert main(["plot", "--fidelity", *sources, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    for words in (
        "step time",
        "median error",
        "worst error",
        "held out",
        "calibrated",
        "not measured: 1 of 3 attempts",
    ):
        assert words in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "fidelity.png", "fidelity.svg", "fidelity-kinds.png", "fidelity-kinds.svg", "fidelity.html",
    }  # fmt: skip
    page = (tmp_path / "out" / "fidelity.html").read_text(encoding="utf-8")
    assert "host memory short by 41 GiB" in page
    assert "<script" not in page
    again = plot_fidelity(sources, tmp_path / "again")[1]
    assert all(path.read_bytes() == (tmp_path / "out" / path.name).read_bytes() for path in again)


def test_runs_that_were_all_measured_are_drawn_with_room(tmp_path: Path) -> None:
    """Nothing is left to mark as not measured; an empty mark once took the layout all room."""
    for name in ("a", "b"):
        write_run(tmp_path / name)
    plot_fidelity([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    (errors, *_) = drawings(attempts(RUNS[:4]))
    assert errors.png
    heights = [axis.get_position().height for axis in errors.figure.axes]
    assert sum(heights) > 0.5
    assert min(heights) > 0.05


def test_runs_of_two_models_in_folders_of_one_name_are_two_cases() -> None:
    def of_model(model: str, error: float) -> Run:
        made = run("run", error=error)
        inputs = {**made.record.inputs, "hashes": {"model": model, "workload": "w"}}
        return Run("run", made.record.model_copy(update={"inputs": inputs}))

    table = summary(attempts([of_model("one", 0.02), of_model("two", 0.01)]))
    assert not table["predictions"].str.contains("last").any()
    table = summary(attempts([of_model("one", 0.02), of_model("two", 0.01), of_model("one", 0.0)]))
    assert row(table, predictions="held out, last of each case", figure="step time")["runs"] == "2"


def test_runs_without_anything_to_compare_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_result(tmp_path / "list.json", failed_record())
    with pytest.raises(InputError, match="no run has both"):
        plot_fidelity([tmp_path / "list.json"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert main(["plot", "--fidelity", str(tmp_path / "list.json"), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_source_that_is_named_twice_does_not_count_twice(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for again in ("a", "a/run.json", "b"):
        with pytest.raises(InputError, match=f"{again} is named more than once|a is named more than once"):
            plot_fidelity([tmp_path / "a", tmp_path / again], tmp_path / "report")
    assert not (tmp_path / "report").exists()
