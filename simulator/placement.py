"""Placement: which buffer holds what under a policy, and how many bytes each persistent buffer takes.

The builder reads it to write programs, the executor to allocate, the planner to sum memory: one table for all.
"""

from dataclasses import dataclass, field

from simulator.activations import activation_buffers
from simulator.formats import PRECISIONS, gradient_bytes, state_bytes
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.program import Buffer, Role, Tier


@dataclass(frozen=True, slots=True)
class Placement:
    """Names of the buffers that hold each block's values; '' where a block has none, as a frozen one no gradient."""

    buffers: dict[str, Buffer] = field(repr=False)
    weights: tuple[str, ...]  # resident on the device, or ''
    slots: tuple[str, ...]
    accumulators: tuple[str, ...]  # where a block's gradient is summed over micro-batches
    gradients: tuple[str, ...]  # where the completed gradient stands on the device
    slabs: tuple[str, ...]
    state_slots: dict[int, str]  # of blocks whose state streams: where it is on the device
    update_slots: dict[int, str]  # of those whose weights stream too: where these are updated
    tied_accumulator: str  # the head's share of a tied embedding's gradient, or ''
    lowest: int  # the lowest trained block: no gradient passes below it


def place(model: ModelSpec, workload: Workload, policy: Policy) -> Placement:
    """Lay out all persistent buffers of a policy that has passed check_policy."""
    precision = PRECISIONS[workload.precision]
    completed_bytes = gradient_bytes(workload.precision, policy.gradient_format)
    optimizer_bytes = state_bytes(workload.precision, policy.state_format)
    elements = [model.block(block).num_elements for block in range(model.num_blocks)]
    same_format = completed_bytes == precision.accumulator
    written_once = gradients_written_once(workload, policy)
    buffers: dict[str, Buffer] = {}

    def add(name: str, tier: Tier, role: Role, num_bytes: int, block: int = -1) -> str:
        buffers[name] = Buffer(name, tier, role, num_bytes, block)
        return name

    weights, accumulators, gradients = [], [], []
    shared_accumulator = 0
    # Layers on their way to the host take slabs in turn; the edges, few and large, have a buffer of their own.
    trained = set(model.trained_blocks)
    in_transit = [block for block in model.layers if block in trained and policy.optimizer_homes[block] == "host"]
    slab_of = {block: f"device.slab.{turn % policy.gradient_slabs}" for turn, block in enumerate(in_transit)}
    for block in range(model.num_blocks):
        count = elements[block]
        optimizer = policy.optimizer_homes[block]
        on_host = block in trained and optimizer == "host"
        resident = policy.weight_homes[block] == "device"
        weights.append(
            add(f"device.weights.{block}", Tier.DEVICE, Role.WEIGHTS, count * precision.weight, block)
            if resident
            else ""
        )
        if on_host or not resident:
            add(f"host.weights.{block}", Tier.HOST, Role.WEIGHTS, count * precision.weight, block)
        if block not in trained:  # weights are all it has
            accumulators.append("")
            gradients.append("")
            continue
        tier = Tier.DEVICE if optimizer == "device" else Tier.HOST
        add(f"{tier}.state.{block}", tier, Role.STATE, count * optimizer_bytes, block)
        if on_host:
            add(f"host.gradient.{block}", Tier.HOST, Role.GRADIENT, count * completed_bytes, block)

        slab = slab_of.get(block, "")
        at_once = summed_at_once(model, policy, block)
        if at_once and (same_format or (written_once and block in model.layers)):
            accumulator = gradient = slab or f"device.gradient.{block}"
        elif at_once:
            shared_accumulator = max(shared_accumulator, count * precision.accumulator)
            accumulator = "device.accumulator"
            gradient = slab or f"device.gradient.{block}"
        else:
            accumulator = f"device.accumulator.{block}"
            add(accumulator, Tier.DEVICE, Role.ACCUMULATOR, count * precision.accumulator, block)
            if same_format or not on_host:
                gradient = accumulator  # rounded in place, so that its memory is not needed twice
            else:
                gradient = slab or f"device.gradient.{block}"
        if gradient.startswith("device.gradient"):
            add(gradient, Tier.DEVICE, Role.GRADIENT, count * completed_bytes, block)
        accumulators.append(accumulator)
        gradients.append(gradient)
    if shared_accumulator:
        add("device.accumulator", Tier.DEVICE, Role.ACCUMULATOR, shared_accumulator)
    tied = ""
    if model.tied_embeddings and 0 in trained:
        tied = add("device.accumulator.tied", Tier.DEVICE, Role.ACCUMULATOR, elements[0] * precision.accumulator, 0)

    streamed = [block for block in model.layers if policy.weight_homes[block] == "host"]
    slot_bytes = max((elements[block] for block in streamed), default=0) * precision.weight
    slots = tuple(
        add(f"device.slot.{index}", Tier.DEVICE, Role.SLOT, slot_bytes)
        for index in range(min(policy.prefetch_depth + 1, len(streamed)))
    )
    # States take their slots in turn. Where a layer's weights stream too, the slot has room for them.
    by_link = streamed_updates(model, policy)
    turn_of = {block: turn % policy.state_slots for turn, block in enumerate(by_link)}
    state_slots = {block: f"device.state_slot.{turn}" for block, turn in turn_of.items()}
    update_slots = {block: f"device.update_slot.{turn_of[block]}" for block in by_link if not weights[block]}
    for role, slot_of, width in (
        (Role.STATE_SLOT, state_slots, optimizer_bytes),
        (Role.UPDATE_SLOT, update_slots, precision.weight),
    ):
        largest = max((elements[block] for block in slot_of), default=0)
        for name in sorted(set(slot_of.values())):
            add(name, Tier.DEVICE, role, largest * width)
    through_slabs = [block for block in in_transit if gradients[block] == slab_of[block]]
    slab_bytes = max((elements[block] for block in through_slabs), default=0) * completed_bytes
    slabs = tuple(
        add(f"device.slab.{index}", Tier.DEVICE, Role.SLAB, slab_bytes)
        for index in range(min(policy.gradient_slabs, len(through_slabs)))
    )
    buffers |= {buffer.name: buffer for buffer in activation_buffers(model, workload, policy)}
    for block in model.trained_blocks:
        add(f"device.norm.{block}", Tier.DEVICE, Role.SCALARS, 8, block)
    add("device.loss", Tier.DEVICE, Role.SCALARS, 8)
    for suffix in [""] if policy.clipping == "global" else [f".{block}" for block in model.trained_blocks]:
        add(f"device.scalars{suffix}", Tier.DEVICE, Role.SCALARS, 64)
        add(f"host.scalars{suffix}", Tier.HOST, Role.SCALARS, 64)
    add("host.report", Tier.HOST, Role.SCALARS, 64)
    # Two steps' batches: one is read by copies while the next is filled.
    add("host.batches", Tier.HOST, Role.BATCH, 2 * batch_bytes(workload.tokens_per_step, packed=workload.packed))
    return Placement(
        buffers=buffers,
        weights=tuple(weights),
        slots=slots,
        accumulators=tuple(accumulators),
        gradients=tuple(gradients),
        slabs=slabs,
        state_slots=state_slots,
        update_slots=update_slots,
        tied_accumulator=tied,
        lowest=model.trained_blocks[0],
    )


