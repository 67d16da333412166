"""The greedy planner: decisions without a solver, by walking downhill over neighbouring decisions.

It minimises what a plan is over its limits first, then the relaxed step. It finds what one or a few moves can find and
proves nothing; its plans are replayed like all others.
"""

from planner.formulation import Formulation
from planner.keeping import DEPTH_FIRST, ON_HOST, SAVED_ON_HOST, depth_first, save_level
from planner.neighbours import neighbours
from planner.variables import Decisions, admissible

MAX_MOVES = 400


def greedy(formulation: Formulation) -> Decisions | None:
    """The best decisions found within the limits, or None."""
    found = min((_descend(formulation, start) for start in _starts(formulation)), key=lambda item: item[0])
    return found[1] if found[0][0] <= 0 else None


def promise(formulation: Formulation) -> tuple[float, float]:
    """What the better of the starts costs: outlines that begin well end well."""
    return min(_cost(formulation, start) for start in _starts(formulation))


def _starts(formulation: Formulation) -> list[Decisions]:
    """Everything on the device and everything on the host, each with the least kept."""
    c = formulation.coefficients
    least = [level for level in c.levels if level not in ON_HOST and level not in DEPTH_FIRST][-1]
    levels = {(kind, least): len(layers) for kind, layers in c.kinds.items()}
    if c.outline.depth_first:
        (kind,) = c.kinds
        levels |= {(kind, least): levels[kind, least] - 1, (kind, depth_first(save_level(least))): 1}
    if c.outline.saved_waits:
        (kind,) = c.kinds
        how = [level for level in c.levels if level in SAVED_ON_HOST][-1]
        levels = {(kind, least): len(c.kinds[kind]) - 1, (kind, how): 1}
    everywhere = {kind: len(layers) for kind, layers in c.kinds.items()}
    starts = (
        Decisions(levels, {}, False, False, {}, 0),
        Decisions(levels, everywhere, True, True, everywhere, min(2, c.model.num_layers)),
    )
    return [admissible(c, start) for start in starts]


def _descend(formulation: Formulation, decisions: Decisions) -> tuple[tuple[float, float], Decisions]:
    """Long strides first: a deep model is many single layers from its best plan."""
    cost = _cost(formulation, decisions)
    stride = max(1, formulation.coefficients.model.num_layers // 4)
    for _ in range(MAX_MOVES):
        moves = neighbours(formulation.coefficients, decisions, strides=(stride,))
        best = min(((_cost(formulation, move), move) for move in moves), key=lambda item: item[0])
        if best[0] < cost:
            cost, decisions = best
        elif stride > 1:
            stride //= 2
        else:
            break
    return cost, decisions


def _cost(formulation: Formulation, decisions: Decisions) -> tuple[float, float]:
    """(GB over the limits, relaxed step with its tie-breaks)."""
    values = formulation.evaluate(decisions)
    over = sum(max(0.0, row.expression.value(values)) for row in formulation.limits)
    return over if over > 1e-9 else 0.0, formulation.mip.objective.value(values)
