"""Ablations: each plan does without its means, is no faster than the whole plan, and fits."""

from pathlib import Path

import pytest

from planner.ablation import ABLATIONS, ablate
from planner.explain import plan_table
from planner.plan import Limits, Plan
from planner.search import plan
from simulator.errors import InputError
from simulator.hardware import load_hardware
from simulator.model import load_model_spec
from simulator.policy import Workload
from simulator.rates import faster
from simulator.units import GIB

MODELS = Path(__file__).parent.parent / "simulator/catalogue/models"


@pytest.fixture(scope="module")
def whole() -> Plan:
    workload = Workload(
        sequence_length=1024, tokens_per_step=8_192, gradient_format="bf16", micro_batch_rows=8, compiled=True
    )
    limits = Limits(device_memory_bytes=40 * GIB, host_memory_bytes=120 * GIB)
    model = load_model_spec(MODELS / "qwen2.5-7b.json")
    return plan(model, workload, load_hardware("h200"), limits, with_baselines=False)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablated_plan_does_without_and_is_no_faster(name: str, whole: Plan) -> None:
    without = ablate(whole, name)
    assert without is not None
    assert ABLATIONS[name].spared(without.policy)
    assert without.prediction.step_seconds >= whole.prediction.step_seconds * (1 - 1e-3)
    assert without.prediction.device_peak_bytes <= whole.inputs.limits.device_memory_bytes
    assert without.policy.micro_batch_rows == whole.policy.micro_batch_rows
    if ABLATIONS[name].spared(whole.policy):
        assert without == whole
    else:
        assert without.replay().figures == without.prediction
        assert without.plan_hash != whole.plan_hash


def test_without_depth_first_layers_a_capped_step_is_slower() -> None:
    workload = Workload(
        sequence_length=1024, tokens_per_step=98_304, gradient_format="bf16", micro_batch_rows=16, compiled=True
    )
    limits = Limits(device_memory_bytes=48 * GIB, host_memory_bytes=120 * GIB)
    model = load_model_spec(MODELS / "qwen2.5-7b.json")
    capped = plan(model, workload, load_hardware("h200"), limits, with_baselines=False)
    assert capped.policy.depth_first_layers > 0
    without = ablate(capped, "no-depth-first")
    assert without is not None
    assert without.policy.depth_first_layers == 0
    assert without.prediction.step_seconds > 1.01 * capped.prediction.step_seconds


def test_with_a_fast_link_what_layers_save_waits_on_the_host_instead_of_being_recomputed() -> None:
    workload = Workload(
        sequence_length=1024, tokens_per_step=98_304, gradient_format="bf16", micro_batch_rows=16, compiled=True
    )
    limits = Limits(device_memory_bytes=48 * GIB, host_memory_bytes=300 * GIB)
    hardware, _ = faster(load_hardware("h200"), link=4.0, host_dram=4.0)
    model = load_model_spec(MODELS / "qwen2.5-7b.json")
    whole = plan(model, workload, hardware, limits, with_baselines=False)
    layers = zip(whole.policy.save_levels, whole.policy.activation_homes, whole.policy.saved_bytes, strict=True)
    assert sum(level != "input" and home == "host" and size > 0 for level, home, size in layers) > 14
    assert "saved activations that wait" in plan_table(whole)
    without = ablate(whole, "no-waiting-activations")
    assert without is not None
    assert set(without.policy.activation_homes) == {"device"}
    assert without.prediction.step_seconds > 1.03 * whole.prediction.step_seconds


def test_an_unknown_ablation_is_refused_with_the_nearest_name(whole: Plan) -> None:
    with pytest.raises(InputError, match="host-optimizer"):
        ablate(whole, "host-optimiser")
