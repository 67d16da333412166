"""The bare process: host memory that every training process takes, whatever model it trains."""

import subprocess
import sys
import threading

from simulator.errors import ConveyorError
from simulator.system import process_tree_bytes

PATIENCE_SECONDS = 300.0  # a process that hangs, as on a driver at fault, must not hold up the probe for ever

# A step, not imports alone: transformers imports most of itself, and torch's compiler, when it builds its first model;
# libraries start their threads and take their workspaces in the first products.
_STEP = """
import sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=256)
model = AutoModelForCausalLM.from_config(config).to(sys.argv[1])
tokens = torch.zeros((1, 64), dtype=torch.int64, device=sys.argv[1])
loss = model(tokens, labels=tokens).loss
loss.backward()
assert loss.item() > 0
print("ready", flush=True)
input()
"""


def bare_process_bytes(device: str) -> int:
    """Bytes of a fresh process after one step of a model of 0.1 M parameters on `device`, as `process_tree_bytes`
    counts them: so are the peaks of runs, and mapped files count in neither.

    Raises ConveyorError where that process fails, or is not done after `PATIENCE_SECONDS`.
    """
    command = [sys.executable, "-c", _STEP, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        too_late = threading.Timer(PATIENCE_SECONDS, process.kill)  # then it says nothing, and the line is empty
        too_late.start()
        try:
            ready = process.stdout.readline().strip() == "ready"
        finally:
            too_late.cancel()
        if not ready:
            raise ConveyorError(
                "probe: a process that trains a small model failed, or took longer than "
                f"{PATIENCE_SECONDS:.0f} s; its message is above"
            )
        resident = process_tree_bytes(process.pid)
        process.stdin.write("\n")
    return resident
