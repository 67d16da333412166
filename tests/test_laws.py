"""Laws that every plan keeps, whatever the model, the machine and the limits: a richer machine is never slower.

Problems are drawn from seeds, the same ones every time. A few small ones by default, many with `pytest -m slow`.
"""

from random import Random

import pytest
from law_cases import deeper, faster
from planning_cases import Case, LayerPrices, machine, price_table, random_case, tight_limits, toy_model

from planner.base_policy import base_policy
from planner.outlines import Outline
from planner.plan import Limits, Plan
from planner.problem import Problem
from planner.search import plan
from simulator.build import build
from simulator.check import check
from simulator.costs import Pricing
from simulator.errors import InfeasiblePlan
from simulator.policy import EAGER_SAVE_LEVELS, Policy, Workload
from simulator.predict import predict
from simulator.program import Kind, Operation, Resource
from simulator.replay import COPIES

ROUNDING = 1e-9
GAP = 1e-3
ENDLESS = Limits(device_memory_bytes=2**60, host_memory_bytes=2**60)
FACTORS = (1.05, 1.3, 2.0, 8.0)
RICHER = ("device memory", "host memory", "link", "compute", "host DRAM")

# Not drawn by hypothesis: it mixes in constants of all modules that happen to be loaded.
FEW = pytest.mark.parametrize("seed", range(4))
MANY = pytest.mark.parametrize("seed", range(4, 34))


def planned(case: Case, limits: Limits, *, gap: float = GAP) -> Plan | None:
    try:
        return plan(case.model, case.workload, case.hardware, limits, case.costs, gap=gap, with_baselines=False)
    except InfeasiblePlan:
        return None


def small_case(random: Random) -> Case:
    return random_case(random, max_layers=3, max_rows=2)


def large_case(random: Random) -> Case:
    return random_case(random, max_layers=8, max_rows=4)


# A richer machine is never slower


def enriched(case: Case, limits: Limits, resource: str, factor: float) -> tuple[Case, Limits]:
    """The problem on a machine with `factor` times as much of one resource."""
    if resource in ("device memory", "host memory"):
        key = resource.replace(" ", "_") + "_bytes"
        return case, limits.model_copy(update={key: round(factor * getattr(limits, key))})
    rate = {"link": "link", "compute": "compute", "host DRAM": "dram"}[resource]
    return faster(case, **{rate: factor}), limits


def check_that_richer_is_never_slower(random: Random, case: Case, resource: str, factor: float) -> None:
    limits = tight_limits(random, case)
    poor = planned(case, limits)
    if poor is None:
        return
    richer_case, richer_limits = enriched(case, limits, resource, factor)
    rich = planned(richer_case, richer_limits)
    assert rich is not None
    problem = Problem(richer_case.model, richer_case.workload, richer_case.hardware, richer_limits, richer_case.costs)
    repriced = problem.figures(poor.policy)
    assert not problem.excess_bytes(repriced)
    # The bound speaks of all policies, so of the poorer machine's too.
    least = rich.prediction.step_seconds * (1 - rich.bound.gap) * (1 - ROUNDING)
    assert least <= repriced.step_seconds
    lost = dram_seconds_of_copies(richer_case, poor.policy) if resource == "link" else 0.0
    assert least <= poor.prediction.step_seconds + lost
    if "memory" in resource:
        assert repriced == poor.prediction


def dram_seconds_of_copies(case: Case, policy: Policy) -> float:
    """The most that copies can take from host updates beside them: what they move, at the host DRAM's rate."""
    pricing = Pricing(case.model, case.workload, policy, case.hardware, case.costs)
    copies = [op for op in build(case.model, case.workload, policy).steady if op.resource in COPIES]
    return sum(pricing.price(op).dram_bytes for op in copies) / case.hardware.host_dram_bytes_per_second.value


@pytest.mark.parametrize("resource", RICHER)
@FEW
def test_a_richer_machine_is_never_slower(resource: str, seed: int) -> None:
    random = Random(f"{resource} {seed}")
    check_that_richer_is_never_slower(random, small_case(random), resource, random.choice(FACTORS))


@pytest.mark.slow
@pytest.mark.parametrize("resource", RICHER)
@MANY
def test_a_richer_machine_is_never_slower_many_times(resource: str, seed: int) -> None:
    random = Random(f"{resource} {seed}")
    check_that_richer_is_never_slower(random, large_case(random), resource, random.choice(FACTORS))


