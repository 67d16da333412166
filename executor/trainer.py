"""The trainer: one model under one plan. A step is launched; its report is read when the next one is launched.

The program of a step is launched without waiting for its end, so the GPU is never drained between steps; updates of a
step may run inside the next one. `drain` finishes what is pending before the state is read.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from executor.attention import document_bound
from executor.data.dataset import Batch
from executor.layer import LayerTemplates
from executor.memory import Memory
from executor.operations import Operations, Optimization
from executor.runner import InlineRunner, Runner, StreamRunner
from simulator.build import build, build_evaluation
from simulator.check import check
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.program import Program
from simulator.timeline import MemoryPoint, Timeline

# Threads that launch work and feed the GPU must never wait for a core that the host optimizer holds.
RESERVED_CORES = 2


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports: loss per target token, gradient norm before clipping, and whether it was applied."""

    step: int
    loss: float
    gradient_norm: float
    clip_factor: float
    num_targets: int
    num_tokens: int  # real tokens, padding left out
    reported: float  # when the report was there, on the clock of time.perf_counter

    @property
    def applied(self) -> bool:
        """False where the gradient was not finite: weights, moments and step count are then as they were."""
        return self.clip_factor > 0


class Evaluation(NamedTuple):
    """Loss per target token over all batches of an evaluation, and how many targets those are."""

    loss: float
    num_targets: int


