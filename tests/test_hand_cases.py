"""Plans that can be computed by hand, through the program and through the replay.

The toy: 4 layers of 0.5e9 parameters, so in GB: weights 1, optimizer state 5, completed bf16 gradient 1. A step is one
micro-batch whose layer input takes 1 GB; level "keep" keeps 4 GB more, level "input" takes 4 GB while its backward
runs. Forward 1 s, backward 2 s, at level "input" 3 s. The link carries 1 GB/s each way, the host updates in no time
unless a case says otherwise, the edges are free and weigh nothing.

One group sums gradients in one shared fp32 buffer of 2 GB; each layer on the device holds 1 + 5 + 1 = 7 GB there. What
passes through a step is counted S times, S being 1 and the allocator's slack, which has no other limit here.
"""

import pytest
from planning_cases import Case, LayerPrices, machine, price_table, toy_model

from planner.base_policy import base_policy
from planner.explain import plan_table
from planner.outlines import Outline
from planner.plan import Limits, Plan
from planner.problem import Problem
from planner.search import plan
from simulator.errors import InfeasiblePlan
from simulator.policy import Clipping, Policy, SaveLevel, Workload
from simulator.predict import ALLOCATOR_SLACK

GB = 10**9
S = 1 + ALLOCATOR_SLACK
LAYERS = (1, 2, 3, 4)
PLENTY = Limits(device_memory_bytes=10_000 * GB, host_memory_bytes=10_000 * GB)


@pytest.fixture(autouse=True)
def _slack_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("simulator.predict", "planner.memory_rows"):
        monkeypatch.setattr(f"{module}.MOST_ALLOCATOR_SLACK_BYTES", 10**15)


def toy(
    *,
    micro_batches: int = 1,
    forward: float = 1.0,
    weights_gb: float = 1.0,
    link_gb_per_second: float = 1.0,
    dram_gb_per_second: float = 100.0,
    update_seconds: float = 0.0,
    clipping: Clipping = "global",
) -> Case:
    elements = round(weights_gb * GB / 2) // 128 * 128
    model = toy_model(4, layer_elements=elements, hidden_size=125_000)
    workload = Workload(
        sequence_length=4000,
        tokens_per_step=4000 * micro_batches,
        gradient_format="bf16",
        clipping=clipping,
        micro_batch_rows=1,
    )
    kept: dict[SaveLevel, int] = {"keep": 4 * GB, "input": 0}
    layers = LayerPrices(
        forward={"keep": forward, "input": forward},
        backward={"keep": 2 * forward, "input": 3 * forward},
        kept=kept,
        transient={"keep": 0, "input": 4 * GB},
    )
    costs = price_table(
        model,
        workload,
        base_policy(model, workload, Outline(1, (micro_batches,))),
        layers={1: layers},
        update_host=update_seconds,
        load=weights_gb / link_gb_per_second,
        store=weights_gb / link_gb_per_second,
    )
    return Case(model, workload, machine(dram_bytes_per_second=dram_gb_per_second * GB), costs)


def solved(case: Case, limits: Limits = PLENTY) -> Plan:
    return plan(case.model, case.workload, case.hardware, limits, case.costs, gap=1e-6, with_baselines=False)


def limits(device_gb: float, host_gb: float) -> Limits:
    return Limits(device_memory_bytes=round(device_gb * GB), host_memory_bytes=round(host_gb * GB))


def streamed(case: Case, *, groups: tuple[int, ...] | None = None) -> Policy:
    """Every layer streams through two slots and keeps everything."""
    groups = groups or (case.workload.rows_per_step,)
    everywhere = frozenset(LAYERS)
    levels: dict[int, SaveLevel] = dict.fromkeys(LAYERS, "keep")
    outline = Outline(1, groups)
    return base_policy(case.model, case.workload, outline, host=everywhere, streamed=everywhere, levels=levels)


def step_seconds(case: Case, policy: Policy) -> tuple[float, float]:
    """(the program's relaxation, the replay)"""
    problem = Problem(case.model, case.workload, case.hardware, PLENTY, case.costs)
    outline = Outline.of(policy)
    return problem.formulation(outline).bound_of(policy), problem.figures(policy).step_seconds


def test_1_with_room_for_everything_nothing_is_recomputed_or_moved() -> None:
    found = solved(toy())
    assert found.prediction.step_seconds == pytest.approx(4 * (1 + 2))
    assert found.bound.gap == pytest.approx(0, abs=1e-6)
    assert set(found.policy.save_levels) == {"keep"}
    assert set(found.policy.optimizer_homes) == {"device"}


