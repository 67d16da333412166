"""`make demo`: the main job on a small model. Probe this machine, measure, plan, train on real text, plot.

The text is the Python standard library's own sources, as bytes; the model a small Llama; the figures at the end are
predicted and measured step time, TFLOPS and memory.
"""

import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from analysis.report import plot
from executor.measure import measure
from planner.search import plan
from simulator.model import model_spec
from simulator.policy import Workload
from simulator.probe import probe
from simulator.units import format_seconds

DIRECTORY = Path("runs/demo")
SEQUENCE_LENGTH, TOKENS_PER_STEP, NUM_STEPS = 256, 2048, 150
LEARNING_RATE = 2e-3

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 258, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "initializer_range": 0.02,
    "hidden_act": "silu", "use_cache": False,
}  # fmt: skip


def main() -> int:
    """Run the demo. Returns 0 when the loss has fallen as it must."""
    started = time.perf_counter()
    cuda = torch.cuda.is_available()
    model_folder = DIRECTORY / "model-config"
    model_folder.mkdir(parents=True, exist_ok=True)
    (model_folder / "config.json").write_text(json.dumps(MODEL, indent=1))
    model = model_spec(MODEL)
    print(f"1. probe: what this machine sustains ({'CUDA' if cuda else 'CPU'})", flush=True)
    hardware = probe(DIRECTORY / "hardware.json")

    print("2. measure: Conveyor's own operations for this model", flush=True)
    workload = Workload(
        sequence_length=SEQUENCE_LENGTH, tokens_per_step=TOKENS_PER_STEP, precision="bf16" if cuda else "fp32"
    )
    costs = measure(
        MODEL,
        hardware,
        workload,
        micro_batch_rows=(2, 4, 8),
        device=torch.device("cuda", 0) if cuda else torch.device("cpu"),
    )
    costs.save(DIRECTORY / "costs.json")

    print("3. plan", flush=True)
    found = plan(model, workload, hardware, costs=costs, model_path=str(model_folder))
    found.save(DIRECTORY / "plan.json")

    text = sysconfig.get_paths()["stdlib"]
    print(f"4. train: {NUM_STEPS} steps on the sources of the Python standard library, as bytes", flush=True)
    run = DIRECTORY / "run"
    shutil.rmtree(run, ignore_errors=True)  # an earlier demo's
    # In a process of its own, as after `conveyor plan`: what probing and measuring leave would count in its memory.
    settings = [
        f"learning_rate={LEARNING_RATE}", "lr_schedule=cosine", "warmup_steps=10", "weight_decay=0.01",
        "betas=[0.9, 0.95]", f"max_steps={NUM_STEPS}", "log_every=25", "resume=never",
    ]  # fmt: skip
    command = ["train", "--plan", DIRECTORY / "plan.json", "--data", text, "--output", run, *settings]
    trained = subprocess.run([sys.executable, "-m", "analysis.cli", *map(str, command)], check=False)
    if trained.returncode:
        return trained.returncode

    print("5. plot", flush=True)
    written = plot([run], DIRECTORY / "report")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = losses[0], statistics.mean(losses[-20:])
    print(f"loss: {first:.3f} at the first step, {last:.3f} over the last 20 ({last / first:.2f} of it)")
    print(f"figures: {DIRECTORY / 'report'}")
    print(f"report:  {written[-1]}")
    print(f"all in {format_seconds(time.perf_counter() - started)}")
    if last > 0.6 * first:
        print("the loss has not fallen to 0.6 of the first step's: something is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
