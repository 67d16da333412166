"""The least memory of one tier that any policy takes while the other tier keeps its limit.

Found by the same program with memory for its objective, and not replayed: the program's memory is the replay's, but for
an input that may still be leaving.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.coefficients import Coefficients
from planner.greedy import greedy
from planner.layout import lay_out
from planner.memory_rows import GB
from planner.outlines import Outline, checkpoint_intervals, micro_batch_sizes
from planner.problem import Problem
from planner.solve import solve
from planner.variables import Decisions
from simulator.placement import micro_batch_bytes
from simulator.policy import Policy

Tier = Literal["device", "host"]
TIERS: tuple[Tier, ...] = ("device", "host")
UNLIMITED_BYTES = 2**60
GAP = 1e-4


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """The policy that takes least of a tier, what it takes, and others that may take as little."""

    peak_bytes: int
    policy: Policy
    ties: tuple[Policy, ...] = ()


def least_memory(problem: Problem, tier: Tier, *, solver: bool) -> LeastMemory | None:
    """None where the other tier's limit is too low for every policy."""
    candidates = [_least_of(problem, outline, tier, solver=solver) for outline in smallest_outlines(problem)]
    return min(filter(None, candidates), key=lambda found: found.peak_bytes, default=None)


def smallest_outlines(problem: Problem) -> list[Outline]:
    """Outlines among which the least memory is: small operations, alone in their group or without accumulators."""
    rows = min(micro_batch_sizes(problem.workload))
    num_micro_batches = problem.workload.rows_per_step // rows
    intervals = checkpoint_intervals(max(1, len(problem.model.backward_layers)))
    groupings = dict.fromkeys(((1,) * num_micro_batches, (num_micro_batches,)))
    return [Outline(rows, groups, interval) for groups in groupings for interval in intervals]


def _least_of(problem: Problem, outline: Outline, tier: Tier, *, solver: bool) -> LeastMemory | None:
    budget = problem.budget
    if tier == "device":
        budget = replace(budget, device_bytes=UNLIMITED_BYTES)
    else:
        budget = replace(budget, host_bytes=UNLIMITED_BYTES)
    formulation = problem.formulation(outline, budget)
    used = formulation.memory.device_gb if tier == "device" else formulation.memory.host_gb
    formulation.mip.objective = used + 1e-6 * formulation.step
    if solver:
        solution = solve(formulation.mip, gap=GAP)
        decisions = formulation.variables.decisions(solution.values) if solution.status == "solved" else None
    else:
        decisions = greedy(formulation)
    if decisions is None:
        return None
    # The replay may have all batches of a step on the device at once, the program counts one group's.
    batches = outline.num_micro_batches * micro_batch_bytes(problem.model, problem.workload, outline.micro_batch_rows)
    peak = GB * used.value(formulation.evaluate(decisions)) + 2 * batches
    c = problem.coefficients(outline)
    policy, *ties = (
        lay_out(c, either).model_copy(update={"leaving_passes": 1})
        for either in (decisions, *_with_an_input_back(c, decisions))
    )
    return LeastMemory(round(peak), policy, tuple(ties))


def _with_an_input_back(c: Coefficients, decisions: Decisions) -> Iterator[Decisions]:
    """Decisions with one layer input less on the host: to the program a tie, where its stage takes as much.

    It does not count an input that is still leaving, which a replay may hold on top.
    """
    for kind in c.kinds:
        waiting = decisions.levels.get((kind, "input_on_host"), 0)
        if waiting:
            kept = decisions.levels.get((kind, "input"), 0)
            levels = {**decisions.levels, (kind, "input_on_host"): waiting - 1, (kind, "input"): kept + 1}
            yield replace(decisions, levels=levels)
