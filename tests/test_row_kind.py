"""Which columns make a row of which kind, and what is said of rows that are none."""

import json

import pytest
from data_cases import all_shown, corpus_of, shown, skipped, written_rows

from executor.data.conversation import DIALECTS, ROLES
from executor.data.row_kind import COLUMNS
from simulator.errors import InputError

IM = "<|im_start|>{}\n{}<|im_end|>\n"
QUESTION = IM.format("user", "2+2?") + "<|im_start|>assistant\n"
EXCHANGE = QUESTION + "4<|im_end|>\n<eos>"


@pytest.mark.parametrize(
    ("kind", "row", "whole", "trained"),
    [
        ("text", {"text": "2+2=4"}, "2+2=4<eos>", "2+2=4<eos>"),
        ("prompt-completion", {"prompt": "2+2?", "completion": " 4"}, "2+2? 4<eos>", " 4<eos>"),
        ("alpaca", {"instruction": "2+2?", "input": "", "output": "4"}, EXCHANGE, "4<|im_end|>\n<eos>"),
        ("alpaca", {"instruction": "2+2?", "input": None, "output": "4"}, EXCHANGE, "4<|im_end|>\n<eos>"),
        (
            "alpaca",
            {"instruction": "Add.", "input": "2 2", "output": "4", "text": "as one text"},
            IM.format("user", "Add.\n2 2") + IM.format("assistant", "4") + "<eos>",
            "4<|im_end|>\n<eos>",
        ),
        (
            "alpaca",
            {"instruction": "2+2?", "output": "4", "system": "Count.", "history": [["1?", "1"]]},
            IM.format("system", "Count.") + IM.format("user", "1?") + IM.format("assistant", "1") + EXCHANGE,
            "1<|im_end|>\n4<|im_end|>\n<eos>",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "system": "Count."},
            IM.format("system", "Count.") + EXCHANGE,
            "4<|im_end|>\n<eos>",
        ),
        (
            "messages",
            {
                "prompt": "2+2?",
                "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            },
            EXCHANGE,
            "4<|im_end|>\n<eos>",
        ),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
                    {"role": "assistant", "content": "4"},
                ]
            },
            EXCHANGE,
            "4<|im_end|>\n<eos>",
        ),
        (
            "prompt-completion",
            {
                "prompt": [
                    {"role": "user", "content": "1?"},
                    {"role": "assistant", "content": "1"},
                    {"role": "user", "content": "2+2?"},
                ],
                "completion": [{"role": "assistant", "content": "4"}],
            },
            IM.format("user", "1?") + IM.format("assistant", "1") + EXCHANGE,
            "4<|im_end|>\n<eos>",
        ),
        ("pre-tokenised", {"input_ids": [97, 98, 99]}, "abc", "abc"),
        ("pre-tokenised", {"input_ids": [97, 98, 99], "labels": [-100, 98, 99]}, "abc", "bc"),
        ("pre-tokenised", {"input_ids": [97, 98, 99], "loss_mask": [0, 1, 0]}, "abc", "b"),
        ("pre-tokenised", {"input_ids": [97, 98, 257], "attention_mask": [1, 1, 0]}, "ab", "ab"),
        (
            "pre-tokenised",
            {"input_ids": [97, 98, 99], "labels": [97, -100, 99], "loss_mask": [1, 1, 1], "text": "abc"},
            "abc",
            "ac",
        ),
    ],
)
def test_rows_of_every_kind_are_recognised_and_named(tmp_path, kind, row, whole, trained):
    corpus = corpus_of(written_rows(tmp_path, row))
    assert corpus.read.kinds == {kind: 1}
    assert shown(corpus) == (whole, trained)


