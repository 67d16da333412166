"""Updates: what follows when a block's gradient is complete, and how weights and state get to their update and back.

A block is updated by the host, on the GPU with its state there, or on the GPU with state that streams: that comes from
host memory into a slot, is updated there, and goes back. Weights that stream too come and go with it. State may come
before the clip factor is known, so the first `state_slots` updates have theirs when they begin:

- clipping global: these states come in the last group's backward. The next step begins with their updates, low blocks
  first. The others follow inside the first group's forward, one every `state_pace` layers, so that compute finds their
  states there and slots are not held for longer; at the latest before the block's forward, or the load of its weights.
- layerwise or no clipping: updates follow their gradients from the top down inside the last group's backward, and the
  first states come in that group's forward.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from simulator.model import ModelSpec
from simulator.placement import Placement, streamed_updates
from simulator.policy import Policy
from simulator.program import Access, Kind, Operation, Resource


@dataclass(frozen=True, slots=True)
class StateTurns:
    """The blocks whose state streams, in the order of their updates, and where in a step their states come and go.

    `ahead`, `updates` and `loads` map a visit, by its number in the step, to blocks. `ahead`: their states come before
    the visit, for updates that wait for a clip factor. With clipping global, in a step that follows another: `updates`
    of states that were not there at the step's beginning stand before the visit and its loads of weights, `loads` of
    states that take over a slot behind these. A state in `at_once` comes directly before its update instead.
    """

    blocks: tuple[int, ...]
    num_slots: int
    ahead: Mapping[int, Sequence[int]]
    updates: Mapping[int, Sequence[int]] = field(default_factory=dict)
    loads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    at_once: frozenset[int] = frozenset()

    @property
    def first(self) -> tuple[int, ...]:
        """The blocks whose states are on the device when updates begin."""
        return self.blocks[: self.num_slots]

    def successor(self, block: int) -> int | None:
        """The block whose state comes into the slot that this one's leaves."""
        place = self.blocks.index(block) + self.num_slots
        return self.blocks[place] if place < len(self.blocks) else None


