"""State that streams to the GPU for its update: when it comes and goes, in programs written down by hand."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from small_models import random_case, small_model, small_workload
from symbolic_run import TORN, plain_training, run_in_order, run_shuffled

from simulator.build import build
from simulator.check import check
from simulator.errors import ProgramError
from simulator.policy import Clipping, Home, uniform_policy
from simulator.program import Access, Kind, Operation, Program, Resource, Role, StepProgram, Tier


def streamed_policy(
    num_layers: int, *, weights: Home = "device", slots: int = 2, groups: tuple[int, ...] = (1,), **choices: object
) -> StepProgram:
    """All layers' states stream."""
    clipping: Clipping = choices.pop("clipping", "global")  # type: ignore[assignment]
    workload = small_workload(sum(groups), clipping=clipping)
    policy = uniform_policy(
        small_model(num_layers), workload, micro_batch_rows=1, groups=groups, weights=weights, optimizer="streamed",
        save_level="input", state_slots=slots, **choices,  # type: ignore[arg-type]
    )  # fmt: skip
    return build(small_model(num_layers), workload, policy)


def names(program: Program, *, without: tuple[Kind, ...] = ()) -> list[str]:
    """The program in words, but for what all programs have."""
    everywhere = (Kind.LOAD_BATCH, Kind.FINISH_GRADIENT, Kind.CLIP, Kind.REPORT, Kind.LOSS, *without)
    return [operation.name for operation in program if operation.kind not in everywhere]


def test_two_slots_serve_four_layers_under_exact_clipping() -> None:
    # By hand: the states of layers 1 and 2 have come in the backward before, so the step begins with their updates.
    # That of layer 3 takes over as soon as layer 1's has left, and its update stands before its forward.
    assert names(streamed_policy(4).steady) == [
        "update.1", "store_state.1", "update.2", "store_state.2", "update.0", "update.5",
        "forward.0.0", "forward.1.0",
        "load_state.3", "forward.2.0",
        "update.3", "store_state.3", "load_state.4", "forward.3.0",
        "update.4", "store_state.4", "forward.4.0",
        "load_state.1", "backward.4.0", "backward.3.0",
        "load_state.2", "backward.2.0", "backward.1.0",
        "backward.0.0",
    ]  # fmt: skip


def test_a_first_step_has_nothing_to_update_and_a_drain_brings_every_state_home() -> None:
    program = streamed_policy(4)
    copies = [name for name in names(program.first) if "state" in name or "update" in name]
    assert copies == ["load_state.1", "load_state.2"]
    assert names(program.drain) == [
        "update.1", "store_state.1", "update.2", "store_state.2", "update.0", "update.5",
        "load_state.3", "update.3", "store_state.3", "load_state.4", "update.4", "store_state.4",
    ]  # fmt: skip


def test_a_whole_pace_is_written_without_a_point_as_hashes_of_older_plans_have_it() -> None:
    policy = uniform_policy(small_model(2), small_workload(1), micro_batch_rows=1, groups=(1,), save_level="input")
    written = {pace: policy.model_copy(update={"state_pace": pace}).model_dump_json() for pace in (1, 2, 2.0, 1.5)}
    assert '"state_pace":2,' in written[2]
    assert written[2] == written[2.0]
    assert '"state_pace":1.5,' in written[1.5]
    assert "state_pace" not in written[1]


def test_updates_stand_as_far_apart_as_a_state_takes_to_come_and_never_behind_their_forward() -> None:
    model, workload = small_model(8), small_workload(1)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,), save_level="input")
    policy = policy.model_copy(update={"optimizer_homes": ("device",) * 5 + ("streamed",) * 4 + ("device",)})

    def forward(pace: float) -> list[str]:
        program = build(model, workload, policy.model_copy(update={"state_pace": pace}))
        check(program)
        order = names(program.steady)
        ends = order.index("forward.0.0"), order.index("load_state.5")  # which comes in the backward
        return [name.removesuffix(".0") for name in order[slice(*ends)] if not name.startswith("store")]

    # States 5 and 6 are there; 7 and 8 take over their slots. A state leaves while two layers pass, then the next one
    # comes while two more do.
    assert forward(2) == [
        "forward.0", "forward.1", "forward.2", "load_state.7", "forward.3", "forward.4",
        "update.7", "load_state.8", "forward.5", "forward.6", "update.8", "forward.7", "forward.8",
    ]  # fmt: skip
    # Three layers for two states.
    assert forward(1.5) == [
        "forward.0", "forward.1", "forward.2", "load_state.7", "forward.3",
        "update.7", "load_state.8", "forward.4", "forward.5", "update.8", "forward.6", "forward.7", "forward.8",
    ]  # fmt: skip
    # A link so slow that there is never time: the updates stand before their forwards.
    assert forward(9) == [
        "forward.0", "forward.1", "forward.2", "forward.3", "forward.4", "forward.5", "load_state.7", "forward.6",
        "update.7", "load_state.8", "forward.7", "update.8", "forward.8",
    ]  # fmt: skip


