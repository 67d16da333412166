"""Spans: when the operations of a program ran, by the events that they left on their streams."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from simulator.program import Operation, Resource
from simulator.timeline import Span

# A stream that starts within this time of what it waited for did not lose anything to other causes.
GAP_SECONDS = 20e-6


@dataclass(slots=True)
class Launched:
    """An operation on its way: its end as an event (streams) or as a number in the worker's order (host)."""

    operation: Operation
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    number: int = 0
    awaited: int = 0  # the newest host operation without whose end this one cannot end; a host operation's own number
    seconds: list[float] = field(default_factory=list)  # host operations: start and end
    device_bytes: int = 0  # allocated when it was launched: compute allocates in stream order, so also when it ran


def event_times(launched: Mapping[str, Launched], epoch: torch.cuda.Event) -> dict[str, tuple[float, float]]:
    """Start and end of the operations of a program that has reported, seconds after `epoch`. Waits for nothing.

    All times are the GPU's. An operation without an event at its start began when its stream had ended the one before;
    the first one on a stream has such an event.
    The host keeps another clock: its operation ended when the first stream that it held up went on, and lasted as long
    as the host says. Left out are operations that have not ended yet, and host operations that held up no stream.
    """
    times: dict[str, tuple[float, float]] = {}
    free: dict[Resource, float] = {}
    released: dict[str, float] = {}  # host operation -> when the first stream that it held up went on
    for name, item in launched.items():
        if item.end is None or not item.end.query():
            continue
        resource, waits = item.operation.resource, [w.operation for w in item.operation.waits if w.step_offset == 0]
        end = epoch.elapsed_time(item.end) / 1e3
        start = epoch.elapsed_time(item.start) / 1e3 if item.start is not None else free[resource]
        # When nothing but the host can have kept the stream from starting.
        ready = max([free.get(resource, -math.inf), *(times[wait][1] for wait in waits if wait in times)])
        if start - ready > GAP_SECONDS:
            for wait in waits:
                if len(launched[wait].seconds) == 2:
                    released[wait] = min(start, released.get(wait, start))
        times[name] = start, end
        free[resource] = end
    for name, end in released.items():
        begun, ended = launched[name].seconds
        times[name] = end - (ended - begun), end
    return times


def ends_before(
    launched: Mapping[str, Launched], before: Mapping[str, Launched], epoch: torch.cuda.Event
) -> dict[str, float]:
    """When operations of the program `before` ended for which one of `launched` waits, seconds after `epoch`.

    Of operations on streams; when the host was ready, nobody has told the GPU.
    """
    awaited = {wait.operation for item in launched.values() for wait in item.operation.waits if wait.step_offset}
    ends = {name: before[name].end for name in awaited if name in before}
    return {name: epoch.elapsed_time(end) / 1e3 for name, end in ends.items() if end is not None and end.query()}


def spans_with_causes(
    operations: Sequence[Operation],
    times: Mapping[str, tuple[float, float]],
    before: Mapping[str, float] = MappingProxyType({}),
) -> list[Span]:
    """Spans from the start of the first operation; the cause of a gap is the awaited operation that ended last.

    `before` has the ends of awaited operations of the program before, by the same clock as `times`.
    """
    origin = min((start for start, _ in times.values()), default=0.0)
    busy_until: dict[Resource, float] = {}
    spans = []
    for operation in operations:
        if operation.name not in times:
            continue
        start, end = times[operation.name]
        cause = ""
        if start - busy_until.get(operation.resource, start) > GAP_SECONDS:
            waits = [(wait.operation, wait.step_offset) for wait in operation.waits]
            ends = {name: times[name][1] for name, offset in waits if not offset and name in times}
            ends |= {name: before[name] for name, offset in waits if offset and name in before}
            ended = max(ends, key=lambda name: ends[name], default="")
            # Only what ended inside the gap can have caused it.
            if ended and ends[ended] > busy_until[operation.resource]:
                cause = ended
        busy_until[operation.resource] = max(end, busy_until.get(operation.resource, end))
        spans.append(span(operation, start - origin, end - origin, cause))
    return spans


def span(operation: Operation, start: float, end: float, cause: str = "") -> Span:
    """An operation's span from its start to its end, in seconds."""
    return Span(
        operation.name, operation.kind.value, operation.resource.value, operation.block, operation.micro_batch,
        start, end, cause,
    )  # fmt: skip