def test_2_without_a_host_half_the_layers_are_recomputed() -> None:
    # Four layers on the device 28; one micro-batch sums nothing. With k layers kept, at the loss: 4 inputs + 4 k + 2 at
    # the top. So k = 2 takes 28 + 14 S and k = 3 takes 28 + 18 S. The host has room for no layer (7 GB each).
    found = solved(toy(), limits(29 + 14 * S, 5))
    assert sorted(found.policy.save_levels) == ["input", "input", "keep", "keep"]
    assert found.prediction.step_seconds == pytest.approx(12 + 2)
    assert found.prediction.device_peak_bytes == pytest.approx((28 + 14 * S) * GB, rel=1e-4)


def test_3_on_a_fast_link_streaming_costs_its_first_load_and_its_last_store() -> None:
    # Two slots, two slabs and activations: 2 + 2 + S x (4 + 4 k + 2), so 4 + 14 S with two layers kept; there is no
    # room for one GB more, a resident layer. The lowest layer's gradient leaves in 1/8 s and its weights come in 1/8 s
    # while nothing can run.
    found = solved(toy(link_gb_per_second=8), limits(4.5 + 14 * S, 100))
    assert found.policy.weight_homes[1:-1] == ("host",) * 4
    assert found.policy.save_levels.count("keep") == 2
    assert found.prediction.step_seconds == pytest.approx(12 + 2 + 2 / 8)
    assert found.bound.gap == pytest.approx(0, abs=1e-6)


def test_4_on_a_slow_link_nothing_streams_that_need_not() -> None:
    # A weight's or gradient's copy takes 10 s, an input's 1 s. Two layers on the device 14, the others' weights 2, two
    # slabs 2; with the inputs of layers 1 to 3 on the host two stages 2; layer 4, which keeps everything, 5 S, and two
    # gradients 2 S: there is no room for another input. From gradient 4: its store and gradient 3's, then both loads,
    # 40 s; forward 4, backward 4: 1 + 2 s. Streaming all takes far longer.
    case = toy(link_gb_per_second=0.1)
    found = solved(case, limits(20.5 + 7 * S, 100))
    assert found.policy.weight_homes.count("host") == 0
    assert found.policy.optimizer_homes[1:-1] == ("device", "device", "host", "host")
    assert found.policy.activation_homes == ("host", "host", "host", "device")
    assert found.policy.save_levels == ("input", "input", "input", "keep")
    assert "layer inputs wait  on the host: 1-3; on the GPU: 4" in plan_table(found)
    assert found.prediction.device_peak_bytes == pytest.approx((20 + 7 * S) * GB, rel=1e-4)
    assert found.prediction.step_seconds == pytest.approx(43)
    assert step_seconds(case, streamed(case))[1] > 80


def test_5_a_host_too_small_is_named_with_the_bytes_short() -> None:
    # 17 GB of device hold all layers streamed, not one of them on the device. The host then takes 4 x 7 GB, and 256 MiB
    # for pieces of the largest tensor while loading.
    with pytest.raises(InfeasiblePlan, match="host memory is short by") as caught:
        solved(toy(), limits(17, 20))
    assert caught.value.resource == "host memory"
    assert caught.value.short_bytes == pytest.approx((4 * 7 - 20) * GB + 256 * 2**20, rel=1e-3)


def test_6_a_device_too_small_is_named_with_the_bytes_short() -> None:
    # Least: two slots 2, two slabs 2, and all inputs on the host with two stages 2; two gradients at the top and 4
    # while a backward runs: 6 S.
    with pytest.raises(InfeasiblePlan, match="device memory is short by") as caught:
        solved(toy(), limits(3, 100))
    assert caught.value.resource == "device memory"
    assert caught.value.short_bytes == pytest.approx((6 + 6 * S - 3) * GB, rel=1e-3)


def test_7_streaming_at_the_pace_of_compute_adds_one_load_and_one_store() -> None:
    # Forward 1 to gradient 1 takes 12 s, its store 1 s, its update nothing, its load 1 s: one step.
    assert step_seconds(toy(), streamed(toy())) == pytest.approx((14, 14))


def test_8_streaming_slower_than_compute_is_bound_by_the_link() -> None:
    # A copy takes 5 s. Four loads 20, forward 4 1, backward 4 2, then four stores one after another 20, and the next
    # step's loads begin when layer 1, whose store is the last, is updated.
    case = toy(weights_gb=5)
    assert step_seconds(case, streamed(case)) == pytest.approx((43, 43))


@pytest.mark.parametrize("groups", [(2,), (1, 1)])
def test_9_a_second_micro_batch_adds_its_compute_alone(groups: tuple[int, ...]) -> None:
    case = toy(micro_batches=2)
    assert step_seconds(case, streamed(case, groups=groups)) == pytest.approx((26, 26))


def test_10_exact_clipping_shows_one_update_when_updates_keep_pace() -> None:
    # After the norm: layer 1's store 1 s, update 1 s, load 1 s, then its forward; each later layer is 1 s behind.
    case = toy(update_seconds=1)
    assert step_seconds(case, streamed(case)) == pytest.approx((15, 15))


