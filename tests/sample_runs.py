"""Run records and directories for tests: a small step on four resources, with figures that are easy to add up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.record import PredictedFrom, RunRecord
from executor.run_directory import append_metrics, finish_run, start_run
from simulator.predict import StepFigures
from simulator.schema import Schema
from simulator.timeline import MemoryPoint, Span, Timeline
from simulator.units import GIB


class SamplePlan(Schema):
    """Stands for a plan, which a run directory only keeps."""

    note: str = ""


def timeline(num_layers: int = 4, *, layer_seconds: float = 0.1) -> Timeline:
    """Forward and backward of each layer one after another, loads ahead of the forward, an update over the edge.

    Compute is busy for all of the step: `num_layers` forwards of 1, a loss of 1, backwards of 2, in layer_seconds.
    """
    spans, clock = [], 0.0
    for block in range(1, num_layers + 1):
        spans.append(span("load_weights", "h2d", block, clock, clock + 0.5 * layer_seconds))
        spans.append(span("forward", "compute", block, clock, clock + layer_seconds))
        clock += layer_seconds
    spans.append(span("loss", "compute", num_layers + 1, clock, clock + layer_seconds))
    clock += layer_seconds
    for block in range(num_layers, 0, -1):
        spans.append(span("backward", "compute", block, clock, clock + 2 * layer_seconds))
        clock += 2 * layer_seconds
        spans.append(span("store_gradient", "d2h", block, clock, clock + 0.5 * layer_seconds))
    spans.append(span("update", "host", 1, clock - 0.5 * layer_seconds, clock + layer_seconds))
    memory = {
        "device": (MemoryPoint(0.0, 3 * GIB), MemoryPoint(clock / 2, 5 * GIB), MemoryPoint(0.9 * clock, 4 * GIB)),
        "host": (MemoryPoint(0.0, 20 * GIB),),
    }
    return Timeline(clock, tuple(spans), memory, {"device": 5 * GIB, "host": 20 * GIB})


def span(kind: str, resource: str, block: int, start: float, end: float) -> Span:
    return Span(f"{kind}.{block}.0", kind, resource, block, 0, start, end)


def moved(original: Timeline, seconds: float) -> Timeline:
    """The same step on a clock that runs `seconds` ahead."""
    return replace(
        original,
        spans=tuple(replace(s, start=s.start + seconds, end=s.end + seconds) for s in original.spans),
        memory={
            tier: tuple(MemoryPoint(point.seconds + seconds, point.num_bytes) for point in points)
            for tier, points in original.memory.items()
        },
    )


def figures(tflops: float, **changes: Any) -> StepFigures:
    values: dict[str, Any] = {
        "step_seconds": 600.0 / tflops,
        "tflops": tflops,
        "tflops_with_attention": 1.05 * tflops,
        "tokens_per_second": 20.0 * tflops,
        "device_peak_bytes": 6 * GIB,
        "host_peak_bytes": 22 * GIB,
        "breakdown_seconds": {
            "forward": 200.0 / tflops,
            "backward": 300.0 / tflops,
            "waiting for weights": 100 / tflops,
        },
        **changes,
    }
    return StepFigures(**values)


def record(
    case: str = "sample", *, predicted: float | None = 500.0, measured: float | None = 510.0, **changes: Any
) -> RunRecord:
    """A record of TFLOPS that are easy to find in a table."""
    values: dict[str, Any] = {
        "case": case,
        "inputs": {
            "model": {"family": "qwen2", "num_parameters": 7_615_616_512, "num_layers": 4},
            "workload": {"sequence_length": 1024, "tokens_per_step": 98304},
            "hardware": {"name": "sample-box"},
            "limits": {"device_memory_bytes": 8 * GIB, "host_memory_bytes": 200 * GIB},
        },
        "policy": {"groups": [3, 1, 1, 1], "weight_homes": ["device", "host", "host", "host", "host", "device"]},
        "status": "ok",
        "source_tree": {"simulator": "a" * 40, "planner": "b" * 40, "executor": "c" * 40, "analysis": "d" * 40},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "device_name": "Sample GPU",
        "predicted": figures(predicted) if predicted else None,
        "predicted_from": PredictedFrom(hardware="0123456789abcdef"),
        "measured": figures(measured) if measured else None,
        "clip_factors": (1.0, 0.5),
        "steps_timed": 20,
        **changes,
    }
    return RunRecord(**values)


def failed_record(case: str = "too large", **changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "status": "refused",
        "message": "host memory short by 41 GiB",
        "predicted": None,
        "predicted_from": None,
        "measured": None,
        "clip_factors": (),
        "steps_timed": 0,
        **changes,
    }
    return record(case, **values)


def write_run(directory: Path, run_record: RunRecord | None = None, *, losses: list[float] | None = None) -> Path:
    """A complete run directory, written as a trainer does."""
    start_run(directory, plan=SamplePlan(), config="model: m\nsteps: 3\n", predicted=timeline())
    for step, loss in enumerate(losses or [4.0, 3.0, 2.5], start=1):
        append_metrics(directory, {"step": step, "loss": loss, "seconds": 1.2})
    measured = moved(timeline(layer_seconds=0.11), 0.37)
    finish_run(directory, run_record or record(), measured=measured)
    return directory