class Trainer:
    """Holds a model's state where the policy says and runs steps on it.

    `config` is the model's transformers config as a dictionary. The state is zero until weights are loaded into
    `memory.states()` and `start` is called. Raises InputError for policies that cannot be built and OutOfMemory where
    the machine refuses memory.
    """

    def __init__(
        self,
        config: dict[str, Any],
        model: ModelSpec,
        workload: Workload,
        policy: Policy,
        optimization: Optimization,
        *,
        device: torch.device,
    ) -> None:
        self.model, self.workload, self.policy, self.device = model, workload, policy, device
        self.max_grad_norm = optimization.max_grad_norm
        self.program = build(model, workload, policy)
        check(self.program)
        self.evaluation: Program | None = None  # built when it is first asked for
        self.memory = Memory(model, workload, policy, self.program.buffers, device)
        self.templates = LayerTemplates(
            config, model, precision=workload.precision, compiled=workload.compiled, packed=workload.packed,
            device=device,
        )  # fmt: skip
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores - RESERVED_CORES) if device.type == "cuda" else cores
        self.operations = Operations(model, policy, self.memory, self.templates, optimization, host_threads=threads)
        functions, device_bytes = self.operations.functions(), self.memory.device_bytes
        self.runner: Runner = (
            StreamRunner(functions, device, device_bytes=device_bytes, launches=self.operations.launches)
            if device.type == "cuda"
            else InlineRunner(functions, device, device_bytes=device_bytes)
        )
        self.steps_done = 0
        self.pending = False  # whether a step was launched since the last drain
        self._batches: dict[int, tuple[int, int]] = {}  # targets and tokens of steps whose report is not read yet

    def start(self, *, steps_done: int = 0, steps_applied: int = 0) -> None:
        """Begin, or go on, from the state in `memory.states()`."""
        self.steps_done = steps_done
        for count in self.operations.counts.values():
            count.fill_(steps_applied)
        self.memory.refresh_resident_weights()
        self.pending = False
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self, batch: Batch, *, record: bool = False) -> StepResult | None:
        """Launch a step on `batch` (tokens and labels [rows, sequence_length]); the newest result that is ready.

        That is this step's where it runs inline, else the one of the step before, None after a drain.

        A batch of fewer rows is filled up with rows without targets; losses are weighted by the step's targets.
        """
        self._fill(batch, self.steps_done % 2)
        self.operations.parity = self.steps_done % 2
        self.runner.run(self.program.steady if self.pending else self.program.first, record=record)
        self.pending = True
        self._batches[self.steps_done] = (batch.num_targets, batch.num_tokens)
        self.steps_done += 1
        ready = self.steps_done - (2 if self.runner.pipelined else 1)
        return self._result(ready) if ready in self._batches else None

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """The loss on `batches`, each as large as a step's or smaller, of the weights as they are. Call after `drain`.

        Losses are summed over tokens, so the result does not depend on how the data are cut (but for rounding).
        """
        assert not self.pending, "an evaluation follows a drain"
        if self.evaluation is None:
            self.evaluation = build_evaluation(self.model, self.workload, self.policy)
            check(self.program, self.evaluation)
        loss_sum, num_targets, index = 0.0, 0, -1
        for index, batch in enumerate(batches):
            self._fill(batch, index % 2)
            self.operations.parity = index % 2
            self.runner.run(self.evaluation)
            num_targets += batch.num_targets
            if index:  # the batch before has been read by now, so that its half may be filled again
                self.runner.finish_report()
                loss_sum += self.memory.report[(index - 1) % 2, 0].item()
        if index >= 0:
            self.runner.finish_report()
            self.runner.synchronize()
            loss_sum += self.memory.report[index % 2, 0].item()
        return Evaluation(loss_sum / max(1, num_targets), num_targets)

    def _fill(self, batch: Batch, half: int) -> None:
        memory = self.memory
        tokens, labels = memory.host_tokens[half, :2]
        rows = batch.tokens.shape[0]
        if self.workload.packed:
            self._fill_positions(batch, memory.host_tokens[half, 2])
        tokens.view(-1, self.workload.sequence_length)[:rows].copy_(batch.tokens)
        labels.view(-1, self.workload.sequence_length)[:rows].copy_(batch.labels)
        tokens.view(-1, self.workload.sequence_length)[rows:].zero_()
        labels.view(-1, self.workload.sequence_length)[rows:].fill_(-100)
        memory.host_loss_scale[half] = 1.0 / batch.num_targets

    def _fill_positions(self, batch: Batch, positions: torch.Tensor) -> None:
        """Each token's place in its document; without documents, and in rows that fill up, a row is one."""
        length = self.workload.sequence_length
        whole_rows = positions.view(-1, length)
        whole_rows.copy_(torch.arange(length))
        if batch.positions is not None:
            whole_rows[: batch.positions.shape[0]].copy_(batch.positions)
        documents = (positions == 0).sum(dim=(1, 2)).tolist()
        tokens = self.policy.micro_batch_rows * length
        self.memory.document_bounds = [document_bound(found, tokens) for found in documents]

    def _result(self, step: int) -> StepResult:
        reported = self.runner.finish_report()
        loss_sum, norm = self.memory.report[step % 2].tolist()
        targets, tokens = self._batches.pop(step)
        return StepResult(step, loss_sum / targets, norm, self._clip_factor(norm), targets, tokens, reported)

    def _clip_factor(self, norm: float) -> float:
        if norm != norm or norm == float("inf"):
            return 0.0
        if self.policy.clipping != "global" or self.max_grad_norm is None:
            return 1.0
        return min(1.0, self.max_grad_norm / (norm + 1e-6))

    def drain(self) -> StepResult | None:
        """Finish all pending work, so that `memory.states()` is the state after the last step; its result."""
        if self.pending:
            self.runner.run(self.program.drain)
        self.pending = False
        self.runner.synchronize()
        return self._result(self.steps_done - 1) if self._batches else None

    def steps_applied(self) -> int:
        """Steps whose update was applied: fewer than `steps_done` where gradients were not finite. Drains."""
        return int(min(count.item() for count in self.operations.counts.values()))

    def lost_seconds(self, step_seconds: float) -> dict[str, float]:
        """How long compute waited in the step whose result came last, by cause. Waits for nothing.

        `step_seconds` is the step's measured period.
        """
        return Timeline(step_seconds, tuple(self.runner.reported_spans()), {}, {}).lost_seconds()

    def timeline(self, step_seconds: float) -> Timeline:
        """The last recorded step as it ran. Call after `drain`; `step_seconds` is the step's measured period."""
        host = sum(b.num_bytes for b in self.program.buffers.values() if b.persistent and b.tier == "host")
        device = self.runner.memory()
        return Timeline(
            step_seconds,
            tuple(self.runner.spans()),
            {"device": tuple(device), "host": (MemoryPoint(0.0, host),)},
            {"device": max(point.num_bytes for point in device), "host": host},
        )

    def close(self) -> None:
        """End threads and give memory back."""
        self.runner.close()
        self.memory.close()
