"""On CUDA: an allocator that is held to less than a plan needs says so in the plan's terms, and leaves a record."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.config import TrainConfig
from executor.launch import launch
from executor.run_directory import load_run
from planner.plan import Limits, Plan
from planner.search import plan
from simulator.errors import OutOfMemory
from simulator.hardware import load_hardware
from simulator.model import model_spec
from simulator.policy import Workload, uniform_policy
from simulator.predict import device_process_bytes, predict
from simulator.probe import current_device, current_host
from simulator.units import GIB, format_bytes

pytestmark = pytest.mark.gpu

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8192, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
WORKLOAD = Workload(sequence_length=1024, tokens_per_step=16 * 1024, gradient_format="bf16", micro_batch_rows=8)


@pytest.fixture(autouse=True)
def _whole_device_again() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.fail("pytest -m gpu needs a CUDA device")
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def planned(limit_bytes: int) -> Plan:
    """Everything in HBM and everything kept, by a plan that claims to do with `limit_bytes` of device memory."""
    profile = load_hardware("h200").model_copy(update={"device": current_device(), "host": current_host()})
    model = model_spec(CONFIG)
    policy = uniform_policy(model, WORKLOAD, micro_batch_rows=8, groups=(2,))
    found = plan(model, WORKLOAD, profile, Limits(device_memory_bytes=64 * GIB, host_memory_bytes=64 * GIB))
    limits = Limits(device_memory_bytes=limit_bytes, host_memory_bytes=64 * GIB)
    return found.model_copy(
        update={
            "policy": policy,
            "prediction": predict(model, WORKLOAD, policy, profile).figures,
            "inputs": found.inputs.model_copy(update={"limits": limits}),
        }
    ).hashed()


def persistent_bytes() -> int:
    model = model_spec(CONFIG)
    policy = uniform_policy(model, WORKLOAD, micro_batch_rows=8, groups=(2,))
    program = predict(model, WORKLOAD, policy, load_hardware("h200")).program
    return sum(b.num_bytes for b in program.buffers.values() if b.persistent and b.tier == "device")


@pytest.mark.parametrize(
    ("place", "share"), [("allocating the training state", 0.5), ("launching operation forward.", 2.0)]
)
def test_a_device_that_is_too_small_is_explained(tmp_path: Path, place: str, share: float) -> None:
    found = planned(device_process_bytes(load_hardware("h200")) + round(share * persistent_bytes()))
    assert found.prediction.device_peak_bytes > found.inputs.limits.device_memory_bytes
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = TrainConfig.model_validate(
        {"model": str(tmp_path), "data": "synthetic", "output": str(tmp_path / "run"), "plan": "-", "max_steps": 2}
    )
    with pytest.raises(OutOfMemory) as full:
        launch(config, found, CONFIG, found.model, say=lambda line: None)
    message = str(full.value)
    assert f"device memory ran out while {place}" in message
    foreseen, limit = found.prediction.device_peak_bytes, found.inputs.limits.device_memory_bytes
    assert f"the plan foresaw {format_bytes(foreseen)} of {format_bytes(limit)}" in message
    assert "plan again with a lower --device-memory, or with micro-batches of fewer than 8 rows" in message
    assert load_run(tmp_path / "run").record.status == "out_of_memory"
