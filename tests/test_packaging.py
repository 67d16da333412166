"""What `make` sets up and what an installation contains."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("simulator", "planner", "executor", "analysis")


def pins(python_version: str) -> dict[str, str]:
    """Package -> version of constraints.txt, as a given Python reads it."""
    pinned: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python_version}):
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            assert requirement.name not in pinned, f"{requirement.name} has two versions"
            pinned[canonicalize_name(requirement.name)] = specifier.version
    return pinned


@pytest.mark.parametrize("python_version", ["3.11", "3.12"])
def test_every_dependency_has_a_tested_version_that_the_project_accepts(python_version: str) -> None:
    pinned = pins(python_version)
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_the_solver_interface_is_tested_in_both_generations() -> None:
    assert (pins("3.11")["pulp"], pins("3.12")["pulp"]) == ("3.3.2", "4.2.0")
    assert pins("3.11")["torch"] == pins("3.12")["torch"] == "2.13.0"


def test_a_wheel_holds_every_module_and_the_data_that_code_reads(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # The optimizer's kernels are compiled where they run, so their sources ship too.
    (source / "executor/kernels").mkdir(exist_ok=True)
    (source / "executor/kernels/probe.cpp").write_text("")

    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
        entry_points = archive.read(next(name for name in shipped if name.endswith("entry_points.txt"))).decode()

    needed = [path for name in PACKAGES for path in (source / name).rglob("*.py")]
    needed += [*(source / "simulator/catalogue").rglob("*.json"), *(source / "executor/kernels").glob("*.cpp")]
    assert {path.relative_to(source).as_posix() for path in needed} <= shipped
    assert "simulator/catalogue/models/qwen2.5-7b.json" in shipped
    assert {name.partition("/")[0] for name in shipped if ".dist-info/" not in name} == set(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in shipped)
    assert re.search(r"^conveyor = analysis\.cli:main$", entry_points, re.MULTILINE)


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make venv` in a folder that holds only what make reads, untouched by a make that runs these tests."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        if not (folder / name).exists():
            shutil.copy(ROOT / name, folder)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    line = ["make", "venv", *arguments]
    return subprocess.run(line, cwd=folder, env=inherited, capture_output=True, text=True, check=False)


def pretending(folder: Path, change: str) -> str:
    """A Python that runs `-c CODE` after a change to itself."""
    path = folder / "pretending-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; {change}; exec(sys.argv[1])" "$2"\n')
    path.chmod(0o755)
    return str(path)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_an_old_python_gets_one_sentence(tmp_path: Path) -> None:
    old = "sys.version_info = (3, 10, 14, 'final', 0)"
    run = make(tmp_path, f"PYTHON={pretending(tmp_path, old)}")
    assert run.returncode != 0
    sentence, *rest = run.stderr.splitlines()
    assert sentence.startswith("Conveyor needs Python 3.11 or newer and ")
    assert all(line.startswith("make: ***") for line in rest)
    assert not (tmp_path / ".venv").exists()


@needs_make
def test_a_python_that_is_not_there_gets_the_same_sentence(tmp_path: Path) -> None:
    run = make(tmp_path, "PYTHON=python9.9")
    assert run.returncode != 0
    assert run.stderr.startswith("Conveyor needs Python 3.11 or newer and 'python9.9' is not: ")


@needs_make
def test_a_missing_venv_module_gets_one_sentence(tmp_path: Path) -> None:
    bare = "sys.modules['ensurepip'] = None"
    run = make(tmp_path, f"PYTHON={pretending(tmp_path, bare)}")
    assert run.returncode != 0
    sentence, *rest = run.stderr.splitlines()
    assert "install its venv module (Debian, Ubuntu: apt-get install python3-venv)" in sentence
    assert all(line.startswith("make: ***") for line in rest)
    assert not (tmp_path / ".venv").exists()


@needs_make
@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_nothing_is_installed_again_until_a_version_changes(tmp_path: Path, changed: str) -> None:
    stamp = tmp_path / ".venv/.installed"
    stamp.parent.mkdir()
    stamp.touch()
    make(tmp_path, "--question")  # copies the files
    for age, name in enumerate((".venv/.installed", "pyproject.toml", "constraints.txt")):
        os.utime(tmp_path / name, (9000 - age, 9000 - age))
    assert make(tmp_path, "--question").returncode == 0
    os.utime(tmp_path / changed, (9001, 9001))
    assert make(tmp_path, "--question").returncode == 1
