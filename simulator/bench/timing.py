"""Timing on a device: the median of one repeated operation, and the rates of several that run at once."""

import itertools
import math
import statistics
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

# Operations shorter than this are timed in batches: an event or a clock read costs microseconds.
_BATCH_SECONDS = 2e-3
_MIN_BATCHES, _MAX_BATCHES = 3, 400


class Lane(NamedTuple):
    """Work of one thread: `step` moves `num_bytes` and returns once they, or those of the step before, have moved."""

    step: Callable[[], object]
    num_bytes: float


def median_seconds(operation: Callable[[], object], *, device: torch.device, seconds: float) -> float:
    """Median time of one call over about `seconds` of calls, after two calls of warm-up."""
    operation()
    batch_seconds = _cuda_batches if device.type == "cuda" else _cpu_batches
    once = max(batch_seconds(operation, 1, 1)[0], 1e-9)
    batch = max(1, math.ceil(_BATCH_SECONDS / once))
    num_batches = min(max(_MIN_BATCHES, round(seconds / (once * batch))), _MAX_BATCHES)
    return statistics.median(batch_seconds(operation, batch, num_batches)) / batch


def run_for(operation: Callable[[], object], *, device: torch.device, seconds: float) -> None:
    """Repeat an operation for `seconds`, to bring the chip to the temperature and clocks of sustained load."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for _ in range(4):  # in flight at once, so that a GPU does not idle between them
            operation()
        if device.type == "cuda":
            torch.cuda.synchronize()


def _cuda_batches(operation: Callable[[], object], batch: int, num_batches: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_batches + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        for _ in range(batch):
            operation()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def _cpu_batches(operation: Callable[[], object], batch: int, num_batches: int) -> list[float]:
    times = []
    for _ in range(num_batches):
        start = time.perf_counter()
        for _ in range(batch):
            operation()
        times.append(time.perf_counter() - start)
    return times


def concurrent_rates(lanes: Mapping[str, Lane], *, seconds: float) -> dict[str, float]:
    """Bytes per second of each lane while all of them run, each on a thread of its own.

    Counted from the moment every lane has finished a step until the first lane stops.
    """
    barrier = threading.Barrier(len(lanes))

    def run(lane: Lane) -> list[float]:
        stamps: list[float] = []
        barrier.wait()
        deadline = time.perf_counter() + seconds
        while len(stamps) < 4 or stamps[-1] < deadline:
            lane.step()
            stamps.append(time.perf_counter())
        return stamps

    with ThreadPoolExecutor(len(lanes)) as pool:
        stamps = dict(zip(lanes, pool.map(run, lanes.values()), strict=True))
    start = max(finished[0] for finished in stamps.values())
    end = min(finished[-1] for finished in stamps.values())
    return {name: lane.num_bytes * steps_per_second(stamps[name], start, end) for name, lane in lanes.items()}


def steps_per_second(stamps: list[float], start: float, end: float) -> float:
    """Rate of the steps that were finished from `start` to `end`, from the first one's end to the last one's."""
    inside = stamps[bisect_left(stamps, start) : bisect_right(stamps, end)]
    if len(inside) < 2:  # steps longer than the others' whole time: all of them, the best that is known
        inside = stamps
    return (len(inside) - 1) / (inside[-1] - inside[0])


def copy_lane(destination: torch.Tensor, source: torch.Tensor) -> Lane:
    """Copies of `source` into `destination`, on a stream of its own with two in flight where a GPU takes part."""
    num_bytes = source.numel() * source.element_size()
    if not (destination.is_cuda or source.is_cuda):
        return Lane(lambda: destination.copy_(source), num_bytes)
    stream = torch.cuda.Stream()
    in_flight: deque[torch.cuda.Event] = deque()

    def step() -> None:
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
            # blocking: the thread sleeps instead of spinning on a core that a host optimizer needs.
            in_flight.append(torch.cuda.Event(blocking=True))
            in_flight[-1].record(stream)
        if len(in_flight) > 1:
            in_flight.popleft().synchronize()

    return Lane(step, num_bytes)
