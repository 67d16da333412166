"""Activations that wait on the host: what save level `input` keeps leaves after a layer's forward and comes back.

Built upon a program that keeps everything on the device: for every layer whose home for activations is the host, each
micro-batch's input is copied out once the layer's forward has read it, and back ahead of each operation that reads it
again. On the way out it leaves from where it stands, from the moment it is there: the next pass on `compute` waits for
the copy and lets go of the memory, so that no other stream ever reads what that stream's allocator has given away. On
the way back it comes into stages, persistent buffers that the readers take in turn.
"""

from collections.abc import Sequence
from dataclasses import replace

from simulator.formats import PRECISIONS
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.program import Access, Buffer, Kind, Operation, Resource, Role, Tier

# Inputs that come back are read from so many buffers in turn: one is read while the next one is filled.
NUM_STAGES = 2

# Operations that work on a micro-batch's way through the model.
_PASSES = (Kind.FORWARD, Kind.RECOMPUTE, Kind.LOSS, Kind.BACKWARD)


def hidden_bytes(model: ModelSpec, workload: Workload, rows: int) -> int:
    """One layer's input, or its gradient, for a micro-batch of `rows`."""
    return rows * workload.sequence_length * model.hidden_size * PRECISIONS[workload.precision].weight


def waiting_layers(model: ModelSpec, policy: Policy) -> list[int]:
    """Layers whose kept input waits on the host: of those whose home it is, the ones that keep an input at all."""
    layers = [layer for layer in model.backward_layers if policy.activation_homes[layer - 1] == "host"]
    return [layer for layer in layers if policy.kept_input(layer, model.backward_layers[0])]


def activation_buffers(model: ModelSpec, workload: Workload, policy: Policy) -> list[Buffer]:
    """The persistent buffers: a place on the host for each waiting layer and micro-batch of a group, and the stages."""
    num_bytes = hidden_bytes(model, workload, policy.micro_batch_rows)
    layers = waiting_layers(model, policy)
    places = [
        Buffer(_place(layer, index), Tier.HOST, Role.ACTIVATION, num_bytes, layer)
        for layer in layers
        for index in range(max(policy.groups))
    ]
    # Where checkpoints are sparse a layer's input is read twice, but for one that is a segment of its own.
    last, sparse = model.num_layers, policy.checkpoint_interval > 1
    readers = policy.num_micro_batches * sum(2 if sparse and layer != last else 1 for layer in layers)
    stages = [Buffer(_stage(index), Tier.DEVICE, Role.STAGE, num_bytes) for index in range(min(NUM_STAGES, readers))]
    return [*places, *stages]


def with_waiting_activations(operations: Sequence[Operation], model: ModelSpec, policy: Policy) -> list[Operation]:
    """The operations of one step, in program order, with the copies of what waits on the host."""
    layers = set(waiting_layers(model, policy))
    if not layers:
        return list(operations)
    first_of_group = [sum(policy.groups[:group]) for group in range(len(policy.groups))]
    readers = [o for o in operations if o.kind in (Kind.RECOMPUTE, Kind.BACKWARD) and o.block in layers]
    numbers = {reader.name: number for number, reader in enumerate(readers)}
    found: list[Operation] = []
    stored: set[str] = set()  # inputs that have left
    leaving: tuple[str, ...] = ()  # what the next pass lets go of
    read = loaded = 0  # readers that have run, and those whose load has been issued
    for operation in operations:
        if operation.name in numbers:
            operation = _from_stage(operation, numbers[operation.name])
            read += 1
        if leaving and operation.kind in _PASSES:
            operation, leaving = replace(operation, releases=(*operation.releases, *leaving)), ()
        found.append(operation)
        if operation.kind is Kind.FORWARD and operation.block in layers:
            found.append(_store(operation, first_of_group[operation.group]))
            stored.add(_hidden(operation))
            leaving = (_hidden(operation),)
        # Stages are free as their readers have run; in a later group an input has to leave first.
        while loaded < min(read + NUM_STAGES, len(readers)) and _hidden(readers[loaded]) in stored:
            found.append(_load(readers[loaded], loaded, first_of_group[readers[loaded].group]))
            loaded += 1
    return found


def _hidden(operation: Operation) -> str:
    return f"hidden.{operation.block}.{operation.micro_batch}"


def _place(layer: int, index: int) -> str:
    return f"host.activation.{layer}.{index}"


def _stage(index: int) -> str:
    return f"device.stage.{index}"


def _store(forward: Operation, first: int) -> Operation:
    block, m, hidden = forward.block, forward.micro_batch, _hidden(forward)
    return Operation(
        f"store_activation.{block}.{m}", Kind.STORE_ACTIVATION, Resource.D2H, block, m, forward.group, forward.level,
        reads=(Access(hidden, hidden),), writes=(Access(_place(block, m - first), hidden),),
    )  # fmt: skip


def _load(reader: Operation, number: int, first: int) -> Operation:
    block, m, hidden = reader.block, reader.micro_batch, _hidden(reader)
    return Operation(
        f"load_activation.{block}.{m}.{reader.kind}", Kind.LOAD_ACTIVATION, Resource.H2D, block, m, reader.group,
        reader.level, reads=(Access(_place(block, m - first), hidden),),
        writes=(Access(_stage(number % NUM_STAGES), hidden),),
    )  # fmt: skip


def _from_stage(reader: Operation, number: int) -> Operation:
    hidden = _hidden(reader)
    staged = Access(_stage(number % NUM_STAGES), hidden)
    return replace(
        reader,
        reads=tuple(staged if access.buffer == hidden else access for access in reader.reads),
        releases=tuple(name for name in reader.releases if name != hidden),
    )
