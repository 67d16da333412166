"""plan(): the one call that finds a policy, its bound and its rivals, and says why where nothing fits."""

import time
from collections.abc import Sequence
from typing import Any

from planner.base_policy import base_policy
from planner.baselines import baselines
from planner.branch import Found, Search
from planner.firm import firmer
from planner.infeasible import explain_infeasible
from planner.outlines import Outline, outlines
from planner.plan import GREEDY, Baseline, Bound, Limits, Plan, SolverReport, plan_inputs
from planner.problem import Problem
from planner.solve import TIME_LIMIT_SECONDS, solver_failure, solver_version
from simulator.costs import OperationCosts, operation_key
from simulator.errors import UnsupportedChoice
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload, check_policy
from simulator.predict import Prediction

# Below what prices can tell: the solver may stop at a gap of this, the search where it could win no more than this.
GAP = 1e-3


def default_limits(hardware: HardwareProfile) -> Limits:
    """All of the machine's memory, and no NVMe."""
    return Limits(
        device_memory_bytes=hardware.device.memory_bytes,
        host_memory_bytes=hardware.usable_host_bytes,
    )


def plan(
    model: ModelSpec,
    workload: Workload,
    hardware: HardwareProfile,
    limits: Limits | None = None,
    costs: OperationCosts | None = None,
    *,
    model_path: str = "",
    gap: float = GAP,
    with_baselines: bool = True,
    with_suggestions: bool = True,
) -> Plan:
    """The best policy that the search finds for a workload on a machine, with its prediction and bound.

    `limits` default to the machine's memory. Raises InfeasiblePlan naming the binding resource, the bytes short and
    changes that would make it fit, and UnsupportedChoice for what no policy can serve yet. Where no solver can be
    loaded the greedy planner answers, and `solver` says so. Without suggestions an InfeasiblePlan names no smaller
    workloads, each of which takes a search.
    """
    started = time.perf_counter()
    _refuse_what_is_not_built(model, workload, limits)
    problem = Problem(model, workload, hardware, limits or default_limits(hardware), costs)
    version = solver_version()
    search = Search(problem, outlines(model, workload), gap=gap, tolerance=gap, solver=version is not None)
    found = search.run()
    if found is None:
        raise explain_infeasible(problem, solver=version is not None, with_suggestions=with_suggestions)
    found = firmer(problem, found, tolerance=gap, solver=version is not None)
    search.counts["replays"] = problem.num_replays
    searched = time.perf_counter()
    rivals: dict[str, Baseline] = baselines(problem, solver=version is not None) if with_baselines else {}
    return Plan(
        inputs=plan_inputs(model, workload, hardware, problem.limits, costs, model_path=model_path),
        **promises(problem, found),
        baselines=rivals,
        solver=_report(version, gap, search.counts),
        model=model,
        hardware=hardware,
        costs=costs,
        timings={"search_seconds": searched - started, "baselines_seconds": time.perf_counter() - searched},
    ).hashed()


def promises(problem: Problem, found: Found) -> dict[str, Any]:
    """The fields of a plan that say what was found and what it will do."""
    prediction = problem.predict(found.policy)
    gap = max(0.0, 1 - found.bound_seconds / prediction.figures.step_seconds)
    return {
        "policy": found.policy,
        "prediction": prediction.figures,
        "bound": Bound(step_seconds=found.bound_seconds, gap=gap),
        "busy_seconds": prediction.timeline.busy_seconds(),
        "price_shares": price_shares(problem, found.policy, prediction),
    }


def _refuse_what_is_not_built(model: ModelSpec, workload: Workload, limits: Limits | None) -> None:
    """Raise UnsupportedChoice for choices of the user's that no policy can serve yet."""
    if limits is not None and limits.nvme_memory_bytes:
        raise UnsupportedChoice("nvme_memory: plans that use NVMe are not built yet; leave it at 0")
    rows = workload.micro_batch_rows or workload.rows_per_step
    outline = Outline(rows, (workload.rows_per_step // rows,))
    check_policy(base_policy(model, workload, outline), model, workload)


def no_slower(plan: Plan, known: Sequence[Policy]) -> Plan:
    """The plan, or one with the fastest of the known policies that fits and beats it: what another search came upon."""
    inputs = plan.inputs
    problem = Problem(plan.model, inputs.workload, plan.hardware, inputs.limits, plan.costs)
    for policy in known:
        prediction = problem.predict(policy)
        seconds = prediction.figures.step_seconds
        if problem.excess_bytes(prediction.figures) or seconds >= plan.prediction.step_seconds:
            continue
        bound_seconds = min(plan.bound.step_seconds, seconds)
        changes = {
            "policy": policy,
            "prediction": prediction.figures,
            "bound": Bound(step_seconds=bound_seconds, gap=1 - bound_seconds / seconds),
            "busy_seconds": prediction.timeline.busy_seconds(),
            "price_shares": price_shares(problem, policy, prediction),
        }
        plan = plan.model_copy(update=changes).hashed()
    return plan


def _report(version: str | None, gap: float, counts: dict[str, int]) -> SolverReport:
    if version is None:
        return SolverReport(
            name=GREEDY,
            status=f"no solver could be loaded ({solver_failure()}): found by the greedy planner; the bound is that of "
            "compute alone",
            gap=gap,
            counts=counts,
        )
    status = "every program was solved within the gap"
    if counts["time limits"]:
        status = (
            f"{counts['time limits']} of {counts['solves']} programs ran into the time limit of "
            f"{TIME_LIMIT_SECONDS:g} s: another run may give another plan"
        )
    name, _, number = version.partition(" ")
    return SolverReport(name=name, version=number, status=status, gap=gap, counts=counts)


def price_shares(problem: Problem, policy: Policy, prediction: Prediction) -> dict[str, float]:
    """Share of a step's busy seconds by where the price of an operation came from."""
    seconds = dict.fromkeys(("measured", "interpolated", "roofline"), 0.0)
    operations = {operation.name: operation for operation in prediction.program.steady}
    for span in prediction.timeline.spans:
        key = operation_key(operations[span.name], problem.model, problem.workload, policy)
        seconds[prediction.origins[key]] += span.end - span.start
    busy = sum(seconds.values())
    return {origin: value / busy for origin, value in seconds.items()} if busy else seconds
