"""Depth-first layers: what passes them, what they hold, and where their gradients are summed."""

import pytest
from built_cases import SEEDS, case, low_and_top
from small_models import small_model, small_workload

from simulator.build import build
from simulator.policy import uniform_policy
from simulator.program import Kind, Role


def test_with_all_layers_depth_first_a_group_does_what_groups_of_one_micro_batch_do() -> None:
    model, workload = small_model(4), small_workload(3)

    def steps(groups: tuple[int, ...], depth_first: int) -> list[tuple[object, ...]]:
        policy = uniform_policy(
            model, workload, micro_batch_rows=1, groups=groups, depth_first_layers=depth_first, weights="host",
            optimizer="streamed", prefetch_depth=2, state_slots=3,
        )  # fmt: skip
        return [(o.resource, o.kind, o.block, o.micro_batch) for o in build(model, workload, policy).steady]

    assert steps((3,), 4) == steps((1, 1, 1), 0) == steps((2, 1), 4)
    assert steps((3,), 3) != steps((1, 1, 1), 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_depth_first_layers_hold_one_micro_batch_s_inputs_and_savings(seed: int) -> None:
    """Beside the inputs of the lowest of them, which wait for their turn where layers below pass the whole group."""
    model, policy, step_program = case(seed)
    _, top = low_and_top(model, policy)
    above = {Role.SAVED: top, Role.HIDDEN: [*top[1:], model.head], Role.GRAD_HIDDEN: [*top[1:], model.head]}
    alive: set[str] = set()
    for operation in step_program.steady:
        alive |= {access.buffer for access in operation.writes}
        buffers = [step_program.buffers[name] for name in alive]
        assert not top or len({b.micro_batch for b in buffers if b.block in above.get(b.role, ())}) <= 1
        alive -= {*operation.releases}


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_depth_first_layers_are_summed_apart(seed: int) -> None:
    model, policy, step_program = case(seed)
    _, top = low_and_top(model, policy)
    apart = [*top, model.head] if top and policy.num_micro_batches > 1 else []
    sums = {o.block: o.source("gradient_sum") for o in step_program.steady if o.kind is Kind.FINISH_GRADIENT}
    for block in apart:
        assert list(sums.values()).count(sums[block]) == 1
        assert step_program.buffers[sums[block]].role is Role.ACCUMULATOR
