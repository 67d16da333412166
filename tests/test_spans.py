"""Lost time of a step that nobody records: from the events of what waited, against a hand's arithmetic."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.spans import Launched, ends_before, event_times, spans_with_causes
from simulator.model import model_spec
from simulator.policy import Workload, uniform_policy
from simulator.program import Kind, Operation, Resource, Wait
from simulator.timeline import Timeline
from tests.tiny import make_trainer, random_weights, tiny_batches, tiny_config


class Event:
    """A CUDA event that says it was recorded at `time`, in seconds, or that it has not been reached yet."""

    def __init__(self, time: float | None) -> None:
        self.time = time

    def query(self) -> bool:
        return self.time is not None

    def elapsed_time(self, later: "Event") -> float:
        assert self.time is not None
        assert later.time is not None, "asks when something was that has not ended"
        return (later.time - self.time) * 1e3


def launched(kind: Kind, resource: Resource, *waits: str, block: int = -1, **times: Any) -> Launched:
    name = f"{kind.value}.{block}"
    operation = Operation(name, kind, resource, block, waits=tuple(Wait(wait, 0) for wait in waits))
    start, end = times.get("start"), times.get("end")
    return Launched(
        operation,
        start=None if start is None else Event(start),  # type: ignore[arg-type]
        end=None if resource is Resource.HOST else Event(end),  # type: ignore[arg-type]
        seconds=list(times.get("host", ())),
    )


def lost(step_seconds: float, *items: Launched) -> dict[str, float]:
    program = {item.operation.name: item for item in items}
    times = event_times(program, Event(-10.0))  # type: ignore[arg-type]
    spans = spans_with_causes([item.operation for item in items], times)
    return {cause: s for cause, s in Timeline(step_seconds, tuple(spans), {}, {}).lost_seconds().items() if s}


def test_waiting_is_divided_between_the_update_and_the_copy_behind_it() -> None:
    found = lost(
        5.0,
        launched(Kind.UPDATE, Resource.HOST, block=2, host=(1000.2, 1002.4)),  # on the host's own clock
        launched(Kind.FORWARD, Resource.COMPUTE, block=1, start=0.0, end=1.0),
        launched(Kind.LOAD_WEIGHTS, Resource.H2D, block=1, start=0.1, end=0.5),
        launched(Kind.LOAD_WEIGHTS, Resource.H2D, "update.2", block=2, start=2.5, end=3.0),
        launched(Kind.FORWARD, Resource.COMPUTE, "load_weights.2", block=2, start=3.0, end=4.0),
        launched(Kind.REPORT, Resource.COMPUTE, end=5.0),
    )
    assert found == pytest.approx({"waiting for updates": 1.5, "waiting for weights": 0.5})


def test_an_update_that_ended_long_ago_is_not_blamed_for_what_something_else_held_up() -> None:
    found = lost(
        6.0,
        launched(Kind.UPDATE, Resource.HOST, block=2, host=(1000.0, 1000.1)),
        launched(Kind.LOAD_WEIGHTS, Resource.H2D, block=1, start=0.1, end=0.5),
        launched(Kind.FORWARD, Resource.COMPUTE, block=1, start=0.0, end=2.0),
        # The copy needs the slot that forward.1 reads, and starts as soon as that has ended.
        launched(Kind.LOAD_WEIGHTS, Resource.H2D, "update.2", "forward.1", block=2, start=2.0, end=3.5),
        launched(Kind.FORWARD, Resource.COMPUTE, "load_weights.2", block=2, start=3.5, end=5.0),
        launched(Kind.REPORT, Resource.COMPUTE, end=6.0),
    )
    assert found == pytest.approx({"waiting for weights": 1.5})


def test_an_update_that_waited_for_its_gradient_passes_the_blame_on() -> None:
    # Layerwise clipping: gradient out from 1.0 to 2.0, update from 2.0 to 2.6, weights back from 2.6 to 3.0.
    found = lost(
        4.0,
        launched(Kind.FORWARD, Resource.COMPUTE, block=1, start=0.0, end=1.0),
        launched(Kind.UPDATE, Resource.HOST, block=1, host=(499.0, 500.0)),
        launched(Kind.LOAD_WEIGHTS, Resource.H2D, "update.1", block=1, start=0.9, end=0.95),
        launched(Kind.STORE_GRADIENT, Resource.D2H, block=2, start=1.0, end=2.0),
        launched(Kind.UPDATE, Resource.HOST, "store_gradient.2", block=2, host=(501.0, 501.6)),
        launched(Kind.LOAD_WEIGHTS, Resource.H2D, "update.2", block=2, start=2.6, end=3.0),
        launched(Kind.FORWARD, Resource.COMPUTE, "load_weights.2", block=2, start=3.0, end=3.5),
        launched(Kind.REPORT, Resource.COMPUTE, end=4.0),
    )
    assert found == pytest.approx(
        {"waiting for gradients": 1.0, "waiting for updates": 0.6, "waiting for weights": 0.4}
    )


def test_what_waits_for_the_step_before_names_it() -> None:
    # The gradient's slab is free when the step before has stored what it held: at 1.5, half a second late.
    store = launched(Kind.STORE_GRADIENT, Resource.D2H, block=1, start=4.0, end=5.5)
    finish = launched(Kind.FINISH_GRADIENT, Resource.COMPUTE, block=1, start=1.5, end=2.0)
    finish.operation = replace(finish.operation, waits=(Wait("store_gradient.1", -1),))
    items = [
        launched(Kind.FORWARD, Resource.COMPUTE, block=1, start=0.0, end=1.0),
        finish,
        launched(Kind.REPORT, Resource.COMPUTE, end=4.0),
        store,
    ]
    before = {"store_gradient.1": launched(Kind.STORE_GRADIENT, Resource.D2H, block=1, start=0.0, end=1.5)}
    program, epoch = {item.operation.name: item for item in items}, Event(-10.0)
    ends = ends_before(program, before, epoch)  # type: ignore[arg-type]
    spans = spans_with_causes([item.operation for item in items], event_times(program, epoch), ends)  # type: ignore[arg-type]
    found = Timeline(4.0, tuple(spans), {}, {}).lost_seconds()
    assert found["waiting for gradients"] == pytest.approx(0.5)


def test_what_has_not_ended_is_left_out_and_not_waited_for() -> None:
    found = lost(
        2.0,
        launched(Kind.LOAD_BATCH, Resource.H2D, block=0, start=0.0, end=0.4),
        launched(Kind.LOSS, Resource.COMPUTE, block=9, start=0.0, end=0.1),
        launched(Kind.FORWARD, Resource.COMPUTE, "load_batch.0", block=0, start=0.4, end=1.0),
        launched(Kind.REPORT, Resource.COMPUTE, end=2.0),
        launched(Kind.STORE_GRADIENT, Resource.D2H, "forward.0", block=1, start=None, end=None),
    )
    assert found == pytest.approx({"waiting for data": 0.3})


def test_a_step_s_lost_time_is_that_of_its_record() -> None:
    config = tiny_config()
    workload = Workload(sequence_length=16, tokens_per_step=96, precision="fp32")
    policy = uniform_policy(
        model_spec(config), workload, micro_batch_rows=2, groups=(3,), weights="host", optimizer="host",
        save_level="input",
    )  # fmt: skip
    trainer = make_trainer(config, workload, policy, random_weights(config, torch.float32))
    for batch in tiny_batches(3):
        trainer.step(batch, record=True)
        found = trainer.lost_seconds(1.0)
        assert found == trainer.timeline(1.0).lost_seconds()
        spans = {kind: [s for s in trainer.runner.spans() if s.kind == kind] for kind in ("load_weights", "update")}
        # One thread does everything: compute waits as long as the copies and the updates take.
        assert found["waiting for weights"] == pytest.approx(sum(s.end - s.start for s in spans["load_weights"]))
        assert found["waiting for updates"] == pytest.approx(sum(s.end - s.start for s in spans["update"]))
    trainer.close()
