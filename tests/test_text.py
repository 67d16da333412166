import os

import pytest
from tiny_tokenizer import byte_level_folder, sentence_piece_folder

import executor.data.text
from executor.data.report import Tally
from executor.data.text import TEXT_SUFFIXES, find_files, read_stream
from executor.tokenizer import ByteTokenizer, FolderTokenizer
from simulator.errors import InputError

BYTES = ByteTokenizer(300)


def stream_of(files, tokenizer=BYTES):
    tally = Tally("source")
    return read_stream(files, tokenizer, tally), tally


def written(path, text, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode(**kwargs))
    return path


def test_documents_follow_each_other_in_sorted_order_each_ended_once(tmp_path):
    written(tmp_path / "b.txt", "second\n")
    written(tmp_path / "a" / "z.py", "first = 1\n")
    written(tmp_path / "c.md", "third")
    for ignored in (".git/x.py", "__pycache__/x.py", "site-packages/x.py", ".hidden.txt", "image.png"):
        written(tmp_path / ignored, "no")
    os.symlink(tmp_path / "nowhere.txt", tmp_path / "broken.txt")
    files = find_files(tmp_path, TEXT_SUFFIXES)
    assert [file.name for file in files] == ["z.py", "b.txt", "c.md"]
    stream, tally = stream_of(files)
    assert stream.tolist() == [*b"first = 1\n", 256, *b"second\n", 256, *b"third", 256]
    assert stream.dtype == "uint16"
    assert (tally.num_files, tally.num_read) == (3, 3)


def test_byte_order_mark_and_line_ends_make_no_difference(tmp_path):
    plain = written(tmp_path / "plain.txt", "one\n\ntwö\n")
    windows = written(tmp_path / "windows.txt", "one\r\n\r\ntwö\r\n", encoding="utf-8-sig")
    assert stream_of([plain])[0].tolist() == stream_of([windows])[0].tolist()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', "holds JSON, not text; name it .jsonl"),
        ('[{"text":\n "a"}]', "holds JSON, not text; name it .jsonl"),
        ("caf\xe9".encode("latin-1"), "is not UTF-8 text (byte 3)"),
        ("", "is empty"),
        (" \n\n", "is empty"),
    ],
)
def test_unusable_file_is_refused_alone_and_counted_among_others(tmp_path, content, reason):
    bad = written(tmp_path / "bad.txt", content)
    with pytest.raises(InputError) as error:
        stream_of([bad])
    assert str(error.value).startswith(f"{bad}: {reason}")
    stream, tally = stream_of([bad, written(tmp_path / "good.txt", "ok")])
    assert stream.tolist() == [*b"ok", 256]
    assert sum(tally.skipped.values()) == 1
    (where,) = tally.first_skipped.values()
    assert where == str(bad)


@pytest.mark.parametrize("text", ["{not json", "[1] a footnote\nmore", '{"a": 1} is an object'])
def test_text_that_only_begins_like_json_is_text(tmp_path, text):
    assert stream_of([written(tmp_path / "a.txt", text)])[0].tolist() == [*text.encode(), 256]


def test_long_documents_are_cut_for_the_tokenizer_and_not_in_the_stream(tmp_path, monkeypatch):
    text = "".join(f"line {number} of the text\n" for number in range(200)) + "x" * 900
    file = written(tmp_path / "long.txt", text)
    for tokenizer in (BYTES, FolderTokenizer(byte_level_folder(tmp_path / "tokenizer"), 320)):
        whole = stream_of([file, file], tokenizer)[0].tolist()
        monkeypatch.setattr(executor.data.text, "_PIECE_CHARACTERS", 300)
        monkeypatch.setattr(executor.data.text, "_BATCH_CHARACTERS", 1000)
        cut = stream_of([file, file], tokenizer)[0].tolist()
        monkeypatch.undo()
        assert tokenizer.decode(cut) == tokenizer.decode(whole)
        assert cut.count(tokenizer.eos_id) == 2
        assert cut[-1] == tokenizer.eos_id


def test_beginning_and_end_are_written_once_even_if_the_text_brings_them(tmp_path):
    tokenizer = FolderTokenizer(sentence_piece_folder(tmp_path / "tokenizer"), 300)
    plain = stream_of([written(tmp_path / "a.txt", "the dog")], tokenizer)[0].tolist()
    assert plain[0] == 1
    assert plain[-1] == 2
    assert plain.count(1) == plain.count(2) == 1
    marked = stream_of([written(tmp_path / "b.txt", "<s>the dog</s>")], tokenizer)[0].tolist()
    assert (marked.count(1), marked.count(2), marked[0], marked[-1]) == (1, 1, 1, 2)
