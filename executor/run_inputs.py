"""What a run starts from: data, number of steps, learning rates, the checkpoint that it goes on from.

All of it is checked when it is opened, before a machine is probed, a plan is made or memory is allocated.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from executor import checkpoint
from executor.config import SYNTHETIC_DATA, TrainConfig
from executor.data.corpus import DataChoices
from executor.data.dataset import Dataset, open_datasets
from executor.evaluation import evaluations_without_improvement
from executor.folder import require_free_disk
from executor.huggingface import ROOM_BYTES, export_bytes, has_weights, require_weights
from executor.loggers import require_loggers
from executor.record import RunRecord
from executor.resume import changed_settings, flat_settings
from executor.run_directory import CHECKPOINTS, EXPORTED, RECORD, load_eval_losses
from simulator.errors import InputError
from simulator.freezing import frozen_patterns
from simulator.model import ModelSpec
from simulator.units import counted


class DiskNeed(NamedTuple):
    """What a run adds to what is on its disk already, at most at any time."""

    num_checkpoints: int
    checkpoint_bytes: int  # of one
    model_bytes: int  # of the exported model

    @property
    def num_bytes(self) -> int:
        return self.num_checkpoints * self.checkpoint_bytes + self.model_bytes


class RunInputs:
    """The inputs of a run with `config`, whose sizes of a step are all set. `say` hears what takes long.

    Raises InputError naming file, row or key; everything is as it was then.
    """

    def __init__(self, config: TrainConfig, model: ModelSpec, *, say: Callable[[str], None] = print) -> None:
        self.config, self.model = config, model
        self.directory = Path(config.output)
        self.checkpoints = self.directory / CHECKPOINTS
        folder = _model_folder(config)
        self.model_folder = folder if folder is not None and has_weights(folder) else None
        require_loggers(config.loggers)
        if self.model_folder is not None and checkpoint.to_resume(config.resume, self.checkpoints) is None:
            require_weights(self.model_folder, model)
        self.dataset, self.eval_dataset = run_data(config, model, say=say)
        self.num_steps = self._num_steps()
        self.schedule = config.schedule(self.num_steps)
        self.find_checkpoint()
        self._require_disk()

    @property
    def saves(self) -> bool:
        """Whether the run leaves weights: a benchmark on random tokens has none worth keeping."""
        return self.config.data != SYNTHETIC_DATA or self.config.save_every is not None

    def find_checkpoint(self) -> None:
        """Look for the checkpoint to go on from: another process may have left one since the last look.

        Sets `resume_from`, its `record`, `first_step`, the `eval_losses` until then, and `evaluation_missed`: whether
        one is due that was not made. Raises InputError for a run that is complete, and for settings that differ from
        the checkpoint's and are not accepted.
        """
        config = self.config
        self.resume_from = checkpoint.to_resume(config.resume, self.checkpoints)
        self.record = None if self.resume_from is None else checkpoint.read_record(self.resume_from)
        self.first_step = 0 if self.record is None else self.record.progress.step
        self.eval_losses: list[float] = []
        self.evaluation_missed = False
        if self.resume_from is None or self.record is None:
            if config.resume == "auto":
                self._require_nothing_to_lose()
            return
        exported = not self.saves or (self.directory / EXPORTED).exists()
        if self.first_step > self.num_steps:
            raise InputError(
                f"{self.resume_from}: {self.first_step} steps are done, more than the {self.num_steps} of this run; "
                "raise max_steps to go on"
            )
        if self.first_step == self.num_steps and exported:
            raise InputError(f"{self.resume_from}: the run is complete, all {self.num_steps} steps are done")
        evaluations = load_eval_losses(self.directory, before_step=self.first_step)
        self.eval_losses = list(evaluations.values())
        # A run that is stopped saves first of all, and leaves the evaluation of that step to the one that goes on.
        self.evaluation_missed = self.evaluation_due(self.first_step) and self.first_step - 1 not in evaluations
        if exported and self.should_stop_early(self.eval_losses):
            raise InputError(
                f"{self.resume_from}: the run is complete, it stopped early after {self.first_step} of "
                f"{self.num_steps} steps; to go on, raise early_stop_patience or leave it out"
            )
        settings = flat_settings(self.model, config.precision, self.settings())
        changed_settings(self.resume_from, self.record.settings, settings, changes=config.resume_changes)

    def _require_nothing_to_lose(self) -> None:
        """Without a checkpoint a run begins at its first step: not over what a finished one left, or part of one."""
        elsewhere = "set output to another directory, or move it away to start again"
        if (self.directory / EXPORTED).exists():
            raise InputError(
                f"{self.directory / EXPORTED}: is a trained model, and there is no checkpoint in {self.checkpoints} to "
                f"go on from; {elsewhere}"
            )
        if (self.directory / RECORD).exists() and RunRecord.load(self.directory / RECORD).status == "ok":
            raise InputError(
                f"{self.directory / RECORD}: the run is complete, and left no checkpoint to go on from; {elsewhere}"
            )
        if (damaged := checkpoint.without_record(self.checkpoints)) is not None:
            raise InputError(f"{damaged}: the checkpoint has lost its record, and no other one is whole; {elsewhere}")

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share: all that decides numbers, nothing of placement."""
        config = self.config
        return {
            "data": self.dataset.settings(),
            "optimizer": {
                "learning_rate": config.learning_rate, "lr_schedule": config.lr_schedule,
                "warmup_steps": self.schedule.warmup_steps, "max_steps": self.num_steps, "betas": list(config.betas),
                "epsilon": config.epsilon, "weight_decay": config.weight_decay, "max_grad_norm": config.max_grad_norm,
                **({"min_lr_ratio": config.min_lr_ratio} if config.min_lr_ratio else {}),
                **({"wsd_decay_ratio": config.wsd_decay_ratio} if config.lr_schedule == "wsd" else {}),
            },
            **({"freeze": list(frozen_patterns(self.model))} if config.freeze else {}),
            "gradient_format": config.gradient_format,
            "clipping": config.clipping,
        }  # fmt: skip

    def should_stop_early(self, eval_losses: list[float]) -> bool:
        """Whether so many evaluations in a row have brought nothing that the run ends."""
        patience = self.config.early_stop_patience
        return patience is not None and evaluations_without_improvement(eval_losses) >= patience

    def evaluation_due(self, steps_done: int) -> bool:
        """Whether an evaluation follows these steps; one more follows the last step of all."""
        every = self.config.eval_every
        return self.eval_dataset is not None and every is not None and steps_done % every == 0

    def num_evaluations(self) -> int:
        """Evaluations from `first_step` to the end of the run."""
        if self.eval_dataset is None:
            return 0
        to_come = num_times(self.config.eval_every, first_step=self.first_step, num_steps=self.num_steps)
        return to_come + self.evaluation_missed

    def num_saves(self) -> int:
        """Checkpoints that are written from `first_step` to the end of the run."""
        return num_times(self.config.save_every, first_step=self.first_step, num_steps=self.num_steps)

    def stretches(self) -> list[int]:
        """Steps of each stretch from `first_step` on: a run is drained before it evaluates or saves, and at its end."""
        ends = {self.num_steps}
        evaluated = self.config.eval_every if self.eval_dataset is not None else None
        for every in (evaluated, self.config.save_every):
            if every:
                ends.update(range(every * (self.first_step // every + 1), self.num_steps, every))
        return [end - begin for begin, end in pairwise([self.first_step, *sorted(ends)]) if begin < end]

    def model_bytes(self) -> int:
        """Bytes on disk of the weights that the run begins with; 0 where they start at random."""
        if self.model_folder is None:
            return 0
        return sum(path.stat().st_size for path in self.model_folder.glob("*.safetensors"))

    def disk_need(self) -> DiskNeed:
        """The checkpoints that a run adds, one more than it keeps while it writes, and its model."""
        there = min(checkpoint.num_complete(self.checkpoints), self.config.keep_checkpoints)
        return DiskNeed(
            min(self.num_saves(), self.config.keep_checkpoints + 1 - there),
            checkpoint.checkpoint_bytes(self.model, self.config.precision),
            export_bytes(self.model, self.config.precision),
        )

    def _require_disk(self) -> None:
        if self.saves:
            need = self.disk_need()
            what = f"{counted(need.num_checkpoints, 'checkpoint')} and the exported model"
            remedy = "lower keep_checkpoints, or set output to a larger disk"
            require_free_disk(self.directory, need.num_bytes + ROOM_BYTES, what=what, error=InputError, remedy=remedy)

    def _num_steps(self) -> int:
        if self.config.max_steps is not None:
            return self.config.max_steps
        if self.dataset.steps_per_epoch is None:
            raise InputError("max_steps: synthetic data has no end; set the number of steps")
        return math.ceil((self.config.num_epochs or 1) * self.dataset.steps_per_epoch)


def num_times(every: int | None, *, first_step: int, num_steps: int) -> int:
    """How often something is done after `first_step` that is done after each `every` steps, and after the last one."""
    return 1 + ((num_steps - 1) // every - first_step // every if every else 0)


def run_data(config: TrainConfig, model: ModelSpec, *, say: Callable[[str], None]) -> tuple[Dataset, Dataset | None]:
    """What a run trains on, and what it is evaluated on, if anything. Raises InputError naming file and row."""
    workload = config.workload(compiled=False)
    folder = _model_folder(config)
    choices = DataChoices(
        columns=config.columns, train_on_prompt=config.train_on_prompt, skip_invalid=config.skip_invalid,
        long_samples=config.long_samples, packing=config.packing, cache=config.cache,
    )  # fmt: skip
    return open_datasets(
        config.data, eval_source=config.eval_data, eval_fraction=config.eval_fraction, vocab_size=model.vocab_size,
        sequence_length=workload.sequence_length, rows_per_step=workload.rows_per_step, seed=config.seed,
        model_folder=folder if folder is not None and folder.is_dir() else None, choices=choices, say=say,
    )  # fmt: skip


def _model_folder(config: TrainConfig) -> Path | None:
    return Path(config.model) if config.model is not None else None
