"""Coefficients: the seconds and bytes of every operation and buffer under one outline, for the mixed-integer program.

An outline is what the search enumerates outside the program: it fixes the size of an operation, so that all times and
bytes are data there. Prices come from the simulator's Pricing and sizes from its placement, never from a second table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from planner.keeping import DEPTH_FIRST, ON_HOST, Keeping, allowed_levels, depth_first, save_level
from planner.outlines import Outline
from simulator.formats import PRECISIONS
from simulator.model import ModelSpec
from simulator.placement import micro_batch_bytes, place
from simulator.policy import (
    HEAD_CHUNK_TOKENS,
    MIN_STATE_SLOTS,
    Home,
    OptimizerHome,
    Policy,
    Workload,
)
from simulator.program import Buffer, Kind, Operation, Resource, Role, Tier
from simulator.replay import Price, Sharing

GRADIENT_SLABS = 2


class Prices(Protocol):
    """What the simulator's Pricing gives for one policy; tests may give a table of their own."""

    def price(self, operation: Operation) -> Price: ...

    def size(self, buffer: Buffer) -> int: ...

    @property
    def sharing(self) -> Sharing: ...


class LevelCosts(NamedTuple):
    """One micro-batch in one layer at one save level."""

    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int


class BlockCosts(NamedTuple):
    """One block once a step: its gradient's rounding and way home, its update on either side, its weights' way in.

    And its state's way to the device and back, where that streams.
    """

    finish_seconds: float
    clip_seconds: float  # its own clip factor: 0 where one serves all
    update_device_seconds: float
    update_host: Price
    load: Price
    store: Price
    load_state: Price
    store_state: Price


class BlockBytes(NamedTuple):
    """What a block adds to each tier when its optimizer, or its state alone, moves to the host; slabs, slots apart."""

    device: int
    host: int
    weights: int


@dataclass(frozen=True)
class Coefficients:
    """All data of the program for one outline."""

    model: ModelSpec
    workload: Workload
    outline: Outline
    levels: tuple[Keeping, ...]
    level_costs: Mapping[tuple[int, Keeping], LevelCosts]  # by layer kind
    recompute_seconds: Mapping[int, float]  # by layer kind
    block_costs: tuple[BlockCosts, ...]
    embed: Price
    loss: Price
    embed_backward: Price
    clip_seconds: float  # the one clip factor of a step: 0 where each block has its own
    report_seconds: float
    load_batch: Price
    store_activation: Price  # one layer's input of one micro-batch, of the kind that is measured fastest
    load_activation: Price
    memory: "MemoryTable"
    sharing: Sharing

    @property
    def delayed(self) -> bool:
        """Whether updates wait for the norm of all gradients."""
        return self.workload.clipping == "global"

    @cached_property
    def kinds(self) -> dict[int, list[int]]:
        """Layers by kind."""
        return self.model.kinds_of(self.model.layers)

    @cached_property
    def trained_kinds(self) -> dict[int, list[int]]:
        """Layers by kind, those without an update left out."""
        return {kind: layers for kind, layers in self.kinds.items() if self.model.kinds[kind].trained}

    @cached_property
    def backward_kinds(self) -> dict[int, list[int]]:
        """Layers by kind, those that are run forward only left out."""
        return {kind: layers for kind, layers in self.kinds.items() if not self.model.kinds[kind].forward_only}

    @cached_property
    def edges_trained(self) -> tuple[bool, bool]:
        """Whether embedding and head have an update."""
        return self.model.block(0).trained, self.model.block(self.model.head).trained

    def neighbours(self) -> list[tuple[int, int]]:
        """(layer, the next layer above it of the same size)."""
        pairs = []
        last_of_size: dict[int, int] = {}
        for layer in self.model.layers:
            size = self.model.block(layer).num_elements
            if size in last_of_size:
                pairs.append((last_of_size[size], layer))
            last_of_size[size] = layer
        return pairs

    @property
    def hidden_bytes(self) -> int:
        """One layer input, or its gradient, of one micro-batch."""
        tokens = self.outline.micro_batch_rows * self.workload.sequence_length
        return tokens * self.model.hidden_size * PRECISIONS[self.workload.precision].weight

    def passes(self, key: tuple[int, Keeping], group: int) -> int:
        """How many of a group's micro-batches pass a layer one after the other, before the next layer's turn."""
        return 1 if key[1] in DEPTH_FIRST else group

    def losses(self, group: int) -> int:
        """How many of a group's micro-batches pass the head between its last forward and its next backward."""
        return 1 if self.outline.depth_first else group

    @property
    def leaves_from_sums(self) -> bool:
        """Whether a depth-first layer's gradient goes to the host from where it is summed, and not through a slab."""
        return self.outline.depth_first and not self.memory.depth_first_bytes

    def waiting_bytes(self, key: tuple[int, Keeping]) -> int:
        """What one micro-batch leaves on the device between a layer's forward and its backward."""
        return 0 if key[1] in ON_HOST else self.hidden_bytes + self.level_costs[key].kept_bytes

    @cached_property
    def checkpoints(self) -> dict[int, list[int]]:
        """Layers whose input is kept, by kind."""
        layers = self.model.backward_layers[:: self.outline.checkpoint_interval]
        return {kind: [layer for layer in layers if layer in of_kind] for kind, of_kind in self.kinds.items()}

    @property
    def micro_batch_bytes(self) -> int:
        return micro_batch_bytes(self.model, self.workload, self.outline.micro_batch_rows)

    @cached_property
    def fixed_compute_seconds(self) -> float:
        """Compute of a step outside the layers' passes and all updates."""
        passes = self.embed.seconds + self.loss.seconds + self.embed_backward.seconds
        gradients = sum(block.finish_seconds + block.clip_seconds for block in self.block_costs) + self.clip_seconds
        return self.outline.num_micro_batches * passes + gradients + self.report_seconds

    def recomputed_layers(self) -> list[int]:
        """Layers whose output is recomputed to give the next layer its input: none when every input is kept."""
        interval = self.outline.checkpoint_interval
        layers = list(self.model.backward_layers)
        return [layer for start in range(0, len(layers), interval) for layer in layers[start : start + interval][:-1]]

    def quick_bound_seconds(self) -> float:
        """A bound in closed form: compute alone, each layer at its fastest level, updates free of charge."""
        layers = sum(
            len(blocks) * min(self._pass_seconds(kind, level) for level in self.levels)
            for kind, blocks in self.kinds.items()
        )
        layers += sum(self.recompute_seconds[self.model.kind_of_block[layer]] for layer in self.recomputed_layers())
        return self.fixed_compute_seconds + self.outline.num_micro_batches * layers

    def _pass_seconds(self, kind: int, level: Keeping) -> float:
        costs = self.level_costs[kind, level]
        return costs.forward_seconds + costs.backward_seconds


