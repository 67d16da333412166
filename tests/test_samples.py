import json

import numpy as np
import pytest
from tiny_tokenizer import REASONING, byte_level_folder, sentence_piece_folder

from executor.data.report import Tally
from executor.data.samples import read_samples
from executor.tokenizer import ByteTokenizer, FolderTokenizer
from simulator.errors import InputError

BYTES = ByteTokenizer(300)


def written(folder, *rows, name="data.jsonl"):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(path, tokenizer=BYTES, *, sequence_length=200, skip_invalid=False):
    tally = Tally(str(path))
    samples = read_samples([path], tokenizer, tally, sequence_length=sequence_length, skip_invalid=skip_invalid)
    return samples, tally


def shown(samples, tokenizer, index=0):
    """A sample as (whole text, trained text)."""
    begin, end = samples.bounds[index : index + 2]
    tokens, trained = samples.tokens[begin:end], samples.trained[begin:end]
    return tokenizer.decode(tokens), tokenizer.decode(tokens[trained])


@pytest.fixture(params=["bytes", "byte-level", "sentence-piece"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return BYTES
    if request.param == "byte-level":
        return FolderTokenizer(byte_level_folder(folder, template=None), 320)
    return FolderTokenizer(sentence_piece_folder(folder, template=None), 300)


def test_prompts_are_masked_and_the_end_is_trained_once(tmp_path, tokenizer):
    eos, begin = tokenizer.decode([tokenizer.eos_id]), tokenizer.decode(tokenizer.prefix)
    path = written(
        tmp_path,
        {"prompt": "what is two", "completion": " and two"},
        {"prompt": "", "completion": "four"},
        {"text": "the lazy dog"},
        {"text": "the lazy dog" + ("" if tokenizer is BYTES else eos)},
    )
    samples, tally = read(path, tokenizer)
    wholes, trained = zip(*(shown(samples, tokenizer, index) for index in range(4)), strict=True)
    # Metaspace writes a space after the beginning, which is its own business.
    assert [whole.replace(f"{begin} ", begin) if begin else whole for whole in wholes] == [
        f"{begin}what is two and two{eos}",
        f"{begin}four{eos}",
        f"{begin}the lazy dog{eos}",
        f"{begin}the lazy dog{eos}",
    ]
    assert [text.strip() for text in trained] == [
        f"and two{eos}",
        f"four{eos}",
        f"the lazy dog{eos}",
        f"the lazy dog{eos}",
    ]
    assert samples.tokens[samples.bounds[1:] - 1].tolist() == [tokenizer.eos_id] * 4
    assert samples.trained[samples.bounds[1:] - 1].all()
    assert tally.num_read == 4


TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "of course, 4 é"},
]


def test_only_answers_of_a_conversation_are_trained(tmp_path):
    path = written(tmp_path, {"messages": TURNS})
    tokenizer = FolderTokenizer(byte_level_folder(tmp_path / "tokenizer"), 320)
    whole, trained = shown(read(path, tokenizer)[0], tokenizer)
    rendered = tokenizer.render(TURNS, add_generation_prompt=False)
    # The template ends in a line end after the end of turn: dropped, as nothing follows it.
    assert whole == rendered.removesuffix("\n")
    assert trained == "four<|im_end|>of course, 4 é<|im_end|>"


def test_a_template_that_writes_the_beginning_gives_one(tmp_path):
    path = written(tmp_path, {"messages": TURNS})
    tokenizer = FolderTokenizer(sentence_piece_folder(tmp_path / "tokenizer"), 300)
    samples, _ = read(path, tokenizer)
    assert samples.tokens.tolist().count(1) == 1
    assert samples.tokens[0] == 1
    assert samples.tokens.tolist().count(2) == 2


def test_without_a_template_conversations_are_chatml(tmp_path):
    path = written(tmp_path, {"messages": TURNS})
    whole, trained = shown(read(path)[0], BYTES)
    assert whole.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ntwo and two?<|im_end|>\n")
    assert trained == "four<|im_end|>\nof course, 4 é<|im_end|>\n<eos>"
    tokenizer = FolderTokenizer(sentence_piece_folder(tmp_path / "tokenizer", template=None), 300)
    samples, _ = read(path, tokenizer)
    assert samples.tokens.tolist().count(1) == 1
    assert samples.tokens[0] == 1


def test_turns_that_the_template_rewrites_are_masked_and_counted(tmp_path):
    turns = [
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "<think>\nhm</think>2"},
        {"role": "user", "content": "four?"},
        {"role": "assistant", "content": "no thought, 4"},
    ]
    tokenizer = FolderTokenizer(byte_level_folder(tmp_path / "tokenizer", template=REASONING), 320)
    samples, tally = read(written(tmp_path, {"messages": turns}), tokenizer)
    _, trained = shown(samples, tokenizer)
    assert trained == "no thought, 4<|im_end|>"
    assert tally.num_untrained_turns == 1


