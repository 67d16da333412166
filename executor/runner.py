"""The runner: works through a program on streams and threads, in exactly the program's order.

One launching thread walks the list. Operations on `compute`, `h2d` and `d2h` go to CUDA streams, `host` operations to
one worker thread; waits between streams are events. A stream cannot wait for an event that is not recorded yet, so
streams wait for the worker on a pinned word that counts its finished operations. Without CUDA everything runs inline,
one operation after another: the program's order is right for that too.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from executor.out_of_memory import doing
from executor.spans import Launched, ends_before, event_times, span, spans_with_causes
from executor.streams import StreamWait
from simulator.errors import ConveyorError
from simulator.program import Kind, Operation, Program, Resource, Wait
from simulator.timeline import MemoryPoint, Span

Function = Callable[[Operation], None]
# A wait that no one ends is a fault: give up after this long without any progress.
PATIENCE_SECONDS = 600.0
# Launches of compute operations that have not finished, at most. CUDA queues 1,024, events among them, and torch
# launches its compiled kernels with the interpreter lock held: a full queue behind a wait for the worker would keep
# from the worker the lock that it needs to end that wait.
QUEUED_LAUNCHES = 540
LAYER_LAUNCHES = 60  # of a layer's operation, at most


class Runner(Protocol):
    """Runs programs one after another; `synchronize` returns when all that was launched has finished."""

    pipelined: bool  # whether `run` returns before the program has finished
    functions: Mapping[Kind, Function]  # what runs an operation, by its kind

    def run(self, program: Program, *, record: bool = False) -> None: ...

    def synchronize(self) -> None: ...

    def finish_report(self) -> float: ...

    def reported_spans(self) -> list[Span]: ...

    def spans(self) -> list[Span]: ...

    def memory(self) -> list[MemoryPoint]: ...

    def close(self) -> None: ...


class InlineRunner:
    """Runs each operation to its end before the next starts: for machines without a GPU, and to measure alone.

    `device_bytes` tells the bytes that device buffers take now; `observe` is called before each operation and returns
    what to call after it.
    """

    pipelined = False

    def __init__(
        self,
        functions: Mapping[Kind, Function],
        device: torch.device,
        *,
        device_bytes: Callable[[], int],
        observe: Callable[[Operation], Callable[[], None]] | None = None,
    ) -> None:
        self.functions = functions
        self.device = device
        self.device_bytes = device_bytes
        self.observe = observe
        self._spans: list[Span] = []
        self._memory: list[MemoryPoint] = []
        self._reported = 0.0
        self._reported_spans: list[Span] = []

    def run(self, program: Program, *, record: bool = False) -> None:
        """Run a program from its first operation to its last."""
        spans, memory = [], []
        origin = time.perf_counter()
        for operation in program:
            after = self.observe(operation) if self.observe is not None else None
            start = time.perf_counter() - origin
            with doing(f"running operation {operation.name}"):
                self.functions[operation.kind](operation)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spans.append(span(operation, start, time.perf_counter() - origin))
            if operation.kind is Kind.REPORT:
                self._reported, self._reported_spans = time.perf_counter(), spans
            if after is not None:
                after()
            if record:
                memory.append(MemoryPoint(spans[-1].end, self.device_bytes()))
        if record:
            self._spans, self._memory = spans, memory

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def finish_report(self) -> float:
        """When the last report was there, on the clock of time.perf_counter. Nothing is ever pending."""
        return self._reported

    def reported_spans(self) -> list[Span]:
        """Spans of the program that reported last, seconds from its start."""
        return self._reported_spans

    def spans(self) -> list[Span]:
        """Spans of the last recorded program, seconds from its start."""
        return self._spans

    def memory(self) -> list[MemoryPoint]:
        """Bytes of device buffers after each operation of the last recorded program."""
        return self._memory

    def close(self) -> None:
        """Nothing to release."""


class _Launches(NamedTuple):
    """A program's operations on their way, and those of the program before."""

    launched: dict[str, Launched]
    before: dict[str, Launched]


