"""The learning rate as a function of the step."""

import math
from typing import Literal

from simulator.errors import InputError

LearningRateSchedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, schedule: LearningRateSchedule, warmup_steps: int, max_steps: int
) -> float:
    """The rate of `step`, counted from 0 to max_steps - 1.

    The warm-up rises in equal parts: the first step's rate is peak / (warmup_steps + 1), never 0, and step
    `warmup_steps` is the first at the peak. From there `linear` and `cosine` (half a period) fall towards 0, which
    they would reach at step `max_steps`: the last step still learns. Raises InputError for an impossible schedule.
    """
    check_schedule(warmup_steps=warmup_steps, max_steps=max_steps)
    if not 0 <= step < max_steps:
        raise ValueError(f"step {step} is outside a run of {max_steps} steps")
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * (1 + math.cos(math.pi * progress)) / 2


def check_schedule(*, warmup_steps: int, max_steps: int) -> None:
    """Raise InputError where the run ends before its learning rate has reached the peak."""
    if warmup_steps >= max_steps:
        raise InputError(
            f"warmup_steps: {warmup_steps}, but the run has {max_steps} steps, so the learning rate would never reach "
            f"its peak; use at most {max_steps - 1}"
        )
