"""Why nothing fits: the binding resource, the bytes short, and for each kind of change the smallest that fits.

Every change that a message names was planned with: a policy was found for it, replayed, and kept both limits.
"""

from collections.abc import Iterator, Mapping, Sequence

from planner.branch import Search
from planner.least_memory import TIERS, UNLIMITED_BYTES, LeastMemory, Tier, least_memory, smallest_outlines
from planner.problem import Problem
from simulator.errors import InfeasiblePlan
from simulator.policy import Workload
from simulator.predict import StepFigures
from simulator.units import GIB, MIB, format_bytes

SHORTEST_SEQUENCE = 64
# What the least memory of the program may be above that of the replay, which alone decides.
PROGRAM_SLACK = 1.01


def explain_infeasible(problem: Problem, *, solver: bool, with_suggestions: bool = True) -> InfeasiblePlan:
    """The error for a problem that no policy fits; its `changes` are those that its message names."""
    needed = {tier: num_bytes for tier in TIERS if (num_bytes := _needed(problem, tier, solver=solver)) is not None}
    if needed:
        tier = min(needed, key=lambda tier: needed[tier] - problem.limits.bytes_of(tier))
        resource, enough_bytes, limit_bytes = f"{tier} memory", needed[tier], problem.limits.bytes_of(tier)
        changes = [_more(problem, needed, tier) for tier in TIERS if tier in needed]
        if all(needed[tier] > _capacity(problem, tier) for tier in needed):
            changes += _both_within_the_machine(problem, solver=solver)
    else:
        needed = _needed_of_both(problem, solver=solver)
        if problem.hardware.shared_memory:  # the host's bytes hold the device's: there is one figure to raise
            resource, enough_bytes, limit_bytes = "memory", needed["host"], problem.limits.host_memory_bytes
            changes = [f"{_size(needed['host'])} of memory"]
        else:
            resource, enough_bytes = "device and host memory", sum(needed.values())
            limit_bytes = sum(problem.limits.bytes_of(tier) for tier in TIERS)
            changes = [" and ".join(_more(problem, needed, tier) for tier in TIERS)]
    if resource == "device and host memory":
        short = {tier: _size(needed[tier] - problem.limits.bytes_of(tier)) for tier in TIERS}
        what = " and ".join(f"{tier} memory is short by {short[tier]}" for tier in TIERS)
    else:
        what = (
            f"{resource} is short by {_size(enough_bytes - limit_bytes)}: the smallest plan takes "
            f"{_size(enough_bytes)}, the limit is {format_bytes(limit_bytes)}"
        )
    if with_suggestions:
        changes += _smaller_workloads(problem, solver=solver)
    return InfeasiblePlan(
        f"no plan fits: {what}; it would fit with {', or '.join(changes)}",
        resource=resource,
        short_bytes=enough_bytes - limit_bytes,
        changes=tuple(changes),
    )


def _more(problem: Problem, needed: Mapping[Tier, int], tier: Tier) -> str:
    """More of one tier, and whether it is more than the machine has: then no limit can be raised so far."""
    has = _capacity(problem, tier)
    beyond = f" (the machine has {format_bytes(has)})" if needed[tier] > has else ""
    return f"{_size(needed[tier])} of {tier} memory{beyond}"


def _both_within_the_machine(problem: Problem, *, solver: bool) -> Iterator[str]:
    """Where both limits are below what the machine has, it may be enough to raise the two of them."""
    both = _needed_of_both(problem, solver=solver)
    raised = all(problem.limits.bytes_of(tier) < both[tier] <= _capacity(problem, tier) for tier in TIERS)
    if raised and not problem.hardware.shared_memory:
        yield " and ".join(f"{_size(both[tier])} of {tier} memory" for tier in TIERS)


def _capacity(problem: Problem, tier: Tier) -> int:
    return {"device": problem.hardware.device.memory_bytes, "host": problem.hardware.usable_host_bytes}[tier]


def close(problem: Problem, *, solver: bool) -> bool:
    """Whether the program's least memory is within the limits, or so little above that only a replay can tell."""
    return any(_close(problem, solver=solver))


def feasible(problem: Problem, *, solver: bool) -> StepFigures | None:
    """The replay of a policy that fits, or None where none does: a plan, though not the fastest.

    Cheap where nothing fits: the program says so. Where it is close, the search that the planner would make decides.
    """
    near = list(_close(problem, solver=solver))
    for least in near:
        figures = problem.figures(least.policy)
        if not problem.excess_bytes(figures):
            return figures
    if not near:
        return None
    found = Search(problem, smallest_outlines(problem), gap=1e-3, tolerance=1e-3, solver=solver).run()
    return None if found is None else found.figures


