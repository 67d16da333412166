"""Hardware profiles: what is refused, rates between the measured points, the catalogue, checks against a machine."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hardware_cases import toy_profile

from simulator.datasheet import H200_DERATING, Datasheet
from simulator.errors import InputError
from simulator.figure import ORIGINS
from simulator.hardware import CATALOGUE, HardwareProfile, catalogue_names, load_hardware
from simulator.hardware_check import check_capacity, warn_if_rates_differ
from simulator.hardware_table import describe
from simulator.units import GIB, MIB

TOY = toy_profile()


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """The toy profile's fields with one of them replaced."""
    fields = TOY.model_dump(mode="json")
    place: Any = fields
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return fields


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    TOY.save(tmp_path / "toy.json")
    assert load_hardware(tmp_path / "toy.json") == TOY


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("hbm_bytes_per_second", "value"), 0, "hbm_bytes_per_second: 0 bytes/s is impossible"),
        (("hbm_bytes_per_second", "value"), -4.2e12, "hbm_bytes_per_second: -4.2e+12 bytes/s is impossible"),
        (("hbm_bytes_per_second", "value"), 4260, "hbm_bytes_per_second: 4260 bytes/s is impossible"),  # GB/s, not B/s
        (("matmul", 1, "flops_per_second", "value"), 700, "matmul.1.flops_per_second: 700 FLOP/s is impossible"),
        (("link", "points", 0, "bytes_per_second", "value"), 0, "link.points.0.bytes_per_second: 0 bytes/s"),
        (("launch_seconds", "value"), 4.0, "launch_seconds: 4 s is impossible"),  # written in µs
        (("device", "memory_bytes"), 80, "device.memory_bytes: 80 bytes is impossible"),
        (("host", "num_cores"), 0, "host.num_cores: Input should be greater than 0"),
        (("disk", "free_bytes"), -1, "disk.free_bytes: Input should be greater than or equal to 0"),
        (("disk", "read_bytes_per_second", "value"), -1e9, "disk.read_bytes_per_second: -1e+09 bytes/s is impossible"),
        (("hbm_bytes_per_second", "source"), "a friend", "hbm_bytes_per_second.source: 'a friend' must start with"),
        (("hbm_bytes_per_second", "source"), "measured: ", "hbm_bytes_per_second.source: 'measured: ' must start with"),
        (("bandwidth",), 1, "bandwidth: unknown key"),
        (("link", "points"), [], "link.points: has too few entries, it needs 2"),
        (("link", "duplex", "h2d", "value"), 21e9, "link.duplex.h2d: is more than the direction carries alone"),
        (("link", "duplex_host_busy", "d2h", "value"), 17e9, "link.duplex_host_busy.d2h: is more than link.duplex.d2h"),
        (("link", "points", 0, "num_bytes"), 4 * MIB, "link.points: more than one point for ('h2d', 4194304)"),
        (("matmul", 0, "tokens"), 100, "matmul: more than one point for ('bf16', 100)"),
        (("host_optimizer_bytes_per_second", "value"), 101e9, "host_optimizer_bytes_per_second: is more than"),
        (("context_bytes", "value"), 25 * GIB, "context_bytes: leaves nothing of device.memory_bytes"),
        (("host", "pinned_limit_bytes"), 97 * GIB, "host.pinned_limit_bytes: is more than host.memory_bytes"),
        (("device", "kind"), "cpu", "execution: 'streams' is impossible on a 'cpu' device"),
        (("execution",), "inline", "execution: 'inline' is impossible on a 'cuda' device"),
        (("device", "memory_bytes"), 10**400, "device.memory_bytes: a number of so many digits is impossible"),
        (("link", "points", 0, "num_bytes"), 10**400, "link.points.0.num_bytes: Input should be less than"),
        (("matmul", 0, "tokens"), 10**400, "matmul.0.tokens: Input should be less than"),
        (("attention", 0, "sequence_length"), 10**400, "attention.0.sequence_length: Input should be less than"),
    ],
)
def test_impossible_figures_are_refused_by_key(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, sentence: str
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(changed(*path, value=value)), encoding="utf-8")
    with pytest.raises(InputError) as refusal:
        load_hardware(file)
    assert str(refusal.value).startswith(f"{file}: ")
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "null", '"fast"', "[]", "{}"])
def test_no_figure_of_a_profile_may_be_nonsense(tmp_path: Path, value: str) -> None:
    fields = TOY.model_dump(mode="json")
    for path in figure_paths(fields):
        if value == "0" and path[-2] == "context_bytes":
            continue  # a CPU machine's
        file = tmp_path / "odd.json"
        text = json.dumps(changed(*path, value="HERE"))
        file.write_text(text.replace('"HERE"', value), encoding="utf-8")
        with pytest.raises(InputError) as refusal:
            load_hardware(file)
        assert ".".join(str(key) for key in path[:-1]) in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_no_figure_that_a_machine_cannot_be_known_without_may_be_missing(tmp_path: Path) -> None:
    fields = TOY.model_dump(mode="json")
    for path in figure_paths(fields):
        key = path[:-1]  # the figure with its source
        if key[0] in ("disk", "sustained_factor", "price_per_hour") or "pageable" in key:
            continue
        left = changed(*key, value="HERE")
        place: Any = left
        for step in key[:-1]:
            place = place[step]
        del place[key[-1]]
        (tmp_path / "short.json").write_text(json.dumps(left), encoding="utf-8")
        with pytest.raises(InputError, match=re.escape(".".join(map(str, key))) + ": is missing"):
            load_hardware(tmp_path / "short.json")


