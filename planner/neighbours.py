"""Neighbours: decisions that differ from others in one or two counts. The search improves replays with them, and the
greedy planner finds its answer by nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from typing import TypeVar

from planner.coefficients import Coefficients
from planner.keeping import SAVED_ON_HOST
from planner.variables import MAX_SLOTS, MAX_STATE_SLOTS, Decisions, admissible

Key = TypeVar("Key")
GATHERED_SLOTS = 4  # more gained nothing


def neighbours(c: Coefficients, decisions: Decisions, *, strides: tuple[int, ...] = (1,)) -> Iterator[Decisions]:
    """Decisions one move away; a count moves by one of the strides. Limits of memory are not looked at."""
    for move in _moves(c, decisions, strides):
        settled = admissible(c, move)
        if settled is move or settled.key() != decisions.key():
            yield settled


def gathered(c: Coefficients, decisions: Decisions) -> Iterator[Decisions]:
    """The decisions with all that waits on the host at one save level; of more slots for streamed weights first.

    To the program these are ties. To a replay they are not: saved activations of one size spread evenly, and each
    that returns holds the link for the time of several layers' weights, which have to be there before.
    """
    levels = dict(decisions.levels)
    for kind in c.kinds:
        waiting = {how: levels.get((kind, how), 0) for how in SAVED_ON_HOST if how in c.levels}
        most = max(waiting, key=lambda how: waiting[how], default=None)
        if most is not None:
            levels |= {(kind, how): 0 for how in waiting} | {(kind, most): sum(waiting.values())}
    most_slots = min(GATHERED_SLOTS, c.model.num_layers)
    for slots in range(max(decisions.slots, most_slots), decisions.slots - 1, -1) if decisions.slots else (0,):
        yield admissible(c, replace(decisions, levels=levels, slots=slots))


def _moves(c: Coefficients, decisions: Decisions, strides: tuple[int, ...]) -> Iterator[Decisions]:
    for stride in strides:
        yield from _level_moves(c, decisions, stride)
        yield from _home_moves(c, decisions, stride)
        yield from _link_moves(c, decisions, stride)
    yield from _kind_moves(c, decisions)
    yield from _edge_moves(c, decisions)
    yield from _state_slot_moves(c, decisions)
    if c.outline.depth_first:
        for change in (-1, 1):
            yield replace(decisions, depth_first_host=max(0, decisions.depth_first_host + change))
    if decisions.slots:
        for slots in (decisions.slots - 1, decisions.slots + 1):
            if min(2, c.model.num_layers) <= slots <= min(MAX_SLOTS, c.model.num_layers):
                yield replace(decisions, slots=slots)


def _level_moves(c: Coefficients, decisions: Decisions, stride: int) -> Iterator[Decisions]:
    for kind in c.kinds:
        for source in c.levels:
            count = min(stride, decisions.levels.get((kind, source), 0))
            if not count:
                continue
            for target in c.levels:
                if target != source:
                    levels = _moved(_moved(decisions.levels, (kind, source), -count), (kind, target), count)
                    moved = replace(decisions, levels=levels)
                    if c.outline.depth_first and not 0 < moved.num_depth_first < c.model.num_layers:
                        continue
                    if moved.num_saved_on_host or not c.outline.saved_waits:
                        yield moved


def _home_moves(c: Coefficients, decisions: Decisions, stride: int) -> Iterator[Decisions]:
    for kind, layers in c.kinds.items():
        host, streamed = decisions.host_layers.get(kind, 0), decisions.streamed.get(kind, 0)
        for new_host, new_streamed in (
            (host + stride, streamed),
            (host + stride, streamed + stride),
            (host - stride, streamed),
            (host - stride, streamed - stride),
            (host, streamed + stride),
            (host, streamed - stride),
        ):
            new_host = max(0, min(new_host, len(layers) - decisions.link_layers.get(kind, 0)))
            new_streamed = max(0, min(new_streamed, new_host))
            if (new_host, new_streamed) == (host, streamed):
                continue
            all_streamed = {**decisions.streamed, kind: new_streamed}
            slots = max(decisions.slots, min(2, sum(all_streamed.values()))) if any(all_streamed.values()) else 0
            host_layers = {**decisions.host_layers, kind: new_host}
            yield replace(decisions, host_layers=host_layers, streamed=all_streamed, slots=slots)


def _link_moves(c: Coefficients, decisions: Decisions, stride: int) -> Iterator[Decisions]:
    """States begin or cease to stream, instead of living on the device or being updated on the host."""
    for kind, layers in c.kinds.items():
        host, link = decisions.host_layers.get(kind, 0), decisions.link_layers.get(kind, 0)
        resident = host - decisions.streamed.get(kind, 0)
        for new_link, new_host in (
            (min(link + stride, len(layers) - host), host),
            (max(link - stride, 0), host),
            (link + min(stride, resident), host - min(stride, resident)),
            (link - min(stride, link), host + min(stride, link)),
        ):
            if new_link == link:
                continue
            links = {**decisions.link_layers, kind: new_link}
            yield replace(
                decisions,
                link_layers=links,
                host_layers={**decisions.host_layers, kind: new_host},
                state_slots=max(decisions.state_slots, min(2, sum(links.values()))) if any(links.values()) else 0,
            )


def _state_slot_moves(c: Coefficients, decisions: Decisions) -> Iterator[Decisions]:
    for slots in (decisions.state_slots - 1, decisions.state_slots + 1) if decisions.state_slots else ():
        if min(2, c.model.num_layers) <= slots <= min(MAX_STATE_SLOTS, c.model.num_layers):
            yield replace(decisions, state_slots=slots)


def _kind_moves(c: Coefficients, decisions: Decisions) -> Iterator[Decisions]:
    """A host optimizer, streamed or not, goes from one kind of layer to another."""
    for source, target in permutations(c.kinds, 2):
        host, streamed = decisions.host_layers, decisions.streamed
        taken = host.get(target, 0) + decisions.link_layers.get(target, 0)
        if not host.get(source, 0) or taken == len(c.kinds[target]):
            continue
        moved = replace(decisions, host_layers=_moved(_moved(host, source, -1), target, 1))
        if streamed.get(source, 0) < host[source]:
            yield moved
        if streamed.get(source, 0):
            yield replace(moved, streamed=_moved(_moved(streamed, source, -1), target, 1))


def _edge_moves(c: Coefficients, decisions: Decisions) -> Iterator[Decisions]:
    embedding, head = decisions.host_embedding, decisions.host_head
    if c.model.tied_embeddings and all(c.edges_trained):
        yield replace(decisions, host_embedding=not embedding, host_head=not head)
    else:
        yield replace(decisions, host_embedding=not embedding)
        yield replace(decisions, host_head=not head)


def _moved(counts: Mapping[Key, int], key: Key, change: int) -> dict[Key, int]:
    return {**counts, key: counts.get(key, 0) + change}
