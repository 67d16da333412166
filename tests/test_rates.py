"""Machines with other rates: what becomes faster, and what does not."""

from random import Random

import pytest
from hardware_cases import toy_profile
from planning_cases import random_case, random_policy
from small_models import random_case as random_program

from simulator.build import build
from simulator.costs import MeasuredCost, OperationCosts, operation_key
from simulator.errors import InputError
from simulator.hardware import load_hardware
from simulator.predict import predict
from simulator.program import Resource
from simulator.rates import faster, key_resource, link_bytes_per_second


@pytest.mark.parametrize("seed", range(20))
def test_a_key_tells_the_resource_of_its_operation(seed: int) -> None:
    model, workload, policy = random_program(seed)
    program = build(model, workload, policy)
    for operation in (*program.first, *program.steady, *program.drain):
        assert key_resource(operation_key(operation, model, workload, policy)) is operation.resource, operation.name


def test_each_factor_is_that_of_its_own_figures() -> None:
    toy = toy_profile()
    changed, _ = faster(toy, compute=1.5, link=2.0, host_dram=3.0)
    assert changed.matmul_flops_per_second("bf16", 10_000) == pytest.approx(450e12)
    assert changed.attention_flops_per_second("bf16", 4096, "backward") == pytest.approx(450e12)
    assert changed.hbm_bytes_per_second.value == pytest.approx(1.5e12)
    assert link_bytes_per_second(changed) == pytest.approx(40e9)
    assert changed.link.duplex.d2h.value == pytest.approx(32e9)
    assert changed.host_dram_bytes_per_second.value == pytest.approx(300e9)
    assert changed.host_optimizer_bytes_per_second.value == pytest.approx(240e9)
    assert changed.launch_seconds == toy.launch_seconds
    assert (changed.device, changed.host) == (toy.device, toy.host)
    assert changed.link.duplex.d2h.source == "derived: 2 times what is derived: for a test"
    assert faster(toy) == (toy, None)


def test_measured_operations_follow_their_resource() -> None:
    keys = {
        "forward.layer.full_attention.keep.2x1024": 1.0,
        "update.layer.full_attention.compute.bf16.fp32": 1.0,
        "update.layer.full_attention.host.bf16.fp32": 4.0,
        "load_weights.layer.full_attention": 2.0,
        "store_gradient.layer.full_attention.bf16": 2.0,
        "load_batch.2x1024": 2.0,
    }
    entries = {key: MeasuredCost(seconds=1.0, source="set by a test") for key in keys}
    costs = OperationCosts(hardware="", shape="", precision="bf16", compiled=True, entries=entries)
    _, changed = faster(toy_profile(), costs, link=2.0, host_dram=4.0)
    assert changed is not None
    assert {key: 1 / cost.seconds for key, cost in changed.entries.items()} == keys
    assert key_resource("load_batch.2x1024") is Resource.H2D
    # A table may have entries that no operation is looked up by.
    assert key_resource("update.a.b.c") is key_resource("update.a") is Resource.COMPUTE


@pytest.mark.parametrize("seed", range(4))
def test_twice_as_fast_in_everything_takes_half_as_long(seed: int) -> None:
    random = Random(seed)
    case = random_case(random)
    policy = random_policy(random, case, depth_first=True)
    seconds = predict(case.model, case.workload, policy, case.hardware, case.costs).figures.step_seconds
    twice = faster(case.hardware, case.costs, compute=2.0, link=2.0, host_dram=2.0)
    halved = predict(case.model, case.workload, policy, *twice).figures.step_seconds
    assert halved == pytest.approx(seconds / 2, rel=1e-2)  # launches take what they took


def test_rates_that_no_machine_has_are_refused() -> None:
    with pytest.raises(InputError, match="impossible"):
        faster(toy_profile(), link=1e9)


def test_rates_that_no_machine_has_are_one_sentence() -> None:
    """A link has a dozen figures, all of them wrong at once."""
    with pytest.raises(InputError) as caught:
        faster(load_hardware("h200"), link=1e-12)
    assert str(caught.value).count("impossible") == 1
    assert str(caught.value).startswith("hardware 'h200' with other rates: link.points.0.bytes_per_second: ")
