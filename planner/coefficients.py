"""Coefficients: the seconds and bytes of every operation and buffer under one outline, for the mixed-integer program.

An outline is what the search enumerates outside the program: it fixes the size of an operation, so that all times and
bytes are data there. Prices come from the simulator's Pricing and sizes from its placement, never from a second table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.keeping import DEPTH_FIRST, ON_HOST, Keeping
from planner.outlines import Outline
from simulator.formats import PRECISIONS
from simulator.model import ModelSpec
from simulator.placement import micro_batch_bytes
from simulator.policy import Workload
from simulator.replay import Price, Sharing


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
    depth_first_bytes: int
    depth_first_host_bytes: int


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
    stores: Mapping[Keeping, Price]  # of what waits of one micro-batch, in the kind of layer that is measured fastest
    loads: Mapping[Keeping, Price]
    saved_bytes: Mapping[Keeping, int]  # room on the host for what is saved beside an input
    memory: MemoryTable
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

    def host_bytes(self, key: tuple[int, Keeping]) -> int:
        """Room on the host for what waits of one micro-batch."""
        return self.hidden_bytes + self.saved_bytes.get(key[1], 0) if key[1] in ON_HOST else 0

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
