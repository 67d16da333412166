"""Frozen parameters in the simulator and the planner: what is built, what it costs, what is planned."""

from random import Random

import pytest
from freezing_cases import fitted, randomly_frozen
from planning_cases import Case, random_case, random_policy
from small_models import random_case as random_program
from small_models import small_model, small_workload

from planner.memory_rows import GB
from planner.outlines import Outline
from planner.plan import Limits
from planner.problem import Problem
from planner.search import plan
from planner.variables import policy_decisions
from simulator.build import build
from simulator.check import check
from simulator.costs import MeasuredCost, OperationCosts, Pricing, operation_key, shape_hash
from simulator.errors import InputError
from simulator.formulas import parameter_flops
from simulator.freezing import freeze, parameter_names, unfrozen
from simulator.hardware import load_hardware
from simulator.model import ModelSpec, model_spec
from simulator.policy import check_policy, uniform_policy
from simulator.predict import predict
from simulator.program import Kind
from simulator.schema import identity_hash
from tests.tiny import tiny_config

PLENTY = Limits(device_memory_bytes=2**60, host_memory_bytes=2**60)


def frozen_blocks(model: ModelSpec) -> set[int]:
    return set(range(model.num_blocks)) - set(model.trained_blocks)


def with_lasting_losses(costs: OperationCosts) -> OperationCosts:
    """Costs whose loss takes time: what an operation without duration reads and lets go of is in no curve of memory."""
    losses = {key: cost for key, cost in costs.entries.items() if key.startswith("loss") and not cost.seconds}
    return costs.with_entries({key: cost.model_copy(update={"seconds": 1e-7}) for key, cost in losses.items()})


def test_patterns_freeze_what_they_match_and_nothing_else() -> None:
    model = freeze(model_spec(tiny_config()), ["model.embed_tokens.*", "model.layers.0.*", "*.bias"])
    frozen = {
        model.block_prefix(block) + tensor.name
        for block in range(model.num_blocks)
        for tensor in model.block(block).tensors
        if tensor.frozen
    }
    names = parameter_names(model)
    assert frozen == {n for n in names if "embed" in n or ".layers.0." in n or n.endswith("bias")}
    assert frozen_blocks(model) == {0, 1}
    assert [model.block(block).forward_only for block in range(model.num_blocks)] == [True, True, *[False] * 4]


def test_a_model_of_which_nothing_is_frozen_keeps_its_identity() -> None:
    model = model_spec(tiny_config(tied=True))
    assert freeze(model, []) == model
    partly = freeze(model, ["model.layers.1.*"])
    assert unfrozen(partly) == model
    assert shape_hash(partly) == shape_hash(model)
    assert identity_hash(partly) != identity_hash(model)
    assert "frozen" not in model.model_dump_json()
    assert "forward_only" not in model.model_dump_json()
    assert ModelSpec.model_validate_json(partly.model_dump_json()) == partly


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        ("model.embed_token.*", "matches no parameter; did you mean 'model.embed_tokens.*'"),
        ("model.layers.9.*", "matches no parameter; did you mean 'model.layers."),
        ("model.layers.1.self_attn.q_proj.weigth", "did you mean 'model.layers.1.self_attn.q_proj.weight'"),
        ("*", "every parameter is frozen"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(pattern: str, answer: str) -> None:
    with pytest.raises(InputError, match="freeze: ") as caught:
        freeze(model_spec(tiny_config()), [pattern])
    assert answer in str(caught.value)


def test_the_projection_of_a_tied_model_is_its_embedding() -> None:
    with pytest.raises(InputError, match=r"tied to the embedding, 'model\.embed_tokens\.weight'"):
        freeze(model_spec(tiny_config(tied=True)), ["lm_head.*"])
    freeze(model_spec(tiny_config(tied=False)), ["lm_head.*"])


def test_frozen_blocks_have_no_state_no_gradient_and_no_update() -> None:
    model = freeze(small_model(4), ["model.t0", "model.layers.0.*", "model.layers.2.*"])
    workload = small_workload(2)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1, 1), weights="host", optimizer="host")
    program = build(model, workload, policy)
    assert frozen_blocks(model) == {0, 1, 3}
    for block in range(model.num_blocks):
        mine = {o.kind for o in [*program.steady, *program.drain] if o.block == block}
        optimizer = {Kind.FINISH_GRADIENT, Kind.STORE_GRADIENT, Kind.UPDATE}
        held = {b.role.value for b in program.buffers.values() if b.persistent and b.block == block}
        if block in (0, 1, 3):
            assert not mine & optimizer
            assert held == {"weights"}
        else:
            assert optimizer <= mine
            assert {"weights", "state", "gradient", "accumulator"} <= held
    # Block 3 passes the gradient on, below block 2 none is needed.
    assert {o.block for o in program.steady if o.kind is Kind.BACKWARD} == {2, 3, 4}


