"""Plans against all policies of small problems, priced by replay: no policy that fits is faster."""

import math
from collections.abc import Sequence
from random import Random

import pytest
from exhaustion import EVERY_HOME, HOMES, Exhaustion, LayerHome, Layout, fastest, within
from law_cases import faster
from planning_cases import Case, eager_case, joint_case, random_policy, tight_limits

from planner.outlines import outlines
from planner.plan import Limits
from planner.search import plan
from simulator.errors import InfeasiblePlan
from simulator.predict import device_process_bytes, host_process_bytes, predict
from simulator.program import Tier


def check_that_no_policy_is_faster(case: Case, limits: Limits, homes: Sequence[LayerHome] = HOMES) -> None:
    """Plan to a gap of nothing, and try all that could be faster than the plan, or that fits where none was found."""
    seconds = math.inf
    try:
        found = plan(
            case.model, case.workload, case.hardware, limits, case.costs,
            gap=1e-6, with_baselines=False, with_suggestions=False,
        )  # fmt: skip
    except InfeasiblePlan:
        pass
    else:
        figures = predict(case.model, case.workload, found.policy, case.hardware, case.costs).figures
        assert within(figures, limits)
        seconds = figures.step_seconds
    other = fastest(case, limits, known_seconds=seconds * (1 - 1e-9), homes=homes)
    assert other.policy is None, f"{other.step_seconds} s instead of {seconds} s"
    # Not because there was nothing to try.
    assert other.num_policies > (len(homes) * 3) ** case.model.num_layers


def random_limits(seed: int, case: Case) -> Limits:
    return tight_limits(Random(seed), case)


# What is left out without a replay could not win


@pytest.mark.parametrize("seed", range(20))
def test_least_seconds_and_bytes_of_a_policy_are_below_its_replay(seed: int) -> None:
    random = Random(f"least.{seed}")
    case = joint_case(seed, 3) if seed % 2 else eager_case(seed, 3, rows=1 + seed % 4 // 2, max_kinds=2)
    for outline in random.sample(outlines(case.model, case.workload), 2):
        one = Exhaustion(case, outline, EVERY_HOME)
        for _ in range(6):
            layout = Layout(
                homes=tuple(random.choice(EVERY_HOME) for _ in case.model.layers),
                embedding_on_host=(embedding := random.random() < 0.5),
                head_on_host=embedding if case.model.tied_embeddings else random.random() < 0.5,
                prefetch_depth=random.choice([1, 2]),
                state_slots=random.choice([2, 3]),
                state_pace=random.choice([1, 2, 3]),
            )
            at = tuple(random.randrange(len(one.keepings)) for _ in case.model.layers)
            if not one.allowed[at]:
                continue
            policy = one.policy(layout, [one.keepings[index] for index in at])
            figures = predict(case.model, case.workload, policy, case.hardware, case.costs).figures
            assert one.least_seconds(layout)[at] <= figures.step_seconds * (1 + 1e-9)
            placed = one.persistent_bytes(layout)
            device = placed[Tier.DEVICE] + device_process_bytes(case.hardware) + one.kept[at]
            assert device <= figures.device_peak_bytes + 1
            host = placed[Tier.HOST] + host_process_bytes(case.model, case.workload, case.hardware)
            assert host <= figures.host_peak_bytes + 1


# Two and three layers, and as many as six, with twelve choices a layer: two ways to keep on the device and one on the
# host, four homes


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_of_two_layers_is_faster(seed: int) -> None:
    case = eager_case(seed, 2, rows=1 + seed % 2)
    check_that_no_policy_is_faster(case, random_limits(seed, case))


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3, 4, 5, 6, 7, 8, 9))]
)
def test_no_policy_of_three_layers_in_two_micro_batches_is_faster(seed: int) -> None:
    case = eager_case(seed, 3, rows=2, max_kinds=2)
    check_that_no_policy_is_faster(case, random_limits(seed, case))


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "seed"), [(4, 0), (4, 1), (4, 2), (5, 3), (5, 11), (6, 1)])
def test_no_policy_of_more_layers_is_faster(num_layers: int, seed: int) -> None:
    case = eager_case(seed, num_layers)
    check_that_no_policy_is_faster(case, random_limits(seed, case))


# Every way to keep that compiled layers know, and weights that stream beside their state, which plans leave out: 35
# choices a layer, on machines that each lack something


def lacking(what: str, case: Case) -> tuple[Case, Limits]:
    """The problem where the link is fast or slow, or with little memory: below what most policies take."""
    if what in ("a fast link", "a slow link"):
        case = faster(case, link=8.0 if what == "a fast link" else 0.25)
    random = Random(what)
    figures = [
        predict(case.model, case.workload, random_policy(random, case), case.hardware, case.costs).figures
        for _ in range(40)
    ]
    device = sorted(f.device_peak_bytes for f in figures)
    host = sorted(f.host_peak_bytes for f in figures)
    return case, Limits(
        device_memory_bytes=device[4 if what == "little device memory" else 16],
        host_memory_bytes=host[10 if what == "little host memory" else 39],
    )


MACHINES = ("a fast link", "a slow link", "little device memory", "little host memory")


@pytest.mark.parametrize("what", [*MACHINES[:2], pytest.param(MACHINES[2], marks=pytest.mark.slow), MACHINES[3]])
def test_no_policy_of_two_layers_with_every_way_to_keep_is_faster(what: str) -> None:
    check_that_no_policy_is_faster(*lacking(what, joint_case(3, 2)), EVERY_HOME)


@pytest.mark.slow
@pytest.mark.parametrize("what", MACHINES)
@pytest.mark.parametrize("seed", [3, 4, 14])
def test_no_policy_of_three_layers_with_every_way_to_keep_is_faster(seed: int, what: str) -> None:
    check_that_no_policy_is_faster(*lacking(what, joint_case(seed, 3)), EVERY_HOME)
