"""Random policies with depth-first layers, of the kind that the planner considers."""

from random import Random

from planning_cases import Case, random_case, random_policy

from planner.outlines import may_be_depth_first
from simulator.policy import EAGER_SAVE_LEVELS, HEAD_CHUNK_TOKENS, SAVE_LEVELS, Policy


def depth_first_case(random: Random, *, max_layers: int = 4, max_rows: int = 4) -> Case:
    """A random problem with layers of one kind and several rows."""
    while True:
        case = random_case(random, max_layers=max_layers, max_rows=max_rows)
        if may_be_depth_first(case.model) and case.workload.rows_per_step > 1:
            return case


def depth_first_policy(random: Random, case: Case) -> Policy:
    """A random policy of one group of several micro-batches, in which some of the topmost layers are depth-first."""
    num_layers, rows_per_step = case.model.num_layers, case.workload.rows_per_step
    policy = random_policy(random, case)
    rows = random.choice([rows for rows in range(1, rows_per_step) if rows_per_step % rows == 0])
    depth = random.randint(1, num_layers - 1)
    below = num_layers - depth
    levels = tuple(SAVE_LEVELS) if case.workload.compiled else EAGER_SAVE_LEVELS
    # Sparse checkpoints have level `input` in all layers.
    upper = [random.choice(levels) for _ in range(depth)]
    return policy.model_copy(
        update={
            "micro_batch_rows": rows,
            "groups": (rows_per_step // rows,),
            "depth_first_layers": depth,
            "checkpoint_interval": 1,
            "save_levels": (*policy.save_levels[:below], *upper),
            "activation_homes": (*policy.activation_homes[:below], *["device"] * depth),
            "weight_homes": (*policy.weight_homes[: below + 1], *["device"] * (depth + 1)),
            "head_chunk_tokens": min(HEAD_CHUNK_TOKENS, rows * case.workload.sequence_length),
        }
    )
