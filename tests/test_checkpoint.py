import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import tiny_config, tiny_spec, zero_states

import executor.checkpoint
import executor.folder
import executor.shard
from executor.checkpoint import CheckpointRecord, Progress, checkpoint_bytes, latest, load, read_record, save
from executor.huggingface import initialise
from executor.planes import merge_planes
from executor.store import PLANES, BlockLayout, BlockState, HostStore, tensor_view
from simulator.errors import ConveyorError, InputError

PROGRESS = Progress(step=7, applied_steps=6, data_position=7, seed=3)
SETTINGS = {"seed": 3, "data": {"path": "text", "sequence_length": 8}, "betas": (0.9, 0.95)}


def trained_states(model, precision="bf16", seed=0) -> list[BlockState]:
    """States in which every plane of every tensor is random, and the padding zero."""
    torch.manual_seed(seed)
    states = zero_states(model, precision)
    for index, state in enumerate(states):
        for tensor in model.block(index).tensors:
            tensor_view(state.weights, tensor).normal_()
            tensor_view(state.first_moment, tensor).normal_()
            tensor_view(state.second_moment, tensor).exponential_()
            if state.low is not None:
                tensor_view(state.low, tensor).random_(-(2**15), 2**15)
    return states


def same(left: list[BlockState], right: list[BlockState]) -> bool:
    planes = ("weights", "low", "first_moment", "second_moment")
    pairs = [(getattr(a, plane), getattr(b, plane)) for a, b in zip(left, right, strict=True) for plane in planes]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def saved(folder, model, states, *, step=7, keep=3, settings=SETTINGS) -> Path:
    progress = PROGRESS.model_copy(update={"step": step})
    return save(folder, model=model, states=states, progress=progress, settings=settings, keep=keep)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("tied", [True, False])
def test_state_and_progress_come_back_bit_for_bit(tmp_path, precision, tied):
    model = tiny_spec(tied=tied)
    states = trained_states(model, precision)
    path = saved(tmp_path, model, states)
    fresh = zero_states(model, precision)
    assert load(path, model=model, states=fresh, settings=SETTINGS) == PROGRESS
    assert same(states, fresh)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert 0.5 * checkpoint_bytes(model, precision) < size <= checkpoint_bytes(model, precision)


def test_loading_is_blind_to_placement(tmp_path):
    model = tiny_spec()
    states = trained_states(model)
    path = saved(tmp_path, model, states)
    layouts = [BlockLayout(PLANES)] * model.num_blocks
    store = HostStore(model, layouts, precision="bf16", gradient_format="fp32", pinning=None)
    elsewhere = [store.state(index) for index in range(model.num_blocks)]
    load(path, model=model, states=elsewhere, settings=SETTINGS)
    assert same(states, elsewhere)


@pytest.mark.gpu
def test_device_state_is_saved_and_loaded_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(executor.shard, "PIECE_BYTES", 1000)
    model = tiny_spec()
    states = trained_states(model)
    device = [BlockState(s.weights.cuda(), s.low.cuda(), s.first_moment.cuda(), s.second_moment.cuda()) for s in states]
    path = saved(tmp_path, model, device)
    fresh = zero_states(model, "bf16", device="cuda")
    load(path, model=model, states=fresh, settings=SETTINGS)
    assert same(device, fresh)


def test_small_pieces_change_nothing(tmp_path, monkeypatch):
    model = tiny_spec()
    states = trained_states(model)
    whole = saved(tmp_path / "whole", model, states)
    monkeypatch.setattr(executor.shard, "PIECE_BYTES", 1000)
    pieces = saved(tmp_path / "pieces", model, states)
    for file in whole.iterdir():
        assert file.read_bytes() == (pieces / file.name).read_bytes()
    fresh = zero_states(model, "bf16")
    load(whole, model=model, states=fresh, settings=SETTINGS)
    assert same(states, fresh)


