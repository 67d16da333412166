"""The policy of an outline once it is known where every block lives and how every layer keeps."""

from collections.abc import Mapping

from planner.keeping import DEPTH_FIRST, ON_HOST, SAVED_ON_HOST, Keeping, save_level
from planner.outlines import Outline
from simulator.model import ModelSpec
from simulator.policy import HEAD_CHUNK_TOKENS, MIN_STATE_SLOTS, Home, OptimizerHome, Policy, Workload

GRADIENT_SLABS = 2
NOTHING_SAVED: Mapping[Keeping, int] = {}


def base_policy(
    model: ModelSpec,
    workload: Workload,
    outline: Outline,
    *,
    host: frozenset[int] = frozenset(),
    streamed: frozenset[int] = frozenset(),
    by_link: frozenset[int] = frozenset(),
    levels: Mapping[int, Keeping] | None = None,
    saved_bytes: Mapping[Keeping, int] = NOTHING_SAVED,
    leaving_passes: int = 1,
    prefetch_depth: int = 1,
    state_slots: int = MIN_STATE_SLOTS,
    state_pace: float = 1,
) -> Policy:
    """The policy of an outline with given homes; ways to keep by layer, 'input' where none is named.

    `host` are updated there, of `by_link` the state streams, of `streamed` the weights. Of frozen blocks only those
    leave the device that stream. `saved_bytes`: room on the host for what a layer saves, by how it keeps.
    """
    trained = frozenset(model.trained_blocks)
    host = (host & trained) | (streamed - trained)
    others: list[OptimizerHome] = ["streamed" if block in by_link else "device" for block in range(model.num_blocks)]
    homes: list[OptimizerHome] = ["host" if block in host else home for block, home in enumerate(others)]
    weights: list[Home] = ["host" if block in streamed else "device" for block in range(model.num_blocks)]
    gradients: list[Home] = ["host" if block in host else "device" for block in range(model.num_blocks)]
    tokens = outline.micro_batch_rows * workload.sequence_length
    keeping: list[Keeping] = [(levels or {}).get(layer, "input") for layer in model.layers]
    return Policy(
        micro_batch_rows=outline.micro_batch_rows,
        groups=outline.groups,
        weight_homes=tuple(weights),
        prefetch_depth=prefetch_depth,
        save_levels=tuple(save_level(how) for how in keeping),
        checkpoint_interval=outline.checkpoint_interval,
        depth_first_layers=sum(how in DEPTH_FIRST for how in keeping),
        activation_homes=tuple("host" if how in ON_HOST else "device" for how in keeping),
        saved_bytes=tuple(saved_bytes.get(how, 0) for how in keeping) if SAVED_ON_HOST.keys() & keeping else (),
        leaving_passes=leaving_passes if ON_HOST.keys() & keeping else 1,
        gradient_homes=tuple(gradients),
        gradient_slabs=GRADIENT_SLABS,
        optimizer_homes=tuple(homes),
        state_slots=max(MIN_STATE_SLOTS, state_slots),
        state_pace=state_pace,
        head_chunk_tokens=min(HEAD_CHUNK_TOKENS, tokens),
        clipping=workload.clipping,
        gradient_format=workload.gradient_format,
        state_format=workload.state_format,
    )
