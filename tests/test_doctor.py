"""What doctor finds, on this machine and on machines that lack something."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from analysis import commands, doctor
from analysis.doctor import Check
from executor import store
from simulator.units import GIB, format_bytes


def test_this_machine_has_what_it_needs() -> None:
    checks = doctor.check_machine()
    assert [check for check in checks if check.verdict == "blocker"] == []
    subjects = {check.subject: check.found for check in checks}
    expected = {"python", "torch", "transformers", "pulp", "highspy", "import names", "device", "host memory"}
    assert expected | {"pinned memory", "disk", "solver", "C++ compiler"} <= set(subjects)
    assert "loads and solves" in subjects["solver"]


def test_the_required_packages_are_those_of_the_project() -> None:
    required = doctor.required_packages()
    assert set(doctor.INDISPENSABLE) | {"pulp", "highspy", "pandas", "matplotlib"} == set(required)


def test_versions_are_compared_as_numbers() -> None:
    installed = doctor.check_packages({"torch": "2.9"})[0]
    assert installed.verdict == "ok"  # as text, 2.13 sorts before 2.9
    assert installed.found.startswith("2.")
    assert doctor.check_packages({"torch": "2.999"})[0] == Check(
        "torch", installed.found, "blocker", "install torch 2.999 or newer"
    )


def test_what_is_missing_blocks_only_if_nothing_trains_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    checks = {check.subject: check for check in doctor.check_packages({"torch": "2.9", "highspy": "1.10"})}
    assert checks["torch"] == Check("torch", "missing", "blocker", "install torch 2.9 or newer")
    assert checks["highspy"].verdict == "warning"


def test_an_old_python_blocks() -> None:
    assert doctor.check_python((3, 10, 12)).verdict == "blocker"
    assert doctor.check_python((3, 11, 0)).verdict == "ok"


def test_torch_that_does_not_import_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` fail
    check = doctor.check_device()
    assert check.verdict == "blocker"
    assert "torch cannot be imported" in check.found


def test_without_a_solver_there_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    check = doctor.check_solver()
    assert check.verdict == "warning"
    assert "greedy" in check.advice


def test_the_solver_check_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    doctor.check_solver()
    assert capfd.readouterr().out == ""


def test_shadowed_names_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "shadowed_packages", lambda: ["the import name 'planner' leads elsewhere"])
    check = doctor.check_import_names()
    assert (check.verdict, check.found) == ("blocker", "the import name 'planner' leads elsewhere")


@pytest.mark.parametrize(("free", "verdict"), [(11 * GIB, "ok"), (9 * GIB, "warning")])
def test_a_full_disk_is_a_warning(free: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_disk_bytes", lambda folder: free)
    assert doctor.check_disk(tmp_path).verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(GIB, "ok"), (GIB // 4, "blocker")])
def test_hardly_any_host_memory_blocks(free: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose limit is nearly used up: torch cannot even be imported."""
    monkeypatch.setattr(doctor, "host_memory_available_bytes", lambda: free)
    check = doctor.check_host_memory()
    assert check.verdict == verdict
    assert format_bytes(free) in check.found


def test_the_limit_on_pinned_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (64 * 2**20, 64 * 2**20))
    assert doctor.check_pinned_memory()[1:3] == ("64.0 MiB by `ulimit -l`", "ok")


@pytest.mark.parametrize(("code", "verdict"), [(0, "ok"), (2, "blocker")])
def test_a_driver_that_refuses_to_pin_blocks(code: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def register(address: int, num_bytes: int) -> int:
        if not code:
            pinned.append(address)
        return code

    def unregister(address: int) -> int:
        pinned.remove(address)
        return 0

    pinning = store.Pinning(register, unregister, lambda code: "out of memory")
    monkeypatch.setattr(store, "cuda_pinning", lambda: pinning)
    check = doctor.check_pinned_memory()
    assert check.verdict == verdict
    assert ("the driver refuses to pin 64.0 MiB: out of memory" in check.found) == bool(code)
    assert not pinned


def test_a_gpu_that_does_not_compute_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.ones", refuse)
    check = doctor.check_device()
    assert check.verdict == "blocker"
    assert check.found.endswith("no kernel image is available for execution on the device")


@pytest.mark.gpu
def test_a_gpu_is_told_with_memory_and_driver_and_pins() -> None:
    check = doctor.check_device()
    assert check.verdict == "ok"
    assert all(words in check.found for words in ("free", "driver", "CUDA"))
    assert doctor.check_pinned_memory().verdict == "ok"


def test_a_driver_without_a_torch_for_it_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "580.95.05")
    check = doctor.check_device()
    assert (check.verdict, "580.95.05" in check.found) == ("warning", True)


def test_a_folder_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert doctor.check_disk(Path.cwd()).verdict == "warning"


def compiler(folder: Path, script: str) -> Path:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_compiler_counts_only_if_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "echo 'fatal error: omp.h: not found' >&2; exit 1")))
    check = doctor.check_compiler()
    assert check.verdict == "warning"
    assert check.found.endswith("cxx fails: fatal error: omp.h: not found")
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "exit 0")))
    assert doctor.check_compiler().verdict == "ok"


def test_without_a_compiler_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.check_compiler()[1:3] == ("none", "warning")


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_report_shows_text_as_it_is_and_counts(
    with_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    doctor.print_checks(
        [Check("one", "at [bold]x[/bold]"), Check("two", "missing", "blocker", "install it")], width=100
    )
    lines = capsys.readouterr().out.splitlines()
    assert any("at [bold]x[/bold]" in line and "ok" in line for line in lines)
    assert any("two" in line and "blocker" in line and "install it" in line for line in lines)
    assert lines[-1] == "1 blockers, 0 warnings"


@pytest.mark.parametrize(("verdict", "exit_code"), [("ok", 0), ("warning", 0), ("blocker", 1)])
def test_only_a_blocker_makes_doctor_fail(verdict: str, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_machine", lambda: [Check("x", "y"), Check("z", "y", verdict)])
    assert commands.doctor(Namespace()) == exit_code


def test_from_the_front_door() -> None:
    line = [sys.executable, "-m", "analysis.cli", "doctor"]
    run = subprocess.run(line, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1].startswith("0 blockers")
