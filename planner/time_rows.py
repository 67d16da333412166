"""Time rows: a relaxation of the replayed step, so that its least value bounds every policy of the outline from below.

A step is cut at the turns between forward and backward. The pieces follow each other on the compute stream, and each
takes at least as long as any one resource needs for what must happen within it:

- Compute: the operations of the piece; copies beside them slow them to `compute_beside_copies`.
- Link: at a turn the slots hold that many layers, whatever the order; all other streamed layers come before the next
  turn, the first after a layer of the piece has freed its slot, the last before the piece's last layer.
- Exact clipping: a host update waits for the norm, which ends a step, and comes before its block's next forward, in the
  first group. Updates run low blocks first, then loads, then the forward: a flow shop with a row for every block.
- States that stream: when updates begin, the slots hold that many. All others come in the piece of the updates, each
  after another one has been updated and has left.
- Depth-first layers: but for the first micro-batch's forward and the last one's backward, their passes come between a
  group's first and last loss.
- Gradients that leave through slabs: all but the last few have left when the backward ends.
- Cycles: from a layer's forward to its gradient, its store, update, load and next forward is at most one step.
- Inputs that wait on the host: in a piece all but one have left, or all but the stages' come back. What layers save
  beside them leaves after a first pass and before the loss.
- Over the whole step: each resource's work, both link directions at their common rate, host DRAM's traffic.
- Host updates run slower beside copies where both ask for more than host DRAM moves (planner/contention.py).

Left out: links that idle because slots are full, which layers stream (loads are averaged over a piece), contention
outside these rows. The replay knows all of it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from planner.base_policy import GRADIENT_SLABS
from planner.coefficients import BlockCosts, Coefficients
from planner.keeping import ON_HOST, Keeping
from planner.mip import Linear, MixedIntegerProgram, total
from planner.state_rows import add_later_states
from planner.variables import Variables
from planner.work import Work
from simulator.activations import NUM_STAGES
from simulator.replay import Price

PassName = Literal["forward", "backward"]


def add_time(mip: MixedIntegerProgram, coefficients: Coefficients, variables: Variables) -> Linear:
    """Add the step and its rows; returns the step's seconds."""
    rows = _TimeRows(mip, coefficients, variables, mip.quantity("step_seconds"), Work(coefficients, variables))
    if coefficients.sharing.inline:
        work = total([rows.work.compute, rows.work.h2d, rows.work.d2h, rows.work.host_updates])
        mip.at_least("one thread does everything", rows.step, work)
    else:
        rows.add_totals()
        rows.add_pieces()
    return rows.step


