"""The examples of docs/cpu.md, run as a reader runs them: shell blocks, one after another, in one shell."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/cpu.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the examples are for machines without a GPU")
def test_the_examples_for_a_cpu_run_and_leave_what_they_say(tmp_path: Path) -> None:
    shutil.copy(ROOT / "LICENSE", tmp_path)
    conveyor = tmp_path / "bin" / "conveyor"
    conveyor.parent.mkdir()
    conveyor.write_text(f'#!/bin/sh\nexec {sys.executable} -m analysis.cli "$@"\n')
    conveyor.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{conveyor.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["sh", "-eu", "-c", "\n".join(BLOCKS)],
        cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    small = tmp_path / "runs" / "small"
    assert {path.name for path in small.iterdir()} == {
        "model", "costs.json", "plan.json", "trace.json", "run", "report", "calibrated.json",
    }  # fmt: skip
    assert json.loads((small / "trace.json").read_text())["traceEvents"]
    losses = [json.loads(line)["loss"] for line in (small / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 30
    assert losses[-1] < 0.8 * losses[0]
    assert (small / "report" / "report.html").is_file()
    # The calibrated plan has seen the run, and its prices are those that the run measured.
    calibrated = json.loads((small / "calibrated.json").read_text())
    assert calibrated["costs"]["folded_runs"] == ["run"]
    assert json.loads((small / "plan.json").read_text())["costs"]["folded_runs"] == []


def test_all_examples_are_run() -> None:
    """No command line of the page stands outside its shell blocks."""
    assert "\n".join(BLOCKS).count("conveyor ") == 6