def summed_at_once(model: ModelSpec, policy: Policy, block: int) -> bool:
    """Whether all micro-batches of a step pass a block's backward one after the other, so that one sum serves many."""
    one_pass = not policy.depth_first(block, model.num_layers) or policy.num_micro_batches == 1
    return len(policy.groups) == 1 and one_pass


def gradients_written_once(workload: Workload, policy: Policy) -> bool:
    """Whether a layer's backward writes its gradient as it stays: in a step of one micro-batch there is nothing to sum.

    Its products are rounded to bf16 as they are formed, once, like a sum. Embedding and head sum all the same, over
    tokens and chunks.
    """
    return policy.num_micro_batches == 1 and (workload.precision, policy.gradient_format) == ("bf16", "bf16")


def streamed_updates(model: ModelSpec, policy: Policy) -> list[int]:
    """Blocks that are updated on the GPU with state from host memory, in ascending order."""
    return [block for block in model.trained_blocks if policy.optimizer_homes[block] == "streamed"]


def batch_bytes(tokens: int, *, packed: bool = False) -> int:
    """Token ids and labels, and in packed rows positions, 8 bytes each; and the loss scale."""
    return tokens * (24 if packed else 16) + 8


def micro_batch_bytes(model: ModelSpec, workload: Workload, rows: int) -> int:
    """What the device holds of one micro-batch while it passes through a step, layers' inputs aside.

    Packed rows have rotary tables of their own, two a kind of rotary embedding, and what attention knows documents by:
    where a kernel for documents of several lengths is missing, one byte for every pair of tokens of a row.
    """
    tokens = rows * workload.sequence_length
    num_bytes = batch_bytes(tokens, packed=workload.packed)
    if workload.packed:
        kinds = {model.block(block).variant for block in model.layers}
        tables = 2 * len(kinds) * tokens * model.head_dim * PRECISIONS[workload.precision].weight
        pairs = 0 if workload.precision == "bf16" else len(kinds) * tokens * workload.sequence_length
        num_bytes += tables + pairs
    return num_bytes