def test_a_faster_link_loses_only_what_its_copies_take_from_host_updates() -> None:
    # Twelve updates on the host at three quarters of what its DRAM moves. Copies at a quarter cost them nothing, copies
    # at half of it a third of their time: no policy for the faster link is as fast, and the bound says so.
    case, limits = updates_on_the_host(dram_bytes_per_second=4e9)
    poor, rich = planned(case, limits), planned(faster(case, link=2.0), limits)
    assert poor is not None
    assert rich is not None
    assert rich.bound.step_seconds > poor.prediction.step_seconds * 1.01
    lost = rich.prediction.step_seconds - poor.prediction.step_seconds
    assert lost < dram_seconds_of_copies(case, poor.policy)
    # DRAM that has room for both gives the law without exception.
    case, limits = updates_on_the_host(dram_bytes_per_second=8e9)
    poor, rich = planned(case, limits), planned(faster(case, link=2.0), limits)
    assert poor is not None
    assert rich is not None
    assert rich.prediction.step_seconds < poor.prediction.step_seconds


def updates_on_the_host(*, dram_bytes_per_second: float) -> tuple[Case, Limits]:
    """Twelve layers whose state fits on the host alone, an update of each at 3 GB/s, and a link of 1 GB/s."""
    model = toy_model(12, layer_elements=128 * 2000)
    workload = Workload(sequence_length=64, tokens_per_step=64, gradient_format="bf16")
    policy = base_policy(model, workload, Outline(1, (1,)), host=frozenset(model.layers))
    hardware = machine(link_bytes_per_second=1e9, dram_bytes_per_second=dram_bytes_per_second)
    update_bytes = (
        Pricing(model, workload, policy, hardware)
        .price(Operation("", Kind.UPDATE, Resource.HOST, 1, 0, 0, ""))
        .dram_bytes
    )
    prices = LayerPrices(
        forward=dict.fromkeys(EAGER_SAVE_LEVELS, 1e-4),
        backward=dict.fromkeys(EAGER_SAVE_LEVELS, 2e-3),  # long enough for all stores
        kept=dict.fromkeys(EAGER_SAVE_LEVELS, 0),
        transient=dict.fromkeys(EAGER_SAVE_LEVELS, 0),
    )
    costs = price_table(model, workload, policy, layers={1: prices}, update_host=update_bytes / 3e9)
    case = Case(model, workload, hardware, costs)
    figures = predict(model, workload, policy, hardware, costs).figures
    return case, Limits(device_memory_bytes=figures.device_peak_bytes, host_memory_bytes=2**40)


# Speed, depth


def check_that_time_scales(random: Random, case: Case, factor: float) -> None:
    limits = tight_limits(random, case)
    slow = planned(case, limits)
    if slow is None:
        return
    fast_case = faster(case, compute=factor, link=factor, dram=factor, launch=factor)
    policy_seconds = predict(
        fast_case.model, fast_case.workload, slow.policy, fast_case.hardware, fast_case.costs
    ).figures.step_seconds
    assert policy_seconds * factor == pytest.approx(slow.prediction.step_seconds, rel=ROUNDING)
    fast = planned(fast_case, limits)
    assert fast is not None
    # Both are within their gaps of the same optimum.
    assert fast.prediction.step_seconds * factor == pytest.approx(
        slow.prediction.step_seconds, rel=max(fast.bound.gap, slow.bound.gap) + ROUNDING
    )


@FEW
def test_scaling_all_speeds_scales_the_time(seed: int) -> None:
    random = Random(seed)
    check_that_time_scales(random, small_case(random), random.choice((0.5, 2.0, 3.0)))


@pytest.mark.slow
@MANY
def test_scaling_all_speeds_scales_the_time_many_times(seed: int) -> None:
    random = Random(seed)
    check_that_time_scales(random, large_case(random), random.choice((0.5, 2.0, 3.0)))


def check_that_depth_costs(random: Random, case: Case, layers: int) -> None:
    limits = tight_limits(random, case)
    deep = planned(deeper(case, layers), limits)
    if deep is None:
        return
    shallow = planned(case, limits)
    assert shallow is not None
    least = shallow.prediction.step_seconds * (1 - shallow.bound.gap) * (1 - ROUNDING)
    assert least <= deep.prediction.step_seconds


@FEW
def test_more_layers_are_never_faster(seed: int) -> None:
    random = Random(seed)
    check_that_depth_costs(random, small_case(random), random.randint(1, 2))


@pytest.mark.slow
@MANY
def test_more_layers_are_never_faster_many_times(seed: int) -> None:
    random = Random(seed)
    check_that_depth_costs(random, large_case(random), random.randint(1, 4))


