"""The probe: small, on whatever machine runs the tests; and the arithmetic and fallbacks of its measurements."""

import errno
import math
import os
from pathlib import Path

import pytest
import torch

import simulator.probe_apart
from simulator.bench.bench import CPU_SCALE, CUDA_SCALE, QUICK_SCALE, Scale
from simulator.bench.disk import measure_disk
from simulator.bench.timing import Lane, concurrent_rates, copy_lane, steps_per_second
from simulator.errors import ConveyorError, InputError
from simulator.hardware import HardwareProfile, load_hardware
from simulator.hardware_table import describe
from simulator.probe import current_device, current_host, probe
from simulator.probe_apart import probe_apart
from simulator.system import host_memory_limit_bytes, process_tree_bytes
from simulator.units import MIB


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[HardwareProfile, Path, list[str]]:
    lines: list[str] = []
    folder = tmp_path_factory.mktemp("probe")
    return probe(folder / "hardware.json", quick=True, report=lines.append), folder, lines


def test_a_probe_gives_positive_finite_figures(probed: tuple[HardwareProfile, Path, list[str]]) -> None:
    profile, _, _ = probed
    figures = list(profile.figures())
    for label, _, figure in figures:
        assert math.isfinite(figure.value), label
        assert figure.value > 0 or label == "device memory before the first allocation", label
        assert figure.source.startswith("measured: "), label
        assert f"torch {torch.__version__}" in figure.source, label
    assert {point.precision for point in profile.matmul} == {"bf16", "fp32", "fp64"}
    assert {point.direction for point in profile.link.points} == {"h2d", "d2h"}
    assert profile.disk.read_bytes_per_second is not None
    assert profile.disk.write_bytes_per_second is not None


def test_a_probe_describes_the_machine_it_ran_on(probed: tuple[HardwareProfile, Path, list[str]]) -> None:
    profile, _, _ = probed
    cuda = torch.cuda.is_available()
    assert profile.device == current_device()
    assert profile.host == current_host()
    assert profile.host.memory_bytes == host_memory_limit_bytes()
    assert profile.execution == ("streams" if cuda else "inline")
    assert profile.shared_memory is not cuda
    assert profile.versions["torch"] == str(torch.__version__)
    if not cuda:
        assert profile.device.memory_bytes == profile.host.memory_bytes
        assert profile.name == f"cpu-{profile.host.num_cores}-core"


def test_a_probe_writes_a_profile_that_loads_and_prints(probed: tuple[HardwareProfile, Path, list[str]]) -> None:
    profile, folder, lines = probed
    assert load_hardware(folder / "hardware.json") == profile
    assert [path.name for path in folder.iterdir()] == ["hardware.json"]  # the disk's test file is gone
    assert profile.device.name in describe(profile)
    assert any(line.startswith("matmul bf16, 64 tokens: ") for line in lines)


def test_a_probe_cannot_write_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing: cannot be written \(No such file or directory\)"):
        probe(tmp_path / "missing" / "hardware.json", quick=True)


def test_disks_without_direct_io_are_measured_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_direct)
    rates = measure_disk(tmp_path, num_bytes=16 * MIB, seconds=1.0)
    assert not rates.direct
    assert rates.read > 0
    assert rates.write > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scale", [CPU_SCALE, CUDA_SCALE, QUICK_SCALE])
def test_copies_ascend_by_powers_of_two(scale: Scale) -> None:
    # Smaller copies walk through the largest one's buffers, and torch rounds pinned memory up to powers of two.
    assert list(scale.copy_bytes) == sorted(set(scale.copy_bytes))
    assert all(num_bytes & (num_bytes - 1) == 0 for num_bytes in (*scale.copy_bytes, scale.stream_bytes))


def test_steps_count_from_the_first_that_all_have_finished_to_the_first_that_stops() -> None:
    stamps = [1.0, 2.0, 3.0, 4.0, 4.5]
    assert steps_per_second(stamps, 2.0, 4.2) == pytest.approx(1.0)  # ends at 2, 3 and 4: two steps in 2 s
    assert steps_per_second(stamps, 3.0, 4.5) == pytest.approx(2 / 1.5)
    assert steps_per_second(stamps, 4.2, 4.4) == pytest.approx(4 / 3.5)  # none inside: all of them


def test_lanes_run_at_once_and_move_what_they_say() -> None:
    source = torch.arange(64.0)
    destinations = [torch.zeros(64), torch.zeros(64)]
    lanes = {str(i): copy_lane(destination, source) for i, destination in enumerate(destinations)}
    assert [lane.num_bytes for lane in lanes.values()] == [256, 256]
    rates = concurrent_rates(lanes, seconds=0.01)
    assert set(rates) == {"0", "1"}
    assert min(rates.values()) > 0
    assert all(torch.equal(destination, source) for destination in destinations)


def test_a_lane_that_fails_ends_the_measurement_with_its_error() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        concurrent_rates({"good": Lane(lambda: None, 1), "bad": Lane(fail, 1)}, seconds=0.01)


@pytest.mark.gpu
def test_a_probe_of_a_gpu_knows_its_context_backends_and_pageable_link(
    probed: tuple[HardwareProfile, Path, list[str]],
) -> None:
    profile, _, lines = probed
    assert profile.device.kind == "cuda"
    assert profile.context_bytes.value > 100 * MIB
    assert {point.backend for point in profile.attention if point.precision == "bf16"} >= {"flash", "efficient"}
    assert profile.link.pageable is not None
    assert any("refused" in line for line in lines)  # flash and cuDNN take no fp32


def test_a_probe_apart_says_the_same_and_leaves_this_process_as_small_as_it_was(tmp_path: Path) -> None:
    before = process_tree_bytes()
    profile = probe_apart(tmp_path / "hardware.json", quick=True)
    assert process_tree_bytes() - before < 16 * MIB
    assert profile == load_hardware(tmp_path / "hardware.json")
    assert profile.device == current_device()
    assert profile.host == current_host()


def test_a_probe_apart_raises_what_the_probe_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^probe: .*no/such"):
        probe_apart(tmp_path / "no/such" / "hardware.json", quick=True)


def test_a_probe_apart_that_dies_is_a_failure_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.probe_apart, "_PROBE", "import os, sys; os.kill(os.getpid(), 9)")
    with pytest.raises(ConveyorError, match="probe: its process ended with -9"):
        probe_apart(tmp_path / "hardware.json")


def test_a_probe_apart_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.probe_apart, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(simulator.probe_apart, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(ConveyorError, match="probe: not done after"):
        probe_apart(tmp_path / "hardware.json")
