"""A tier that is full is named, with the operation, planned and actual bytes, and what to change."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import save_pretrained, tiny_config

from analysis.cli import main
from executor import checkpoint, forecast
from executor import run as executor_run
from executor.operations import Operations
from executor.out_of_memory import doing, exhausted_tier
from executor.run_inputs import num_times
from planner.plan import Plan
from simulator.units import GIB, format_bytes


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    save_pretrained(tiny_config(), folder / "model")
    (folder / "data.txt").write_text("It was a bright cold day in April. " * 100)
    shape = ["--model", str(folder / "model"), "--hardware", "cpu-2-core", "--sequence-length", "16"]
    choices = ["--tokens-per-step", "64", "--micro-batch-size", "2", "--output", str(folder / "plan.json")]
    assert main(["plan", *shape, *choices]) == 0
    return folder


@pytest.fixture
def train(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Trains four steps into run/ and saves after two; returns exit code, standard output and standard error."""

    def run(*settings: str) -> tuple[int, str, str]:
        line = ["train", "--plan", given / "plan.json", "--data", given / "data.txt", "--output", tmp_path / "run"]
        code = main([str(word) for word in [*line, "max_steps=4", "save_every=2", *settings]])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def more_than_the_machine_has(*arguments: object, **named: object) -> Any:
    return torch.empty(2**60, dtype=torch.uint8)


def more_than_python_gets(*arguments: object, **named: object) -> Any:
    return bytearray(2**62)


@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (executor_run, "Trainer", "while allocating the training state"),
        (executor_run, "load_weights", "while filling the training state"),
        (Operations, "backward", "while running operation backward.2.0"),
        (Operations, "update", "while running operation update.0"),
        (checkpoint, "write_shard", "while saving the checkpoint of step 2"),
        (executor_run, "export", "while exporting the model"),
    ],
)
@pytest.mark.parametrize("refused", [more_than_the_machine_has, more_than_python_gets])
def test_host_memory_that_runs_out_anywhere_is_explained(
    train: Any, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, place: str,
    refused: Callable[..., Any],
) -> None:  # fmt: skip
    monkeypatch.setattr(owner, name, refused)
    code, _, err = train()
    assert code == 1
    assert "Traceback" not in err
    planned = Plan.load(given / "plan.json")
    peak, limit = planned.prediction.host_peak_bytes, planned.inputs.limits.host_memory_bytes
    assert f"host memory ran out {place}: the run holds " in err
    assert f"the plan foresaw {format_bytes(peak)} of {format_bytes(limit)}" in err
    assert "plan again with a lower --host-memory or with micro-batches of fewer than 2 rows" in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "out_of_memory"


def test_device_memory_that_runs_out_is_explained(train: Any, given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(Operations, "loss", out_of_memory)
    code, _, err = train()
    assert code == 1
    peak = Plan.load(given / "plan.json").prediction.device_peak_bytes
    assert "device memory ran out while running operation loss.0: " in err
    assert f"the plan foresaw {format_bytes(peak)} of " in err
    assert "plan again with a lower --device-memory, or with micro-batches of fewer than 2 rows" in err
    assert "Tried to allocate 20.00 GiB" in err


def test_a_full_disk_while_exporting_is_explained(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("executor.huggingface._write_shards", full)
    code, _, err = train()
    assert code == 1
    assert "the exported model could not be written (No space left on device): it takes 47760 bytes" in err
    assert "go on with resume=auto" in err
    monkeypatch.undo()
    assert train("resume=auto")[0] == 0


@pytest.mark.parametrize(
    ("error", "tier"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (RuntimeError("CUDA error: out of memory"), "device"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (OSError(errno.EACCES, "Permission denied"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_errors_that_say_that_a_tier_is_full(error: Exception, tier: str | None) -> None:
    assert exhausted_tier(error) == tier


def test_the_innermost_place_is_named_first() -> None:
    def fails() -> None:
        with doing("saving"), doing("writing block 3"):
            raise MemoryError

    with pytest.raises(MemoryError) as raised:
        fails()
    assert raised.value.__notes__ == ["while writing block 3", "while saving"]


# Before anything starts


def test_what_the_run_takes_is_said_before_anything_is_allocated(train: Any, given: Path) -> None:
    code, out, _ = train()
    assert code == 0
    lines = out.splitlines()
    begin = lines.index("the run will take")
    assert begin < next(number for number, line in enumerate(lines) if line.startswith("state allocated"))
    plan = Plan.load(given / "plan.json")
    prediction, limits = plan.prediction, plan.inputs.limits
    device, host, disk, duration = (line.split() for line in lines[begin + 1 : begin + 5])
    for words, needed, limit in (
        (device, prediction.device_peak_bytes, limits.device_memory_bytes),
        (host, prediction.host_peak_bytes, limits.host_memory_bytes),
    ):
        assert " ".join(words[2:4]) == format_bytes(needed)
        assert " ".join(words[5:7]) == format_bytes(limit)
    one = checkpoint.checkpoint_bytes(plan.model, "bf16")
    exported = 2 * plan.model.num_parameters
    assert " ".join(disk[1:3]) == format_bytes(2 * one + exported)  # of its two saves
    assert duration[0] == "time"
    assert "4 steps of" in " ".join(duration)
    assert "2 saves" in " ".join(duration)


@pytest.mark.parametrize(
    ("first_step", "num_steps", "save_every", "saves"),
    [(0, 4, None, 1), (0, 4, 2, 2), (0, 5, 2, 3), (2, 6, 2, 2), (3, 6, 2, 2), (0, 1, 1, 1)],
)
def test_saves_are_counted_as_the_run_makes_them(
    train: Any, given: Path, tmp_path: Path, first_step: int, num_steps: int, save_every: int | None, saves: int
) -> None:
    made = {step for step in range(first_step + 1, num_steps) if save_every and step % save_every == 0} | {num_steps}
    assert len(made) == saves
    assert num_times(save_every, first_step=first_step, num_steps=num_steps) == saves


def test_a_run_that_the_kernel_would_kill_is_refused_before_it_starts(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose limit other processes have used up."""
    monkeypatch.setattr(forecast, "host_memory_available_bytes", lambda: 1000)
    code, out, err = train()
    assert code == 2
    assert "host memory is short by" in err
    assert "1000 B are free on this machine now" in err
    assert "plan again with --host-memory" in err
    assert "state allocated" not in out
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_run_starts(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.folder.free_disk_bytes", lambda path: 1000)
    code, out, err = train()
    assert code == 2
    assert "disk short by" in err
    assert "lower keep_checkpoints, or set output to a larger disk" in err
    assert "state allocated" not in out


def test_the_free_memory_that_counts_is_what_is_still_to_come(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare process is there already, so a machine with exactly the rest free bears the plan."""
    plan = Plan.load(given / "plan.json")
    rest = plan.prediction.host_peak_bytes - round(plan.hardware.host_base_bytes.value)
    assert 0 < rest < GIB
    monkeypatch.setattr(forecast, "host_memory_available_bytes", lambda: rest)
    forecast.require_free_memory(plan, torch.device("cpu"))
