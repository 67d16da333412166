"""Replay against arithmetic done by hand."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from small_models import small_model, small_workload

from simulator.build import build
from simulator.policy import Clipping, uniform_policy
from simulator.program import Kind, Operation, Program, Resource, Role, StepProgram, Wait
from simulator.replay import Price, Sharing, replay
from simulator.timeline import Timeline

GB = 10**9
ALONE = Sharing()


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def run(step_program: StepProgram, price: Callable[[Operation], Price], sharing: Sharing = ALONE) -> Timeline:
    return replay(step_program, price, lambda buffer: buffer.num_bytes, sharing)


# Programs of the builder, with seconds by kind for layers; the embedding, the head and all else take no time.


def built(
    num_layers: int, groups: tuple[int, ...], clipping: Clipping = "global", **choices: Any
) -> tuple[StepProgram, Callable[..., Callable[[Operation], Price]]]:
    """A uniform policy's program, and `seconds(kind=...)`: prices of its layers' operations."""
    model, workload = small_model(num_layers), small_workload(sum(groups), clipping=clipping)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=groups, **choices)

    def seconds(**by_kind: float) -> Callable[[Operation], Price]:
        def price(operation: Operation) -> Price:
            edge = operation.block in (0, model.head) and operation.kind is not Kind.LOSS
            return Price(0.0 if edge else by_kind.get(operation.kind.value, 0.0))

        return price

    return build(model, workload, policy), seconds


def test_resident_weights_take_the_sum_of_the_compute() -> None:
    # 3 layers x 2 micro-batches x (1 + 2) s, 2 losses of 0.5 s, 3 updates of 0.25 s on the device.
    program, seconds = built(3, (2,))
    timeline = run(program, seconds(forward=1, backward=2, loss=0.5, update=0.25))
    assert timeline.step_seconds == near(18 + 1 + 0.75)
    assert timeline.breakdown() == near({"update": 0.75, "forward": 6, "loss": 1, "backward": 12})


def test_compute_bound_streaming_pays_the_first_load_only() -> None:
    # Loads of 1 s hide behind forwards of 2 s and backwards of 4 s; nothing hides the first: 1 + 3 x (2 + 4).
    program, seconds = built(3, (1,), weights="host", optimizer="host")
    timeline = run(program, seconds(forward=2, backward=4, load_weights=1))
    assert timeline.step_seconds == near(19)
    assert timeline.breakdown() == near({"waiting for weights": 1, "forward": 6, "backward": 12})


def test_link_bound_streaming_pays_the_loads() -> None:
    # Two slots. Loads of 5 s: layer 1 until 5, layer 2 until 10, layer 3 (slot free at 6) until 15. Forward 3 ends at
    # 16, backward 3 at 18. Layer 2 is still there; layer 1 comes again, 18 to 23; backward 1 ends at 25.
    program, seconds = built(3, (1,), weights="host", optimizer="host")
    timeline = run(program, seconds(forward=1, backward=2, load_weights=5))
    assert timeline.step_seconds == near(25)
    assert timeline.breakdown() == near({"waiting for weights": 16, "forward": 3, "backward": 6})
    ends = {span.name: span.end for span in timeline.spans}
    assert ends["forward.1.0"] == near(6)
    assert ends["load_weights.3.forward.0"] == near(15)
    assert ends["load_weights.1.backward.0"] == near(23)


def test_a_third_slot_saves_the_load_at_the_turn() -> None:
    # As above with prefetch depth 2: all three layers stay, so the backward follows at once: 15 + 1 + 3 x 2.
    program, seconds = built(3, (1,), weights="host", optimizer="host", prefetch_depth=2)
    assert run(program, seconds(forward=1, backward=2, load_weights=5)).step_seconds == near(22)


def test_two_groups_share_what_lies_in_the_slots() -> None:
    # The first group as above until 25, which leaves layers 1 and 2 in the slots: forwards until 27. Layer 3 comes
    # from 26 (slot free) to 31: forward until 32, backwards of 3 and 2 until 36; layer 1 from 34 to 39, backward 41.
    program, seconds = built(3, (1, 1), weights="host", optimizer="host")
    assert run(program, seconds(forward=1, backward=2, load_weights=5)).step_seconds == near(41)


def test_a_depth_first_layer_takes_as_long_and_saves_one_micro_batch() -> None:
    # 4 layers x 3 micro-batches x (1 + 2) s either way. At the first backward all micro-batches' savings of the lower
    # layers are there, and of depth-first layers one's.
    for depth_first, saved in ((0, 12), (1, 3 * 3 + 1), (3, 3 + 3), (4, 4)):
        program, seconds = built(4, (3,), depth_first_layers=depth_first)
        timeline = replay(
            program, seconds(forward=1, backward=2), lambda buffer: int(buffer.role is Role.SAVED), Sharing()
        )
        assert timeline.step_seconds == near(36)
        assert timeline.peak_bytes["device"] == saved


def test_depth_first_layers_that_stream_come_again_for_a_micro_batch_where_slots_do_not_hold_them() -> None:
    # Compute of 3 s a passage hides loads of 1 s, but for the first: 1 + 3 layers x 2 micro-batches x (3 + 3).
    # Two slots hold two neighbours over each turn, at the top and at the bottom: 123321123321 loads 1, 2, 3, 1, 3, 1.
    for depth_first, loads in ((1, 3 + 1), (2, 3 + 1), (3, 3 + 1 + 1 + 1)):
        program, seconds = built(3, (2,), weights="host", optimizer="host", depth_first_layers=depth_first)
        timeline = run(program, seconds(forward=3, backward=3, load_weights=1))
        assert timeline.step_seconds == near(37)
        assert sum(s.kind == "load_weights" and ".updated" not in s.name for s in timeline.spans) == loads


def test_exact_clipping_shows_host_updates_in_the_first_groups_forward() -> None:
    # Updates of 3 s start when the norm is known: they end at 3, 6 and 9, and each forward of 1 s waits for its own:
    # 3 x 3 + 1. Then 3 backwards of 2 s, and the second group, 3 x (1 + 2) s, which waits for nothing.
    program, seconds = built(3, (1, 1), optimizer="host")
    timeline = run(program, seconds(forward=1, backward=2, update=3))
    assert timeline.step_seconds == near(10 + 6 + 9)
    assert timeline.breakdown() == near({"waiting for updates": 7, "forward": 6, "backward": 12})


def test_a_larger_first_group_hides_more_of_the_updates() -> None:
    # Forwards of 2 x 1 s between updates of 3 s leave 1 s uncovered twice, and the first update: 9 + 2 + 12.
    program, seconds = built(3, (2,), optimizer="host")
    timeline = run(program, seconds(forward=1, backward=2, update=3))
    assert timeline.step_seconds == near(23)
    assert timeline.breakdown()["waiting for updates"] == near(5)


def test_a_wait_for_weights_that_wait_for_their_update_is_the_updates() -> None:
    # Update until 3, its weights until 4; the second update until 6, weights until 7. Of the 4 + 2 s lost, 3 + 1
    # pass before an update has ended and 1 + 1 while weights are on the link.
    program, seconds = built(2, (1,), weights="host", optimizer="host")
    timeline = run(program, seconds(forward=1, backward=2, update=3, load_weights=1))
    assert timeline.step_seconds == near(7 + 1 + 4)
    assert timeline.breakdown() == near(
        {"waiting for updates": 4, "waiting for weights": 2, "forward": 2, "backward": 4}
    )
    cause = {span.name: span.cause for span in timeline.spans}
    assert cause["forward.1.0"] == "load_weights.1.forward.0"
    assert cause["load_weights.1.forward.0"] == "update.1"


@pytest.mark.parametrize(("interval", "again"), [(1, 0), (2, 2), (3, 2), (4, 3), (9, 3)])
def test_checkpoints_k_apart_cost_all_but_one_forward_a_segment(interval: int, again: int) -> None:
    # 4 layers: forward 4 x 1, backward 4 x 3 (each runs its layer forward once itself), and `again` forwards:
    # segments 2+2 give 1+1, 3+1 give 2+0, 4 gives 3.
    program, seconds = built(4, (1,), save_level="input", checkpoint_interval=interval)
    timeline = run(program, seconds(forward=1, recompute=1, backward=3))
    assert timeline.step_seconds == near(16 + again)
    assert timeline.breakdown().get("recompute", 0.0) == near(again)


def test_updates_without_clipping_that_take_longer_than_the_step_set_the_pace() -> None:
    # Let update 1 end at 0. Forwards 1 and 2 until 2, backward 2 until 3: the host updates layer 2 until 13 and
    # layer 1, whose backward ended at 4, until 23. Then the next step's forward 1.
    program, seconds = built(2, (1,), "none", optimizer="host")
    timeline = run(program, seconds(forward=1, backward=1, update=10))
    assert timeline.step_seconds == near(23)
    assert timeline.breakdown() == near({"waiting for updates": 19, "forward": 2, "backward": 2})


def test_updates_without_clipping_that_fit_into_backward_and_forward_are_hidden() -> None:
    # Update 2 ends 0.5 s into backward 1; update 1 shows.
    program, seconds = built(2, (1,), "none", optimizer="host")
    timeline = run(program, seconds(forward=1, backward=1, update=0.5))
    assert timeline.step_seconds == near(4.5)


def test_slabs_hold_the_backward_back_until_gradients_have_left() -> None:
    # Forwards until 4, backwards of layers 4 and 3 until 6; their gradients leave until 10 and 15. Backward 2 runs
    # 10-11 and backward 1 15-16; gradients until 20 and 25. Updates wait for gradients and the next forward for them.
    program, seconds = built(4, (1,), optimizer="host")
    timeline = run(program, seconds(forward=1, backward=1, store_gradient=5))
    assert timeline.step_seconds == near(25)
    assert timeline.breakdown() == near({"waiting for gradients": 17, "forward": 4, "backward": 4})
    # Three slabs: backward 2 follows at once, backward 1 at 10; gradients leave as before.
    program, seconds = built(4, (1,), optimizer="host", gradient_slabs=3)
    timeline = run(program, seconds(forward=1, backward=1, store_gradient=5))
    assert timeline.step_seconds == near(25)
    starts = {span.name: span.start for span in timeline.spans}
    assert starts["backward.1.0"] - starts["backward.4.0"] == near(6)


def test_a_batch_that_is_in_use_until_the_end_cannot_be_loaded_ahead() -> None:
    # One group keeps its batch until the last backward: 3 s of loading show. Of two groups only the first's would,
    # and its batch was given back half a step ago.
    program, seconds = built(2, (1,))
    timeline = run(program, seconds(forward=1, backward=2, load_batch=3))
    assert timeline.step_seconds == near(9)
    assert timeline.breakdown() == near({"waiting for data": 3, "forward": 2, "backward": 4})
    program, seconds = built(2, (1, 1))
    assert run(program, seconds(forward=1, backward=2, load_batch=3)).step_seconds == near(12)


def test_one_thread_takes_the_sum_of_everything() -> None:
    program, seconds = built(3, (2, 1), weights="host", optimizer="host")
    price = seconds(forward=1, backward=2, load_weights=5, store_gradient=0.5, update=3, load_batch=0.125, loss=0.25)
    timeline = run(program, price, Sharing(inline=True, duplex=0.5, dram_bytes_per_second=1.0))
    assert timeline.step_seconds == near(sum(price(operation).seconds for operation in program.steady))
    loads = sum(operation.kind is Kind.LOAD_WEIGHTS and operation.block in (1, 2, 3) for operation in program.steady)
    assert timeline.breakdown() == near(
        {
            "forward": 9, "backward": 18, "loss": 0.75, "waiting for weights": 5 * loads, "waiting for updates": 9,
            "waiting for gradients": 1.5, "waiting for data": 0.375,
        }
    )  # fmt: skip
    for before, after in pairwise(timeline.spans):
        assert after.start == near(before.end)


# Programs written out: names with resources, and what they wait for.

RESOURCE = {"copy_in": Resource.H2D, "copy_out": Resource.D2H, "update": Resource.HOST, "work": Resource.COMPUTE}


def written(*lines: str) -> StepProgram:
    """Operations `name <- waits`; `name@` is the step before's. The part before a dot gives the resource."""
    operations = []
    for line in lines:
        name, _, waits = line.partition("<-")
        awaited = tuple(Wait(word.rstrip("@"), -1 if word.endswith("@") else 0) for word in waits.split())
        resource = RESOURCE[name.strip().partition(".")[0]]
        kind = {Resource.H2D: Kind.LOAD_WEIGHTS, Resource.D2H: Kind.STORE_GRADIENT, Resource.HOST: Kind.UPDATE}
        operations.append(Operation(name.strip(), kind.get(resource, Kind.FORWARD), resource, waits=awaited))
    first = tuple(o.with_waits(tuple(w for w in o.waits if w.step_offset == 0)) for o in operations)
    return StepProgram(
        Program("first", first, {}), Program("steady", tuple(operations), {}), Program("drain", (), {}), {}
    )


