"""The learning rate as a function of the step."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from simulator.errors import InputError

LearningRateSchedule = Literal["constant", "linear", "cosine", "wsd"]

# Fall from 1 towards 0 as `progress` goes from 0 to 1.
_FALLS: dict[LearningRateSchedule, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
    "wsd": lambda progress: 1.0 - progress,
}


MOST_STEPS = 10_000_000  # of a run: the rate of each is computed when it starts


class Schedule(NamedTuple):
    """A learning rate over a run: warm-up to `peak`, then a fall to `min_ratio` of it.

    `wsd` (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395) stays at the peak and falls in a line over the last
    `decay_ratio` of the steps behind the warm-up (Haegele et al. 2024, arXiv 2405.18392), at least one.
    """

    peak: float
    shape: LearningRateSchedule = "constant"
    warmup_steps: int = 0
    max_steps: int = 1
    min_ratio: float = 0.0
    decay_ratio: float = 0.2


def learning_rate(step: int, schedule: Schedule) -> float:
    """The rate of `step`, counted from 0 to max_steps - 1.

    The warm-up rises in equal parts: the first step's rate is peak / (warmup_steps + 1), never 0, and step
    `warmup_steps` is the first at the peak. What falls from there would reach min_ratio * peak at step `max_steps`: the
    last step still learns, whatever the ratio. Raises InputError for an impossible schedule.
    """
    peak, warmup_steps, max_steps = schedule.peak, schedule.warmup_steps, schedule.max_steps
    check_schedule(warmup_steps=warmup_steps, max_steps=max_steps)
    if not 0 <= step < max_steps:
        raise ValueError(f"step {step} is outside a run of {max_steps} steps")
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    falling = max_steps - warmup_steps
    if schedule.shape == "wsd":
        falling = max(1, round(schedule.decay_ratio * falling))
    progress = max(0, step - (max_steps - falling)) / falling
    share = _FALLS[schedule.shape](progress)
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * share) if schedule.min_ratio else peak * share


def warmup_steps_of(ratio: float, max_steps: int) -> int:
    """Steps of a warm-up given as a share of the run: rounded up, and never the whole run."""
    return min(math.ceil(ratio * max_steps), max_steps - 1)


def check_schedule(*, warmup_steps: int, max_steps: int) -> None:
    """Raise InputError where the run ends before its learning rate has reached the peak, or practically never."""
    if max_steps > MOST_STEPS:
        raise InputError(
            f"max_steps: {max_steps} steps are more than the {MOST_STEPS:,} that a run may have; lower max_steps or "
            "num_epochs, or raise tokens_per_step"
        )
    if warmup_steps >= max_steps:
        raise InputError(
            f"warmup_steps: {warmup_steps}, but the run has {max_steps} steps, so the learning rate would never reach "
            f"its peak; use at most {max_steps - 1}"
        )
