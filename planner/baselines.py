"""Baselines: the policies of other systems as programs of ours, on the same machine, priced by the same replay.

What they share with us (exact clipping, fp32 master, no phase with an idle GPU that the program does not need) is
ours: a baseline says what a system's placement is worth, not how its code performs.
"""

from collections.abc import Iterator

from planner.branch import Search
from planner.formulation import Formulation
from planner.keeping import Keeping
from planner.layout import lay_out
from planner.memory_rows import GB
from planner.outlines import Outline, micro_batch_sizes
from planner.plan import Baseline
from planner.problem import Problem
from planner.variables import Decisions, admissible
from simulator.units import format_bytes

# The interval that fits MegaTrain's published device peaks: 47.1 GiB by formula, 46.9 published, at 96 x 1,024 tokens.
MEGATRAIN_CHECKPOINT_INTERVAL = 4


def baselines(problem: Problem, *, solver: bool, gap: float = 1e-3) -> dict[str, Baseline]:
    """Every rival's policy with its figures, or why it does not fit."""
    return {
        "MegaTrain": _streamed(problem, list(_megatrain_outlines(problem))),
        "ZeRO-3 offload": _streamed(problem, list(_zero_outlines(problem))),
        "all in HBM": _all_on_device(problem, solver=solver, gap=gap),
    }


def _megatrain_outlines(problem: Problem) -> Iterator[Outline]:
    """The whole batch passes a layer before the next: one group; every fourth layer input is kept."""
    interval = min(MEGATRAIN_CHECKPOINT_INTERVAL, problem.model.num_layers)
    for rows in micro_batch_sizes(problem.workload):
        yield Outline(rows, (problem.workload.rows_per_step // rows,), interval)


def _zero_outlines(problem: Problem) -> Iterator[Outline]:
    """One micro-batch after the other through the whole model, every layer input kept."""
    for rows in micro_batch_sizes(problem.workload):
        yield Outline(rows, (1,) * (problem.workload.rows_per_step // rows))


def _streamed(problem: Problem, outlines: list[Outline]) -> Baseline:
    """All layers stream through two slots, the host updates everything, layers keep their input only.

    The micro-batch is the fastest that fits.
    """
    layers = {kind: len(blocks) for kind, blocks in problem.coefficients(outlines[0]).kinds.items()}
    levels: dict[tuple[int, Keeping], int] = {(kind, "input"): number for kind, number in layers.items()}
    return _fastest(problem, outlines, Decisions(levels, layers, True, True, layers, min(2, problem.model.num_layers)))


def _all_on_device(problem: Problem, *, solver: bool, gap: float) -> Baseline:
    """Weights, gradients and state in HBM, one micro-batch after the other, at the best save levels that fit."""
    outlines = list(_zero_outlines(problem))
    search = Search(problem, outlines, gap=gap, tolerance=gap, solver=solver, restrict=Formulation.keep_on_device)
    found = search.run()
    if found is not None:
        return Baseline(policy=found.policy, prediction=found.figures)
    layers = {kind: len(blocks) for kind, blocks in problem.coefficients(outlines[0]).kinds.items()}
    levels: dict[tuple[int, Keeping], int] = {(kind, "input"): number for kind, number in layers.items()}
    return _fastest(problem, outlines, Decisions(levels, {}, False, False, {}, 0))


def _fastest(problem: Problem, outlines: list[Outline], decisions: Decisions) -> Baseline:
    """The outline under which the decisions step fastest within the limits, or by how much the nearest misses them."""
    decisions = admissible(problem.coefficients(outlines[0]), decisions)
    ranked = []
    for outline in outlines:
        formulation = problem.formulation(outline)
        values = formulation.evaluate(decisions)
        over = {
            row.title: round(GB * row.expression.value(values))
            for row in formulation.limits
            if row.expression.value(values) > 0
        }
        ranked.append((sum(over.values()), formulation.step.value(values), outline, over))
    ranked.sort(key=lambda item: item[:3])
    for over_bytes, _, outline, _ in ranked:
        if over_bytes:
            break
        policy = lay_out(problem.coefficients(outline), decisions)
        figures = problem.figures(policy)
        if not problem.excess_bytes(figures):
            return Baseline(policy=policy, prediction=figures)
    nearest = next((over for over_bytes, _, _, over in ranked if over_bytes), {})
    short = (f"{title} short by {format_bytes(num_bytes)}" for title, num_bytes in nearest.items())
    return Baseline(infeasible=" and ".join(short) or "memory short by less than the prediction can tell")
