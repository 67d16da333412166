import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from executor.data.dataset import MASKED_LABEL, open_dataset
from simulator.errors import InputError, UnsupportedChoice


def opened(source, **changes):
    choices = {"vocab_size": 300, "sequence_length": 8, "rows_per_step": 4, "seed": 5}
    return open_dataset(source, **(choices | changes))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 199).tolist()))
    return path


@pytest.fixture
def jsonl_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q" * (n % 3), "completion": chr(97 + n) * (n % 5 + 1)} for n in range(11)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def pairs(batch):
    """Every target with the token before it, as a sorted list."""
    rows, columns = torch.nonzero(batch.labels != MASKED_LABEL, as_tuple=True)
    return [(batch.tokens[r, c].item(), batch.labels[r, c].item()) for r, c in zip(rows, columns, strict=True)]


def test_an_epoch_of_text_trains_every_token_but_the_first_once(text_file):
    dataset = opened(text_file)
    stream = [*text_file.read_bytes(), 256]
    assert dataset.steps_per_epoch == 7  # 199 targets, 25 rows of 8, 4 a step
    batches = [dataset.batch(step) for step in range(7)]
    assert sorted(pair for batch in batches for pair in pairs(batch)) == sorted(pairwise(stream))
    assert sum(batch.num_targets for batch in batches) == sum(batch.num_tokens for batch in batches) == 199
    assert dataset.report.num_targets == 199


@pytest.mark.parametrize("source", ["text_file", "jsonl_file"])
def test_each_row_is_contiguous_text_with_shifted_labels(source, request):
    dataset = opened(request.getfixturevalue(source))
    for step in range(dataset.steps_per_epoch):
        batch = dataset.batch(step)
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert batch.tokens.shape == batch.labels.shape == (4, 8)
        assert batch.num_targets == (batch.labels != MASKED_LABEL).sum() > 0
        followed = (batch.labels[:, :-1] != MASKED_LABEL) & (batch.labels[:, 1:] != MASKED_LABEL)
        assert followed.any()
        assert torch.equal(batch.tokens[:, 1:][followed], batch.labels[:, :-1][followed])


def test_batches_depend_on_the_step_alone(text_file):
    straight = [opened(text_file).batch(step) for step in range(20)]
    dataset = opened(text_file)
    for step in (13, 2, 19, 0, 13):
        assert torch.equal(dataset.batch(step).tokens, straight[step].tokens)
        assert torch.equal(dataset.batch(step).labels, straight[step].labels)


