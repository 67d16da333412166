"""A run without a plan of its own: a resume keeps the one of its directory, and wrong inputs are found before any."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from front_door import content

import executor.run_plan
from analysis.cli import main
from simulator.hardware import HardwareProfile, load_hardware
from simulator.probe import current_device, current_host

Complaint = Callable[..., str]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where profiles of this machine were written; its capacities are real, its rates the catalogue's."""
    written: list[Path] = []

    def probe(path: Path) -> HardwareProfile:
        profile = load_hardware("cpu-2-core").model_copy(update={"device": current_device(), "host": current_host()})
        written.append(path)
        profile.save(path)
        return profile

    monkeypatch.setattr(executor.run_plan, "probe_apart", probe)
    return written


@pytest.fixture
def command(given: Path, tmp_path: Path) -> list[object]:
    """A run that has nothing but a model and data."""
    settings = ["sequence_length=16", "tokens_per_step=64", "precision=fp32", "max_steps=4", "save_every=2"]
    return ["train", f"model={given / 'model'}", f"data={given / 'data.txt'}", f"output={tmp_path / 'run'}", *settings]


@pytest.fixture
def trains(command: list[object], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command with more settings, and returns what it prints."""

    def run(*settings: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in (*command, *settings)]) == 0
        return capsys.readouterr().out

    return run


def forget_the_end(run: Path) -> None:
    """Take away what a run left after its second step."""
    for path in sorted((run / "checkpoints" / "step-00000004").iterdir()):
        path.unlink()
    (run / "checkpoints" / "step-00000004").rmdir()


def test_a_resume_keeps_its_plan_and_probes_nothing(
    tmp_path: Path, trains: Callable[..., str], probes: list[Path]
) -> None:
    trains()
    run = tmp_path / "run"
    assert probes == [run / "hardware.json"]
    before = (run / "plan.json").read_bytes()
    forget_the_end(run)
    assert f"going on with the plan of the run so far, {run / 'plan.json'}" in trains("resume=auto", "log_every=2")
    assert (run / "plan.json").read_bytes() == before
    assert len(probes) == 1
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("host_memory=3GiB", "host_memory is 3.0 GiB, was not set"),
        ("micro_batch_size=1", "micro_batch_size is 1, the plan has"),
        ("hardware=PROFILE", "hardware is "),
    ],
)
def test_a_setting_that_plans_depend_on_asks_for_another_plan(
    tmp_path: Path, trains: Callable[..., str], probes: list[Path], setting: str, reason: str
) -> None:
    trains()
    run = tmp_path / "run"
    forget_the_end(run)
    out = trains("resume=auto", setting.replace("PROFILE", str(run / "hardware.json")))
    assert f"{run / 'plan.json'}: this plan of the run so far is not taken" in out
    assert reason in out


def test_another_machine_or_a_damaged_plan_asks_for_another_plan(
    tmp_path: Path, trains: Callable[..., str], probes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trains()
    run = tmp_path / "run"
    forget_the_end(run)
    other = current_host().model_copy(update={"num_cores": 77})
    with monkeypatch.context() as patched:
        patched.setattr(executor.run_plan, "current_host", lambda: other)
        assert "not taken (it was made for another machine" in trains("resume=auto")
    forget_the_end(run)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "busy_seconds": {}}))
    assert "does not match its plan_hash" in trains("resume=auto")
    assert len(probes) == 3


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("data.jsonl", '{"text": "fine"}\n{"text": "bro', "data.jsonl:2:"),
        ("data.jsonl", '{"colour": "red"}\n', "colour"),
        ("data.jsonl", "", "no usable rows"),
        ("other.jsonl", '{"text": "fine"}\n', "data.jsonl does not exist; did you mean"),
    ],
)
def test_data_of_no_use_are_found_before_the_machine_is_probed(
    command: list[object], tmp_path: Path, complaint: Complaint, probes: list[Path], name: str, text: str, reason: str
) -> None:
    (tmp_path / name).write_text(text)
    assert reason in complaint(*command, f"data={tmp_path / 'data.jsonl'}")
    assert reason in complaint(*command, f"data={tmp_path / 'data.jsonl'}", "--dry-run")
    assert probes == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["eval_data=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["costs=nowhere.json"], "nowhere.json"),
        (["learning_rate=3e-3", "resume=auto"], "learning_rate is 0.003, the checkpoint was made with 2e-05"),
        (["num_epochs=1", "max_steps=null", "warmup_steps=100000"], "warmup_steps"),
    ],
)
def test_all_inputs_are_checked_before_the_machine_is_probed(
    command: list[object], tmp_path: Path, complaint: Complaint, probes: list[Path], settings: list[str], reason: str
) -> None:
    if "resume=auto" in settings:
        complaint(*command, code=0)
        probes.clear()
        (tmp_path / "run" / "plan.json").unlink()
        forget_the_end(tmp_path / "run")
    before = content(tmp_path)
    assert reason in complaint(*command, *settings)
    assert content(tmp_path) == before
    assert probes == []
