"""Random policies with their step programs, built once for all tests that read them."""

from functools import cache

from small_models import random_case

from simulator.build import build
from simulator.model import ModelSpec
from simulator.policy import Policy
from simulator.program import StepProgram

SEEDS = range(100)


@cache
def case(seed: int) -> tuple[ModelSpec, Policy, StepProgram]:
    model, workload, policy = random_case(seed)
    return model, policy, build(model, workload, policy)


def low_and_top(model: ModelSpec, policy: Policy) -> tuple[list[int], list[int]]:
    """The layers that groups pass at once, and those that micro-batches pass one after the other."""
    layers = list(model.layers)
    split = len(layers) - policy.depth_first_layers
    return layers[:split], layers[split:]
