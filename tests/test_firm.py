"""Firmness: among plans that prices cannot tell apart, one that a slower host does not slow."""

import pytest
from planning_cases import LayerPrices, machine, price_table, toy_model

from planner.branch import Found, Search
from planner.firm import HOST_LAG, firmer
from planner.outlines import outlines
from planner.plan import Limits
from planner.problem import Problem
from planner.search import plan
from simulator.policy import SAVE_LEVELS, Policy, Workload
from simulator.rates import faster

MIB, TOLERANCE = 2**20, 3e-3
ENDLESS = Limits(device_memory_bytes=2**40, host_memory_bytes=2**40)


def problem_of(num_layers: int, *, update_host: float, update_device: float, limits: Limits = ENDLESS) -> Problem:
    """A step of one micro-batch whose forwards take a second a layer, and the links next to nothing."""
    model = toy_model(num_layers, layer_elements=128 * 4000)
    workload = Workload(
        sequence_length=2048, tokens_per_step=2048, micro_batch_rows=1, gradient_format="bf16", compiled=True
    )
    prices = LayerPrices(
        forward=dict.fromkeys(SAVE_LEVELS, 1.0),
        backward={level: 2.0 + 0.3 * index for index, level in enumerate(SAVE_LEVELS)},
        kept={level: (len(SAVE_LEVELS) - index) * MIB for index, level in enumerate(SAVE_LEVELS)},
        transient=dict.fromkeys(SAVE_LEVELS, MIB),
    )
    homes = ("device",) * model.num_blocks
    policy = Policy(
        micro_batch_rows=1, groups=(1,), weight_homes=homes, save_levels=("keep",) * num_layers,
        activation_homes=("device",) * num_layers, gradient_homes=homes, optimizer_homes=homes, clipping="global",
        gradient_format="bf16",
    )  # fmt: skip
    costs = price_table(
        model, workload, policy, layers={1: prices}, update_host=update_host, update_device=update_device, load=0.05,
        store=0.05,
    )  # fmt: skip
    return Problem(model, workload, machine(), limits, costs)


def searched(problem: Problem) -> Found:
    every = outlines(problem.model, problem.workload)
    found = Search(problem, every, gap=1e-3, tolerance=1e-3, solver=True).run()
    assert found is not None
    return found


def on_a_lagging_host(problem: Problem, policy: Policy) -> float:
    lagging = problem.on(*faster(problem.hardware, problem.costs, host_dram=1 / HOST_LAG))
    return lagging.figures(policy).step_seconds


@pytest.mark.parametrize(
    ("num_layers", "update_host", "update_device"), [(4, 0.95, 0.01), (6, 0.9, 0.02), (8, 0.97, 0.005)]
)
def test_a_host_that_was_full_to_the_last_millisecond_gets_less_to_do(
    num_layers: int, update_host: float, update_device: float
) -> None:
    problem = problem_of(num_layers, update_host=update_host, update_device=update_device)
    fastest = searched(problem)
    limit = fastest.figures.step_seconds * (1 + TOLERANCE)
    assert on_a_lagging_host(problem, fastest.policy) > 1.03 * fastest.figures.step_seconds
    found = firmer(problem, fastest, tolerance=TOLERANCE)
    assert found.policy.optimizer_homes.count("host") < fastest.policy.optimizer_homes.count("host")
    assert found.figures == problem.figures(found.policy)
    assert not problem.excess_bytes(found.figures)
    assert found.bound_seconds <= found.figures.step_seconds <= limit
    assert on_a_lagging_host(problem, found.policy) <= limit


def test_what_costs_more_than_is_tolerated_is_not_done() -> None:
    problem = problem_of(4, update_host=0.95, update_device=0.01)
    fastest = searched(problem)
    assert firmer(problem, fastest, tolerance=1e-4).policy == fastest.policy


def test_what_does_not_fit_is_not_done() -> None:
    free = searched(problem_of(4, update_host=0.95, update_device=0.01))
    limits = Limits(device_memory_bytes=free.figures.device_peak_bytes, host_memory_bytes=2**40)
    problem = problem_of(4, update_host=0.95, update_device=0.01, limits=limits)
    found = firmer(problem, searched(problem), tolerance=TOLERANCE)
    assert found.figures.device_peak_bytes <= limits.device_memory_bytes
    assert found.policy.optimizer_homes.count("host") >= free.policy.optimizer_homes.count("host")


def test_a_plan_that_a_lag_does_not_slow_stays_what_it_is() -> None:
    firm = problem_of(6, update_host=0.5, update_device=0.005)
    found = searched(firm)
    assert "host" in found.policy.optimizer_homes
    assert firmer(firm, found, tolerance=TOLERANCE) == found
    slow_host = problem_of(4, update_host=50.0, update_device=0.005)
    found = searched(slow_host)
    assert "host" not in found.policy.optimizer_homes
    assert firmer(slow_host, found, tolerance=1.0) == found


def test_plans_are_firm() -> None:
    problem = problem_of(8, update_host=0.97, update_device=0.005)
    fastest = searched(problem)
    found = plan(problem.model, problem.workload, problem.hardware, ENDLESS, problem.costs, with_baselines=False)
    limit = fastest.figures.step_seconds * (1 + 1e-3)
    assert found.prediction.step_seconds <= limit
    assert on_a_lagging_host(problem, found.policy) < on_a_lagging_host(problem, fastest.policy)
    assert found.bound.step_seconds <= found.prediction.step_seconds