@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
@pytest.mark.parametrize("names", [("user", "assistant"), ("human", "gpt"), ("Human", "model"), ("user ", "gpt")])
def test_both_dialects_work_in_both_places(tmp_path, key, role, content, names):
    turns = [{role: names[0], content: "2+2?"}, {role: names[1], content: "4"}]
    assert shown(corpus_of(written_rows(tmp_path, {key: turns})))[0] == EXCHANGE


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0] has the role 'robot'; allowed are system,"),
        ({"conversations": [{"from": 3, "value": "x"}]}, "conversations[0] has the role 3; allowed are"),
        ({"messages": "hi"}, "'messages' is not a list of turns"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] has no text: its content is null, or missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages[0] has 'tool_calls'"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": [1]}, "has 'tools', which are not read"),
        ({"messages": ["hi"]}, "messages[0] is not an object"),
        ({"prompt": "x"}, "has no 'completion'; its keys are ['prompt']; a column of another name is given with"),
        ({"prompt": 3, "completion": "x"}, "'prompt' is int, not a string"),
        ({"output": "y"}, "has no 'instruction'; its keys are ['output']"),
        ({"input": "x", "output": "y"}, "has no 'instruction'; its keys are ['input', 'output']"),
        ({"instruction": None, "output": "y"}, "has no 'instruction'; its keys are ['instruction', 'output']"),
        ({"instruction": "x", "response": "y"}, "has no 'output'"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "history[0] is not a list of two strings"),
        ({"body": "x"}, "has none of 'text', 'messages', "),
        ({}, "its keys are none"),
        ([1], "is a JSON list; a row is an object, one row a line"),
        ("3", "is a JSON int; a row is an object"),
        ({"input_ids": [1, 320]}, "input_ids[1] is 320, and the model's vocabulary has 320 tokens"),
        ({"input_ids": [1, -1]}, "input_ids[1] is -1"),
        ({"input_ids": ["1"]}, "'input_ids' is not a list of whole numbers"),
        ({"input_ids": [[1, 2]]}, "'input_ids' is not a list of whole numbers"),
        (
            {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
            "labels[0] is 2, where input_ids has 1; labels are the same",
        ),
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "'labels' has 2 entries, 'input_ids' has 3"),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 2, 0]}, "'loss_mask' holds other numbers than 0 and 1"),
    ],
)
def test_wrong_rows_are_refused_by_file_and_line_or_counted_on_request(tmp_path, row, expected):
    path = written_rows(tmp_path, {"text": "fine"}, row)
    with pytest.raises(InputError) as error:
        corpus_of(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert expected in str(error.value)
    corpus = corpus_of(path, skip_invalid=True)
    assert corpus.samples.num_samples == 1
    assert skipped(corpus) == {"invalid row": 1}
    report = corpus.report(corpus.documents, num_rows=1, num_held_out=0)
    assert report.first_skipped["invalid row"] == str(error.value)
    assert any(line == f"warning: 1 skipped: invalid row (first: {error.value})" for line in report.lines())


def test_an_unknown_role_is_told_all_that_are_known(tmp_path):
    path = written_rows(tmp_path, {"messages": [{"role": "bot", "content": "x"}]})
    with pytest.raises(InputError) as error:
        corpus_of(path)
    assert str(error.value).endswith(f"allowed are {', '.join([*ROLES, *DIALECTS])}")


@pytest.mark.parametrize(
    ("columns", "row", "kind"),
    [
        ({"prompt": "question", "completion": "answer"}, {"question": "q", "answer": "a"}, "prompt-completion"),
        ({"output": "response"}, {"instruction": "q", "response": "a"}, "alpaca"),
        ({"text": "body"}, {"body": "q", "text": "not this", "instruction": "nor this"}, "text"),
        ({"completion": "prompt", "prompt": "completion"}, {"completion": "q", "prompt": "a"}, "prompt-completion"),
        ({"text": "output"}, {"instruction": "x", "output": "q"}, "text"),
        ({"input_ids": "tokens", "loss_mask": "mask"}, {"tokens": [1, 2], "mask": [0, 1]}, "pre-tokenised"),
    ],
)
def test_columns_of_other_names_are_read_by_a_map(tmp_path, columns, row, kind):
    corpus = corpus_of(written_rows(tmp_path, row), columns=columns)
    assert corpus.read.kinds == {kind: 1}
    if kind == "prompt-completion":
        assert shown(corpus) == ("qa<eos>", "a<eos>")
    if kind == "text":
        assert shown(corpus)[0] == "q<eos>"


def test_a_map_that_fits_nothing_is_told_so(tmp_path):
    path = written_rows(tmp_path, {"question": "q", "answer": "a"})
    with pytest.raises(InputError, match=r"data.jsonl:1: has no 'anser', which columns: names for 'completion'; its"):
        corpus_of(path, columns={"prompt": "question", "completion": "anser"})
    with pytest.raises(InputError, match=r"columns: unknown column 'promt'; did you mean 'prompt'\?"):
        corpus_of(path, columns={"promt": "question"})
    with pytest.raises(InputError) as error:
        corpus_of(path, columns={"question": "prompt"})
    assert all(column in str(error.value) for column in COLUMNS)


def test_rows_of_several_kinds_are_counted_apart(tmp_path):
    rows = [{"text": "a"}, {"prompt": "a", "completion": "b"}, {"text": "c"}]
    corpus = corpus_of(written_rows(tmp_path, *rows))
    assert corpus.read.kinds == {"text": 2, "prompt-completion": 1}
    lines = corpus.report(corpus.documents, num_rows=3, num_held_out=0).lines()
    assert "3 read from 1 file, 2 as text and 1 as prompt-completion, tokenizer bytes" in lines[0]


def test_all_kinds_survive_the_journey_through_csv(tmp_path):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path = tmp_path / "rows.csv"
    cell = json.dumps(turns).replace('"', '""')
    path.write_text(f'messages\n"{cell}"\n', encoding="utf-8")
    assert all_shown(corpus_of(path)) == [(EXCHANGE, "4<|im_end|>\n<eos>")]