def base_policy(
    model: ModelSpec,
    workload: Workload,
    outline: Outline,
    *,
    host: frozenset[int] = frozenset(),
    streamed: frozenset[int] = frozenset(),
    by_link: frozenset[int] = frozenset(),
    levels: Mapping[int, Keeping] | None = None,
    prefetch_depth: int = 1,
    state_slots: int = MIN_STATE_SLOTS,
    state_pace: int = 1,
) -> Policy:
    """The policy of an outline with given homes; ways to keep by layer, 'input' where none is named.

    `host` are updated there, of `by_link` the state streams, of `streamed` the weights. Of frozen blocks only those
    leave the device that stream.
    """
    trained = frozenset(model.trained_blocks)
    host = (host & trained) | (streamed - trained)
    others: list[OptimizerHome] = ["streamed" if block in by_link else "device" for block in range(model.num_blocks)]
    homes: list[OptimizerHome] = ["host" if block in host else home for block, home in enumerate(others)]
    weights: list[Home] = ["host" if block in streamed else "device" for block in range(model.num_blocks)]
    gradients: list[Home] = ["host" if block in host else "device" for block in range(model.num_blocks)]
    tokens = outline.micro_batch_rows * workload.sequence_length
    keeping: list[Keeping] = [(levels or {}).get(layer, "input") for layer in model.layers]
    return Policy(
        micro_batch_rows=outline.micro_batch_rows,
        groups=outline.groups,
        weight_homes=tuple(weights),
        prefetch_depth=prefetch_depth,
        save_levels=tuple(save_level(how) for how in keeping),
        checkpoint_interval=outline.checkpoint_interval,
        depth_first_layers=sum(how in DEPTH_FIRST for how in keeping),
        activation_homes=tuple("host" if how in ON_HOST else "device" for how in keeping),
        gradient_homes=tuple(gradients),
        gradient_slabs=GRADIENT_SLABS,
        optimizer_homes=tuple(homes),
        state_slots=max(MIN_STATE_SLOTS, state_slots),
        state_pace=state_pace,
        head_chunk_tokens=min(HEAD_CHUNK_TOKENS, tokens),
        clipping=workload.clipping,
        gradient_format=workload.gradient_format,
        state_format=workload.state_format,
    )


