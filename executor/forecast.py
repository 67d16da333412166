"""Forecast: what a run will take of memory, disk and time, said before anything is allocated."""

import torch

from executor.run_inputs import RunInputs
from planner.explain import A_GUESS
from planner.plan import Plan
from simulator.errors import InfeasiblePlan
from simulator.predict import predict_evaluation, predict_stretches
from simulator.system import free_disk_bytes, host_memory_available_bytes
from simulator.units import counted, format_bytes, format_duration, format_seconds


def forecast(plan: Plan, inputs: RunInputs) -> list[str]:
    """Lines: memory of both tiers, disk, and time from the first step of this run to its end."""
    predicted, limits = plan.prediction, plan.inputs.limits
    lines = ["the run will take"]
    for tier, needed in (("device", predicted.device_peak_bytes), ("host", predicted.host_peak_bytes)):
        limit = limits.bytes_of(tier)
        lines.append(
            f"  {tier + ' memory':14}{format_bytes(needed):>11} of {format_bytes(limit):>10}  {needed / limit:6.1%}"
        )
    if inputs.saves:
        need, free = inputs.disk_need(), free_disk_bytes(inputs.directory)
        lines.append(
            f"  {'disk':14}{format_bytes(need.num_bytes):>11} of {format_bytes(free):>10}  {need.num_bytes / free:6.1%}"
            f"  {counted(need.num_checkpoints, 'checkpoint')} of "
            f"{format_bytes(need.checkpoint_bytes)}, "
            f"the model {format_bytes(need.model_bytes)}"
        )
    parts, unknown = run_seconds(plan, inputs)
    each = f" of {format_seconds(predicted.step_seconds)}"
    words = [
        f"{name}{each if index == 0 else ' ' + format_duration(s)}" for index, (name, s) in enumerate(parts.items())
    ]
    without = f"; without {' and '.join(unknown)}" if unknown else ""
    lines.append(f"  {'time':14}{format_duration(sum(parts.values())):>11}  {', '.join(words)}{without}")
    if (unmeasured := plan.price_shares["roofline"]) >= A_GUESS:
        lines.append(
            f"the time is a rough guess: {unmeasured:.0%} of the step's work was never measured, only computed from "
            "the machine's profile; small models take longer. `conveyor measure` times this model's operations, and "
            "`costs` names what it wrote"
        )
    return lines


def run_seconds(plan: Plan, inputs: RunInputs) -> tuple[dict[str, float], list[str]]:
    """Seconds of a run by what they go to, and what takes time that nobody has measured."""
    hardware, workload, predicted = plan.hardware, plan.inputs.workload, plan.prediction
    steps = inputs.num_steps - inputs.first_step
    parts: dict[str, float] = {counted(steps, "step"): steps * predicted.step_seconds}
    # Inline a drain is what the next step would have begun with; on streams nothing runs beside it.
    if hardware.execution == "streams" and (stretches := inputs.stretches()):
        taken = predict_stretches(
            plan.model, workload, plan.policy, hardware, plan.costs, lengths=stretches,
            step_seconds=predicted.step_seconds,
        )  # fmt: skip
        drains = counted(len(stretches), "drain")
        parts[drains] = max(0.0, sum(taken) - steps * predicted.step_seconds)
    unknown: list[str] = []
    need = inputs.disk_need()
    loaded = need.checkpoint_bytes if inputs.resume_from is not None else inputs.model_bytes()
    read, write = hardware.disk.read_bytes_per_second, hardware.disk.write_bytes_per_second
    if read is not None and loaded:
        parts["reading the weights"] = loaded / read.value
    elif loaded:
        unknown.append("reading the weights")
    if workload.compiled:
        unknown.append("compiling")
    if inputs.eval_dataset is not None:
        batch = predict_evaluation(plan.model, workload, plan.policy, hardware, plan.costs).step_seconds
        count = inputs.num_evaluations()
        parts[counted(count, "evaluation")] = count * batch * (inputs.eval_dataset.steps_per_epoch or 0)
    if inputs.saves and write is not None:
        one, saves = need.checkpoint_bytes / write.value, inputs.num_saves()
        waited = max(0.0, one - predicted.step_seconds)  # a save runs beside the step after it, the last one does not
        parts[f"{counted(saves, 'save')} and the export"] = (saves - 1) * waited + one + need.model_bytes / write.value
    elif inputs.saves:
        unknown.append("saving")
    return parts, unknown


def require_free_memory(plan: Plan, device: torch.device) -> None:
    """Refuse a plan that is too large for what is free now: the kernel ends such a run later without a word.

    Raises InfeasiblePlan naming the tier, the bytes short and what to change.
    """
    base = round(plan.hardware.host_base_bytes.value)
    tiers = [("host", plan.prediction.host_peak_bytes - base, host_memory_available_bytes())]
    if device.type == "cuda":
        context = round(plan.hardware.context_bytes.value)
        free, _ = torch.cuda.mem_get_info(device)
        tiers.append(("device", plan.prediction.device_peak_bytes - context, free))
    for tier, needed, free in tiers:
        if needed > free:
            raise InfeasiblePlan(
                f"{tier} memory is short by {format_bytes(needed - free)}: the run will take {format_bytes(needed)} "
                f"more and {format_bytes(free)} are free on this machine now (of other programs' use and the "
                f"container's limit); end other programs, or plan again with --{tier}-memory "
                f"{_planned_limit(free + (base if tier == 'host' else context))}",
                resource=f"{tier} memory",
                short_bytes=needed - free,
            )


def _planned_limit(num_bytes: int) -> str:
    """A size as options read it, rounded down."""
    return f"{num_bytes // 2**20}MiB"
