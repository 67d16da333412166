"""Sweeps: what they take, plans beside one another, figures and files."""

import csv
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from planning_cases import machine, random_case, tight_limits, toy_model

import planner.branch
from analysis.what_if import drawing, frame, save, table
from planner.plan import Limits, Plan
from planner.price import Price
from planner.search import plan
from planner.solve import solve
from planner.sweep import AXES, MAX_VALUES, Sweep, format_value, parse_sweep, sweep
from planner.task import Task
from simulator.errors import InfeasiblePlan, InputError
from simulator.policy import Workload

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("tokens-per-step=8192", "tokens-per-step", (8192,)),
        ("tokens_per_step=1024..8192", "tokens-per-step", (1024, 2048, 4096, 8192)),
        ("sequence-length=512..1500", "sequence-length", (512, 1024, 1500)),
        ("device-memory=48GiB, 24GiB", "device-memory", (24 * GIB, 48 * GIB)),
        ("host-memory=10GB..40GB:4", "host-memory", (10**10, 2 * 10**10, 3 * 10**10, 4 * 10**10)),
        ("host-memory=1GiB,1GiB..4GiB", "host-memory", (GIB, 2 * GIB, 4 * GIB)),
        ("link-bandwidth=12.5GB/s,25 GB/s", "link-bandwidth", (125 * 10**8, 25 * 10**9)),
        ("host-bandwidth=50GB/s..200GB/s", "host-bandwidth", (5 * 10**10, 10**11, 2 * 10**11)),
    ],
)
def test_what_may_be_asked(text: str, key: str, values: tuple[int, ...]) -> None:
    assert parse_sweep(text) == (key, values)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("device-memroy=24GiB", "there is no 'device-memroy' to change; did you mean 'device-memory'"),
        ("colour=red", "there is no 'colour' to change; it takes tokens-per-step, "),
        ("", "there is no ''"),
        ("device-memory", "name the values to try, as device-memory=24GiB"),
        ("device-memory=", "name the values to try"),
        ("device-memory=24", "'24' has no unit"),
        ("device-memory=24 apples", "'24 apples' is not a size"),
        ("device-memory=0GiB", "leaves nothing to plan with"),
        ("device-memory=1GiB..2GiB:1000", "has 1000 values, each of them a plan; name at most 64"),
        ("link-bandwidth=25GB", "'25GB' has no unit; write it as in 16GB/s"),
        ("link-bandwidth=25", "has no unit"),
        ("tokens-per-step=1e5", "'1e5' is not a whole number of tokens"),
        ("tokens-per-step=0", "not a whole number of tokens"),
        ("tokens-per-step=8,,16", "'' is not a whole number"),
        ("tokens-per-step=16..8", "'16..8' does not go up"),
        ("tokens-per-step=8..16:1", "'1' is not how many values"),
        ("tokens-per-step=8..16:x", "'x' is not how many values"),
        ("tokens-per-step=1..999:999", f"name at most {MAX_VALUES}"),
    ],
)
def test_what_may_not_be_asked_is_said_in_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=re.escape(complaint)) as caught:
        parse_sweep(text)
    assert str(caught.value).startswith("--what-if")
    assert "\n" not in str(caught.value)


def small_task(**workload: object) -> Task:
    wanted = {"sequence_length": 2048, "tokens_per_step": 8192, "compiled": True, **workload}
    model = toy_model(4, layer_elements=128 * 40_000, edge_elements=128 * 8_000)
    limits = Limits(device_memory_bytes=120 * MIB, host_memory_bytes=4 * GIB)
    return Task(model, Workload.model_validate(wanted), machine(), limits)


def test_values_that_make_no_sense_here_are_refused_before_any_is_planned() -> None:
    planned: list[str] = []
    with pytest.raises(InputError, match=r"--what-if tokens-per-step=5,000 tokens: .* not a multiple"):
        sweep(small_task(), "tokens-per-step", (4096, 5000), report=planned.append)
    with pytest.raises(InputError, match=r"sequence-length=4,096 tokens: micro_batch_size 4 does not divide"):
        sweep(small_task(micro_batch_rows=4), "sequence-length", (2048, 4096), report=planned.append)
    with pytest.raises(InputError, match="impossible"):
        sweep(small_task(), "link-bandwidth", (10**18,), report=planned.append)
    assert planned == []


def plans(found: Sweep) -> list[Plan]:
    return [point.plan for point in found.points if point.plan is not None]


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("key", [key for key, axis in AXES.items() if axis.richer])
def test_a_richer_machine_is_never_slower_and_no_slower_than_its_own_plan(key: str, seed: int) -> None:
    random = Random(seed)
    case = random_case(random, max_layers=4, max_rows=3)
    task = Task(case.model, case.workload, case.hardware, tight_limits(random, case), case.costs)
    now = {
        "device-memory": task.limits.device_memory_bytes,
        "host-memory": task.limits.host_memory_bytes,
        "link-bandwidth": 10**9,
        "host-bandwidth": round(task.hardware.host_dram_bytes_per_second.value),
    }[key]
    found = sweep(task, key, tuple(round(now * factor) for factor in (0.8, 1.0, 1.3, 2.0)))
    assert [point.value for point in found.points] == sorted(point.value for point in found.points)
    seconds = [one.prediction.step_seconds for one in plans(found)]
    # Memory changes no price. A faster link may take host DRAM from the optimizer: a thousandth.
    slack = 1.0 if key.endswith("memory") else 1.001
    assert all(after <= slack * before for before, after in pairwise(seconds))
    for point in found.points:
        changed = AXES[key].change(task, point.value)
        try:
            alone = plan(
                changed.model, changed.workload, changed.hardware, changed.limits, changed.costs, with_baselines=False
            )
        except InfeasiblePlan:
            assert point.plan is None
            continue
        assert point.plan is not None
        assert point.plan.prediction.step_seconds <= alone.prediction.step_seconds
        assert point.plan.inputs.limits == changed.limits
        assert point.plan.replay().figures == point.plan.prediction