def _close(problem: Problem, *, solver: bool) -> Iterator[LeastMemory]:
    for tier in TIERS:
        least = least_memory(problem, tier, solver=solver)
        if least is not None and least.peak_bytes <= PROGRAM_SLACK * problem.limits.bytes_of(tier):
            yield least


def _size(num_bytes: int) -> str:
    """To a tenth of the unit, rounded up: what a message asks for is enough."""
    unit = GIB if num_bytes >= GIB else MIB
    tenths = -(-10 * num_bytes // unit)
    return format_bytes(tenths * unit / 10)


def _needed(problem: Problem, tier: Tier, *, solver: bool) -> int | None:
    """The least limit of a tier with which a replayed policy fits, or None where the other tier is too small for any.

    The program's memory is the replay's but for some bytes: where those put the other tier over its limit, the search
    looks for a policy that takes about as little.
    """
    least = least_memory(problem, tier, solver=solver)
    if least is None:
        return None
    replayed = [problem.figures(policy) for policy in (least.policy, *least.ties)]
    figures: StepFigures | None = min(
        replayed, key=lambda figures: (bool(problem.excess_bytes(figures).keys() - {tier}), _peaks(figures)[tier])
    )
    if figures is not None and problem.excess_bytes(figures).keys() - {tier}:
        limits = problem.limits.model_copy(update={f"{tier}_memory_bytes": round(PROGRAM_SLACK * least.peak_bytes)})
        figures = feasible(problem.with_limits(limits), solver=solver)
    return None if figures is None else _peaks(figures)[tier]


def _peaks(figures: StepFigures) -> dict[Tier, int]:
    return {"device": figures.device_peak_bytes, "host": figures.host_peak_bytes}


def _needed_of_both(problem: Problem, *, solver: bool) -> dict[Tier, int]:
    """The least memory of one tier whatever the other takes, then the least of the other beside it.

    The device comes first, but where its memory is the host's: there the host's bytes are all there are.
    """
    first: Tier = "host" if problem.hardware.shared_memory else "device"
    (second,) = (tier for tier in TIERS if tier != first)
    endless = problem.limits.model_copy(update={f"{second}_memory_bytes": UNLIMITED_BYTES})
    least = least_memory(problem.with_limits(endless), first, solver=solver)
    assert least is not None, "with one tier unlimited there is always a plan"
    needed = _peaks(problem.figures(least.policy))
    limits = problem.limits.model_copy(update={f"{first}_memory_bytes": needed[first]})
    beside = _needed(problem.with_limits(limits), second, solver=solver)
    return needed if beside is None else {**needed, second: min(beside, needed[second])}


def _smaller_workloads(problem: Problem, *, solver: bool) -> Iterator[str]:
    """For each setting of the workload that takes memory, the smallest change of it that fits."""
    for series in (_smaller_micro_batches, _shorter_sequences, _narrower_gradients):
        changes = list(series(problem.workload))

        def fits(place: int, changes: Sequence[tuple[str, Workload]] = changes) -> bool:
            return feasible(problem.with_workload(changes[place][1]), solver=solver) is not None

        # Less work takes less memory: where the largest change does not do none does, else the edge is found by halves.
        low, high = -1, len(changes) - 1
        if not changes or not fits(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        yield changes[high][0]


def _smaller_micro_batches(workload: Workload) -> Iterator[tuple[str, Workload]]:
    for rows in range((workload.micro_batch_rows or 1) - 1, 0, -1):
        if workload.rows_per_step % rows == 0:
            tokens = rows * workload.sequence_length
            words = f"micro-batches of {rows} rows ({tokens:,} tokens)"
            yield words, workload.model_copy(update={"micro_batch_rows": rows})


def _shorter_sequences(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Every shorter length that a step of as many tokens can be cut into, with its micro-batches as pinned."""
    tokens, rows = workload.tokens_per_step, workload.micro_batch_rows or 1
    for length in _divisors(tokens // rows):
        if SHORTEST_SEQUENCE <= length < workload.sequence_length:
            yield f"sequences of {length:,} tokens", workload.model_copy(update={"sequence_length": length})


def _divisors(number: int) -> list[int]:
    """All divisors, the largest first."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)}, reverse=True)


def _narrower_gradients(workload: Workload) -> Iterator[tuple[str, Workload]]:
    if workload.gradient_format == "fp32" and workload.precision != "fp64":
        yield "gradient_format bf16", workload.model_copy(update={"gradient_format": "bf16"})