def test_epochs_and_seeds_have_orders_of_their_own(text_file):
    def rows(dataset, epoch):
        steps = range(epoch * 7, (epoch + 1) * 7)
        return torch.cat([dataset.batch(step).tokens for step in steps])[:25]

    dataset = opened(text_file)
    first, second, other = rows(dataset, 0), rows(dataset, 1), rows(opened(text_file, seed=6), 0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(other.tolist())
    stream = torch.tensor([*text_file.read_bytes()])
    assert torch.equal(rows(opened(text_file, shuffle=False), 1)[:24].reshape(-1), stream[:192])


def test_the_order_is_pinned_across_versions(tmp_path):
    """A resumed run may meet another numpy: these rows were drawn once and must never change."""
    path = tmp_path / "rows.txt"
    path.write_text("".join(chr(97 + row) * 8 for row in range(25)))
    dataset = opened(path)
    drawn = [(dataset.batch(step).tokens[:, 0] - 97).tolist() for step in (0, 7, 14)]
    assert drawn == [[21, 15, 20, 18], [2, 9, 21, 23], [4, 2, 17, 10]]


def test_samples_are_padded_on_the_right_and_masked_by_position(jsonl_file):
    dataset = opened(jsonl_file, shuffle=False, vocab_size=257)  # the padding token is the end token
    batch = dataset.batch(0)
    q, end, masked = ord("q"), 256, MASKED_LABEL
    assert batch.tokens.tolist()[1] == [q, ord("b"), ord("b"), end, end, end, end, end]
    assert batch.labels.tolist()[1] == [ord("b"), ord("b"), end, masked, masked, masked, masked, masked]
    assert batch.labels.tolist()[2][0] == masked  # the prompt's second character
    assert batch.num_tokens == 1 + 3 + 5 + 4


def test_the_last_step_and_small_data_have_fewer_targets_never_none(jsonl_file, tmp_path):
    dataset = opened(jsonl_file)
    assert dataset.steps_per_epoch == 3
    last = dataset.batch(2)
    assert (last.labels != MASKED_LABEL).any(dim=1).tolist() == [True, True, True, False]
    assert (last.tokens[3] == 257).all()

    small = tmp_path / "small.txt"
    small.write_text("hi")
    dataset = opened(small, rows_per_step=64, sequence_length=1000)
    assert dataset.steps_per_epoch == 1
    for step in range(3):
        assert dataset.batch(step).num_targets == 2
    assert dataset.batch(0).tokens[0, :2].tolist() == [*b"hi"]


def test_synthetic_data_is_random_endless_and_by_step():
    dataset = opened("synthetic", vocab_size=1000, rows_per_step=64, sequence_length=128)
    batch = dataset.batch(10**6)
    assert torch.equal(
        batch.tokens, opened("synthetic", vocab_size=1000, rows_per_step=64, sequence_length=128).batch(10**6).tokens
    )
    assert dataset.steps_per_epoch is None
    assert batch.num_targets == batch.num_tokens == 64 * 128
    assert 0 <= batch.tokens.min() < 5
    assert 995 < batch.tokens.max() < 1000
    assert batch.tokens.float().mean().item() == pytest.approx(499.5, rel=0.02)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert not torch.equal(batch.tokens, dataset.batch(0).tokens)
    assert len({tuple(row) for row in batch.tokens.tolist()}) == 64


def test_settings_change_with_what_changes_batches(text_file, tmp_path):
    settings = opened(text_file).settings()
    assert json.loads(json.dumps(settings)) == settings == opened(text_file).settings()
    moved = tmp_path / "moved.txt"
    moved.write_bytes(text_file.read_bytes())
    assert opened(moved).settings() == settings
    for changes in ({"seed": 6}, {"sequence_length": 9}, {"rows_per_step": 5}, {"shuffle": False}):
        assert opened(text_file, **changes).settings() != settings
    data = bytearray(text_file.read_bytes())
    data[50] = ord("!")
    moved.write_bytes(data)
    assert opened(moved).settings() != settings


def test_the_report_says_what_is_trained(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "Q: ", "completion": ""},
        {"prompt": "2+2?", "completion": " 4"},
        {"prompt": "x", "completion": "y" * 50},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    report = opened(path, sequence_length=10).report
    assert report.first_sample == "⟦2+2?⟧ 4<eos>"
    assert (report.num_read, report.num_rows, report.num_truncated, report.longest_tokens) == (3, 2, 1, 52)
    assert report.num_targets == 3 + 10
    text = "\n".join(report.lines())
    assert f"warning: 1 skipped: empty answer (first: {path}:1: " in text
    assert "warning: 1 samples are longer than a row and were cut; the longest has 52 tokens" in text
    assert "⟦2+2?⟧ 4<eos>" in text


def test_no_usable_rows_is_a_sentence_with_the_reasons(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": ""}\n{"prompt": "a", "completion": ""}\n{"text": " "}\n')
    with pytest.raises(
        InputError, match=r"no usable rows \(3 rows read; 2 skipped: empty answer; 1 skipped: empty text\)"
    ):
        opened(path)
    path.write_text("\n\n")
    with pytest.raises(InputError, match=r"rows\.jsonl: no usable rows \(nothing to read\)"):
        opened(path)


def test_wrong_paths_are_told_apart(tmp_path, text_file):
    with pytest.raises(InputError, match=rf"^data: .*texd\.txt does not exist; did you mean {text_file}\?$"):
        opened(tmp_path / "texd.txt")
    with pytest.raises(InputError, match=rf"did you mean {tmp_path}\?"):
        opened(tmp_path.with_name(tmp_path.name[:-1] + "x") / "text.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: has no text files"):
        opened(tmp_path / "empty")
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(UnsupportedChoice, match=r"\.parquet is not read yet"):
        opened(tmp_path / "data.parquet")
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"holds text and JSONL \(text\.txt, rows\.jsonl"):
        opened(tmp_path)
