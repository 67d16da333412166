"""The program against the replay: never above it in time or memory, whatever the policy, and not far below."""

from collections.abc import Callable
from random import Random

import pytest
from depth_first_cases import depth_first_case, depth_first_policy
from planning_cases import Case, machine, random_case, random_policy, seven_billion, toy_model
from saved_cases import saved_case, saved_policy

from planner.contention import update_losses
from planner.keeping import ON_HOST
from planner.layout import policies
from planner.memory_rows import GB
from planner.outlines import Outline, outlines
from planner.plan import Limits
from planner.problem import Problem
from planner.solve import solve
from planner.variables import policy_decisions
from simulator.hardware import load_hardware
from simulator.policy import SAVE_LEVELS, Policy, Workload
from simulator.predict import ALLOCATOR_SLACK
from simulator.replay import Price, Sharing
from simulator.units import GIB

PLENTY = Limits(device_memory_bytes=2**60, host_memory_bytes=2**60)
ROUNDING = 1e-9


def check_policy_against_replay(case: Case, policy: Policy) -> None:
    problem = Problem(case.model, case.workload, case.hardware, PLENTY, case.costs)
    outline = Outline.of(policy)
    formulation = problem.formulation(outline)
    values = formulation.evaluate(policy_decisions(formulation.coefficients, policy))
    figures = problem.figures(policy)
    assert formulation.step.value(values) <= figures.step_seconds * (1 + ROUNDING)
    # The replay's peaks are whole bytes.
    assert GB * formulation.memory.device_gb.value(values) <= figures.device_peak_bytes + 2
    assert GB * formulation.memory.host_gb.value(values) <= figures.host_peak_bytes + 2


DRAWS: dict[str, tuple[Callable[..., Case], Callable[[Random, Case], Policy]]] = {
    "any": (random_case, random_policy),
    "depth-first": (depth_first_case, depth_first_policy),
    "saved": (saved_case, saved_policy),
}


def check_random_policies(prefix: str, number: int, *, kind: str = "any", **sizes: int) -> None:
    """Cases and policies of `number` seeds."""
    draw_case, draw_policy = DRAWS[kind]
    for seed in range(number):
        random = Random(f"{prefix}.{seed}")
        case = draw_case(random, **sizes)
        check_policy_against_replay(case, draw_policy(random, case))


@pytest.mark.parametrize("part", range(4))
def test_relaxation_and_memory_of_random_policies_are_below_their_replay(part: int) -> None:
    check_random_policies(f"{part}", 60)


@pytest.mark.parametrize("part", range(2))
def test_relaxation_and_memory_of_depth_first_policies_are_below_their_replay(part: int) -> None:
    check_random_policies(f"depth-first.{part}", 60, kind="depth-first")


@pytest.mark.parametrize("part", range(2))
def test_relaxation_and_memory_of_policies_with_saved_activations_on_the_host_are_below_their_replay(part: int) -> None:
    check_random_policies(f"saved.{part}", 60, kind="saved")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_relaxation_and_memory_of_thousands_of_those_are_below_their_replay(part: int) -> None:
    check_random_policies(f"slow.saved.{part}", 400, kind="saved", max_layers=8, max_rows=6)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_relaxation_and_memory_of_thousands_of_depth_first_policies_are_below_their_replay(part: int) -> None:
    check_random_policies(f"slow.depth-first.{part}", 400, kind="depth-first", max_layers=8, max_rows=6)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_relaxation_and_memory_of_thousands_of_random_policies_are_below_their_replay(part: int) -> None:
    check_random_policies(f"slow.{part}", 400, max_layers=8, max_rows=6)


@pytest.mark.parametrize("seed", range(6))
def test_relaxation_is_below_the_replay_on_a_real_machine(seed: int) -> None:
    random = Random(seed)
    workload = Workload(
        sequence_length=1024,
        tokens_per_step=1024 * random.choice([4, 16, 32]),
        gradient_format=random.choice(["bf16", "fp32"]),
        clipping=random.choice(["global", "global", "none"]),
        compiled=True,
    )
    model = seven_billion()
    draw = random.choice([random_policy, depth_first_policy, saved_policy])
    policy = draw(random, Case(model, workload, machine(), None))  # type: ignore[arg-type]
    problem = Problem(model, workload, load_hardware("h200"), PLENTY)
    outline = Outline.of(policy)
    formulation = problem.formulation(outline)
    assert formulation.bound_of(policy) <= problem.figures(policy).step_seconds * (1 + ROUNDING)


