"""Layouts: which layers take what, once the program has decided how many.

Save levels: the layers whose backward takes most memory lie at the bottom, where fewest other layers are still alive;
of equals those whose inputs wait on the host lie lowest, where an input waits longest. Depth-first layers are the
topmost, in the same order among themselves. Layers whose saved activations wait lie evenly among the others, whose
passes their copies have beside them.
Host optimizers lie at the top, where an update has most time before its layer's next forward; below them the layers
whose state streams, which has the link to itself until then. Or they lie evenly among these, or among all layers: what
comes over the link, weights in every group's passes and states in the first forward, then has the compute of others
beside it. Depth-first layers have their own, as many as the program says. Layers with streamed weights lie evenly
among the host-updated ones, at their top or at their bottom. Which is best, the replay tells.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Literal, NamedTuple, TypeVar

from planner.base_policy import base_policy
from planner.coefficients import Coefficients
from planner.keeping import DEPTH_FIRST, ON_HOST, SAVED_ON_HOST, Keeping
from planner.variables import Decisions
from simulator.model import ModelSpec
from simulator.policy import Policy

Value = TypeVar("Value")

Streams = Literal["spread", "top", "bottom"]  # where streamed layers lie among the host-updated ones
Hosts = Literal["top", "among links", "spread"]  # where these lie in the model, or among depth-first and other layers


class Way(NamedTuple):
    """How counts become layers."""

    hosts: Hosts = "top"
    streams: Streams = "spread"
    pace: float = 0.0  # of states that stream; 0: what `_state_pace` says


DEFAULT = Way()
ROUNDING = 1e-9  # a copy as long as some forwards takes no more of them


def ways(decisions: Decisions) -> list[Way]:
    """Ways that may differ for these decisions, the likeliest first."""
    found = [Way("top", "spread"), Way("top", "top"), Way("top", "bottom")]
    if any(decisions.streamed.values()) or any(decisions.link_layers.values()):
        found = [Way("among links"), Way("spread"), *found]
    return found


def policies(coefficients: Coefficients, decisions: Decisions, among: Sequence[Way] = ()) -> dict[Policy, Way]:
    """The policies of a solution, in all ways or `among` these, each with the first way that gives it."""
    found: dict[Policy, Way] = {}
    for way in among or ways(decisions):
        found.setdefault(lay_out(coefficients, decisions, way), way)
    return found


def lay_out(coefficients: Coefficients, decisions: Decisions, way: Way = DEFAULT) -> Policy:
    """One policy with the counts of a solution."""
    c = coefficients
    host = {0} if decisions.host_embedding else set()
    host |= {c.model.head} if decisions.host_head else set()
    streamed: set[int] = set()
    by_link: set[int] = set()
    for kind, layers in c.kinds.items():
        num_host, num_link = decisions.host_layers.get(kind, 0), decisions.link_layers.get(kind, 0)
        # No depth-first layer streams.
        lower = layers[: len(layers) - decisions.num_depth_first]
        upper, upper_host = layers[len(lower) :], decisions.depth_first_host
        upper_link = min(num_link, len(upper) - upper_host)
        may_stream = _on_host(lower, num_host - upper_host, num_link - upper_link, way.hosts)
        host |= {*may_stream, *_on_host(upper, upper_host, upper_link, way.hosts)}
        others = [layer for layer in layers if layer not in host]
        by_link |= set(others[len(others) - num_link :])
        streamed |= set(_CHOICES[way.streams](may_stream, decisions.streamed.get(kind, 0)))
    return base_policy(
        c.model,
        c.workload,
        c.outline,
        host=frozenset(host),
        streamed=frozenset(streamed),
        by_link=frozenset(by_link),
        levels=_levels(c, decisions),
        saved_bytes=c.saved_bytes,
        leaving_passes=_leaving_passes(c, decisions),
        prefetch_depth=max(1, decisions.slots - 1),
        state_slots=decisions.state_slots,
        state_pace=way.pace
        if way.pace and by_link
        else _state_pace(c, len(by_link) - decisions.state_slots, decisions.num_depth_first),
    )


def _on_host(layers: list[int], num_host: int, num_link: int, hosts: Hosts) -> list[int]:
    """Which of some layers of a kind the host updates."""
    if hosts == "spread":
        return _spread(layers, num_host)
    if hosts == "among links":
        # With those whose state streams they take the top; the k-th of n ends the k-th n-th part of it.
        away = layers[len(layers) - num_host - num_link :]
        return [away[(k + 1) * len(away) // num_host - 1] for k in range(num_host)]
    return layers[len(layers) - num_host :]


def _state_pace(c: Coefficients, num_later: int, num_depth_first: int) -> float:
    """How many layers the first group's forward passes while a state comes and another one leaves.

    All states that come later do so in the forward of the layers that are not depth-first, evenly apart: through the
    others one micro-batch passes in no time, and the last states would come together, each where its update is needed.
    """
    return max(1.0, round((c.model.num_layers - num_depth_first) / max(1, num_later), 2))


def _levels(c: Coefficients, decisions: Decisions) -> dict[int, Keeping]:
    found: dict[int, Keeping] = {}
    for kind, layers in c.kinds.items():
        ordered = sorted(
            c.levels,
            key=lambda level: (
                level in DEPTH_FIRST,
                -c.level_costs[kind, level].backward_transient_bytes,
                level not in ON_HOST,
            ),
        )
        in_order = [level for level in ordered for _ in range(decisions.levels.get((kind, level), 0))]
        if c.outline.saved_waits:
            in_order = _with_saved_spread(c, decisions, in_order)
        if c.outline.checkpoint_interval > 1:
            # The lowest layers that keep an input at all.
            layers = sorted(layers, key=lambda layer: (layer not in c.checkpoints[kind], layer))
        found |= dict(zip(layers, in_order, strict=True))
    if c.outline.checkpoint_interval > 1:
        return found
    return found if len(c.kinds) == 1 else _with_lower_peak(c, found)


def _leaving_passes(c: Coefficients, decisions: Decisions) -> int:
    """How many forwards the copy of what waits takes, behind a state's where states stream.

    What a layer saves waits for such a copy before it, for one more.
    """
    waiting = {how for (_, how), count in decisions.levels.items() if count and how in ON_HOST}
    forward = min(costs.forward_seconds for costs in c.level_costs.values())
    if not waiting or not forward:
        return 1
    seconds = max(c.stores[how].seconds for how in waiting)
    if sum(decisions.link_layers.values()) > decisions.state_slots:
        before = [c.block_costs[layers[0]].store_state.seconds for layers in c.trained_kinds.values()]
        seconds += max(before) / c.sharing.duplex
    return max(1, math.ceil(seconds / forward * (1 - ROUNDING))) + bool(waiting & SAVED_ON_HOST.keys())


def _with_saved_spread(c: Coefficients, decisions: Decisions, in_order: list[Keeping]) -> list[Keeping]:
    """From the lowest layer up: those whose saved activations wait evenly among all.

    Above the topmost there are as many others as its copy needs to have ended before the loss.
    """
    found = [level for level in in_order if level not in SAVED_ON_HOST]
    saved = [level for level in in_order if level in SAVED_ON_HOST]
    apart = (len(in_order) - 2 - _leaving_passes(c, decisions)) / max(1, len(saved) - 1)
    for k, level in enumerate(saved):
        found.insert(int(k * min(max(1.0, apart), len(in_order) / len(saved))), level)
    return found


def _with_lower_peak(c: Coefficients, levels: dict[int, Keeping]) -> dict[int, Keeping]:
    """Where kinds alternate, each kind's own order is not the best: exchange levels while that lowers the peak."""
    kept, transient = _passing_bytes(c)
    peak = _passing_peak(c, levels, kept, transient)
    pairs = [pair for layers in c.kinds.values() for pair in combinations(layers, 2)]
    improved = True
    while improved:
        improved = False
        for one, other in pairs:
            if levels[one] == levels[other]:
                continue
            exchanged = {**levels, one: levels[other], other: levels[one]}
            lower = _passing_peak(c, exchanged, kept, transient)
            if lower < peak:
                levels, peak, improved = exchanged, lower, True
    return levels