def test_other_tools_can_read_a_checkpoint(tmp_path):
    model = tiny_spec()
    states = trained_states(model)
    file = load_file(saved(tmp_path, model, states) / "block-00002.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = next(tensor for tensor in model.block(2).tensors if tensor.name == "mlp.up_proj.weight")
    assert torch.equal(file[f"second_moment.{name}"], tensor_view(states[2].second_moment, tensor))
    master = merge_planes(file[f"weights.{name}"], file[f"low.{name}"])
    assert torch.equal(master, tensor_view(merge_planes(states[2].weights, states[2].low), tensor))


def test_newest_are_kept(tmp_path):
    model = tiny_spec()
    states = trained_states(model, "fp32")
    assert latest(tmp_path / "none yet") is None
    for step in (10, 20, 30):
        saved(tmp_path, model, states, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
    assert latest(tmp_path) == tmp_path / "step-00000030"

    # After going back to step 20 the new branch is the newest, whatever the steps say.
    saved(tmp_path, model, states, step=25, keep=2)
    assert latest(tmp_path) == tmp_path / "step-00000025"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000025", "step-00000030"]


class Killed(BaseException):
    pass


class Guillotine:
    """Ends the process, as far as the disk can tell, at the n-th change of the file system."""

    def __init__(self, monkeypatch, allowed: int) -> None:
        self.allowed = allowed
        for owner, name in (
            (Path, "rename"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
            (CheckpointRecord, "save"),
            (executor.checkpoint, "write_shard"),
        ):
            monkeypatch.setattr(owner, name, self._guarded(getattr(owner, name)))

    def _guarded(self, change):
        def guarded(*args, **kwargs):
            if self.allowed == 0:
                raise Killed
            self.allowed -= 1
            result = change(*args, **kwargs)
            if self.allowed == 0 and change is executor.shard.write_shard:  # killed in the middle of a file
                data = args[0].read_bytes()
                args[0].write_bytes(data[: len(data) // 2])
            return result

        return guarded


@pytest.mark.parametrize("step", [10, 11])
def test_killed_at_any_point_of_a_save_a_whole_checkpoint_is_there(tmp_path, step):
    """Step 10 again replaces the only checkpoint; step 11 adds one and removes it (keep = 1)."""
    model = tiny_spec(num_hidden_layers=1)
    old, new = trained_states(model, seed=1), trained_states(model, seed=2)
    outcomes = []
    for allowed in range(100):
        folder = tmp_path / str(allowed)
        saved(folder, model, old, step=10)
        with pytest.MonkeyPatch.context() as monkeypatch:
            Guillotine(monkeypatch, allowed)
            try:
                saved(folder, model, new, step=step, keep=1)
                finished = True
            except Killed:
                finished = False
        path = latest(folder)
        assert path is not None, f"no checkpoint left after {allowed} changes"
        found = zero_states(model, "bf16")
        load(path, model=model, states=found, settings=SETTINGS)
        assert same(found, old) or same(found, new)
        outcomes.append(same(found, new))
        # The next save clears up, whatever was left.
        saved(folder, model, old, step=12, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-00000012"]
        if finished:
            break
    assert finished
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False
    assert outcomes[-1] is True


def test_failing_disk_leaves_earlier_checkpoints_and_no_litter(tmp_path, monkeypatch):
    model = tiny_spec()
    states = trained_states(model)
    first = saved(tmp_path, model, states, step=1)

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executor.checkpoint, "write_shard", refuse)
    with pytest.raises(ConveyorError, match=r"step-00000002.*No space left on device.*earlier checkpoints are whole"):
        saved(tmp_path, model, states, step=2)
    assert list(tmp_path.iterdir()) == [first]


def test_small_disk_is_refused_with_the_bytes(tmp_path, monkeypatch):
    model = tiny_spec()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(ConveyorError, match=rf"a checkpoint needs {checkpoint_bytes(model, 'bf16')} bytes"):
        saved(tmp_path / "checkpoints", model, trained_states(model))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "swapped"])
def test_damaged_file_is_refused_by_name(tmp_path, damage):
    model = tiny_spec()
    path = saved(tmp_path, model, trained_states(model))
    file = path / "block-00002.safetensors"
    data = bytearray(file.read_bytes())
    match damage:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(data[:-10])
        case "flipped":
            data[-100] ^= 4
            file.write_bytes(data)
        case "swapped":
            shutil.copyfile(path / "block-00001.safetensors", file)
    with pytest.raises(InputError) as error:
        load(path, model=model, states=zero_states(model, "bf16"), settings=SETTINGS)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "key", "values"),
    [
        ({"seed": 4}, "seed", ("4", "3")),
        ({"data": {"path": "text", "sequence_length": 16}}, "data.sequence_length", ("16", "8")),
        ({"betas": (0.9, 0.99)}, "betas", ("[0.9, 0.99]", "[0.9, 0.95]")),
        ({"shuffle": False}, "shuffle", ("False", "'not set'")),
        ({"shuffle": None}, "shuffle", ("None", "'not set'")),
    ],
)
def test_changed_settings_are_refused_unless_accepted(tmp_path, changes, key, values):
    model = tiny_spec()
    path = saved(tmp_path, model, trained_states(model))
    fresh = zero_states(model, "bf16")
    settings = SETTINGS | changes
    with pytest.raises(InputError) as error:
        load(path, model=model, states=fresh, settings=settings)
    assert f"{key} is {values[0]}, the checkpoint was made with {values[1]}" in str(error.value)
    assert same(fresh, zero_states(model, "bf16"))
    assert load(path, model=model, states=fresh, settings=settings, accept={key}) == PROGRESS


def test_other_model_and_precision_are_refused_by_key(tmp_path):
    model, other = tiny_spec(), tiny_spec(num_hidden_layers=3)
    path = saved(tmp_path, model, trained_states(model))
    with pytest.raises(InputError, match=r"model\.num_layers is 3, the checkpoint was made with 2"):
        load(path, model=other, states=zero_states(other, "bf16"), settings=SETTINGS)
    with pytest.raises(InputError, match="precision is 'fp32', the checkpoint was made with 'bf16'"):
        load(path, model=model, states=zero_states(model, "fp32"), settings=SETTINGS)


def test_paths_that_are_no_checkpoints_are_refused(tmp_path):
    model = tiny_spec()
    path = saved(tmp_path, model, trained_states(model))
    with pytest.raises(InputError, match=rf"did you mean {path}\?"):
        read_record(tmp_path)
    with pytest.raises(InputError, match=rf"did you mean {path}\?"):
        read_record(tmp_path / "step-0000007")
    record = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(InputError, match="format 99"):
        read_record(path)
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(InputError, match=r"checkpoint\.json"):
        latest(tmp_path)


def test_initialised_model_survives_save_and_load(tmp_path):
    config = tiny_config()
    model = tiny_spec()
    states = zero_states(model, "bf16")
    initialise(model, config, states, seed=0)
    path = saved(tmp_path, model, states)
    fresh = zero_states(model, "bf16")
    load(path, model=model, states=fresh, settings=SETTINGS)
    assert same(states, fresh)