# Limits, bounds, repetition


def check_what_every_plan_keeps(random: Random, case: Case) -> None:
    limits = tight_limits(random, case)
    found = planned(case, limits)
    if found is None:
        return
    figures = predict(case.model, case.workload, found.policy, case.hardware, case.costs).figures
    assert figures == found.prediction
    assert figures.device_peak_bytes <= limits.device_memory_bytes
    assert figures.host_peak_bytes <= limits.host_memory_bytes
    assert found.bound.step_seconds <= figures.step_seconds
    check(build(case.model, case.workload, found.policy))
    again = planned(case, limits)
    assert again is not None
    assert again.model_dump_json(exclude={"timings"}) == found.model_dump_json(exclude={"timings"})
    assert again.timings.keys() == found.timings.keys()


@FEW
def test_plans_keep_their_limits_and_repeat_byte_for_byte(seed: int) -> None:
    random = Random(seed)
    check_what_every_plan_keeps(random, small_case(random))


@pytest.mark.slow
@MANY
def test_plans_keep_their_limits_and_repeat_byte_for_byte_many_times(seed: int) -> None:
    random = Random(seed)
    check_what_every_plan_keeps(random, large_case(random))


# The two ends: endless memory, and a link that is hardly there


def check_endless_memory(case: Case) -> None:
    found = planned(case, ENDLESS)
    assert found is not None
    policy, model = found.policy, case.model
    assert set(policy.weight_homes) == {"device"}
    assert "recompute" not in found.prediction.breakdown_seconds
    # Every layer at the level whose passes are fastest: nothing is recomputed that costs time.
    problem = Problem(model, case.workload, case.hardware, ENDLESS, case.costs)
    levels = problem.coefficients(Outline(policy.micro_batch_rows, policy.groups)).level_costs
    seconds = {key: costs.forward_seconds + costs.backward_seconds for key, costs in levels.items()}
    kinds = [model.kind_of_block[layer] for layer in model.layers]
    chosen = sum(seconds[key] for key in zip(kinds, policy.save_levels, strict=True))
    fastest = sum(min(value for (of, _), value in seconds.items() if of == kind) for kind in kinds)
    wasted = policy.num_micro_batches * (chosen - fastest)
    assert wasted <= 2 * GAP * found.prediction.step_seconds
    if case.workload.clipping == "global":
        # Nothing beats an update on the device there, unless it is slower than all that the host could hide.
        assert found.bound.gap <= GAP


@FEW
def test_with_endless_memory_everything_is_resident_and_nothing_is_recomputed(seed: int) -> None:
    check_endless_memory(small_case(Random(seed)))


@pytest.mark.slow
@MANY
def test_with_endless_memory_everything_is_resident_and_nothing_is_recomputed_many_times(seed: int) -> None:
    check_endless_memory(large_case(Random(seed)))


def check_a_link_that_is_hardly_there(random: Random, case: Case) -> None:
    # A copy of one layer takes longer than all compute of a step.
    case = faster(case, link=1e-3, compute=10.0, dram=10.0)
    limits = tight_limits(random, case)
    found = planned(case, limits)
    if found is None or case.hardware.execution == "inline":
        return
    model, policy = case.model, found.policy
    # Whoever is on the host could not be on the device, even if the layers kept as little as they can.
    least = policy.model_copy(update={"save_levels": ("input",) * model.num_layers})
    problem = Problem(model, case.workload, case.hardware, limits, case.costs)
    for block in range(model.num_blocks):
        together = {0, model.head} if model.tied_embeddings and block in (0, model.head) else {block}
        if policy.optimizer_homes[block] == "device":
            continue
        homes = {
            name: tuple("device" if at in together else home for at, home in enumerate(getattr(least, name)))
            for name in ("weight_homes", "optimizer_homes", "gradient_homes")
        }
        for changed in (least.model_copy(update=homes), policy.model_copy(update=homes)):
            figures = problem.figures(changed)
            faster_by = 1 - figures.step_seconds / found.prediction.step_seconds
            assert problem.excess_bytes(figures) or faster_by <= found.bound.gap


@FEW
def test_over_a_link_that_is_hardly_there_goes_only_what_must(seed: int) -> None:
    random = Random(seed)
    check_a_link_that_is_hardly_there(random, small_case(random))


@pytest.mark.slow
@MANY
def test_over_a_link_that_is_hardly_there_goes_only_what_must_many_times(seed: int) -> None:
    random = Random(seed)
    check_a_link_that_is_hardly_there(random, large_case(random))
