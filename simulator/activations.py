"""Activations that wait on the host: what a layer keeps leaves after its forward and comes back for its backward.

Built upon a program that keeps everything on the device: for every layer whose home for activations is the host, each
micro-batch's input, with what the layer saves beside it, is copied out once the layer's forward has run, and back ahead
of each operation that reads it again. On the way out it leaves from where it stands, from the moment it is there: a
later pass on `compute` waits for the copy and lets go of the memory, so that no other stream ever reads what that
stream's allocator has given away. On the way back it comes into stages, persistent buffers that the readers take in
turn.
"""

from collections.abc import Sequence
from dataclasses import replace

from simulator.formats import PRECISIONS
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.program import Access, Buffer, Kind, Operation, Resource, Role, Tier

# Inputs that come back are read from so many buffers in turn: one is read while the next one is filled.
NUM_STAGES = 2
# What layers save beside their inputs is large, and comes back while layers between do their backward.
NUM_SAVED_STAGES = 1

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
    """The persistent buffers: places on the host for what waits at a time, and the stages.

    A layer has a place for each micro-batch of a group, a depth-first one has one.
    """
    num_bytes = hidden_bytes(model, workload, policy.micro_batch_rows)
    layers = waiting_layers(model, policy)
    saving = [layer for layer in layers if policy.save_levels[layer - 1] != "input"]
    places, saved_places = [], []
    for layer in layers:
        for index in range(1 if policy.depth_first(layer, model.num_layers) else max(policy.groups)):
            places.append(Buffer(_place("hidden", layer, index), Tier.HOST, Role.ACTIVATION, num_bytes, layer))
            if layer in saving:
                saved_bytes = policy.saved_bytes[layer - 1]
                name = _place("saved", layer, index)
                saved_places.append(Buffer(name, Tier.HOST, Role.SAVED_PLACE, saved_bytes, layer))
    # Where checkpoints are sparse a layer's input is read twice, but for one that is a segment of its own.
    last, sparse = model.num_layers, policy.checkpoint_interval > 1
    readers = policy.num_micro_batches * sum(2 if sparse and layer != last else 1 for layer in layers)
    stages = [
        Buffer(_stage("hidden", turn), Tier.DEVICE, Role.STAGE, num_bytes) for turn in range(min(NUM_STAGES, readers))
    ]
    if saving:
        largest = max(policy.saved_bytes[layer - 1] for layer in saving)
        stages.append(Buffer(_stage("saved", 0), Tier.DEVICE, Role.SAVED_STAGE, largest))
    return [*places, *saved_places, *stages]


def with_waiting_activations(operations: Sequence[Operation], model: ModelSpec, policy: Policy) -> list[Operation]:
    """The operations of one step, in program order, with the copies of what waits on the host."""
    layers = set(waiting_layers(model, policy))
    if not layers:
        return list(operations)
    first_of_group = [sum(policy.groups[:group]) for group in range(len(policy.groups))]

    def index(operation: Operation) -> int:
        """Of the place that a micro-batch has on the host."""
        alone = policy.depth_first(operation.block, model.num_layers)
        return 0 if alone else operation.micro_batch - first_of_group[operation.group]

    readers = [o for o in operations if o.kind in (Kind.RECOMPUTE, Kind.BACKWARD) and o.block in layers]
    numbers = {reader.name: number for number, reader in enumerate(readers)}
    let_go = _let_go(operations, layers)
    found: list[Operation] = []
    stored: set[str] = set()  # inputs that have left
    loaded = 0  # readers whose load has been issued
    read = saved_back = 0  # readers that have run, and stages that hold what a layer saved
    for operation in operations:
        changed = operation
        if operation.name in numbers:
            changed = _from_stages(operation, numbers[operation.name])
            read += 1
            saved_back -= _saves(operation)
        if operation.name in let_go:
            changed = replace(changed, releases=(*changed.releases, *let_go[operation.name]))
        found.append(changed)
        if operation.kind is Kind.FORWARD and operation.block in layers:
            found.append(_store(operation, index(operation)))
            stored.add(_hidden(operation))
        # Stages are free as their readers have run; in a later group an input has to leave first.
        while loaded < min(read + NUM_STAGES, len(readers)) and _hidden(readers[loaded]) in stored:
            reader = readers[loaded]
            if saved_back + _saves(reader) > NUM_SAVED_STAGES:
                break
            found.append(_load(reader, loaded, index(reader)))
            loaded, saved_back = loaded + 1, saved_back + _saves(reader)
    return found


def _let_go(operations: Sequence[Operation], layers: set[int]) -> dict[str, list[str]]:
    """What leaves from the device, by the pass that lets go of it once its copy has ended.

    An input alone goes with the next pass. What a layer saves beside it takes the link for longer than that: it goes
    with the next pass that saves what leaves, so that one layer's is leaving at a time, or before the loss.
    """
    passes = [o for o in operations if o.kind in _PASSES]
    found: dict[str, list[str]] = {}
    latest = len(passes) - 1  # of the passes after the one that is looked at
    for position in range(len(passes) - 2, -1, -1):
        operation, following = passes[position], passes[position + 1]
        if following.kind is not Kind.FORWARD:
            latest = position
        elif following.block in layers and _saves(following):
            latest = position + 1
        if operation.kind is Kind.FORWARD and operation.block in layers:
            at = max(position + 1, latest) if _saves(operation) else position + 1
            found.setdefault(passes[at].name, []).extend(_contents(operation))
    return found


def _saves(operation: Operation) -> bool:
    """Whether a layer keeps more than its input."""
    return operation.level != "input"


def _hidden(operation: Operation) -> str:
    return f"hidden.{operation.block}.{operation.micro_batch}"


def _contents(operation: Operation) -> list[str]:
    """What waits of a pass through a layer."""
    saved = f"saved.{operation.block}.{operation.micro_batch}"
    return [_hidden(operation), saved] if _saves(operation) else [_hidden(operation)]


def _place(content: str, layer: int, index: int) -> str:
    """Where something waits: `content` starts with hidden or saved."""
    return f"host.{'saved' if content.startswith('saved') else 'activation'}.{layer}.{index}"


def _stage(content: str, number: int) -> str:
    """Where the `number`-th of what comes back is read."""
    if content.startswith("saved"):
        return f"device.saved_stage.{number % NUM_SAVED_STAGES}"
    return f"device.stage.{number % NUM_STAGES}"


def _store(forward: Operation, index: int) -> Operation:
    block, m, contents = forward.block, forward.micro_batch, _contents(forward)
    return Operation(
        f"store_activation.{block}.{m}", Kind.STORE_ACTIVATION, Resource.D2H, block, m, forward.group, forward.level,
        reads=tuple(Access(content, content) for content in contents),
        writes=tuple(Access(_place(content, block, index), content) for content in contents),
    )  # fmt: skip


def _load(reader: Operation, number: int, index: int) -> Operation:
    block, m, contents = reader.block, reader.micro_batch, _contents(reader)
    return Operation(
        f"load_activation.{block}.{m}.{reader.kind}", Kind.LOAD_ACTIVATION, Resource.H2D, block, m, reader.group,
        reader.level, reads=tuple(Access(_place(content, block, index), content) for content in contents),
        writes=tuple(Access(_stage(content, number), content) for content in contents),
    )  # fmt: skip


def _from_stages(reader: Operation, number: int) -> Operation:
    contents = _contents(reader)
    return replace(
        reader,
        reads=tuple(
            Access(_stage(access.buffer, number), access.content) if access.buffer in contents else access
            for access in reader.reads
        ),
        releases=tuple(name for name in reader.releases if name not in contents),
    )