def of(prices: Mapping[str, Price]) -> Callable[[Operation], Price]:
    return lambda operation: prices[operation.name]


def test_both_directions_at_once_slow_each_other() -> None:
    # At half speed each until the shorter is through: 2 s of copying take 4 s; the longer has 2 s left: 6 s. Then 1 s.
    program = written("copy_in <- work@", "copy_out <- work@", "work <- copy_in copy_out")
    prices = of({"copy_in": Price(4), "copy_out": Price(2), "work": Price(1)})
    assert run(program, prices, Sharing(duplex=0.5)).step_seconds == near(7)
    assert run(program, prices).step_seconds == near(5)


def test_a_host_update_has_what_the_copy_leaves_of_dram() -> None:
    # The copy asks for 50 of 120, less than half: it has them. The update asks for 100 and has 70: 2.8 s of its work
    # are done when the copy ends at 4; the other 1.2 s run alone.
    program = written("copy_in <- work@", "update <- work@", "work <- copy_in update")
    prices = of({"copy_in": Price(4, 200), "update": Price(4, 400), "work": Price(1)})
    timeline = run(program, prices, Sharing(dram_bytes_per_second=120))
    ends = {span.name: span.end for span in timeline.spans}
    assert ends["copy_in"] == near(4)
    assert ends["update"] == near(5.2)
    assert timeline.step_seconds == near(6.2)


