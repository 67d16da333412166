"""Data that are not what their names say, and values that are missing or that Python has none for."""

import codecs
import gzip
import os

import pyarrow
import pytest
from data_cases import all_shown, corpus_of, skipped, written_rows
from pyarrow import parquet

from executor.data.source import find_source
from simulator.errors import InputError

ROW = '{"prompt": "2+2? ", "completion": "4"}'


# Files


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", gzip.compress(ROW.encode(), mtime=0), "is gzip by its content, not JSONL; unpack it"),
        ("a.csv", "prompt,completion\n2,4\n".encode("utf-16"), "is UTF-16 by its content, not CSV; save it as UTF-8"),
        ("a.tsv", codecs.BOM_UTF16_BE + "a".encode("utf-16-be"), "is UTF-16 by its content"),
        ("a.json", b"PK\x03\x04 and so on", "is zip by its content, not JSON; unpack it"),
        ("a.parquet", b"\x28\xb5\x2f\xfd", "is zstd by its content, not PARQUET; unpack it"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer by its content"),
        ("a.jsonl", b"PAR1", "is parquet by its content, not JSONL; name it .parquet"),
    ],
)
def test_a_file_of_another_format_than_its_name_says_is_called_by_its_own(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}: {reason}"):
        corpus_of(tmp_path / name)


@pytest.mark.parametrize(
    "text", [f"[{ROW},\n{ROW}]", f"[\n{ROW}\n]", '{\n"prompt": "a",\n"completion": "b"\n}', f"[{ROW}, {ROW}]"]
)
def test_json_over_several_lines_is_told_that_it_belongs_in_a_json_file(tmp_path, text):
    with pytest.raises(InputError, match=r"data\.jsonl:1:.*\.json$"):
        corpus_of(written_rows(tmp_path, text))


def test_one_broken_row_among_others_is_no_array(tmp_path):
    with pytest.raises(InputError, match=r"data\.jsonl:2:3: is not JSON \([^;]*\)$"):
        corpus_of(written_rows(tmp_path, ROW, "[1", ROW))


def test_files_of_formats_that_are_not_read_are_named_where_others_lie_beside_them(tmp_path):
    written_rows(tmp_path, ROW, name="a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(ROW.encode()))
    assert find_source(tmp_path).left_out == ("1 file of formats that are not read (b.jsonl.gz, ...)",)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputError, match=r"b\.jsonl\.gz is not read: unpack it"):
        find_source(tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl", "text.md"])
def test_a_file_with_two_names_is_trained_once(tmp_path, name):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / f"z-{name}").write_text(ROW)
    (tmp_path / f"elsewhere-{name}").write_text(ROW)
    os.symlink(f"z-{name}", folder / f"a-{name}")
    os.symlink(f"../elsewhere-{name}", folder / f"b-{name}")
    os.symlink(f"../elsewhere-{name}", folder / f"c-{name}")
    source = find_source(folder)
    assert [path.name for path in source.files] == [f"b-{name}", f"z-{name}"]
    assert source.left_out == (f"2 links to files that are read under another name (a-{name}, ...)",)


def test_names_that_others_take_are_told_what_to_write_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("gone.jsonl", "dangling.jsonl")
    for name, reason in {
        "https://example.org/rows.jsonl": "https://example.org/rows.jsonl does not exist; nothing is fetched",
        "owner/name": "or hub:owner/name for a dataset",
        "dangling.jsonl": "is a link to gone.jsonl, which does not exist",
    }.items():
        with pytest.raises(InputError, match=reason):
            find_source(name)


# Values


def test_values_that_python_cannot_hold_matter_only_where_they_would_be_trained(tmp_path):
    """A date after the year 9999 and text that is not UTF-8, as other writers of Parquet leave them."""
    whole = pyarrow.array(["good", "bad"])
    broken = pyarrow.array([b"good", b"b\xff"], pyarrow.binary())
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, broken.buffers())
    dates = pyarrow.array([0, 2**62], pyarrow.timestamp("us"))
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": whole, "when": dates, "raw": broken}), path)
    assert [text for text, _ in all_shown(corpus_of(path))] == ["good<eos>", "bad<eos>"]
    for column in ("when", "raw"):
        with pytest.raises(InputError, match=r"rows\.parquet:\d: 'text' (is datetime|cannot be read \()"):
            corpus_of(path, columns={"text": column})
    corpus = corpus_of(path, columns={"text": "raw"}, skip_invalid=True)
    assert all_shown(corpus) == [("good<eos>", "good<eos>")]
    assert skipped(corpus) == {"invalid row": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "2+2?", "completion": null}', "empty answer"),
        ('{"prompt": null, "completion": null}', "empty answer"),
        ('{"instruction": "2+2?", "output": null}', "empty answer"),
        ('{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": null}]}', "empty answer"),
        ('{"messages": null}', "no answer"),
        ('{"conversations": []}', "no answer"),
        ('{"text": null}', "empty text"),
        ('{"input_ids": null}', "no trained token"),
    ],
)
def test_an_answer_that_is_null_skips_its_row_like_an_empty_one(tmp_path, row, reason):
    corpus = corpus_of(written_rows(tmp_path, row, ROW))
    assert skipped(corpus) == {reason: 1}
    assert all_shown(corpus) == [("2+2? 4<eos>", "4<eos>")]


@pytest.mark.parametrize("row", ['{"prompt": null, "completion": "4"}', '{"instruction": null, "output": "4"}'])
def test_a_question_that_is_null_is_named(tmp_path, row):
    with pytest.raises(InputError, match=r"data\.jsonl:1: has no '(prompt|instruction)'"):
        corpus_of(written_rows(tmp_path, row))


def test_what_a_library_says_in_lines_is_one_sentence(tmp_path):
    """pyarrow tells of a damaged page in several lines; an error has one for each mistake."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["good"] * 50}), path)
    whole = path.read_bytes()
    said = []
    for at in range(4, 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            corpus_of(path)
        except InputError as error:
            said.append(str(error))
    assert said
    assert not any("\n" in sentence for sentence in said)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_row_with_a_key_twice_is_counted_where_mistakes_are_and_the_next_rows_read_on(tmp_path, name):
    path = written_rows(tmp_path, ROW, '{"text": "b", "more": {"x": 1, "x": {"y": [2]}}}', ROW, name=name)
    with pytest.raises(InputError, match=rf"{name}:2: the key 'x' stands twice in one object"):
        corpus_of(path)
    corpus = corpus_of(path, skip_invalid=True)
    assert skipped(corpus) == {"invalid row": 1}
    assert len(all_shown(corpus)) == 2
