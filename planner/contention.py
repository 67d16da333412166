"""What host updates lose to copies beside them, at least: both move through host DRAM, which the replay shares."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from simulator.program import Resource
from simulator.replay import Price, Sharing, granted_shares


@dataclass(frozen=True, slots=True)
class Losses:
    """Seconds that host updates lose, at least, for each second that a copy would take alone: 0 to 1.

    So where updates of U seconds and copies of C seconds have ended, no less than U + loss x C have passed: copies
    beside updates cost them that much, copies before or after them cost their whole time. The losses of loads and
    stores add up, at one time or one after the other, and are no more than 1 together.
    """

    of: Mapping[Price, float]  # by what the copy takes alone
    loads: float  # the highest
    stores: float

    def seconds(self, copy: Price) -> float:
        """What one whole copy costs."""
        return self.of.get(copy, 0.0) * copy.seconds


@lru_cache(maxsize=256)
def update_losses(
    sharing: Sharing, updates: frozenset[Price], loads: frozenset[Price], stores: frozenset[Price]
) -> Losses:
    """The losses of all copies that a step may have, but for those of batches, which ask for next to nothing."""
    updates, loads, stores = (
        frozenset(price for price in prices if price.seconds > 0) for prices in (updates, loads, stores)
    )
    of = {load: _alone(sharing, updates, Resource.H2D, load) for load in loads}
    of |= {store: _alone(sharing, updates, Resource.D2H, store) for store in stores}
    highest = max(map(of.__getitem__, loads), default=0.0) + max(map(of.__getitem__, stores), default=0.0)
    scale = 1 / max(1.0, highest)
    for update, load, store in product(updates, loads, stores):
        # Two copies at a time slow each other, so that each asks for less of the DRAM.
        lost, done = _beside(sharing, update, {Resource.H2D: load, Resource.D2H: store})
        apart = of[load] * done[Resource.H2D] + of[store] * done[Resource.D2H]
        if apart > lost:
            scale = min(scale, lost / apart)
    of = {copy: scale * loss for copy, loss in of.items()}
    most = (max(map(of.__getitem__, copies), default=0.0) for copies in (loads, stores))
    return Losses(of, *most)


def _alone(sharing: Sharing, updates: Set[Price], way: Resource, copy: Price) -> float:
    """For each second of a copy with no other one beside it."""
    both = (_beside(sharing, update, {way: copy}) for update in updates)
    return min((lost / done[way] for lost, done in both), default=0.0)


def _beside(sharing: Sharing, update: Price, copies: Mapping[Resource, Price]) -> tuple[float, dict[Resource, float]]:
    """In a second of an update beside copies: what the update loses, and how much of each copy is done."""
    rate = sharing.duplex if len(copies) > 1 else 1.0
    asked = {way: rate * copy.dram_bytes / copy.seconds for way, copy in copies.items()}
    asked[Resource.HOST] = update.dram_bytes / update.seconds
    shares = granted_shares({who: value for who, value in asked.items() if value}, sharing.dram_bytes_per_second)
    return 1 - shares.get(Resource.HOST, 1.0), {way: rate * shares.get(way, 1.0) for way in copies}