def test_weights_that_stream_go_home_before_the_load_that_their_forward_reads() -> None:
    program = streamed_policy(3, weights="host", prefetch_depth=1)
    order = names(program.steady, without=(Kind.FORWARD, Kind.BACKWARD))
    assert order == [
        "update.1", "store_weights.1", "store_state.1", "update.2", "store_weights.2", "store_state.2",
        "update.0", "update.4",
        # Weights come one passage ahead, and before states: those that are needed now do not wait for a slot.
        "load_weights.1.forward.0", "load_weights.2.forward.0", "load_state.3", "load_weights.3.update",
        "update.3", "store_weights.3", "store_state.3", "load_weights.3.forward.0",
        "load_state.1", "load_weights.1.update", "load_weights.1.backward.0", "load_state.2", "load_weights.2.update",
    ]  # fmt: skip
    found = {operation.name: operation for operation in program.steady}
    slots = {operation.source("weights") for operation in program.steady if operation.kind is Kind.STORE_WEIGHTS}
    assert slots == {"device.update_slot.0", "device.update_slot.1"}
    assert found["store_weights.1"].target("weights") == "host.weights.1"
    assert found["load_weights.1.update"].resource is Resource.H2D
    assert found["store_weights.1"].resource is found["store_state.1"].resource is Resource.D2H


@pytest.mark.parametrize("clipping", ["layerwise", "none"])
def test_without_exact_clipping_updates_follow_their_gradients_with_state_that_came_in_the_forward(
    clipping: Clipping,
) -> None:
    program = streamed_policy(4, clipping=clipping)
    assert len(program.drain) == 0
    assert names(program.steady) == names(program.first) == [
        "forward.0.0",
        "load_state.4", "forward.1.0", "forward.2.0",
        "load_state.3", "forward.3.0", "forward.4.0",
        "update.5",
        "backward.4.0", "update.4", "store_state.4", "load_state.2",
        "backward.3.0", "update.3", "store_state.3", "load_state.1",
        "backward.2.0", "update.2", "store_state.2",
        "backward.1.0", "update.1", "store_state.1",
        "backward.0.0", "update.0",
    ]  # fmt: skip


def test_states_come_ahead_in_the_last_group_only() -> None:
    program = streamed_policy(2, groups=(1, 2))
    order = names(program.steady)
    assert order.index("load_state.1") > order.index("forward.2.2")
    assert order.index("load_state.1") < order.index("backward.2.1")
    assert [name for name in order if name.startswith("load_state")] == ["load_state.1", "load_state.2"]


def test_the_first_states_need_no_clip_factor_and_the_later_ones_wait_for_a_slot() -> None:
    found = {operation.name: operation for operation in streamed_policy(4).steady}
    # The state was stored early in this step; the backward that it comes beside does not hold it up.
    assert [wait.operation for wait in found["load_state.1"].waits] == ["store_state.3"]
    assert [wait.operation for wait in found["load_state.3"].waits] == ["store_state.1"]
    assert [wait.operation for wait in found["update.1"].waits] == ["load_state.1"]
    assert found["update.1"].waits[0].step_offset == -1


