"""Explanations: what more would buy is what plans on richer machines take; alternatives are the best of their kind."""

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from exhaustion import every_policy, fastest_by_replay
from planning_cases import (
    Case,
    eager_case,
    machine,
    seven_billion,
    tight_limits,
    toy_model,
)

from planner.alternatives import alternatives
from planner.explain import held_bytes, plan_table
from planner.explanation import Explanation, explanation, explanation_text
from planner.plan import Limits, Plan
from planner.price import price_of
from planner.search import no_slower, plan
from planner.sensitivity import Gain, gains
from planner.task import Task
from simulator.costs import OperationCosts
from simulator.errors import InputError
from simulator.hardware import HardwareProfile, load_hardware
from simulator.policy import Policy, Workload
from simulator.predict import predict

GIB = 2**30
WORKLOAD = Workload(
    sequence_length=1024, tokens_per_step=4096, micro_batch_rows=2, gradient_format="bf16", compiled=False
)
LIMITS = Limits(device_memory_bytes=18 * GIB, host_memory_bytes=40 * GIB)
# The 7B's edges and three of its layers: 1.8 B parameters, 30 GiB with everything on the device.
SEVEN = seven_billion()
MODEL = SEVEN.model_copy(
    update={
        "num_layers": 3,
        "kind_of_block": (SEVEN.kind_of_block[0], *SEVEN.kind_of_block[1:4], SEVEN.kind_of_block[-1]),
        "num_parameters": sum(SEVEN.block(block).num_parameters for block in (*range(4), SEVEN.head)),
    }
)


def planned_within(limits: Limits = LIMITS, hardware: HardwareProfile | None = None) -> Plan:
    return plan(MODEL, WORKLOAD, hardware or load_hardware("h200"), limits, with_baselines=False)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return planned_within()


@pytest.fixture(scope="module")
def explained(planned: Plan) -> Explanation:
    return explanation(planned)


@pytest.fixture(scope="module")
def bought(explained: Explanation) -> dict[str, Gain]:
    return {gain.resource: gain for gain in explained.gains}


def more(limits: Limits, tier: str) -> Limits:
    return limits.model_copy(update={f"{tier}_memory_bytes": limits.bytes_of(tier) + GIB})


@pytest.mark.parametrize("tier", ["device", "host"])
def test_one_more_gib_saves_what_a_plan_with_it_saves(planned: Plan, bought: dict[str, Gain], tier: str) -> None:
    richer = planned_within(more(LIMITS, tier))
    gain = bought[f"{tier} memory"]
    now = planned.prediction.step_seconds
    assert gain.step_seconds == min(richer.prediction.step_seconds, now)  # memory changes no price
    assert gain.repriced_seconds == now
    assert gain.saved_seconds == now - gain.step_seconds
    assert gain.saved_share == pytest.approx(gain.saved_seconds / now)
    assert gain.unit_share == GIB / LIMITS.bytes_of(tier)
    assert gain.bound_seconds <= gain.step_seconds


def test_faster_machines_are_written_out_and_planned_for(planned: Plan, bought: dict[str, Gain]) -> None:
    """The profile's figures, changed here by hand."""
    fields = load_hardware("h200").model_dump()
    for point in (*fields["matmul"], *fields["attention"]):
        for figure in point.values():
            if isinstance(figure, dict):
                figure["value"] *= 1.01
    fields["hbm_bytes_per_second"]["value"] *= 1.01
    richer = HardwareProfile.model_validate(fields)
    seconds = planned_within(hardware=richer).prediction.step_seconds
    repriced = predict(planned.model, WORKLOAD, planned.policy, richer).figures.step_seconds
    gain = bought["GPU compute"]
    assert gain.repriced_seconds == pytest.approx(repriced, rel=1e-12)
    assert gain.step_seconds == pytest.approx(min(seconds, repriced), rel=1e-12)
    assert gain.saved_per_percent == pytest.approx(gain.saved_share)


def test_nothing_is_worse_than_the_present_plan_priced_there(bought: dict[str, Gain]) -> None:
    assert set(bought) == {"device memory", "host memory", "link", "host DRAM", "GPU compute"}
    for gain in bought.values():
        assert gain.bound_seconds <= gain.step_seconds <= gain.repriced_seconds


def limited(case: Case, limits: Limits) -> Plan:
    return plan(case.model, case.workload, case.hardware, limits, case.costs, gap=1e-6, with_baselines=False)


