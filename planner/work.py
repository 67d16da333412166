"""Work: what an outline's decisions make each resource do in a step, as sums over layers of its program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.coefficients import BlockCosts, Coefficients
from planner.contention import Losses, update_losses
from planner.keeping import ON_HOST, SAVED_ON_HOST, Keeping
from planner.mip import Linear, total
from planner.state_rows import both_directions
from planner.variables import Variables
from simulator.replay import Price


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over a step, in seconds where nothing else is said."""

    c: Coefficients
    variables: Variables

    def forwards(self, group: int) -> Linear:
        """A group's forward up to its first loss: through depth-first layers only one micro-batch."""
        return self._passes("forward_seconds", lambda key: self.c.passes(key, group))

    def backwards(self, group: int) -> Linear:
        """A group's backward from its last loss."""
        return self._passes("backward_seconds", lambda key: self.c.passes(key, group))

    def turns(self, group: int) -> Linear:
        """What depth-first layers do between a group's first loss and its last one."""
        turns = {key: group - self.c.passes(key, group) for key in self.variables.levels}
        return self._passes("forward_seconds", turns.__getitem__) + self._passes("backward_seconds", turns.__getitem__)

    def _passes(self, cost: str, times: Callable[[tuple[int, Keeping]], int]) -> Linear:
        counts = self.variables.levels.items()
        return total(times(key) * getattr(self.c.level_costs[key], cost) * count for key, count in counts)

    def recomputes(self, group: int) -> float:
        kinds = self.c.model.kind_of_block
        return group * sum(self.c.recompute_seconds[kinds[layer]] for layer in self.c.recomputed_layers())

    def host_sum(self, cost: Callable[[BlockCosts], float]) -> Linear:
        """A cost summed over all blocks that are updated on the host."""
        costs, variables = self.c.block_costs, self.variables
        layers = [cost(costs[self.c.kinds[kind][0]]) * count for kind, count in variables.host_layers.items()]
        return total([*layers, cost(costs[0]) * variables.embedding, cost(costs[-1]) * variables.head])

    def link_sum(self, cost: Callable[[BlockCosts], float]) -> Linear:
        """A cost summed over all layers whose state streams."""
        costs, counts = self.c.block_costs, self.variables.link_layers
        return total(cost(costs[self.c.kinds[kind][0]]) * count for kind, count in counts.items())

    @property
    def device_updates(self) -> Linear:
        everything = sum(costs.update_device_seconds for costs in self.c.block_costs)
        return everything - self.host_sum(lambda costs: costs.update_device_seconds)

    @property
    def compute(self) -> Linear:
        step = self.c.outline.num_micro_batches
        fixed = self.c.fixed_compute_seconds + self.recomputes(step)
        passes = (self._passes(cost, lambda _: step) for cost in ("forward_seconds", "backward_seconds"))
        return total([*passes, self.device_updates]) + fixed

    def least(self, cost: Callable[[BlockCosts], float]) -> float:
        """A cost's least value among the layers."""
        return min(cost(self.c.block_costs[layers[0]]) for layers in self.c.kinds.values())

    @property
    def reload(self) -> Linear:
        """Seconds of the link for the layers that come again in each forward."""
        return self.least(lambda costs: costs.load.seconds) * self.variables.reloads

    @property
    def reload_dram(self) -> Linear:
        """The same in seconds of host DRAM."""
        return self.least(lambda costs: costs.load.dram_bytes) / self.dram_rate * self.variables.reloads

    @property
    def again(self) -> Linear:
        """Layers that come again in a step: in every backward, and in every forward but the first group's."""
        groups = len(self.c.outline.groups)
        return groups * self.variables.returns + (groups - 1) * self.variables.reloads

    @property
    def dram_rate(self) -> float:
        return self.c.sharing.dram_bytes_per_second

    @property
    def h2d(self) -> Linear:
        """Every host-updated block's weights come in the first group's forward, some again in each later piece.

        And every streamed state once.
        """
        batches = self.c.outline.num_micro_batches * self.c.load_batch.seconds
        first = self.host_sum(lambda costs: costs.load.seconds)
        states = self.link_sum(lambda costs: costs.load_state.seconds)
        activations = self.c.outline.num_micro_batches * self.coming_back(1, lambda price: price.seconds)
        again = self.least(lambda costs: costs.load.seconds) * self.again
        return first + states + again + batches + activations

    @property
    def d2h(self) -> Linear:
        activations = self.c.outline.num_micro_batches * self.leaving(1, lambda price: price.seconds)
        states = self.link_sum(lambda costs: costs.store_state.seconds)
        return self.host_sum(lambda costs: costs.store.seconds) + states + activations

    def copies(self, cost: Callable[[Price], float]) -> Linear:
        """A cost of all copies of a step but those of batches."""
        blocks = self.host_sum(lambda costs: cost(costs.load) + cost(costs.store))
        again = self.least(lambda costs: cost(costs.load)) * self.again
        states = self.link_sum(lambda costs: cost(costs.load_state) + cost(costs.store_state))
        activations = self.leaving(1, cost) + self.coming_back(1, cost)
        return blocks + again + states + self.c.outline.num_micro_batches * activations

    def leaving(self, group: int, cost: Callable[[Price], float]) -> Linear:
        """A cost of the copies of what leaves to wait, of a group's micro-batches that pass one after the other."""
        return self._waiting(group, self.c.stores, cost)

    def coming_back(self, group: int, cost: Callable[[Price], float]) -> Linear:
        """And of what comes back: where checkpoints are sparse an input does for the recomputation too."""
        interval = self.c.outline.checkpoint_interval
        if interval == 1:
            return self._waiting(group, self.c.loads, cost)
        alone = len(self.c.model.backward_layers) % interval == 1  # the topmost is a segment of its own
        times = 2 * self.variables.num_waiting - int(alone) * self.variables.any_waiting
        return group * cost(self.c.loads["input_on_host"]) * times

    def _waiting(self, group: int, copies: Mapping[Keeping, Price], cost: Callable[[Price], float]) -> Linear:
        levels = ((key, count) for key, count in self.variables.levels.items() if key[1] in ON_HOST)
        return total(self.c.passes(key, group) * cost(copies[key[1]]) * count for key, count in levels)

    def saved_leaving(self, group: int) -> Linear:
        """The way out of what waits beside inputs."""
        return total(
            self.c.passes(key, group) * self.c.stores[key[1]].seconds * count
            for key, count in self.variables.levels.items()
            if key[1] in SAVED_ON_HOST
        )

    @property
    def host_updates(self) -> Linear:
        return self.host_sum(lambda costs: costs.update_host.seconds)

    @property
    def slowed(self) -> float:
        """What a second of copies takes from compute beside it."""
        return 1 - self.c.sharing.compute_beside_copies

    @property
    def both(self) -> float:
        """What a second of one link direction takes from the other beside it."""
        return both_directions(self.c.sharing)

    @property
    def losses(self) -> Losses:
        """What host updates lose to copies beside them."""
        c = self.c
        blocks = [c.block_costs[block] for block in (0, *(layers[0] for layers in c.kinds.values()), -1)]
        loads = {price for costs in blocks for price in (costs.load, costs.load_state)} | set(c.loads.values())
        stores = {price for costs in blocks for price in (costs.store, costs.store_state)} | set(c.stores.values())
        updates = frozenset(costs.update_host for costs in blocks)
        return update_losses(c.sharing, updates, frozenset(loads), frozenset(stores))

    @property
    def batches_beside(self) -> float:
        """What of the losses to stores goes at most: beside a batch's copy a store asks for less of host DRAM."""
        return self.losses.stores * self.c.outline.num_micro_batches * self.c.load_batch.seconds
