"""Firmness: of plans that prices cannot tell apart, one that a slower host does not slow.

A search fills the host to the last millisecond that compute hides, since a block updated there is one less for the GPU.
Hosts of one kind differ by some per cent, and so do parts of one host's memory: where updates end a little later than
their price says, every layer's forward waits for its own.
"""

from planner.branch import IMPROVEMENT_OPERATIONS, Found
from planner.layout import policies, ways
from planner.neighbours import neighbours
from planner.outlines import Outline
from planner.problem import Problem
from planner.variables import policy_decisions
from simulator.policy import Policy
from simulator.rates import faster

# By how much longer updates on the host may take than their price: as far apart equal blocks of one host were seen.
HOST_LAG = 1.25


def firmer(problem: Problem, found: Found, *, tolerance: float) -> Found:
    """What was found, or a policy with less to update on the host that steps at most `tolerance` (a share) slower.

    Such a one is taken where it is the faster on a host that lags, until the lag costs no more than the tolerance.
    """
    policy, figures = found.policy, found.figures
    if "host" not in policy.optimizer_homes:
        return found
    lagging = problem.on(*faster(problem.hardware, problem.costs, host_dram=1 / HOST_LAG))
    limit = figures.step_seconds * (1 + tolerance)
    before, seconds = problem.replayed_operations, lagging.figures(policy).step_seconds
    improved = True
    while improved and seconds > limit:
        improved = False
        for other in _with_less_on_the_host(problem, policy, limit):
            if problem.replayed_operations - before > IMPROVEMENT_OPERATIONS:
                break
            expected = problem.figures(other)
            if expected.step_seconds > limit or problem.excess_bytes(expected):
                continue
            if (there := lagging.figures(other).step_seconds) < seconds:
                policy, figures, seconds, improved = other, expected, there, True
    return Found(policy, figures, min(found.bound_seconds, figures.step_seconds))


def _with_less_on_the_host(problem: Problem, policy: Policy, limit: float) -> list[Policy]:
    """Neighbours of a policy that may step within `limit` seconds."""
    outline = Outline.of(policy)
    coefficients, formulation = problem.coefficients(outline), problem.formulation(outline)
    found: dict[Policy, None] = {}
    for decisions in neighbours(coefficients, policy_decisions(coefficients, policy)):
        values = formulation.evaluate(decisions)
        if formulation.step.value(values) <= limit and formulation.fits(values):
            found |= dict.fromkeys(policies(coefficients, decisions, ways(decisions)[:1]))
    on_host = _parameters_on_host(problem, policy)
    return [other for other in found if _parameters_on_host(problem, other) < on_host]


def _parameters_on_host(problem: Problem, policy: Policy) -> int:
    homes = policy.optimizer_homes
    return sum(problem.model.block(block).num_elements for block, home in enumerate(homes) if home == "host")
