"""A run from plan to record on the CPU: what it leaves, that it resumes bit for bit, that its model loads."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from analysis.tables import deviations, error_share
from executor import checkpoint
from executor.config import TrainConfig
from executor.huggingface import initialise
from executor.launch import comparison, launch
from executor.measure import measure
from executor.run import Interrupted, Outcome
from executor.run_directory import load_run
from executor.store import zero_state
from planner.plan import Plan
from planner.search import default_limits, plan
from simulator.build import build
from simulator.costs import operation_key
from simulator.errors import ConveyorError, InputError
from simulator.hardware import HardwareProfile, load_hardware
from simulator.model import ModelSpec, model_spec
from simulator.policy import Home, OptimizerHome, Workload, uniform_policy
from simulator.probe import current_device, current_host
from simulator.system import process_tree_bytes

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.05, "use_cache": False,
}  # fmt: skip
WORKLOAD = Workload(sequence_length=32, tokens_per_step=128, precision="fp32", micro_batch_rows=2)


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return model_spec(CONFIG)


@pytest.fixture(scope="module")
def machine() -> HardwareProfile:
    """The catalogue's CPU box with this machine's capacities, so that plans for it may run here."""
    profile = load_hardware("cpu-2-core")
    return profile.model_copy(update={"device": current_device(), "host": current_host()})


@pytest.fixture(scope="module")
def planned(model: ModelSpec, machine: HardwareProfile) -> Plan:
    return plan(model, WORKLOAD, machine)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Text that a byte model learns in a few steps, and no row of which equals another."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n}: the conveyor carries layer {n * 7 % 31}\n" for n in range(400)))
    return path


def run_config(text: Path, output: Path, **changes: Any) -> TrainConfig:
    model_folder = text.parent / "model-config"
    model_folder.mkdir(exist_ok=True)
    (model_folder / "config.json").write_text(json.dumps(CONFIG))
    settings = {
        "model": str(model_folder), "data": str(text), "output": str(output), "plan": "plan.json",
        "learning_rate": 1e-2, "max_steps": 8, "lr_schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1,
        **changes,
    }  # fmt: skip
    return TrainConfig.model_validate(settings)


def silent(line: str) -> None:
    """Say nothing."""


def checkpoint_tensors(folder: Path, model: ModelSpec) -> tuple[checkpoint.Progress, list[torch.Tensor]]:
    states = [zero_state(model.block(b), precision="fp32", device="cpu") for b in range(model.num_blocks)]
    newest = checkpoint.latest(folder)
    assert newest is not None
    record = checkpoint.read_record(newest)
    progress = checkpoint.load(newest, model=model, states=states, settings={}, accept=record.settings.keys())
    return progress, [plane for state in states for plane in (state.weights, state.first_moment, state.second_moment)]


def test_rows_beyond_the_models_positions_are_warned_of(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    said: list[str] = []
    short = {**CONFIG, "max_position_embeddings": WORKLOAD.sequence_length - 1}
    launch(run_config(text, tmp_path / "run", max_steps=3, warmup_steps=0), planned, short, model, say=said.append)
    assert [line for line in said if line.startswith("warning:")] == [
        f"warning: rows have {WORKLOAD.sequence_length} tokens, and the model's config says max_position_embeddings "
        f"{WORKLOAD.sequence_length - 1}: it has not seen places beyond"
    ]


def test_a_run_leaves_its_record_metrics_timelines_checkpoint_and_a_model_that_loads(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    said: list[str] = []
    record = launch(run_config(text, tmp_path / "run"), planned, CONFIG, model, say=said.append)
    run = load_run(tmp_path / "run")
    assert record.status == run.record.status == "ok"
    assert len(run.metrics) == len(record.clip_factors) == 8
    assert run.metrics[-1]["loss"] < 0.8 * run.metrics[0]["loss"]
    assert [row["step"] for row in run.metrics] == list(range(8))
    assert run.measured is not None
    assert run.predicted is not None
    assert {span.name for span in run.measured.spans} == {span.name for span in run.predicted.spans}
    expected, found = record.predicted, record.measured
    assert expected is not None
    assert found is not None
    error = error_share(expected.step_seconds, found.step_seconds)  # the report's
    assert any(line.startswith("step time") and line.endswith(f" {error:+.1%}") for line in said)
    # Only where operations are launched ahead of what runs.
    assert not any(line.startswith("idle for want of launches") for line in said)
    streams = planned.model_copy(update={"hardware": planned.hardware.model_copy(update={"execution": "streams"})})
    longest = max(run.measured.spans, key=lambda span: (span.resource == "compute", span.end - span.start))
    late = replace(longest, start=(longest.start + longest.end) / 2, cause="")
    spans = tuple(late if span is longest else span for span in run.measured.spans)
    timeline = replace(run.measured, spans=spans)
    lines = comparison(streams, Outcome(found, timeline, [], 1, [], None), run.predicted)
    assert any(line.startswith("idle for want of launches: ") and f" before {late.name}" in line for line in lines)

    progress, tensors = checkpoint_tensors(tmp_path / "run" / "checkpoints", model)
    assert (progress.step, progress.applied_steps) == (8, 8)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    trained = dict(exported.named_parameters())["model.embed_tokens.weight"]
    assert torch.equal(trained.flatten(), tensors[0][: trained.numel()])
    assert not torch.equal(trained, AutoModelForCausalLM.from_config(exported.config).model.embed_tokens.weight)


def test_the_host_peak_counts_what_loading_took(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike = 600 * 2**20
    during = []

    def taking(*arguments: Any, **keywords: Any) -> None:
        taken = bytearray(spike)
        taken[::4096] = bytes([1]) * len(range(0, spike, 4096))
        during.append(process_tree_bytes())
        time.sleep(0.2)  # longer than the sampling thread waits
        del taken
        initialise(*arguments, **keywords)

    monkeypatch.setattr("executor.run.initialise", taking)
    record = launch(run_config(text, tmp_path / "run"), planned, CONFIG, model, say=silent)
    assert record.measured is not None
    assert record.measured.host_peak_bytes >= during[0] > spike


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_stopped_and_resumed_under_other_plans_equals_one_that_never_stopped(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, machine: HardwareProfile, number: int, exit_code: int
) -> None:
    launch(run_config(text, tmp_path / "whole"), planned, CONFIG, model, say=silent)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def other(weights: Home, optimizer: OptimizerHome) -> Plan:
        policy = uniform_policy(
            model, WORKLOAD, micro_batch_rows=2, groups=(2,), weights=weights, optimizer=optimizer,
            save_level="input", head_chunk_tokens=planned.policy.head_chunk_tokens,
        )  # fmt: skip
        assert policy != planned.policy
        return planned.model_copy(update={"policy": policy}).hashed()

    # State on the device, then streaming to it, streaming with its weights, and last on the host.
    plans = {3: planned, 5: other("device", "streamed"), 6: other("host", "streamed")}
    resume = "never"
    for last_step, here in plans.items():

        def interrupt(line: str, last_step: int = last_step) -> None:
            if line.startswith(f"step {last_step}/"):
                os.kill(os.getpid(), number)

        config = run_config(text, tmp_path / "parts", resume=resume)
        with pytest.raises(Interrupted, match="resume=auto") as stopped_by:
            launch(config, here, CONFIG, model, say=interrupt)
        assert stopped_by.value.exit_code == exit_code
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        stopped, _ = checkpoint_tensors(tmp_path / "parts" / "checkpoints", model)
        assert last_step <= stopped.step < 8
        resume = "auto"
    launch(run_config(text, tmp_path / "parts", resume="auto"), other("host", "host"), CONFIG, model, say=silent)

    whole, expected = checkpoint_tensors(tmp_path / "whole" / "checkpoints", model)
    parts, found = checkpoint_tensors(tmp_path / "parts" / "checkpoints", model)
    assert whole == parts
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    losses = [[row["loss"] for row in load_run(tmp_path / name).metrics] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_resuming_with_other_settings_is_refused_by_key(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    launch(run_config(text, tmp_path / "run", max_steps=4, save_every=2), planned, CONFIG, model, say=silent)
    earlier = tmp_path / "run" / "checkpoints" / "step-00000002"
    with pytest.raises(InputError, match="learning_rate"):
        launch(
            run_config(text, tmp_path / "run", max_steps=4, resume=str(earlier), learning_rate=2e-2),
            planned, CONFIG, model, say=silent,
        )  # fmt: skip


def test_a_run_of_one_step_has_no_update_to_measure_and_says_so(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    launch(run_config(text, tmp_path / "run", max_steps=1, warmup_steps=0), planned, CONFIG, model, say=silent)
    run = load_run(tmp_path / "run")
    table = deviations(run, 99).set_index("operations")
    (update,) = (row for row in table.index if row.startswith("update on"))
    assert list(table.loc[update][["measured", "difference"]]) == ["not measured", "–"]
    assert "not measured" not in set(table.drop(index=update)["measured"])


def test_tokens_per_second_leave_padding_out_and_tflops_do_not(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    rows = text.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"text": f"row {n:04}"}) + "\n" for n in range(200)))  # 8 bytes and an end
    record = launch(run_config(rows, tmp_path / "run"), planned, CONFIG, model, say=silent)
    found = record.measured
    assert found is not None
    real = load_run(tmp_path / "run").metrics[-1]["tokens"]
    assert real < WORKLOAD.tokens_per_step / 2
    assert found.tokens_per_second == pytest.approx(real / found.step_seconds)
    assert found.tflops == pytest.approx(
        6 * model.num_parameters * WORKLOAD.tokens_per_step / found.step_seconds / 1e12
    )


def test_a_failing_operation_ends_the_run_with_its_reason_and_a_record(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor.operations import Operations

    original = Operations.clip

    def fails(self: Operations, operation: Any) -> None:
        original(self, operation)
        if threading.current_thread() is threading.main_thread() and self.counts[""].item() == 3:
            raise ConveyorError("the third step broke")

    monkeypatch.setattr(Operations, "clip", fails)
    with pytest.raises(ConveyorError, match="third step"):
        launch(run_config(text, tmp_path / "run", save_every=1), planned, CONFIG, model, say=silent)
    record = load_run(tmp_path / "run").record
    assert (record.status, record.message) == ("failed", "the third step broke")
    progress, _ = checkpoint_tensors(tmp_path / "run" / "checkpoints", model)
    assert progress.step == 2


def test_a_config_that_contradicts_its_plan_is_refused_before_anything_starts(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    config = run_config(text, tmp_path / "run", sequence_length=64, tokens_per_step=128)
    with pytest.raises(InputError, match="sequence_length is 64, the plan has 32"):
        launch(config, planned, CONFIG, model, say=silent)
    assert not (tmp_path / "run").exists()


def test_measured_costs_price_every_operation_of_every_planned_program(
    model: ModelSpec, machine: HardwareProfile
) -> None:
    costs = measure(CONFIG, machine, WORKLOAD, micro_batch_rows=(2,), device=torch.device("cpu"))
    for policy in (
        uniform_policy(model, WORKLOAD, micro_batch_rows=2, groups=(1, 1), head_chunk_tokens=64),
        uniform_policy(
            model, WORKLOAD, micro_batch_rows=2, groups=(2,), weights="host", optimizer="host", save_level="input",
            activations="host", head_chunk_tokens=64,
        ),
    ):  # fmt: skip
        program = build(model, WORKLOAD, policy)
        missing = {
            key
            for operation in program.steady
            if (key := operation_key(operation, model, WORKLOAD, policy)) not in costs.entries
        }
        assert not missing
    assert all(cost.seconds > 0 for cost in costs.entries.values())
    kept = {key: cost.kept_bytes for key, cost in costs.entries.items() if key.startswith("forward.layer")}
    assert max(kept.values()) > 0
    found = plan(model, WORKLOAD, machine, default_limits(machine), costs)
    assert found.price_shares["roofline"] == 0
