"""Checkpoints: the whole training state on disk, from which a run goes on as if it had never stopped.

    checkpoints/step-00000200/checkpoint.json          progress, settings, the index: files, tensors, checksums
                              block-00000.safetensors  `weights.NAME`, `low.NAME`, `first_moment.NAME`, ...

A tensor is named by plane and parameter, so a checkpoint knows nothing of placement or of the layout in a block.
Weights are stored as the run holds them: with the low plane they are the fp32 master, bit for bit.
"""

import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import torch

from executor.folder import (
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    appearing_folder,
    discard,
    disk_refused,
    require_free_disk,
    require_path,
)
from executor.resume import flat_settings, require_same_settings
from executor.shard import DTYPES, StoredTensor, read_header, read_tensor, write_shard
from executor.store import BlockState, tensor_view
from simulator.errors import ConveyorError, InputError
from simulator.formats import PRECISIONS, Precision, state_bytes
from simulator.model import ModelSpec
from simulator.nearest import did_you_mean, nearest_name
from simulator.schema import Schema

RECORD_NAME = "checkpoint.json"
FORMAT = 1
_COMPLETE = re.compile(rf"step-\d{{8,}}({re.escape(REPLACED_SUFFIX)})?")
_HEADER_BYTES = 256  # of a tensor's entry in its file and in the record, generously


class Progress(Schema):
    """How far a run has come. Steps that were skipped for a non-finite gradient are done but not applied."""

    step: int = pydantic.Field(ge=0)
    applied_steps: int = pydantic.Field(ge=0)
    data_position: int = pydantic.Field(ge=0)  # the step whose batch comes next
    seed: int


class CheckpointRecord(Schema):
    """What a checkpoint says of itself. `sequence` counts saves: after going back to an older step it still grows."""

    format: int
    sequence: int
    progress: Progress
    settings: dict[str, Any]  # flat, keys with dots
    rounding: dict[str, Any] = pydantic.Field(default_factory=dict)  # what decides the last bits of results
    checksums: dict[str, dict[str, int]]  # file -> tensor -> CRC-32


def checkpoint_bytes(model: ModelSpec, precision: Precision) -> int:
    """Bytes on disk of one checkpoint, at most. A block that is frozen as a whole has weights and nothing else."""
    blocks = [model.block(index) for index in range(model.num_blocks)]
    beside = state_bytes(precision, "fp32")
    values = sum(b.num_parameters * (PRECISIONS[precision].weight + b.trained * beside) for b in blocks)
    return values + 4 * sum(len(b.tensors) for b in blocks) * 2 * _HEADER_BYTES + 2**16


def save(
    folder: Path | str,
    *,
    model: ModelSpec,
    states: Sequence[BlockState],
    progress: Progress,
    settings: Mapping[str, Any],
    keep: int,
    rounding: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
    written: Callable[[int], None] = lambda block: None,
) -> Path:
    """Write `folder`/step-NNNNNNNN and remove all but the newest `keep` checkpoints. Returns the new one's path.

    The checkpoint appears by renaming when all of it is on disk. `settings` (nested, JSON) are those that a resumed
    run must share, `rounding` what changes its results' last bits only. At most one piece of a tensor is copied.
    Blocks are written in `order`; `written` is called with a block's number when its state has been read for the last
    time and is on disk. Raises ConveyorError when the disk is too small or refuses; earlier checkpoints stay whole.
    """
    assert keep >= 1
    folder = Path(folder)
    num_bytes = checkpoint_bytes(model, states[0].precision)
    target = folder / f"step-{progress.step:08}"
    require_free_disk(folder, num_bytes, what="a checkpoint", remedy="free some or save elsewhere")
    existing = _complete(folder, skip_damaged=True)
    flat = flat_settings(model, states[0].precision, settings)
    checksums = {}
    try:
        _remove_leftovers(folder)
        with appearing_folder(target) as partial:
            for index in order if order is not None else range(len(states)):
                tensors = _tensors(model, index, states[index])
                checksums[_block_file(index)] = write_shard(
                    partial / _block_file(index), tensors, metadata={"format": "pt"}
                )
                written(index)
            record = CheckpointRecord(
                format=FORMAT,
                sequence=max((record.sequence for _, record in existing), default=0) + 1,
                progress=progress,
                settings=flat,
                rounding=dict(rounding or {}),
                checksums=dict(sorted(checksums.items())),
            )
            record.save(partial / RECORD_NAME)
        for path, _ in _complete(folder, skip_damaged=True)[:-keep]:
            _remove(path)
    except OSError as error:
        refused = disk_refused(target, error, what="the checkpoint", num_bytes=num_bytes)
        raise ConveyorError(f"{refused}; earlier checkpoints are whole") from error
    return target


def latest(folder: Path | str) -> Path | None:
    """The newest complete checkpoint in a folder, or None.

    Raises InputError when a record is damaged: which checkpoint is the newest is then unknown.
    """
    folder = Path(folder)
    try:
        complete = _complete(folder)
    except InputError as error:
        raise InputError(f"{error}{_others(folder)}") from error
    return complete[-1][0] if complete else None


def without_record(folder: Path | str) -> Path | None:
    """A checkpoint that is not whole for want of its record, or None. A save that was killed leaves none."""
    folder = Path(folder)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((p for p in paths if _COMPLETE.fullmatch(p.name) and not (p / RECORD_NAME).is_file()), None)


