"""Samples cut to documents, and documents packed into rows."""

import itertools
from collections import Counter

import numpy as np
import pytest
from data_cases import corpus_of, first_skipped, skipped, written_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.data.documents import best_fit, cut_samples
from executor.data.row_kind import KINDS
from executor.data.token_cache import Samples


def samples_of(masks, kinds=None):
    """Samples whose tokens count up, with these trained marks."""
    bounds = np.cumsum([0, *map(len, masks)])
    origins = [(0, line, KINDS.index(next(k for k in KINDS if k.name == kind))) for line, kind in enumerate(kinds, 1)]
    trained = np.array([mark for mask in masks for mark in mask], np.bool_)
    return Samples(np.arange(bounds[-1], dtype=np.uint32), trained, bounds, np.array(origins).reshape(-1, 3), 0)


MASKS = st.lists(
    st.lists(st.booleans(), min_size=2, max_size=40).filter(lambda mask: any(mask[1:])), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=200)
@given(masks=MASKS, length=st.integers(1, 12), choice=st.sampled_from(["truncate", "split", "drop"]))
def test_every_target_is_kept_once_as_the_choice_says(masks, length, choice):
    samples = samples_of(masks, ["alpaca"] * len(masks))
    found = cut_samples(samples, sequence_length=length, long_samples=choice)
    kept = Counter()
    for begin, end in zip(found.begins, found.ends, strict=True):
        assert 2 <= end - begin <= length + 1
        kept.update(begin + 1 + np.flatnonzero(samples.trained[begin + 1 : end]))
    expected = Counter()
    for begin, mask in zip(samples.bounds, masks, strict=False):
        if choice == "drop" and len(mask) > length + 1:
            continue
        visible = len(mask) if choice == "split" else length + 1
        expected.update(begin + place for place in range(1, min(len(mask), visible)) if mask[place])
    assert kept == expected
    assert found.num_targets.sum() == expected.total()
    assert (found.num_targets > 0).all()
    # What is counted as lost, cut or split are the samples that are too long, each once.
    num_long = sum(len(mask) > length + 1 for mask in masks)
    counted = found.num_truncated + found.num_split + len(found.too_long) + len(found.prompt_only)
    assert counted == num_long


def test_auto_splits_text_and_cuts_off_the_rest():
    samples = samples_of([[True] * 11] * 3, ["alpaca", "text", "messages"])
    found = cut_samples(samples, sequence_length=4, long_samples="auto")
    assert found.samples.tolist() == [0, 1, 1, 1, 2]
    assert found.sizes.tolist() == [4, 4, 4, 2, 4]
    assert (found.num_truncated, found.num_split) == (2, 1)


def test_targets_are_counted_in_any_number_of_passes(monkeypatch):
    masks = [[bool(place * n % 3) for place in range(n + 2)] for n in range(1, 30)]
    samples = samples_of(masks, ["text"] * len(masks))
    whole = cut_samples(samples, sequence_length=5, long_samples="split")
    for tokens in (1, 6, 50):
        monkeypatch.setattr("executor.data.documents._COUNTED_TOKENS", tokens)
        assert cut_samples(samples, sequence_length=5, long_samples="split").num_targets.tolist() == (
            whole.num_targets.tolist()
        )


@pytest.mark.parametrize(
    ("choice", "sizes", "line"),
    [
        ("truncate", [10, 10, 10], "warning: samples longer than a row: 2 cut off; the longest has 51 tokens"),
        ("split", [10, 10, 1, 10, 10, 10, 10, 10], "data: samples longer than a row: 2 split; the longest"),
        ("drop", [10], "warning: 2 skipped: longer than a row of 10 tokens (first: {path}:2)"),
        ("auto", [10, 10, 1, 10, 10, 10, 10, 10], "data: samples longer than a row: 2 split; the longest"),
    ],
)
def test_long_samples_are_counted_and_the_longest_is_shown(tmp_path, choice, sizes, line):
    path = written_rows(tmp_path, {"text": "x" * 10}, {"text": "y" * 11}, {"text": "z" * 50})
    corpus = corpus_of(path, sequence_length=10, long_samples=choice)
    assert corpus.documents.sizes.tolist() == sizes
    lines = corpus.report(corpus.documents, num_rows=3, num_held_out=0).lines()
    assert any(found.startswith(line.format(path=path)) for found in lines)
    if choice != "drop":
        assert any(found.endswith(f"the longest has 51 tokens ({path}:3)") for found in lines)


def test_a_prompt_that_fills_the_row_is_lost_when_cut_and_kept_when_split(tmp_path):
    path = written_rows(tmp_path, {"prompt": "q" * 25, "completion": "answer"}, {"prompt": "", "completion": "a"})
    corpus = corpus_of(path, sequence_length=10)
    assert skipped(corpus) == {"the prompt fills the row of 10 tokens": 1}
    assert first_skipped(corpus)["the prompt fills the row of 10 tokens"] == f"{path}:1"
    split = corpus_of(path, sequence_length=10, long_samples="split")
    assert split.documents.num_targets.tolist() == [6, 1, 1]  # "answe" and r; the end; the end after "a"
    assert skipped(split) == {}


# Packing


def rows_of(sizes, capacity):
    members, bounds = best_fit(np.array(sizes, np.int64), capacity)
    return [members[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]


def plain_best_fit(sizes, capacity):
    """The same rule, written as it is said: the longest first, into the fullest row that has room."""
    rows = []
    for document in sorted(range(len(sizes)), key=lambda document: (-sizes[document], document)):
        fitting = [row for row in rows if sum(sizes[other] for other in row) + sizes[document] <= capacity]
        if fitting:
            max(fitting, key=lambda row: sum(sizes[other] for other in row)).append(document)
        else:
            rows.append([document])
    return rows


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_packing_is_best_fit_decreasing(case):
    capacity, sizes = case
    rows = rows_of(sizes, capacity)
    assert sorted(itertools.chain(*rows)) == list(range(len(sizes)))
    fillings = [sum(sizes[document] for document in row) for row in rows]
    assert all(0 < filling <= capacity for filling in fillings)
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    expected = plain_best_fit(sizes, capacity)
    assert Counter(fillings) == Counter(sum(sizes[document] for document in row) for row in expected)


def test_packing_leaves_little_room():
    generator = np.random.default_rng(0)
    sizes = np.minimum(1024, generator.lognormal(5, 1, 20_000).astype(np.int64) + 1)
    rows = rows_of(sizes, 1024)
    assert len(rows) <= 1.01 * sizes.sum() / 1024 + 1
    assert rows == rows_of(sizes.copy(), 1024)


def test_documents_that_fill_a_row_stay_alone():
    assert rows_of([8, 3, 8, 5], 8) == [[0], [1, 3], [2]]
    assert rows_of([], 8) == []
