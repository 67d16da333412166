"""Documents that are evaluated and trained on too are found, counted and told, and no others are."""

import random

import numpy as np
import pytest
from data_cases import written_rows

from executor.data.corpus import DataChoices
from executor.data.dataset import open_datasets
from executor.data.documents import Documents
from executor.data.overlap import also_trained
from executor.data.token_cache import Samples

SIZES = {"vocab_size": 300, "sequence_length": 64, "rows_per_step": 2, "seed": 0}


def warned(path, **settings):
    return [line for line in open_datasets(path, **SIZES, **settings)[0].report.lines() if "trained on too" in line]


@pytest.mark.parametrize("packing", [False, True])
def test_rows_in_both_data_sets_are_counted_and_the_first_is_named(tmp_path, packing):
    training = written_rows(tmp_path, *({"text": f"row {n}"} for n in range(50)), name="train.jsonl")
    rows = [{"text": "another"}, {"text": "row 7"}, {"text": "row 70"}, {"prompt": "row ", "completion": "8"}]
    other = written_rows(tmp_path, *rows, name="eval.jsonl")
    choices = DataChoices(packing=packing)
    (line,) = warned(training, eval_source=other, choices=choices)
    assert line.startswith("warning: 2 of the documents to evaluate on are trained on too, token for token")
    assert f"(first: {other}:2)" in line
    apart = written_rows(tmp_path, *rows[::2], name="apart.jsonl")
    assert warned(training, eval_source=apart, choices=choices) == []


def test_copies_of_held_out_rows_are_counted(tmp_path):
    rows = [{"text": f"row {n}"} for n in range(40)]
    assert warned(written_rows(tmp_path, *rows), eval_fraction=0.25) == []
    (line,) = warned(written_rows(tmp_path, *rows, *rows, name="twice.jsonl"), eval_fraction=0.25)
    count = int(line.split()[1])
    assert 10 <= count <= 20  # of 20 held out, but for those whose copy is held out too


def test_what_is_found_is_what_comparing_all_with_all_finds():
    """Short documents of few tokens, so that many are equal, or equal at all places that are compared at first."""
    chance = random.Random(0)

    def corpus(count):
        texts = [[chance.randrange(2) for _ in range(chance.choice([2, 3, 4, 7]))] for _ in range(count)]
        texts += [[5] * 40 + [chance.randrange(3)] + [5] * 3 + [1] for _ in range(count)]
        bounds = np.cumsum([0, *map(len, texts)])
        tokens = np.concatenate([np.array(text, np.uint16) for text in texts])
        none = np.zeros(0, np.int64)
        documents = Documents(bounds[:-1], bounds[1:], np.arange(len(texts)), none, 0, 0, none, none)
        return texts, documents, Samples(tokens, np.ones(len(tokens), np.bool_), bounds, none, 0)

    for size in (1, 3, 30):
        evaluated, trained = corpus(size), corpus(size)
        found = also_trained(*evaluated[1:], *trained[1:])
        assert found.tolist() == [text in trained[0] for text in evaluated[0]]
