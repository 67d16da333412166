"""`measure`: times Conveyor's own operations on this machine, by running real step programs of a shallow model.

A model of the same shape and few layers runs the programs of several policies. On a GPU compute operations are timed
back to back on their stream, hot; host updates and copies alone, one after another, where their memory is observed
too. On a CPU everything runs inline, so one pass gives both.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from executor.adamw import step_scalars
from executor.data.dataset import SYNTHETIC, Batch, open_dataset
from executor.huggingface import initialise
from executor.operations import Optimization
from executor.runner import InlineRunner
from executor.trainer import Trainer
from simulator.costs import MeasuredCost, OperationCosts, operation_key, shape_hash
from simulator.errors import InputError
from simulator.families import with_layers
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec, model_spec, transformers_config
from simulator.policy import (
    EAGER_SAVE_LEVELS,
    HEAD_CHUNK_TOKENS,
    SAVE_LEVELS,
    Policy,
    SaveLevel,
    Workload,
    uniform_policy,
)
from simulator.program import Kind, Operation, Resource, Role
from simulator.units import counted

NUM_LAYERS = 3  # the fewest with a first, a middle and a last
MICRO_BATCHES = 2  # the first writes its gradients, the second adds
TIMED_STEPS = 5
WARM_SECONDS = 20.0  # a GPU's sustained clock is up to 10 % below a short burst's
BATCH_SEED = 1


def shallow(config: dict[str, Any], num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """The config of the same model with its lowest layers only, and the first of every kind that is not among them."""
    model, hf_config = model_spec(config), transformers_config(config)
    kinds = [model.kind_of_block[block] for block in model.layers]
    firsts = {kinds.index(kind) for kind in kinds}
    others = [layer for layer in range(len(kinds)) if layer not in firsts]
    return with_layers(config, hf_config, sorted(firsts | set(others[: max(0, num_layers - len(firsts))])))


def measure(
    config: dict[str, Any],
    hardware: HardwareProfile,
    workload: Workload,
    *,
    micro_batch_rows: Sequence[int],
    device: torch.device,
    levels: Sequence[SaveLevel] = (),
    report: Callable[[str], None] = lambda line: None,
) -> OperationCosts:
    """Costs of every operation kind at each micro-batch size and save level; sequences and formats of `workload`.

    Raises InputError for a model that cannot be built and for a profile of other hardware than `device`, OutOfMemory
    where not even the shallow model fits.
    """
    if hardware.device.kind != device.type:
        raise InputError(
            f"hardware {hardware.name!r}: has a {hardware.device.kind!r} device, and operations would be timed on "
            f"{device.type!r}; name the profile of this machine, as `conveyor probe` writes it"
        )
    cut = shallow(config)
    model = model_spec(cut)
    levels = levels or (tuple(SAVE_LEVELS) if workload.compiled else EAGER_SAVE_LEVELS)
    entries: dict[str, MeasuredCost] = {}
    beside_copies: list[float] = []
    warm = device.type != "cuda"
    for rows in micro_batch_rows:
        tokens = rows * workload.sequence_length * MICRO_BATCHES
        here = workload.model_copy(update={"tokens_per_step": tokens, "micro_batch_rows": rows})
        for policy in _policies(model, here, levels, rows):
            started = time.perf_counter()
            trainer = _trainer(cut, model, here, policy, device)
            try:
                found = _measured_alone(trainer)
                if device.type == "cuda":
                    found |= _measured_hot(trainer, found, 0.0 if warm else WARM_SECONDS)
                    warm = True
            finally:
                trainer.close()
            streams = "host" in policy.weight_homes
            if streams and device.type == "cuda":
                beside_copies += _slowdowns(entries, found)
            # The first policy that runs an operation names its price: those without copies come first.
            entries = {**found, **entries}
            passing = "streamed states" if "streamed" in policy.optimizer_homes else "streamed weights" * streams
            report(
                f"{counted(rows, 'row')}, save level {policy.save_levels[0]}{', ' * bool(passing)}{passing}: "
                f"{len(found)} operations in {time.perf_counter() - started:.0f} s"
            )
    return OperationCosts(
        hardware=hardware.identity_hash,
        device_name=hardware.device.name,
        shape=shape_hash(model),
        precision=workload.precision,
        compiled=workload.compiled,
        entries=dict(sorted(entries.items())),
        compute_beside_copies=min(1.0, statistics.median(beside_copies)) if beside_copies else 1.0,
    )


def _policies(model: ModelSpec, workload: Workload, levels: Sequence[SaveLevel], rows: int) -> Iterator[Policy]:
    chunk = min(HEAD_CHUNK_TOKENS, rows * workload.sequence_length)
    for level in levels:
        yield uniform_policy(
            model, workload, micro_batch_rows=rows, groups=(MICRO_BATCHES,), save_level=level, head_chunk_tokens=chunk
        )
    yield uniform_policy(
        model, workload, micro_batch_rows=rows, groups=(MICRO_BATCHES,), save_level=levels[-1],
        optimizer="streamed", head_chunk_tokens=chunk,
    )  # fmt: skip
    yield uniform_policy(
        model, workload, micro_batch_rows=rows, groups=(MICRO_BATCHES,), save_level=levels[-1],
        weights="host", optimizer="host", activations="host" if levels[-1] == "input" else "device",
        head_chunk_tokens=chunk,
    )  # fmt: skip


def _trainer(
    config: dict[str, Any], model: ModelSpec, workload: Workload, policy: Policy, device: torch.device
) -> Trainer:
    dtype = torch.float64 if workload.precision == "fp64" else torch.float32
    table = step_scalars([1e-5] * 100_000, (0.9, 0.999), 0.0, dtype=dtype)
    optimization = Optimization(table=table, betas=(0.9, 0.999), epsilon=1e-8, max_grad_norm=1.0)
    trainer = Trainer(config, model, workload, policy, optimization, device=device)
    initialise(model, config, trainer.memory.states(), seed=0, device=device)
    trainer.start()
    return trainer


def _random_batch(trainer: Trainer) -> Batch:
    workload = trainer.workload
    dataset = open_dataset(
        SYNTHETIC, vocab_size=trainer.model.vocab_size, sequence_length=workload.sequence_length,
        rows_per_step=workload.rows_per_step, seed=BATCH_SEED,
    )  # fmt: skip
    return dataset.batch(0)


def _measured_alone(trainer: Trainer) -> dict[str, MeasuredCost]:
    """One operation after another, synchronised: seconds of everything, bytes where the device counts them."""
    observed: dict[str, list[tuple[float, int | None, int]]] = {}
    keys: dict[str, str] = {}
    device, memory = trainer.device, trainer.memory
    streamed = trainer.runner

    def observe(operation: Operation) -> Callable[[], None]:
        keys[operation.name] = operation_key(operation, trainer.model, trainer.workload, trainer.policy)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        start = time.perf_counter()

        def after() -> None:
            seconds = time.perf_counter() - start
            kept = _kept_bytes(trainer, operation)
            transient = None
            if device.type == "cuda":
                written = kept + sum(
                    buffer.num_bytes
                    for buffer in (trainer.program.buffers[access.buffer] for access in operation.writes)
                    if not buffer.persistent and buffer.role is not Role.SAVED
                )
                transient = max(0, torch.cuda.max_memory_allocated(device) - before - written)
            observed.setdefault(keys[operation.name], []).append((seconds, transient, kept))

        return after

    functions = trainer.operations.functions()
    trainer.runner = InlineRunner(functions, device, device_bytes=memory.device_bytes, observe=observe)
    batch = _random_batch(trainer)
    try:
        trainer.step(batch)
        observed.clear()  # the first step compiles and grows pools
        for _ in range(TIMED_STEPS if device.type == "cpu" else 2):
            trainer.step(batch)
        trainer.drain()
    finally:
        trainer.runner = streamed
        memory.passing.clear()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        key: MeasuredCost(
            seconds=statistics.median(seconds for seconds, _, _ in runs),
            transient_bytes=max((t for _, t, _ in runs if t is not None), default=None),
            kept_bytes=max(kept for _, _, kept in runs),
            source=f"measured alone on {name}, median of {len(runs)}",
        )
        for key, runs in observed.items()
    }


def _kept_bytes(trainer: Trainer, operation: Operation) -> int:
    """Bytes that a forward has kept beyond its input."""
    if operation.kind is not Kind.FORWARD or operation.block not in trainer.model.layers:
        return 0
    passing = trainer.memory.passing
    saved = passing.get(f"saved.{operation.block}.{operation.micro_batch}")
    if saved is None:
        return 0
    hidden = trainer.program.buffers[f"hidden.{operation.block}.{operation.micro_batch}"]
    return int(max(0, saved.kept_bytes() - hidden.num_bytes))


def _measured_hot(trainer: Trainer, alone: dict[str, MeasuredCost], warm_seconds: float) -> dict[str, MeasuredCost]:
    """Compute operations back to back on their stream, after `warm_seconds` of load."""
    batch = _random_batch(trainer)
    started = time.perf_counter()
    trainer.step(batch)
    while time.perf_counter() - started < warm_seconds:
        trainer.step(batch)
    times: dict[str, list[float]] = {}
    for _ in range(TIMED_STEPS):
        trainer.step(batch)  # so that the recorded step has updates pending
        trainer.step(batch, record=True)
        trainer.drain()
        operations = {operation.name: operation for operation in trainer.program.steady}
        for span in trainer.runner.spans():
            if span.resource == Resource.COMPUTE:
                operation = operations[span.name]
                key = operation_key(operation, trainer.model, trainer.workload, trainer.policy)
                times.setdefault(key, []).append(span.end - span.start)
    name = torch.cuda.get_device_name(trainer.device)
    return {
        key: alone[key].model_copy(
            update={
                "seconds": statistics.median(values),
                "source": f"measured hot on {name}, median of {len(values)}",
            }
        )
        for key, values in times.items()
        if key in alone
    }


def _slowdowns(without: dict[str, MeasuredCost], beside: dict[str, MeasuredCost]) -> list[float]:
    """Rates of the layers' operations beside copies, relative to without."""
    return [
        without[key].seconds / cost.seconds
        for key, cost in beside.items()
        if key in without and key.startswith(("forward.layer", "backward.layer")) and cost.seconds
    ]
