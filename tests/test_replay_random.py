"""Replay against a second simulator, on random programs and prices: times, stalls, memory, and what must hold."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from reference_replay import Reference, simulate
from small_models import random_case

from simulator.build import build
from simulator.program import Resource, StepProgram
from simulator.replay import Price, Sharing, replay, replay_stretch
from simulator.timeline import Timeline

STEPS = 12
SEEDS = [*range(30), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 60))]


def run(step_program: StepProgram, prices: Mapping[str, Price], sharing: Sharing) -> Timeline:
    return replay(step_program, lambda operation: prices[operation.name], lambda buffer: buffer.num_bytes, sharing)


def random_prices(step_program: StepProgram, seed: int) -> tuple[dict[str, Price], Sharing]:
    draw = random.Random(seed)
    scale = {resource: 10 ** draw.uniform(-1, 1) for resource in Resource}
    prices: dict[str, Price] = {}
    for program in (step_program.first, step_program.steady):
        for operation in program:
            seconds = (
                0.0 if draw.random() < 0.1 else scale[operation.resource] * draw.choice((0.5, 1, 1, 2, draw.random()))
            )
            on_host = operation.resource is not Resource.COMPUTE
            dram_bytes = draw.choice((0, 1, 2)) * seconds if on_host else 0.0
            prices.setdefault(operation.name, Price(seconds, dram_bytes, draw.choice((0, 0, 1000, 5000))))
    sharing = Sharing(
        inline=draw.random() < 0.1,
        duplex=draw.choice((1.0, 0.9, 0.6)),
        dram_bytes_per_second=draw.choice((float("inf"), 0.7, 1.5, 2.0)),
        compute_beside_copies=draw.choice((1.0, 0.95)),
    )
    return prices, sharing


@cache
def random_run(seed: int) -> tuple[StepProgram, dict[str, Price], Sharing, Timeline, Reference]:
    while len((step_program := build(*random_case(seed))).steady) > 120:
        seed += 1000
    prices, sharing = random_prices(step_program, seed)
    reference = simulate([step_program.first, *[step_program.steady] * (STEPS - 1)], prices, sharing)
    return step_program, prices, sharing, run(step_program, prices, sharing), reference


@pytest.mark.parametrize("seed", SEEDS)
def test_another_simulator_gives_the_same_step(seed: int) -> None:
    _, _, _, timeline, reference = random_run(seed)
    ends = reference.compute_ends
    step = STEPS - 2
    assert timeline.step_seconds == pytest.approx(ends[step] - ends[step - 1], rel=1e-8)
    expected = {item.operation.name: item for item in reference.ran if item.step == step}
    assert [span.name for span in timeline.spans] == list(expected)
    for span in timeline.spans:
        item = expected[span.name]
        assert span.start == pytest.approx(item.start - ends[step - 1], abs=1e-7 * timeline.step_seconds)
        assert span.end == pytest.approx(item.end - ends[step - 1], abs=1e-7 * timeline.step_seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_is_never_shorter_than_what_any_resource_must_do(seed: int) -> None:
    _, _, _, timeline, _ = random_run(seed)
    for seconds in timeline.busy_seconds().values():
        assert timeline.step_seconds >= seconds * (1 - 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_breakdown_adds_up_to_the_step(seed: int) -> None:
    *_, timeline, _ = random_run(seed)
    breakdown = timeline.breakdown()
    assert sum(breakdown.values()) == pytest.approx(timeline.step_seconds, rel=1e-9)
    assert all(seconds > 0 for seconds in breakdown.values())
    assert "launch gaps" not in breakdown or breakdown["launch gaps"] < 1e-9 * timeline.step_seconds
    # What it did is what its operations took.
    for label, kinds in {
        "forward": ("forward",), "recompute": ("recompute",), "loss": ("loss",), "backward": ("backward",),
        "gradients": ("finish_gradient", "clip", "report"), "update": ("update",),
    }.items():  # fmt: skip
        took = sum(s.end - s.start for s in timeline.spans if s.kind in kinds and s.resource == "compute")
        assert breakdown.get(label, 0.0) == pytest.approx(took, rel=1e-9, abs=1e-9 * timeline.step_seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stall_names_the_awaited_operation_that_ended_when_it_ended(seed: int) -> None:
    _, _, sharing, timeline, reference = random_run(seed)
    step, grain = STEPS - 2, 1e-7 * timeline.step_seconds
    last: dict[str, float] = {}
    for item in reference.ran:
        lane = "thread" if sharing.inline else item.operation.resource.value
        idle_since = last.get(lane, 0.0)
        last[lane] = item.end
        if item.step != step:
            continue
        span = next(span for span in timeline.spans if span.name == item.operation.name)
        if item.start <= idle_since + grain:
            assert span.cause == ""
            continue
        ended = {
            other.operation.name
            for other in reference.ran
            if any(
                w.operation == other.operation.name and other.step == step + w.step_offset for w in item.operation.waits
            )
            and abs(other.end - item.start) <= grain
        }
        assert span.cause in ended


def bytes_at(
    step_program: StepProgram, prices: Mapping[str, Price], reference: Reference, moments: Sequence[float], tier: str
) -> list[int]:
    """Bytes alive at each moment, summed over intervals: from the start of a writer to the end of the releaser."""
    buffers = step_program.buffers
    base = sum(b.num_bytes for b in buffers.values() if b.persistent and b.tier == tier)
    intervals: list[tuple[float, float, int]] = []
    opened: dict[str, float] = {}
    for item in reference.ran:
        if tier == "device":
            intervals.append((item.start, item.end, prices[item.operation.name].transient_bytes))
        for access in item.operation.writes:
            if not buffers[access.buffer].persistent and buffers[access.buffer].tier == tier:
                opened.setdefault(access.buffer, item.start)
        for name in item.operation.releases:
            if buffers[name].tier == tier:
                intervals.append((opened.pop(name), item.end, buffers[name].num_bytes))
    return [base + sum(size for start, end, size in intervals if start <= moment < end) for moment in moments]


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_over_time_is_the_sum_of_what_is_alive(seed: int) -> None:
    step_program, prices, _, timeline, reference = random_run(seed)
    begin = reference.compute_ends[STEPS - 3]
    for tier, points in timeline.memory.items():
        assert points[0].seconds == 0.0
        assert all(before.seconds < after.seconds for before, after in pairwise(points[1:]))
        assert points[-1].seconds <= timeline.step_seconds * (1 + 1e-12)
        # Between events, where rounding cannot matter.
        grain = 1e-6 * timeline.step_seconds
        gaps = [(a, b) for a, b in pairwise(points) if b.seconds - a.seconds > grain]
        moments = [begin + (a.seconds + b.seconds) / 2 for a, b in gaps]
        assert bytes_at(step_program, prices, reference, moments, tier) == [a.num_bytes for a, _ in gaps]


@pytest.mark.parametrize("seed", SEEDS)
def test_peaks_are_the_most_that_is_alive_in_any_step(seed: int) -> None:
    step_program, prices, _, timeline, reference = random_run(seed)
    for tier, peak in timeline.peak_bytes.items():
        moments = sorted({moment for item in reference.ran for moment in (item.start, item.end)})
        middles = [(a + b) / 2 for a, b in pairwise(moments) if b - a > 1e-9 * moments[-1]]
        assert peak == max(bytes_at(step_program, prices, reference, middles, tier))
        assert peak >= max(point.num_bytes for point in timeline.memory[tier])


@pytest.mark.parametrize("seed", SEEDS)
def test_scaling_all_prices_scales_the_step(seed: int) -> None:
    step_program, prices, sharing, timeline, _ = random_run(seed)
    for factor in (1e-6, 37.0):
        scaled = {name: replace(price, seconds=price.seconds * factor) for name, price in prices.items()}
        # The same bytes in `factor` times the time ask for 1 / factor of the bandwidth.
        slower = replace(sharing, dram_bytes_per_second=sharing.dram_bytes_per_second / factor)
        result = run(step_program, scaled, slower)
        assert result.step_seconds == pytest.approx(timeline.step_seconds * factor, rel=1e-9)
        assert result.peak_bytes == timeline.peak_bytes
        assert [span.cause for span in result.spans] == [span.cause for span in timeline.spans]


@pytest.mark.parametrize("seed", SEEDS)
def test_without_sharing_no_operation_is_faster_to_a_slower_step(seed: int) -> None:
    # Starts are then maxima of sums of prices, which grow with every price. With sharing this is no theorem.
    step_program, prices, sharing, _, _ = random_run(seed)
    alone = Sharing(inline=sharing.inline)
    before = run(step_program, prices, alone).step_seconds
    draw = random.Random(seed)
    for _ in range(4):
        names = draw.sample(sorted(prices), k=max(1, len(prices) // 5))
        faster = {**prices, **{name: replace(prices[name], seconds=prices[name].seconds * 0.5) for name in names}}
        assert run(step_program, faster, alone).step_seconds <= before * (1 + 1e-9)
        slower = replace(alone, duplex=0.7, compute_beside_copies=0.9)
        assert run(step_program, prices, slower).step_seconds >= before * (1 - 1e-9)


def test_replay_is_the_same_every_time() -> None:
    for seed in range(5):
        step_program, prices, sharing, timeline, _ = random_run(seed)
        assert run(step_program, prices, sharing) == timeline


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("seed", SEEDS[:20])
def test_a_stretch_ends_when_all_of_its_drain_has(seed: int, num_steps: int) -> None:
    step_program, prices, sharing, _, _ = random_run(seed)
    programs = [step_program.first, *[step_program.steady] * (num_steps - 1), step_program.drain]
    ends = [item.end for item in simulate(programs, prices, sharing).ran]
    seconds = replay_stretch(step_program, lambda operation: prices[operation.name], sharing, num_steps=num_steps)
    assert seconds == pytest.approx(max(ends), rel=1e-6)