class StreamRunner:
    """Runs programs on three CUDA streams and one worker thread.

    `launches` tells how many launches a compute operation is, at most.
    """

    pipelined = True

    def __init__(
        self,
        functions: Mapping[Kind, Function],
        device: torch.device,
        *,
        device_bytes: Callable[[], int],
        launches: Callable[[Operation], int] = lambda operation: LAYER_LAUNCHES,
    ) -> None:
        self.functions = functions
        self.device = device
        self.device_bytes = device_bytes
        self.launches = launches
        self.streams = {
            Resource.COMPUTE: torch.cuda.Stream(device, priority=-1),
            Resource.H2D: torch.cuda.Stream(device),
            Resource.D2H: torch.cuda.Stream(device),
        }
        self.worker = HostWorker(functions, device)
        self.stream_wait = StreamWait()
        self.launched: dict[str, Launched] = {}  # this step
        self.launched_before: dict[str, Launched] = {}  # the step before
        self._begun: set[Resource] = set()  # streams on which something of this step was launched
        self._ahead: deque[Launched] = deque()  # compute operations that may not have finished
        self._awaited = dict.fromkeys(self.streams, 0)  # the newest host operation that what a stream does waits for
        self._recorded: dict[str, Launched] = {}
        self._reference: tuple[torch.cuda.Event, float] | None = None
        self._reports: deque[tuple[_Launches, Launched]] = deque()  # programs whose reports nobody has waited for
        self._report_clock: tuple[torch.cuda.Event, float] | None = None  # an event, and when it was
        self._reported: tuple[_Launches, torch.cuda.Event] | None = None  # and an event from before all of it
        self._epoch: torch.cuda.Event | None = None  # the report before that of `_report_clock`

    def run(self, program: Program, *, record: bool = False) -> None:
        """Launch a program. Returns before it has finished."""
        self.launched_before, self.launched = self.launched, {}
        self._begun.clear()
        if record:
            self._reference = self._clock_reference()
        if self._report_clock is None:
            self._report_clock = self._clock_reference()
        for operation in program:
            self.worker.raise_failure()
            if operation.resource is Resource.HOST:
                launched = self.worker.submit(operation, [self._find(wait) for wait in operation.waits])
            else:
                launched = self._launch(operation, record)
            self.launched[operation.name] = launched
        if record:
            self._recorded = self.launched

    def _launch(self, operation: Operation, record: bool) -> Launched:
        stream = self.streams[operation.resource]
        waits = [found for found in map(self._find, operation.waits) if found is not None]
        newest = max([self._awaited[operation.resource], *(awaited.awaited for awaited in waits)])
        launched = Launched(operation, awaited=newest)
        self._awaited[operation.resource] = newest
        if operation.resource is Resource.COMPUTE:
            self._keep_queue_short(launched)
        for awaited in waits:
            if awaited.end is not None:
                stream.wait_event(awaited.end)
            else:
                self.stream_wait.until(stream, self.worker.finished_word, awaited.number, self.worker)
        with torch.cuda.stream(stream):
            # What waits, and what begins a program, tells in every step how long its stream did nothing.
            if record or operation.waits or operation.resource not in self._begun:
                self._begun.add(operation.resource)
                launched.start = torch.cuda.Event(enable_timing=True)
                launched.start.record(stream)
            with doing(f"launching operation {operation.name}"):
                self.functions[operation.kind](operation)
            launched.end = torch.cuda.Event(enable_timing=True, blocking=True)
            launched.end.record(stream)
        if operation.resource is Resource.COMPUTE:
            self._ahead.append(launched)
        if operation.kind is Kind.REPORT:
            self._reports.append((_Launches(self.launched, self.launched_before), launched))
        if record:
            launched.device_bytes = self.device_bytes()
        return launched

    def _keep_queue_short(self, launched: Launched) -> None:
        """Wait, without the interpreter lock, until what is queued leaves room for an operation's launches."""
        room = QUEUED_LAUNCHES - self.launches(launched.operation)
        while self._ahead and sum(self.launches(ahead.operation) for ahead in self._ahead) > room:
            self._wait_for(self._ahead.popleft())
        if launched.operation.kind is Kind.LOSS:  # its many chunks can fill the queue alone
            self.worker.wait_until(launched.awaited)

    def _wait_for(self, launched: Launched) -> None:
        # The worker first: its progress is watched, and without it a stream would hold this thread for ever.
        self.worker.wait_until(launched.awaited)
        assert launched.end is not None, "only streams' operations are waited for"
        launched.end.synchronize()

    def _find(self, wait: Wait) -> Launched | None:
        return (self.launched if wait.step_offset == 0 else self.launched_before).get(wait.operation)

    def synchronize(self) -> None:
        """Wait until all that was launched has finished. Raises what a worker raised."""
        self.worker.wait_all()
        for stream in self.streams.values():
            stream.synchronize()
        self.worker.raise_failure()

    def finish_report(self) -> float:
        """Wait for the oldest report that nobody has waited for.

        Returns when it was there, on the clock of time.perf_counter: by the GPU's clock from the report before, since
        the launching thread may look much later.
        """
        launches, report = self._reports.popleft()
        self._wait_for(report)
        self.worker.raise_failure()
        assert self._report_clock is not None
        assert report.end is not None
        event, clock = self._report_clock
        # A program's first copies may run before the report of the one before, and surely after that one's start.
        self._reported, self._epoch = (launches, self._epoch or event), event
        self._report_clock = report.end, clock + event.elapsed_time(report.end) / 1e3
        return self._report_clock[1]

    def reported_spans(self) -> list[Span]:
        """Spans of the program whose report was waited for last, as far as its events tell. Waits for nothing."""
        if self._reported is None:
            return []
        (launched, before), epoch = self._reported
        ends = ends_before(launched, before, epoch)
        return spans_with_causes([item.operation for item in launched.values()], event_times(launched, epoch), ends)

    def _clock_reference(self) -> tuple[torch.cuda.Event, float]:
        # An event on an idle stream completes at once: it ties the GPU's clock to the host's.
        stream = torch.cuda.Stream(self.device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        event.synchronize()
        return event, time.perf_counter()

    def spans(self) -> list[Span]:
        """Spans of the last recorded program, seconds from its first operation; waits until all of it has finished."""
        if self._reference is None or not self._recorded:
            return []
        event, clock = self._reference
        times: dict[str, tuple[float, float]] = {}
        self.worker.wait_until(max((launched.number for launched in self._recorded.values()), default=0))
        for name, launched in self._recorded.items():
            if launched.start is not None and launched.end is not None:
                launched.end.synchronize()
                times[name] = (event.elapsed_time(launched.start) / 1e3, event.elapsed_time(launched.end) / 1e3)
            else:
                times[name] = (launched.seconds[0] - clock, launched.seconds[1] - clock)
        return spans_with_causes([item.operation for item in self._recorded.values()], times)

    def memory(self) -> list[MemoryPoint]:
        """Bytes of device buffers after each compute operation of the last recorded program."""
        ends = {span.name: span.end for span in self.spans()}
        return [
            MemoryPoint(ends[name], launched.device_bytes)
            for name, launched in self._recorded.items()
            if launched.operation.resource is Resource.COMPUTE
        ]

    def close(self) -> None:
        """End the worker thread, and wait for what still runs: memory that it writes to may be given back then.

        Where the thread does not end, streams may wait for it for ever, so nobody waits for them.
        """
        if not self.worker.close():
            return
        with suppress(RuntimeError):  # of a device at fault
            for stream in self.streams.values():
                stream.synchronize()


class HostWorker:
    """One thread that runs host operations in order, and counts them in a pinned word that streams wait on."""

    def __init__(self, functions: Mapping[Kind, Function], device: torch.device) -> None:
        self.functions = functions
        self.device = device
        self.finished_word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.submitted = 0
        self.failure: BaseException | None = None
        self._progress = threading.Condition()
        self._queue: queue.SimpleQueue[tuple[Launched, Sequence[Launched | None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="conveyor-host", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> int:
        return int(self.finished_word[0])

    def submit(self, operation: Operation, waits: Sequence[Launched | None]) -> Launched:
        self.submitted += 1
        launched = Launched(operation, number=self.submitted, awaited=self.submitted)
        self._queue.put((launched, waits))
        return launched

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            launched, waits = item
            if self.failure is None:
                try:
                    for awaited in waits:
                        if awaited is not None and awaited.end is not None:
                            awaited.end.synchronize()
                    start = time.perf_counter()
                    with doing(f"running operation {launched.operation.name}"):
                        self.functions[launched.operation.kind](launched.operation)
                    launched.seconds += [start, time.perf_counter()]
                except BaseException as error:  # handed to the launching thread, which raises it
                    self.failure = error
            # Counted also after a failure: no stream may wait for ever for work that will not come.
            with self._progress:
                self.finished_word[0] = launched.number
                self._progress.notify_all()

    def wait_until(self, number: int) -> None:
        """Block the caller until operation `number` has finished."""
        with self._progress:
            while self.finished < number:
                before = self.finished
                self._progress.wait(PATIENCE_SECONDS)
                if self.finished == before:
                    raise ConveyorError(
                        f"the host worker made no progress for {PATIENCE_SECONDS:.0f} s after operation {before}"
                    )

    def wait_all(self) -> None:
        self.wait_until(self.submitted)

    def raise_failure(self) -> None:
        """Raise in the launching thread what ended the worker."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> bool:
        """Let the thread end. Whether it did, within `PATIENCE_SECONDS`."""
        self._queue.put(None)
        self._thread.join(timeout=PATIENCE_SECONDS)
        return not self._thread.is_alive()