def test_three_users_of_dram_share_it_evenly() -> None:
    # 50 + 50 + 100 of 120: 40 each. The copies need 5 s for 4 s of work, the update has done 2 s by then.
    program = written("copy_in <- work@", "copy_out <- work@", "update <- work@", "work <- copy_in copy_out update")
    prices = of({"copy_in": Price(4, 200), "copy_out": Price(4, 200), "update": Price(4, 400), "work": Price(0.5)})
    timeline = run(program, prices, Sharing(dram_bytes_per_second=120))
    ends = {span.name: span.end for span in timeline.spans}
    assert ends["copy_in"] == ends["copy_out"] == near(5)
    assert ends["update"] == near(7)
    assert timeline.step_seconds == near(7.5)


def test_copies_beside_a_host_optimizer_run_as_fast_as_measured() -> None:
    # NVIDIA H200 host: 55.5 GB/s alone, 50.0 both ways, 36.4 each while an AdamW that moves 110 GB/s alone runs.
    program = written("copy_in <- work@", "copy_out <- work@", "update <- work@", "work <- copy_in copy_out update")
    copy = Price(10, 555 * GB)
    prices = of({"copy_in": copy, "copy_out": copy, "update": Price(100, 11000 * GB), "work": Price(1)})
    timeline = run(program, prices, Sharing(duplex=50.0 / 55.5, dram_bytes_per_second=111.5 * GB))
    ends = {span.name: span.end for span in timeline.spans}
    assert 555 / ends["copy_in"] == pytest.approx(36.4, rel=0.05)


