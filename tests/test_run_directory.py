"""Run directories: written as a run goes, read back whole, or refused in one sentence."""

import json
import math

import pytest
from sample_runs import SamplePlan, failed_record, moved, record, timeline, write_run

from executor.run_directory import append_metrics, finish_run, load_run, start_run
from simulator.errors import InputError


def test_run_directory_round_trip(tmp_path):
    directory = write_run(tmp_path / "my-run", record("a case"))
    run = load_run(directory)
    assert run.name == "my-run"
    assert run.record == record("a case")
    assert run.predicted == timeline()
    assert run.measured == moved(timeline(layer_seconds=0.11), 0.37)
    assert [row["loss"] for row in run.metrics] == [4.0, 3.0, 2.5]
    assert {path.name for path in directory.iterdir()} == {
        "plan.json", "config.yaml", "metrics.jsonl", "run.json", "timeline.json", "predicted_timeline.json",
        "checkpoints",
    }  # fmt: skip


def test_refused_run_needs_only_its_record(tmp_path):
    finish_run(tmp_path / "refused", failed_record())
    run = load_run(tmp_path / "refused")
    assert run.record.status == "refused"
    assert (run.metrics, run.predicted, run.measured) == ((), None, None)


def test_run_that_starts_again_is_unfinished_until_it_ends(tmp_path):
    directory = write_run(tmp_path / "run")
    start_run(directory, plan=SamplePlan(), config="", predicted=timeline())
    with pytest.raises(InputError, match="not finished"):
        load_run(directory)
    append_metrics(directory, {"step": 4, "loss": 2.0})
    finish_run(directory, record(), measured=timeline())
    assert [row["step"] for row in load_run(directory).metrics] == [1, 2, 3, 4]


def test_steps_run_again_after_a_resume_replace_the_first_attempt(tmp_path):
    directory = write_run(tmp_path / "run", losses=[5.0, 4.0, 3.0, 2.0])
    for step, loss in ((3, 3.3), (4, 2.2)):
        append_metrics(directory, {"step": step, "loss": loss})
    assert [(row["step"], row["loss"]) for row in load_run(directory).metrics] == [(1, 5), (2, 4), (3, 3.3), (4, 2.2)]


def test_metrics_that_are_not_finite_stay_valid_json(tmp_path):
    directory = write_run(tmp_path / "run", losses=[4.0, math.nan, math.inf])
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == [4.0, None, None]
    with pytest.raises(ValueError, match="step"):
        append_metrics(directory, {"loss": 1.0})


@pytest.mark.parametrize(
    "name", ["plan.json", "config.yaml", "metrics.jsonl", "timeline.json", "predicted_timeline.json"]
)
def test_finished_run_without_one_of_its_files_is_refused(tmp_path, name):
    directory = write_run(tmp_path / "run")
    (directory / name).unlink()
    with pytest.raises(InputError, match=f"has no {name}"):
        load_run(directory)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("run.json", b"{", "run.json"),
        ("run.json", b'{"case": "x"}', "inputs"),
        ("run.json", b"\xff", "UTF-8"),
        ("metrics.jsonl", b'{"step": 1}\n{"step": 2, "lo', "metrics.jsonl:2"),
        ("metrics.jsonl", b'{"step": 1}\n[2]\n', "metrics.jsonl:2"),
        ("metrics.jsonl", b'{"loss": 1}\n', "metrics.jsonl:1"),
        ("timeline.json", b"", "timeline.json"),
        ("timeline.json", b'{"step_seconds": "x", "spans": [], "memory": {}, "peak_bytes": {}}', "step_seconds"),
        ("timeline.json", b'{"step_seconds": 1, "spans": [], "memory": {}, "peak_bytes": {}}', "no operations"),
        ("predicted_timeline.json", b'{"step_seconds": 1, "spans": [{}], "memory": {}}', "spans.0.name"),
    ],
)
def test_damaged_file_is_named_in_one_sentence(tmp_path, name, content, complaint):
    directory = write_run(tmp_path / "run")
    (directory / name).write_bytes(content)
    with pytest.raises(InputError, match=complaint) as caught:
        load_run(directory)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_timeline_with_impossible_times_is_refused(tmp_path):
    directory = write_run(tmp_path / "run")
    for key, value in (("step_seconds", 0.0), ("step_seconds", math.nan)):
        data = {**json.loads((directory / "timeline.json").read_text()), key: value}
        (directory / "timeline.json").write_text(json.dumps(data))
        with pytest.raises(InputError, match="impossible"):
            load_run(directory)


def test_folder_that_is_no_run_is_told_from_an_unfinished_run(tmp_path):
    with pytest.raises(InputError, match="no such run directory"):
        load_run(tmp_path / "absent")
    with pytest.raises(InputError, match="not a run directory"):
        load_run(tmp_path)


def test_output_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file"):
        start_run(tmp_path / "file", plan=SamplePlan(), config="", predicted=timeline())
