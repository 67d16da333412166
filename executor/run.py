"""A run: from a plan and a config to a run directory, with checkpoints, metrics and a record of what was measured.

`train` opens data, model and trainer, steps through them, and leaves everything on disk: also what it learnt when the
run failed.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from executor import checkpoint
from executor.adamw import step_scalars
from executor.config import TrainConfig
from executor.data.ahead import batches_ahead
from executor.evaluation import all_batches, evaluations_without_improvement
from executor.huggingface import export, initialise, load_weights, state_sink
from executor.loggers import Logger, open_loggers
from executor.operations import Optimization
from executor.out_of_memory import doing
from executor.progress import step_progress
from executor.retries import Retries
from executor.run_checkpoints import RunCheckpoints
from executor.run_directory import EXPORTED, holds_run
from executor.run_inputs import RunInputs
from executor.schedule import learning_rate
from executor.step_log import StepLog
from executor.stop_requests import stop_requests
from executor.tokenizer import ByteTokenizer
from executor.trainer import StepResult, Trainer
from simulator.errors import ConveyorError
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.predict import StepFigures, step_figures
from simulator.system import HostPeak, return_freed_memory
from simulator.timeline import Timeline
from simulator.units import format_bytes

WARM_UP_STEPS = 3  # not timed: compilation, growing pools, cold clocks
# Losses or gradients in a row that are not finite, after which a run ends: the weights do not change, so neither will
# those.
MOST_LOST_STEPS = 20


class Interrupted(ConveyorError):
    """The user, or the system, stopped the run; what was done until then is saved. 130, or as `StopRequest` says."""

    def __init__(self, message: str, *, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Outcome:
    """What a run has to tell at its end."""

    figures: StepFigures
    timeline: Timeline
    clip_factors: list[float]
    steps_timed: int
    losses: list[float] = field(default_factory=list)
    exported: Path | None = None


class Run:
    """One training run on one device. Use `prepare`, `train`, then `close`.

    `before_start` is called when all inputs are checked and before memory is allocated.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_config: dict[str, Any],
        model: ModelSpec,
        workload: Workload,
        policy: Policy,
        directory: Path,
        *,
        device: torch.device,
        host_peak: HostPeak,
        say: Callable[[str], None] = print,
        inputs: RunInputs | None = None,
        before_start: Callable[[RunInputs], None] = lambda inputs: None,
    ) -> None:
        self.config, self.model_config, self.model = config, model_config, model
        self.workload, self.policy, self.directory, self.device, self.say = workload, policy, directory, device, say
        self.host_peak = host_peak
        self.context_bytes = _device_bytes_beside_allocator(device)
        self.retries = Retries(device)
        self.inputs = inputs or RunInputs(config, model, say=say)
        self.inputs.find_checkpoint()  # now that the directory is held
        self.dataset, self.eval_dataset = self.inputs.dataset, self.inputs.eval_dataset
        self.num_steps, self.schedule = self.inputs.num_steps, self.inputs.schedule
        self.resume_from, self.checkpoints = self.inputs.resume_from, self.inputs.checkpoints
        self.saves, self.model_folder = self.inputs.saves, self.inputs.model_folder
        self.eval_losses = list(self.inputs.eval_losses)
        self.timeline: Timeline | None = None  # of the step recorded last
        self.first_step = self.steps_applied = 0
        self.lost_steps = 0  # in a row until now: their loss or gradient was not finite
        self.lost = "loss"  # which of the two
        self.loggers: list[Logger] = []
        self.saved = RunCheckpoints(
            self.checkpoints, model, workload, policy, settings=self.inputs.settings(), keep=config.keep_checkpoints,
            device=device,
        )  # fmt: skip
        if self.resume_from is not None and self.inputs.record is not None:
            for line in self.saved.compare(self.resume_from, self.inputs.record, changes=config.resume_changes):
                say(line)
        for line in self.dataset.report.lines():
            say(line)
        if self.eval_dataset is not None:
            say(f"evaluation: {self.eval_dataset.rows.num_rows} rows, of {config.eval_data or 'the same data'}")
        before_start(self.inputs)
        started = time.perf_counter()
        return_freed_memory()  # of planning, of probing, of reading data: no plan counts it
        with doing("allocating the training state"):
            self.trainer = Trainer(model_config, model, workload, policy, self._optimization(), device=device)
        self.trainer.operations.before_update = self.saved.writer.before_update
        say(f"state allocated in {time.perf_counter() - started:.1f} s{self._host_words()}")

    def _optimization(self) -> Optimization:
        config = self.config
        rates = (learning_rate(step, self.schedule) for step in range(self.num_steps))
        dtype = torch.float64 if self.workload.precision == "fp64" else torch.float32
        table = step_scalars(rates, config.betas, config.weight_decay, dtype=dtype)
        return Optimization(table, config.betas, config.epsilon, config.max_grad_norm)

    def prepare(self) -> None:
        """Fill the state: from a checkpoint, a model folder, or at random."""
        started = time.perf_counter()
        with doing("filling the training state"):
            self._fill_state()
        compiles = "; the first step compiles the layers" if self.workload.compiled else ""
        self.say(f"state filled in {time.perf_counter() - started:.1f} s{self._host_words()}{compiles}")

    def _host_words(self) -> str:
        return f", host memory {format_bytes(self.host_peak.sample())}"

    def _fill_state(self) -> None:
        states = self.trainer.memory.states()
        if self.config.resume == "auto" and self.resume_from is None and holds_run(self.directory):
            self.say(f"no checkpoint in {self.checkpoints}: the run begins at its first step again")
        if self.resume_from is not None:
            accepted = checkpoint.read_record(self.resume_from).settings  # compared before anything was allocated
            progress = checkpoint.load(
                self.resume_from, model=self.model, states=states, settings={}, accept=accepted.keys()
            )
            self.trainer.start(steps_done=progress.step, steps_applied=progress.applied_steps)
            self.steps_applied = progress.applied_steps
            self.say(f"resumed from {self.resume_from} after {progress.step} steps")
            return
        if self.model_folder is not None:
            load_weights(self.model_folder, self.model, state_sink(states))
        else:
            self.say("no weights in the model's folder: they start at random")
            initialise(self.model, self.model_config, states, seed=self.config.seed, device=self.device)
        self.trainer.start()

    def train(self) -> Outcome | None:
        """Run to the last step; None where only the export was left to do, as after a kill.

        Raises Interrupted after saving when the user stops the run, ConveyorError on failure.

        A step is timed from one report to the next, so pipelined steps are timed as they are paid for.
        """
        trainer = self.trainer
        first = self.first_step = trainer.steps_done
        if first == self.num_steps or self.inputs.should_stop_early(self.eval_losses):
            self._export()
            return None
        self.loggers = open_loggers(self.config.loggers, self.directory, self.config.model_dump(mode="json"))
        results: list[StepResult] = []
        seconds: list[float] = []
        # Recorded: the first step, so that there is something; a steady one after the warm-up; one near the end.
        to_record, recorded = [first, first + WARM_UP_STEPS, self.num_steps - 2], -1
        data_waits: dict[int, float] = {}
        evaluated = stopped_early = False
        with (
            step_progress(self.say, num_steps=self.num_steps, steps_done=first) as progress,
            stop_requests() as stop,
            spared_collector() as set_aside,
        ):
            self.log = self._step_log(stop.heard(progress.say))
            batch_of = batches_ahead(self.dataset, num_steps=self.num_steps)
            clock = time.perf_counter()
            if self.inputs.evaluation_missed:
                self._evaluate()
                if self.inputs.should_stop_early(self.eval_losses):
                    self._say_stopped_early()
                    self._export()
                    return None

            def finished(result: StepResult | None) -> None:
                nonlocal clock
                if result is None:
                    return
                results.append(result)
                seconds.append(result.reported - clock)
                clock = result.reported
                if result.step == recorded:
                    self.timeline = trainer.timeline(seconds[-1])
                    self.context_bytes = max(self.context_bytes, _device_bytes_beside_allocator(self.device))
                lost = trainer.lost_seconds(seconds[-1])
                self._log(result, seconds[-1], data_waits.pop(result.step), lost)
                progress.show(result.step + 1, f"loss {result.loss:.4f}  {seconds[-1]:.3g} s a step")

            for step in range(first, self.num_steps):
                self.saved.writer.raise_failure()
                asked = time.perf_counter()
                batch = batch_of(step)
                data_waits[step] = time.perf_counter() - asked
                steady = trainer.pending or step in (first, self.num_steps - 1)
                record = bool(to_record) and step >= to_record[0] and steady
                if record:
                    to_record, recorded = [target for target in to_record if target > step], step
                finished(trainer.step(batch, record=record))
                if step == first:
                    set_aside()
                    if not trainer.runner.pipelined:  # else it passes beside the step, which the GPU times
                        clock = time.perf_counter()
                evaluated = False
                if self.inputs.evaluation_due(step + 1) and not stop.is_made:
                    finished(trainer.drain())
                    self._evaluate()
                    evaluated, clock = True, time.perf_counter()
                    if stopped_early := self.inputs.should_stop_early(self.eval_losses):
                        break
                due = self.config.save_every and (step + 1) % self.config.save_every == 0
                if self.saves and due and step + 1 < self.num_steps and not stop.is_made:
                    finished(trainer.drain())
                    if not self.lost_steps:  # else it would take the place of a checkpoint that is of use
                        self.saved.save(trainer, seed=self.config.seed, beside_training=True)
                    clock = time.perf_counter()
                if stop.is_made:
                    break
            finished(trainer.drain())
            interrupted = trainer.steps_done < self.num_steps and not stopped_early
            if self.eval_dataset is not None and not (evaluated or interrupted):
                self._evaluate()
            if not interrupted and not trainer.steps_applied():
                raise self._never_trained(self.num_steps)
            if not interrupted and not math.isfinite(results[-1].loss):
                raise self._diverged(trainer.steps_done)
            if self.saves:
                # Where steps were lost, the state may be of no use, and checkpoints before it stay.
                self.saved.save(trainer, seed=self.config.seed, keep_all=self.lost_steps > 0)
            if interrupted:
                where = f"; resume with resume=auto (saved in {self.checkpoints})" if self.saves else ""
                if self.saves and self.lost_steps:
                    where += f"; the last {self.lost_steps} steps were not finite, so earlier checkpoints stay there"
                raise Interrupted(
                    f"{stop.console_failure}stopped after {trainer.steps_done} of {self.num_steps} steps{where}",
                    exit_code=stop.exit_code,
                )
            if stopped_early:
                self._say_stopped_early()
            exported = self._export() if self.saves else None
        return self._outcome(results, seconds, exported)

    def _say_stopped_early(self) -> None:
        self.say(
            f"stopped early after {self.trainer.steps_done} of {self.num_steps} steps: "
            f"{self.config.early_stop_patience} evaluations without a lower loss"
        )

    def _step_log(self, say: Callable[[str], None]) -> StepLog:
        self.say = say
        return StepLog(
            self.directory, self.model, self.schedule, tokens_per_step=self.workload.tokens_per_step,
            steps_per_epoch=self.dataset.steps_per_epoch, log_every=self.config.log_every, loggers=self.loggers,
            say=say,
        )  # fmt: skip

    def _evaluate(self) -> None:
        """Evaluate and write down what was found. The trainer is drained."""
        assert self.eval_dataset is not None
        started = time.perf_counter()
        found = self.trainer.evaluate(all_batches(self.eval_dataset))
        self.eval_losses.append(found.loss)
        self.log.evaluation(
            self.trainer.steps_done - 1, found, seconds=time.perf_counter() - started,
            improved=evaluations_without_improvement(self.eval_losses) == 0,
        )  # fmt: skip

    def _log(self, result: StepResult, seconds: float, data_wait: float, lost: dict[str, float]) -> None:
        if not math.isfinite(result.gradient_norm) and self.policy.clipping != "global":
            self.saved.writer.finish()
            newest = checkpoint.latest(self.checkpoints)
            raise ConveyorError(
                f"step {result.step}: the gradient is not finite (loss {result.loss}), and with clipping "
                f"{self.policy.clipping!r} other layers are updated already. The last checkpoint is {newest or 'none'}"
            )
        self.log.step(
            result, steps_applied=self.steps_applied, seconds=seconds, data_wait_seconds=data_wait,
            # On a CPU, counted in one step near the end.
            device_peak_bytes=self._device_peak_bytes() or None, host_peak_bytes=self.host_peak.peak_bytes,
            allocator_retries=self.retries.count(), lost_seconds=lost,
        )  # fmt: skip
        if advice := self.retries.advice(warm=result.step >= self.first_step + WARM_UP_STEPS):
            self.say(advice)
        self.steps_applied += result.applied  # a skipped step leaves the schedule where it was
        finite_loss = math.isfinite(result.loss)
        self.lost = "gradient" if finite_loss else "loss"
        self.lost_steps = 0 if finite_loss and result.applied else self.lost_steps + 1
        if self.lost_steps >= MOST_LOST_STEPS:
            raise self._diverged(result.step + 1) if self.steps_applied else self._never_trained(result.step + 1)
        if not result.applied:
            self.say(f"step {result.step}: the gradient is not finite; the step is skipped, nothing has changed")

    def _never_trained(self, steps: int) -> ConveyorError:
        return ConveyorError(
            f"all {steps} steps were skipped: no gradient was finite, so nothing was trained; look for NaN in the "
            "model's weights, or lower learning_rate"
        )

    def _diverged(self, steps_done: int) -> ConveyorError:
        self.saved.writer.finish()
        return ConveyorError(
            f"the {self.lost} has not been finite since step {steps_done - self.lost_steps}: the weights have "
            "diverged, and no model is exported; lower learning_rate or give it a warm-up. The last checkpoint is "
            f"{checkpoint.latest(self.checkpoints) or 'none'}"
        )

    def _export(self) -> Path:
        self.saved.writer.finish()
        tokenizer, config = self.dataset.tokenizer, dict(self.model_config)
        save_tokenizer = None
        if isinstance(tokenizer, ByteTokenizer):
            save_tokenizer = tokenizer.save
            config |= {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "bos_token_id": None}
        with doing("exporting the model"):
            return export(
                self.directory / EXPORTED, model=self.model, config=config, states=self.trainer.memory.states(),
                source=self.model_folder, save_tokenizer=save_tokenizer,
            )  # fmt: skip

    def _outcome(self, results: list[StepResult], seconds: list[float], exported: Path | None) -> Outcome:
        timed = seconds[WARM_UP_STEPS:] or seconds[1:] or seconds
        step_seconds = statistics.median(timed)
        timeline = self.timeline
        assert timeline is not None, "the first step is recorded"
        # The step that was recorded is seldom the median one.
        breakdown = {cause: s * step_seconds / timeline.step_seconds for cause, s in timeline.breakdown().items()}
        figures = step_figures(
            self.model, self.workload, step_seconds, device_peak_bytes=self._device_peak_bytes(),
            host_peak_bytes=self.host_peak.peak_bytes, breakdown_seconds=breakdown,
        )  # fmt: skip
        # Padding is computed, so it counts as FLOPs; it is not text, so it does not count as tokens.
        real_tokens = statistics.mean(result.num_tokens for result in results[-len(timed) :])
        figures = figures.model_copy(update={"tokens_per_second": real_tokens / step_seconds})
        return Outcome(
            figures, timeline, [r.clip_factor for r in results], len(timed), [r.loss for r in results], exported
        )

    def _device_peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return self.context_bytes + torch.cuda.max_memory_reserved(self.device)
        # Counted while a step was recorded: what the operations' buffers took.
        return max((point.num_bytes for point in self.trainer.runner.memory()), default=0)

    def close(self) -> None:
        """Let a checkpoint that is being written become whole, also after a failure; end threads, free memory."""
        try:
            for logger in self.loggers:
                logger.close()
            self.saved.writer.finish()
        finally:
            self.trainer.close()


@contextmanager
def spared_collector() -> Iterator[Callable[[], None]]:
    """Gives what to call once all that stays is there; until the end, Python's collector walks what came later only.

    Modules, compiled layers and the compiler's own state are 600,000 objects. A collection among them takes 0.3 s, with
    the interpreter lock held: the GPU would run out of launches.
    """

    def set_aside() -> None:
        gc.collect()
        gc.freeze()

    try:
        yield set_aside
    finally:
        gc.unfreeze()


def _device_bytes_beside_allocator(device: torch.device) -> int:
    """Bytes of the device that its allocator does not know of: the context, kernels once loaded, other processes."""
    if device.type != "cuda":
        return 0
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free) - torch.cuda.memory_reserved(device)
