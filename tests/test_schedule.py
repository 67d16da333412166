"""The learning rate over a run, against values computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.schedule import Schedule, check_schedule, learning_rate, warmup_steps_of
from simulator.errors import InputError

SHAPES = ["constant", "linear", "cosine", "wsd"]


def rates(shape: str, **choices: float) -> list[float]:
    schedule = Schedule(1.0, shape, **choices)  # type: ignore[arg-type]
    return [learning_rate(step, schedule) for step in range(schedule.max_steps)]


def test_linear_by_hand() -> None:
    assert rates("linear", warmup_steps=1, max_steps=5) == [0.5, 1.0, 0.75, 0.5, 0.25]


def test_constant_by_hand() -> None:
    assert rates("constant", warmup_steps=3, max_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_by_hand() -> None:
    # cos(0), cos(60 degrees), cos(120 degrees)
    assert rates("cosine", warmup_steps=0, max_steps=3) == pytest.approx([1.0, 0.75, 0.25])


def test_warm_up_stable_decay_by_hand() -> None:
    # One step of warm-up, five at the peak, then 40 % of the nine that follow it: four, in a line towards 0.
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates("wsd", warmup_steps=1, max_steps=10, decay_ratio=0.4) == expected


def test_a_least_rate_by_hand() -> None:
    assert rates("linear", max_steps=4, min_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert rates("cosine", max_steps=2, min_ratio=0.5) == pytest.approx([1.0, 0.75])
    assert rates("wsd", max_steps=4, min_ratio=0.5, decay_ratio=0.5) == pytest.approx([1.0, 1.0, 1.0, 0.75])
    assert rates("constant", max_steps=3, min_ratio=0.5) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("ratio", "max_steps", "steps"), [(0.1, 100, 10), (0.03, 10, 1), (0.5, 1, 0), (0.99, 4, 3)])
def test_a_warm_up_as_a_share_of_the_run(ratio: float, max_steps: int, steps: int) -> None:
    assert warmup_steps_of(ratio, max_steps) == steps


@pytest.mark.parametrize("schedule", SHAPES)
def test_a_run_of_one_step_learns_at_the_peak(schedule: str) -> None:
    assert rates(schedule, warmup_steps=0, max_steps=1) == [1.0]


@given(st.sampled_from(SHAPES), st.integers(1, 300), st.data())
def test_every_step_learns_and_the_peak_is_reached_once_warm(
    schedule: str, max_steps: int, data: st.DataObject
) -> None:
    warmup_steps = data.draw(st.integers(0, max_steps - 1))
    min_ratio = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    run = rates(schedule, warmup_steps=warmup_steps, max_steps=max_steps, min_ratio=min_ratio)
    assert min(run) > 0
    assert max(run) == run[warmup_steps] == 1.0
    assert run[:warmup_steps] == sorted(run[:warmup_steps])
    assert run[warmup_steps:] == sorted(run[warmup_steps:], reverse=True)


@pytest.mark.parametrize(("warmup_steps", "max_steps"), [(5, 5), (6, 5), (1, 1)])
def test_warm_up_longer_than_the_run_is_refused(warmup_steps: int, max_steps: int) -> None:
    with pytest.raises(InputError, match=rf"warmup_steps: {warmup_steps}.*at most {max_steps - 1}"):
        check_schedule(warmup_steps=warmup_steps, max_steps=max_steps)


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_outside_the_run_has_no_rate(step: int) -> None:
    with pytest.raises(ValueError, match="outside a run of 5 steps"):
        learning_rate(step, Schedule(1.0, "constant", max_steps=5))