class MemoryTable(NamedTuple):
    """Persistent bytes under one way of grouping, as a sum: fixed, a share a block on the host, slabs and slots.

    A depth-first layer adds its own sum of gradients; one that is updated on the host adds to the share of that.
    """

    device_fixed_bytes: int  # all optimizers on the device, all weights resident
    host_fixed_bytes: int
    block_bytes: tuple[BlockBytes, ...]
    state_bytes: tuple[BlockBytes, ...]  # where state alone is on the host
    slab_bytes: int  # one slab; 0 where gradients leave from the buffers they are summed in
    slot_bytes: int  # one slot
    state_slot_bytes: int  # one slot for a streamed state
    depth_first_bytes: int = 0
    depth_first_host_bytes: int = 0


class CoefficientTable:
    """Coefficients of many outlines: what outlines share is priced and placed once."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        prices_of: Callable[[Policy], Prices],
        measured_levels: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.workload, self.prices_of, self.measured_levels = model, workload, prices_of, measured_levels
        self._first_of_kind = {model.kind_of_block[block]: block for block in reversed(range(model.num_blocks))}
        self._by_rows: dict[int, Coefficients] = {}
        self._memory: dict[tuple[bool, bool, bool], MemoryTable] = {}

    def of(self, outline: Outline) -> Coefficients:
        """The coefficients of one outline."""
        rows = outline.micro_batch_rows
        if rows not in self._by_rows:
            self._by_rows[rows] = self._price_rows(outline)
        priced = self._by_rows[rows]
        levels = allowed_levels(self.workload, outline, self.measured_levels)
        return replace(
            priced,
            outline=outline,
            levels=levels,
            level_costs={key: costs for key, costs in priced.level_costs.items() if key[1] in levels},
            memory=self._memory_table(outline),
        )

    def _price_rows(self, outline: Outline) -> Coefficients:
        """Coefficients of one micro-batch size; grouping and checkpoint interval do not change them."""
        model = self.model
        prices = self.prices_of(base_policy(model, self.workload, outline))
        every = Outline(outline.micro_batch_rows, outline.groups, depth_first=True)
        levels = allowed_levels(self.workload, every, self.measured_levels)
        layer_kinds = sorted({model.kind_of_block[block] for block in model.layers})
        own_clips = self.workload.clipping != "global"
        blocks = {kind: _block_costs(prices, model, block, own_clips) for kind, block in self._first_of_kind.items()}
        nothing = Price(0.0)

        def fastest(kind: Kind, resource: Resource) -> Price:
            copies = [_price(prices, kind, self._first_of_kind[layer], "input", resource) for layer in layer_kinds]
            return min(copies, key=lambda price: price.seconds)

        return Coefficients(
            model=model,
            workload=self.workload,
            outline=outline,
            levels=levels,
            level_costs={
                (kind, level): _level_costs(prices, model, self._first_of_kind[kind], level)
                for kind in layer_kinds
                for level in levels
            },
            recompute_seconds={
                kind: _price(prices, Kind.RECOMPUTE, self._first_of_kind[kind], "input").seconds for kind in layer_kinds
            },
            block_costs=tuple(blocks[kind] for kind in model.kind_of_block),
            embed=_price(prices, Kind.FORWARD, 0),
            loss=_price(prices, Kind.LOSS, model.head),
            embed_backward=_price(prices, Kind.BACKWARD, 0) if model.block(0).trained else nothing,
            clip_seconds=0.0 if own_clips else _price(prices, Kind.CLIP).seconds,
            report_seconds=_price(prices, Kind.REPORT).seconds,
            load_batch=_price(prices, Kind.LOAD_BATCH, resource=Resource.H2D),
            store_activation=fastest(Kind.STORE_ACTIVATION, Resource.D2H),
            load_activation=fastest(Kind.LOAD_ACTIVATION, Resource.H2D),
            memory=self._memory_table(outline),
            sharing=prices.sharing,
        )

    def _memory_table(self, outline: Outline) -> MemoryTable:
        # Where gradients are summed depends on no more of an outline.
        sums = len(outline.groups) == 1, sum(outline.groups) == 1, outline.depth_first
        if sums not in self._memory:
            self._memory[sums] = self._place_variations(outline)
        return self._memory[sums]

    def _place_variations(self, outline: Outline) -> MemoryTable:
        """Place small variations of one policy and take differences, so that placement stays the one table."""
        model = self.model
        layers = frozenset(model.layers)

        def buffers(
            host: frozenset[int] = frozenset(),
            streamed: frozenset[int] = frozenset(),
            by_link: frozenset[int] = frozenset(),
            num_depth_first: int = int(outline.depth_first),
        ) -> list[Buffer]:
            levels = dict.fromkeys(model.layers[model.num_layers - num_depth_first :], depth_first("input"))
            policy = base_policy(
                model, self.workload, outline, host=host, streamed=streamed, by_link=by_link, levels=levels
            )
            return list(place(model, self.workload, policy).buffers.values())

        def in_tier(tier: Tier, placed: list[Buffer]) -> int:
            shared = (Role.SLAB, Role.SLOT, Role.STATE_SLOT)
            return sum(b.num_bytes for b in placed if b.tier == tier and b.role not in shared)

        none, streams = buffers(), buffers(layers, layers)
        own_sum = on_host = 0
        if outline.depth_first:
            own_sum = in_tier(Tier.DEVICE, buffers(num_depth_first=2)) - in_tier(Tier.DEVICE, none)
            lower, top = (in_tier(Tier.DEVICE, buffers(frozenset([layer]))) for layer in (1, model.num_layers))
            on_host = top - lower
        slabs = [b.num_bytes for b in streams if b.role is Role.SLAB]
        device, host = in_tier(Tier.DEVICE, none), in_tier(Tier.HOST, none)
        weights = {b.block: b.num_bytes for b in none if b.role is Role.WEIGHTS}

        def moved(placed: list[Buffer], block: int) -> BlockBytes:
            return BlockBytes(in_tier(Tier.DEVICE, placed) - device, in_tier(Tier.HOST, placed) - host, weights[block])

        trained = layers & set(model.trained_blocks)
        state_slots = [b.num_bytes for b in buffers(by_link=trained) if b.role is Role.STATE_SLOT]
        of_kind, state_of_kind = {}, {}
        for kind, block in self._first_of_kind.items():
            if not model.kinds[kind].trained:  # it leaves the device when it streams, or not at all
                of_kind[kind] = state_of_kind[kind] = BlockBytes(0, weights[block], weights[block])
                continue
            of_kind[kind] = moved(buffers(host=frozenset([block])), block)
            state_of_kind[kind] = moved(buffers(by_link=frozenset([block])), block)
        return MemoryTable(
            device_fixed_bytes=device - own_sum,
            host_fixed_bytes=host,
            block_bytes=tuple(of_kind[kind] for kind in model.kind_of_block),
            state_bytes=tuple(state_of_kind[kind] for kind in model.kind_of_block),
            slab_bytes=max(slabs, default=0),
            slot_bytes=next(b.num_bytes for b in streams if b.role is Role.SLOT),
            state_slot_bytes=max(state_slots, default=0),
            depth_first_bytes=own_sum,
            depth_first_host_bytes=on_host,
        )


def _price(
    prices: Prices, kind: Kind, block: int = -1, level: str = "", resource: Resource = Resource.COMPUTE
) -> Price:
    price = prices.price(Operation(kind.value, kind, resource, block, 0, 0, level))
    # One operation alone is never slowed by host DRAM, whatever rate it was measured at.
    return replace(price, dram_bytes=min(price.dram_bytes, price.seconds * prices.sharing.dram_bytes_per_second))


def _level_costs(prices: Prices, model: ModelSpec, block: int, keeping: Keeping) -> LevelCosts:
    level = save_level(keeping)
    if model.block(block).forward_only:
        forward = _price(prices, Kind.FORWARD, block, "input")
        return LevelCosts(forward.seconds, 0.0, 0, forward.transient_bytes, 0)
    forward, backward = (_price(prices, kind, block, level) for kind in (Kind.FORWARD, Kind.BACKWARD))
    saved = Buffer("saved", Tier.DEVICE, Role.SAVED, 0, block, 0, False, level)
    return LevelCosts(
        forward_seconds=forward.seconds,
        backward_seconds=backward.seconds,
        kept_bytes=0 if level == "input" else prices.size(saved),
        forward_transient_bytes=forward.transient_bytes,
        backward_transient_bytes=backward.transient_bytes,
    )


def _block_costs(prices: Prices, model: ModelSpec, block: int, own_clip: bool) -> BlockCosts:
    load = _price(prices, Kind.LOAD_WEIGHTS, block, resource=Resource.H2D)
    if not model.block(block).trained:
        nothing = Price(0.0)
        return BlockCosts(0.0, 0.0, 0.0, nothing, load, nothing, nothing, nothing)
    return BlockCosts(
        finish_seconds=_price(prices, Kind.FINISH_GRADIENT, block).seconds,
        clip_seconds=_price(prices, Kind.CLIP, block).seconds if own_clip else 0.0,
        update_device_seconds=_price(prices, Kind.UPDATE, block).seconds,
        update_host=_price(prices, Kind.UPDATE, block, resource=Resource.HOST),
        load=load,
        store=_price(prices, Kind.STORE_GRADIENT, block, resource=Resource.D2H),
        load_state=_price(prices, Kind.LOAD_STATE, block, resource=Resource.H2D),
        store_state=_price(prices, Kind.STORE_STATE, block, resource=Resource.D2H),
    )
