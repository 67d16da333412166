"""Import names that another distribution took: refused at the front door, by whom, and without running its code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.shadow import PACKAGES, shadowed_packages

ROOT = Path(__file__).parents[1]


def shadow(folder: Path, name: str) -> None:
    """What another distribution called `conflicting` 9.9 would install: a package that must not be imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise SystemExit('a shadowing package was imported')\n")
    describe(folder, "conflicting", name)


def describe(folder: Path, distribution: str, package: str) -> None:
    """The metadata that pip leaves behind after installing `distribution` 9.9 with one package into `folder`."""
    information = folder / f"{distribution.replace('-', '_')}-9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9\n")
    (information / "RECORD").write_text(f"{package}/__init__.py,,\n{information.name}/RECORD,,\n")


def doctor_from(folder: Path, *, path: Path, command: str = "doctor") -> subprocess.CompletedProcess[str]:
    """`python -m analysis.cli COMMAND` in `folder`, whose packages come first, with `path` after it."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    line = [sys.executable, "-m", "analysis.cli", command]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_this_installation_is_not_shadowed() -> None:
    assert shadowed_packages() == []


@pytest.mark.parametrize("name", ["simulator", "planner", "executor"])
def test_a_shadowing_package_is_refused_by_name_without_being_imported(tmp_path: Path, name: str) -> None:
    shadow(tmp_path, name)
    run = doctor_from(tmp_path, path=ROOT)
    assert (run.returncode, run.stdout) == (2, "")
    (sentence,) = run.stderr.splitlines()
    assert f"'{name}' leads to {tmp_path / name} (of conflicting 9.9), not to {ROOT / name}" in sentence


def test_a_shadowing_folder_of_no_distribution_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").write_text("")
    run = doctor_from(tmp_path, path=ROOT)
    assert run.returncode == 2
    assert "(of no installed distribution)" in run.stderr


def test_a_distribution_that_overwrote_a_package_is_named(tmp_path: Path) -> None:
    # Both installed into one folder: every path is right, and the files are mixed.
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    describe(tmp_path, "conflicting", "executor")
    run = doctor_from(tmp_path, path=tmp_path)
    assert run.returncode == 2
    assert f"conflicting 9.9 also installed files into {tmp_path / 'executor'}" in run.stderr


def test_our_own_record_is_no_conflict(tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    describe(tmp_path, "conveyor-train", "executor")
    assert doctor_from(tmp_path, path=tmp_path, command="--help").returncode == 0