def test_both_dialects_work(tmp_path):
    other = [
        {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]), "value": turn["content"]}
        for turn in TURNS
    ]
    mixed = [{"role": turn["from"], "content": turn["value"]} for turn in other]
    names = [{"from": turn["role"], "value": turn["content"]} for turn in TURNS]
    rows = [{"messages": TURNS}, {"conversations": other}, {"messages": mixed}, {"conversations": names}]
    samples, _ = read(written(tmp_path, *rows), sequence_length=400)
    assert len({shown(samples, BYTES, index) for index in range(4)}) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0] has the role 'robot'; allowed are system, user,",
        ),
        ({"messages": "hi"}, "'messages' is not a list of turns"),
        ({"messages": []}, "'messages' is not a list of turns"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] has no text: its content is NoneType"),
        ({"messages": ["hi"]}, "messages[0] is not an object"),
        ({"prompt": "x"}, "has no 'completion'; its keys are ['prompt']"),
        ({"prompt": 3, "completion": "x"}, "'prompt' is int, not a string"),
        ({"instruction": "x", "output": "y"}, "rows with 'instruction' are not read yet"),
        ({"body": "x"}, "has none of 'text', 'messages', or 'prompt' and 'completion'; its keys are ['body']"),
        ({}, "its keys are none"),
        ([1], "is a JSON list; a row is an object, one row a line"),
        ("3", "is a JSON int; a row is an object"),
    ],
)
def test_wrong_rows_are_refused_by_file_and_line_or_counted_on_request(tmp_path, row, expected):
    path = written(tmp_path, {"text": "fine"}, row)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert expected in str(error.value)
    samples, tally = read(path, skip_invalid=True)
    assert len(samples.bounds) == 2
    assert tally.skipped == {"invalid row": 1}
    assert tally.first_skipped["invalid row"] == str(error.value)


def test_bad_json_names_file_line_and_column(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b", }\n{"text": "c"}\n')
    with pytest.raises(InputError, match=rf"^{path}:3:\d+: is not JSON \(.*\)$") as error:
        read(path)
    assert int(str(error.value).split(":")[2]) in (14, 15)

    path.write_bytes(b'{"text": "a"}\n{"text": "hal')
    with pytest.raises(InputError, match=rf"^{path}:2:10: is not JSON .*; the last line looks half-written$"):
        read(path)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=rf"^{path}:2:11: is not UTF-8 text$"):
        read(path)


def test_byte_order_mark_line_ends_and_blank_lines_make_no_difference(tmp_path):
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b'{"text": "one"}\n{"text": "two"}\n')
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n  \r\n{"text": "two"}')
    (expected, first), (actual, second) = read(plain), read(windows)
    assert np.array_equal(expected.tokens, actual.tokens)
    assert np.array_equal(expected.bounds, actual.bounds)
    assert first.num_read == second.num_read == 2


def test_rows_with_nothing_to_train_are_skipped_and_counted(tmp_path):
    path = written(
        tmp_path,
        {"prompt": "a", "completion": " \n"},
        {"text": ""},
        {"messages": TURNS[:2]},
        {"messages": [*TURNS[:2], {"role": "assistant", "content": ""}]},
        {"prompt": "a" * 201, "completion": "never seen"},
        {"prompt": "a" * 199, "completion": "seen once"},
    )
    samples, tally = read(path)
    assert tally.skipped == {
        "empty answer": 2,
        "empty text": 1,
        "no answer": 1,
        "the prompt fills the row of 200 tokens": 1,
    }
    assert tally.first_skipped["empty answer"].startswith(f'{path}:1: {{"prompt": "a"')
    assert tally.first_skipped["the prompt fills the row of 200 tokens"] == f"{path}:5"
    assert samples.trained.sum() == 2  # positions 199 and 200 of the last row
    assert tally.num_truncated == 1


def test_long_samples_are_cut_to_a_row_and_its_last_target(tmp_path):
    path = written(tmp_path, {"text": "x" * 10}, {"text": "y" * 11}, {"text": "z" * 50})
    samples, tally = read(path, sequence_length=10)
    assert np.diff(samples.bounds).tolist() == [11, 11, 11]
    assert samples.tokens[10] == 256  # a sample that just fits keeps its end
    assert (tally.num_truncated, tally.longest_tokens) == (2, 51)


def test_templates_that_refuse_or_hide_the_answers_are_named(tmp_path):
    path = written(tmp_path, {"messages": TURNS})
    alternate = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}x"
    tokenizer = FolderTokenizer(byte_level_folder(tmp_path / "a", template=alternate), 320)
    with pytest.raises(InputError, match=rf"^{path}:1: the chat template refuses the conversation \(no system turn\)"):
        read(path, tokenizer)
    tokenizer = FolderTokenizer(byte_level_folder(tmp_path / "b", template="nothing of it"), 320)
    with pytest.raises(InputError, match="cannot be told from the prompt"):
        read(path, tokenizer)
