"""Why nothing fits: the binding resource, the bytes short, and the smallest changes that were seen to fit.

Every change that a message names was tried: with it the program has a solution.
"""

from collections.abc import Iterator

from planner.least_memory import TIERS, UNLIMITED_BYTES, Tier, least_memory
from planner.problem import Problem
from simulator.errors import InfeasiblePlan
from simulator.policy import Workload
from simulator.units import GIB, MIB, format_bytes

SHORTEST_SEQUENCE = 64


def explain_infeasible(problem: Problem, *, solver: bool) -> InfeasiblePlan:
    """The error for a problem that no policy fits."""
    needed: dict[Tier, int] = {}
    for tier in TIERS:
        least = least_memory(problem, tier, solver=solver)
        if least is not None:
            needed[tier] = least.peak_bytes
    if not needed:
        needed = _needed_of_both(problem, solver=solver)
        short = {tier: num_bytes - problem.limits.bytes_of(tier) for tier, num_bytes in needed.items()}
        what = " and ".join(f"{tier} memory is short by {_size(short[tier])}" for tier in TIERS)
        changes = [" and ".join(f"{_size(needed[tier])} of {tier} memory" for tier in TIERS)]
        resource, short_bytes = "device and host memory", sum(short.values())
    else:
        tier = min(needed, key=lambda tier: needed[tier] - problem.limits.bytes_of(tier))
        limit = problem.limits.bytes_of(tier)
        resource, short_bytes = f"{tier} memory", needed[tier] - limit
        what = (
            f"{resource} is short by {_size(short_bytes)}: the smallest plan takes {_size(needed[tier])}, "
            f"the limit is {format_bytes(limit)}"
        )
        changes = [f"{_size(needed[tier])} of {tier} memory" for tier in TIERS if tier in needed]
    changes += _smaller_workloads(problem, solver=solver)
    return InfeasiblePlan(
        f"no plan fits: {what}; it would fit with {', or '.join(changes)}", resource=resource, short_bytes=short_bytes
    )


def _size(num_bytes: int) -> str:
    """To a tenth of the unit, rounded up: what a message asks for is enough."""
    unit = GIB if num_bytes >= GIB else MIB
    tenths = -(-10 * num_bytes // unit)
    return format_bytes(tenths * unit / 10)


def _needed_of_both(problem: Problem, *, solver: bool) -> dict[Tier, int]:
    """The least device memory whatever the host takes, then the least host memory beside it."""
    needed: dict[Tier, int] = {}
    for tier in TIERS:
        limits = problem.limits.model_copy(
            update={f"{other}_memory_bytes": needed.get(other, UNLIMITED_BYTES) for other in TIERS if other != tier}
        )
        least = least_memory(problem.with_limits(limits), tier, solver=solver)
        assert least is not None, "with one tier unlimited there is always a plan"
        needed[tier] = least.peak_bytes
    return needed


def _smaller_workloads(problem: Problem, *, solver: bool) -> Iterator[str]:
    """For each setting of the workload that takes memory, the smallest change of it that fits."""
    for series in (_smaller_micro_batches(problem.workload), _shorter_sequences(problem.workload)):
        for words, workload in series:
            if _fits(problem.with_workload(workload), solver=solver):
                yield words
                break
    if problem.workload.gradient_format == "fp32":
        workload = problem.workload.model_copy(update={"gradient_format": "bf16"})
        if _fits(problem.with_workload(workload), solver=solver):
            yield "gradient_format bf16"


def _smaller_micro_batches(workload: Workload) -> Iterator[tuple[str, Workload]]:
    for rows in range((workload.micro_batch_rows or 1) - 1, 0, -1):
        if workload.rows_per_step % rows == 0:
            tokens = rows * workload.sequence_length
            words = f"micro-batches of {rows} rows ({tokens:,} tokens)"
            yield words, workload.model_copy(update={"micro_batch_rows": rows})


def _shorter_sequences(workload: Workload) -> Iterator[tuple[str, Workload]]:
    length = workload.sequence_length
    while length % 2 == 0 and length // 2 >= SHORTEST_SEQUENCE:
        length //= 2
        yield f"sequences of {length:,} tokens", workload.model_copy(update={"sequence_length": length})


def _fits(problem: Problem, *, solver: bool) -> bool:
    least = least_memory(problem, "device", solver=solver)
    return least is not None and least.peak_bytes <= problem.limits.device_memory_bytes