def state_turns(
    model: ModelSpec,
    policy: Policy,
    *,
    needed_at: Mapping[int, int],
    forward: Sequence[int],
    backward: Sequence[int],
) -> StateTurns:
    """The turns of a step. Of its visits `forward` and `backward` are those of the last micro-batch.

    `needed_at` says by block which visit is the first to need its updated weights, on the device or on their way there.
    """
    blocks, num_slots = streamed_updates(model, policy), policy.state_slots
    delayed = policy.clipping == "global"
    if not delayed:
        blocks.reverse()
    # Spread evenly, so that each delays few of the other loads.
    span, first = backward if delayed else forward, blocks[:num_slots]
    ahead: dict[int, list[int]] = {}
    for number, block in enumerate(first):
        ahead.setdefault(span[number * len(span) // len(first)], []).append(block)
    if not delayed:
        return StateTurns(tuple(blocks), num_slots, ahead)

    # The state at place i comes in the (i - num_slots + 2)-th stretch of the forward, when the one that it follows has
    # left in the stretch before. No turn before an earlier one: slots are given on in order.
    update_at, latest = {}, max(needed_at.values())
    for place in reversed(range(num_slots, len(blocks))):
        ready = math.ceil((place - num_slots + 2) * policy.state_pace)
        update_at[blocks[place]] = latest = min(latest, ready, needed_at[blocks[place]])
    updates: dict[int, list[int]] = {}
    loads: dict[int, list[int]] = {}
    at_once = set()
    for place in range(num_slots, len(blocks)):
        before, block = blocks[place - num_slots], blocks[place]
        comes = math.ceil((place - num_slots + 1) * policy.state_pace)
        load_at = max(min(comes, update_at[block] - 1), update_at.get(before, 0))
        updates.setdefault(update_at[block], []).append(block)
        if load_at >= update_at[block]:
            at_once.add(block)
        else:
            loads.setdefault(load_at, []).append(block)
    return StateTurns(tuple(blocks), num_slots, ahead, updates, loads, frozenset(at_once))


def pending_updates(model: ModelSpec, policy: Policy, placement: Placement, turns: StateTurns) -> Iterator[Operation]:
    """What a step begins with under clipping global: all updates but those whose state is not there yet.

    The host's first: operations are launched in this order, and launches wait for room in the GPU's queue. Then
    streamed states: the sooner one leaves, the sooner the next one comes.
    """
    others = [block for block in model.trained_blocks if block not in placement.state_slots]
    for block in others:
        if policy.optimizer_homes[block] == "host":
            yield update(policy, placement, block)
    for block in turns.first:
        yield from _streamed_update(policy, placement, block)
    for block in others:
        if policy.optimizer_homes[block] != "host":
            yield update(policy, placement, block)


def updates_before(visit: int, policy: Policy, placement: Placement, turns: StateTurns) -> Iterator[Operation]:
    """Updates of states that take over slots, clipping global: before a visit and its loads of weights."""
    for block in turns.updates.get(visit, ()):
        if block in turns.at_once:
            yield from load_state(placement, block)
        yield from _streamed_update(policy, placement, block)


def states_before(visit: int, placement: Placement, turns: StateTurns, *, pending: bool) -> Iterator[Operation]:
    """States that come before a visit. What its weights need goes first."""
    for block in (*(turns.loads.get(visit, ()) if pending else ()), *turns.ahead.get(visit, ())):
        yield from load_state(placement, block)


def completed(policy: Policy, placement: Placement, turns: StateTurns, block: int) -> Iterator[Operation]:
    """What follows when a block's gradient is complete: rounding and norm, its way home, perhaps its update."""
    totals = [*gradient_sums(placement, block)]
    if not totals:
        return  # frozen
    if block == 0 and placement.tied_accumulator:
        totals.append(Access.own(placement.tied_accumulator))
    gradient, norm = Access(placement.gradients[block], f"gradient.{block}"), Access.own(f"device.norm.{block}")
    yield Operation(
        f"finish_gradient.{block}", Kind.FINISH_GRADIENT, Resource.COMPUTE, block,
        reads=tuple(totals), writes=(gradient, norm),
    )  # fmt: skip
    if policy.optimizer_homes[block] == "host":
        yield Operation(
            f"store_gradient.{block}", Kind.STORE_GRADIENT, Resource.D2H, block,
            reads=(gradient,), writes=(Access(f"host.gradient.{block}", f"gradient.{block}"),),
        )  # fmt: skip
    if policy.clipping == "global":
        return
    yield clip(f"clip.{block}", block, (norm,), f".{block}")
    if block in placement.state_slots:
        yield from _streamed_update(policy, placement, block)
        successor = turns.successor(block)
        if successor is not None:
            yield from load_state(placement, successor)
    else:
        yield update(policy, placement, block)
    if returns(policy, block):
        yield load_resident(block)


def clip(name: str, block: int, norms: tuple[Access, ...], suffix: str) -> Operation:
    """One clip factor of all norms, or a block's own."""
    scalars = (Access.own(f"device.scalars{suffix}"), Access.own(f"host.scalars{suffix}"))
    return Operation(name, Kind.CLIP, Resource.COMPUTE, block, reads=norms, writes=scalars)


def update(policy: Policy, placement: Placement, block: int) -> Operation:
    """A block's update, on the host or where its weights and its state are on the device."""
    on_host = policy.optimizer_homes[block] == "host"
    tier = "host" if on_host else "device"
    gradient = f"host.gradient.{block}" if on_host else placement.gradients[block]
    suffix = "" if policy.clipping == "global" else f".{block}"
    weights = placement.update_slots.get(block, f"{tier}.weights.{block}")
    state = placement.state_slots.get(block, f"{tier}.state.{block}")
    changed = (Access(weights, f"weights.{block}"), Access(state, f"state.{block}"))
    return Operation(
        f"update.{block}", Kind.UPDATE, Resource.HOST if on_host else Resource.COMPUTE, block,
        reads=(Access(gradient, f"gradient.{block}"), Access.own(f"{tier}.scalars{suffix}"), *changed),
        writes=changed,
    )  # fmt: skip


def load_state(placement: Placement, block: int) -> Iterator[Operation]:
    """A block's state into its slot, and its weights where these stream too."""
    yield _copy(f"load_state.{block}", Kind.LOAD_STATE, block, "host.state", placement.state_slots[block])
    if block in placement.update_slots:
        target = placement.update_slots[block]
        yield _copy(f"load_weights.{block}.update", Kind.LOAD_WEIGHTS, block, "host.weights", target)


def _streamed_update(policy: Policy, placement: Placement, block: int) -> Iterator[Operation]:
    """An update in a slot, and what it has changed on its way home: weights first, a forward waits for them."""
    yield update(policy, placement, block)
    if block in placement.update_slots:
        source = placement.update_slots[block]
        yield _copy(f"store_weights.{block}", Kind.STORE_WEIGHTS, block, "host.weights", source, home=True)
    source = placement.state_slots[block]
    yield _copy(f"store_state.{block}", Kind.STORE_STATE, block, "host.state", source, home=True)


def _copy(name: str, kind: Kind, block: int, host: str, slot: str, *, home: bool = False) -> Operation:
    content = f"{host.removeprefix('host.')}.{block}"
    ends = Access(f"{host}.{block}", content), Access(slot, content)
    source, target = reversed(ends) if home else ends
    return Operation(name, kind, Resource.D2H if home else Resource.H2D, block, reads=(source,), writes=(target,))


def load_weights(target: str, block: int, passage: str) -> Operation:
    """A block's weights from the host into their resident place or a slot."""
    return _copy(f"load_weights.{block}.{passage}", Kind.LOAD_WEIGHTS, block, "host.weights", target)


def load_resident(block: int) -> Operation:
    """What the host has updated, back in its resident place."""
    return load_weights(f"device.weights.{block}", block, "updated")


def returns(policy: Policy, block: int) -> bool:
    """Whether a block's updated weights come back from the host into their resident place."""
    return policy.optimizer_homes[block] == "host" and policy.weight_homes[block] == "device"


def gradient_sums(placement: Placement, block: int) -> tuple[Access, ...]:
    """The block's sum of gradients; none where it is frozen."""
    buffer = placement.accumulators[block]
    return (Access(buffer, f"gradient_sum.{block}"),) if buffer else ()
