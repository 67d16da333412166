"""Folding runs into costs: medians by key, alone where that was seen, and a replay that comes back to the run."""

from pathlib import Path
from random import Random

import pytest
from planning_cases import machine, toy_model

from planner.calibrate import MeasuredRun, fold_runs, load_run, require_same_device
from planner.plan import Limits, Plan
from planner.search import plan
from simulator.costs import MeasuredCost, OperationCosts, operation_key, shape_hash
from simulator.errors import InputError
from simulator.policy import Workload
from simulator.predict import TRAINING_PROCESS_BYTES, predict
from simulator.timeline import Span, Timeline

WORKLOAD = Workload(sequence_length=2048, tokens_per_step=4 * 2048, gradient_format="bf16", micro_batch_rows=1)
MODEL = toy_model(4, layer_elements=128 * 4000, edge_elements=128 * 4000)


def planned() -> Plan:
    """Everything on the device: a block would take 7 MB of a host that has 4 beside the process."""
    limits = Limits(device_memory_bytes=2**40, host_memory_bytes=TRAINING_PROCESS_BYTES + 4_000_000)
    return plan(MODEL, WORKLOAD, machine(), limits, with_baselines=False)


def run_of(found: Plan, timeline: Timeline, name: str = "run") -> MeasuredRun:
    return MeasuredRun(name, found, timeline)


def compute_of(timeline: Timeline) -> Timeline:
    spans = tuple(span for span in timeline.spans if span.resource == "compute")
    return Timeline(timeline.step_seconds, spans, timeline.memory, timeline.peak_bytes)


def slowed(timeline: Timeline, factor: float, random: Random | None = None) -> Timeline:
    """Every operation takes `factor` times as long, some a little more or less."""
    spans = []
    for span in timeline.spans:
        jitter = random.uniform(0.9, 1.1) if random else 1.0
        end = span.start + (span.end - span.start) * factor * jitter
        spans.append(
            Span(span.name, span.kind, span.resource, span.block, span.micro_batch, span.start, end, span.cause)
        )
    return Timeline(timeline.step_seconds * factor, tuple(spans), timeline.memory, timeline.peak_bytes)


def test_a_replay_with_folded_costs_takes_what_the_run_took() -> None:
    # Nothing moves but batches, so twice the prices make twice the step.
    found = planned()
    assert set(found.policy.optimizer_homes) == {"device"}
    costs = fold_runs([run_of(found, slowed(found.replay().timeline, 2.0))])
    again = predict(MODEL, WORKLOAD, found.policy, found.hardware, costs)
    assert again.figures.step_seconds == pytest.approx(2 * found.prediction.step_seconds, rel=1e-6)
    assert again.figures.device_peak_bytes == found.prediction.device_peak_bytes
    assert costs.folded_runs == ("run",)
    assert set(again.origins.values()) == {"measured"}


def test_seconds_are_medians_over_all_spans_of_a_key() -> None:
    found = planned()
    random = Random(1)
    timelines = [slowed(compute_of(found.replay().timeline), factor, random) for factor in (1.0, 1.5, 1.7)]
    costs = fold_runs([run_of(found, timeline, f"run {n}") for n, timeline in enumerate(timelines)])
    operations = {operation.name: operation for operation in found.replay().program.steady}
    seconds = sorted(
        span.end - span.start
        for timeline in timelines
        for span in timeline.spans
        if span.name.startswith("forward.") and span.block in MODEL.layers
    )
    key = operation_key(operations["forward.1.0"], MODEL, WORKLOAD, found.policy)
    middle = len(seconds) // 2
    assert costs.entries[key].seconds == pytest.approx((seconds[middle - 1] + seconds[middle]) / 2)
    assert costs.folded_runs == ("run 0", "run 1", "run 2")


