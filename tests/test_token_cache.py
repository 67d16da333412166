"""Tokens on disk: found by content, written once, never trusted when damaged."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from data_cases import all_shown, corpus_of, written_rows
from tiny_tokenizer import CHATML, byte_level_folder

import executor.data.corpus
from executor.data.token_cache import default_folder
from simulator.errors import ConveyorError, InputError

ROOT = Path(__file__).parents[1]
ROWS = [{"text": f"row {number} " * (number % 5 + 1)} for number in range(50)]
CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


def caches(folder):
    return sorted(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture
def counted(monkeypatch):
    """How often rows were tokenized."""
    calls = []
    original = executor.data.corpus.write_rows

    def counting(*given, **named):
        calls.append(1)
        return original(*given, **named)

    monkeypatch.setattr(executor.data.corpus, "write_rows", counting)
    return calls


def test_the_same_content_is_tokenized_once_wherever_it_lies(tmp_path, counted):
    (tmp_path / "other").mkdir()
    cache = tmp_path / "cache"
    first = corpus_of(written_rows(tmp_path, *ROWS, {"text": ""}), cache=cache)
    moved = written_rows(tmp_path / "other", *ROWS, {"text": ""}, name="renamed.jsonl")
    again = corpus_of(moved, cache=cache, sequence_length=7, packing=True, long_samples="split")
    assert len(counted) == 1
    assert all_shown(again) == all_shown(first)
    # What is said of the rows is said of the file where they lie now.
    report = again.report(again.documents, num_rows=1, num_held_out=0)
    assert report.first_skipped == {"empty text": f'{moved}:51: {{"text": ""}}'}
    assert report.longest_at.startswith(f"{moved}:")
    assert isinstance(again.samples.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        again.samples.tokens[0] = 1


@pytest.mark.parametrize(
    "change",
    [
        {"text": "content"},
        {"columns": {"text": "other"}},
        {"train_on_prompt": True},
        {"skip_invalid": True},
        {"vocab_size": 321},
        {"template": CHATML.replace("<|im_start|>", "<|endoftext|>")},
        {"eos": "<|endoftext|>"},
    ],
)
def test_whatever_decides_tokens_is_tokenized_anew(tmp_path, counted, change):
    row = {**CHAT, "other": "x"} if "columns" not in change else {"text": "y", "other": "x"}
    choices = {"cache": tmp_path / "cache", "model_folder": byte_level_folder(tmp_path / "before")}
    corpus_of(written_rows(tmp_path, row), **choices)
    if "text" in change:
        row = {"text": change.pop("text")}
    for key in ("template", "eos"):
        if key in change:
            choices["model_folder"] = byte_level_folder(tmp_path / "after", **{key: change.pop(key)})
    corpus_of(written_rows(tmp_path, row), **(choices | change))
    assert len(counted) == 2
    assert len(caches(tmp_path / "cache")) == 2


def test_a_tokenizer_of_the_same_content_is_the_same(tmp_path, counted):
    path = written_rows(tmp_path, CHAT)
    for name in ("one", "two"):
        corpus_of(path, cache=tmp_path / "cache", model_folder=byte_level_folder(tmp_path / name))
    assert len(counted) == 1


@pytest.mark.parametrize("array", ["tokens", "trained", "bounds", "origins"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "missing"])
def test_a_damaged_cache_is_written_again(tmp_path, counted, array, damage):
    cache = tmp_path / "cache"
    path = written_rows(tmp_path, *ROWS)
    expected = all_shown(corpus_of(path, cache=cache))
    file = caches(cache)[0] / f"{array}.bin"
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    file.write_bytes({"cut": content[:-1], "longer": content + b"\0"}.get(damage, content))
    if damage == "missing":
        file.unlink()
    assert all_shown(corpus_of(path, cache=cache)) == expected
    assert len(counted) == 2
    assert all_shown(corpus_of(path, cache=cache)) == expected
    assert len(counted) == 2


@pytest.mark.parametrize("record", ["", "{", '{"token_dtype": "uint8"}', None, "{}"])
def test_a_cache_without_a_whole_record_is_written_again(tmp_path, counted, record):
    cache, path = tmp_path / "cache", written_rows(tmp_path, *ROWS)
    expected = all_shown(corpus_of(path, cache=cache))
    file = caches(cache)[0] / "cache.json"
    if record is None:
        file.unlink()
    elif record == "{}":
        file.write_text(json.dumps(json.loads(file.read_text()) | {"checksums": {}}))
    else:
        file.write_text(record)
    assert all_shown(corpus_of(path, cache=cache)) == expected
    assert len(counted) == 2


def test_a_mistake_in_the_data_leaves_no_cache(tmp_path):
    path = written_rows(tmp_path, *ROWS, {"body": 1})
    with pytest.raises(InputError, match=":51: has none of"):
        corpus_of(path, cache=tmp_path / "cache")
    assert caches(tmp_path / "cache") == []


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    cache, path = tmp_path / "cache", written_rows(tmp_path, *ROWS)
    expected = all_shown(corpus_of(path, cache=cache))
    (found,) = caches(cache)
    found.rename(found.with_name(f"{found.name}.partial"))
    assert all_shown(corpus_of(path, cache=cache)) == expected
    assert caches(cache) == [found]


def test_a_cache_that_is_deleted_meanwhile_goes_on_being_read(tmp_path):
    corpus = corpus_of(written_rows(tmp_path, *ROWS), cache=tmp_path / "cache")
    expected = all_shown(corpus)
    shutil.rmtree(tmp_path / "cache")
    assert all_shown(corpus) == expected


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from executor.data.token_cache import cached_samples

written = 0
def write(writer, tally):
    global written
    written += 1
    time.sleep(0.5)  # the others come meanwhile
    for number in range(2000):
        writer.add(np.full(100, number % 7, np.uint32), np.ones(100, np.bool_))
        writer.end(file=0, line=number + 1, kind=0)

print("ready", flush=True)
sys.stdin.readline()
samples, _ = cached_samples(Path(sys.argv[1]), "key", write, vocab_size=300)
print(written, int(samples.tokens.sum()))
"""


