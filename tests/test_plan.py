"""Plans as files, as text, and beside their rivals."""

import json
import re
from pathlib import Path

import pytest
from planning_cases import machine, seven_billion, toy_model

from planner.explain import plan_table
from planner.plan import Limits, Plan, require_same_inputs
from planner.search import default_limits, plan
from planner.task import Task
from simulator.errors import InfeasiblePlan, InputError
from simulator.hardware import HardwareProfile, load_hardware
from simulator.placement import place
from simulator.policy import Workload, check_policy
from simulator.predict import predict
from simulator.units import format_bytes

GIB = 2**30
WORKLOAD = Workload(
    sequence_length=1024, tokens_per_step=16384, gradient_format="bf16", compiled=True, micro_batch_rows=8
)


@pytest.fixture(scope="module")
def planned() -> Plan:
    limits = Limits(device_memory_bytes=64 * GIB, host_memory_bytes=120 * GIB)
    return plan(seven_billion(), WORKLOAD, load_hardware("h200"), limits, model_path="models/seven")


def test_a_plan_takes_no_more_of_the_host_than_may_be_pinned_and_the_bare_process() -> None:
    whole = load_hardware("h200")

    def with_pinned(num_bytes: int, **changes: object) -> HardwareProfile:
        host = whole.host.model_copy(update={"pinned_limit_bytes": num_bytes})
        return whole.model_copy(update={"host": host, **changes})

    hardware = with_pinned(60 * GIB)
    usable = 60 * GIB + round(whole.host_base_bytes.value)
    assert hardware.usable_host_bytes == usable < whole.usable_host_bytes == whole.host.memory_bytes
    assert with_pinned(60 * GIB, shared_memory=True).usable_host_bytes == whole.host.memory_bytes
    found = plan(seven_billion(), WORKLOAD, hardware, with_baselines=False)
    assert found.inputs.limits.host_memory_bytes == usable
    # Below what fits: what the machine has is what may be used, and a re-solve with more is of a machine with more.
    small = with_pinned(20 * GIB)
    limits = Limits(device_memory_bytes=24 * GIB, host_memory_bytes=small.usable_host_bytes)
    has = re.escape(f"GiB of host memory (the machine has {format_bytes(small.usable_host_bytes)})")
    with pytest.raises(InfeasiblePlan, match=has):
        plan(seven_billion(), WORKLOAD, small, limits, with_baselines=False, with_suggestions=False)
    task = Task(seven_billion(), WORKLOAD, hardware, default_limits(hardware))
    assert task.with_memory(host_bytes=90 * GIB).hardware.usable_host_bytes >= 90 * GIB


def test_a_plan_says_what_it_was_made_for_and_what_it_promises(planned: Plan) -> None:
    data = json.loads(planned.model_dump_json())
    assert data["inputs"]["model"]["path"] == "models/seven"
    assert data["inputs"]["model"]["num_parameters"] == seven_billion().num_parameters
    assert data["inputs"]["workload"]["tokens_per_step"] == 16384
    assert data["inputs"]["limits"]["device_memory_bytes"] == 64 * GIB
    assert data["inputs"]["hardware"]["name"] == "h200"
    assert all(data["inputs"]["hashes"][key] for key in ("model", "hardware", "hardware_rates", "workload", "limits"))
    assert set(data["prediction"]) == {
        "step_seconds", "tflops", "tflops_with_attention", "tokens_per_second",
        "device_peak_bytes", "host_peak_bytes", "nvme_peak_bytes", "breakdown_seconds",
    }  # fmt: skip
    assert set(data["bound"]) == {"step_seconds", "gap"}
    assert data["solver"]["name"] == "HiGHS"
    assert sum(planned.price_shares.values()) == pytest.approx(1)
    assert planned.price_shares["roofline"] == 1.0


def test_a_plan_survives_its_file(planned: Plan, tmp_path: Path) -> None:
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned


def test_timings_stand_outside_the_hash(planned: Plan) -> None:
    other = planned.model_copy(update={"timings": {"search_seconds": 1e6}})
    assert other.hashed().plan_hash == planned.plan_hash
    assert set(planned.timings) == {"search_seconds", "baselines_seconds"}


def test_an_edited_plan_is_refused(planned: Plan, tmp_path: Path) -> None:
    data = json.loads(planned.model_dump_json())
    data["policy"]["prefetch_depth"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"plan\.json: its content does not match its plan_hash"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "plan.json"), ('{"version": 1}', "inputs"), ("[]", "plan.json"), ('{"unknown": 1}', "unknown")],
)
def test_files_that_are_no_plan_are_refused_by_name(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError, match=complaint):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("field", ["weight_homes", "optimizer_homes", "activation_homes"])
def test_a_plan_whose_policy_does_not_fit_its_model_is_refused_by_key(
    tmp_path: Path, planned: Plan, field: str
) -> None:
    """Its hash is right, as of a plan that a script made."""
    short = planned.policy.model_copy(update={field: getattr(planned.policy, field)[1:]})
    planned.model_copy(update={"policy": short}).hashed().save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=rf"plan\.json: policy\.{field}: has \d+ entries, this model needs \d+"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_plan_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json"):
        Plan.load(tmp_path / "nowhere.json")


def test_a_plan_for_other_inputs_is_refused_and_the_difference_named(planned: Plan) -> None:
    require_same_inputs(planned, model=seven_billion(), workload=WORKLOAD)
    with pytest.raises(InputError, match=r"workload\.sequence_length is 512, the plan has 1024"):
        require_same_inputs(planned, workload=WORKLOAD.model_copy(update={"sequence_length": 512}))
    with pytest.raises(InputError, match=r"model\.num_layers is 2, the plan has 28") as caught:
        require_same_inputs(planned, model=toy_model(2, layer_elements=128))
    assert "model.kinds differs" in str(caught.value)