@dataclass(slots=True)
class _TimeRows:
    mip: MixedIntegerProgram
    c: Coefficients
    variables: Variables
    step: Linear
    work: Work

    def add_totals(self) -> None:
        """Each resource works for less than a step."""
        mip, step = self.mip, self.step
        mip.at_least("compute beside loads", step, self.work.compute + self.work.slowed * self.work.h2d)
        mip.at_least("compute beside stores", step, self.work.compute + self.work.slowed * self.work.d2h)
        mip.at_least("host to device", step, self.work.h2d + self.work.both * self.work.d2h)
        mip.at_least("device to host", step, self.work.d2h + self.work.both * self.work.h2d)
        slowed = self.work.copies(self.work.losses.seconds) - self.work.batches_beside
        mip.at_least("host updates beside copies", step, self.work.host_updates + slowed)
        rate = self.work.dram_rate
        updates = self.work.host_sum(lambda costs: costs.update_host.dram_bytes / rate)
        mip.at_least("host DRAM", step, updates + self.work.copies(lambda price: price.dram_bytes / rate))

    # Pieces

    def add_pieces(self) -> None:
        """Pieces from one norm to the next, and what ties a step to the one before."""
        mip, c = self.mip, self.c
        groups = c.outline.groups
        first = self._first_forward()
        middle = []
        for (before, group), count in Counter(pairwise(groups)).items():
            piece = mip.quantity(f"forward_seconds_{before}_{group}")
            edge = before * c.embed_backward.seconds + group * c.embed.seconds
            self._add_piece(
                piece, f"forward of {group} after {before}", edge, self.work.forwards(group), group, "forward"
            )
            middle.append(count * piece)
        for group, count in Counter(groups[:-1]).items():
            piece = mip.quantity(f"backward_seconds_{group}")
            edge = group * c.loss.seconds
            work = self.work.backwards(group) + self.work.recomputes(group)
            self._add_piece(piece, f"backward of {group}", edge, work, group, "backward")
            middle.append(count * piece)
        if c.outline.depth_first:
            middle.append(self.work.turns(groups[0]) + (groups[0] - 1) * c.loss.seconds)
        last = self._last_backward()
        tail = groups[-1] * c.embed_backward.seconds + c.block_costs[0].finish_seconds
        embedding_complete = total(middle) + last + tail
        if c.delayed:
            self._add_window(first)
            rest = Linear({}, c.clip_seconds)
        else:
            rest = c.block_costs[0].update_device_seconds * (1.0 - self.variables.embedding)
            rest += c.block_costs[0].clip_seconds + c.report_seconds
        mip.at_least("pieces of the step", self.step, first + embedding_complete + rest)
        self._add_cycles(total(middle), embedding_complete)

    def _add_piece(self, piece: Linear, title: str, edge: float, work: Linear, group: int, name: PassName) -> None:
        """`edge`: compute before the piece's first layer; `work`: that of its layers."""
        mip = self.mip
        reload, reload_dram = self.work.reload, self.work.reload_dram
        if name == "backward":
            reload, reload_dram = self._returning(lambda costs: costs.load.seconds), self._returning_dram
        mip.at_least(f"{title}: compute", piece, work + edge + self.work.slowed * reload)
        mip.at_least(f"{title}: DRAM", piece, reload_dram)
        mip.at_least(f"{title}: loads", piece, reload + self._around_loads(edge, group, name))
        # An input's copy ends before the next pass begins; inputs come back as stages are free.
        if name == "forward":
            leaving = self.work.leaving(group, lambda price: price.seconds) - self._longest(self.c.stores)
            mip.at_least(f"{title}: compute beside leaving inputs", piece, work + edge + self.work.slowed * leaving)
            mip.at_least(f"{title}: leaving inputs", piece, leaving + self.work.both * reload)
            if self.c.outline.saved_waits:
                # It has left before the loss, and begins to after a layer's pass.
                left = self.work.saved_leaving(group) + min(self._seconds("forward"))
                mip.at_least(f"{title}: what is saved leaves", piece, left + edge)
        else:
            # Stages may be full by then.
            back = self.work.coming_back(group, lambda price: price.seconds) - NUM_STAGES * self._longest(self.c.loads)
            mip.at_least(f"{title}: compute beside inputs", piece, work + edge + self.work.slowed * (reload + back))
            mip.at_least(f"{title}: inputs", piece, reload + back)

    def _longest(self, copies: Mapping[Keeping, Price]) -> float:
        """Of one layer's activations in one micro-batch, as far as the outline has them wait."""
        return max((copies[how].seconds for how in self.c.levels if how in ON_HOST), default=0.0)

    def _around_loads(self, edge: float, group: int, name: PassName) -> Linear:
        """Compute of a piece before its first load and after its last one: a layer's pass each."""
        if self.c.outline.checkpoint_interval > 1 or self.c.backward_kinds != self.c.kinds:
            return Linear()
        return (edge + 2 * group * min(self._seconds(name))) * self.variables.any_reloads

    def _returning(self, cost: Callable[[BlockCosts], float]) -> Linear:
        """A cost of the loads that a backward begins with."""
        return self.work.least(cost) * self.variables.returns

    @property
    def _returning_dram(self) -> Linear:
        return self._returning(lambda costs: costs.load.dram_bytes / self.work.dram_rate)

    def _seconds(self, name: PassName) -> list[float]:
        """Of one micro-batch in one layer, for each kind and level."""
        return [getattr(costs, f"{name}_seconds") for costs in self.c.level_costs.values()]

    def _first_forward(self) -> Linear:
        mip, c = self.mip, self.c
        first, group = mip.quantity("first_forward_seconds"), c.outline.groups[0]
        work, edge = self.work.forwards(group), group * c.embed.seconds
        if c.delayed:
            work, edge = work + self.work.device_updates, edge + c.report_seconds
        self._add_piece(first, "first forward", edge, work, group, "forward")
        if c.delayed:
            # The weights of host-updated layers come in this piece too, each after its update.
            weights = self._layers_sum(lambda costs: costs.load.seconds)
            moved = self.work.host_sum(lambda costs: costs.update_host.dram_bytes + costs.load.dram_bytes)
            # And all but the last of what leaves to wait goes.
            leaving = self.work.leaving(group, lambda price: price.seconds) - self._longest(self.c.stores)
            moved += self.work.leaving(group, lambda price: price.dram_bytes)
            moved -= max((c.stores[how].dram_bytes for how in c.levels if how in ON_HOST), default=0.0)
            after = c.losses(group) * min(self._seconds("forward"))
            add_later_states(
                mip, c, self.variables, first, "first forward", after=after, weights=weights, leaving=leaving,
                moved_bytes=moved,
            )  # fmt: skip
        return first

    def _last_backward(self) -> Linear:
        mip, c = self.mip, self.c
        last, group = mip.quantity("last_backward_seconds"), c.outline.groups[-1]
        work = self.work.backwards(group) + self.work.recomputes(group)
        work += sum(costs.finish_seconds + costs.clip_seconds for costs in c.block_costs[1:])
        if not c.delayed:
            embedding = c.block_costs[0].update_device_seconds * (1.0 - self.variables.embedding)
            work += self.work.device_updates - embedding
        losses = c.losses(group)
        self._add_piece(last, "last backward", losses * c.loss.seconds, work, group, "backward")
        if not c.delayed:
            completes = losses * (c.loss.seconds + min(self._seconds("backward")))
            add_later_states(mip, c, self.variables, last, "last backward", before=completes)
        if c.memory.slab_bytes and not c.leaves_from_sums:
            stores = [c.block_costs[layers[0]].store.seconds for layers in c.kinds.values()]
            left = self._layers_sum(lambda costs: costs.store.seconds) - GRADIENT_SLABS * max(stores)
            reload = self._returning(lambda costs: costs.load.seconds)
            mip.at_least("last backward: stores", last, left + self.work.both * reload)
            # Stores may go on beside the compute after the last load: there they slow none.
            around, beside = self._around_loads(losses * c.loss.seconds, group, "backward"), left
            if around.terms:
                beside -= group * min(self._seconds("backward"))
            mip.at_least("last backward: loads beside stores", last, reload + around + self.work.both * beside)
        return last

    def _below_lowest(self, kind: int) -> Linear:
        """At most so many layers lie below the lowest of a kind's host-updated layers.

        With n of them the lowest is at most the kind's n-th from the top: a line in n, or the line above it where a
        kind's layers lie unevenly.
        """
        positions = self.c.kinds[kind]
        below = [position - 1 for position in reversed(positions)]
        slope = (below[-1] - below[0]) / max(1, len(below) - 1)
        highest = max(layers - slope * n for n, layers in enumerate(below, start=1))
        return slope * self.variables.host_layers[kind] + highest

    def _layers_sum(self, cost: Callable[[BlockCosts], float]) -> Linear:
        """A cost summed over the host-updated layers. Frozen ones wait for no update, so no chain of them holds."""
        costs, counts = self.c.block_costs, self.variables.host_layers
        return total(cost(costs[layers[0]]) * counts[kind] for kind, layers in self.c.trained_kinds.items())

    def _add_window(self, first: Linear) -> None:
        """From the norm to the first loss: updates, loads and forwards of host-updated blocks are a flow shop.

        Times are linear in a layer's place among them, so the rows for the lowest and the topmost one imply all others.
        """
        c, v, rate = self.c, self.variables, self.work.dram_rate
        group, slowest = c.outline.groups[0], max(self._seconds("forward"))
        embedding, head = c.block_costs[0], c.block_costs[-1]
        updated = embedding.update_host.seconds * v.embedding
        loaded = updated + embedding.load.seconds * v.embedding
        moved = (embedding.update_host.dram_bytes + embedding.load.dram_bytes) / rate * v.embedding

        def row(title: str, chain: Linear, rest: Linear) -> None:
            self.mip.at_least(f"window of {title}", first, chain + rest)

        row("the embedding", loaded, self.work.forwards(group) + group * c.embed.seconds)
        for kind, layers in c.trained_kinds.items():
            # The load waits for its own update, and for the load before it.
            costs, on_host = c.block_costs[layers[0]], v.any_host[kind]
            rest = self.work.forwards(group) - group * slowest * self._below_lowest(kind)
            alone = costs.update_host.seconds + costs.load.seconds
            traffic = costs.update_host.dram_bytes + costs.load.dram_bytes
            row(f"the lowest layer of kind {kind}: update", updated + alone * on_host, rest)
            row(f"the lowest layer of kind {kind}: load", loaded + costs.load.seconds * on_host, rest)
            row(f"the lowest layer of kind {kind}: DRAM", moved + traffic / rate * on_host, rest)
        updates = updated + self._layers_sum(lambda costs: costs.update_host.seconds)
        loads = self._layers_sum(lambda costs: costs.load.seconds)
        update, load = (self.work.least(cost) for cost in (lambda b: b.update_host.seconds, lambda b: b.load.seconds))
        lost = self.work.losses.seconds
        slowed = self._beside_loads(updates) + lost(embedding.load) * v.embedding
        moves = self._layers_sum(lambda costs: (costs.update_host.dram_bytes + costs.load.dram_bytes) / rate)
        for rest in self._after_topmost(group):
            row("the topmost layer: updates", slowed + self._last_load, rest)
            row("the topmost layer: updates beside copies", slowed, self._others_until(load * v.any_layer + rest))
            row("the topmost layer: loads", loaded + loads, rest)
            row("the topmost layer: loads after one update", updated + update * v.any_layer + loads, rest)
            row("the topmost layer: DRAM", moved + moves, rest)
        row("the head: updates", slowed, (head.update_host.seconds + head.load.seconds) * v.head)
        slowed += (head.update_host.seconds + lost(head.load)) * v.head
        row("the head: updates beside copies", slowed, self._others_until(head.load.seconds * v.head))
        row("the head: loads", loaded + loads + head.load.seconds * v.head, Linear())
        traffic = head.update_host.dram_bytes + head.load.dram_bytes
        row("the head: DRAM", moved + moves + traffic / rate * v.head, Linear())

    def _beside_loads(self, updates: Linear) -> Linear:
        """Updates with what they lose to the loads of layers, which run beside them or after them."""
        lost = self.work.losses.seconds
        return updates + self._layers_sum(lambda costs: lost(costs.load))

    @property
    def _last_load(self) -> Linear:
        """What the last of these loads takes beyond that: it follows all updates."""
        lost = self.work.losses.seconds
        return self.work.least(lambda costs: costs.load.seconds - lost(costs.load)) * self.variables.any_layer

    def _others_until(self, rest: Linear) -> Linear:
        """What updates lose to states and to what leaves to wait, in the window, and what follows the last update.

        All copies but the last to leave come in the window; those in `rest`, which follows, slow no update.
        """
        c, v, losses = self.c, self.variables, self.work.losses
        trained = [c.block_costs[layers[0]] for layers in c.trained_kinds.values()]
        state = min((losses.seconds(b.load_state) + losses.seconds(b.store_state) for b in trained), default=0.0)
        leaving = self.work.leaving(c.outline.groups[0], losses.seconds)
        last = max((losses.seconds(c.stores[how]) for how in c.levels if how in ON_HOST), default=0.0)
        others = state * v.later_states + leaving - (last + self.work.batches_beside)
        return others + (1 - losses.loads - losses.stores) * rest

    def _after_topmost(self, group: int) -> Iterator[Linear]:
        """Compute from the weights of the topmost host-updated layer to the first loss, from below."""
        c, v, seconds = self.c, self.variables, self._seconds("forward")
        yield c.losses(group) * min(seconds) * v.any_layer
        if c.outline.depth_first:  # unless one of these is the topmost, the pass of all of them follows
            passes = group * min(seconds) * v.any_layer + min(seconds) * v.depth_first
            most = (group + c.model.num_layers) * min(seconds)
            yield passes - most * (v.any_depth_first_host + (1.0 - v.any_layer))

    def _add_cycles(self, middle: Linear, embedding_complete: Linear) -> None:
        """From a block's forward to its gradient, its store, update and load, and its next forward."""
        c, v = self.c, self.variables
        first = c.outline.groups[0]
        forwards, slowest = self.work.forwards(first), first * max(self._seconds("forward"))
        one_forward = c.losses(first) * min(self._seconds("forward")) * v.any_layer
        stored = self._stored()
        update, load = (self.work.least(cost) for cost in (lambda b: b.update_host.seconds, lambda b: b.load.seconds))
        embedding = c.block_costs[0]
        edge = (embedding.store.seconds + embedding.update_host.seconds) * v.embedding

        def row(title: str, *parts: Linear) -> None:
            self.mip.at_least(f"cycle of {title}", self.step, total(parts))

        # With n host-updated layers the lowest is at most the n-th from the top.
        from_lowest = forwards - slowest * (c.model.num_layers - v.num_host)
        row("the lowest layer", stored, (update + load) * v.any_layer, from_lowest, middle)
        updates = self._layers_sum(lambda costs: costs.update_host.seconds)
        if c.delayed:
            # Stores, updates and loads all keep the embedding before the layers, and low layers before high ones.
            loads = self._layers_sum(lambda costs: costs.load.seconds)
            row(
                "the lowest layer after the embedding", stored, edge, (update + load) * v.any_layer, from_lowest, middle
            )
            chain = self._beside_loads(updates) + self._last_load
            row("the topmost layer: updates", stored, edge, chain, one_forward, middle)
            row("the topmost layer: loads", stored, edge, update * v.any_layer, loads, one_forward, middle)
        else:
            # Updates follow gradients from the top down: those of the layers above come first.
            last = c.losses(c.outline.groups[-1])
            complete = last * c.loss.seconds + last * min(self._seconds("backward")) * v.any_layer
            store = self.work.least(lambda costs: costs.store.seconds)
            chain = updates + (store + load) * v.any_layer
            row("the lowest layer: updates", complete, chain, from_lowest, middle)
        for kind, layers in c.trained_kinds.items() if len(c.kinds) > 1 else ():
            # Kinds that alternate, or lie one above the other, have a lowest layer each.
            costs, below = c.block_costs[layers[0]], self._below_lowest(kind)
            begin = forwards - slowest * below + middle
            end = self._backwards_to(below)
            alone = costs.store.seconds + costs.update_host.seconds + costs.load.seconds
            row(f"the lowest layer of kind {kind}", alone * v.any_host[kind], begin, end)
        row(
            "the embedding",
            edge + embedding.load.seconds * v.embedding,
            forwards + first * c.embed.seconds,
            embedding_complete,
        )

    def _backwards_to(self, below: Linear) -> Linear:
        """From the last group's first loss to the gradient of a layer with at most `below` layers below it."""
        last = self.c.outline.groups[-1]
        left = last * max(self._seconds("backward")) * below
        turn = self.c.losses(last) * self.c.loss.seconds + self.c.block_costs[-1].finish_seconds
        return self.work.backwards(last) - left + (turn + self.work.least(lambda costs: costs.finish_seconds))

    def _stored(self) -> Linear:
        """From the last group's first loss to the end of the store of the lowest host-updated layer, which is last.

        All that streams is host-updated, so it has come again by then: unless frozen layers stream.
        """
        mip, c, v = self.mip, self.c, self.variables
        reload = reload_dram = Linear()
        if c.trained_kinds == c.kinds:
            reload, reload_dram = self.work.reload, self.work.reload_dram
        stored, last = mip.quantity("stored_seconds"), c.losses(c.outline.groups[-1])
        store = self.work.least(lambda costs: costs.store.seconds) * v.any_layer
        turn, one_backward = last * c.loss.seconds, last * min(self._seconds("backward"))
        stores = self._layers_sum(lambda costs: costs.store.seconds)
        mip.at_least("stored: backward", stored, self._backwards_to(c.model.num_layers - v.num_host) + store)
        mip.at_least("stored: stores", stored, stores + turn + one_backward * v.any_layer)
        ends = 0.0 if c.outline.checkpoint_interval > 1 else turn + 2 * one_backward
        if c.trained_kinds != c.kinds:
            ends = 0.0
        mip.at_least("stored: loads", stored, reload + ends * v.any_reloads + store)
        mip.at_least("stored: stores beside loads", stored, stores + self.work.both * reload)
        mip.at_least("stored: loads beside stores", stored, reload + self.work.both * stores)
        moved = self._layers_sum(lambda costs: costs.store.dram_bytes / self.work.dram_rate)
        mip.at_least("stored: DRAM", stored, moved + reload_dram)
        return stored
