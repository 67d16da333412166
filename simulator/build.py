"""The builder: policy -> step program. The only place where order is decided.

The order of one step, and why:

1. Updates that wait for the clip factor of the step before (clipping: global), low blocks first: the forward needs
   them in that order. The host's stand before the GPU's: see `pending_updates`. With layerwise or no clipping an update
   follows its gradient at once, inside the backward. What updates take and where their state comes from is in
   simulator/updates.py.
2. For each group of micro-batches: forward block by block, every micro-batch of the group in a block before the next
   block (weights arrive once a group), loss, backward in reverse. Depth-first layers, the topmost, each micro-batch
   passes forward and back, through the loss, before the next one does. Micro-batches always ascend, so that sums of
   gradients do not depend on the grouping.
3. In the last group a block's gradient is finished (rounded once, squared norm) as soon as it is complete, and leaves
   for its home.
4. The clip factor, and the report of loss and norm.

What is frozen has no gradient to finish and no update. Below the lowest trained block there is a forward only: layer
inputs are let go of at once, and a batch with the loss, or in packed rows with the lowest backward.

Weights that stream are loaded `prefetch_depth` visits ahead into slots. A slot is chosen by farthest next use, so the
top layers are not loaded again at the turn from forward to backward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from simulator.activations import hidden_bytes, with_waiting_activations
from simulator.dependencies import derive_repeated_waits, derive_waits
from simulator.model import ModelSpec
from simulator.placement import Placement, micro_batch_bytes, place
from simulator.policy import Policy, Workload, check_policy
from simulator.program import Access, Buffer, Kind, Operation, Program, Resource, Role, StepProgram, Tier
from simulator.updates import (
    StateTurns,
    clip,
    completed,
    gradient_sums,
    load_resident,
    load_weights,
    pending_updates,
    returns,
    state_turns,
    states_before,
    updates_before,
)

Phase = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True, slots=True)
class Visit:
    """One passage of micro-batches through a layer: the time for which its weights must be on the device."""

    phase: Phase
    group: int
    block: int
    micro_batches: range
    name: str  # of the passage: the same for all layers that these micro-batches pass in one direction


def build(model: ModelSpec, workload: Workload, policy: Policy) -> StepProgram:
    """The step program of a policy. Raises InputError or UnsupportedChoice for policies it cannot build."""
    check_policy(policy, model, workload)
    placement = place(model, workload, policy)
    buffers = {**placement.buffers, **_passing_buffers(model, workload, policy)}
    orders = {
        "first": list(_step(model, policy, placement, pending=False)),
        "steady": list(_step(model, policy, placement, pending=policy.clipping == "global")),
    }
    # What is pending: updates, and what they changed on its way to where evaluating, saving and a `first` step read it.
    begun = {operation.name for operation in orders["first"]}
    orders["drain"] = [operation for operation in orders["steady"] if operation.name not in begun]
    if workload.packed:
        orders = {
            variant: [_knowing_documents(operation, model, placement.lowest) for operation in order]
            for variant, order in orders.items()
        }
    orders = {variant: with_waiting_activations(order, model, policy) for variant, order in orders.items()}
    programs = derive_waits(orders)
    first, steady, drain = (Program(variant, programs[variant], buffers) for variant in orders)
    return StepProgram(first=first, steady=steady, drain=drain, buffers=buffers)


def build_evaluation(model: ModelSpec, workload: Workload, policy: Policy) -> Program:
    """A batch's forward and loss, in the micro-batches and groups of a step, on the buffers of `build`'s programs.

    It changes no weight and leaves no gradient: layer inputs are let go of at once, and streamed weights come once a
    group, or once a micro-batch where all layers are depth-first. It follows a drain that has finished, or itself.
    Raises as `build` does.
    """
    check_policy(policy, model, workload)
    placement = place(model, workload, policy)
    buffers = {**placement.buffers, **_passing_buffers(model, workload, policy)}
    operations = list(_evaluate(model, policy, placement))
    if workload.packed:
        operations = [_knowing_documents(operation, model, placement.lowest) for operation in operations]
    return Program("evaluation", derive_repeated_waits(operations), buffers)


def _evaluate(model: ModelSpec, policy: Policy, placement: Placement) -> Iterator[Operation]:
    sequence = _evaluation_visits(model, policy)
    slots, loads_at = _loads(sequence, policy, len(placement.slots))
    for index, visit in enumerate(sequence):
        group = visit.micro_batches
        if visit.block == 1:
            yield from (_load_batch(m, visit.group) for m in group)
            yield from (_embed(m, visit.group) for m in group)
        yield from _loads_before(index, sequence, slots, loads_at)
        weights = f"device.slot.{slots[index]}" if slots[index] >= 0 else placement.weights[visit.block]
        for m in group:
            operation = _layer_operation(visit, m, weights, policy, placement)
            hidden, output = f"hidden.{visit.block}.{m}", _same(f"hidden.{visit.block + 1}.{m}")
            yield replace(operation, writes=(output,), releases=(hidden,))
        if visit.block == model.num_layers:
            yield from (_evaluate_loss(model, m, visit.group) for m in group)
    yield Operation(
        "report", Kind.REPORT, Resource.COMPUTE, reads=(_same("device.loss"),), writes=(_same("host.report"),)
    )


def _evaluation_visits(model: ModelSpec, policy: Policy) -> list[Visit]:
    """Depth-first layers pass a group at a time here, for nothing is kept.

    But where all layers are depth-first a step holds one micro-batch's inputs, and an evaluation may hold no more.
    """
    if policy.depth_first_layers == model.num_layers:
        return [visit for visit in visits(model, policy) if visit.phase == "forward"]
    return [
        Visit("forward", group, block, micro_batches, f"forward.{group}")
        for group, micro_batches in enumerate(_micro_batches(policy.groups))
        for block in model.layers
    ]


def _evaluate_loss(model: ModelSpec, m: int, group: int) -> Operation:
    head, total = model.head, (_same("device.loss"),)
    hidden, batch = _same(f"hidden.{head}.{m}"), _same(f"batch.{m}")
    return Operation(
        f"evaluate.{m}", Kind.EVALUATE, Resource.COMPUTE, head, m, group, first=m == 0,
        reads=(*_head_weights(model), hidden, batch, *_added(total, m)), writes=total,
        releases=(hidden.buffer, batch.buffer),
    )  # fmt: skip


def _head_weights(model: ModelSpec) -> list[Access]:
    weights = [Access(f"device.weights.{model.head}", f"weights.{model.head}")]
    return [*weights, Access("device.weights.0", "weights.0")] if model.tied_embeddings else weights


def visits(model: ModelSpec, policy: Policy) -> list[Visit]:
    """The passages of micro-batches through layers, in the order of one step."""
    found: list[Visit] = []
    lowest = model.num_layers + 1 - policy.depth_first_layers  # of the depth-first layers

    def add(phase: Phase, group: int, blocks: Iterable[int], micro_batches: range, piece: str = "") -> None:
        found.extend(Visit(phase, group, block, micro_batches, f"{phase}.{group}{piece}") for block in blocks)

    for group, micro_batches in enumerate(_micro_batches(policy.groups)):
        add("forward", group, (block for block in model.layers if block < lowest), micro_batches)
        backward = [block for block in model.backward_layers if block >= lowest]
        for m in micro_batches if policy.depth_first_layers else ():
            alone = range(m, m + 1)
            add("forward", group, (block for block in model.layers if block >= lowest), alone, f".{m}")
            add("backward", group, reversed(backward), alone, f".{m}")
        layers = [block for block in model.backward_layers if block < lowest]
        for start in reversed(range(0, len(layers), policy.checkpoint_interval)):
            segment = layers[start : start + policy.checkpoint_interval]
            add("recompute", group, segment[:-1], micro_batches)
            add("backward", group, reversed(segment), micro_batches)
    return found


def slot_loads(sequence: Sequence[Visit], policy: Policy, num_slots: int) -> tuple[list[int], list[int]]:
    """For each visit the slot it reads (-1: resident), and the visit before which its load is issued (-1: no load).

    Loads look `prefetch_depth` visits ahead. The slot given up is the one whose content is needed last.
    """
    streamed = [index for index, visit in enumerate(sequence) if policy.weight_homes[visit.block] == "host"]
    uses: dict[int, list[int]] = {}
    for index in reversed(streamed):
        uses.setdefault(sequence[index].block, []).append(index)  # pop() yields the next use
    content: list[int | None] = [None] * num_slots
    free_from = [0] * num_slots  # first visit at which the slot's content is no longer being read
    slots, issue = [-1] * len(sequence), [-1] * len(sequence)
    for order, index in enumerate(streamed):
        block = sequence[index].block
        if block in content:
            slot = content.index(block)
        else:
            earliest = streamed[max(0, order - policy.prefetch_depth)]
            usable = [slot for slot in range(num_slots) if free_from[slot] <= earliest]
            slot = max(usable, key=lambda candidate: _next_use(content[candidate], uses))
            content[slot] = block
            issue[index] = earliest
        slots[index] = slot
        free_from[slot] = index + 1
        uses[block].pop()
    return slots, issue


def _loads(sequence: Sequence[Visit], policy: Policy, num_slots: int) -> tuple[list[int], dict[int, list[int]]]:
    """For each visit the slot it reads; and the visits whose loads are issued before a visit."""
    slots, issue = slot_loads(sequence, policy, num_slots)
    loads_at: dict[int, list[int]] = {}
    for index, at in enumerate(issue):
        if at >= 0:
            loads_at.setdefault(at, []).append(index)
    return slots, loads_at


def _loads_before(
    index: int, sequence: Sequence[Visit], slots: Sequence[int], loads_at: Mapping[int, list[int]]
) -> Iterator[Operation]:
    for ready in loads_at.get(index, []):
        visit = sequence[ready]
        yield load_weights(f"device.slot.{slots[ready]}", visit.block, visit.name)


def _next_use(block: int | None, uses: dict[int, list[int]]) -> float:
    return uses[block][-1] if block is not None and uses[block] else float("inf")


def _step(model: ModelSpec, policy: Policy, placement: Placement, *, pending: bool) -> Iterator[Operation]:
    sequence = visits(model, policy)
    slots, loads_at = _loads(sequence, policy, len(placement.slots))
    turns = _state_turns(model, policy, sequence, loads_at)
    if pending:
        yield from pending_updates(model, policy, placement, turns)
    # Resident weights that the host has updated come back in the first group's forward, in order of need.
    returning = [block for block in range(model.num_blocks) if pending and returns(policy, block)]
    last = policy.num_micro_batches - 1

    for index, visit in enumerate(sequence):
        micro_batches, group = visit.micro_batches, visit.group
        enters = visit.phase == "forward" and visit.block == 1
        if enters:
            yield from (_load_batch(m, group) for m in micro_batches)
        while returning and returning[0] <= visit.block + policy.prefetch_depth:
            yield load_resident(returning.pop(0))
        if enters:
            yield from (_embed(m, group) for m in micro_batches)
        if pending:
            yield from updates_before(index, policy, placement, turns)
        yield from _loads_before(index, sequence, slots, loads_at)
        yield from states_before(index, placement, turns, pending=pending)
        weights = f"device.slot.{slots[index]}" if slots[index] >= 0 else placement.weights[visit.block]
        for m in micro_batches:
            yield _layer_operation(visit, m, weights, policy, placement)

        if visit.phase == "forward" and visit.block == model.num_layers:
            yield from (load_resident(block) for block in returning)
            returning = []
            yield from (_loss(model, m, group, placement) for m in micro_batches)
            if last in micro_batches:
                yield from completed(policy, placement, turns, model.head)
        if visit.phase == "backward":
            if last in micro_batches:
                yield from completed(policy, placement, turns, visit.block)
            if visit.block == 1 and placement.accumulators[0]:
                yield from (_embed_backward(m, group, placement) for m in micro_batches)
                if last in micro_batches:
                    yield from completed(policy, placement, turns, 0)
    norms = tuple(_same(f"device.norm.{block}") for block in model.trained_blocks)
    if policy.clipping == "global":
        yield clip("clip", -1, norms, "")
    # What the step's log line needs, for the host.
    yield Operation(
        "report", Kind.REPORT, Resource.COMPUTE, reads=(_same("device.loss"), *norms), writes=(_same("host.report"),)
    )


def _state_turns(
    model: ModelSpec, policy: Policy, sequence: Sequence[Visit], loads_at: Mapping[int, list[int]]
) -> StateTurns:
    """Where in a step streamed states come and go, from where updated weights are needed first."""
    last = policy.num_micro_batches - 1
    loaded_at = {ready: at for at, loads in loads_at.items() for ready in loads}
    needed_at: dict[int, int] = {}
    for index, visit in enumerate(sequence):
        needed_at.setdefault(visit.block, loaded_at.get(index, index))
    ending = [index for index, visit in enumerate(sequence) if last in visit.micro_batches]
    forward = [index for index in ending if sequence[index].phase == "forward"]
    backward = [index for index in ending if sequence[index].phase != "forward"]
    return state_turns(model, policy, needed_at=needed_at, forward=forward, backward=backward)


def _knowing_documents(operation: Operation, model: ModelSpec, lowest: int) -> Operation:
    """In packed rows a layer reads the batch too: where each document begins. So it lives to the last layer's pass."""
    if operation.micro_batch < 0:
        return operation
    batch = _same(f"batch.{operation.micro_batch}")
    if operation.kind is Kind.LOSS and lowest in model.layers:
        return replace(operation, releases=tuple(name for name in operation.releases if name != batch.buffer))
    if operation.block not in model.layers:
        return operation
    ends = operation.kind is Kind.BACKWARD and operation.block == lowest
    return replace(
        operation, reads=(*operation.reads, batch), releases=(*operation.releases, *([batch.buffer] if ends else []))
    )


