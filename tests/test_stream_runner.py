"""The stream runner's own bookkeeping, with stand-ins for CUDA's streams and events that finish at once."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

import executor.runner
from executor.runner import Function, StreamRunner
from simulator.errors import ConveyorError
from simulator.program import Kind, Operation, Program, Resource, Wait

NUM_FORWARDS = 30


class Event:
    def __init__(self, **choices: bool) -> None:
        self.time = 0.0

    def record(self, stream: object) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        assert self.time, "waits for an event that nobody has recorded"

    def query(self) -> bool:
        return bool(self.time)

    def elapsed_time(self, later: "Event") -> float:
        return (later.time - self.time) * 1e3


class Stream:
    def __init__(self, *arguments: object, **choices: int) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        pass


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Function], StreamRunner]:
    """A runner whose updates are the function given and whose other operations do nothing."""
    zeros = torch.zeros

    def unpinned(*size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        return zeros(*size, dtype=dtype)

    def enter(stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    # On the device: the stream waits, the launching thread does not.
    monkeypatch.setattr(executor.runner.StreamWait, "until", lambda self, stream, word, number, worker: None)

    def make(update: Function) -> StreamRunner:
        functions = dict.fromkeys(Kind, lambda operation: None)
        return StreamRunner({**functions, Kind.UPDATE: update}, torch.device("cuda"), device_bytes=lambda: 0)

    return make


def program() -> Program:
    waits = (Wait("update", 0),)
    operations = [
        Operation("update", Kind.UPDATE, Resource.HOST),
        *(Operation(f"forward.{n}", Kind.FORWARD, Resource.COMPUTE, waits=waits) for n in range(NUM_FORWARDS)),
        Operation("loss", Kind.LOSS, Resource.COMPUTE),
        Operation("report", Kind.REPORT, Resource.COMPUTE),
    ]
    return Program("first", tuple(operations), {})


def test_reports_come_in_order_and_a_recorded_program_has_a_span_an_operation(
    runner: Callable[[Function], StreamRunner],
) -> None:
    found = runner(lambda operation: None)
    before = time.perf_counter()
    found.run(program())
    assert found.spans() == []  # nothing was recorded
    found.run(program(), record=True)
    reports = [found.finish_report(), found.finish_report()]
    assert before <= reports[0] <= reports[1] <= time.perf_counter()
    assert {span.name for span in found.spans()} == {operation.name for operation in program()}
    on_streams = {operation.name for operation in program() if operation.resource is not Resource.HOST}
    assert on_streams <= {span.name for span in found.reported_spans()}
    found.close()


def test_a_failed_update_ends_the_launching_thread(runner: Callable[[Function], StreamRunner]) -> None:
    def fail(operation: Operation) -> None:
        raise ValueError("no such luck")

    found = runner(fail)
    with pytest.raises(ValueError, match="no such luck"):
        found.run(program())  # the loss waits for the worker, and the operation after it finds the failure
    found.close()


def test_an_update_that_never_ends_is_given_up(
    runner: Callable[[Function], StreamRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.runner, "PATIENCE_SECONDS", 0.2)
    found = runner(lambda operation: time.sleep(2.0))
    with pytest.raises(ConveyorError, match="the host worker made no progress"):
        found.run(program())
    monkeypatch.setattr(executor.runner, "PATIENCE_SECONDS", 600.0)
    found.close()


def test_compute_is_launched_while_copies_alone_wait_for_the_worker(
    runner: Callable[[Function], StreamRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    independent = threading.Event()
    in_time: list[bool] = []
    found = runner(lambda operation: in_time.append(independent.wait(5.0)))
    launch = found.functions[Kind.FORWARD]

    def forward(operation: Operation) -> None:
        if operation.name == "forward.last":
            independent.set()
        launch(operation)

    monkeypatch.setattr(found, "functions", {**found.functions, Kind.FORWARD: forward})
    names = [*(f"forward.{number}" for number in range(NUM_FORWARDS)), "forward.last"]
    operations = [
        Operation("update", Kind.UPDATE, Resource.HOST),
        Operation("load", Kind.LOAD_WEIGHTS, Resource.H2D, waits=(Wait("update", 0),)),
        *(Operation(name, Kind.FORWARD, Resource.COMPUTE, block=1) for name in names),
        Operation("loss", Kind.LOSS, Resource.COMPUTE, waits=(Wait("load", 0),)),
    ]
    found.run(Program("first", tuple(operations), {}))
    # The loss waits for the load, and so for the update, before it is launched.
    assert found.worker.finished == 1
    assert in_time == [True]
    found.close()


@pytest.mark.parametrize(("launches", "ahead"), [(60, 9), (540, 1), (900, 1), (10, 54), (77, 7)])
def test_so_many_operations_are_queued_as_their_launches_have_room(
    runner: Callable[[Function], StreamRunner], monkeypatch: pytest.MonkeyPatch, launches: int, ahead: int
) -> None:
    ended: list[Event] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: ended.append(event))
    found = runner(lambda operation: None)
    found.launches = lambda operation: launches
    operations = [Operation(f"forward.{n}", Kind.FORWARD, Resource.COMPUTE) for n in range(ahead + 20)]
    before = len(ended) + 1  # the clock's own event, when a program starts
    found.run(Program("first", tuple(operations), {}))
    assert len(ended) - before == 20
    found.close()


def test_closing_waits_for_no_stream_where_the_worker_hangs(
    runner: Callable[[Function], StreamRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Stream] = []
    monkeypatch.setattr(Stream, "synchronize", lambda stream: waited.append(stream))
    go_on = threading.Event()
    hanging, sound = runner(lambda operation: go_on.wait() and None), runner(lambda operation: None)
    hanging.worker.submit(program().operations[0], [])
    monkeypatch.setattr(executor.runner, "PATIENCE_SECONDS", 0.2)
    hanging.close()
    assert waited == []
    go_on.set()
    sound.close()
    assert len(waited) == len(sound.streams)
