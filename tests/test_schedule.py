"""The learning rate over a run, against values computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.schedule import check_schedule, learning_rate
from simulator.errors import InputError


def rates(schedule: str, *, warmup_steps: int, max_steps: int) -> list[float]:
    return [
        learning_rate(step, peak=1.0, schedule=schedule, warmup_steps=warmup_steps, max_steps=max_steps)
        for step in range(max_steps)
    ]


def test_linear_by_hand() -> None:
    assert rates("linear", warmup_steps=1, max_steps=5) == [0.5, 1.0, 0.75, 0.5, 0.25]


def test_constant_by_hand() -> None:
    assert rates("constant", warmup_steps=3, max_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_by_hand() -> None:
    # cos(0), cos(60 degrees), cos(120 degrees)
    assert rates("cosine", warmup_steps=0, max_steps=3) == pytest.approx([1.0, 0.75, 0.25])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_learns_at_the_peak(schedule: str) -> None:
    assert rates(schedule, warmup_steps=0, max_steps=1) == [1.0]


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 300), st.data())
def test_every_step_learns_and_the_peak_is_reached_once_warm(
    schedule: str, max_steps: int, data: st.DataObject
) -> None:
    warmup_steps = data.draw(st.integers(0, max_steps - 1))
    run = rates(schedule, warmup_steps=warmup_steps, max_steps=max_steps)
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
        learning_rate(step, peak=1.0, schedule="constant", warmup_steps=0, max_steps=5)