def figure_paths(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of the values of all figures in a profile's JSON."""
    if isinstance(node, dict) and set(node) == {"value", "source"}:
        yield (*path, "value")
    elif isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from figure_paths(child, (*path, key))


def test_a_cpu_machine_has_one_memory() -> None:
    fields = changed("device", "kind", value="cpu") | {"execution": "inline"}
    with pytest.raises(ValueError, match="shared_memory: false is impossible on a 'cpu' device"):
        HardwareProfile.model_validate(fields)
    box = HardwareProfile.model_validate(fields | {"shared_memory": True})
    assert box.total_memory_bytes == 96 * GIB
    assert TOY.total_memory_bytes == 120 * GIB


def test_matmul_rate_is_linear_in_the_logarithm_of_tokens() -> None:
    # 1,000 tokens lie half way between 100 and 10,000 in logarithm.
    assert TOY.matmul_flops_per_second("bf16", 1000) == pytest.approx(200e12)
    assert TOY.matmul_flops_per_second("bf16", 100) == 100e12
    assert TOY.matmul_flops_per_second("bf16", 1_000_000) == 300e12
    assert TOY.matmul_flops_per_second("fp32", 7) == pytest.approx(2 * 7 * 1e12 / 4)
    # 10 tokens: reading 2 bytes a weight at 1 TB/s allows 2 x 10 FLOPs a weight, 10 TFLOP/s.
    assert TOY.matmul_flops_per_second("bf16", 10) == pytest.approx(10e12)


def test_attention_takes_the_fastest_backend_or_the_one_that_is_named() -> None:
    assert TOY.attention_flops_per_second("bf16", 1024, "forward") == 200e12
    assert TOY.attention_flops_per_second("bf16", 4096, "forward") == 600e12
    assert TOY.attention_flops_per_second("bf16", 2048, "forward", backend="flash") == pytest.approx(300e12)
    assert TOY.attention_flops_per_second("bf16", 2048, "backward") == pytest.approx(187.5e12)
    assert TOY.attention_flops_per_second("bf16", 64, "backward", backend="cudnn") == 75e12


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda p: p.matmul_flops_per_second("fp64", 8), "has no matmul figures in fp64, only in bf16, fp32"),
        (
            lambda p: p.attention_flops_per_second("fp32", 8, "forward"),
            "has no attention figures in fp32, only in bf16",
        ),
        (
            lambda p: p.attention_flops_per_second("bf16", 8, "forward", backend="math"),
            "no attention backend 'math', only cudnn, flash",
        ),
    ],
)
def test_unknown_precisions_and_backends_are_refused(ask: Callable[[HardwareProfile], float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ask(TOY)


def test_copies_take_latency_plus_bytes_over_rate() -> None:
    small, large = MIB / 10e9, 4 * MIB / 20e9
    assert TOY.link_seconds("h2d", MIB) == pytest.approx(small)
    assert TOY.link_seconds("h2d", 2.5 * MIB) == pytest.approx((small + large) / 2)
    assert TOY.link_seconds("d2h", 40 * MIB) == pytest.approx(10 * large)
    # The line through both points meets zero bytes at small - (large - small) / 3: the latency of any copy.
    latency = small - (large - small) / 3
    assert TOY.link_seconds("h2d", 1) == pytest.approx(latency, rel=1e-4)
    assert TOY.link_bytes_per_second("h2d", MIB // 2) == pytest.approx(MIB / 2 / (latency + (small - latency) / 2))
    assert TOY.link_bytes_per_second("h2d", 64 * MIB, duplex=True) == pytest.approx(16e9)
    assert TOY.link_bytes_per_second("h2d", MIB, host_busy=True) == pytest.approx(5e9)


def test_the_identity_covers_capacities_and_versions_and_no_rate() -> None:
    def identity(*path: str | int, value: Any) -> str:
        return HardwareProfile.model_validate(changed(*path, value=value)).identity_hash

    assert identity("hbm_bytes_per_second", "value", value=2e12) == TOY.identity_hash
    assert identity("disk", "free_bytes", value=GIB) == TOY.identity_hash
    assert identity("name", value="another label") == TOY.identity_hash
    others = {
        identity("device", "memory_bytes", value=23 * GIB),
        identity("host", "memory_bytes", value=95 * GIB),
        identity("versions", "torch", value="2.14"),
        identity("device", "name", value="Toy 2"),
    }
    assert len(others | {TOY.identity_hash}) == 5


@pytest.mark.parametrize("name", catalogue_names())
def test_every_figure_of_the_catalogue_says_where_it_comes_from(name: str) -> None:
    profile = load_hardware(name)
    assert profile.name == name
    figures = list(profile.figures())
    assert len({figure.label for figure in figures}) == len(figures)
    dumped = profile.model_dump_json()
    assert dumped.count('"source":') == len(figures)  # figures() leaves none out
    for _, _, figure in figures:
        assert figure.source.split(": ")[0] in ORIGINS
        assert math.isfinite(figure.value)


def test_the_catalogue_has_the_measured_machines_and_rates_of_the_right_size() -> None:
    assert {"h200", "cpu-2-core"} <= set(catalogue_names())
    h200 = load_hardware("h200")
    assert h200.device.memory_bytes / GIB == pytest.approx(139.8, abs=0.01)
    assert h200.host.memory_bytes == 120 * GIB
    assert h200.matmul_flops_per_second("bf16", 98304) == 707.5e12
    assert h200.link_bytes_per_second("h2d", GIB) == pytest.approx(55.5e9)
    assert h200.link.duplex_host_busy.d2h.value == 36.4e9
    box = load_hardware("cpu-2-core")
    assert (box.execution, box.shared_memory, box.host.num_cores) == ("inline", True, 2)


def test_datasheets_are_derated_by_one_set_of_factors() -> None:
    sheet = Datasheet.load(CATALOGUE / "datasheets" / "rtx-4090.json")
    profile = load_hardware("rtx-4090")
    assert profile.matmul_flops_per_second("bf16", 4096) == pytest.approx(165.2e12 * H200_DERATING.matmul)
    assert profile.device.memory_bytes < sheet.device.memory_bytes
    # Two channels of DDR5 hold less than the link, both ways, and an optimizer want: they share.
    dram = profile.host_dram_bytes_per_second.value
    assert profile.link.duplex.h2d.value == pytest.approx(min(32e9 * H200_DERATING.link_duplex, dram / 2))
    assert profile.link.duplex_host_busy.h2d.value == pytest.approx(dram / 3)
    assert all(figure.source.partition(": ")[0] in ("datasheet", "derived") for _, _, figure in profile.figures())


def test_the_derating_factors_are_the_h200s_measured_over_nominal() -> None:
    h200 = load_hardware("h200")
    assert h200.matmul_flops_per_second("bf16", 98304) / 989.4e12 == pytest.approx(H200_DERATING.matmul, abs=1e-3)
    assert h200.hbm_bytes_per_second.value / 4.8e12 == pytest.approx(H200_DERATING.hbm, abs=1e-3)
    assert h200.link.duplex.h2d.value / 64e9 == pytest.approx(H200_DERATING.link_duplex, abs=1e-3)
    assert h200.host_dram_bytes_per_second.value / 200e9 == pytest.approx(H200_DERATING.host_dram, abs=1e-3)
    for link in H200_DERATING.link:
        measured = h200.link_bytes_per_second("h2d", link.num_bytes)
        assert measured / 64e9 == pytest.approx(link.share, abs=2e-3)
    for share in H200_DERATING.attention:
        for direction, factor in (("forward", share.forward), ("backward", share.backward)):
            rate = h200.attention_flops_per_second("bf16", share.sequence_length, direction, backend="flash")
            assert rate / 989.4e12 == pytest.approx(factor, abs=1e-3)


def test_an_unknown_name_lists_the_catalogue_and_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'H20O' is neither a file nor one of .*cpu-2-core.*did you mean 'h200'"):
        load_hardware("H20O")
    with pytest.raises(InputError, match="did you mean 'h100-sxm-80gb'"):  # and not h200, one letter away
        load_hardware("h100")


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    TOY.save(tmp_path / "hardware.json")
    with pytest.raises(InputError, match=r"there is no file .*did you mean '.*/hardware\.json'"):
        load_hardware(tmp_path / "hardwear.json")


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"policy": 1}', encoding="utf-8")
    with pytest.raises(InputError, match=r"plan\.json: policy: .*; name: is missing; .*right file"):
        load_hardware(tmp_path / "plan.json")


def test_training_is_refused_where_a_capacity_is_below_the_plans() -> None:
    device = TOY.device.model_copy(update={"memory_bytes": 16 * GIB})
    host = TOY.host.model_copy(update={"memory_bytes": 64 * GIB})
    with pytest.raises(InputError) as refusal:
        check_capacity(TOY, device, host)
    assert "24.0 GiB of device memory and this machine has 16.0 GiB, 8.0 GiB less" in str(refusal.value)
    assert "96.0 GiB of host memory and this machine has 64.0 GiB, 32.0 GiB less" in str(refusal.value)
    # The plan was held to less than its machine has: that is all it needs.
    check_capacity(TOY, device, host, device_limit_bytes=16 * GIB, host_limit_bytes=64 * GIB)
    check_capacity(TOY, TOY.device, TOY.host)
    # A kernel that takes a few MiB more does not stop a run; half a GiB does.
    check_capacity(TOY, TOY.device, TOY.host.model_copy(update={"memory_bytes": 96 * GIB - 64 * MIB}))
    with pytest.raises(InputError, match="host memory"):
        check_capacity(TOY, TOY.device, TOY.host.model_copy(update={"memory_bytes": 96 * GIB - 512 * MIB}))


def test_a_gpu_plan_is_refused_on_a_machine_without_one() -> None:
    box = load_hardware("cpu-2-core")
    with pytest.raises(InputError, match="computes on a 'cuda' device and this machine has 'cpu' only"):
        check_capacity(TOY, box.device, box.host, device_limit_bytes=GIB, host_limit_bytes=GIB)


def test_rates_that_differ_are_told_largest_first() -> None:
    assert warn_if_rates_differ(TOY, TOY) == []
    slower = HardwareProfile.model_validate(
        changed("hbm_bytes_per_second", "value", value=0.96e12)
        | {"host_dram_bytes_per_second": {"value": 90e9, "source": "derived: for a test"}}
    )
    assert warn_if_rates_differ(TOY, slower) == [
        "host DRAM: 90 GB/s on this machine, 100 GB/s in the plan's profile (-10%)"
    ]
    told = warn_if_rates_differ(TOY, slower, tolerance=0.01)
    assert [sentence.partition(":")[0] for sentence in told] == ["host DRAM", "device memory"]


def test_rates_measured_at_other_sizes_are_compared_by_interpolation() -> None:
    fields = TOY.model_dump(mode="json")
    fields["matmul"] = [
        {"precision": "bf16", "tokens": 1000, "flops_per_second": fields["matmul"][0]["flops_per_second"]}
    ]
    other = HardwareProfile.model_validate(fields)
    # 300 TFLOP/s at 1,000 tokens hold at 10,000; at 100 tokens reading weights allows 100.
    assert warn_if_rates_differ(TOY, other) == []


def test_the_table_shows_every_figure_with_its_unit_and_source() -> None:
    text = describe(load_hardware("h200"))
    lines = text.splitlines()
    assert "NVIDIA H200, 139.8 GiB, 132 multiprocessors" in text
    (row,) = [line for line in lines if line.startswith("  h2d, both at once, host optimizer running")]
    assert "36.4 GB/s" in row
    number = row.split()[-1]
    (source,) = [line for line in lines if line.startswith(number)]
    assert "measured: 2026-11-29 on one NVIDIA H200 host" in source
    assert len([line for line in lines if line.startswith("[")]) == len(
        {figure.source for _, _, figure in load_hardware("h200").figures()}
    )
