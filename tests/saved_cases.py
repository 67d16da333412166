"""Random policies in which what layers save waits on the host, of the kind that the planner considers."""

from random import Random

from planning_cases import Case, random_case, random_policy

from planner.coefficient_table import SPARE_BYTES
from planner.outlines import may_be_depth_first
from simulator.costs import Pricing
from simulator.policy import EAGER_SAVE_LEVELS, HEAD_CHUNK_TOKENS, SAVE_LEVELS, Policy
from simulator.program import Buffer, Role, Tier


def saved_case(random: Random, *, max_layers: int = 5, max_rows: int = 4) -> Case:
    """A random problem with layers of one kind."""
    while True:
        case = random_case(random, max_layers=max_layers, max_rows=max_rows)
        if may_be_depth_first(case.model):
            return case


def saved_policy(random: Random, case: Case) -> Policy:
    """A random policy of groups of one micro-batch; of at least one layer more than the input waits on the host."""
    policy, model = random_policy(random, case), case.model
    rows_per_step = case.workload.rows_per_step
    rows = random.choice([rows for rows in range(1, rows_per_step + 1) if rows_per_step % rows == 0])
    known = tuple(SAVE_LEVELS) if case.workload.compiled else EAGER_SAVE_LEVELS
    levels = [random.choice(known) for _ in model.layers]
    share = random.choice([0.3, 0.7])
    homes = ["host" if random.random() < share else "device" for _ in model.layers]
    waits = random.randrange(model.num_layers)
    levels[waits], homes[waits] = random.choice(known[:-1]), "host"
    policy = policy.model_copy(
        update={
            "micro_batch_rows": rows,
            "groups": (1,) * (rows_per_step // rows),
            "depth_first_layers": 0,
            "checkpoint_interval": 1,
            "save_levels": tuple(levels),
            "activation_homes": tuple(homes),
            "leaving_passes": random.choice([1, 2, 3]),
            "head_chunk_tokens": min(HEAD_CHUNK_TOKENS, rows * case.workload.sequence_length),
        }
    )
    return policy.model_copy(update={"saved_bytes": _saved_bytes(case, policy)})


def _saved_bytes(case: Case, policy: Policy) -> tuple[int, ...]:
    """Room for what each layer saves, as plans have it."""
    size = Pricing(case.model, case.workload, policy, case.hardware, case.costs).size
    kept = zip(case.model.layers, policy.save_levels, policy.activation_homes, strict=True)
    return tuple(
        SPARE_BYTES + size(Buffer("saved", Tier.DEVICE, Role.SAVED, 0, layer, 0, False, level))
        if home == "host" and level != "input"
        else 0
        for layer, level, home in kept
    )