@pytest.fixture(scope="module")
def over_memory() -> Sweep:
    return sweep(small_task(), "device-memory", (16 * MIB, 120 * MIB, 300 * MIB, 600 * MIB))


def test_where_nothing_fits_the_point_says_why(over_memory: Sweep) -> None:
    first, *others = over_memory.points
    assert first.plan is None
    assert first.infeasible.startswith("no plan fits: device memory is short by")
    assert all(point.plan is not None for point in others)
    text = table(over_memory, Price(2.0))
    assert "does not fit" in text
    assert f"16.0 MiB: {first.infeasible}" in text
    assert "tokens/s" in text


def test_the_csv_has_every_figure_in_base_units(over_memory: Sweep, tmp_path: Path) -> None:
    written = save(over_memory, tmp_path / "new", Price(3.6))
    assert [path.name for path in written] == ["device-memory.csv", "device-memory.png", "device-memory.svg"]
    with written[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["device_memory_bytes"]) for row in rows] == [point.value for point in over_memory.points]
    assert rows[0]["step_seconds"] == ""
    assert rows[0]["infeasible"] == over_memory.points[0].infeasible
    for row, one in zip(rows[1:], plans(over_memory), strict=True):
        figures = one.prediction
        assert float(row["step_seconds"]) == pytest.approx(figures.step_seconds)
        assert float(row["tokens_per_second"]) == pytest.approx(8192 / figures.step_seconds)
        assert float(row["cost_per_million_tokens"]) == pytest.approx(1e6 * 0.001 * figures.step_seconds / 8192)
        assert int(row["device_peak_bytes"]) == figures.device_peak_bytes
        assert int(row["micro_batch_rows"]) == one.policy.micro_batch_rows
        assert 0 < float(row["compute_busy_share"]) <= 1 + 1e-9
        assert row["infeasible"] == ""
    assert "cost_per_token" not in frame(over_memory)


def test_the_figure_shows_every_point_with_units_and_where_nothing_fits(over_memory: Sweep) -> None:
    drawn = drawing(over_memory, Price(3.6))
    speed, busy, memory, cost = drawn.figure.axes
    line = next(line for line in speed.lines if line.get_linestyle() == "-")
    assert list(line.get_xdata()) == [120 / 1024, 300 / 1024, 600 / 1024]
    assert list(line.get_ydata()) == [one.prediction.tokens_per_second for one in plans(over_memory)]
    assert cost.get_xlabel() == "device memory (GiB)"
    labels = [axis.get_ylabel() for axis in (speed, busy, memory, cost)]
    assert labels == [
        "tokens per second", "busy (% of the step)", "peak (GiB)", "per million tokens\n(at 3.6 per hour)",
    ]  # fmt: skip
    assert all(len(axis.patches) == 1 for axis in drawn.figure.axes)  # the grey where nothing fits
    low, high = speed.get_xlim()
    assert low < 16 / 1024 < 600 / 1024 < high
    assert "nothing fits at 1 of 4 values" in drawn.alt
    assert "600.0 MiB" in drawn.alt
    assert drawn.svg.count("<svg") == 1


def test_a_sweep_in_which_nothing_fits_is_drawn_too() -> None:
    nothing = sweep(small_task(), "device-memory", (8 * MIB, 16 * MIB))
    assert drawing(nothing).png.startswith(b"\x89PNG")
    assert len(frame(nothing)) == 2


def test_steps_and_sequences_are_swept_with_the_rest_as_it_was() -> None:
    tokens = sweep(small_task(), "tokens-per-step", (4096, 8192))
    assert [one.inputs.workload.tokens_per_step for one in plans(tokens)] == [4096, 8192]
    lengths = sweep(small_task(), "sequence-length", (1024, 4096))
    assert [one.inputs.workload.rows_per_step for one in plans(lengths)] == [8, 2]
    assert drawing(tokens).figure.axes[-1].get_xlabel() == "tokens in a step"


def test_plans_of_a_solver_that_ran_out_of_time_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner.branch, "solve", lambda mip, gap: replace(solve(mip, gap=gap), timed_out=True))
    text = table(sweep(small_task(), "device-memory", (300 * MIB,)))
    assert re.search(r"300\.0 MiB: the best plan found, within [\d.]+% of the bound; .* ran into the time limit", text)


def test_values_read_as_people_write_them() -> None:
    assert format_value(8192, "tokens") == "8,192 tokens"
    assert format_value(24 * GIB, "bytes") == "24.0 GiB"
    assert format_value(5.35 * GIB, "bytes") == "5.35 GiB"  # 5.3 GiB may stand beside it
    assert format_value(1, "bytes") == "1 B"
    assert format_value(12.5e9, "bytes/s") == "12.5 GB/s"