def num_complete(folder: Path | str) -> int:
    """How many whole checkpoints a folder holds."""
    return len(_complete(Path(folder), skip_damaged=True))


def to_resume(resume: str, folder: Path) -> Path | None:
    """The checkpoint that the setting `resume` asks for: a path, or with "auto" the newest in `folder`, if any."""
    if resume == "never":
        return None
    if resume == "auto":
        return latest(folder)
    if len(Path(resume).parts) == 1 and not Path(resume).exists():
        hint = did_you_mean(nearest_name(resume, ("never", "auto")))
        raise InputError(f"resume: {resume!r} is neither 'never', 'auto' nor the path of a checkpoint{hint}")
    return Path(resume)


def read_record(path: Path | str) -> CheckpointRecord:
    """A checkpoint's record. Raises InputError when `path` is no checkpoint of this format."""
    path = require_path(path, what="checkpoint")
    if not (path / RECORD_NAME).is_file():
        newest = latest(path) if path.is_dir() else None
        hint = f"; did you mean {newest}?" if newest else ""
        raise InputError(f"{path}: is not a checkpoint, it has no {RECORD_NAME}{hint}")
    record = CheckpointRecord.load(path / RECORD_NAME)
    if record.format != FORMAT:
        raise InputError(f"{path}: has checkpoint format {record.format}, this version reads {FORMAT}")
    done, applied = record.progress.step, record.progress.applied_steps
    if applied > done:
        raise InputError(f"{path / RECORD_NAME}: applied_steps is {applied}, more than the {done} steps done (damaged)")
    return record


def load(
    path: Path | str,
    *,
    model: ModelSpec,
    states: Sequence[BlockState],
    settings: Mapping[str, Any],
    accept: Collection[str] = (),
) -> Progress:
    """Fill `states`, wherever they live, from a checkpoint. Returns how far the run had come.

    Raises InputError when model, precision or a setting differs from the checkpoint's (naming keys and values; keys
    in `accept` may differ), and when a file is missing, cut off or damaged (naming it). Settings and sizes are
    checked before the first value is written; a flipped bit is found while reading, so `states` are of no use then.
    """
    path = Path(path)
    record = read_record(path)
    require_same_settings(path, record.settings, flat_settings(model, states[0].precision, settings), accept)
    try:
        _fill(path, record, model, states)
    except InputError as error:
        raise InputError(f"{error}{_others(path.parent, path)}") from error
    return record.progress


def _fill(path: Path, record: CheckpointRecord, model: ModelSpec, states: Sequence[BlockState]) -> None:
    files: list[dict[str, StoredTensor]] = []
    for index, state in enumerate(states):
        file = path / _block_file(index)
        if not file.exists():
            raise InputError(f"{file}: is missing from the checkpoint")
        stored = read_header(file)
        for name, target in _tensors(model, index, state).items():
            source = stored.get(name)
            if source is None or source.shape != tuple(target.shape) or DTYPES.get(source.dtype) != target.dtype:
                raise InputError(f"{file}: tensor {name!r} is missing or has another shape or dtype than the run's")
        files.append(stored)
    for index, state in enumerate(states):
        checksums = record.checksums.get(_block_file(index), {})
        for name, target in _tensors(model, index, state).items():
            if read_tensor(files[index][name], target) != checksums.get(name):
                raise InputError(f"{files[index][name].file}: is damaged: the checksum of tensor {name!r} is wrong")


def _others(folder: Path, damaged: Path | None = None) -> str:
    """Where a run may go on instead: the newest checkpoint of a folder whose record is whole, but for `damaged`."""
    whole = [path for path, _ in _complete(folder, skip_damaged=True) if path != damaged]
    return f"; go on from another one with resume={whole[-1]}" if whole else ""


def _tensors(model: ModelSpec, index: int, state: BlockState) -> dict[str, torch.Tensor]:
    """A block's state as it is stored: views named by plane and parameter."""
    planes = {"weights": state.weights, "first_moment": state.first_moment, "second_moment": state.second_moment}
    planes |= {"low": state.low}
    return {
        f"{plane}.{model.block_prefix(index)}{tensor.name}": tensor_view(values, tensor)
        for plane, values in planes.items()
        if values is not None
        for tensor in model.block(index).tensors
    }


def _block_file(index: int) -> str:
    return f"block-{index:05}.safetensors"


def _complete(folder: Path, *, skip_damaged: bool = False) -> list[tuple[Path, CheckpointRecord]]:
    """Complete checkpoints, oldest save first. Raises InputError for a damaged record, unless those are passed over."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if _COMPLETE.fullmatch(path.name) and (path / RECORD_NAME).is_file():
            try:
                found.append((path, CheckpointRecord.load(path / RECORD_NAME)))
            except InputError:
                if not skip_damaged:
                    raise
    return sorted(found, key=lambda item: item[1].sequence)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left behind: half-written folders, and replaced ones whose successor is complete."""
    for leftover in folder.glob(f"step-*{PARTIAL_SUFFIX}"):
        discard(leftover)
    for replaced in folder.glob(f"step-*{REPLACED_SUFFIX}"):
        if (replaced.with_name(replaced.name.removesuffix(REPLACED_SUFFIX)) / RECORD_NAME).is_file():
            _remove(replaced)


def _remove(path: Path) -> None:
    # Renamed first: a kill while its files go must not leave a name that counts as complete.
    doomed = path.with_name(path.name + PARTIAL_SUFFIX)
    path.rename(doomed)
    shutil.rmtree(doomed)
