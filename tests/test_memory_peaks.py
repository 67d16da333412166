"""Host memory over a run: loading, saving, resuming and exporting stay near the peak of a step, and nothing grows."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_model import save_pretrained, tiny_config

from analysis.cli import main
from planner.plan import Plan
from simulator.bench.process import bare_process_bytes
from simulator.formats import PRECISIONS, state_bytes

ROOT = Path(__file__).parents[1]

# Runs the front door and tells the peak of resident memory in each phase, and now and then what is resident.
PROGRAM = """
import json, re, sys
from pathlib import Path
from analysis.cli import main
from executor import checkpoint, run, step_log
from executor.trainer import Trainer
from simulator.system import HostPeak

def resident(key):
    return int(re.findall(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024

peaks, levels = {}, []

def watched(owner, name, phase):
    call = getattr(owner, name)
    def watching(*given, **named):
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident
        found = call(*given, **named)
        peaks[phase] = max(peaks.get(phase, 0), resident("VmHWM"))
        return found
    setattr(owner, name, watching)

watched(run.Run, "_fill_state", "filling")
watched(Trainer, "step", "step")
watched(checkpoint, "save", "saving")
watched(run, "export", "export")
allocate = run.Trainer
def allocating(*given, **named):
    peaks["bare"] = resident("RssAnon")
    return allocate(*given, **named)
run.Trainer = allocating
append = step_log.append_metrics
def append_metrics(directory, row):
    append(directory, row)
    levels.append(resident("RssAnon"))
step_log.append_metrics = append_metrics
with HostPeak(interval_seconds=0.005) as whole:
    code = main(json.loads(sys.argv[1]))
print(json.dumps([code, peaks | {"whole": whole.peak_bytes}, levels]))
"""


def watched(arguments: list[str]) -> tuple[dict[str, int], list[int]]:
    """Peaks by phase and levels by step of a run in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    code, peaks, levels = json.loads(ended.stdout.splitlines()[-1])
    assert code == 0, ended.stderr
    return peaks, levels


def planned(folder: Path, config: dict, *, tokens: int) -> list[str]:
    """A model, its data and its plan in `folder`; the command line that trains by them."""
    save_pretrained(config, folder / "model")
    (folder / "data.txt").write_text("".join(f"{n} times {n} is {n * n}. " for n in range(400)))
    shape = ["--model", str(folder / "model"), "--hardware", "cpu-2-core", "--sequence-length", "16"]
    choices = ["--tokens-per-step", str(tokens), "--output", str(folder / "plan.json")]
    assert main(["plan", *shape, *choices]) == 0
    files = ["--plan", folder / "plan.json", "--data", folder / "data.txt", "--output", folder / "run"]
    return [str(word) for word in ["train", *files, "learning_rate=1e-3"]]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, int]]:
    """A run of two steps on 22 million parameters, resumed for one more: 264 MB of state, and 88 MB as a folder."""
    folder = tmp_path_factory.mktemp("peaks")
    config = tiny_config(hidden_size=512, intermediate_size=2048, vocab_size=20_000, head_dim=64)
    train = planned(folder, config, tokens=32)
    peaks, _ = watched([*train, "max_steps=2", "save_every=1"])
    resumed, _ = watched([*train, "max_steps=3", "resume=auto", "resume_changes=accept"])
    assert resumed.keys() == peaks.keys() == {"filling", "step", "saving", "export", "whole", "bare"}
    taken = {name: run["whole"] - run["bare"] for name, run in (("first run", peaks), ("resumed run", resumed))}
    return Plan.load(folder / "plan.json"), {
        **peaks, "resuming": resumed["filling"], "whole resumed": resumed["whole"], **taken,
    }  # fmt: skip


@pytest.fixture(scope="module")
def bare_process() -> int:
    return bare_process_bytes("cpu")


@pytest.mark.parametrize("phase", ["filling", "resuming", "saving", "export"])
def test_no_phase_takes_more_than_a_block_above_a_step(peaks: tuple[Plan, dict[str, int]], phase: str) -> None:
    plan, found = peaks
    bytes_a_parameter = PRECISIONS["bf16"].weight + state_bytes("bf16", "fp32")
    layer = plan.model.block(1).num_elements * bytes_a_parameter
    assert layer < 64e6
    assert found[phase] <= found["step"] + layer


@pytest.mark.parametrize("run", ["first run", "resumed run"])
def test_the_plan_foresees_what_loading_steps_saving_and_export_take(
    peaks: tuple[Plan, dict[str, int]], run: str
) -> None:
    """Above the process before it allocates; mapped files, which the kernel can drop, do not count."""
    plan, found = peaks
    assert found[run] <= plan.prediction.host_peak_bytes - plan.hardware.host_base_bytes.value


@pytest.mark.parametrize("run", ["whole", "whole resumed"])
def test_with_the_bare_process_of_this_machine_the_plan_foresees_all_that_a_run_takes(
    peaks: tuple[Plan, dict[str, int]], bare_process: int, run: str
) -> None:
    """Importing, building the first model and starting threads too."""
    plan, found = peaks
    foreseen = plan.prediction.host_peak_bytes - plan.hardware.host_base_bytes.value + bare_process
    assert found[run] <= foreseen
    assert found[run] > bare_process  # else that process does something which runs do not


@pytest.mark.slow
def test_resident_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    """Two kilobytes a step are allowed: the run keeps some numbers of each step, and heaps settle slowly.

    A tensor that was kept would show: tokens and labels of one step are 4 kB, a layer's input is 24.
    """
    train = planned(tmp_path, tiny_config(), tokens=256)
    _, levels = watched([*train, "max_steps=300", "save_every=30", "log_every=100"])
    settled = np.array(levels[100:], dtype=float)
    assert len(settled) == 200
    slope = np.polyfit(np.arange(len(settled)), settled, 1)[0]
    assert slope < 2048
