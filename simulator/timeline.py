"""Timelines, predicted or measured: when every operation of a step ran, memory over time, lost time by cause."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulator.errors import InputError

# What an operation of each kind does for the step, and how idle time of the compute resource is called when an
# operation of that kind is what it waited for.
BUSY = {
    "forward": "forward",
    "recompute": "recompute",
    "loss": "loss",
    "backward": "backward",
    "finish_gradient": "gradients",
    "clip": "gradients",
    "update": "update",
    "report": "gradients",
}
WAITING = {
    "load_weights": "waiting for weights",
    "load_batch": "waiting for data",
    "store_gradient": "waiting for gradient slabs",
    "update": "waiting for updates",
}


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
        """Seconds of a step by what the compute resource did or waited for; they sum to `step_seconds`."""
        compute = sorted((s for s in self.spans if s.resource == "compute"), key=lambda span: span.start)
        seconds: dict[str, float] = {}
        clock = compute[-1].end - self.step_seconds if compute else 0.0
        for span in compute:
            if span.start > clock:
                kind = span.cause.partition(".")[0]
                reason = WAITING.get(kind, "waiting for other operations") if span.cause else "launch gaps"
                seconds[reason] = seconds.get(reason, 0.0) + span.start - clock
            label = BUSY[span.kind]
            busy = span.end - max(span.start, clock)
            seconds[label] = seconds.get(label, 0.0) + max(busy, 0.0)
            clock = max(clock, span.end)
        return seconds

    def busy_seconds(self) -> dict[str, float]:
        """Seconds that each resource worked in the step."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.resource] = seconds.get(span.resource, 0.0) + span.end - span.start
        return seconds

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=0) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Timeline":
        """Read a file that `save` wrote. Raises InputError naming the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(
                step_seconds=data["step_seconds"],
                spans=tuple(Span(**row) for row in data["spans"]),
                memory={tier: tuple(MemoryPoint(**row) for row in rows) for tier, rows in data["memory"].items()},
                peak_bytes=data["peak_bytes"],
            )
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: is not a timeline ({error})") from error


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


def largest_deviations(predicted: Timeline, measured: Timeline, count: int = 5) -> list[tuple[str, float, float]]:
    """(kind, predicted seconds, measured seconds) summed over a step, largest absolute difference first."""

    def by_kind(spans: Sequence[Span]) -> dict[str, float]:
        total: dict[str, float] = {}
        for span in spans:
            key = f"{span.kind} on {span.resource}"
            total[key] = total.get(key, 0.0) + span.end - span.start
        return total

    left, right = by_kind(predicted.spans), by_kind(measured.spans)
    rows = [(kind, left.get(kind, 0.0), right.get(kind, 0.0)) for kind in {*left, *right}]
    return sorted(rows, key=lambda row: (-abs(row[1] - row[2]), row[0]))[:count]
