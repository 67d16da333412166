"""Firmness: of plans that prices cannot tell apart, one that a slower host does not slow.

A search fills the host to the last millisecond that compute hides, since a block updated there is one less for the GPU.
Hosts of one kind differ by some per cent, and so do parts of one host's memory: where updates end a little later than
their price says, every layer's forward waits for its own.
"""

from collections.abc import Iterator

from planner.branch import IMPROVEMENT_OPERATIONS, Found, Search
from planner.formulation import Formulation
from planner.layout import policies, ways
from planner.neighbours import neighbours
from planner.outlines import Outline, outlines
from planner.problem import Problem
from planner.variables import policy_decisions
from simulator.errors import InputError
from simulator.policy import Policy
from simulator.predict import StepFigures
from simulator.rates import faster

# By how much longer updates on the host may take than their price: as far apart equal blocks of one host were seen.
HOST_LAG = 1.25


def firmer(problem: Problem, found: Found, *, tolerance: float, solver: bool = True) -> Found:
    """What was found, or a policy with less to update on the host that steps at most `tolerance` (a share) slower.

    Such a one is taken where it is the faster on a host that lags, until the lag costs no more than the tolerance.
    """
    if "host" not in found.policy.optimizer_homes:
        return found
    lagging = on_a_lagging_host(problem)
    if lagging is None:
        return found
    limit = found.figures.step_seconds * (1 + tolerance)
    best = _firmest(problem, lagging, found, limit)
    if "host" not in best.policy.optimizer_homes:
        best = _all_on_device(problem, best, tolerance=tolerance, solver=solver)
    return best


def on_a_lagging_host(problem: Problem) -> Problem | None:
    """The same problem where the host's DRAM, and updates in it, take `HOST_LAG` times their price; None where that is
    slower than any host."""
    try:
        return problem.on(*faster(problem.hardware, problem.costs, host_dram=1 / HOST_LAG))
    except InputError:
        return None


def _firmest(problem: Problem, lagging: Problem, found: Found, limit: float) -> Found:
    """The end of a walk over policies with less and less on the host, none slower than `limit` seconds."""

    def spent() -> int:
        return problem.replayed_operations + lagging.replayed_operations

    policy, figures = found.policy, found.figures
    lag: float | None = None  # seconds of the policy's step there; unknown until there is something to compare with
    before, improved = spent(), True
    while improved and (lag is None or lag > limit):
        improved = False
        for other, expected in _with_less_on_the_host(problem, policy, limit):
            lag = lagging.figures(policy).step_seconds if lag is None else lag
            if lag <= limit or spent() - before > IMPROVEMENT_OPERATIONS:
                break
            if (there := lagging.figures(other).step_seconds) < lag:
                policy, figures, lag, improved = other, expected, there, True
    return Found(policy, figures, min(found.bound_seconds, figures.step_seconds))


def _all_on_device(problem: Problem, found: Found, *, tolerance: float, solver: bool) -> Found:
    """Where nothing is left on the host, the best that does without it: perhaps of another outline."""
    every = outlines(problem.model, problem.workload)
    search = Search(
        problem, every, gap=tolerance, tolerance=tolerance, solver=solver, restrict=Formulation.keep_on_device
    )
    other = search.run()
    if other is None or other.figures.step_seconds >= found.figures.step_seconds:
        return found
    return Found(other.policy, other.figures, min(found.bound_seconds, other.figures.step_seconds))


def _with_less_on_the_host(problem: Problem, policy: Policy, limit: float) -> Iterator[tuple[Policy, StepFigures]]:
    """Policies that fit and step within `limit` seconds: those that the search has come upon, and neighbours."""
    on_host = _parameters_on_host(problem, policy)
    for other, figures in problem.replayed():
        fits = figures.step_seconds <= limit and not problem.excess_bytes(figures)
        if fits and _parameters_on_host(problem, other) < on_host:
            yield other, figures
    outline = Outline.of(policy)
    coefficients, formulation = problem.coefficients(outline), problem.formulation(outline)
    for decisions in neighbours(coefficients, policy_decisions(coefficients, policy)):
        values = formulation.evaluate(decisions)
        if formulation.step.value(values) > limit or not formulation.fits(values):
            continue
        for other in policies(coefficients, decisions, ways(decisions)[:1]):
            if _parameters_on_host(problem, other) < on_host:
                figures = problem.figures(other)
                if figures.step_seconds <= limit and not problem.excess_bytes(figures):
                    yield other, figures


def _parameters_on_host(problem: Problem, policy: Policy) -> int:
    homes = policy.optimizer_homes
    return sum(problem.model.block(block).num_elements for block, home in enumerate(homes) if home == "host")
