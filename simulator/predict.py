"""Prediction: what a policy will take, in seconds and bytes, by replaying its program on a machine's profile."""

from collections.abc import Sequence
from dataclasses import dataclass

import pydantic

from simulator import formulas
from simulator.build import build, build_evaluation
from simulator.costs import OperationCosts, Pricing
from simulator.errors import InputError
from simulator.formats import PRECISIONS
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.program import Program, StepProgram
from simulator.replay import replay, replay_stretch
from simulator.schema import Schema
from simulator.timeline import Timeline
from simulator.units import MIB

# The caching allocator reserves in blocks of 2 MiB and reuses what fits, and libraries take their workspaces from it:
# reserved bytes lie above those of buffers by a share of what passes through a step (persistent buffers are one
# allocation each and lose nothing), but by no more than a few holes take. Measured on an H200 in 6 runs of four models
# with 4 to 8 GiB passing: 80 to 340 MiB, whatever passes; 5 % of 3.8 GiB.
ALLOCATOR_SLACK = 0.09
MOST_ALLOCATOR_SLACK_BYTES = 448 * MIB

# Compiling on CUDA, and the first step, leave the compiler's own state, its worker processes
# (executor.compiled.COMPILE_WORKERS) and what the driver and its libraries load for new kernels. On an H200's host a
# process that trains takes 2.98 to 3.16 GiB beside its buffers for 1 to 14.8 billion parameters, 0.84 of it after a
# step that is not compiled; 1.6 GiB where all that it needs lies compiled in the cache.
HOST_COMPILER_BYTES = 2272 * MIB

# What a process takes above its bare size once it trains, whatever the model: stacks and heaps of its threads, scratch
# of the matrix libraries, pieces of files. Measured: 62 MB on a CPU with two cores, 22 M parameters.
TRAINING_PROCESS_BYTES = 96 * MIB

# Tokens, labels and positions of a batch, int64: one in use and one that is being made.
BATCH_BYTES_PER_TOKEN = 24

# Weights and state pass in pieces when they are drawn, read or saved; no more of them than this is under way at a time.
PIECES_BYTES = 256 * MIB


# Steps of a stretch that are replayed; those beyond take the step's predicted time each.
STEPS_OF_A_STRETCH = 4


class StepFigures(Schema):
    """A step in figures; the same keys whether predicted, measured or ideal. Peaks cover the whole run."""

    step_seconds: float = pydantic.Field(gt=0)
    tflops: float = pydantic.Field(ge=0)  # 6 N T / seconds / 1e12
    tflops_with_attention: float = pydantic.Field(ge=0)
    tokens_per_second: float = pydantic.Field(ge=0)  # measured: without padding
    device_peak_bytes: int = pydantic.Field(ge=0)
    host_peak_bytes: int = pydantic.Field(ge=0)
    nvme_peak_bytes: int = pydantic.Field(default=0, ge=0)
    breakdown_seconds: dict[str, float] = pydantic.Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A replayed policy: its figures, its timeline, and which prices were measured."""

    figures: StepFigures
    timeline: Timeline
    program: StepProgram
    origins: dict[str, str]


def predict(
    model: ModelSpec,
    workload: Workload,
    policy: Policy,
    hardware: HardwareProfile,
    costs: OperationCosts | None = None,
) -> Prediction:
    """Build, price and replay a policy. Raises InputError or UnsupportedChoice for a policy that cannot be built."""
    program = build(model, workload, policy)
    pricing = Pricing(model, workload, policy, hardware, costs)
    timeline = replay(program, pricing.price, pricing.size, pricing.sharing)
    figures = step_figures(
        model,
        workload,
        timeline.step_seconds,
        device_peak_bytes=device_peak_bytes(program, timeline, hardware),
        host_peak_bytes=host_peak_bytes(model, workload, policy, timeline, hardware),
        breakdown_seconds=timeline.breakdown(),
    )
    return Prediction(figures, timeline, program, pricing.origins)


def predict_evaluation(
    model: ModelSpec,
    workload: Workload,
    policy: Policy,
    hardware: HardwareProfile,
    costs: OperationCosts | None = None,
) -> Timeline:
    """One batch's evaluation among others, replayed: `step_seconds` for each batch of the evaluation's data.

    Its device memory is below a step's: it keeps nothing for a backward. Raises as `predict` does.
    """
    program = build_evaluation(model, workload, policy)
    nothing = Program("drain", (), program.buffers)
    pricing = Pricing(model, workload, policy, hardware, costs)
    repeated = StepProgram(first=program, steady=program, drain=nothing, buffers=program.buffers)
    return replay(repeated, pricing.price, pricing.size, pricing.sharing)


def predict_stretches(
    model: ModelSpec,
    workload: Workload,
    policy: Policy,
    hardware: HardwareProfile,
    costs: OperationCosts | None = None,
    *,
    lengths: Sequence[int],
    step_seconds: float,
) -> list[float]:
    """Seconds of stretches of `lengths` steps, each from rest and with the drain after it.

    A drain has nothing to run beside, unlike the updates of a step, and the step after it has none of its own.
    `step_seconds` is the predicted step. Raises as `predict` does.
    """
    program = build(model, workload, policy)
    pricing = Pricing(model, workload, policy, hardware, costs)
    replayed = {
        steps: replay_stretch(program, pricing.price, pricing.sharing, num_steps=steps)
        for steps in {min(length, STEPS_OF_A_STRETCH) for length in lengths}
    }
    return [
        replayed[min(length, STEPS_OF_A_STRETCH)] + max(0, length - STEPS_OF_A_STRETCH) * step_seconds
        for length in lengths
    ]


def step_figures(
    model: ModelSpec,
    workload: Workload,
    step_seconds: float,
    *,
    device_peak_bytes: int,
    host_peak_bytes: int,
    breakdown_seconds: dict[str, float],
) -> StepFigures:
    """Figures of a step that took `step_seconds`, predicted or measured. Raises InputError for a step of no time."""
    if step_seconds <= 0:
        raise InputError("costs: all that a step waits for takes 0 seconds; measure the operations again")
    tokens = workload.tokens_per_step
    lengths = [workload.sequence_length] * workload.rows_per_step
    return StepFigures(
        step_seconds=step_seconds,
        tflops=formulas.tflops(model, tokens, step_seconds),
        tflops_with_attention=formulas.tflops_with_attention(model, tokens, step_seconds, lengths),
        tokens_per_second=tokens / step_seconds,
        device_peak_bytes=device_peak_bytes,
        host_peak_bytes=host_peak_bytes,
        breakdown_seconds=breakdown_seconds,
    )


def device_process_bytes(hardware: HardwareProfile) -> int:
    """What a process takes of device memory beside the allocator's: the context, and kernels that libraries load."""
    libraries = 0.0 if hardware.library_bytes is None else hardware.library_bytes.value
    return round(hardware.context_bytes.value + libraries)


