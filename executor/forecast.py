"""Forecast: what a run will take of memory, disk and time, said before anything is allocated."""

from pathlib import Path

import torch

from executor.checkpoint import checkpoint_bytes
from executor.config import TrainConfig
from executor.huggingface import export_bytes
from planner.plan import Plan
from simulator.errors import InfeasiblePlan
from simulator.system import free_disk_bytes, host_memory_available_bytes
from simulator.units import format_bytes, format_duration, format_seconds


def forecast(
    config: TrainConfig, plan: Plan, output: Path, *, first_step: int, num_steps: int, leaves_model: bool
) -> list[str]:
    """Lines: memory of both tiers, disk, and time for steps `first_step` to `num_steps`."""
    predicted, limits = plan.prediction, plan.inputs.limits
    lines = ["the run will take"]
    for tier, needed in (("device", predicted.device_peak_bytes), ("host", predicted.host_peak_bytes)):
        limit = limits.bytes_of(tier)
        lines.append(
            f"  {tier + ' memory':14}{format_bytes(needed):>11} of {format_bytes(limit):>10}  {needed / limit:6.1%}"
        )
    steps = num_steps - first_step
    seconds = steps * predicted.step_seconds
    time = f"{steps} steps of {format_seconds(predicted.step_seconds)}"
    if leaves_model:
        one, exported = disk_bytes(plan)
        kept = config.keep_checkpoints + 1  # one more while it is written
        needed, free = kept * one + exported, free_disk_bytes(output)
        lines.append(
            f"  {'disk':14}{format_bytes(needed):>11} of {format_bytes(free):>10}  {needed / free:6.1%}  "
            f"{kept} checkpoints of {format_bytes(one)}, the model {format_bytes(exported)}"
        )
        rate = plan.hardware.disk.write_bytes_per_second
        if rate is not None:
            saves = num_saves(config.save_every, first_step=first_step, num_steps=num_steps)
            waited = max(0.0, one / rate.value - predicted.step_seconds)  # a save runs beside the step after it
            saving = (saves - 1) * waited + (one + exported) / rate.value
            seconds += saving
            time += f", {saves} saves and the export {format_duration(saving)}"
    lines.append(f"  {'time':14}{format_duration(seconds):>11}  {time}")
    return lines


def num_saves(save_every: int | None, *, first_step: int, num_steps: int) -> int:
    """Checkpoints that a run writes from `first_step` on, the one at its end included."""
    return 1 + ((num_steps - 1) // save_every - first_step // save_every if save_every else 0)


def disk_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes on disk of one checkpoint and of the exported model."""
    precision = plan.inputs.workload.precision
    return checkpoint_bytes(plan.model, precision), export_bytes(plan.model, precision)


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
