"""Memory rates: device memory, the link in each direction and both at once, and host DRAM under an optimizer."""

import itertools
from typing import NamedTuple

import torch

from simulator.bench.bench import Bench
from simulator.bench.timing import Lane, concurrent_rates, copy_lane, median_seconds
from simulator.figure import Figure, format_value
from simulator.hardware import LINK_DIRECTIONS, Link, LinkDirection, LinkPoint, LinkRates
from simulator.units import format_bytes

_OPTIMIZER = "AdamW-like in-place passes on all cores, two reads and a write each"


class HostRates(NamedTuple):
    """The link, all that host DRAM moves at once, and what an AdamW-like pass moves alone."""

    link: Link
    dram: Figure
    optimizer: Figure


class _Route(NamedTuple):
    """Where copies of one direction go and come from."""

    destination: torch.Tensor
    source: torch.Tensor


def measure_device_memory(bench: Bench) -> Figure:
    """Bytes read and written by a large copy inside device memory."""
    num_bytes = bench.scale.stream_bytes
    source = bench.random_bytes(num_bytes)
    destination = torch.empty_like(source)
    seconds = median_seconds(lambda: destination.copy_(source), device=bench.device, seconds=bench.scale.point_seconds)
    rate = 2 * num_bytes / seconds
    bench.report(f"device memory: {format_value(rate, 'bytes/s')}")
    return bench.figure(rate, f"median copy of {format_bytes(num_bytes)}, read + written")


def measure_link_and_dram(bench: Bench) -> HostRates:
    """Copies of each size alone, the largest both ways, the same beside a host optimizer, and the optimizer alone."""
    scale = bench.scale
    what = "between two host buffers" if bench.cpu else "pinned"
    routes = _routes(bench, pinned=not bench.cpu)
    points, alone = [], dict.fromkeys(LINK_DIRECTIONS, 0.0)
    for direction, num_bytes in itertools.product(LINK_DIRECTIONS, scale.copy_bytes):
        rate = num_bytes / _copy_seconds(bench, routes[direction], num_bytes)
        alone[direction] = max(alone[direction], rate)
        bench.report(f"{direction}, {format_bytes(num_bytes)}: {format_value(rate, 'bytes/s')}")
        figure = bench.figure(rate, f"median of copies, {what}")
        points.append(LinkPoint(direction=direction, num_bytes=num_bytes, bytes_per_second=figure))

    lanes: dict[str, Lane] = {direction: copy_lane(*routes[direction]) for direction in LINK_DIRECTIONS}
    optimizer = _optimizer_lane(bench)
    both = concurrent_rates(lanes, seconds=scale.lane_seconds)
    busy = concurrent_rates({**lanes, "optimizer": optimizer}, seconds=scale.lane_seconds)
    only = concurrent_rates({"optimizer": optimizer}, seconds=scale.lane_seconds)
    for rates in (both, busy, only):
        bench.report("at once: " + ", ".join(f"{lane} {format_value(rate, 'bytes/s')}" for lane, rate in rates.items()))

    # Copies between host buffers read and write host DRAM; DMA of the link touches it once.
    touches = 2 if bench.cpu else 1
    dram = max(
        touches * (rates.get("h2d", 0.0) + rates.get("d2h", 0.0)) + rates.get("optimizer", 0.0)
        for rates in (both, busy, only)
    )
    # A direction is never faster in company than alone; noise may say otherwise.
    duplex = {direction: min(both[direction], alone[direction]) for direction in LINK_DIRECTIONS}
    loaded = {direction: min(busy[direction], duplex[direction]) for direction in LINK_DIRECTIONS}
    beside = f"beside an optimizer that moved {format_value(busy['optimizer'], 'bytes/s')}"
    link = Link(
        points=tuple(points),
        duplex=_link_rates(bench, duplex, f"large copies both ways at once, {what}"),
        duplex_host_busy=_link_rates(bench, loaded, f"large copies both ways at once, {what}, {beside}"),
        pageable=None if bench.cpu else _pageable(bench),
    )
    return HostRates(
        link=link,
        dram=bench.figure(dram, f"the most moved at once by copies both ways and {_OPTIMIZER}"),
        optimizer=bench.figure(only["optimizer"], _OPTIMIZER),
    )


def _routes(bench: Bench, *, pinned: bool) -> dict[LinkDirection, _Route]:
    num_bytes = bench.scale.copy_bytes[-1]
    return {
        "h2d": _Route(bench.random_bytes(num_bytes), bench.host_bytes(num_bytes, pinned=pinned)),
        "d2h": _Route(bench.host_bytes(num_bytes, pinned=pinned), bench.random_bytes(num_bytes)),
    }


def _copy_seconds(bench: Bench, route: _Route, num_bytes: int) -> float:
    """Time of one copy of `num_bytes`, walking through the buffers so that small copies do not stay in a cache."""
    pairs = zip(*(buffer.split(num_bytes // buffer.element_size()) for buffer in route), strict=True)
    walk = itertools.cycle(list(pairs))

    def operation() -> None:
        destination, source = next(walk)
        destination.copy_(source, non_blocking=True)

    return median_seconds(operation, device=bench.device, seconds=bench.scale.point_seconds / 2)


def _pageable(bench: Bench) -> LinkRates:
    num_bytes = bench.scale.copy_bytes[-1]
    routes = _routes(bench, pinned=False)
    rates = {direction: num_bytes / _copy_seconds(bench, routes[direction], num_bytes) for direction in LINK_DIRECTIONS}
    bench.report("pageable: " + ", ".join(f"{name} {format_value(rate, 'bytes/s')}" for name, rate in rates.items()))
    return _link_rates(bench, rates, "median of copies, pageable")


def _link_rates(bench: Bench, rates: dict[LinkDirection, float], how: str) -> LinkRates:
    return LinkRates(h2d=bench.figure(rates["h2d"], how), d2h=bench.figure(rates["d2h"], how))


def _optimizer_lane(bench: Bench) -> Lane:
    """In-place passes over arrays beyond the caches: the traffic of AdamW's moments and weights, op by op."""
    num_bytes = bench.scale.stream_bytes
    gradient, moment, weight = (bench.host_bytes(num_bytes, pinned=False) for _ in range(3))

    def step() -> None:
        # Both release the interpreter lock, so other threads issue copies meanwhile.
        moment.lerp_(gradient, 0.1)
        weight.add_(moment, alpha=-1e-3)

    return Lane(step, 2 * 3 * num_bytes)