def device_peak_bytes(program: StepProgram, timeline: Timeline, hardware: HardwareProfile) -> int:
    """What the process takes, persistent buffers, and what passes through a step with the allocator's slack."""
    persistent = sum(b.num_bytes for b in program.buffers.values() if b.persistent and b.tier == "device")
    passing = timeline.peak_bytes.get("device", 0) - persistent
    return device_process_bytes(hardware) + persistent + passing + allocator_slack_bytes(passing)


def allocator_slack_bytes(passing_bytes: int) -> int:
    """What the allocator reserves beside buffers: holes, and libraries' workspaces."""
    return round(min(ALLOCATOR_SLACK * passing_bytes, MOST_ALLOCATOR_SLACK_BYTES))


def host_peak_bytes(
    model: ModelSpec, workload: Workload, policy: Policy, timeline: Timeline, hardware: HardwareProfile
) -> int:
    """What the process takes beside buffers, and the host's buffers; device memory too where shared."""
    peak = host_process_bytes(model, workload, hardware) + timeline.peak_bytes.get("host", 0)
    if hardware.shared_memory:
        peak += timeline.peak_bytes.get("device", 0)
    if _compiles_for_a_gpu(workload, hardware):
        peak += set_aside_bytes(model, workload, policy)
    return round(peak)


def set_aside_bytes(model: ModelSpec, workload: Workload, policy: Policy) -> int:
    """What the compiler sets aside on the host while it tries kernels of the first backward, and never gives back.

    Before a kernel that overwrites its argument is tried, torch's compiler copies the argument: on the device if less
    is allocated there than has been before, else into pinned memory, in a power of two. The widest such argument is the
    MLP's; what has been allocated before is at least a chunk of the head's logits, of which the backward holds some
    again. Measured on an H200 with 65,536 tokens of the 7B's layers: 4.0 GiB for 2.3; with 32,768 tokens 2.0, or none
    where all layers keep their input only; none up to seven eighths of a chunk.
    """
    width = PRECISIONS[workload.precision].weight
    argument = policy.micro_batch_rows * workload.sequence_length * model.intermediate_size * width
    if argument <= 0.9 * policy.head_chunk_tokens * model.vocab_size * width:
        return 0
    return 1 << (argument - 1).bit_length()


def host_process_bytes(model: ModelSpec, workload: Workload, hardware: HardwareProfile) -> int:
    """The bare process, the compiler, what is on its way in or out, a step's batch and the next one.

    Where a GPU's layers are compiled, that is later than the model is loaded, and more than passes then.
    """
    beside = transit_bytes(model)
    if _compiles_for_a_gpu(workload, hardware):
        beside = max(beside, HOST_COMPILER_BYTES + TRAINING_PROCESS_BYTES)
    return round(hardware.host_base_bytes.value) + beside + 2 * BATCH_BYTES_PER_TOKEN * workload.tokens_per_step


def _compiles_for_a_gpu(workload: Workload, hardware: HardwareProfile) -> bool:
    return workload.compiled and hardware.device.kind == "cuda"


def transit_bytes(model: ModelSpec) -> int:
    """What a run may hold beside the bare process and its buffers, while it loads, trains, saves or resumes."""
    return max(min(PIECES_BYTES, largest_tensor_bytes(model)), TRAINING_PROCESS_BYTES)


def largest_tensor_bytes(model: ModelSpec) -> int:
    """The largest tensor in fp32."""
    return 4 * max(tensor.num_elements for kind in model.kinds for tensor in kind.tensors)
