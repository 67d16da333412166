"""What a run says of its steps: a JSON line each, numbers for loggers, and now and then a line on the console."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from executor.loggers import Logger
from executor.run_directory import EVALUATIONS, append_metrics
from executor.schedule import Schedule, learning_rate
from executor.trainer import Evaluation, StepResult
from simulator.formulas import tflops, tflops_formula
from simulator.model import ModelSpec
from simulator.units import format_rate

# Of metrics.jsonl, what loggers get: numbers that a person watches.
_WATCHED = (
    "loss", "lr", "grad_norm", "epoch", "tokens_per_second", "tflops", "seconds", "data_wait_seconds",
    "device_peak_bytes", "host_peak_bytes",
)  # fmt: skip


class StepLog:
    """Writes the steps of a run in `directory`. `steps_per_epoch` is None for endless data."""

    def __init__(
        self,
        directory: Path,
        model: ModelSpec,
        schedule: Schedule,
        *,
        tokens_per_step: int,
        steps_per_epoch: int | None,
        log_every: int,
        loggers: Sequence[Logger],
        say: Callable[[str], None],
    ) -> None:
        self.directory, self.model, self.schedule, self.say = directory, model, schedule, say
        self.tokens_per_step, self.steps_per_epoch, self.log_every = tokens_per_step, steps_per_epoch, log_every
        self.loggers = list(loggers)
        self.flops = tflops_formula(model)

    def step(
        self,
        result: StepResult,
        *,
        steps_applied: int,
        seconds: float,
        data_wait_seconds: float,
        device_peak_bytes: int | None,
        host_peak_bytes: int,
        allocator_retries: int | None,
        lost_seconds: Mapping[str, float],
    ) -> dict[str, Any]:
        """Write a step's line; `steps_applied` counts those before it. Returns the line.

        Tokens are real ones; TFLOPS count the computed ones, padding too. `lost_seconds` says by cause how long
        compute waited.
        """
        rate = learning_rate(steps_applied, self.schedule)
        row: dict[str, Any] = {
            "step": result.step,
            "epoch": None if self.steps_per_epoch is None else round((result.step + 1) / self.steps_per_epoch, 6),
            "loss": result.loss,
            "lr": rate,
            "learning_rate": rate,
            "grad_norm": result.gradient_norm,
            "gradient_norm": result.gradient_norm,
            "clip_factor": result.clip_factor,
            "applied": result.applied,
            "seconds": seconds,
            "tokens": result.num_tokens,
            "target_tokens": result.num_targets,
            "tokens_per_second": result.num_tokens / seconds,
            "tflops": tflops(self.model, self.tokens_per_step, seconds),
            "tflops_formula": f"{self.flops}, T = {self.tokens_per_step}",
            "device_peak_bytes": device_peak_bytes,
            "host_peak_bytes": host_peak_bytes,
            "allocator_retries": allocator_retries,
            "data_wait_seconds": data_wait_seconds,
            "lost_seconds": dict(lost_seconds),
        }
        append_metrics(self.directory, row)
        self._to_loggers(result.step, {key: row[key] for key in _WATCHED})
        last = result.step == self.schedule.max_steps - 1
        if result.step % self.log_every == 0 or last:
            self.say(
                f"step {result.step + 1}/{self.schedule.max_steps}  loss {result.loss:.4f}  "
                f"norm {result.gradient_norm:.3g}  lr {rate:.3g}  {seconds:.3g} s  "
                f"{format_rate(row['tokens_per_second'])} tokens/s  {row['tflops']:.3g} TFLOPS"
            )
        return row

    def evaluation(self, step: int, found: Evaluation, *, seconds: float, improved: bool) -> None:
        """Write the evaluation after `step`: its loss per token, over how many, and whether it is the lowest so far."""
        row = {
            "step": step,
            "eval_loss": found.loss,
            "target_tokens": found.num_targets,
            "seconds": seconds,
            "improved": improved,
        }
        append_metrics(self.directory, row, name=EVALUATIONS)
        self._to_loggers(step, {"eval_loss": found.loss})
        best = ", the lowest so far" if improved else ""
        self.say(f"evaluation after step {step + 1}: loss {found.loss:.4f}{best}  ({seconds:.3g} s)")

    def _to_loggers(self, step: int, values: Mapping[str, float | None]) -> None:
        numbers = {key: value for key, value in values.items() if value is not None}
        for logger in list(self.loggers):
            try:
                logger.log(step, numbers)
            except Exception as error:  # a full disk or a lost network of theirs must not end hours of training
                self.loggers.remove(logger)
                name = type(logger).__name__
                self.say(f"{name} failed and gets no more metrics ({type(error).__name__}: {error})")