def test_an_operation_alone_takes_its_price_whatever_the_memory_is_said_to_carry() -> None:
    program = written("update <- work@", "work <- update")
    prices = of({"update": Price(3, 300), "work": Price(1)})
    assert run(program, prices, Sharing(dram_bytes_per_second=50)).step_seconds == near(4)


def test_an_operation_that_asks_for_more_than_there_is_counts_as_asking_for_all() -> None:
    # The copy asks for 20 of 50 and has them; the update, which asks for 100, has 30 of the 50 it would have alone.
    program = written("copy_in <- work@", "update <- work@", "work <- copy_in update")
    prices = of({"copy_in": Price(5, 100), "update": Price(3, 300), "work": Price(1)})
    timeline = run(program, prices, Sharing(dram_bytes_per_second=50))
    assert timeline.step_seconds == near(6)
    assert {span.name: span.end for span in timeline.spans}["update"] == near(5)


def test_copies_cost_the_compute_beside_them() -> None:
    # 4 s of copying beside 10 s of work at 0.8: 3.2 s of work done, 6.8 left.
    program = written("copy_in <- work.last@", "work.long <- work.last@", "work.last <- copy_in work.long")
    prices = of({"copy_in": Price(4), "work.long": Price(10), "work.last": Price(1)})
    assert run(program, prices, Sharing(compute_beside_copies=0.8)).step_seconds == near(11.8)


def test_the_next_steps_copies_share_with_the_step_that_is_reported() -> None:
    # The copy for the next step waits for nothing in this one: it runs beside every step's work, also the last's.
    program = written("copy_in <- work.use@", "work.use <- copy_in", "work.long")
    prices = of({"copy_in": Price(6), "work.use": Price(1), "work.long": Price(9)})
    timeline = run(program, prices, Sharing(compute_beside_copies=0.5))
    # 6 s of copying leave 3 s of the long work done; 6 s remain; 1 s of use before.
    assert timeline.step_seconds == near(1 + 6 + 6)


def test_a_fifo_holds_up_what_stands_behind() -> None:
    # The second copy waits for nothing, but the first, which waits for the long work, stands before it.
    program = written(
        "work.long <- work.late@", "copy_in.1 <- work.long", "copy_in.2 <- work.late@",
        "work.early <- copy_in.2", "work.late <- copy_in.1",
    )  # fmt: skip
    prices = of(
        {
            "work.long": Price(5),
            "copy_in.1": Price(2),
            "copy_in.2": Price(1),
            "work.early": Price(1),
            "work.late": Price(1),
        }
    )
    timeline = run(program, prices)
    assert timeline.step_seconds == near(5 + 3 + 1 + 1)
    assert {span.name: span.cause for span in timeline.spans}["work.early"] == "copy_in.2"
    assert timeline.breakdown() == near({"forward": 7, "waiting for weights": 3})
