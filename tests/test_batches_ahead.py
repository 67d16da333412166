"""Batches ahead: what a step trains on is what the data set says, made while the step before runs."""

import threading
from pathlib import Path

import pytest
import torch

from executor.data.ahead import batches_ahead
from executor.data.dataset import Batch, Dataset, open_dataset
from simulator.errors import InputError


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {number} of a small text" for number in range(40)))
    return open_dataset(path, vocab_size=300, sequence_length=8, rows_per_step=4, seed=3)


def test_batches_are_the_data_sets_own_also_from_the_middle(dataset: Dataset) -> None:
    batch = batches_ahead(dataset, num_steps=6)
    for step in (2, 3, 4, 5):
        found, expected = batch(step), dataset.batch(step)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.labels, expected.labels)
        assert (found.num_targets, found.num_tokens) == (expected.num_targets, expected.num_tokens)


def test_the_next_batch_is_made_while_a_step_runs_and_none_after_the_last(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, threading.Event] = {step: threading.Event() for step in range(4)}
    make = dataset.batch

    def batch_of(step: int) -> Batch:
        made[step].set()
        return make(step)

    monkeypatch.setattr(dataset, "batch", batch_of)
    batch = batches_ahead(dataset, num_steps=3)
    batch(0)
    assert made[1].wait(10.0)  # nobody has asked for it yet
    batch(1)
    batch(2)
    assert made[2].is_set()
    assert not made[3].is_set()


def test_what_is_wrong_with_a_batch_is_raised_where_it_is_asked_for(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = dataset.batch

    def batch_of(step: int) -> Batch:
        if step == 1:
            raise InputError("text.txt: cannot be read")
        return make(step)

    monkeypatch.setattr(dataset, "batch", batch_of)
    batch = batches_ahead(dataset, num_steps=3)
    batch(0)
    with pytest.raises(InputError, match="cannot be read"):
        batch(1)
