"""Resuming a run whose settings, plan or disk have changed, through the front door."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import save_pretrained, tiny_config
from transformers import AutoModelForCausalLM

from analysis.cli import main
from executor import checkpoint
from executor.checkpoint import latest, read_record
from executor.run_directory import load_run

NUM_STEPS = 6


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, data.txt, other.txt, and plans with micro-batches of one and two rows and in bf16."""
    folder = tmp_path_factory.mktemp("given")
    save_pretrained(tiny_config(), folder / "model")
    for name, times in (("data.txt", 100), ("other.txt", 90)):
        (folder / name).write_text("It was a bright cold day in April. " * times)
    shape = ["--model", str(folder / "model"), "--hardware", "cpu-2-core", "--sequence-length", "16"]
    for name, precision, rows in (("one-row", "fp32", 1), ("two-rows", "fp32", 2), ("bf16", "bf16", 1)):
        choices = ["--precision", precision, "--micro-batch-size", str(rows), "--output", str(folder / f"{name}.json")]
        assert main(["plan", *shape, "--tokens-per-step", "64", *choices]) == 0
    return folder


@pytest.fixture
def train(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Trains into `output`; returns exit code, standard output and standard error."""

    def run(output: str, *settings: str, plan: str = "one-row", data: str = "data.txt") -> tuple[int, str, str]:
        capsys.readouterr()
        line = [
            "train",
            "--plan",
            given / f"{plan}.json",
            "--data",
            given / data,
            "--output",
            tmp_path / output,
            "learning_rate=1e-2",
        ]
        code = main([str(word) for word in [*line, f"max_steps={NUM_STEPS}", "save_every=2", *settings]])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def weights(output: Path) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    return [parameter.detach() for parameter in model.parameters()]


def stopped_after(output: Path, step: int) -> str:
    """Leave a run as if it had been killed after the save of `step`; the setting that goes on from there."""
    for path in (output / "checkpoints").iterdir():
        if path.name != f"step-{step:08}":
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    return "resume=auto"


@pytest.mark.parametrize(
    ("setting", "data", "difference"),
    [
        ("max_steps=8", "data.txt", " max_steps is 8, the checkpoint was made with 6"),
        ("lr_schedule=constant", "data.txt", " lr_schedule is 'constant', the checkpoint was made with"),
        ("seed=5", "data.txt", "data.seed is 5, the checkpoint was made with 0"),
        ("save_every=2", "other.txt", "(rows were added, taken out or changed, or become other tokens)"),
    ],
)
def test_changed_steps_schedule_order_and_data_ask_for_a_flag_and_go_on_with_it(
    train: Any, tmp_path: Path, setting: str, data: str, difference: str
) -> None:
    assert train("run", "keep_checkpoints=3")[0] == 0
    go_on = stopped_after(tmp_path / "run", 4)
    code, out, err = train("run", go_on, setting, data=data)
    assert code == 2
    assert difference in err
    assert "resume_changes=accept" in err
    assert "state allocated" not in out  # found before anything was
    code, out, err = train("run", go_on, setting, "resume_changes=accept", data=data)
    assert code == 0, err
    assert "going on with other settings" in out
    assert difference in out
    record = read_record(latest(tmp_path / "run" / "checkpoints") or Path())
    last = 8 if setting == "max_steps=8" else NUM_STEPS
    assert record.progress.step == last
    assert [row["step"] for row in load_run(tmp_path / "run").metrics] == list(range(last))
    # The checkpoint knows the settings that it was made with, so the next resume compares with those.
    assert train("run", go_on, setting, data=data)[0] == 2


def test_another_precision_is_no_change_that_can_be_accepted(train: Any, tmp_path: Path) -> None:
    assert train("run", "keep_checkpoints=3")[0] == 0
    code, _, err = train("run", stopped_after(tmp_path / "run", 4), "resume_changes=accept", plan="bf16")
    assert code == 2
    assert "precision is 'bf16', the checkpoint was made with 'fp32'" in err
    assert "start a new run in another output directory" in err
    assert "resume_changes" not in err


def test_changes_are_accepted_of_a_resumed_run_only(train: Any) -> None:
    code, _, err = train("run", "resume_changes=accept")
    assert code == 2
    assert "resume_changes: has no effect without resume" in err


def test_other_micro_batches_go_on_to_rounding_and_say_so(train: Any, tmp_path: Path) -> None:
    assert train("whole")[0] == 0
    assert train("run", "keep_checkpoints=3")[0] == 0
    go_on = stopped_after(tmp_path / "run", 4)
    code, out, _ = train("run", go_on, plan="two-rows")
    assert code == 0
    assert "going on equal to rounding, not bit for bit: micro_batch_rows is 2, was 1" in out
    pairs = list(zip(weights(tmp_path / "run"), weights(tmp_path / "whole"), strict=True))
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not all(torch.equal(found, expected) for found, expected in pairs)


def test_the_same_plan_goes_on_bit_for_bit_and_does_not_speak_of_rounding(train: Any, tmp_path: Path) -> None:
    assert train("whole")[0] == 0
    assert train("run", "keep_checkpoints=3")[0] == 0
    code, out, _ = train("run", stopped_after(tmp_path / "run", 2))
    assert code == 0
    assert "rounding" not in out
    assert all(torch.equal(a, b) for a, b in zip(weights(tmp_path / "run"), weights(tmp_path / "whole"), strict=True))


def test_a_run_that_is_complete_says_so(train: Any) -> None:
    assert train("run")[0] == 0
    code, _, err = train("run", "resume=auto")
    assert (code, f"the run is complete, all {NUM_STEPS} steps are done" in err) == (2, True)


def test_a_disk_that_fills_up_during_a_save_ends_the_run_and_the_save_before_it_goes_on(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("whole")[0] == 0
    write_shard, num_written = checkpoint.write_shard, 0

    def full(*arguments: Any, **named: Any) -> dict[str, int]:
        nonlocal num_written
        num_written += 1
        if num_written == 6:  # of 4 files a checkpoint: in the second one
            raise OSError(28, "No space left on device")
        return write_shard(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_shard", full)
        code, _, err = train("run")
    assert code == 1
    assert "step-00000004: the checkpoint could not be written (No space left on device)" in err
    assert "of disk are free now; free some, lower keep_checkpoints" in err
    assert "earlier checkpoints are whole" in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert train("run", "resume=auto")[0] == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(tmp_path / "run"), weights(tmp_path / "whole"), strict=True))