def test_of_several_processes_one_writes_and_all_read(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    found = [process.communicate()[0].split() for process in processes]
    assert sorted(written for written, _ in found) == ["0", "0", "1"]
    assert {total for _, total in found} == {str(sum(number % 7 * 100 for number in range(2000)))}


def test_a_folder_that_cannot_be_written_is_named_with_the_key(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    path = written_rows(tmp_path, *ROWS)
    with pytest.raises(
        InputError, match=r"^cache: tokens cannot be written to .*file/.*; set cache to a folder with room"
    ):
        corpus_of(path, cache=tmp_path / "file" / "cache")

    def full(self, *given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("executor.data.token_cache.SampleWriter.add", full)
    with pytest.raises(ConveyorError, match="No space left on device") as error:
        corpus_of(path, cache=tmp_path / "cache")
    assert error.value.exit_code == 1
    assert caches(tmp_path / "cache") == []


def test_the_default_folder_honours_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == Path("/somewhere/conveyor/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_folder() == Path("/home/someone/.cache/conveyor/data")


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv", "data.txt"])
def test_memory_does_not_grow_with_the_data(tmp_path, monkeypatch, name):
    """Four times the data take less than a quarter of what they have grown by."""
    monkeypatch.setattr("executor.data.tokenize._BATCH_ROWS", 16)
    for module, size in (("tokenize._BATCH_CHARACTERS", 2**14), ("text._PIECE_CHARACTERS", 2**13)):
        monkeypatch.setattr(f"executor.data.{module}", size)
    monkeypatch.setattr("executor.data.text._JSON_CHARACTERS", 2**13)
    monkeypatch.setattr("executor.data.row_files._CHUNK_CHARACTERS", 2**13)
    monkeypatch.setattr("executor.data.token_cache._CHECKED_BYTES", 2**13)
    monkeypatch.setattr("executor.data.documents._COUNTED_TOKENS", 2**13)
    peaks, sizes = [], []
    for rows in (200, 500, 2000):
        texts = [f"{number} " * 100 for number in range(rows)]
        path = tmp_path / str(rows) / name
        path.parent.mkdir()
        if name == "data.jsonl":
            written_rows(path.parent, *({"text": text} for text in texts))
        elif name == "data.json":
            path.write_text(json.dumps([{"text": text} for text in texts]))
        else:
            path.write_text("\n".join([*(["text"] * (name == "data.csv")), *texts]))
        sizes.append(os.path.getsize(path))
        del texts
        tracemalloc.start()
        corpus_of(path, sequence_length=600, cache=tmp_path / "cache")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 0.25 * (sizes[2] - sizes[1])
