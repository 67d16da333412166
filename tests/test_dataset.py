import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from executor.data.corpus import DataChoices
from executor.data.dataset import open_dataset, open_datasets
from executor.data.rows import MASKED_LABEL
from simulator.errors import InputError

SIZES = {"vocab_size": 300, "sequence_length": 8, "rows_per_step": 4, "seed": 5}


def opened(source, *, choices=None, **changes):
    return open_dataset(source, choices=DataChoices(**(choices or {})), **(SIZES | changes))


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
    for choices in ({"packing": True}, {"long_samples": "drop"}):
        path = tmp_path / "short.jsonl"
        path.write_text('{"text": "a"}\n{"text": "b"}\n')
        assert opened(path, choices=choices).settings() != opened(path).settings()


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
    assert f"warning: samples longer than a row: 1 cut off; the longest has 52 tokens ({path}:3)" in text
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


@pytest.fixture
def mixed_file(tmp_path):
    """Rows of many lengths, some longer than a row, each of one letter of its own."""
    path = tmp_path / "mixed.jsonl"
    lengths = np.random.default_rng(1).integers(1, 12, 26).tolist()
    rows = [{"prompt": chr(65 + n) * (n % 3), "completion": chr(97 + n) * lengths[n]} for n in range(26)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def documents(batch, *, sequence_length=8):
    """(tokens, labels) of every document in a batch, by its positions; padding is one too."""
    found = []
    for row in range(batch.tokens.shape[0]):
        begins = [*np.flatnonzero(batch.positions[row] == 0).tolist(), sequence_length]
        found += [
            (tuple(batch.tokens[row, begin:end].tolist()), tuple(batch.labels[row, begin:end].tolist()))
            for begin, end in pairwise(begins)
        ]
    return found


def test_packed_rows_hold_the_documents_of_unpacked_rows(mixed_file):
    """Position by position the same inputs and labels, in fewer rows; nothing is learnt across a boundary."""
    plain, packed = opened(mixed_file), opened(mixed_file, choices={"packing": True})
    assert packed.rows.num_rows < plain.rows.num_rows
    wholes = []
    for dataset in (plain, packed):
        batches = [dataset.batch(step) for step in range(dataset.steps_per_epoch)]
        for batch in batches:
            assert batch.positions.dtype == torch.int64
            ahead, behind = batch.positions[:, 1:], batch.positions[:, :-1]
            assert ((ahead == behind + 1) | (ahead == 0)).all()
            assert (batch.positions[:, 0] == 0).all()
        found = [document for batch in batches for document in documents(batch)]
        # Padding learns nothing, and no document is without a target.
        wholes.append(sorted(document for document in found if set(document[1]) != {MASKED_LABEL}))
        padding = [document for document in found if set(document[1]) == {MASKED_LABEL}]
        assert all(set(tokens) == {257} for tokens, _ in padding)
        assert dataset.report.num_tokens == sum(batch.num_tokens for batch in batches)
        assert dataset.report.num_targets == sum(batch.num_targets for batch in batches)
        assert sum(len(tokens) for tokens, _ in padding) == len(batches) * 32 - dataset.report.num_tokens
    assert wholes[0] == wholes[1]
    for tokens, labels in wholes[1]:
        letters = {chr(token).lower() for token in tokens}
        assert len(letters) == 1, "a document is of one row"
        followed = [label for label in labels if label != MASKED_LABEL]
        assert {chr(label) for label in followed if label != 256} <= letters
    assert "packed, " in "\n".join(packed.report.lines())


def test_an_unpacked_row_counts_up_to_its_padding_which_begins_anew(jsonl_file):
    batch = opened(jsonl_file, shuffle=False).batch(0)
    assert batch.positions[0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    assert batch.positions[1].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert opened("synthetic").batch(0).positions.tolist() == [list(range(8))] * 4
    rows_that_fill_up = opened(jsonl_file).batch(2)
    assert rows_that_fill_up.positions[3].tolist() == list(range(8))


def test_rows_that_packing_would_save_are_said(jsonl_file, tmp_path):
    rows = opened(jsonl_file).rows.num_rows, opened(jsonl_file, choices={"packing": True}).rows.num_rows
    saved = f"packing: true would save {1 - rows[1] / rows[0]:.0%} of the rows"
    assert saved in opened(jsonl_file).report.lines()[1]
    # Documents of more than half a row leave padding that no packing fills.
    path = tmp_path / "large.jsonl"
    path.write_text('{"text": "abcde"}\n' * 9)
    assert "packing: true" not in "".join(opened(path).report.lines())


@pytest.mark.parametrize("packing", [False, True])
def test_stopping_in_the_middle_of_an_epoch_loses_no_row_and_repeats_none(mixed_file, packing):
    whole = opened(mixed_file, choices={"packing": packing})
    steps = whole.steps_per_epoch
    first, second = ([whole.batch(epoch * steps + step) for step in range(steps)] for epoch in (0, 1))
    resumed = opened(mixed_file, choices={"packing": packing})  # another process
    halves = [*second[: steps // 2], *(resumed.batch(steps + step) for step in range(steps // 2, steps))]
    assert sorted(pair for batch in halves for pair in pairs(batch)) == sorted(
        pair for batch in first for pair in pairs(batch)
    )
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))
    for ours, expected in zip(halves, second, strict=True):
        assert torch.equal(ours.tokens, expected.tokens)
        assert torch.equal(ours.positions, expected.positions)


def test_too_little_for_one_packed_row_trains_one_padded_row(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text('{"text": "hi"}\n{"text": "yo"}\n')
    dataset = opened(path, sequence_length=1000, choices={"packing": True})
    assert (dataset.steps_per_epoch, dataset.rows.num_rows) == (1, 1)
    for step in range(3):
        assert dataset.batch(step).num_targets == 4


# Held out


def letters(dataset):
    """The letters of all rows: what `mixed_file` tells its rows apart by."""
    tokens = {token for step in range(dataset.steps_per_epoch) for token in dataset.batch(step).tokens.ravel().tolist()}
    return {chr(token).lower() for token in tokens if token < 256}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("long_samples", ["split", "truncate"])
def test_samples_are_held_out_whole_and_the_same_ones_for_every_seed(mixed_file, packing, long_samples):
    choices = DataChoices(packing=packing, long_samples=long_samples)
    train, held_out = open_datasets(mixed_file, eval_fraction=0.25, choices=choices, **SIZES)
    ours, theirs = letters(train), letters(held_out)
    assert not ours & theirs
    assert len(ours | theirs) == 26
    assert len(theirs) == 6
    assert letters(open_datasets(mixed_file, eval_fraction=0.25, choices=choices, **(SIZES | {"seed": 9}))[1]) == theirs
    everything = opened(mixed_file, choices={"packing": packing, "long_samples": long_samples})
    assert everything.report.num_targets == train.report.num_targets + held_out.report.num_targets
    # In the same order, whatever the epoch.
    steps = held_out.steps_per_epoch
    assert torch.equal(held_out.batch(0).tokens, held_out.batch(steps).tokens)
    assert train.settings() != everything.settings()
    assert "are held out" in "\n".join(train.report.lines())
    assert "held out" not in "\n".join(held_out.report.lines())


def test_one_text_has_its_end_held_out(text_file):
    train, held_out = open_datasets(text_file, eval_fraction=0.2, **SIZES)
    text = text_file.read_bytes()
    batches = [held_out.batch(step) for step in range(held_out.steps_per_epoch)]
    rows = torch.cat([batch.tokens for batch in batches])[: held_out.rows.num_rows]
    assert rows.ravel()[:39].tolist() == [*text[160:]]
    assert train.report.num_targets + held_out.report.num_targets == 199
    assert sorted(pair for step in range(train.steps_per_epoch) for pair in pairs(train.batch(step))) == sorted(
        pairwise([*text[:161]])
    )


def test_at_least_one_part_is_held_out_and_one_stays(mixed_file, tmp_path):
    train, held_out = open_datasets(mixed_file, eval_fraction=0.001, **SIZES)
    assert held_out.report.num_rows == 1
    assert train.report.num_rows == opened(mixed_file).report.num_rows - 1
    single = tmp_path / "single.jsonl"
    single.write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="leaves nothing to train on"):
        open_datasets(single, eval_fraction=0.5, **SIZES)


def test_data_to_evaluate_on_may_be_named_and_are_never_those_trained_on(mixed_file, text_file, tmp_path):
    train, evaluation = open_datasets(mixed_file, eval_source=text_file, **SIZES)
    assert letters(train) == letters(opened(mixed_file))
    assert not evaluation.shuffle
    assert evaluation.report.source == str(text_file)
    assert open_datasets(mixed_file, **SIZES)[1] is None
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(mixed_file.read_bytes())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("some")
    (folder / "b.txt").write_text("more")
    for data, other in ((mixed_file, mixed_file), (mixed_file, copy), (folder, folder / "a.txt")):
        with pytest.raises(InputError, match=r"^eval_data: .* is also trained on"):
            open_datasets(data, eval_source=other, **SIZES)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"eval_fraction": 1.5}, "eval_fraction: 1.5 is no part of the data"),
        ({"eval_fraction": 0.0}, "eval_fraction: 0.0 is no part of the data"),
        ({"eval_fraction": 0.999}, "leaves nothing to train on"),
        ({"eval_fraction": 0.1, "eval_source": "x"}, "not both"),
        ({"eval_source": "synthetic"}, "synthetic data teaches nothing"),
    ],
)
def test_fractions_that_leave_one_side_empty_are_refused(mixed_file, choices, reason):
    with pytest.raises(InputError, match=reason):
        open_datasets(mixed_file, **choices, **SIZES)
