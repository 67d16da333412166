"""Alternatives: the best plans that differ from a plan in kind, and what they would cost.

Each is a search of its own in which one decision is turned another way and all others are free. All but the one with
another micro-batch size keep the plan's, so that they train the same numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.branch import Found, Search
from planner.explain import level_words
from planner.formulation import Formulation
from planner.mip import Linear, total
from planner.outlines import Outline, outlines
from planner.plan import GREEDY, Plan
from planner.problem import Problem
from planner.sensitivity import Report
from planner.task import Task
from simulator.policy import Policy
from simulator.predict import StepFigures
from simulator.schema import Schema

GAP = 1e-3
# Each is one of many searches and looks for a price, not for the last percent: a quarter of what a plan's may improve.
IMPROVEMENT_OPERATIONS = 2_000
Restriction = Callable[[Formulation], None]


class Alternative(Schema):
    """The best policy of another kind, or none where no such policy fits."""

    kind: str
    policy: Policy | None = None
    prediction: StepFigures | None = None
    extra_seconds: float | None = None  # beyond the plan's step
    extra_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a search is held to: outlines, and rows in each one's program. Several restrictions: the best of them."""

    words: str
    outlines: list[Outline]
    restrictions: tuple[Restriction, ...] = (lambda formulation: None,)
    detail: Callable[[Policy], str] = lambda policy: ""  # what the best of them chose


def alternatives(plan: Plan, *, report: Report = lambda words: None) -> list[Alternative]:
    """The best plan of every kind that the plan is not, fastest first; those that do not fit last."""
    task = Task.of(plan)
    found = []
    for kind in _kinds(plan, task):
        report(f"planning with {kind.words}")
        problem = task.problem()
        if any(outline.micro_batch_rows != plan.policy.micro_batch_rows for outline in kind.outlines):
            problem = task.with_workload(micro_batch_rows=None).problem()
        best = best_restricted(
            problem, kind.outlines, kind.restrictions, solver=plan.solver.name != GREEDY,
            improvement_operations=IMPROVEMENT_OPERATIONS,
        )  # fmt: skip
        found.append(Alternative(kind=kind.words) if best is None else _priced(plan, kind, best))
    return sorted(found, key=lambda item: (item.extra_seconds is None, item.extra_seconds))


def _priced(plan: Plan, kind: _Kind, found: Found) -> Alternative:
    seconds = plan.prediction.step_seconds
    extra = found.figures.step_seconds - seconds
    return Alternative(
        kind=kind.words + kind.detail(found.policy),
        policy=found.policy,
        prediction=found.figures,
        extra_seconds=extra,
        extra_share=extra / seconds,
    )


def best_restricted(
    problem: Problem,
    outlines: list[Outline],
    restrictions: Sequence[Restriction],
    *,
    solver: bool,
    improvement_operations: int,
) -> Found | None:
    """The fastest of what searches held to one restriction each find; `improvement_operations` is that of each."""
    best: Found | None = None
    for restriction in restrictions:
        search = Search(
            problem, outlines, gap=GAP, tolerance=GAP, solver=solver, restrict=restriction,
            improvement_operations=improvement_operations, best=None if best is None else (best.policy, best.figures),
        )  # fmt: skip
        best = search.run() or best
    return best


def _kinds(plan: Plan, task: Task) -> Iterator[_Kind]:
    """Ways to be different, those left out that the plan goes already."""
    policy, model, problem = plan.policy, plan.model, task.problem()
    same = [o for o in outlines(model, task.workload) if o.micro_batch_rows == policy.micro_batch_rows]
    sizes = outlines(model, task.with_workload(micro_batch_rows=None).workload)
    if others := [outline for outline in sizes if outline.micro_batch_rows != policy.micro_batch_rows]:
        pinned = f", not {policy.micro_batch_rows} as asked for" if task.workload.micro_batch_rows else ""
        yield _Kind("another micro-batch size", others, detail=lambda p: f": {p.micro_batch_rows} rows{pinned}")
    if len(policy.groups) > 1:
        yield _Kind(
            "one group: the whole batch passes a layer at a time",
            [o for o in same if len(o.groups) == 1 and not o.depth_first],
        )
    if max(policy.groups) > 1:
        yield _Kind("groups of one micro-batch", [o for o in same if max(o.groups) == 1])
    if policy.depth_first_layers:
        yield _Kind("no depth-first layers", [o for o in same if not o.depth_first])
    if Outline.of(policy).saved_waits:
        yield _Kind("no saved activations on the host", [o for o in same if not o.saved_waits])
    trained = set(model.trained_blocks)
    if any(policy.optimizer_homes[block] != "host" for block in trained):
        yield _Kind("all gradients and updates on the host", same, (all_on_host,))
    if any(policy.weight_homes[layer] == "device" for layer in model.layers):
        yield _Kind("no resident layers: all stream", same, (all_streamed,))
    if any(home != "device" for home in policy.weight_homes):
        yield _Kind("no streamed layers: all resident", same, (_none_streamed,))
    if any(policy.optimizer_homes[block] != "device" for block in trained):
        yield _Kind("everything on the device", same, (Formulation.keep_on_device,))
    if len({policy.save_levels[layer - 1] for layer in model.backward_layers}) > 1:
        plain = [outline for outline in same if outline.plain]
        levels = dict.fromkeys(level for outline in plain for level in problem.coefficients(outline).levels)
        restrictions = tuple(only_level(level) for level in levels)
        lowest = model.backward_layers[0] - 1
        yield _Kind(
            "one save level for all layers", same, restrictions, lambda p: f": {level_words(p.save_levels[lowest])}"
        )


def held(formulation: Formulation, title: str, expression: Linear) -> None:
    """Hold an expression to 0 at most, as a limit: greedy walks and neighbours keep to it too."""
    formulation.mip.at_most(title, expression, 0.0)
    formulation.limits.append(formulation.mip.rows[-1])


def all_on_host(formulation: Formulation) -> None:
    v, c = formulation.variables, formulation.coefficients
    everywhere = sum(len(layers) for layers in c.trained_kinds.values()) + sum(c.edges_trained)
    held(formulation, "every update on the host", everywhere - (v.num_host + v.embedding + v.head))


def all_streamed(formulation: Formulation) -> None:
    layers = formulation.coefficients.model.num_layers
    held(formulation, "every layer streams", layers - formulation.variables.num_streamed)


def _none_streamed(formulation: Formulation) -> None:
    held(formulation, "no layer streams", formulation.variables.num_streamed)


def only_level(level: str) -> Restriction:
    def restrict(formulation: Formulation) -> None:
        v, c = formulation.variables, formulation.coefficients
        others = (count for (kind, other), count in v.levels.items() if kind in c.backward_kinds and other != level)
        held(formulation, f"no save level but {level}", total(others))

    return restrict
