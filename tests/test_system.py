"""Facts about the machine, against pretended /proc and /sys trees and against what the kernel says."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pydantic
import pytest

from simulator.errors import ProgramError
from simulator.native_output import silent_native_stdout
from simulator.nearest import nearest_name, nearest_path
from simulator.system import (
    HostPeak,
    free_disk_bytes,
    host_memory_available_bytes,
    host_memory_limit_bytes,
    package_versions,
    process_tree_bytes,
)
from simulator.units import GIB, MIB

PHYSICAL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2 = "40 31 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
HYBRID = "36 31 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
OTHER = "37 31 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def machine(root: Path, *, groups: str, mounts: list[str], files: dict[str, object]) -> Path:
    """A root folder whose process is in `groups`, with files below sys/fs/cgroup and 8 MiB available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text("\n".join(["22 1 8:1 / / rw - ext4 /dev/sda rw", *mounts]) + "\n")
    (root / "proc/meminfo").write_text("MemTotal: 99999 kB\nMemAvailableX: 1 kB\nMemAvailable:    8192 kB\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "limit"),
    [
        ("0::/job/step\n", [V2], {"job/step/memory.max": 3 * MIB}, 3 * MIB),
        ("0::/job/step\n", [V2], {"job/step/memory.max": "max", "job/memory.max": 2 * MIB}, 2 * MIB),
        ("0::/job/step\n", [V2], {"job/step/memory.max": 5 * MIB, "job/memory.max": 2 * MIB}, 2 * MIB),
        ("0::/job\n", [V2], {"job/memory.max": "max", "other/memory.max": 1 * MIB}, PHYSICAL_BYTES),
        ("0::/\n", [V2], {"memory.max": 4 * MIB}, 4 * MIB),  # a container that sees itself as the root
        ("5:cpu,memory:/a\n0::/\n", [OTHER, V1, HYBRID], {"memory/a/memory.limit_in_bytes": 6 * MIB}, 6 * MIB),
        ("5:memory:/a\n", [V1], {"memory/a/memory.limit_in_bytes": 2**63 - 4096}, PHYSICAL_BYTES),
        # The mount shows a part of the tree, and the group's path still names all of it.
        ("5:memory:/docker/x\n", [V1.replace(" / /sys", " /docker/x /sys")], {"memory/memory.limit_in_bytes": 7}, 7),
        ("5:memory:/docker/x\n", [V1], {"memory/memory.limit_in_bytes": 7 * MIB}, 7 * MIB),
        ("0::/../../job\n", [V2], {"memory.max": 9 * MIB}, 9 * MIB),
        ("", [], {}, PHYSICAL_BYTES),
    ],
)
def test_the_tightest_cgroup_limit_counts(
    tmp_path: Path, groups: str, mounts: list[str], files: dict[str, object], limit: int
) -> None:
    assert host_memory_limit_bytes(machine(tmp_path, groups=groups, mounts=mounts, files=files)) == limit


def test_available_memory_counts_the_page_cache_as_free(tmp_path: Path) -> None:
    files = {
        "job/memory.max": 6 * MIB,
        "job/memory.current": 5 * MIB,
        "job/memory.stat": f"anon {2 * MIB}\nactive_file {MIB}\ninactive_file {MIB}\nfile {2 * MIB}",
    }
    root = machine(tmp_path, groups="0::/job\n", mounts=[V2], files=files)
    assert host_memory_available_bytes(root) == 3 * MIB
    (root / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert host_memory_available_bytes(root) == 8 * MIB


def test_available_memory_in_cgroup_v1_counts_the_groups_below(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": 6 * MIB,
        "memory/a/memory.usage_in_bytes": 6 * MIB,
        "memory/a/memory.stat": f"active_file 0\ninactive_file 0\ntotal_active_file 0\ntotal_inactive_file {MIB}",
    }
    assert host_memory_available_bytes(machine(tmp_path, groups="3:memory:/a\n", mounts=[V1], files=files)) == MIB


def test_this_machine_has_memory() -> None:
    assert GIB / 4 < host_memory_available_bytes() < host_memory_limit_bytes() <= PHYSICAL_BYTES


def test_the_peak_counts_memory_that_is_gone_again() -> None:
    with HostPeak(interval_seconds=60) as peak:
        before = peak.peak_bytes
        block = bytearray(b"\1") * (64 * MIB)
        peak.sample()
        del block
        after = peak.sample()
    assert peak.peak_bytes - before > 60 * MIB
    assert peak.peak_bytes - after > 60 * MIB


def test_the_peak_is_sampled_without_being_asked_and_counts_other_processes() -> None:
    program = "block = bytearray(b'1') * (64 << 20); print('ready', flush=True); input()"
    with HostPeak(interval_seconds=0.01) as peak:
        before = peak.peak_bytes
        # A grandchild, as a compile worker's own workers are.
        shell = subprocess.Popen(
            ["sh", "-c", f'{sys.executable} -c "{program}"; true'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        alone = process_tree_bytes(shell.pid)
        deadline = time.monotonic() + 30
        while peak.peak_bytes - before < 60 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        shell.communicate("\n", timeout=30)
    assert alone > 60 * MIB
    assert peak.peak_bytes - before > 60 * MIB
    assert process_tree_bytes(shell.pid) == 0, "a process that ended holds nothing"


def test_free_disk_at_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    statistics = os.statvfs(tmp_path)
    expected = statistics.f_bavail * statistics.f_frsize
    assert free_disk_bytes(tmp_path / "runs" / "first") == pytest.approx(expected, abs=256 * MIB)


def test_versions_are_those_that_are_imported() -> None:
    versions = package_versions()
    assert versions["python"] == sys.version.split()[0]
    assert (versions["numpy"], versions["pydantic"]) == (numpy.__version__, pydantic.VERSION)
    assert {"torch", "transformers", "highspy", "pulp"} <= set(versions)


def test_what_native_code_prints_is_dropped_inside_the_block_only() -> None:
    program = """
import ctypes
from simulator.errors import ProgramError
from simulator.native_output import silent_native_stdout
libc = ctypes.CDLL(None)
print("before")
libc.puts(b"native before")
with silent_native_stdout():
    libc.puts(b"native inside")  # into a pipe C buffers it, and would print it later
    print("inside")
libc.puts(b"native after")
libc.fflush(None)
print("after")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n") == ["before", "native before", "native after", "after", ""]


def test_standard_output_comes_back_after_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    def fail_inside() -> None:
        with silent_native_stdout():
            os.write(1, b"dropped")
            raise ProgramError

    with pytest.raises(ProgramError):
        fail_inside()
    os.write(1, b"kept")
    assert capfd.readouterr().out == "kept"


def test_the_nearest_name_and_path(tmp_path: Path) -> None:
    assert nearest_name("learnin_rate", ["seed", "learning_rate"]) == "learning_rate"
    assert nearest_name("zzz", ["seed", "learning_rate"]) is None
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert nearest_path(tmp_path / "model" / "tiny") == tmp_path / "models" / "tiny"
    assert nearest_path(tmp_path / "models" / "tinny") == tmp_path / "models" / "tiny"
    assert nearest_path(tmp_path / "model" / "large") is None
    assert nearest_path(tmp_path / "zzz") is None
