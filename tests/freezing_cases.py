"""Random models of which something is frozen, and policies for them."""

from random import Random

from simulator.freezing import freeze, parameter_names
from simulator.model import ModelSpec
from simulator.policy import Policy


def randomly_frozen(random: Random, model: ModelSpec) -> ModelSpec:
    """The model with single parameters frozen: often all of the bottom, sometimes here and there, never everything."""
    names = parameter_names(model)
    below = random.randint(0, len(names) - 1) if random.random() < 0.7 else 0
    share = random.choice((0.0, 0.3, 0.8))
    frozen = [name for place, name in enumerate(names) if place < below or random.random() < share]
    return freeze(model, frozen[:-1] if len(frozen) == len(names) else frozen)


def fitted(policy: Policy, model: ModelSpec) -> Policy:
    """The policy for a model of the same blocks that is frozen in part: frozen blocks live where their weights are."""
    trained = set(model.trained_blocks)
    return policy.model_copy(
        update={
            field: tuple(
                home if block in trained else policy.weight_homes[block]
                for block, home in enumerate(getattr(policy, field))
            )
            for field in ("optimizer_homes", "gradient_homes")
        }
    )
