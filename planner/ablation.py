"""Ablation: a plan that must do without one of its means, all else chosen anew, to see what that means is worth.

Micro-batches keep their size, so an ablated run trains the same numbers as the plan's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from planner.alternatives import Restriction, all_on_host, all_streamed, best_restricted, held, only_level
from planner.branch import IMPROVEMENT_OPERATIONS
from planner.formulation import Formulation
from planner.outlines import Outline, outlines
from planner.plan import GREEDY, Plan
from planner.search import promises
from planner.task import Task
from simulator.errors import InputError
from simulator.nearest import did_you_mean, nearest_name
from simulator.policy import SAVE_LEVELS, Policy


def _unrestricted(formulation: Formulation) -> None:
    """No row beside the planner's own."""


def _any_outline(outline: Outline) -> bool:
    return True


def _two_slots(formulation: Formulation) -> None:
    held(formulation, "two slots", formulation.variables.slots - 2)


def _no_activations_wait(formulation: Formulation) -> None:
    held(formulation, "no activation waits", formulation.variables.num_waiting)


@dataclass(frozen=True, slots=True)
class _Ablation:
    """`spared` says whether a policy does without already; otherwise one of the restrictions sees to it."""

    words: str
    spared: Callable[[Policy], bool]
    restrictions: tuple[Restriction, ...] = (_unrestricted,)
    allowed: Callable[[Outline], bool] = _any_outline


ABLATIONS: dict[str, _Ablation] = {
    "prefetch-depth-1": _Ablation("one layer loaded ahead", lambda p: p.prefetch_depth == 1, (_two_slots,)),
    "two-slabs": _Ablation("two gradient slabs", lambda p: p.gradient_slabs == 2),
    "no-resident-weights": _Ablation(
        "no resident layers", lambda p: "device" not in p.weight_homes[1:-1], (all_streamed,)
    ),
    "one-save-level": _Ablation(
        "one save level", lambda p: len(set(p.save_levels)) == 1, tuple(map(only_level, SAVE_LEVELS))
    ),
    "host-optimizer": _Ablation("host updates only", lambda p: set(p.optimizer_homes) == {"host"}, (all_on_host,)),
    "checkpoint-interval-1": _Ablation(
        "all inputs kept",
        lambda p: p.checkpoint_interval == 1,
        allowed=lambda outline: outline.checkpoint_interval == 1,
    ),
    "no-depth-first": _Ablation(
        "no depth-first layers",
        lambda p: p.depth_first_layers == 0,
        allowed=lambda outline: not outline.depth_first,
    ),
    "no-waiting-activations": _Ablation(
        "no waiting activations",
        lambda p: "host" not in p.activation_homes,
        (_no_activations_wait,),
        allowed=lambda outline: not outline.saved_waits,
    ),
}


def require_known(name: str) -> None:
    """Raise InputError for a name that ABLATIONS does not have."""
    if name not in ABLATIONS:
        nearest = did_you_mean(nearest_name(name, list(ABLATIONS)))
        raise InputError(f"ablation {name!r}: there is none{nearest}; there are {', '.join(ABLATIONS)}")


def ablate(plan: Plan, name: str) -> Plan | None:
    """The best plan without what `name` (of ABLATIONS) takes away; the plan itself if it does without already.

    None where nothing fits. Raises InputError for unknown names.
    """
    require_known(name)
    ablation = ABLATIONS[name]
    if ablation.spared(plan.policy):
        return plan
    task = Task.of(plan)
    rows = plan.policy.micro_batch_rows
    same = (outline for outline in outlines(plan.model, task.workload) if outline.micro_batch_rows == rows)
    allowed = [outline for outline in same if ablation.allowed(outline)]
    problem = task.problem()
    found = best_restricted(
        problem, allowed, ablation.restrictions, solver=plan.solver.name != GREEDY,
        improvement_operations=IMPROVEMENT_OPERATIONS,
    )  # fmt: skip
    return None if found is None else plan.model_copy(update={**promises(problem, found), "baselines": {}}).hashed()
