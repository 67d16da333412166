"""The ideal: a step's program without optimizer and clipping, all weights resident.

It is what the same operations take when nothing has to be waited for, so it bounds every policy with the same
micro-batch and save level from below.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.build import build
from simulator.costs import OperationCosts, Pricing, comparable_levels
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.policy import HEAD_CHUNK_TOKENS, Policy, SaveLevel, Workload, uniform_policy
from simulator.predict import device_peak_bytes
from simulator.program import Kind, Program, StepProgram
from simulator.replay import replay

_KEPT = (Kind.LOAD_BATCH, Kind.FORWARD, Kind.RECOMPUTE, Kind.LOSS, Kind.BACKWARD)
SWEEP_TOKENS = (4096, 8192, 16384, 32768)  # of a micro-batch


@dataclass(frozen=True, slots=True)
class IdealStep:
    """One point of the sweep, and what a replay finds."""

    micro_batch_rows: int
    save_level: SaveLevel
    step_seconds: float
    device_peak_bytes: int


def ideal_policy(model: ModelSpec, workload: Workload, *, micro_batch_rows: int, save_level: SaveLevel) -> Policy:
    """All weights and state in HBM, micro-batches one after another."""
    tokens = micro_batch_rows * workload.sequence_length
    return uniform_policy(
        model, workload, micro_batch_rows=micro_batch_rows, groups=(1,) * (workload.rows_per_step // micro_batch_rows),
        save_level=save_level, head_chunk_tokens=min(HEAD_CHUNK_TOKENS, tokens),
    )  # fmt: skip


def ideal_program(program: StepProgram) -> StepProgram:
    """The operations of forward, loss and backward alone, in their order, with the waits among them."""

    def cut(variant: Program) -> Program:
        kept = {operation.name for operation in variant if operation.kind in _KEPT}
        return Program(
            variant.variant,
            tuple(
                operation.with_waits(tuple(wait for wait in operation.waits if wait.operation in kept))
                for operation in variant
                if operation.name in kept
            ),
            buffers,
        )

    used = {
        access.buffer
        for operation in program.steady
        if operation.kind in _KEPT
        for access in (*operation.reads, *operation.writes)
    }
    buffers = {name: buffer for name, buffer in program.buffers.items() if name in used}
    return replace(
        program,
        first=cut(program.first),
        steady=cut(program.steady),
        drain=replace(program.drain, operations=(), buffers=buffers),
        buffers=buffers,
    )


def ideal_steps(
    model: ModelSpec,
    workload: Workload,
    hardware: HardwareProfile,
    costs: OperationCosts | None = None,
    *,
    levels: Sequence[SaveLevel] = (),
) -> list[IdealStep]:
    """The sweep over micro-batches and save levels, the fastest first, also those that do not fit.

    A row longer than a size is a micro-batch of its own; a step smaller than a size is one micro-batch. Without
    `levels` they are all whose prices are comparable.
    """
    levels = levels or comparable_levels(workload, costs)
    sizes = {min(max(1, tokens // workload.sequence_length), workload.rows_per_step) for tokens in SWEEP_TOKENS}
    found = []
    for rows in sorted(rows for rows in sizes if workload.rows_per_step % rows == 0):
        # Micro-batches follow each other without a wait: two of them tell what more take.
        micro_batches = workload.rows_per_step // rows
        replayed = min(2, micro_batches)
        here = workload.model_copy(
            update={"micro_batch_rows": rows, "tokens_per_step": replayed * rows * workload.sequence_length}
        )
        for level in levels:
            policy = ideal_policy(model, here, micro_batch_rows=rows, save_level=level)
            program = ideal_program(build(model, here, policy))
            pricing = Pricing(model, here, policy, hardware, costs)
            timeline = replay(program, pricing.price, pricing.size, pricing.sharing)
            peak = device_peak_bytes(program, timeline, hardware)
            found.append(IdealStep(rows, level, timeline.step_seconds * micro_batches / replayed, peak))
    return sorted(found, key=lambda step: step.step_seconds)
