"""Tiers that are full for real: address space by the system's limit, a disk by a mount of its own."""

import contextlib
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front_door import training

from executor import run as executor_run
from executor.config import TrainConfig
from executor.launch import launch
from executor.run_directory import append_metrics, load_run
from executor.trainer import Trainer
from planner.plan import Plan
from planner.search import plan
from simulator.errors import ConveyorError, OutOfMemory
from simulator.hardware import load_hardware
from simulator.model import model_spec
from simulator.policy import Workload, uniform_policy
from simulator.predict import predict
from simulator.probe import current_device, current_host
from simulator.units import MIB, format_bytes

# 33 M parameters: 16 bytes each for weights, moments and gradient are half a GiB.
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 260, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
WORKLOAD = Workload(sequence_length=16, tokens_per_step=64, precision="fp32", micro_batch_rows=2)


def address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def plan_with(home: str) -> Plan:
    """A plan for this machine whose state lives in one tier."""
    profile = load_hardware("cpu-2-core")
    profile = profile.model_copy(update={"device": current_device(), "host": current_host()})
    model = model_spec(CONFIG)
    policy = uniform_policy(model, WORKLOAD, micro_batch_rows=2, groups=(2,), weights=home, optimizer=home)  # type: ignore[arg-type]
    found = plan(model, WORKLOAD, profile)
    figures = predict(model, WORKLOAD, policy, profile).figures
    return found.model_copy(update={"policy": policy, "prediction": figures}).hashed()


@pytest.mark.parametrize(
    ("home", "words"),
    [
        ("device", ("host memory ran out while allocating the training state: the run holds ", "the plan foresaw ")),
        ("host", ("for a block of the training state were refused (Cannot allocate memory)", "ulimit -v")),
    ],
)
def test_an_address_space_that_is_too_small_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, words: tuple[str, ...]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def limited(*arguments: Any, **named: Any) -> Trainer:
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + 200 * MIB, hard))
        try:
            return Trainer(*arguments, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    monkeypatch.setattr(executor_run, "Trainer", limited)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = plan_with(home)
    config = TrainConfig.model_validate(
        {"model": str(tmp_path), "data": "synthetic", "output": str(tmp_path / "run"), "plan": "-", "max_steps": 1}
    )
    with pytest.raises(OutOfMemory) as full:
        launch(config, found, CONFIG, found.model, say=lambda line: None)
    assert full.value.exit_code == 1
    message = str(full.value)
    assert all(part in message for part in words), message
    assert "plan again with a lower --host-memory" in message
    if home == "device":
        assert format_bytes(found.prediction.host_peak_bytes) in message
    assert load_run(tmp_path / "run").record.status == "out_of_memory"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB, where the system lets a test mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_others_fill_during_a_run_is_explained_and_the_save_before_goes_on(
    given: Path, small_disk: Path, complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    evaluate_due = executor_run.RunInputs.evaluation_due

    def filled(inputs: Any, steps_done: int) -> bool:
        if steps_done == 3:
            while not (run / "checkpoints" / "step-00000002").exists():  # written beside the step
                time.sleep(0.01)
            with (small_disk / "others").open("wb", buffering=0) as others, contextlib.suppress(OSError):
                while others.write(bytes(4096)):
                    pass
            os.truncate(small_disk / "others", (small_disk / "others").stat().st_size - 2**16)
        return evaluate_due(inputs, steps_done)

    monkeypatch.setattr(executor_run.RunInputs, "evaluation_due", filled)
    err = complaint(*training(given, run, "save_every=2"), code=1)
    assert "disk short by" in err
    assert "free some" in err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    (small_disk / "others").unlink()
    monkeypatch.undo()
    complaint(*training(given, run, "save_every=2", "resume=auto"), code=0)


def test_a_full_disk_under_the_metrics_is_explained(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(ConveyorError, match=r"No space left on device\); free some disk and go on with resume=auto"):
        append_metrics(tmp_path, {"step": 1})
