"""What host updates lose to copies beside them, at least: both move through host DRAM, which the replay shares."""

from collections.abc import Iterable
from itertools import product

from simulator.program import Resource
from simulator.replay import Price, Sharing, granted_shares


def update_loss(
    sharing: Sharing, updates: Iterable[Price], copies: Iterable[Price], *, both_ways: bool = True
) -> float:
    """Seconds that host updates lose, at least, for each second that copies beside them would take alone: 0 to 1.

    So where updates of U seconds and copies of C seconds have ended, no less than U + loss x C have passed: copies
    beside updates cost them that much, copies before or after them cost their whole time. `both_ways`: copies the other
    way may run at the same time, which slow these, so that they ask for less of the DRAM at a time.
    """
    pairs = product(_taking_time(updates), _taking_time(copies))
    rates = (1.0, sharing.duplex) if both_ways else (1.0,)
    return min((_loss(sharing, update, copy, rate) for update, copy in pairs for rate in rates), default=0.0)


def _taking_time(prices: Iterable[Price]) -> set[Price]:
    return {price for price in prices if price.seconds > 0}


def _loss(sharing: Sharing, update: Price, copy: Price, rate: float) -> float:
    """Of one update beside one copy. DRAM traffic of a copy the other way would only add to it."""
    asked = {
        Resource.HOST: update.dram_bytes / update.seconds,
        Resource.H2D: rate * copy.dram_bytes / copy.seconds,
    }
    shares = granted_shares({who: value for who, value in asked.items() if value}, sharing.dram_bytes_per_second)
    return min(1.0, (1 - shares.get(Resource.HOST, 1.0)) / (rate * shares.get(Resource.H2D, 1.0)))
