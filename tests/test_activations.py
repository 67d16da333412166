"""Activations that wait on the host: when they leave and come back, what they take in both tiers."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import small_model, small_workload

from executor.layer import LayerTemplates
from simulator.build import build, build_evaluation
from simulator.check import check
from simulator.costs import Pricing
from simulator.errors import ProgramError
from simulator.freezing import freeze
from simulator.model import ModelSpec, model_spec
from simulator.placement import micro_batch_bytes
from simulator.policy import Policy, Workload, uniform_policy
from simulator.program import Kind, Program, Resource, Role, StepProgram, Tier
from simulator.replay import Price, Sharing, replay
from simulator.timeline import Timeline
from tests.hardware_cases import toy_profile
from tests.tiny import make_trainer, random_weights, run_steps, tiny_batches, tiny_config
from tests.tiny_models import random_blocks

GROUPS = [(3,), (1, 1, 1), (1, 2)]


def waiting(model: ModelSpec, workload: Workload, groups: tuple[int, ...], **choices: Any) -> Policy:
    settings = {"micro_batch_rows": 1, "save_level": "input", "activations": "host", **choices}
    return uniform_policy(model, workload, groups=groups, **settings)


def replayed(program: StepProgram, copy_seconds: float) -> Timeline:
    """Every operation takes a second but the copies of activations; nothing takes memory of its own."""
    copies = (Kind.STORE_ACTIVATION, Kind.LOAD_ACTIVATION)
    return replay(
        program,
        lambda operation: Price(copy_seconds if operation.kind in copies else 1.0),
        lambda buffer: buffer.num_bytes,
        Sharing(),
    )


def passing_peak(program: StepProgram, copy_seconds: float = 0.5) -> float:
    """In layer inputs: what passes through a step at most, batches left out."""
    persistent = sum(b.num_bytes for b in program.buffers.values() if b.persistent and b.tier is Tier.DEVICE)
    batches = sum(b.num_bytes for b in program.buffers.values() if b.role is Role.BATCH and b.tier is Tier.DEVICE)
    peak = replayed(program, copy_seconds).peak_bytes["device"] - persistent - batches
    return peak / program.buffers["hidden.1.0"].num_bytes


def test_a_group_holds_one_layer_s_inputs_and_outputs_instead_of_every_layer_s() -> None:
    model, workload = small_model(5), small_workload(3)
    # All inputs of five layers, and at the loss the head's with one gradient.
    assert passing_peak(build(model, workload, waiting(model, workload, (3,), activations="device"))) == 5 * 3 + 3 + 1
    # A layer's inputs, its first output, and the input before, which is leaving.
    assert passing_peak(build(model, workload, waiting(model, workload, (3,)))) == 3 + 1 + 1
    # With more passes to leave, as many inputs are still on their way; but none at the loss, save the last.
    slow = waiting(model, workload, (3,)).model_copy(update={"leaving_passes": 3})
    assert passing_peak(build(model, workload, slow)) == 3 + 1 + 3
    program = build(model, workload, slow)
    released = {name: operation.name for operation in program.steady for name in operation.releases}
    assert released["hidden.1.0"] == "forward.2.0"
    assert released["hidden.1.2"] == "forward.2.2"
    assert {released[f"hidden.5.{m}"] for m in (0, 1)} == {"forward.5.2"}
    assert released["hidden.5.2"] == "loss.0"
    mixed = waiting(model, workload, (3,)).model_copy(
        update={"activation_homes": ("host", "host", "host", "device", "device")}
    )
    assert passing_peak(build(model, workload, mixed)) == 2 * 3 + 3 + 1


def test_both_tiers_have_persistent_places_of_exactly_the_size() -> None:
    model, workload = small_model(5), small_workload(3)
    input_bytes = 4 * model.hidden_size * 2
    for groups in GROUPS:
        for interval, kept in ((1, 5), (2, 3), (9, 1)):
            buffers = build(model, workload, waiting(model, workload, groups, checkpoint_interval=interval)).buffers
            places = [b for b in buffers.values() if b.role is Role.ACTIVATION]
            assert len(places) == kept * max(groups)
            stages = [b for b in buffers.values() if b.role is Role.STAGE]
            assert {(b.tier, b.persistent) for b in places} == {(Tier.HOST, True)}
            assert {(b.tier, b.persistent) for b in stages} == {(Tier.DEVICE, True)}
            assert len(stages) == 2
            assert {b.num_bytes for b in (*places, *stages)} == {input_bytes}


@pytest.mark.parametrize("groups", GROUPS)
def test_copies_half_as_long_as_a_pass_cost_no_time(groups: tuple[int, ...]) -> None:
    model, workload = small_model(4), small_workload(3)
    on_device, on_host = (
        replayed(build(model, workload, waiting(model, workload, groups, activations=home)), 0.5)
        for home in ("device", "host")
    )
    assert on_host.step_seconds == pytest.approx(on_device.step_seconds)
    assert on_host.busy_seconds()["d2h"] == on_host.busy_seconds().get("host", 0.0) + 4 * 3 * 0.5


def test_copies_longer_than_passes_are_what_the_step_waits_for() -> None:
    model, workload = small_model(4), small_workload(3)
    timeline = replayed(build(model, workload, waiting(model, workload, (3,))), 4.0)
    lost = timeline.lost_seconds()
    assert {cause for cause, seconds in lost.items() if seconds} == {"waiting for activations"}
    # All that leaves has left before the head's first pass ends; all but two stages come back after that.
    assert timeline.step_seconds > 4 * 3 * 4.0 + (4 * 3 - 2) * 4.0


def test_a_pass_that_does_not_wait_for_the_copy_cannot_let_go_of_its_source() -> None:
    model, workload = small_model(3), small_workload(2)
    program = build(model, workload, waiting(model, workload, (2,)))

    def hasty(variant: Program) -> Program:
        return replace(
            variant,
            operations=tuple(
                o.with_waits(tuple(w for w in o.waits if w.operation != "store_activation.2.0")) for o in variant
            ),
        )

    check(program)
    with pytest.raises(ProgramError, match=r"hidden\.2\.0 is still in use by store_activation\.2\.0"):
        check(replace(program, first=hasty(program.first), steady=hasty(program.steady)))


def test_memory_is_only_let_go_of_on_the_stream_that_it_is_allocated_on() -> None:
    model, workload = small_model(4), small_workload(3)
    for groups in GROUPS:
        for interval in (1, 2):
            program = build(model, workload, waiting(model, workload, groups, checkpoint_interval=interval))
            for operation in program.steady:
                passing = [a.buffer for a in operation.writes if not program.buffers[a.buffer].persistent]
                if operation.releases or any(not name.startswith("batch") for name in passing):
                    assert operation.resource is Resource.COMPUTE


def test_what_keeps_nothing_has_no_home() -> None:
    """Layers below the lowest trained one, and those whose input is recomputed."""
    model, workload = small_model(5), small_workload(2)
    sparse = waiting(model, workload, (2,), checkpoint_interval=2)
    elsewhere = sparse.model_copy(update={"activation_homes": ("host", "device", "host", "device", "host")})
    assert build(model, workload, sparse) == build(model, workload, elsewhere)

    config = tiny_config(layers=4)
    frozen = freeze(model_spec(config), ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"])
    workload = Workload(sequence_length=16, tokens_per_step=64)
    whole, upper = (
        waiting(frozen, workload, (4,)).model_copy(update={"activation_homes": homes})
        for homes in (("host",) * 4, ("device", "device", "host", "host"))
    )
    assert build(frozen, workload, whole) == build(frozen, workload, upper)


def test_an_evaluation_copies_no_activation() -> None:
    model, workload = small_model(3), small_workload(2)
    on_host, on_device = (waiting(model, workload, (2,), activations=home) for home in ("host", "device"))
    evaluation = build_evaluation(model, workload, on_host)
    assert evaluation.operations == build_evaluation(model, workload, on_device).operations
    check(build(model, workload, on_host), evaluation)


def test_a_copy_is_priced_by_its_bytes_over_the_link_and_host_memory() -> None:
    model, profile = small_model(2), toy_profile()
    rows = 2**17  # 4 MiB: the toy's link moves 20 GB/s at that size
    workload = small_workload(rows, precision="bf16")
    policy = waiting(model, workload, (1,), micro_batch_rows=rows)
    pricing = Pricing(model, workload, policy, profile)
    num_bytes = rows * 4 * model.hidden_size * 2
    assert num_bytes >= 4 * 2**20
    for operation in build(model, workload, policy).steady:
        if operation.kind in (Kind.STORE_ACTIVATION, Kind.LOAD_ACTIVATION):
            price = pricing.price(operation)
            assert price.seconds == pytest.approx(num_bytes / 20e9 + profile.launch_seconds.value)
            assert price.dram_bytes == num_bytes


def test_an_input_that_has_left_is_freed_and_comes_back_elsewhere_bit_for_bit() -> None:
    config = tiny_config(layers=1)
    model = model_spec(config)
    templates, flat = LayerTemplates(config, model, precision="fp32"), random_blocks(model, "fp32")[1]
    shape = (2, 8, model.hidden_size)
    hidden, grad_output = torch.randn(shape), torch.randn(shape)
    for level in ("keep", "input"):
        _, kept = templates.forward(1, flat, hidden.clone(), level)
        expected = templates.backward(1, flat, kept, grad_output)

        memory = hidden.numpy().copy()
        alive = weakref.ref(memory)
        source = torch.from_numpy(memory)
        del memory
        _, kept = templates.forward(1, flat, source, level)
        whole = kept.kept_bytes()
        kept.let_go_of_hidden()
        del source
        assert alive() is None, level
        assert kept.kept_bytes() == whole - hidden.nbytes
        if level == "keep":
            _, early = templates.forward(1, flat, hidden.clone(), level)
            early.let_go_of_hidden()
            with pytest.raises(ProgramError, match="before its input had come back"):
                templates.backward(1, flat, early, grad_output)
        kept.take_hidden_back(hidden.clone())
        grad_hidden, gradients = templates.backward(1, flat, kept, grad_output)
        assert torch.equal(grad_hidden, expected[0])
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1], strict=True))


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])
def test_what_a_layer_saved_is_freed_and_comes_back_elsewhere_bit_for_bit(family: str) -> None:
    config = tiny_config(family, layers=1)
    model = model_spec(config)
    templates, flat = LayerTemplates(config, model, precision="bf16"), random_blocks(model, "bf16")[1]
    shape = (2, 8, model.hidden_size)
    hidden, grad_output = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    _, kept = templates.forward(1, flat, hidden, "keep")
    saved_bytes = kept.bytes_beside_hidden()
    expected = templates.backward(1, flat, kept, grad_output)
    # With room for all, as planned with alignment; for a part; for nothing.
    for room, stays in ((2 * saved_bytes, 0), (saved_bytes // 2, saved_bytes // 2), (0, saved_bytes)):
        _, kept = templates.forward(1, flat, hidden.clone(), "keep")
        place, stage = torch.zeros(room, dtype=torch.uint8), torch.full((room + 256,), 7, dtype=torch.uint8)
        kept.let_go_of_hidden()
        leaving, used = kept.let_go_of_saved(place)
        alive = [weakref.ref(tensor.untyped_storage()) for tensor in leaving]
        assert sum(tensor.numel() for tensor in leaving) <= used + 255
        del leaving
        assert used <= room
        assert kept.kept_bytes() == pytest.approx(stays, abs=saved_bytes // 4)
        assert (kept.kept_bytes() == 0) == (stays == 0)
        assert all(reference() is None for reference in alive)
        stage[:used].copy_(place[:used])
        kept.take_hidden_back(hidden.clone())
        kept.take_saved_back(stage)
        grad_hidden, gradients = templates.backward(1, flat, kept, grad_output)
        assert torch.equal(grad_hidden, expected[0])
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1], strict=True))

    _, early = templates.forward(1, flat, hidden.clone(), "keep")
    early.let_go_of_hidden()
    early.let_go_of_saved(torch.zeros(2 * saved_bytes, dtype=torch.uint8))
    early.take_hidden_back(hidden.clone())
    with pytest.raises(ProgramError, match="before what it saved had come back"):
        templates.backward(1, flat, early, grad_output)


def saving(model: ModelSpec, workload: Workload, groups: tuple[int, ...], layers: set[int], **choices: Any) -> Policy:
    """Everything is kept, and of some layers it waits on the host."""
    settings = {"saved_bytes": 1000, "leaving_passes": 3, **choices}
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=groups, **settings)
    homes = tuple("host" if layer in layers else "device" for layer in model.layers)
    return policy.model_copy(update={"activation_homes": homes})


def test_what_a_layer_saves_has_left_some_passes_later_and_comes_back_when_the_stage_is_free() -> None:
    model, workload = small_model(6), small_workload(2)
    program = build(model, workload, saving(model, workload, (1, 1), {1, 4, 6}))
    check(program)
    operations = {operation.name: operation for operation in program.steady}
    order = list(operations)
    for m in range(2):
        # Three passes later; but the loss comes after two, or at once.
        for layer, passing in ((1, f"forward.4.{m}"), (4, f"forward.6.{m}"), (6, f"loss.{m}")):
            let_go = [o.name for o in operations.values() if f"saved.{layer}.{m}" in o.releases]
            assert let_go == [passing]
            assert f"hidden.{layer}.{m}" in operations[passing].releases
            assert f"store_activation.{layer}.{m}" in [wait.operation for wait in operations[passing].waits]
        for layer, before in ((4, 6), (1, 4)):
            load = operations[f"load_activation.{layer}.{m}.backward"]
            assert order.index(load.name) == order.index(f"backward.{before}.{m}") + 1
            assert [access.buffer for access in load.writes][1] == "device.saved_stage.0"
    buffers = program.buffers.values()
    assert [b.num_bytes for b in buffers if b.role is Role.SAVED_PLACE] == [1000] * 3
    assert [b.num_bytes for b in buffers if b.role is Role.SAVED_STAGE] == [1000]
    # A group has a place for each of its micro-batches, but in a depth-first layer, which one passes at a time.
    for depth_first_layers, places in ((0, [1, 1, 4, 4, 6, 6]), (3, [1, 1, 4, 6]), (6, [1, 4, 6])):
        policy = saving(model, workload, (2,), {1, 4, 6}, depth_first_layers=depth_first_layers)
        program = build(model, workload, policy)
        check(program)
        for role in (Role.SAVED_PLACE, Role.ACTIVATION):
            assert [b.block for b in program.buffers.values() if b.role is role] == places


def test_copies_of_what_is_saved_cost_nothing_where_other_layers_lie_between() -> None:
    model, workload = small_model(7), small_workload(3)

    def seconds(layers: set[int], copy_seconds: float, groups: tuple[int, ...] = (1, 1, 1)) -> float:
        return replayed(build(model, workload, saving(model, workload, groups, layers)), copy_seconds).step_seconds

    alone = seconds(set(), 2.0)
    assert seconds({1, 4}, 2.0) == pytest.approx(alone)
    # Five passes before the loss are too few for three copies, and a pass between is too short for a way back.
    assert seconds({1, 2, 3}, 2.0) > alone
    assert seconds({1, 4}, 2.0, groups=(3,)) > alone


def test_the_peak_holds_what_one_layer_saves_instead_of_what_all_do() -> None:
    model, workload = small_model(7), small_workload(2)
    saved_bytes = 1000

    def peak(layers: set[int]) -> float:
        program = build(model, workload, saving(model, workload, (1, 1), layers))
        timeline = replay(
            program,
            lambda operation: Price(1.0, transient_bytes=5000 if operation.kind is Kind.LOSS else 0),
            lambda buffer: saved_bytes if buffer.role is Role.SAVED else buffer.num_bytes,
            Sharing(),
        )
        stage = sum(b.num_bytes for b in program.buffers.values() if b.role in (Role.STAGE, Role.SAVED_STAGE))
        return timeline.peak_bytes["device"] - stage

    hidden = build(model, workload, saving(model, workload, (1, 1), set())).buffers["hidden.1.0"].num_bytes
    # At the loss, which takes most, nothing of the two layers is there.
    batch = micro_batch_bytes(model, workload, 1)  # the next one may come a little later
    assert 2 * (saved_bytes + hidden) <= peak(set()) - peak({1, 4}) <= 2 * (saved_bytes + hidden) + batch


def test_a_copy_of_what_is_saved_is_priced_with_the_input_s() -> None:
    model, profile = small_model(2), toy_profile()
    rows = 2**17
    workload = small_workload(rows, precision="bf16")
    saved_bytes = 12 * 2**20
    policy = waiting(model, workload, (1,), micro_batch_rows=rows, save_level="keep", saved_bytes=saved_bytes)
    pricing = Pricing(model, workload, policy, profile)
    num_bytes = rows * 4 * model.hidden_size * 2 + saved_bytes
    copies = [o for o in build(model, workload, policy).steady if "activation" in o.name]
    assert len(copies) == 4
    for operation in copies:
        price = pricing.price(operation)
        assert price.seconds == pytest.approx(num_bytes / 20e9 + profile.launch_seconds.value)
        assert price.dram_bytes == num_bytes


def test_inputs_stand_on_the_host_between_forward_and_backward() -> None:
    config, workload = tiny_config(), Workload(sequence_length=16, tokens_per_step=96, precision="fp32")
    model = model_spec(config)
    policy = waiting(model, workload, (6,)).model_copy(update={"activation_homes": ("host", "host", "device", "host")})
    trainer = make_trainer(config, workload, policy, random_weights(config, torch.float32))
    seen: dict[str, set[int]] = {"device": set(), "host": set()}
    original = trainer.operations.loss

    def loss(operation: Any) -> None:
        if operation.micro_batch == 5:
            held = [name for name in trainer.memory.passing if name.startswith("hidden.")]
            seen["device"] |= {int(name.split(".")[1]) for name in held}
            places = [b.name for b in trainer.program.buffers.values() if b.role is Role.ACTIVATION]
            seen["host"] |= {int(p.split(".")[2]) for p in places if trainer.memory.activation(p).abs().sum() > 0}
        original(operation)

    trainer.runner.functions = {**trainer.operations.functions(), Kind.LOSS: loss}
    run_steps(trainer, tiny_batches(1))
    assert seen == {"device": {3, 5}, "host": {1, 2, 4}}
    assert not trainer.memory.passing
    planned = sum(b.num_bytes for b in trainer.program.buffers.values() if b.role is Role.ACTIVATION)
    whole = trainer.memory.persistent_bytes()["host"] - trainer.memory.host.bytes.resident
    assert planned <= whole < planned + 4096
    trainer.close()