def test_11_without_clipping_the_same_chain_remains() -> None:
    case = toy(update_seconds=1, clipping="none")
    assert step_seconds(case, streamed(case)) == pytest.approx((15, 15))


def test_12_slow_updates_without_clipping_run_from_the_first_gradient_to_the_last_load() -> None:
    # Forward 4 s, backward of layer 4 2 s, its store 1 s, four updates of 4 s, layer 1's load 1 s.
    case = toy(update_seconds=4, clipping="none")
    assert step_seconds(case, streamed(case)) == pytest.approx((24, 24))


def test_12b_slow_updates_with_exact_clipping_run_before_the_last_forward() -> None:
    # After the norm: store 1 s, four updates of 4 s, layer 4's load 1 s, its forward 1 s, then the backward 8 s.
    case = toy(update_seconds=4)
    relaxed, replayed = step_seconds(case, streamed(case))
    assert replayed == pytest.approx(1 + 16 + 1 + 1 + 8)
    assert replayed - 1 - 1e-9 <= relaxed <= replayed + 1e-9


def test_13_one_layer_on_the_device_opens_the_step_and_hides_the_link() -> None:
    # Layer 2's store hides behind layer 1's backward, its load behind layer 1's forward.
    # 7 for layer 1, shared sum 2, slots 2, slabs 2, and everything kept: S x (4 + 16 + 2).
    found = solved(toy(), limits(13.5 + 22 * S, 100))
    assert found.policy.optimizer_homes[1:-1] == ("device", "host", "host", "host")
    assert found.prediction.step_seconds == pytest.approx(12)
    assert found.bound.gap == pytest.approx(0, abs=1e-6)


def test_14_host_memory_slows_what_moves_at_the_same_time() -> None:
    # Forward 0.1 s, backward 0.2 s. Loads of layers 1 to 4 take 4 s alone. At the turn 4 and 3 are in their slots.
    # Backward 4 ends at 4.3; then layer 2's load and layer 4's store want 2 GB/s together and get 1.5: both end at
    # 4.3 + 4/3. Layer 1's load and layer 3's store end 4/3 later, at 6.967, and backward 1 at 7.167. Layer 2's store
    # began then too, at 6.967, and ends at 7.967; layer 1's store at 8.967. That is when layer 1 is updated: 8.967 s.
    case = toy(forward=0.1, dram_gb_per_second=1.5)
    relaxed, replayed = step_seconds(case, streamed(case))
    assert replayed == pytest.approx(4 + 0.3 + 2 * 4 / 3 + 2, abs=1e-6)
    assert 0.85 * replayed <= relaxed <= replayed


def test_15_a_host_with_room_for_one_layer_takes_one() -> None:
    # 10 GB of host: one layer's 7 and 2 while loading. Three layers stay on the device: 21 + 2 for the sum.
    found = solved(toy(), limits(27 + 22 * S, 10))
    assert found.policy.optimizer_homes[1:-1] == ("device", "device", "device", "host")
    assert found.prediction.step_seconds == pytest.approx(12 + found.policy.save_levels.count("input"))


def test_states_stream_where_the_host_is_slow_and_the_link_is_not() -> None:
    # All on the device and everything kept takes 30 + 22 S; 5 GB are missing. The host's update of one layer takes
    # 10 s, recomputing 1 s a layer and saves 4 GB. A state of 5 GB passes the link in 5/8 s, and two slots take 10 GB:
    # with three layers' states on the host those 5 GB are there. Two come while the backward runs, the third has
    # 5/8 s to let one out and 5/8 s to come before the forward has passed three layers.
    case = toy(link_gb_per_second=8, update_seconds=10)
    found = solved(case, limits(25.5 + 22 * S, 100))
    assert found.policy.optimizer_homes.count("streamed") >= 3
    assert "host" not in found.policy.optimizer_homes[1:-1]
    assert set(found.policy.save_levels) == {"keep"}
    assert found.prediction.step_seconds == pytest.approx(12)
    assert found.bound.gap == pytest.approx(0, abs=1e-6)
    # With less of a host there is no such plan: one layer less kept, or more.
    without = solved(case, limits(25.5 + 22 * S, 14))
    assert without.prediction.step_seconds >= 13


def test_the_bound_of_streamed_states_is_what_the_link_must_carry() -> None:
    # All four layers through two slots over a link on which a state takes 50 s: the last two come after two have left.
    # Nothing else takes time, but the forward of the last layer behind it.
    case = toy(link_gb_per_second=0.1)
    policy = base_policy(case.model, case.workload, Outline(1, (1,)), by_link=frozenset(LAYERS))
    bound, step = step_seconds(case, policy)
    # Norm, store 1, load 3 beside store 2, load 4 beside store 3, forward 4, loss, backwards of 4, 3 and 2 s.
    assert step >= bound >= 50 + 50 + 50 + 1