def test_a_plan_replays_to_its_own_figures_and_on_another_machine_to_others(planned: Plan) -> None:
    assert planned.replay().figures == planned.prediction
    other = planned.replay(load_hardware("rtx-4090")).figures
    assert other.step_seconds > 2 * planned.prediction.step_seconds


def test_limits_default_to_the_machine_s_memory() -> None:
    hardware = load_hardware("h200")
    limits = default_limits(hardware)
    assert limits.device_memory_bytes == hardware.device.memory_bytes
    assert limits.host_memory_bytes == hardware.host.memory_bytes
    assert limits.bytes_of("nvme") == 0


# Rivals


def test_rivals_are_priced_by_the_same_replay(planned: Plan) -> None:
    assert set(planned.baselines) == {"MegaTrain", "ZeRO-3 offload", "all in HBM"}
    for baseline in planned.baselines.values():
        if baseline.policy is None:
            assert baseline.infeasible
            continue
        check_policy(baseline.policy, planned.model, WORKLOAD)
        figures = predict(planned.model, WORKLOAD, baseline.policy, planned.hardware).figures
        assert figures == baseline.prediction
        assert figures.step_seconds >= planned.prediction.step_seconds
        assert figures.device_peak_bytes <= 64 * GIB


def test_megatrain_streams_all_layers_through_two_slots_in_one_group(planned: Plan) -> None:
    policy = planned.baselines["MegaTrain"].policy
    assert policy is not None
    assert set(policy.weight_homes[1:-1]) == {"host"}
    assert len(place(planned.model, WORKLOAD, policy).slots) == 2
    assert set(policy.optimizer_homes) == {"host"}
    assert len(policy.groups) == 1
    assert policy.checkpoint_interval == 4
    assert set(policy.save_levels) == {"input"}


def test_zero_offload_streams_all_layers_once_more_for_every_micro_batch(planned: Plan) -> None:
    policy = planned.baselines["ZeRO-3 offload"].policy
    assert policy is not None
    assert set(policy.groups) == {1}
    assert set(policy.weight_homes[1:-1]) == {"host"}
    assert policy.checkpoint_interval == 1


def test_a_rival_that_does_not_fit_says_by_how_much(planned: Plan) -> None:
    # Weights, state and sums of 7.6 B parameters: 2 + 10 + 4 bytes each, 114 GiB, and 64 GiB are there.
    assert planned.baselines["all in HBM"].policy is None
    assert planned.baselines["all in HBM"].infeasible.startswith("device memory short by")


def test_all_in_hbm_leaves_nothing_on_the_host() -> None:
    found = plan(seven_billion(), WORKLOAD, load_hardware("h200"))
    rival = found.baselines["all in HBM"]
    assert rival.policy is not None
    assert rival.prediction is not None
    assert set(rival.policy.optimizer_homes) == {"device"}
    assert found.prediction.step_seconds <= rival.prediction.step_seconds


def test_models_too_small_for_every_fourth_input_still_have_rivals() -> None:
    model = toy_model(2, layer_elements=128 * 100, edge_elements=128)
    found = plan(model, Workload(sequence_length=8, tokens_per_step=16), machine())
    assert all(baseline.policy is not None for baseline in found.baselines.values())


# Text


def test_the_table_tells_where_everything_lives_with_units(planned: Plan) -> None:
    text = plan_table(planned)
    for words in (
        "models/seven: 7.62 B parameters in 28 layers",
        "exact clipping",
        "optimizer state",
        "GiB",
        "TFLOPS (6 N T)",
        "tokens per second",
        "MegaTrain",
        "all in HBM does not fit: device memory short by",
        "bottleneck: GPU compute",
        "bound: no policy considered steps in less than",
        "100% computed from the machine's profile; `conveyor measure` times this model's operations, where these are a",
        "found by HiGHS",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()[:40]) <= 160


def test_the_table_of_a_small_model_on_a_cpu_has_figures_that_differ_and_names_no_gpu() -> None:
    model = toy_model(2, layer_elements=128 * 100, edge_elements=128)
    found = plan(model, Workload(sequence_length=8, tokens_per_step=16), load_hardware("cpu-2-core"))
    text = plan_table(found)
    assert f"{model.num_parameters / 1e6:.2f} M parameters" in text
    assert f"{found.prediction.tflops:.3g}" in text
    assert "GPU" not in text


@pytest.mark.parametrize("on_cpu", [False, True])
def test_bytes_in_the_table_add_up_to_the_peaks(planned: Plan, on_cpu: bool) -> None:
    if on_cpu:  # one memory, so one column: the device's part is in the host's peak already
        model = toy_model(2, layer_elements=128 * 100, edge_elements=128)
        planned = plan(model, Workload(sequence_length=8, tokens_per_step=16), load_hardware("cpu-2-core"))
    lines = plan_table(planned).splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("what lives where")) + 1
    peak = next(number for number, line in enumerate(lines) if line.startswith("peak"))
    columns = re.findall(r"device|host|memory", lines[header])
    assert columns == (["memory"] if on_cpu else ["device", "host"])
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for column in columns:
        right = lines[header].index(column) + len(column)  # cells end where the header's word does
        total = error = 0.0
        for line in lines[header + 1 : peak]:
            if cell := re.search(r"([\d.]+) ([KMG]?i?B)$", line[:right]):
                total += float(cell[1]) * units[cell[2]]
                error += 0.05 * units[cell[2]]  # of rounding
        tier = "host" if column == "memory" else column
        assert total == pytest.approx(getattr(planned.prediction, f"{tier}_peak_bytes"), abs=error)
