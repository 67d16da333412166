"""The structure of the source: imports run one way, and no file holds more than one noun."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("simulator", "planner", "executor", "analysis")  # each may import itself and those before it
MAX_LINES = 450


def imported_packages(source: str) -> set[str]:
    """Our packages that a module imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names} & set(PACKAGES)


def modules() -> list[Path]:
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import executor", {"executor"}),
        ("import os, planner.solve as s", {"planner"}),
        ("from analysis import cli", {"analysis"}),
        ("def f():\n    if True:\n        from executor.config import TrainConfig", {"executor"}),
        ("from executors import x\nimport simulators", set()),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, packages: set[str]) -> None:
    assert imported_packages(source) == packages


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_run_leftwards(path: Path) -> None:
    allowed = set(PACKAGES[: PACKAGES.index(path.parts[0]) + 1])
    assert imported_packages((ROOT / path).read_text(encoding="utf-8")) <= allowed


@pytest.mark.parametrize("path", [*modules(), *(p.relative_to(ROOT) for p in sorted(ROOT.glob("tests/*.py")))], ids=str)
def test_files_stay_short(path: Path) -> None:
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_the_tests_settings_come_before_torch() -> None:
    """torch reads the number of threads when it is imported: conftest.py sets it, so it may not bring torch in."""
    code = "import sys, conftest; sys.exit('torch' in sys.modules)"
    found = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", env=found, check=False).returncode == 0
