"""Coefficients of many outlines, from the simulator's prices and its placement: what outlines share is found once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from planner.base_policy import base_policy
from planner.coefficients import BlockBytes, BlockCosts, Coefficients, LevelCosts, MemoryTable
from planner.keeping import ON_HOST, SAVED_ON_HOST, Keeping, allowed_levels, depth_first, save_level
from planner.outlines import Outline
from simulator.costs import OperationCosts, comparable_levels
from simulator.model import ModelSpec
from simulator.placement import place
from simulator.policy import Policy, Workload
from simulator.program import Buffer, Kind, Operation, Resource, Role, Tier
from simulator.replay import Price, Sharing

# Beside what a layer saves, which lies aligned in its place on the host.
SPARE_BYTES = 64 * 1024


class Prices(Protocol):
    """What the simulator's Pricing gives for one policy; tests may give a table of their own."""

    def price(self, operation: Operation) -> Price: ...

    def size(self, buffer: Buffer) -> int: ...

    @property
    def sharing(self) -> Sharing: ...


class CoefficientTable:
    """Coefficients of many outlines: what outlines share is priced and placed once."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        prices_of: Callable[[Policy], Prices],
        costs: OperationCosts | None = None,
    ) -> None:
        self.model, self.workload, self.prices_of = model, workload, prices_of
        self._levels = comparable_levels(workload, costs)
        self._first_of_kind = {model.kind_of_block[block]: block for block in reversed(range(model.num_blocks))}
        self._by_rows: dict[int, Coefficients] = {}
        self._memory: dict[tuple[bool, bool, bool], MemoryTable] = {}

    def of(self, outline: Outline) -> Coefficients:
        """The coefficients of one outline."""
        rows = outline.micro_batch_rows
        if rows not in self._by_rows:
            self._by_rows[rows] = self._price_rows(outline)
        priced = self._by_rows[rows]
        levels = allowed_levels(self._levels, outline)
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
        every = Outline(outline.micro_batch_rows, outline.groups, depth_first=True, saved_waits=True)
        levels = allowed_levels(self._levels, every)
        layer_kinds = sorted({model.kind_of_block[block] for block in model.layers})
        own_clips = self.workload.clipping != "global"
        blocks = {kind: _block_costs(prices, model, block, own_clips) for kind, block in self._first_of_kind.items()}
        nothing = Price(0.0)

        level_costs = {
            (kind, level): _level_costs(prices, model, self._first_of_kind[kind], level)
            for kind in layer_kinds
            for level in levels
        }
        saved_bytes = {
            how: max(level_costs[kind, how].kept_bytes for kind in layer_kinds) + SPARE_BYTES
            for how in levels
            if how in SAVED_ON_HOST
        }

        def fastest(kind: Kind, how: Keeping, resource: Resource) -> Price:
            policy = base_policy(
                model, self.workload, outline, levels=dict.fromkeys(model.layers, how), saved_bytes=saved_bytes
            )
            prices, level = self.prices_of(policy), save_level(how)
            copies = [_price(prices, kind, self._first_of_kind[layer], level, resource) for layer in layer_kinds]
            return min(copies, key=lambda price: price.seconds)

        waiting = [how for how in levels if how in ON_HOST]
        return Coefficients(
            model=model,
            workload=self.workload,
            outline=outline,
            levels=levels,
            level_costs=level_costs,
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
            stores={how: fastest(Kind.STORE_ACTIVATION, how, Resource.D2H) for how in waiting},
            loads={how: fastest(Kind.LOAD_ACTIVATION, how, Resource.H2D) for how in waiting},
            saved_bytes=saved_bytes,
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