def _micro_batches(groups: tuple[int, ...]) -> list[range]:
    starts = [sum(groups[:index]) for index in range(len(groups))]
    return [range(start, start + size) for start, size in zip(starts, groups, strict=True)]


def _load_batch(m: int, group: int) -> Operation:
    return Operation(f"load_batch.{m}", Kind.LOAD_BATCH, Resource.H2D, -1, m, group, writes=(_same(f"batch.{m}"),))


def _embed(m: int, group: int) -> Operation:
    return Operation(
        f"forward.0.{m}", Kind.FORWARD, Resource.COMPUTE, 0, m, group,
        reads=(Access("device.weights.0", "weights.0"), _same(f"batch.{m}")), writes=(_same(f"hidden.1.{m}"),),
    )  # fmt: skip


def _layer_operation(visit: Visit, m: int, weights: str, policy: Policy, placement: Placement) -> Operation:
    block, lowest = visit.block, max(1, placement.lowest)
    level = policy.save_levels[block - 1] if block >= lowest else "input"
    parameters = Access(weights, f"weights.{block}")
    hidden, output = _same(f"hidden.{block}.{m}"), _same(f"hidden.{block + 1}.{m}")
    saved = (_same(f"saved.{block}.{m}"),) if level != "input" else ()
    name = f"{visit.phase}.{block}.{m}"
    if visit.phase == "forward":
        return Operation(
            name, Kind.FORWARD, Resource.COMPUTE, block, m, visit.group, level,
            reads=(parameters, hidden), writes=(output, *saved),
            releases=() if policy.kept_input(block, lowest) else (hidden.buffer,),
        )  # fmt: skip
    if visit.phase == "recompute":
        return Operation(
            name, Kind.RECOMPUTE, Resource.COMPUTE, block, m, visit.group, level,
            reads=(parameters, hidden), writes=(output,),
        )  # fmt: skip
    upstream = _same(f"grad_hidden.{block + 1}.{m}")
    downstream = () if block == placement.lowest else (_same(f"grad_hidden.{block}.{m}"),)
    totals = gradient_sums(placement, block)
    return Operation(
        name, Kind.BACKWARD, Resource.COMPUTE, block, m, visit.group, level, first=m == 0,
        reads=(parameters, hidden, *saved, upstream, *_added(totals, m)), writes=(*downstream, *totals),
        releases=(hidden.buffer, upstream.buffer, *(access.buffer for access in saved)),
    )  # fmt: skip


