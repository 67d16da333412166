"""Where nothing fits: each change that a message names fits, and the next smaller one of its kind does not."""

import re
from random import Random

import pytest
from exhaustion import every_policy
from planning_cases import Case, eager_case, machine, tight_limits, toy_model

from planner.plan import Limits, Plan
from planner.search import plan
from simulator.errors import InfeasiblePlan
from simulator.policy import Workload
from simulator.predict import predict
from simulator.units import parse_bytes

MIB = 2**20
MODEL = toy_model(3, layer_elements=128 * 40_000, edge_elements=128 * 8_000)


def planned(device_mib: float, host_mib: float, *, inline: bool = False, **workload: object) -> Plan:
    """Four rows of 6,144 tokens, or other work."""
    wanted = {"sequence_length": 6144, "tokens_per_step": 24576, "compiled": True, **workload}
    limits = Limits(device_memory_bytes=round(device_mib * MIB), host_memory_bytes=round(host_mib * MIB))
    return plan(MODEL, Workload.model_validate(wanted), machine(inline=inline), limits, with_baselines=False)


def refused(device_mib: float, host_mib: float, **given: object) -> InfeasiblePlan:
    with pytest.raises(InfeasiblePlan) as caught:
        planned(device_mib, host_mib, **given)  # type: ignore[arg-type]
    return caught.value


def sizes(error: InfeasiblePlan, *tiers: str) -> list[float]:
    """MiB of the one change that names these tiers' memory and nothing else."""
    pattern = " and ".join(rf"([\d.]+ [MG]iB) of {tier}" for tier in tiers)
    (found,) = [match for change in error.changes if (match := re.fullmatch(pattern, change))]
    return [parse_bytes(size) / MIB for size in found.groups()]


def named(error: InfeasiblePlan, pattern: str) -> float:
    """The number in the one change of a kind, which the message has too."""
    (found,) = [match for change in error.changes if (match := re.fullmatch(pattern, change))]
    assert found[0] in str(error)
    return float(found[1].replace(",", ""))


def test_the_device_memory_that_is_named_is_enough_and_a_tenth_less_is_not() -> None:
    error = refused(64, 4000, micro_batch_rows=4)
    (enough,) = sizes(error, "device memory")
    assert planned(enough, 4000, micro_batch_rows=4)
    refused(enough - 0.1, 4000, micro_batch_rows=4)
    assert error.resource == "device memory"
    assert error.short_bytes / MIB == pytest.approx(enough - 64, abs=0.1)


def test_the_host_memory_that_is_named_is_enough_and_a_tenth_less_is_not() -> None:
    error = refused(200, 500, micro_batch_rows=1)
    assert error.resource == "host memory"
    (enough,) = sizes(error, "host memory")
    assert planned(200, enough, micro_batch_rows=1)
    refused(200, enough - 0.1 * 1024, micro_batch_rows=1)  # a tenth of a GiB


def test_where_both_memories_are_short_what_is_named_of_both_is_enough() -> None:
    error = refused(64, 100)
    device, host = sizes(error, "device memory", "host memory")
    assert planned(device, host)
    refused(device - 0.1, host)
    refused(device, host - 0.1 * 1024)


def test_what_the_machine_does_not_have_is_marked_and_what_it_has_of_both_is_named() -> None:
    """Where more of one memory alone would be more than there is, but both limits can be raised."""
    whole = machine()
    small = whole.model_copy(update={"device": whole.device.model_copy(update={"memory_bytes": 160 * MIB})})
    workload = Workload(sequence_length=6144, tokens_per_step=24576, compiled=True, micro_batch_rows=1)

    def planned_there(device_mib: float, host_mib: float) -> Plan:
        limits = Limits(device_memory_bytes=round(device_mib * MIB), host_memory_bytes=round(host_mib * MIB))
        return plan(MODEL, workload, small, limits, with_baselines=False)

    with pytest.raises(InfeasiblePlan) as caught:
        planned_there(100, 2398)
    alone, *others = caught.value.changes
    assert re.fullmatch(r"[\d.]+ MiB of device memory \(the machine has 160.0 MiB\)", alone)
    device, host = sizes(caught.value, "device memory", "host memory")
    assert 100 < device <= 160
    assert planned_there(device, host)
    assert not any("has" in change for change in others)


def test_smaller_work_is_the_least_change_of_its_kind() -> None:
    device_mib = 150
    error = refused(device_mib, 4000, micro_batch_rows=4)
    rows = round(named(error, r"micro-batches of (\d+) rows .*"))
    length = round(named(error, r"sequences of ([\d,]+) tokens"))
    assert planned(device_mib, 4000, micro_batch_rows=rows)
    refused(device_mib, 4000, micro_batch_rows=2 * rows)  # the next divisor of 4
    assert planned(device_mib, 4000, micro_batch_rows=4, sequence_length=length)
    longer = min(n for n in range(length + 1, 6145) if 6144 % n == 0)  # steps of 4 rows at a time
    refused(device_mib, 4000, micro_batch_rows=4, sequence_length=longer)


@pytest.mark.slow
def test_gradients_in_bf16_are_named_where_they_alone_would_do() -> None:
    needed = {
        grads: refused(64, 4000, micro_batch_rows=4, gradient_format=grads).short_bytes for grads in ("fp32", "bf16")
    }
    limit = 64 + (needed["bf16"] + 4096) / MIB
    changes = refused(limit, 4000, micro_batch_rows=4).changes
    assert ("gradient_format bf16" in changes) is (needed["bf16"] < needed["fp32"])
    assert planned(limit, 4000, micro_batch_rows=4, gradient_format="bf16")


def test_what_cannot_be_done_is_not_suggested() -> None:
    assert not re.search("8bit|nvme|disk", str(refused(64, 100, micro_batch_rows=4)), re.IGNORECASE)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_least_memory_is_that_of_all_policies(seed: int) -> None:
    """All policies of two layers, replayed: none takes less of the device within the host's limit."""
    case = eager_case(seed, 2)
    limits = tight_limits(Random(seed), case)
    figures = [
        predict(case.model, case.workload, policy, case.hardware, case.costs).figures for policy in every_policy(case)
    ]
    least = min(f.device_peak_bytes for f in figures if f.host_peak_bytes <= limits.host_memory_bytes)
    assert of_case(case, limits.model_copy(update={"device_memory_bytes": least}))
    with pytest.raises(InfeasiblePlan) as caught:
        of_case(case, limits.model_copy(update={"device_memory_bytes": least - 1}))
    assert caught.value.short_bytes == 1


def of_case(case: Case, limits: Limits) -> Plan:
    return plan(case.model, case.workload, case.hardware, limits, case.costs, with_baselines=False)


def test_where_there_is_one_memory_one_is_named() -> None:
    error = refused(100, 100, inline=True)
    (enough,) = sizes(error, "memory")
    assert str(error).startswith("no plan fits: memory is short by")
    assert "device" not in str(error)
    assert planned(enough, enough, inline=True)
    refused(enough - 1, enough - 1, inline=True)  # policies that take about as little differ by some batches
