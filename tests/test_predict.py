"""Bytes of a policy by hand formulas, predicted peaks, and predictions beside steps measured on an H200 host."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hardware_cases import figure, toy_profile
from small_models import random_case, small_model, small_workload

import simulator.model
from simulator.build import build
from simulator.costs import MeasuredCost, OperationCosts, Pricing, operation_key, shape_hash
from simulator.errors import InputError, UnsupportedChoice
from simulator.hardware import load_hardware
from simulator.machine import Device
from simulator.model import ModelSpec, load_model_spec
from simulator.placement import batch_bytes, place
from simulator.policy import OptimizerHome, Policy, Workload, uniform_policy
from simulator.predict import (
    ALLOCATOR_SLACK,
    HOST_COMPILER_BYTES,
    StepFigures,
    allocator_slack_bytes,
    predict,
    set_aside_bytes,
    step_figures,
    transit_bytes,
)
from simulator.program import Role, Tier
from simulator.units import GIB, MIB

MODELS = Path(simulator.model.__file__).parent / "catalogue" / "models"


@pytest.fixture(scope="module")
def qwen() -> ModelSpec:
    return load_model_spec(MODELS / "qwen2.5-7b.json")


def elements(model: ModelSpec) -> tuple[int, int, int]:
    """Elements, padding included, of the embedding, of one layer and of the head."""
    return tuple(model.block(block).num_elements for block in (0, 1, model.head))  # type: ignore[return-value]


def block_bytes(model: ModelSpec, workload: Workload, policy: Policy) -> dict[str, int]:
    """Bytes by tier of all that is laid out for blocks: everything but scalars and the staging of batches."""
    sums = {"device": 0, "host": 0}
    for buffer in place(model, workload, policy).buffers.values():
        assert buffer.persistent
        if buffer.role not in (Role.SCALARS, Role.BATCH):
            sums[buffer.tier] += buffer.num_bytes
    return sums


def bf16_case(model: ModelSpec, gradient_format: Any, groups: Sequence[int], **choices: Any) -> tuple[Workload, Policy]:
    workload = Workload(
        sequence_length=1024, tokens_per_step=1024 * sum(groups), gradient_format=gradient_format, compiled=True
    )
    return workload, uniform_policy(model, workload, micro_batch_rows=1, groups=groups, **choices)


def test_everything_in_hbm_takes_16_bytes_a_parameter(qwen: ModelSpec) -> None:
    # 2 weight, 2 remainder, 8 moments, 4 gradient, which is summed where it stays.
    embedding, layer, head = elements(qwen)
    workload, policy = bf16_case(qwen, "fp32", (1,))
    assert block_bytes(qwen, workload, policy) == {"device": 16 * (embedding + 28 * layer + head), "host": 0}
    assert 16 * qwen.num_parameters == pytest.approx(16 * (embedding + 28 * layer + head), rel=1e-4)


def test_everything_streamed_leaves_slots_slabs_and_the_edges_on_the_device(qwen: ModelSpec) -> None:
    # Device: weights and rounded gradients of the edges, three slots, one fp32 sum as large as the largest block, two
    # bf16 slabs. Host: 2 weight + 10 state + 2 gradient.
    embedding, layer, head = elements(qwen)
    workload, policy = bf16_case(qwen, "bf16", (4,), weights="host", optimizer="host", prefetch_depth=2)
    assert block_bytes(qwen, workload, policy) == {
        "device": (2 + 2) * (embedding + head) + 3 * 2 * layer + 4 * max(embedding, head) + 2 * 2 * layer,
        "host": 14 * (embedding + 28 * layer + head),
    }


def test_resident_weights_updated_on_the_host_take_6_bytes_and_16(qwen: ModelSpec) -> None:
    # Groups of one sum every gradient on the device over the step: 2 + 4 there; 2 + 10 + 4 on the host.
    everything = sum(elements(qwen)) + 27 * elements(qwen)[1]
    workload, policy = bf16_case(qwen, "fp32", (1, 1), optimizer="host")
    assert block_bytes(qwen, workload, policy) == {"device": 6 * everything, "host": 16 * everything}


def test_state_of_low_layers_in_hbm_and_of_the_others_on_the_host(qwen: ModelSpec) -> None:
    # All weights resident, all sums in fp32 over two groups; 18 layers and the edges have their 10 bytes of state in
    # HBM and round their gradient in place, 10 layers send it through two bf16 slabs.
    embedding, layer, head = elements(qwen)
    workload, policy = bf16_case(qwen, "bf16", (1, 1))
    homes: tuple[OptimizerHome, ...] = ("device", *["device"] * 18, *["host"] * 10, "device")
    policy = policy.model_copy(update={"optimizer_homes": homes, "gradient_homes": homes})
    assert block_bytes(qwen, workload, policy) == {
        "device": 6 * (embedding + 28 * layer + head) + 10 * (embedding + 18 * layer + head) + 2 * 2 * layer,
        "host": 14 * 10 * layer,
    }


def test_tied_embeddings_add_one_sum_and_no_second_matrix() -> None:
    model = small_model(2, tied=True)
    embedding, layer, head = elements(model)
    workload = small_workload(1)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,))
    assert block_bytes(model, workload, policy)["device"] == 16 * (embedding + 2 * layer + head) + 4 * embedding
    assert head == 128  # the norm alone


@pytest.mark.parametrize(("precision", "each"), [("bf16", 2 + 10 + 4), ("fp32", 4 + 8 + 4), ("fp64", 8 + 16 + 8)])
def test_bytes_a_parameter_by_precision(precision: Any, each: int) -> None:
    model, workload = small_model(2), small_workload(1, precision=precision)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,))
    embedding, layer, head = elements(model)
    assert block_bytes(model, workload, policy)["device"] == each * (embedding + 2 * layer + head)


def test_layers_of_different_size_share_the_largest_ones_slots() -> None:
    model, workload = small_model(4, widths=[4, 20, 4, 9]), small_workload(1)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,), weights="host", optimizer="host")
    # Layer 2, the widest, keeps its weights in HBM: slots are as large as layer 4.
    policy = policy.model_copy(update={"weight_homes": ("device", "host", "device", "host", "host", "device")})
    slots = [b.num_bytes for b in place(model, workload, policy).buffers.values() if b.role is Role.SLOT]
    assert slots == [2 * model.block(4).num_elements] * 2


def test_no_buffer_is_laid_out_twice_and_homes_are_kept() -> None:
    for seed in range(100):
        model, workload, policy = random_case(seed)
        buffers = place(model, workload, policy).buffers
        for block in range(model.num_blocks):
            homes = [b.tier for b in buffers.values() if b.role is Role.STATE and b.block == block]
            assert homes == [Tier.DEVICE if policy.optimizer_homes[block] == "device" else Tier.HOST]
            weights = {b.tier.value for b in buffers.values() if b.role is Role.WEIGHTS and b.block == block}
            assert policy.weight_homes[block] in weights
            assert (Tier.HOST in weights) == ("host" in (policy.weight_homes[block], policy.optimizer_homes[block]))


# Peaks


def priced_alike(model: ModelSpec, workload: Workload, policy: Policy, transients: dict[str, int]) -> OperationCosts:
    """Every operation takes a second; transient bytes by kind; layers keep 1,000 bytes."""
    program = build(model, workload, policy)
    entries = {
        operation_key(operation, model, workload, policy): MeasuredCost(
            seconds=1.0,
            transient_bytes=transients.get(operation.kind, 0),
            kept_bytes=1000,
            source="measured: for a test",
        )
        for operation in (*program.first, *program.steady)
    }
    return OperationCosts(
        hardware="toy", shape=shape_hash(model), precision=workload.precision, compiled=workload.compiled,
        entries=entries,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("level", "transients", "alive"),
    [
        # 2 layers, one micro-batch of 4 tokens of 8 bf16 numbers: 64 bytes a hidden state; a batch takes 72.
        # Inputs of both layers, of the head, and its gradient, while the loss runs: 4 x 64.
        ("input", {}, 72 + 4 * 64),
        ("input", {"loss": 5000}, 72 + 4 * 64 + 5000),
        # Forward 2: two inputs and the output.
        ("input", {"forward": 5000}, 72 + 3 * 64 + 5000),
        # Backward 2: two inputs, the gradient above and the one it forms.
        ("input", {"backward": 5000}, 72 + 4 * 64 + 5000),
        ("keep", {"loss": 5000}, 72 + 4 * 64 + 2 * 1000 + 5000),
        ("keep", {"forward": 5000}, 72 + 3 * 64 + 2 * 1000 + 5000),
    ],
)
def test_the_device_peak_by_hand(level: Any, transients: dict[str, int], alive: int) -> None:
    model, workload = small_model(2), small_workload(1)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,), save_level=level)
    found = predict(model, workload, policy, toy_profile(), priced_alike(model, workload, policy, transients))
    persistent = sum(b.num_bytes for b in place(model, workload, policy).buffers.values() if b.tier is Tier.DEVICE)
    assert batch_bytes(4) == 72
    assert found.timeline.peak_bytes["device"] == persistent + alive
    expected = toy_profile().context_bytes.value + persistent + alive * (1 + ALLOCATOR_SLACK)
    assert found.figures.device_peak_bytes == round(expected)


def test_the_allocators_slack_is_a_share_of_what_passes_up_to_a_limit() -> None:
    assert allocator_slack_bytes(0) == 0
    assert allocator_slack_bytes(2_000_000_000) == 180_000_000
    assert allocator_slack_bytes(4 * GIB) == round(0.36 * GIB)
    assert allocator_slack_bytes(5 * GIB) == allocator_slack_bytes(110 * GIB) == 448 * MIB


def test_the_host_peak_is_process_buffers_and_what_is_in_transit() -> None:
    model, workload = small_model(3), small_workload(2)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1, 1), weights="host", optimizer="host")
    found = predict(model, workload, policy, toy_profile())
    buffers = sum(b.num_bytes for b in place(model, workload, policy).buffers.values() if b.tier is Tier.HOST)
    process = toy_profile().host_base_bytes.value + HOST_COMPILER_BYTES
    batches = 2 * 24 * 8  # of 8 tokens, one in use and one being made
    assert found.figures.host_peak_bytes == process + batches + buffers + 96 * 2**20  # the largest tensor has 1 KiB
    # Batches of two steps: ids and labels of 8 tokens, and the loss scale.
    assert place(model, workload, policy).buffers["host.batches"].num_bytes == 2 * (8 * 16 + 8)


def test_a_step_of_no_time_is_refused() -> None:
    model, workload = small_model(3), small_workload(2)
    with pytest.raises(InputError, match="costs: all that a step waits for takes 0 seconds"):
        step_figures(model, workload, 0.0, device_peak_bytes=0, host_peak_bytes=0, breakdown_seconds={})


def test_large_tensors_are_on_their_way_in_pieces() -> None:
    model = load_model_spec(Path(__file__).parents[1] / "simulator/catalogue/models/qwen2.5-7b.json")
    assert transit_bytes(model) == 256 * 2**20


@pytest.mark.parametrize(
    ("rows", "expected"),
    # A layer's widest argument has 18,944 x 2 bytes a token; nine tenths of 4,096 tokens' logits are 1.04 GiB.
    [(8, 0), (16, 0), (24, 0), (32, 2 * 2**30), (64, 4 * 2**30), (128, 8 * 2**30)],
)
def test_the_compiler_sets_large_arguments_aside_on_the_host(rows: int, expected: int) -> None:
    model = load_model_spec(Path(__file__).parents[1] / "simulator/catalogue/models/qwen2.5-7b.json")
    workload = Workload(sequence_length=1024, tokens_per_step=384 * 1024)
    policy = uniform_policy(model, workload, micro_batch_rows=rows, groups=(384 // rows,), weights="host")
    assert set_aside_bytes(model, workload, policy) == expected


def cpu_profile() -> Any:
    toy = toy_profile()
    return toy.model_copy(
        update={
            "device": Device(kind="cpu", name="Toy", memory_bytes=toy.host.memory_bytes),
            "execution": "inline",
            "shared_memory": True,
            "context_bytes": figure(0),
        }
    )


def test_where_memory_is_shared_the_host_bears_the_device_too() -> None:
    model, workload = small_model(3), small_workload(2)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1, 1), weights="host", optimizer="host")
    alone = predict(model, workload, policy, toy_profile())
    shared = predict(model, workload, policy, cpu_profile())
    device = shared.timeline.peak_bytes["device"]
    assert shared.figures.host_peak_bytes >= alone.figures.host_peak_bytes - HOST_COMPILER_BYTES + device


@pytest.mark.parametrize("seed", range(30))
def test_figures_agree_with_the_timeline_and_with_each_other(seed: int) -> None:
    model, workload, policy = random_case(seed)
    workload = workload.model_copy(update={"precision": "bf16"})
    for profile in (toy_profile(), cpu_profile()):
        found = predict(model, workload, policy, profile)
        figures, tokens = found.figures, workload.tokens_per_step
        assert figures.step_seconds == found.timeline.step_seconds
        assert figures.tokens_per_second == pytest.approx(tokens / figures.step_seconds)
        assert figures.tflops == pytest.approx(6 * model.num_parameters * tokens / figures.step_seconds / 1e12)
        squares = workload.rows_per_step * workload.sequence_length**2
        attention = 6 * model.num_layers * model.num_heads * model.head_dim * squares
        assert figures.tflops_with_attention == pytest.approx(figures.tflops + attention / figures.step_seconds / 1e12)
        assert sum(figures.breakdown_seconds.values()) == pytest.approx(figures.step_seconds)
        assert "launch gaps" not in figures.breakdown_seconds
        assert figures.device_peak_bytes >= found.timeline.peak_bytes["device"] + profile.context_bytes.value
        assert StepFigures.model_validate_json(figures.model_dump_json()) == figures
        pricing = Pricing(model, workload, policy, profile)
        busy: dict[str, float] = {}
        for operation in found.program.steady:
            lane = "thread" if profile.execution == "inline" else operation.resource.value
            busy[lane] = busy.get(lane, 0.0) + pricing.price(operation).seconds
        assert figures.step_seconds >= max(busy.values()) * (1 - 1e-9)
        if profile.execution == "inline":
            assert figures.step_seconds == pytest.approx(busy["thread"])


def test_what_cannot_be_built_is_not_predicted() -> None:
    model, workload = small_model(2), small_workload(2)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(2,))
    with pytest.raises(InputError, match="rows of a step"):
        predict(model, workload, policy.model_copy(update={"groups": (3,)}), toy_profile())
    with pytest.raises(UnsupportedChoice, match="mlp_chunk_tokens"):
        predict(model, workload, policy.model_copy(update={"mlp_chunk_tokens": 64}), toy_profile())
    with pytest.raises(InputError, match="fp64"):
        predict(model, workload.model_copy(update={"precision": "fp64"}), policy, toy_profile())


# Steps of a throw-away prototype on an NVIDIA H200 host, Qwen2.5-7B, sequences of 1,024. Rooflines only, nothing
# calibrated. The prototype updated neither embedding nor head and accumulated in bf16, so times are compared where
# updates hide or stay on the device.
LOW_18: tuple[OptimizerHome, ...] = ("device", *["device"] * 18, *["host"] * 10, "device")
MEASURED_STEPS = [
    ("all in HBM", 7.12, 98304, 8, "budget_70", None),
    ("all in HBM", 1.22, 16384, 8, "budget_70", None),
    ("all in HBM", 0.35, 4096, 4, "budget_70", None),
    ("lower 18 of 28", 6.92, 98304, 16, "budget_70", LOW_18),
    ("lower 18 of 28", 2.42, 32768, 16, "budget_50", LOW_18),
    ("lower 18 of 28", 1.18, 16384, 16, "budget_70", LOW_18),
]


@pytest.mark.parametrize(("title", "seconds", "tokens", "rows", "level", "homes"), MEASURED_STEPS)
def test_uncalibrated_predictions_are_within_10_percent_of_measured_steps(
    qwen: ModelSpec, title: str, seconds: float, tokens: int, rows: int, level: Any, homes: Any
) -> None:
    workload = Workload(
        sequence_length=1024, tokens_per_step=tokens, compiled=True, gradient_format="bf16", clipping="none"
    )
    groups = (1,) * (tokens // 1024 // rows)
    policy = uniform_policy(qwen, workload, micro_batch_rows=rows, groups=groups, save_level=level)
    if homes is not None:
        policy = policy.model_copy(update={"optimizer_homes": homes, "gradient_homes": homes})
    found = predict(qwen, workload, policy, load_hardware("h200"))
    assert found.figures.step_seconds == pytest.approx(seconds, rel=0.1)


def test_a_host_optimizer_costs_the_step_what_was_measured(qwen: ModelSpec) -> None:
    # 98,304 tokens in six groups: 8.02 s with the host optimizer, 6.96 without any: 15 % lost. Ours updates embedding
    # and head too, 14 % of the parameters.
    workload = Workload(
        sequence_length=1024, tokens_per_step=98304, compiled=True, gradient_format="bf16", clipping="none"
    )
    seconds = {}
    for home in ("device", "host"):
        policy = uniform_policy(
            qwen,
            workload,
            micro_batch_rows=16,
            groups=(1,) * 6,
            save_level="budget_70",
            optimizer=home,  # type: ignore[arg-type]
        )
        figures = predict(qwen, workload, policy, load_hardware("h200")).figures
        seconds[home] = figures.step_seconds - figures.breakdown_seconds.get("update", 0.0)
    assert seconds["host"] / seconds["device"] == pytest.approx(1.15, abs=0.07)


def test_predicted_memory_of_a_measured_run(qwen: ModelSpec) -> None:
    # Everything in HBM with 8K-token micro-batches peaked at 126.6 GiB with gradients summed in bf16; ours are summed
    # in fp32, 2 bytes a parameter more: 140.8 GiB.
    workload = Workload(
        sequence_length=1024, tokens_per_step=98304, compiled=True, gradient_format="bf16", clipping="none"
    )
    policy = uniform_policy(qwen, workload, micro_batch_rows=8, groups=(1,) * 12, save_level="budget_70")
    peak = predict(qwen, workload, policy, load_hardware("h200")).figures.device_peak_bytes
    assert peak / GIB == pytest.approx(126.6 + 2 * qwen.num_parameters / GIB, rel=0.02)