@pytest.mark.parametrize("seed", [1])
def test_more_device_memory_buys_the_fastest_policy_that_then_fits(seed: int) -> None:
    """All policies of two layers: beside one more GiB they are tiny, so all of them fit the device."""
    case = eager_case(seed, 2)
    limits = tight_limits(Random(seed), case)
    gain = gains(limited(case, limits))[0]
    fastest = fastest_by_replay(case, more(limits, "device"), every_policy(case))
    assert gain.step_seconds == pytest.approx(fastest, rel=2e-3)


# Alternatives


Predicate = Callable[[Policy], bool]
KINDS: dict[str, Predicate] = {
    "all gradients and updates on the host": lambda p: set(p.optimizer_homes) == {"host"},
    "no resident layers: all stream": lambda p: set(p.weight_homes[1:-1]) == {"host"},
    "no streamed layers: all resident": lambda p: set(p.weight_homes) == {"device"},
    "everything on the device": lambda p: set(p.optimizer_homes) == {"device"},
    "one save level for all layers": lambda p: len(set(p.save_levels)) == 1,
}


def kind_of(words: str) -> str:
    return next((kind for kind in KINDS if words.startswith(kind)), "")


@pytest.mark.parametrize("seed", [1, 3])
def test_an_alternative_is_the_fastest_of_its_kind(seed: int) -> None:
    """All policies of two layers, replayed. These searches look for a price: within half a percent."""
    case = eager_case(seed, 2)
    limits = tight_limits(Random(seed), case)
    found = limited(case, limits)
    policies = list(every_policy(case))
    offered = {kind_of(item.kind): item for item in alternatives(found)} | {"": None}
    for kind, is_such in KINDS.items():
        if is_such(found.policy):
            assert kind not in offered
            continue
        fastest = fastest_by_replay(case, limits, filter(is_such, policies))
        item = offered[kind]
        assert item is not None
        if item.prediction is None:
            assert fastest == float("inf")
            continue
        assert item.policy is not None
        assert is_such(item.policy)
        assert item.prediction.step_seconds == pytest.approx(fastest, rel=5e-3)
        assert item.extra_seconds == pytest.approx(item.prediction.step_seconds - found.prediction.step_seconds)


def test_other_micro_batches_are_offered_also_where_they_are_pinned(explained: Explanation) -> None:
    (other,) = [item for item in explained.alternatives if "micro-batch size" in item.kind]
    assert other.policy is not None
    assert other.policy.micro_batch_rows != 2
    assert other.kind == f"another micro-batch size: {other.policy.micro_batch_rows} rows, not 2 as asked for"
    unpinned = WORKLOAD.model_copy(update={"micro_batch_rows": other.policy.micro_batch_rows})
    best = plan(MODEL, unpinned, load_hardware("h200"), LIMITS, with_baselines=False)
    assert other.prediction is not None
    assert other.prediction.step_seconds == pytest.approx(best.prediction.step_seconds, rel=5e-3)


# A known policy


def test_a_known_policy_wins_where_it_fits_and_is_faster(planned: Plan) -> None:
    rich = planned_within(LIMITS.model_copy(update={"device_memory_bytes": 60 * GIB}))
    assert no_slower(planned, [rich.policy]) == planned  # it takes more than there is
    poor = planned_within(LIMITS.model_copy(update={"device_memory_bytes": 12 * GIB}))
    assert no_slower(planned, [poor.policy]) == planned  # it is slower
    slow = planned.model_copy(
        update={"policy": poor.policy, "prediction": poor.prediction, "busy_seconds": poor.busy_seconds}
    )
    better = no_slower(slow, [planned.policy])
    assert (better.policy, better.prediction) == (planned.policy, planned.prediction)
    assert better.busy_seconds == planned.busy_seconds
    assert better.bound.gap == pytest.approx(1 - better.bound.step_seconds / better.prediction.step_seconds)
    assert better.plan_hash == better.hashed().plan_hash


# Text


