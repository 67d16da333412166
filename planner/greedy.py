"""The greedy planner: decisions without a solver, by walking downhill over neighbouring decisions.

It minimises what a plan is over its limits first, then the relaxed step. It finds what one or a few moves can find and
proves nothing; its plans are replayed like all others.
"""

from planner.formulation import Formulation
from planner.neighbours import neighbours
from planner.variables import Decisions

MAX_MOVES = 400


def greedy(formulation: Formulation) -> Decisions | None:
    """The best decisions found within the limits, or None."""
    found = min((_descend(formulation, start) for start in _starts(formulation)), key=lambda item: item[0])
    return found[1] if found[0][0] <= 0 else None


def _starts(formulation: Formulation) -> list[Decisions]:
    """Everything on the device, everything on the host; each with the least and the most kept."""
    c = formulation.coefficients
    starts = []
    for level in dict.fromkeys((c.levels[0], c.levels[-1])):
        levels = {(kind, level): len(layers) for kind, layers in c.kinds.items()}
        all_layers = {kind: len(layers) for kind, layers in c.kinds.items()}
        starts.append(Decisions(levels, {}, False, False, {}, 0))
        starts.append(Decisions(levels, all_layers, True, True, all_layers, min(2, c.model.num_layers)))
    return starts


def _descend(formulation: Formulation, decisions: Decisions) -> tuple[tuple[float, float], Decisions]:
    cost = _cost(formulation, decisions)
    layers = formulation.coefficients.model.num_layers
    strides = tuple(sorted({1, max(1, layers // 8), max(1, layers // 3)}))
    for _ in range(MAX_MOVES):
        moves = [
            (_cost(formulation, move), move)
            for move in neighbours(formulation.coefficients, decisions, strides=strides)
        ]
        best = min(moves, key=lambda item: item[0])
        if best[0] >= cost:
            break
        cost, decisions = best
    return cost, decisions


def _cost(formulation: Formulation, decisions: Decisions) -> tuple[float, float]:
    """(GB over the limits, relaxed step with its tie-breaks)."""
    values = formulation.evaluate(decisions)
    over = sum(max(0.0, row.expression.value(values)) for row in formulation.limits)
    return over if over > 1e-9 else 0.0, formulation.mip.objective.value(values)
