"""The checkpoints of one run: what they say of it, how a resume compares with them, and saves beside training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from executor import checkpoint
from executor.checkpoint_writer import CheckpointWriter
from executor.out_of_memory import doing
from executor.resume import ResumeChanges, changed_settings, flat_settings, rounding_changes
from executor.trainer import Trainer
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.program import Kind


class RunCheckpoints:
    """Saves of a run into `folder`, the newest `keep` of them. `settings` are those that a resumed run must share."""

    def __init__(
        self,
        folder: Path,
        model: ModelSpec,
        workload: Workload,
        policy: Policy,
        *,
        settings: Mapping[str, Any],
        keep: int,
        device: torch.device,
    ) -> None:
        self.folder, self.model, self.precision = folder, model, workload.precision
        self.settings, self.keep = settings, keep
        self.rounding = _rounding(workload, policy, device)
        self.writer = CheckpointWriter()

    def compare(self, path: Path, record: checkpoint.CheckpointRecord, *, changes: ResumeChanges) -> list[str]:
        """What to tell of a resume from the checkpoint at `path`: accepted changes, or results to rounding only.

        Raises InputError for settings that differ from the checkpoint's and are not accepted.
        """
        settings = flat_settings(self.model, self.precision, self.settings)
        if changed := changed_settings(path, record.settings, settings, changes=changes):
            return [f"going on with other settings, as resume_changes=accept asks: {'; '.join(changed)}"]
        if rounded := rounding_changes(record.rounding, self.rounding):
            return [f"going on equal to rounding, not bit for bit: {'; '.join(rounded)}"]
        return []

    def save(self, trainer: Trainer, *, seed: int, beside_training: bool = False, keep_all: bool = False) -> None:
        """Write the state of a drained trainer, and remove old checkpoints, but for `keep_all`.

        `beside_training`: return at once and write while the next steps run, up to the updates that must wait for it.
        """
        progress = checkpoint.Progress(
            step=trainer.steps_done, applied_steps=trainer.steps_applied(), data_position=trainer.steps_done, seed=seed
        )
        updates = [operation.block for operation in trainer.program.steady if operation.kind is Kind.UPDATE]
        # In the order in which the next step will change blocks, so that its updates wait as little as may be.
        order = list(dict.fromkeys((*updates, *range(self.model.num_blocks))))
        states = trainer.memory.states()
        keep = checkpoint.num_complete(self.folder) + 1 if keep_all else self.keep

        def write(written: Callable[[int], None]) -> None:
            with doing(f"saving the checkpoint of step {progress.step}"):
                checkpoint.save(
                    self.folder, model=self.model, states=states, progress=progress, settings=self.settings,
                    keep=keep, rounding=self.rounding, order=order, written=written,
                )  # fmt: skip

        self.writer.start(write, blocks=updates)
        if not beside_training:
            self.writer.finish()


def _rounding(workload: Workload, policy: Policy, device: torch.device) -> dict[str, Any]:
    """What decides the last bits of results, beside the settings."""
    cuda = device.type == "cuda"
    return {
        "micro_batch_rows": policy.micro_batch_rows,
        "head_chunk_tokens": policy.head_chunk_tokens,
        "compiled": workload.compiled,
        # Compiled on a GPU, levels differ in the last bits; elsewhere they agree.
        "save_levels": list(policy.save_levels) if cuda and workload.compiled else [],
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": str(torch.__version__),
    }