def _loss(model: ModelSpec, m: int, group: int, placement: Placement) -> Operation:
    head = model.head
    hidden = _same(f"hidden.{head}.{m}")
    totals = (*gradient_sums(placement, head), _same("device.loss"))
    if placement.tied_accumulator:
        totals = (*totals, _same(placement.tied_accumulator))
    batch = _same(f"batch.{m}")
    downstream = () if placement.lowest == head else (_same(f"grad_hidden.{head}.{m}"),)
    return Operation(
        f"loss.{m}", Kind.LOSS, Resource.COMPUTE, head, m, group, first=m == 0,
        reads=(*_head_weights(model), hidden, batch, *_added(totals, m)), writes=(*downstream, *totals),
        releases=(hidden.buffer, *([batch.buffer] if placement.lowest else [])),
    )  # fmt: skip


def _embed_backward(m: int, group: int, placement: Placement) -> Operation:
    upstream, batch = _same(f"grad_hidden.1.{m}"), _same(f"batch.{m}")
    totals = gradient_sums(placement, 0)
    return Operation(
        f"backward.0.{m}", Kind.BACKWARD, Resource.COMPUTE, 0, m, group, first=m == 0,
        reads=(upstream, batch, *_added(totals, m)), writes=totals, releases=(upstream.buffer, batch.buffer),
    )  # fmt: skip


