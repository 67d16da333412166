"""A checkpoint written while training goes on is the state at the moment of the save, bit for bit."""

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from executor import checkpoint
from executor.checkpoint_writer import CheckpointWriter
from executor.store import zero_state
from executor.trainer import Trainer
from simulator.model import model_spec
from simulator.policy import Workload, uniform_policy
from simulator.program import Kind
from tests.tiny import ROWS, SEQUENCE, make_trainer, random_weights, state_bits, tiny_batches, tiny_config

PATIENCE_SECONDS = 20.0  # a test that waits longer has found a deadlock


def trainer_of(clipping: str, device: str) -> Trainer:
    """Block 3 is updated by the host, the others where the model computes; of 1, 2 and 4 the state streams there."""
    config = tiny_config()
    workload = Workload.model_validate(
        {"sequence_length": SEQUENCE, "tokens_per_step": ROWS * SEQUENCE, "precision": "bf16", "clipping": clipping}
    )
    homes = {
        "weight_homes": ("device", "device", "host", "host", "device", "device"),
        "optimizer_homes": ("device", "streamed", "streamed", "host", "streamed", "device"),
        "gradient_homes": ("device", "device", "device", "host", "device", "device"),
    }
    policy = uniform_policy(
        model_spec(config), workload, micro_batch_rows=2, groups=(2, 1), head_chunk_tokens=10
    ).model_copy(update=homes)
    weights = random_weights(config, torch.float32)
    limit = None if clipping == "none" else 0.5
    return make_trainer(config, workload, policy, weights, max_grad_norm=limit, device=device)


def save_beside(trainer: Trainer, writer: CheckpointWriter, folder: Path, before_block: Callable[[], None]) -> None:
    """Start to save a drained trainer, block by block in the order of its updates, as a run does."""
    updates = [operation.block for operation in trainer.program.steady if operation.kind is Kind.UPDATE]
    progress = checkpoint.Progress(step=trainer.steps_done, applied_steps=1, data_position=1, seed=0)
    write_shard = checkpoint.write_shard

    def slow(*arguments: Any, **named: Any) -> dict[str, int]:
        before_block()
        return write_shard(*arguments, **named)

    def write(written: Callable[[int], None]) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(checkpoint, "write_shard", slow)
            checkpoint.save(
                folder, model=trainer.model, states=trainer.memory.states(), progress=progress, settings={}, keep=9,
                order=updates, written=written,
            )  # fmt: skip

    writer.start(write, blocks=updates)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("clipping", ["global", "layerwise", "none"])
def test_steps_beside_a_slow_save_do_not_reach_into_it(tmp_path: Path, clipping: str, device: str) -> None:
    trainer, undisturbed = trainer_of(clipping, device), trainer_of(clipping, device)
    writer = CheckpointWriter()
    trainer.operations.before_update = writer.before_update
    batches = tiny_batches(5)
    for batch in batches[:2]:
        trainer.step(batch)
    trainer.drain()
    expected = state_bits(trainer)
    # Nothing is read before the next step asks to change it.
    asked = threading.Event()
    trainer.operations.before_update = lambda block: (asked.set(), writer.before_update(block))[1]
    save_beside(trainer, writer, tmp_path, lambda: (asked.wait(1.0), time.sleep(0.01))[1])
    for batch in batches[2:]:
        trainer.step(batch)
    trainer.drain()
    writer.finish()
    assert writer.waited_seconds > 0

    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    model = trainer.model
    states = [zero_state(model.block(block), precision="bf16", device="cpu") for block in range(model.num_blocks)]
    checkpoint.load(newest, model=model, states=states, settings={})
    planes = [p for s in states for p in (s.weights, s.low, s.first_moment, s.second_moment) if p is not None]
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(planes, expected, strict=True))

    # And the save did not reach into the steps.
    for batch in batches:
        undisturbed.step(batch)
    undisturbed.drain()
    assert all(torch.equal(a, b) for a, b in zip(state_bits(trainer), state_bits(undisturbed), strict=True))
    assert not torch.equal(state_bits(trainer)[0], expected[0])
    for one in (trainer, undisturbed):
        one.close()


def test_a_block_may_change_as_soon_as_it_is_written_and_not_before() -> None:
    writer = CheckpointWriter()
    steps = [threading.Event() for _ in range(2)]

    def write(written: Callable[[int], None]) -> None:
        for block, step in enumerate(steps):
            assert step.wait(PATIENCE_SECONDS)
            written(block)

    writer.start(write, blocks=range(2))
    writer.before_update(7)  # of no block that is saved
    changed = [threading.Thread(target=writer.before_update, args=(block,)) for block in range(2)]
    for thread in changed:
        thread.start()
    steps[0].set()
    changed[0].join(PATIENCE_SECONDS)
    assert [thread.is_alive() for thread in changed] == [False, True]
    steps[1].set()
    changed[1].join(PATIENCE_SECONDS)
    assert not changed[1].is_alive()
    writer.finish()
    writer.before_update(1)


def test_a_failing_writer_holds_nobody_up_and_is_raised_with_its_traceback() -> None:
    writer = CheckpointWriter()

    def breaks_in_the_thread(written: Callable[[int], None]) -> None:
        raise OSError("the disk is gone")

    writer.start(breaks_in_the_thread, blocks=range(3))
    writer.before_update(2)
    with pytest.raises(OSError, match="the disk is gone") as raised:
        writer.finish()
    assert "breaks_in_the_thread" in "".join(traceback.format_exception(raised.value))
    writer.raise_failure()  # told once


def test_one_save_ends_before_the_next_begins() -> None:
    writer, running, seen = CheckpointWriter(), [0], []

    def write(written: Callable[[int], None]) -> None:
        running[0] += 1
        time.sleep(0.01)
        seen.append(running[0])
        running[0] -= 1

    for _ in range(4):
        writer.start(write, blocks=())
    writer.finish()
    assert seen == [1, 1, 1, 1]