def test_the_text_names_every_figure_with_its_unit(planned: Plan, explained: Explanation) -> None:
    text = explanation_text(planned, explained)
    for words in (
        "1 GiB of device memory",
        "1 GB/s of link each way",
        "1 % of GPU compute",
        "next best",
        "device peak",
    ):
        assert words in text
    assert f"what binds: {explained.bottleneck}" in text
    assert explained.full_tiers == ("device memory",)
    assert explained.lag_share is not None
    assert explained.lag_share > 0  # under 24 GiB the host decides
    assert f"take 25% longer than their price the step is {explained.lag_share:.2%} longer" in text
    for number in re.findall(r"(?<![\w.,])[-+]?\d+\.\d+(?!\d)(.{0,5})", text):
        assert re.match(r"\s?(s|ms|%|[KMGT]iB|GB/s)", number), number


def test_what_lives_where_adds_up_to_the_peaks(planned: Plan) -> None:
    held = held_bytes(planned)
    for tier, peak in (("device", planned.prediction.device_peak_bytes), ("host", planned.prediction.host_peak_bytes)):
        assert sum(row.get(tier, 0.0) for row in held.values()) == pytest.approx(peak, abs=1)
        assert min(row.get(tier, 0.0) for row in held.values()) >= 0
    state = 10 * sum(
        planned.model.block(block).num_elements
        for block, home in enumerate(planned.policy.optimizer_homes)
        if home in ("host", "streamed")
    )
    assert held["optimizer state"]["host"] == state


def test_on_a_cpu_there_is_one_memory_and_nothing_is_called_a_gpu_s() -> None:
    model = toy_model(3, layer_elements=128 * 2000, edge_elements=128 * 300)
    found = plan(model, Workload(sequence_length=128, tokens_per_step=512), load_hardware("cpu-2-core"))
    held = held_bytes(found)
    assert sum(row["memory"] for row in held.values()) == pytest.approx(found.prediction.host_peak_bytes, abs=1)
    assert {tier for row in held.values() for tier in row} == {"memory"}
    explained = explanation(found)
    assert explained.lag_share is None  # nothing is updated beside compute
    text = plan_table(found) + explanation_text(found, explained)
    for words in ("longer than their price", "HBM", "GPU", "device peak", "link", "device memory", "host memory"):
        assert words not in text
    for words in ("of its limit", "memory peak", "1 GiB of memory", "1 % of CPU compute"):
        assert words in text


def test_printed_rows_add_up_to_the_printed_peak(planned: Plan) -> None:
    lines = plan_table(planned).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("what lives where")) + 2
    last = next(number for number, line in enumerate(lines) if line.startswith("peak"))
    units = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
    for column, peak in ((0, planned.prediction.device_peak_bytes), (1, planned.prediction.host_peak_bytes)):
        right = [match.end() for match in re.finditer(r"device|host", lines[first - 1])][column]
        cells = [re.search(r"([\d.]+) (B|[KMG]iB)$", line[:right]) for line in lines[first:last]]
        total = sum(float(cell[1]) * units[cell[2]] for cell in cells if cell)
        assert total == pytest.approx(peak, abs=0.05 * GIB * len(cells))
    assert any(line.startswith("other") for line in lines[first:last])


# Price


def test_a_price_is_that_of_the_seconds_a_token_takes(planned: Plan) -> None:
    price = price_of(planned.hardware, 3.6)
    assert price is not None
    figures = planned.prediction
    by_hand = 3.6 / 3600 * figures.step_seconds / 4096
    assert price.per_token(figures) == pytest.approx(by_hand)
    assert price.per_million_tokens(figures) == pytest.approx(1e6 * by_hand)
    assert price.of(figures).endswith("at 3.6 per hour")
    assert price_of(planned.hardware) is None
    named = planned.hardware.model_copy(
        update={"price_per_hour": planned.hardware.launch_seconds.model_copy(update={"value": 2.0})}
    )
    assert price_of(named) == replace(price, per_hour=2.0)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="is not a price"):
            price_of(planned.hardware, wrong)


def test_tasks_refuse_what_makes_no_sense(planned: Plan) -> None:
    task = Task.of(planned)
    assert task.plan().policy == planned.policy
    with pytest.raises(InputError, match="not a multiple"):
        task.with_workload(tokens_per_step=1000)
    with pytest.raises(InputError, match="impossible"):
        task.with_rates(link=1e9)
    inline = replace(task, hardware=machine(inline=True), costs=None)
    assert isinstance(inline.costs, OperationCosts | None)
    limits = inline.with_memory(host_bytes=8 * GIB).limits
    assert (limits.device_memory_bytes, limits.host_memory_bytes) == (8 * GIB, 8 * GIB)
