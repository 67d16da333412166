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
from itertools import pairwise

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


def _saving_layers(model: ModelSpec, policy: Policy) -> list[int]:
    """Of the waiting layers those that leave with more than their input."""
    return [layer for layer in waiting_layers(model, policy) if policy.save_levels[layer - 1] != "input"]


def activation_buffers(model: ModelSpec, workload: Workload, policy: Policy) -> list[Buffer]:
    """The persistent buffers: places on the host for what waits at a time, and the stages.

    A layer has a place for each micro-batch of a group, a depth-first one has one.
    """
    num_bytes = hidden_bytes(model, workload, policy.micro_batch_rows)
    layers = waiting_layers(model, policy)
    saving = _saving_layers(model, policy)
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
    stages = [Buffer(_stage(turn), Tier.DEVICE, Role.STAGE, num_bytes) for turn in range(min(NUM_STAGES, readers))]
    largest = max((policy.saved_bytes[layer - 1] for layer in saving), default=0)
    stages += [
        Buffer(_saved_stage(turn), Tier.DEVICE, Role.SAVED_STAGE, largest) for turn in range(_num_saved_stages(saving))
    ]
    return [*places, *saved_places, *stages]


def _num_saved_stages(saving: Sequence[int]) -> int:
    """What layers save beside their inputs is large: one stage, while layers between do their backward.

    Two where such layers follow upon each other: one is read while the other is filled.
    """
    return min(len(saving), 1 + any(above == layer + 1 for layer, above in pairwise(saving)))


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
    num_saved_stages = _num_saved_stages(_saving_layers(model, policy))
    stages = _stages(readers, num_saved_stages)
    let_go = _let_go(operations, layers, policy.leaving_passes)
    found: list[Operation] = []
    stored: set[str] = set()  # inputs that have left
    loaded = 0  # readers whose load has been issued
    read = saved_back = 0  # readers that have run, and stages that hold what a layer saved
    for operation in operations:
        changed = operation
        if operation.name in stages:
            changed = _from_stages(operation, stages[operation.name])
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
            if saved_back + _saves(reader) > num_saved_stages:
                break
            found.append(_load(reader, stages[reader.name], index(reader)))
            loaded, saved_back = loaded + 1, saved_back + _saves(reader)
    return found


def _let_go(operations: Sequence[Operation], layers: set[int], leaving_passes: int) -> dict[str, list[str]]:
    """What leaves from the device, by the pass that lets go of it once its copy has ended.

    It has `leaving_passes`, one at least, but no more than there are before the loss, when memory is fullest.
    """
    passes = [o for o in operations if o.kind in _PASSES]
    found: dict[str, list[str]] = {}
    before_loss = len(passes) - 1
    for position in range(len(passes) - 2, -1, -1):
        operation = passes[position]
        if passes[position + 1].kind is not Kind.FORWARD:
            before_loss = position
        if operation.kind is Kind.FORWARD and operation.block in layers:
            last = max(position + 1, min(position + leaving_passes, before_loss))
            found.setdefault(passes[last].name, []).extend(_contents(operation))
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


def _stage(number: int) -> str:
    return f"device.stage.{number % NUM_STAGES}"


def _saved_stage(number: int) -> str:
    return f"device.saved_stage.{number}"


def _stages(readers: Sequence[Operation], num_saved_stages: int) -> dict[str, dict[str, str]]:
    """For each reader, in order, where it finds what has waited: in the stages in turn."""
    found: dict[str, dict[str, str]] = {}
    saved = 0
    for number, reader in enumerate(readers):
        found[reader.name] = {_hidden(reader): _stage(number)}
        for content in _contents(reader)[1:]:
            found[reader.name][content] = _saved_stage(saved % num_saved_stages)
            saved += 1
    return found


def _store(forward: Operation, index: int) -> Operation:
    block, m, contents = forward.block, forward.micro_batch, _contents(forward)
    return Operation(
        f"store_activation.{block}.{m}", Kind.STORE_ACTIVATION, Resource.D2H, block, m, forward.group, forward.level,
        reads=tuple(Access(content, content) for content in contents),
        writes=tuple(Access(_place(content, block, index), content) for content in contents),
    )  # fmt: skip


def _load(reader: Operation, stages: dict[str, str], index: int) -> Operation:
    block, m = reader.block, reader.micro_batch
    return Operation(
        f"load_activation.{block}.{m}.{reader.kind}", Kind.LOAD_ACTIVATION, Resource.H2D, block, m, reader.group,
        reader.level, reads=tuple(Access(_place(content, block, index), content) for content in stages),
        writes=tuple(Access(stage, content) for content, stage in stages.items()),
    )  # fmt: skip


def _from_stages(reader: Operation, stages: dict[str, str]) -> Operation:
    return replace(
        reader,
        reads=tuple(Access(stages.get(access.buffer, access.buffer), access.content) for access in reader.reads),
        releases=tuple(name for name in reader.releases if name not in stages),
    )
