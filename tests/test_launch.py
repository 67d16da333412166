"""`conveyor train` from a config to a run directory, on the CPU, and what it leaves of an earlier run there."""

import json
from pathlib import Path

import pytest
import yaml

from analysis import cli
from executor.run_directory import load_run
from tests.tiny_model import save_pretrained, tiny_config


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of six steps on random tokens, beside the folder of its model."""
    monkeypatch.chdir(tmp_path)
    save_pretrained(tiny_config(), tmp_path / "model")
    settings = {
        "model": "model", "data": "synthetic", "output": "run", "hardware": "cpu-2-core", "sequence_length": 16,
        "tokens_per_step": 64, "learning_rate": 1e-3, "warmup_steps": 1, "max_steps": 6, "save_every": 3,
        "precision": "fp32",
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("resume=auto",), "the run is complete, all 6 steps are done"),
        (("resume=auto", "max_steps=9"), "optimizer.max_steps"),
        (("resume=missing",), "missing does not exist"),
        (("data=missing.jsonl",), "missing.jsonl does not exist"),
    ],
    ids=["complete", "other settings", "no checkpoint", "no data"],
)
def test_a_refused_run_changes_nothing_of_the_finished_one(
    overrides: tuple[str, ...], complaint: str, run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "run.yaml"]) == 0
    before = files(run_yaml.parent / "run")
    assert cli.main(["train", "run.yaml", *overrides]) == 2
    assert complaint in capsys.readouterr().err
    assert files(run_yaml.parent / "run") == before
    assert [row["step"] for row in load_run("run").metrics] == list(range(6))


def test_a_refused_first_run_leaves_its_record(run_yaml: Path) -> None:
    assert cli.main(["train", "run.yaml", "resume=missing"]) == 2
    record = json.loads((run_yaml.parent / "run" / "run.json").read_text())
    assert record["status"] == "refused"
    assert "missing does not exist" in record["message"]


def test_data_that_does_not_exist_is_refused_before_anything_is_made(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "run.yaml", "data=missing.jsonl"]) == 2
    captured = capsys.readouterr()
    assert "missing.jsonl does not exist" in captured.err
    assert captured.out == ""  # no plan was made
    assert not (run_yaml.parent / "run").exists()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_limit_of_0_bytes_is_not_taken_for_no_limit(
    tier: str, run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = "plan --model model --hardware cpu-2-core --sequence-length 16 --tokens-per-step 64"
    assert cli.main([*plan.split(), f"--{tier}-memory", "0"]) == 2
    assert f"--{tier}-memory: 0 bytes" in capsys.readouterr().err
    assert cli.main(["train", "run.yaml", f"{tier}_memory=0"]) == 2
    assert f"{tier}_memory: 0 bytes" in capsys.readouterr().err


def test_costs_are_not_measured_in_the_name_of_another_kind_of_machine(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    measure = "measure --model model --hardware h200 --sequence-length 16 --micro-batch-rows 1"
    assert cli.main(measure.split()) == 2
    assert "'h200' computes on a 'cuda' device and this machine on 'cpu'" in capsys.readouterr().err
    assert not (run_yaml.parent / "costs.json").exists()


def test_checkpoints_are_given_up_only_when_asked_to(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.yaml"]) == 0
    before = files(run_yaml.parent / "run")
    assert cli.main(["train", "run.yaml", "learning_rate=1e-4"]) == 2
    complaint = capsys.readouterr().err
    assert "run/checkpoints/step-00000006 is of an earlier run" in complaint
    assert "resume=auto" in complaint
    assert "resume=never" in complaint
    assert files(run_yaml.parent / "run") == before
    assert cli.main(["train", "run.yaml", "learning_rate=1e-4", "resume=never"]) == 0
    assert [row["learning_rate"] for row in load_run("run").metrics][1] == pytest.approx(1e-4)
