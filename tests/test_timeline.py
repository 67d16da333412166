"""Timelines: lost time by cause on spans written by hand, files, traces, memory curves, deviations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import InputError
from simulator.timeline import MemoryPoint, Span, Timeline, chrome_trace, largest_deviations, memory_curve

RESOURCES = {"load_weights": "h2d", "load_batch": "h2d", "store_gradient": "d2h"}


def span(name: str, start: float, end: float, *, cause: str = "", resource: str = "") -> Span:
    kind = name.partition(".")[0]
    return Span(name, kind, resource or RESOURCES.get(kind, "compute"), 1, 0, start, end, cause)


def timeline(step_seconds: float, *spans: Span) -> Timeline:
    return Timeline(step_seconds, spans, {"device": (MemoryPoint(0.0, 5), MemoryPoint(1.0, 9))}, {"device": 9})


def test_busy_and_idle_add_up_to_the_step() -> None:
    step = timeline(
        10.0,
        span("load_weights.1", 0, 3),
        span("forward.1", 3, 5, cause="load_weights.1"),
        span("backward.1", 5, 9),
        span("report", 9, 10),
    )
    assert step.breakdown() == {"waiting for weights": 3.0, "forward": 2.0, "backward": 4.0, "gradients": 1.0}
    assert step.busy_seconds() == {"h2d": 3.0, "compute": 7.0}


def test_time_between_operations_that_wait_for_nothing_is_a_launch_gap() -> None:
    step = timeline(10.0, span("forward.1", 1, 5), span("load_weights.2", 0, 9), span("backward.1", 6, 10))
    assert step.breakdown() == {"launch gaps": 2.0, "forward": 4.0, "backward": 4.0}


def test_launch_gaps_are_told_by_what_came_after_them() -> None:
    step = timeline(
        12.0,
        span("load_weights.2", 0, 5),
        span("update.0", 0.5, 1),
        span("forward.1", 1, 3),
        span("forward.2", 6, 8, cause="load_weights.2"),
        span("backward.1", 10, 11.5),
    )
    # What waits for a load is no launch gap; the step's turn is before its first operation.
    assert step.launch_gaps() == {"backward.1": 2.0, "update.0": 1.0}
    assert list(step.launch_gaps()) == ["backward.1", "update.0"]
    assert sum(step.launch_gaps().values()) == step.breakdown()["launch gaps"]


def test_on_one_thread_idle_time_is_what_ran_instead() -> None:
    step = timeline(
        12.0,
        span("update.1", 0, 3, resource="host"),
        span("update.2", 3, 5, resource="host"),
        span("load_weights.1", 5, 6),
        span("forward.1", 7, 9),  # a second of launching before it
        span("backward.1", 9, 12),
    )
    assert step.breakdown() == {
        "waiting for updates": 5.0,
        "waiting for weights": 1.0,
        "launch gaps": 1.0,
        "forward": 2.0,
        "backward": 3.0,
    }


def test_a_gap_is_divided_along_the_chain_that_led_to_its_end() -> None:
    # Weights waited for an update, which stood behind another one, which waited for a gradient on its way out.
    step = timeline(
        20.0,
        span("store_gradient.1", 0, 2),
        span("update.1", 2, 5, resource="host", cause="store_gradient.1"),
        span("update.2", 5, 9, resource="host"),
        span("load_weights.2", 9, 10, cause="update.2"),
        span("forward.2", 10, 20, cause="load_weights.2"),
    )
    assert step.breakdown() == {
        "waiting for weights": 1.0,
        "waiting for updates": 7.0,
        "waiting for gradients": 2.0,
        "forward": 10.0,
    }


def test_a_chain_goes_back_into_the_step_before() -> None:
    # The store that forward waits for is last step's: 20 s before the one in this timeline, 19 to 22.
    step = timeline(
        20.0,
        span("forward.1", 2, 12, cause="store_gradient.1"),
        span("backward.1", 12, 20),
        span("store_gradient.2", 18, 19),
        span("store_gradient.1", 19, 22),
    )
    assert step.breakdown() == {"waiting for gradients": 2.0, "forward": 10.0, "backward": 8.0}


def test_causes_that_lead_nowhere_still_add_up() -> None:
    step = timeline(6.0, span("forward.1", 2, 6, cause="never_recorded.1"))
    assert step.breakdown() == {"waiting for other operations": 2.0, "forward": 4.0}
    # Two operations that name each other, as noise in measured times can make them.
    step = timeline(
        6.0,
        span("load_weights.1", 1, 2, cause="store_gradient.1"),
        span("store_gradient.1", 1, 2, cause="load_weights.1"),
        span("forward.1", 2, 6, cause="load_weights.1"),
    )
    assert sum(step.breakdown().values()) == pytest.approx(6.0)


def test_a_timeline_survives_its_file(tmp_path: Path) -> None:
    step = timeline(10.0, span("load_weights.1", -1, 3), span("forward.1", 3, 5, cause="load_weights.1"))
    step.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == step


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step_seconds": 1, "spans": [{}], "memory": {}, "peak_bytes": {}}'])
def test_a_file_that_is_no_timeline_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"timeline\.json: is not a timeline"):
        Timeline.load(path)
    with pytest.raises(InputError, match=r"missing\.json: cannot be read"):
        Timeline.load(tmp_path / "missing.json")


def test_memory_is_freed_before_it_is_taken_at_the_same_moment() -> None:
    points, peak = memory_curve([(2.0, 7), (0.0, 5), (2.0, -5), (3.0, -7)], base=10)
    assert points == [MemoryPoint(0.0, 15), MemoryPoint(2.0, 17), MemoryPoint(3.0, 10)]
    assert peak == 17
    assert memory_curve([], base=3) == ([], 3)


def test_a_trace_has_a_thread_for_each_resource_and_microseconds() -> None:
    predicted = timeline(10.0, span("load_weights.1", 0, 3), span("forward.1", 3, 5, cause="load_weights.1"))
    trace = chrome_trace({"predicted": predicted, "measured": timeline(9.0, span("forward.1", 2, 4))})
    events = trace["traceEvents"]
    assert json.loads(json.dumps(trace)) == trace
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        (0, None): "predicted", (0, 0): "compute", (0, 1): "h2d", (1, None): "measured", (1, 0): "compute",
    }  # fmt: skip
    forward = next(e for e in events if e["ph"] == "X" and e["name"] == "forward.1" and e["pid"] == 0)
    assert (forward["tid"], forward["ts"], forward["dur"]) == (0, 3e6, 2e6)
    assert forward["args"] == {"waited_for": "load_weights.1"}
    counters = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert counters == [(0.0, 5), (1e6, 9)]


def test_deviations_are_summed_by_kind_and_the_largest_comes_first() -> None:
    predicted = timeline(10.0, span("forward.1", 0, 2), span("forward.2", 2, 4), span("load_weights.1", 0, 1))
    measured = timeline(10.0, span("forward.1", 0, 3), span("forward.2", 3, 6), span("report", 6, 6.5))
    assert largest_deviations(predicted, measured, count=2) == [
        ("forward on compute", 4.0, 6.0),
        ("load_weights on h2d", 1.0, None),  # not 0: nobody has measured it
    ]
    assert len(largest_deviations(predicted, measured)) == 3


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data["spans"][0].update(start="x"),
        lambda data: data["spans"][0].update(end=None),
        lambda data: data["spans"][0].update(name=[]),
        lambda data: data["spans"][0].update(start=1e300),
        lambda data: data["spans"][0].update(start=10**400),
        lambda data: data.update(spans=[]),
        lambda data: data.update(memory=3),
        lambda data: data.update(step_seconds=0),
        lambda data: data.update(step_seconds=float("nan")),
        lambda data: data["memory"].update(device=[{"seconds": 0, "num_bytes": 10**30}]),
        lambda data: data.update(peak_bytes={"device": -1}),
    ],
)
def test_a_damaged_timeline_is_a_sentence(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    span = Span("forward.1", "forward", "compute", 1, 0, 0.0, 0.5)
    Timeline(0.5, (span,), {"device": (MemoryPoint(0.0, 5),)}, {"device": 5}).save(tmp_path / "timeline.json")
    data = json.loads((tmp_path / "timeline.json").read_text())
    edit(data)
    (tmp_path / "timeline.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"timeline\.json: is not a timeline"):
        Timeline.load(tmp_path / "timeline.json")