def _same(buffer: str) -> Access:
    return Access(buffer, buffer)


def _added(totals: tuple[Access, ...], m: int) -> tuple[Access, ...]:
    """The first micro-batch of a step writes a sum, later ones read it too."""
    return () if m == 0 else totals


def _passing_buffers(model: ModelSpec, workload: Workload, policy: Policy) -> dict[str, Buffer]:
    """Buffers that live within a step: batches, layer inputs, what layers save, gradients of layer inputs."""
    rows_bytes = micro_batch_bytes(model, workload, policy.micro_batch_rows)
    input_bytes = hidden_bytes(model, workload, policy.micro_batch_rows)
    lowest = model.trained_blocks[0]
    found = []
    for m in range(policy.num_micro_batches):
        found.append(Buffer(f"batch.{m}", Tier.DEVICE, Role.BATCH, rows_bytes, -1, m, False))
        for block in range(1, model.num_blocks):
            found.append(Buffer(f"hidden.{block}.{m}", Tier.DEVICE, Role.HIDDEN, input_bytes, block, m, False))
        for block in range(lowest + 1, model.num_blocks):
            found.append(
                Buffer(f"grad_hidden.{block}.{m}", Tier.DEVICE, Role.GRAD_HIDDEN, input_bytes, block, m, False)
            )
        for block in model.backward_layers:
            level = policy.save_levels[block - 1]
            if level != "input":
                found.append(Buffer(f"saved.{block}.{m}", Tier.DEVICE, Role.SAVED, 0, block, m, False, level))
    return {buffer.name: buffer for buffer in found}