@pytest.mark.parametrize("clipping", ["global", "layerwise", "none"])
@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("slots", [2, 3, 9])
def test_streamed_states_train_like_a_plain_loop_in_any_order_that_the_waits_allow(
    clipping: Clipping, weights: Home, slots: int
) -> None:
    model, program = small_model(5), streamed_policy(5, weights=weights, slots=slots, groups=(2, 1), clipping=clipping)
    check(program)
    variants = ("first", "steady", "steady", "drain", "first", "drain")
    expected = plain_training(model, 3, 4, clipping=clipping)
    in_order = run_in_order(model, program, variants)
    assert in_order.weights() == expected
    for seed in range(4):
        machine = run_shuffled(model, program, variants[:4], random.Random(seed))
        assert machine.weights() == plain_training(model, 3, 3, clipping=clipping)
        assert TORN not in machine.states().values()


def test_host_memory_holds_the_states_and_the_device_as_many_as_there_are_slots() -> None:
    model = small_model(5, widths=[4, 4, 9, 4, 4])
    for slots in (2, 3, 7):
        workload = small_workload(1)
        policy = uniform_policy(
            model, workload, micro_batch_rows=1, groups=(1,), optimizer="streamed", state_slots=slots
        )
        buffers = build(model, workload, policy).buffers.values()
        on_host = [b.num_bytes for b in buffers if b.role is Role.STATE and b.tier is Tier.HOST]
        assert on_host == [10 * model.block(block).num_elements for block in model.layers]
        # As large as the largest layer's.
        on_device = [b.num_bytes for b in buffers if b.role is Role.STATE_SLOT]
        assert on_device == [10 * model.block(3).num_elements] * min(slots, 5)
        assert not [b for b in buffers if b.role is Role.UPDATE_SLOT]
        assert {b.block for b in buffers if b.role is Role.WEIGHTS and b.tier is Tier.HOST} == set()


Change = Callable[[Operation], Operation]


def changed(step_program: StepProgram, name: str, change: Change) -> StepProgram:
    programs = {
        variant: replace(
            getattr(step_program, variant),
            operations=tuple(change(o) if o.name == name else o for o in getattr(step_program, variant)),
        )
        for variant in ("first", "steady", "drain")
    }
    return replace(step_program, **programs)


def without_wait(awaited: str) -> Change:
    def change(operation: Operation) -> Operation:
        kept = tuple(wait for wait in operation.waits if wait.operation != awaited)
        assert kept != operation.waits
        return operation.with_waits(kept)

    return change


@pytest.mark.parametrize(
    ("name", "awaited", "complaint"),
    [
        ("load_state.3", "store_state.1", "device.state_slot.0 is still being written by update.1"),
        ("update.3", "load_state.3", "device.state_slot.0 was written by load_state.3"),
        ("store_state.1", "update.1", "device.state_slot.0 was written by update.1"),
    ],
)
def test_the_checker_refuses_races_for_a_slot(name: str, awaited: str, complaint: str) -> None:
    program = streamed_policy(4)
    check(program)
    with pytest.raises(ProgramError, match=complaint):
        check(changed(program, name, without_wait(awaited)))


def test_the_checker_refuses_a_state_that_does_not_go_home() -> None:
    # The updated state stays in its slot: no one reads it, and the host keeps that of the step before.
    def astray(operation: Operation) -> Operation:
        return replace(operation, writes=(Access("device.state_slot.0", "state.3"),))

    with pytest.raises(ProgramError, match=r"nothing has read state\.3 in device\.state_slot\.0"):
        check(changed(streamed_policy(4), "store_state.3", astray))

    def nothing(operation: Operation) -> Operation:
        return replace(operation, reads=(), writes=())

    with pytest.raises(ProgramError, match=r"overwrites state\.1 in device\.state_slot\.0, which nothing has read"):
        check(changed(streamed_policy(4), "store_state.1", nothing))


def test_random_policies_stream_states_of_every_sort() -> None:
    # What the tests over random cases rest on.
    found: set[tuple[str, str, bool]] = set()
    for seed in range(200):
        _, _, policy = random_case(seed)
        for block, home in enumerate(policy.optimizer_homes):
            if home == "streamed":
                more = policy.optimizer_homes.count("streamed") > policy.state_slots
                found.add((policy.clipping, policy.weight_homes[block], more))
    clippings = ("global", "layerwise", "none")
    assert found == {(c, w, more) for c in clippings for w in ("device", "host") for more in (False, True)}
