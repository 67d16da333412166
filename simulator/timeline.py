"""Timelines, predicted or measured: when every operation of a step ran, memory over time, lost time by cause."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from simulator.errors import InputError
from simulator.files import write_whole
from simulator.schema import describe

# What an operation of each kind does for the step, and how idle time of the compute resource is called when an
# operation of that kind is what it waited for.
BUSY = {
    "forward": "forward",
    "recompute": "recompute",
    "loss": "loss",
    "evaluate": "loss",
    "backward": "backward",
    "finish_gradient": "gradients",
    "clip": "gradients",
    "update": "update",
    "report": "gradients",
}
WAITING = {
    "load_weights": "waiting for weights",
    "load_batch": "waiting for data",
    "store_gradient": "waiting for gradients",
    "load_activation": "waiting for activations",
    "store_activation": "waiting for activations",
    "update": "waiting for updates",
    "load_state": "waiting for updates",
    "store_state": "waiting for updates",
    "store_weights": "waiting for updates",
}
OTHER_WAIT = "waiting for other operations"
LAUNCH_GAPS = "launch gaps"
# Ends and starts that differ by less than this share of a step are the same moment.
GRAIN = 1e-9
MOST_SECONDS = 1e7  # of a step: months
CLOCK_SECONDS = 1e-6  # what the ends of a measured operation may be off


@dataclass(frozen=True, slots=True)
class Span:
    """One operation's run. Seconds count from the start of the step; `cause` names what it had to wait for."""

    name: str
    kind: str
    resource: str
    block: int
    micro_batch: int
    start: float
    end: float
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One steady step. `memory` maps a tier to its bytes over time; peaks are over all steps replayed or run."""

    step_seconds: float
    spans: tuple[Span, ...]
    memory: dict[str, tuple[MemoryPoint, ...]]
    peak_bytes: dict[str, int]

    def breakdown(self) -> dict[str, float]:
        """Seconds of a step by what the compute resource did or waited for; they sum to `step_seconds`.

        An idle stretch is divided along the chain that led to its end: where forward waits for weights that wait for
        their update, the time until the update ends is the update's.
        """
        seconds: dict[str, float] = {}
        for _, label, part in self._stretches():
            seconds[label] = seconds.get(label, 0.0) + part
        return {label: total for label, total in seconds.items() if total > 0}

    def launch_gaps(self) -> dict[str, float]:
        """Seconds in which compute was idle because nobody had launched anything, by the operation that then came.

        The longest gaps first; the first operation's is the turn of the step.
        """
        gaps = {span.name: part for span, label, part in self._stretches() if label == LAUNCH_GAPS and part > 0}
        return dict(sorted(gaps.items(), key=lambda gap: -gap[1]))

    def _stretches(self) -> Iterator[tuple[Span, str, float]]:
        """Every compute operation with the stretches of idle time before it, by cause, and with its own time."""
        compute = sorted((s for s in self.spans if s.resource == "compute"), key=lambda span: span.start)
        chains = _Chains(self.spans, self.step_seconds)
        clock = compute[-1].end - self.step_seconds if compute else 0.0
        for span in compute:
            if span.start > clock:
                for reason, lost in chains.idle(clock, span):
                    yield span, reason, lost
            yield span, BUSY[span.kind], max(span.end - max(span.start, clock), 0.0)
            clock = max(clock, span.end)

    def lost_seconds(self) -> dict[str, float]:
        """The part of the breakdown in which the compute resource waited, by cause: all causes, 0 for most."""
        breakdown = self.breakdown()
        return {cause: breakdown.get(cause, 0.0) for cause in dict.fromkeys((*WAITING.values(), OTHER_WAIT))}

    def busy_seconds(self) -> dict[str, float]:
        """Seconds that each resource worked in the step."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.resource] = seconds.get(span.resource, 0.0) + span.end - span.start
        return seconds

    def save(self, path: Path | str) -> None:
        write_whole(path, json.dumps(asdict(self), indent=0) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> "Timeline":
        """Read a file that `save` wrote. Raises InputError naming the file, and what is wrong with it."""
        try:
            timeline = _timelines().validate_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: is not UTF-8 text") from error
        except pydantic.ValidationError as error:
            first = describe(error).partition("; ")[0]
            raise InputError(f"{path}: is not a timeline ({first})") from error
        if not timeline._is_possible():
            raise InputError(f"{path}: is not a timeline (it has no operations, or times or bytes that are impossible)")
        return timeline

    def _is_possible(self) -> bool:
        sizes = [*self.peak_bytes.values(), *(point.num_bytes for points in self.memory.values() for point in points)]
        ordered = all(-CLOCK_SECONDS <= span.end - span.start <= MOST_SECONDS for span in self.spans)
        return (
            len(self.spans) > 0
            and ordered
            and 0 < self.step_seconds <= MOST_SECONDS
            and all(0 <= size <= 2**62 for size in sizes)
        )


@cache
def _timelines() -> "pydantic.TypeAdapter[Timeline]":
    return pydantic.TypeAdapter(Timeline)


class _Moment(NamedTuple):
    """A span as it ran in this step or, `shift` seconds earlier, in a step like it before."""

    span: Span
    shift: float

    @property
    def start(self) -> float:
        return self.span.start - self.shift

    @property
    def end(self) -> float:
        return self.span.end - self.shift


class _Chains:
    """The spans of a step by name and by resource, to walk from an operation back to what it waited for."""

    def __init__(self, spans: Sequence[Span], step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.by_name = {span.name: span for span in spans}
        self.queues: dict[str, list[Span]] = {}
        self.places: dict[str, int] = {}
        for span in sorted(spans, key=lambda span: span.start):
            queue = self.queues.setdefault(span.resource, [])
            self.places[span.name] = len(queue)
            queue.append(span)

    def idle(self, since: float, span: Span) -> Iterator[tuple[str, float]]:
        """Seconds from `since` to the start of `span`, by what kept the compute resource idle."""
        if not span.cause:
            # Nothing was awaited: on one thread other operations ran here; on streams nothing was launched.
            left = span.start - since
            for other in self._inside(since, span.start):
                left -= other.end - other.start
                yield _reason(other), other.end - other.start
            yield LAUNCH_GAPS, left
            return
        until, awaited = span.start, self._cause(_Moment(span, 0.0))
        while awaited is not None and until > since:
            before = self._cause(awaited) if awaited.span.cause else self._predecessor(awaited)
            begun = min(max(since, before.end), until) if before is not None else since
            yield _reason(awaited.span), until - begun
            until, awaited = begun, before
        if until > since:
            yield OTHER_WAIT, until - since

    def _inside(self, since: float, until: float) -> Iterator[Span]:
        for resource, queue in self.queues.items():
            if resource != "compute":
                first = bisect_left(queue, since, key=lambda span: span.start)
                yield from takewhile(lambda span: span.end <= until, queue[first:])

    def _cause(self, moment: _Moment) -> _Moment | None:
        """What a span waited for: in its own step, or where that ends later, in the step before."""
        found = self.by_name.get(moment.span.cause)
        if found is None:
            return None
        in_time = found.end <= moment.span.start + GRAIN * self.step_seconds
        return _Moment(found, moment.shift + (0.0 if in_time else self.step_seconds))

    def _predecessor(self, moment: _Moment) -> _Moment:
        """What ran before a span on its resource."""
        queue, place = self.queues[moment.span.resource], self.places[moment.span.name]
        return _Moment(queue[place - 1], moment.shift + (0.0 if place else self.step_seconds))


def _reason(awaited: Span) -> str:
    return WAITING.get(awaited.kind, OTHER_WAIT)


def chrome_trace(timelines: dict[str, Timeline]) -> dict[str, Any]:
    """A trace for chrome://tracing or Perfetto: one process a timeline, one thread a resource; microseconds."""
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}})
        resources = sorted({span.resource for span in timeline.spans})
        for thread, resource in enumerate(resources):
            events.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": resource}})
        events += [_trace_event(span, process, resources.index(span.resource)) for span in timeline.spans]
        for tier, points in timeline.memory.items():
            events += [
                {
                    "ph": "C",
                    "pid": process,
                    "name": f"{tier} bytes",
                    "ts": p.seconds * 1e6,
                    "args": {"bytes": p.num_bytes},
                }
                for p in points
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _trace_event(span: Span, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": span.name,
        "cat": span.kind,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {"waited_for": span.cause} if span.cause else {},
    }


def memory_curve(changes: Iterable[tuple[float, int]], base: int) -> tuple[list[MemoryPoint], int]:
    """Bytes over time from (seconds, change) pairs, and the peak. At equal times memory is freed before it is taken."""
    points: list[MemoryPoint] = []
    level = peak = base
    for seconds, change in sorted(changes):
        level += change
        peak = max(peak, level)
        if points and points[-1].seconds == seconds:
            points[-1] = MemoryPoint(seconds, level)
        else:
            points.append(MemoryPoint(seconds, level))
    return points, peak


def largest_deviations(
    predicted: Timeline, measured: Timeline, count: int = 5
) -> list[tuple[str, float | None, float | None]]:
    """(kind, predicted seconds, measured seconds) summed over a step, largest absolute difference first.

    None where one of the two steps has no such operation: the first step of a run has no updates before it.
    """

    def by_kind(spans: Sequence[Span]) -> dict[str, float]:
        total: dict[str, float] = {}
        for span in spans:
            key = f"{span.kind} on {span.resource}"
            total[key] = total.get(key, 0.0) + span.end - span.start
        return total

    def rank(row: tuple[str, float | None, float | None]) -> tuple[float, str]:
        kind, before, after = row
        return -abs((before or 0.0) - (after or 0.0)), kind

    left, right = by_kind(predicted.spans), by_kind(measured.spans)
    return sorted(((kind, left.get(kind), right.get(kind)) for kind in {*left, *right}), key=rank)[:count]