@pytest.mark.parametrize("part", range(4))
def test_programs_with_frozen_blocks_are_sound(part: int) -> None:
    for seed in range(60):
        model, workload, policy = random_program(1000 * part + seed)
        frozen = randomly_frozen(Random(f"{part}.{seed}"), model)
        policy = fitted(policy, frozen)
        if seed % 2:  # layers then read the batch too
            workload = workload.model_copy(update={"packed": True})
        check_policy(policy, frozen, workload)
        check(build(frozen, workload, policy))


def test_a_frozen_block_with_an_optimizer_elsewhere_is_refused() -> None:
    model, workload = small_model(2), small_workload(1)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,), optimizer="host")
    with pytest.raises(InputError, match="block 1: it is frozen, so its three homes are one"):
        check_policy(policy, freeze(model, ["model.layers.0.*"]), workload)


def test_flops_by_hand() -> None:
    model = small_model(3)
    assert parameter_flops(model) == 6 * model.num_parameters
    bottom = freeze(model, ["model.t0", "model.layers.0.*"])
    still = sum(model.block(block).num_parameters for block in (0, 1))
    assert parameter_flops(bottom) == 6 * model.num_parameters - 4 * still
    middle = freeze(model, ["model.layers.1.*"])
    assert parameter_flops(middle) == 6 * model.num_parameters - 2 * model.block(2).num_parameters


@pytest.mark.parametrize("part", range(4))
def test_relaxation_and_memory_are_below_the_replay(part: int) -> None:
    for seed in range(60):
        random = Random(f"frozen.{part}.{seed}")
        whole = random_case(random)
        model = randomly_frozen(random, whole.model)
        case = Case(model, whole.workload, whole.hardware, with_lasting_losses(whole.costs))
        policy = fitted(random_policy(random, whole), model)
        problem = Problem(model, case.workload, case.hardware, PLENTY, case.costs)
        outline = Outline.of(policy)
        formulation = problem.formulation(outline)
        values = formulation.evaluate(policy_decisions(formulation.coefficients, policy))
        assert not formulation.mip.violated(values), seed
        figures = problem.figures(policy)
        assert formulation.step.value(values) <= figures.step_seconds * (1 + 1e-9), seed
        assert GB * formulation.memory.device_gb.value(values) <= figures.device_peak_bytes + 2, seed
        assert GB * formulation.memory.host_gb.value(values) <= figures.host_peak_bytes + 2, seed


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_with_frozen_blocks_is_sound_and_no_slower_than_random_policies(seed: int) -> None:
    random = Random(f"plan.{seed}")
    whole = random_case(random, max_layers=4, max_rows=2)
    model = randomly_frozen(random, whole.model)
    found = plan(model, whole.workload, whole.hardware, PLENTY, whole.costs)
    check(build(model, whole.workload, found.policy))
    assert found.bound.step_seconds <= found.prediction.step_seconds
    for _ in range(8):
        policy = fitted(random_policy(random, whole), model)
        rival = predict(model, whole.workload, policy, whole.hardware, whole.costs).figures
        assert found.prediction.step_seconds <= rival.step_seconds * (1 + 2e-3)


def test_freezing_saves_predicted_time_and_memory() -> None:
    hardware, workload = (
        load_hardware("h200"),
        small_workload(4).model_copy(update={"sequence_length": 1024, "tokens_per_step": 4096}),
    )
    config = {**tiny_config(layers=8), "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256}
    model = model_spec(config)
    last = Limits(device_memory_bytes=2**40, host_memory_bytes=2**40)
    whole = plan(model, workload, hardware, last, with_baselines=False)
    bottom = [*(f"model.layers.{layer}.*" for layer in range(6)), "model.embed_tokens.*"]
    part = plan(freeze(model, bottom), workload, hardware, last, with_baselines=False)
    assert part.prediction.step_seconds < 0.7 * whole.prediction.step_seconds
    assert part.prediction.device_peak_bytes < 0.7 * whole.prediction.device_peak_bytes
    assert part.inputs.hashes.model != whole.inputs.hashes.model


def test_a_frozen_backward_is_priced_from_the_measured_whole_one() -> None:
    whole, workload = small_model(2), small_workload(1)
    model = freeze(whole, ["model.layers.1.t0"])
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,))
    operation = next(o for o in build(model, workload, policy).steady if o.name == "backward.2.0")
    key, whole_key = (operation_key(operation, m, workload, policy) for m in (model, whole))
    assert key != whole_key
    costs = OperationCosts(
        hardware="", shape=shape_hash(whole), precision="bf16", compiled=True,
        entries={whole_key: MeasuredCost(seconds=1.0, source="by hand")},
    )  # fmt: skip
    pricing = Pricing(model, workload, policy, load_hardware("h200"), costs)
    assert 0.3 < pricing.price(operation).seconds <= 1.0
    assert pricing.origins[key] == "interpolated"
    exact = costs.with_entries({key: MeasuredCost(seconds=0.25, source="by hand")})
    assert Pricing(model, workload, policy, load_hardware("h200"), exact).price(operation).seconds == 0.25