@pytest.mark.parametrize("seed", range(40))
def test_optimum_is_below_every_policy_within_the_limits(seed: int) -> None:
    # The limits are exactly what a random policy takes, so it is a solution, and the optimum cannot be slower.
    random = Random(seed)
    draw_case, draw_policy = DRAWS[("depth-first", "any", "saved", "any")[seed % 4]]
    case = draw_case(random)
    policy = draw_policy(random, case)
    problem = Problem(case.model, case.workload, case.hardware, PLENTY, case.costs)
    figures = problem.figures(policy)
    limits = Limits(device_memory_bytes=figures.device_peak_bytes, host_memory_bytes=figures.host_peak_bytes)
    outline = Outline.of(policy)
    solution = solve(problem.with_limits(limits).formulation(outline).mip, gap=1e-6)
    assert solution.status == "solved"
    assert solution.bound <= figures.step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("most_slack_bytes", [GIB, 300])  # never reached here, and by most
@pytest.mark.parametrize("seed", range(10))
def test_memory_of_a_laid_out_solution_is_the_replay_s(
    seed: int, most_slack_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One kind of layer: the layout by transients is the best, and the program's memory is exact but for what may still
    # be on its way to the host: an input, or so much more that the program gives the least alone.
    monkeypatch.setattr("simulator.predict.MOST_ALLOCATOR_SLACK_BYTES", most_slack_bytes)
    monkeypatch.setattr("planner.memory_rows.MOST_ALLOCATOR_SLACK_BYTES", most_slack_bytes)
    random = Random(seed)
    case = random_case(random)
    while len(set(case.model.kind_of_block[1:-1])) > 1:
        case = random_case(random)
    problem = Problem(case.model, case.workload, case.hardware, PLENTY, case.costs)
    for outline in outlines(case.model, case.workload):
        formulation = problem.formulation(outline)
        draw = saved_policy if outline.saved_waits else depth_first_policy if outline.depth_first else random_policy
        decisions = policy_decisions(formulation.coefficients, draw(random, case))
        if {level for (_, level), count in decisions.levels.items() if count} - set(formulation.coefficients.levels):
            continue
        expected = GB * formulation.memory.device_gb.value(formulation.evaluate(decisions))
        # Batches of later groups may come early: 16 bytes a token.
        slack = (1 + ALLOCATOR_SLACK) * 17 * case.workload.tokens_per_step + 2
        if any(count for (_, level), count in decisions.levels.items() if level in ON_HOST):
            slack += (1 + ALLOCATOR_SLACK) * formulation.coefficients.hidden_bytes
        for policy in policies(formulation.coefficients, decisions):
            peak = problem.figures(policy).device_peak_bytes
            assert expected - 2 <= peak
            assert peak <= expected + slack or outline.saved_waits


def test_every_save_level_of_a_compiled_workload_is_a_choice() -> None:
    model = toy_model(3, layer_elements=128 * 100)
    problem = Problem(model, Workload(sequence_length=8, tokens_per_step=8, compiled=True), machine(), PLENTY)
    levels = problem.formulation(Outline(1, (1,))).coefficients.levels
    assert levels == (*SAVE_LEVELS, "input_on_host")


# What updates lose to copies, by hand: an update of 3 bytes/s alone, host DRAM that moves 4


@pytest.mark.parametrize(
    ("load_rate", "store_rate", "duplex", "loads", "stores"),
    [
        (1.0, 0.0, 1.0, 0.0, 0.0),  # 3 + 1 fit
        (2.0, 0.0, 1.0, 1 / 3, 0.0),  # the copy has its 2, the update 2 of 3
        (8.0, 0.0, 1.0, (1 / 3) / (1 / 2), 0.0),  # alone it has 4; both have 2, and it takes twice as long
        (2.0, 2.0, 1.0, 1 / 3, 1 / 3),  # at one time all have 4/3, and the update loses 5/9 for 2/3 of each copy
        (2.0, 1.0, 0.5, 1 / 3, 0.0),  # at one time 3 + 1 + 1/2: the update has 2.5 of 3 for half a second of the load
        (2.0, 0.2, 0.5, 1 / 15, 0.0),  # 3 + 1 + 0.1: it has 2.9, and half a second of a load costs 1/30
        (8.0, 8.0, 1.0, 1 / 2, 1 / 2),  # no more than 1 together
    ],
)
def test_what_updates_lose_to_copies_is_what_max_min_sharing_takes(
    load_rate: float, store_rate: float, duplex: float, loads: float, stores: float
) -> None:
    sharing = Sharing(duplex=duplex, dram_bytes_per_second=4.0)
    update, nothing = Price(10.0, dram_bytes=30.0), Price(0.0)
    load = Price(2.0, dram_bytes=2.0 * load_rate)
    store = Price(5.0, dram_bytes=5.0 * store_rate) if store_rate else nothing
    found = update_losses(
        sharing, frozenset([update, nothing]), frozenset([nothing, load]), frozenset([nothing, store])
    )
    assert (found.loads, found.stores) == pytest.approx((loads, stores))
    assert (found.seconds(load), found.seconds(store)) == pytest.approx((2.0 * loads, 5.0 * stores))
    assert found.seconds(nothing) == 0.0
    none = update_losses(sharing, frozenset([nothing]), frozenset([load]), frozenset([store]))
    assert (none.loads, none.stores) == (0.0, 0.0)