def test_spans_seen_alone_count_where_there_are_some() -> None:
    found = planned()
    timeline = found.replay().timeline
    busy = [span for span in timeline.spans if span.name in ("forward.2.0", "forward.3.0", "forward.4.0")]
    # A copy beside three of the four layers makes them look three times as long.
    spans = [
        Span(s.name, s.kind, s.resource, s.block, s.micro_batch, s.start, s.start + 3 * (s.end - s.start))
        if s in busy
        else s
        for s in timeline.spans
    ]
    copies = [
        Span(s.name, s.kind, s.resource, s.block, s.micro_batch, busy[0].start, busy[-1].end)
        if s.name == "load_batch.1"
        else s
        for s in spans
    ]
    costs = fold_runs([run_of(found, Timeline(timeline.step_seconds, tuple(copies), {}, {}))])
    alone = next(span for span in timeline.spans if span.name == "forward.1.0")
    key = next(key for key in costs.entries if key.startswith("forward.layer"))
    assert costs.entries[key].seconds == pytest.approx(alone.end - alone.start)


def test_measured_bytes_stay_and_missing_ones_are_estimated_not_zero() -> None:
    found = planned()
    level = found.policy.save_levels[0]
    key = f"forward.layer.variant_0.{level}.1x2048"
    table = OperationCosts(
        hardware=found.inputs.hashes.hardware,
        shape=shape_hash(MODEL),
        precision="bf16",
        compiled=False,
        entries={key: MeasuredCost(seconds=9.0, transient_bytes=7, kept_bytes=123, source="measured: before")},
    )
    run = run_of(found, found.replay().timeline)
    assert (fold_runs([run], table).entries[key].kept_bytes, fold_runs([run], table).entries[key].transient_bytes) == (
        123,
        7,
    )
    assert fold_runs([run], table).entries[key].seconds < 9.0
    estimated = fold_runs([run]).entries[key]
    assert estimated.kept_bytes > 0
    assert estimated.transient_bytes is None


def test_a_run_is_folded_once_however_often_it_is_named() -> None:
    found = planned()
    run = run_of(found, found.replay().timeline)
    assert fold_runs([run], fold_runs([run, run])).folded_runs == ("run",)


def test_runs_of_another_shape_are_refused() -> None:
    found = planned()
    other = toy_model(4, layer_elements=128 * 5000)
    foreign = plan(other, WORKLOAD, machine(), with_baselines=False)
    with pytest.raises(InputError, match="'other' differs from the cost table in shape"):
        fold_runs([run_of(found, found.replay().timeline), run_of(foreign, foreign.replay().timeline, "other")])


def test_a_timeline_with_operations_that_its_plan_lacks_is_refused() -> None:
    found = planned()
    strange = Timeline(1.0, (Span("forward.99.0", "forward", "compute", 99, 0, 0.0, 1.0),), {}, {})
    with pytest.raises(InputError, match=r"forward\.99\.0"):
        fold_runs([run_of(found, strange)])


def test_no_runs_are_refused() -> None:
    with pytest.raises(InputError, match="no runs"):
        fold_runs([])


def test_run_directories_are_read_and_missing_files_named(tmp_path: Path) -> None:
    found = planned()
    directory = tmp_path / "first"
    directory.mkdir()
    found.save(directory / "plan.json")
    with pytest.raises(InputError, match=r"timeline\.json"):
        load_run(directory)
    found.replay().timeline.save(directory / "timeline.json")
    assert load_run(directory).name == "first"


def test_what_is_no_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "first").mkdir()
    with pytest.raises(InputError, match=r"calibrate: .*plan\.json is no run directory$"):
        load_run(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"furst is no run directory; did you mean .*first"):
        load_run(tmp_path / "furst")


def test_runs_of_another_device_are_refused() -> None:
    found = planned()
    run = run_of(found, found.replay().timeline)
    require_same_device([run], found.hardware)
    other = found.hardware.model_copy(
        update={"device": found.hardware.device.model_copy(update={"name": "another one"}), "name": "elsewhere"}
    )
    with pytest.raises(InputError, match=r"run 'run' was measured on .*, and 'elsewhere' computes on 'another one'"):
        require_same_device([run], other)
