"""Killed at any moment, also during a save, a run goes on from its newest whole checkpoint, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import save_pretrained, tiny_config

from analysis.cli import main
from executor.checkpoint import read_record
from executor.run_directory import load_run

ROOT = Path(__file__).parents[1]
NUM_STEPS, NUM_KILLS = 12, 8

# Forks the run again and again, so that a start costs no imports, and kills each child at a random moment: every
# other one while a checkpoint is half-written.
PROGRAM = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch, transformers
from transformers.models.qwen2 import modeling_qwen2
from analysis.cli import main
from executor import launch, run

arguments, output, num_kills = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
chance = random.Random(7)
killed = 0
for attempt in range(10 * num_kills):
    child = os.fork()
    if not child:
        sys.stdout = open(os.devnull, "w")
        os._exit(main(arguments))
    saving = attempt % 2 == 0 and killed < num_kills
    ended = 0, 0
    deadline = time.monotonic() + 60
    done = len((output / "metrics.jsonl").read_text().splitlines()) if (output / "metrics.jsonl").exists() else 0
    while killed < num_kills and not ended[0] and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        if saving and any((output / "checkpoints").glob("*.partial")):
            break
        if not saving and (output / "metrics.jsonl").exists():
            if len((output / "metrics.jsonl").read_text().splitlines()) > done:
                break
    if not ended[0] and killed < num_kills:
        time.sleep(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
    if not ended[0]:
        ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended[1]):
        killed += 1
        print("partial" if any((output / "checkpoints").glob("*.partial")) else "whole")
    else:
        assert os.WEXITSTATUS(ended[1]) == 0, ended
        break
"""


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_one_that_never_was(tmp_path: Path, capsys) -> None:
    save_pretrained(tiny_config(hidden_size=96, head_dim=24, intermediate_size=384), tmp_path / "model")
    (tmp_path / "data.txt").write_text("".join(f"{n} times {n} is {n * n}. " for n in range(200)))
    plan = ["plan", "--model", tmp_path / "model", "--hardware", "cpu-2-core", "--sequence-length", "16"]
    plan += ["--tokens-per-step", "64", "--output", tmp_path / "plan.json"]
    assert main([str(argument) for argument in plan]) == 0

    def training(output: Path) -> list[str]:
        return [
            "train", "--plan", str(tmp_path / "plan.json"), "--data", str(tmp_path / "data.txt"), "--output",
            str(output), f"max_steps={NUM_STEPS}", "learning_rate=1e-2", "save_every=1", "resume=auto",
        ]  # fmt: skip

    assert main(training(tmp_path / "whole")) == 0
    capsys.readouterr()
    output = tmp_path / "killed"
    arguments = [json.dumps(training(output)), str(output), str(NUM_KILLS)]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    moments = ended.stdout.split()
    assert len(moments) >= 3, ended.stderr
    assert "partial" in moments  # at least one kill met a half-written checkpoint

    for name in (f"checkpoints/step-{NUM_STEPS:08}", "model"):
        files = [path for path in (tmp_path / "whole" / name).iterdir() if path.name != "checkpoint.json"]
        assert len(files) > 1
        for path in files:
            assert path.read_bytes() == (output / name / path.name).read_bytes(), path.name
    progress = [
        read_record(tmp_path / run / f"checkpoints/step-{NUM_STEPS:08}").progress for run in ("whole", "killed")
    ]
    assert progress[0] == progress[1]
    rows = [load_run(tmp_path / name).metrics for name in ("whole", "killed")]
    figures = [[(row["step"], row["loss"], row["gradient_norm"]) for row in run] for run in rows]
    assert figures[0] == figures[1]
    assert not list((output / "checkpoints").glob("*.partial"))
