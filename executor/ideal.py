"""Measures the ideal: forward, loss and backward of a step without optimizer or clipping, all weights resident."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from executor.data.dataset import SYNTHETIC, open_dataset
from executor.layer import LayerTemplates
from executor.memory import Memory
from executor.operations import Operations, Optimization
from executor.runner import InlineRunner, Runner, StreamRunner
from simulator.build import build
from simulator.families import with_layers
from simulator.ideal import ideal_policy, ideal_program
from simulator.model import ModelSpec, model_spec, transformers_config
from simulator.policy import SaveLevel, Workload
from simulator.program import Kind

STANDARD_DEVIATION = 0.02  # of the random weights: what the clocks do depends on the bits that flip
WARM_STEPS = 3
TIMED_STEPS = 5
# Run at once, of long micro-batches fewer: one writes its gradients, the others add.
MICRO_BATCHES = 4
TOKENS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class MeasuredIdeal:
    """What the ideal step takes. `num_layers` were measured; where the model has more, the layers' time is scaled."""

    step_seconds: float
    num_layers: int


def measure_ideal(
    config: dict[str, Any],
    workload: Workload,
    *,
    micro_batch_rows: int,
    save_level: SaveLevel,
    num_layers: int,
    device: torch.device,
    warm_seconds: float = 0.0,
) -> MeasuredIdeal:
    """Median of 5 steps after 3, and after `warm_seconds` of load, at `num_layers` layers of the model.

    Micro-batches do not wait for each other, so of a long step a part is run, again and again, and its time scaled.

    Raises OutOfMemory or torch's own error where that many layers do not fit.
    """
    hf_config = transformers_config(config)
    cut = with_layers(config, hf_config, list(range(num_layers)))
    model = model_spec(cut)
    micro_batches = workload.rows_per_step // micro_batch_rows
    at_most = max(2, min(MICRO_BATCHES, TOKENS_AT_ONCE // (micro_batch_rows * workload.sequence_length)))
    run_at_once = min(at_most, micro_batches)
    tokens = run_at_once * micro_batch_rows * workload.sequence_length
    here = workload.model_copy(update={"micro_batch_rows": micro_batch_rows, "tokens_per_step": tokens})
    step = _IdealStep(cut, model, here, micro_batch_rows, save_level, device)
    try:
        started = time.perf_counter()
        steps = 0
        while steps < WARM_STEPS or time.perf_counter() - started < warm_seconds:
            step.run()
            steps += 1
        seconds = [step.run() for _ in range(TIMED_STEPS)]
        measured = statistics.median(seconds)
        if num_layers < hf_config.num_hidden_layers:
            measured += step.layer_seconds() * (hf_config.num_hidden_layers / num_layers - 1)
        return MeasuredIdeal(measured * micro_batches / run_at_once, num_layers)
    finally:
        step.close()


class _IdealStep:
    """The program, memory and streams of an ideal step."""

    def __init__(
        self,
        config: dict[str, Any],
        model: ModelSpec,
        workload: Workload,
        micro_batch_rows: int,
        save_level: SaveLevel,
        device: torch.device,
    ) -> None:
        policy = ideal_policy(model, workload, micro_batch_rows=micro_batch_rows, save_level=save_level)
        self.model, self.device = model, device
        self.program = ideal_program(build(model, workload, policy))
        self.memory = Memory(model, workload, policy, self.program.buffers, device)
        templates = LayerTemplates(
            config, model, precision=workload.precision, compiled=workload.compiled, device=device
        )
        unused = Optimization(table=torch.zeros(1, 3), betas=(0.9, 0.999), epsilon=1e-8, max_grad_norm=None)
        functions = Operations(model, policy, self.memory, templates, unused, host_threads=1).functions()
        bytes_of = self.memory.device_bytes
        self.runner: Runner = (
            StreamRunner(functions, device, device_bytes=bytes_of)
            if device.type == "cuda"
            else InlineRunner(functions, device, device_bytes=bytes_of)
        )
        generator = torch.Generator(device).manual_seed(0)
        for block in range(model.num_blocks):
            weights = self.memory.plane(f"device.weights.{block}", block)
            weights.normal_(std=STANDARD_DEVIATION, generator=generator)
        self._fill(workload)

    def _fill(self, workload: Workload) -> None:
        batch = open_dataset(
            SYNTHETIC, vocab_size=self.model.vocab_size, sequence_length=workload.sequence_length,
            rows_per_step=workload.rows_per_step, seed=0,
        ).batch(0)  # fmt: skip
        for half in range(2):
            tokens, labels = self.memory.host_tokens[half]
            tokens.view(-1).copy_(batch.tokens.view(-1))
            labels.view(-1).copy_(batch.labels.view(-1))
            self.memory.host_loss_scale[half] = 1.0 / batch.num_targets

    def run(self, *, record: bool = False) -> float:
        """One step to its end; its seconds."""
        start = time.perf_counter()
        self.runner.run(self.program.first, record=record)
        self.runner.synchronize()
        return time.perf_counter() - start

    def layer_seconds(self) -> float:
        """Seconds of a step that its layers take, as recorded."""
        self.run(record=True)
        kinds = (Kind.FORWARD.value, Kind.BACKWARD.value)
        return sum(
            span.end - span.start
            for span in self.runner.spans()
            if span.kind in kinds and span.block in self.model.layers
        )

    def close(self) -> None:
        self.runner.close()
        self.memory.close()
