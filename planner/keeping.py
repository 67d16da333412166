"""Ways to keep what a layer's backward needs: at which save level, where it waits, and of how many micro-batches.

A layer of the topmost, depth-first ones keeps one micro-batch's, any other its group's. Where only the input is kept it
alone waits on the host; else all that the level saves does, of one micro-batch at a time.
"""

from collections.abc import Sequence
from typing import Literal, cast

from planner.outlines import Outline
from simulator.policy import SAVE_LEVELS, SaveLevel

Keeping = (
    SaveLevel
    | Literal[
        "input_on_host",
        "depth_first_keep",
        "depth_first_budget_70",
        "depth_first_budget_50",
        "depth_first_budget_30",
        "depth_first_budget_10",
        "depth_first_input",
        "keep_on_host",
        "budget_70_on_host",
        "budget_50_on_host",
        "budget_30_on_host",
        "budget_10_on_host",
    ]
)
# Of those where more than the input waits on the host, the save level.
SAVED_ON_HOST: dict[Keeping, SaveLevel] = {
    cast(Keeping, f"{level}_on_host"): level for level in SAVE_LEVELS if level != "input"
}
# Of all that wait there.
ON_HOST: dict[Keeping, SaveLevel] = {"input_on_host": "input", **SAVED_ON_HOST}
# And of those of depth-first layers.
DEPTH_FIRST: dict[Keeping, SaveLevel] = {cast(Keeping, f"depth_first_{level}"): level for level in SAVE_LEVELS}


def save_level(keeping: Keeping) -> SaveLevel:
    """The save level of a way to keep."""
    return ON_HOST.get(keeping) or DEPTH_FIRST.get(keeping) or cast(SaveLevel, keeping)


def depth_first(level: SaveLevel) -> Keeping:
    """How a depth-first layer keeps at a save level."""
    return cast(Keeping, f"depth_first_{level}")


def on_host(how: Keeping) -> Keeping:
    """The same way to keep, but on the host."""
    return cast(Keeping, f"{how}_on_host")


def allowed_levels(levels: Sequence[SaveLevel], outline: Outline) -> tuple[Keeping, ...]:
    """Ways to keep that a layer may take at these save levels; with sparse checkpoints 'input'.

    What 'input' keeps may wait on the host, but that of a depth-first layer, which is small. What other levels save may
    where the outline says so.
    """
    if outline.checkpoint_interval > 1:
        return ("input", "input_on_host")
    found: list[Keeping] = list(levels)
    if "input" in levels:
        found.append("input_on_host")
    if outline.depth_first:
        found += map(depth_first, levels)
    if outline.saved_waits:
        found += [how for how, level in SAVED_ON_HOST.items() if level in levels]
    return tuple(found)