Bytes = dict[tuple[int, Keeping], int]  # by layer and how it keeps


def _passing_bytes(c: Coefficients) -> tuple[Bytes, Bytes]:
    """What a layer keeps of the largest group, and what its backward takes beside, for each way to keep."""
    backward, group = set(c.model.backward_layers), max(c.outline.groups)
    kept: Bytes = {}
    transient: Bytes = {}
    for layer in c.model.layers:
        for level in c.levels:
            key = (c.model.kind_of_block[layer], level)
            kept[layer, level] = group * c.waiting_bytes(key) if layer in backward else 0
            transient[layer, level] = c.level_costs[key].backward_transient_bytes
    return kept, transient


def _passing_peak(c: Coefficients, levels: dict[int, Keeping], kept: Bytes, transient: Bytes) -> int:
    """Bytes at the worst backward, but for what all layouts share."""
    alive = peak = 0
    for layer in c.model.layers:
        key = (layer, levels[layer])
        alive += kept[key]
        peak = max(peak, alive + transient[key])
    return peak


def _spread(layers: list[int], count: int) -> list[int]:
    # The k-th of n lies at the middle of the k-th n-th part.
    return [layers[(2 * k + 1) * len(layers) // (2 * count)] for k in range(count)]


_CHOICES: dict[Streams, Callable[[list[int], int], list[int]]] = {
    "spread": _spread,
    "top": lambda layers, count: layers[len(layers) - count :],
    "bottom": lambda layers, count: layers[:count],
}


def swaps(model: ModelSpec, policy: Policy) -> Iterator[Policy]:
    """Policies in which two layers exchange how they keep, or all other homes, or only whether they stream."""
    for lower, upper in combinations(model.layers, 2):
        if policy.depth_first(lower, model.num_layers) != policy.depth_first(upper, model.num_layers):
            continue
        below, above = model.block(lower), model.block(upper)
        if below.forward_only != above.forward_only or below.trained != above.trained:
            continue  # they do not decide about the same things
        levels = _exchanged(policy.save_levels, lower - 1, upper - 1)
        activations = _exchanged(policy.activation_homes, lower - 1, upper - 1)
        saved = _exchanged(policy.saved_bytes, lower - 1, upper - 1) if policy.saved_bytes else ()
        weights = _exchanged(policy.weight_homes, lower, upper)
        optimizers = _exchanged(policy.optimizer_homes, lower, upper)
        gradients = _exchanged(policy.gradient_homes, lower, upper)
        homes = {"weight_homes": weights, "optimizer_homes": optimizers, "gradient_homes": gradients}
        if levels != policy.save_levels or (activations != policy.activation_homes and policy.checkpoint_interval == 1):
            kept = {"save_levels": levels, "activation_homes": activations, "saved_bytes": saved}
            yield policy.model_copy(update=kept)
        if optimizers != policy.optimizer_homes:
            yield policy.model_copy(update=homes)
        elif weights != policy.weight_homes:
            yield policy.model_copy(update={"weight_homes": weights})


def _exchanged(values: tuple[Value, ...], one: int, other: int) -> tuple[Value, ...]:
    exchanged = list(values)
    exchanged[one], exchanged[other] = values[other], values[one]
    return tuple(exchanged)
