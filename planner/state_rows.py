"""State rows: what states that stream take of the piece of a step in which updates run.

When updates begin the slots hold a state each. Every other state comes after one has been updated and has left, all in
this piece: both directions of the link carry that many states in it, and host DRAM all of that.
"""

from planner.coefficients import Coefficients
from planner.mip import Linear, MixedIntegerProgram
from planner.variables import Variables
from simulator.replay import Sharing

NOTHING = Linear()


def add_later_states(
    mip: MixedIntegerProgram,
    c: Coefficients,
    v: Variables,
    piece: Linear,
    title: str,
    *,
    before: float = 0.0,
    after: float = 0.0,
    weights: Linear = NOTHING,
    leaving: Linear = NOTHING,
    moved_bytes: Linear = NOTHING,
) -> None:
    """Bound the seconds of `piece` from below.

    `before` and `after`: compute ahead of its first and behind its last update. What else it has: `weights` and
    `leaving`, seconds of loads from the host and of stores to it, and `moved_bytes` of host DRAM by these and the
    host's updates.
    """
    layers = [c.block_costs[blocks[0]] for blocks in c.trained_kinds.values()]
    if not layers:
        return
    least = min(layers, key=lambda costs: costs.load_state.seconds)
    load, store, both = least.load_state, least.store_state, both_directions(c.sharing)
    # The first state is updated before it leaves, the last one after it has come.
    ends = (before + 2 * min(costs.update_device_seconds for costs in layers) + after) * v.any_later_state
    loads, stores = load.seconds * v.later_states, store.seconds * v.later_states
    mip.at_least(f"{title}: later states come", piece, loads + store.seconds * v.any_later_state + ends)
    mip.at_least(f"{title}: states leave for later ones", piece, stores + load.seconds * v.any_later_state + ends)
    coming, going = weights + loads, leaving + stores
    mip.at_least(f"{title}: loads beside what leaves", piece, coming + both * going)
    mip.at_least(f"{title}: what leaves beside loads", piece, going + both * coming)
    moved = moved_bytes + (load.dram_bytes + store.dram_bytes) * v.later_states
    mip.at_least(f"{title}: DRAM with later states", piece, moved * (1 / c.sharing.dram_bytes_per_second))


def both_directions(sharing: Sharing) -> float:
    """What a second of one link direction takes from the other beside it."""
    return min(1.0, (1 - sharing.duplex) / sharing.duplex)
