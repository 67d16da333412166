import os

import pytest
from data_cases import corpus_of, first_skipped, skipped
from tiny_tokenizer import byte_level_folder, sentence_piece_folder

import executor.data.text
import executor.data.tokenize
from executor.data.source import TEXT_SUFFIXES, find_files
from simulator.errors import InputError


def tokens_of(source, model_folder=None):
    return corpus_of(source, model_folder=model_folder).samples.tokens.tolist()


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
    corpus = corpus_of(tmp_path)
    samples = corpus.samples
    assert samples.tokens.tolist() == [*b"first = 1\n", 256, *b"second\n", 256, *b"third", 256]
    assert samples.tokens.dtype == "uint16"
    assert samples.bounds.tolist() == [0, 11, 19, 25]
    assert samples.trained.all()
    assert (corpus.read.num_files, corpus.read.num_read, corpus.read.kinds) == (3, 3, {"text": 3})


def test_byte_order_mark_and_line_ends_make_no_difference(tmp_path):
    plain = written(tmp_path / "plain.txt", "one\n\ntwö\n")
    windows = written(tmp_path / "windows.txt", "one\r\n\r\ntwö\r\n", encoding="utf-8-sig")
    assert tokens_of(plain) == tokens_of(windows)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', "holds JSON, not text; name it .jsonl"),
        ('[{"text":\n "a"}]', "holds JSON, not text; name it .jsonl"),
        ("caf\xe9".encode("latin-1"), "is not UTF-8 text (byte 3)"),
        ("", "is empty"),
        (" \n\n", "is empty"),
        ('[{"text": "a"}, {"text": "b"}', "holds JSON, not text; name it .jsonl (one row a line) or .json"),
    ],
)
def test_unusable_file_is_refused_alone_and_counted_among_others(tmp_path, content, reason):
    bad = written(tmp_path / "bad.txt", content)
    with pytest.raises(InputError) as error:
        corpus_of(bad)
    assert str(error.value).startswith(f"{bad}: {reason}")
    written(tmp_path / "good.txt", "ok")
    corpus = corpus_of(tmp_path)
    assert corpus.samples.tokens.tolist() == [*b"ok", 256]
    assert sum(skipped(corpus).values()) == 1
    assert list(first_skipped(corpus).values()) == [str(bad)]


@pytest.mark.parametrize(
    ("name", "refused"), [("a.md", True), ("a.html", True), ("a.dat", True), ("a.log", False), ("a.js", False)]
)
def test_rows_under_any_name_of_prose_are_told_and_logs_and_code_are_text(tmp_path, name, refused):
    path = written(tmp_path / name, '{"text": "a"}\n{"text": "b"}\n')
    if refused:
        with pytest.raises(InputError, match="holds JSON, not text"):
            corpus_of(path)
    else:
        assert len(tokens_of(path)) == 29


@pytest.mark.parametrize("text", ["{not json", "[1] a footnote\nmore", '{"a": 1} is an object'])
def test_text_that_only_begins_like_json_is_text(tmp_path, text):
    assert tokens_of(written(tmp_path / "a.txt", text)) == [*text.encode(), 256]


def test_json_too_long_to_be_parsed_as_a_whole_is_known_by_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(executor.data.text, "_JSON_CHARACTERS", 100)
    monkeypatch.setattr(executor.data.text, "_PIECE_CHARACTERS", 60)
    for text in ('[{"text":\n"a"},' * 50, '{"text": "a"}\n' * 50):
        with pytest.raises(InputError, match="holds JSON, not text"):
            corpus_of(written(tmp_path / "rows.txt", text))
    corpus_of(written(tmp_path / "prose.txt", "[sic] and so on\n" * 50))


def test_long_documents_are_cut_for_the_tokenizer_and_not_in_the_sample(tmp_path, monkeypatch):
    text = "".join(f"line {number} of the text\r\n" for number in range(200)) + "x" * 900
    written(tmp_path / "texts" / "a.txt", text)
    written(tmp_path / "texts" / "b.txt", text)
    for folder in (None, byte_level_folder(tmp_path / "tokenizer")):
        whole = corpus_of(tmp_path / "texts", model_folder=folder)
        with monkeypatch.context() as patched:
            patched.setattr(executor.data.text, "_PIECE_CHARACTERS", 300)
            patched.setattr(executor.data.tokenize, "_BATCH_CHARACTERS", 1000)
            cut = corpus_of(tmp_path / "texts", model_folder=folder, cache=tmp_path / "cache")
        tokenizer, tokens = cut.tokenizer, cut.samples.tokens.tolist()
        end = tokenizer.decode([tokenizer.eos_id])
        assert tokenizer.decode(tokens) == (text.replace("\r\n", "\n") + end) * 2
        assert tokenizer.decode(tokens) == tokenizer.decode(whole.samples.tokens)
        assert tokens.count(tokenizer.eos_id) == cut.samples.num_samples == 2


def test_line_ends_that_are_cut_in_two_make_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(executor.data.text, "_PIECE_CHARACTERS", 4)
    path = written(tmp_path / "a.txt", "abc\r\nab\r\r\n\r\r\r\nabc\r")
    assert tokens_of(path) == [*b"abc\nab\r\n\r\r\nabc\r", 256]


def test_beginning_and_end_are_written_once_even_if_the_text_brings_them(tmp_path):
    folder = sentence_piece_folder(tmp_path / "tokenizer")
    plain = tokens_of(written(tmp_path / "a.txt", "the dog"), folder)
    assert plain[0] == 1
    assert plain[-1] == 2
    assert plain.count(1) == plain.count(2) == 1
    marked = tokens_of(written(tmp_path / "b.txt", "<s>the dog</s>"), folder)
    assert (marked.count(1), marked.count(2), marked[0], marked[-1]) == (1, 1, 1, 2)
