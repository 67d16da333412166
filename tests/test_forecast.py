"""What a run is said to take of disk and time, against what it leaves and against a hand's sums."""

from pathlib import Path
from typing import Any

import pytest
from reference_replay import simulate
from tiny_model import save_pretrained, tiny_config

from executor import checkpoint
from executor.config import TrainConfig
from executor.forecast import forecast, run_seconds
from executor.launch import launch
from executor.run_directory import load_run
from executor.run_inputs import RunInputs
from planner.plan import Plan
from planner.search import plan
from simulator.build import build
from simulator.costs import Pricing
from simulator.figure import Figure
from simulator.freezing import freeze
from simulator.hardware import HardwareProfile, load_hardware
from simulator.machine import Disk
from simulator.model import ModelSpec, load_model_spec
from simulator.policy import Workload, uniform_policy
from simulator.predict import predict, predict_evaluation
from simulator.probe import current_device, current_host

WORKLOAD = Workload(sequence_length=16, tokens_per_step=64, precision="fp32", micro_batch_rows=2)
FROZEN = ["model.embed_tokens.*", "model.layers.0.*"]


def silent(line: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    save_pretrained(tiny_config(), folder / "model")
    (folder / "text.txt").write_text("".join(f"sentence {n} says {n * n % 97}. " for n in range(60)))
    (folder / "other.txt").write_text("".join(f"line {n}: {n * 3 % 89}. " for n in range(30)))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelSpec:
    return load_model_spec(folder / "model")


@pytest.fixture(scope="module")
def machine() -> HardwareProfile:
    """This machine's capacities, and a disk of rates that are easy to divide by."""
    profile = load_hardware("cpu-2-core")
    disk = Disk(
        free_bytes=2**40,
        read_bytes_per_second=Figure(value=5e5, source="datasheet: by hand"),
        write_bytes_per_second=Figure(value=4e5, source="datasheet: by hand"),
    )
    return profile.model_copy(update={"device": current_device(), "host": current_host(), "disk": disk})


@pytest.fixture(scope="module")
def planned(model: ModelSpec, machine: HardwareProfile) -> Plan:
    return plan(model, WORKLOAD, machine)


def config(folder: Path, output: Path, **changes: Any) -> TrainConfig:
    settings = {
        "model": str(folder / "model"), "data": str(folder / "text.txt"), "output": str(output), "max_steps": 5,
        "sequence_length": 16, "tokens_per_step": 64, "precision": "fp32", "micro_batch_size": 2, **changes,
    }  # fmt: skip
    return TrainConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("save_every", "keep", "there", "added"),
    [
        (None, 2, 0, 1),
        (2, 2, 0, 3),
        (1, 2, 0, 3),
        (1, 10, 0, 5),
        (2, 1, 0, 2),
        (1, 2, 1, 2),
        (1, 2, 2, 1),
        (4, 4, 1, 2),
    ],
)
def test_disk_is_asked_for_the_checkpoints_that_a_run_will_add_at_any_time(
    tmp_path: Path, folder: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch, save_every: int | None, keep: int,
    there: int, added: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(checkpoint, "num_complete", lambda path: there)
    inputs = RunInputs(config(folder, tmp_path, save_every=save_every, keep_checkpoints=keep), model, say=silent)
    assert inputs.disk_need().num_checkpoints == added


@pytest.mark.parametrize("frozen", [[], FROZEN])
def test_a_checkpoint_takes_the_bytes_that_are_forecast(
    tmp_path: Path, folder: Path, model: ModelSpec, machine: HardwareProfile, frozen: list[str]
) -> None:
    trained = freeze(model, frozen)
    wanted = config(folder, tmp_path / "run", freeze=frozen)
    need = RunInputs(wanted, trained, say=silent).disk_need()
    launch(wanted, plan(trained, WORKLOAD, machine), tiny_config(), trained, say=silent)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    shards = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    # Beside values a file has a header; the forecast's part for headers and record is counted out by hand.
    headers = need.checkpoint_bytes - _values(trained)
    assert _values(trained) <= shards
    assert sum(path.stat().st_size for path in saved.iterdir()) <= need.checkpoint_bytes
    assert shards - _values(trained) < headers


def _values(model: ModelSpec) -> int:
    """fp32: weights of every block, and two moments where something is trained."""
    blocks = [model.block(index) for index in range(model.num_blocks)]
    return sum(4 * block.num_parameters * (3 if block.trained else 1) for block in blocks)


def test_time_is_that_of_steps_reading_evaluations_and_saves(
    tmp_path: Path, folder: Path, model: ModelSpec, planned: Plan
) -> None:
    wanted = config(folder, tmp_path / "run", save_every=2, eval_every=2, eval_data=str(folder / "other.txt"))
    inputs = RunInputs(wanted, model, say=silent)
    parts, unknown = run_seconds(planned, inputs)
    step = planned.prediction.step_seconds
    batches = inputs.eval_dataset.steps_per_epoch if inputs.eval_dataset is not None else 0
    assert batches
    batch = predict_evaluation(model, WORKLOAD, planned.policy, planned.hardware).step_seconds
    need, file_bytes = inputs.disk_need(), (folder / "model" / "model.safetensors").stat().st_size
    save = need.checkpoint_bytes / 4e5
    assert parts == pytest.approx(
        {
            "5 steps": 5 * step,
            "reading the weights": file_bytes / 5e5,
            "3 evaluations": 3 * batches * batch,
            "3 saves and the export": 2 * (save - step) + save + need.model_bytes / 4e5,
        }
    )
    assert unknown == []
    launch(wanted, planned, tiny_config(), model, say=silent)
    assert len(load_run(tmp_path / "run").evaluations) == 3
    assert inputs.num_saves() == 3


def test_what_nobody_measured_is_named(tmp_path: Path, folder: Path, model: ModelSpec, planned: Plan) -> None:
    unmeasured = planned.hardware.model_copy(update={"disk": Disk(free_bytes=2**40)})
    elsewhere = planned.model_copy(update={"hardware": unmeasured})
    inputs = RunInputs(config(folder, tmp_path / "run"), model, say=silent)
    assert forecast(elsewhere, inputs)[-2].endswith("; without reading the weights and saving")
    assert forecast(elsewhere, inputs)[-1].startswith("the time is a rough guess: 100% of the step's work")
    shares = {"measured": 0.6, "interpolated": 0.0, "roofline": 0.4}
    measured = elsewhere.model_copy(update={"price_shares": shares})
    assert not any("guess" in line for line in forecast(measured, inputs))


@pytest.mark.parametrize(
    ("save_every", "eval_every", "first_step", "stretches"),
    [
        (None, None, 0, [12]),
        (5, None, 0, [5, 5, 2]),
        (4, None, 0, [4, 4, 4]),
        (None, 6, 0, [6, 6]),
        (4, 6, 0, [4, 2, 2, 4]),
        (4, 6, 5, [1, 2, 4]),
        (4, None, 12, []),
    ],
)
def test_a_run_is_drained_where_it_evaluates_and_saves_and_at_its_end(
    tmp_path: Path, folder: Path, model: ModelSpec, save_every: int | None, eval_every: int | None, first_step: int,
    stretches: list[int],
) -> None:  # fmt: skip
    other = str(folder / "other.txt") if eval_every else None
    wanted = config(folder, tmp_path, max_steps=12, save_every=save_every, eval_every=eval_every, eval_data=other)
    inputs = RunInputs(wanted, model, say=silent)
    inputs.first_step = first_step
    assert inputs.stretches() == stretches


def test_on_streams_the_time_of_drains_is_counted(tmp_path: Path, folder: Path, model: ModelSpec) -> None:
    """Against another simulator, which runs each stretch from its first step to the end of its drain."""
    hardware = load_hardware("h200")
    policy = uniform_policy(
        model, WORKLOAD, micro_batch_rows=2, groups=(2,), weights="host", optimizer="host", save_level="input"
    )
    figures = predict(model, WORKLOAD, policy, hardware).figures
    streamed = plan(model, WORKLOAD, hardware).model_copy(update={"policy": policy, "prediction": figures})
    inputs = RunInputs(config(folder, tmp_path, max_steps=12, save_every=5), model, say=silent)
    parts, _ = run_seconds(streamed, inputs)

    program, pricing = build(model, WORKLOAD, policy), Pricing(model, WORKLOAD, policy, hardware)
    prices = {operation.name: pricing.price(operation) for operation in (*program.first, *program.steady)}
    seconds = 0.0
    for steps in (5, 5, 2):
        stretch = [program.first, *[program.steady] * (steps - 1), program.drain]
        seconds += max(item.end for item in simulate(stretch, prices, pricing.sharing).ran)
    assert parts["12 steps"] == 12 * figures.step_seconds
    assert parts["3 drains"] == pytest.approx(seconds - parts["12 steps"], rel=1e-6)
    assert parts["3 drains"] > 0
