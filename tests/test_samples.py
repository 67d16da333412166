"""Rows as samples: what becomes of prompts, answers, beginnings and ends."""

import numpy as np
import pytest
from data_cases import all_shown, corpus_of, first_skipped, shown, skipped, written_rows
from tiny_tokenizer import REASONING, byte_level_folder, sentence_piece_folder

from simulator.errors import InputError

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "of course, 4 é"},
]


@pytest.fixture(params=["bytes", "byte-level", "sentence-piece"])
def folder(request, tmp_path_factory):
    """A folder with a tokenizer without chat template; None for bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return None
    return {"byte-level": byte_level_folder, "sentence-piece": sentence_piece_folder}[request.param](
        folder, template=None
    )


def test_prompts_are_masked_and_the_end_is_trained_once(tmp_path, folder):
    eos = corpus_of(written_rows(tmp_path, {"text": "x"}), model_folder=folder).tokenizer
    begin, end = eos.decode(eos.prefix), eos.decode([eos.eos_id])
    path = written_rows(
        tmp_path,
        {"prompt": "what is two", "completion": " and two"},
        {"prompt": "", "completion": "four"},
        {"text": "the lazy dog"},
        {"text": "the lazy dog" + (end if folder else "")},
    )
    corpus = corpus_of(path, model_folder=folder)
    wholes, trained = zip(*all_shown(corpus), strict=True)
    # Metaspace writes a space after the beginning, which is its own business.
    assert [whole.replace(f"{begin} ", begin) if begin else whole for whole in wholes] == [
        f"{begin}what is two and two{end}",
        f"{begin}four{end}",
        f"{begin}the lazy dog{end}",
        f"{begin}the lazy dog{end}",
    ]
    assert [text.strip() for text in trained] == [
        f"and two{end}",
        f"four{end}",
        f"the lazy dog{end}",
        f"the lazy dog{end}",
    ]
    samples = corpus.samples
    assert samples.tokens[samples.bounds[1:] - 1].tolist() == [corpus.tokenizer.eos_id] * 4
    assert samples.trained[samples.bounds[1:] - 1].all()
    assert corpus.read.kinds == {"prompt-completion": 2, "text": 2}


def test_prompts_are_trained_on_request(tmp_path, folder):
    rows = [{"prompt": "what is two", "completion": " and two"}, {"messages": TURNS}]
    path = written_rows(tmp_path, *rows)
    corpus = corpus_of(path, model_folder=folder, train_on_prompt=True)
    for whole, trained in all_shown(corpus):
        begin = corpus.tokenizer.decode(corpus.tokenizer.prefix)
        assert trained.strip() == whole.removeprefix(begin).strip()
    plain = corpus_of(path, model_folder=folder)
    assert np.array_equal(plain.samples.tokens, corpus.samples.tokens)
    assert plain.samples.trained.sum() < corpus.samples.trained.sum()


def test_only_answers_of_a_conversation_are_trained(tmp_path):
    path = written_rows(tmp_path, {"messages": TURNS})
    corpus = corpus_of(path, model_folder=byte_level_folder(tmp_path / "tokenizer"))
    whole, trained = shown(corpus)
    rendered = corpus.tokenizer.render(TURNS, add_generation_prompt=False)
    # The template ends in a line end after the end of turn: dropped, as nothing follows it.
    assert whole == rendered.removesuffix("\n")
    assert trained == "four<|im_end|>of course, 4 é<|im_end|>"


def test_a_template_that_writes_the_beginning_gives_one(tmp_path):
    path = written_rows(tmp_path, {"messages": TURNS})
    tokens = corpus_of(path, model_folder=sentence_piece_folder(tmp_path / "tokenizer")).samples.tokens.tolist()
    assert tokens.count(1) == 1
    assert tokens[0] == 1
    assert tokens.count(2) == 2


def test_without_a_template_conversations_are_chatml(tmp_path):
    path = written_rows(tmp_path, {"messages": TURNS})
    whole, trained = shown(corpus_of(path))
    assert whole.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ntwo and two?<|im_end|>\n")
    assert trained == "four<|im_end|>\nof course, 4 é<|im_end|>\n<eos>"
    folder = sentence_piece_folder(tmp_path / "tokenizer", template=None)
    tokens = corpus_of(path, model_folder=folder).samples.tokens.tolist()
    assert tokens.count(1) == 1
    assert tokens[0] == 1


def test_turns_that_the_template_rewrites_are_masked_and_counted(tmp_path):
    turns = [
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "<think>\nhm</think>2"},
        {"role": "user", "content": "four?"},
        {"role": "assistant", "content": "no thought, 4"},
    ]
    folder = byte_level_folder(tmp_path / "tokenizer", template=REASONING)
    corpus = corpus_of(written_rows(tmp_path, {"messages": turns}), model_folder=folder)
    assert shown(corpus)[1] == "no thought, 4<|im_end|>"
    assert corpus.read.num_untrained_turns == 1


def test_rows_with_nothing_to_train_are_skipped_and_counted(tmp_path):
    path = written_rows(
        tmp_path,
        {"prompt": "a", "completion": " \n"},
        {"text": ""},
        {"messages": TURNS[:2]},
        {"messages": [*TURNS[:2], {"role": "assistant", "content": ""}]},
        {"instruction": "a", "output": ""},
        {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]},
        {"prompt": "a" * 201, "completion": "never seen"},
        {"prompt": "a" * 199, "completion": "seen once"},
    )
    corpus = corpus_of(path, sequence_length=200)
    assert skipped(corpus) == {
        "empty answer": 3,
        "empty text": 1,
        "no answer": 1,
        "no trained token": 1,
        "the prompt fills the row of 200 tokens": 1,
    }
    first = first_skipped(corpus)
    assert first["empty answer"].startswith(f'{path}:1: {{"prompt": "a"')
    assert first["the prompt fills the row of 200 tokens"] == f"{path}:7"
    assert corpus.documents.num_targets.tolist() == [2]  # positions 199 and 200 of the last row
    assert corpus.documents.num_truncated == 1


def test_templates_that_refuse_or_hide_the_answers_are_named(tmp_path):
    path = written_rows(tmp_path, {"messages": TURNS})
    alternate = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}x"
    folder = byte_level_folder(tmp_path / "a", template=alternate)
    with pytest.raises(InputError, match=rf"^{path}:1: the chat template refuses the conversation \(no system turn\)"):
        corpus_of(path, model_folder=folder)
    folder = byte_level_folder(tmp_path / "b", template="nothing of it")
    with pytest.raises(InputError, match="cannot be told from the prompt"):
        corpus_of(path, model_folder=folder)


def test_the_end_of_a_turn_that_is_the_padding_token_is_trained(tmp_path):
    folder = byte_level_folder(tmp_path / "tokenizer", pad=None)
    corpus = corpus_of(written_rows(tmp_path, {"messages": TURNS}), model_folder=folder)
    assert corpus.tokenizer.pad_id == corpus.tokenizer.eos_id
    assert corpus.samples.trained[corpus.samples.tokens == corpus.tokenizer.eos_id].sum() == 2
