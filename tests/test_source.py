"""What a path names: files of one kind, in a fixed order, and what is said of all else."""

import os

import pytest
from data_cases import all_shown, corpus_of, written_rows

import executor.data.corpus
from executor.data.source import find_source
from simulator.errors import InputError, UnsupportedChoice


def names(source):
    return [path.name for path in source.files]


def filled(folder, *files):
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return folder


def test_a_folder_of_rows_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "z").mkdir()
    (tmp_path / "a").mkdir()
    written_rows(tmp_path / "z", {"text": "last"}, name="a.jsonl")
    written_rows(tmp_path / "a", {"text": "first"}, name="z.json")
    (tmp_path / "m.csv").write_text("text\nmiddle\n")
    (tmp_path / "README.md").write_text("about the rows")
    (tmp_path / "dataset_infos.json").write_text("{}")
    corpus = corpus_of(tmp_path)
    assert [whole for whole, _ in all_shown(corpus)] == ["first<eos>", "middle<eos>", "last<eos>"]
    assert corpus.source.left_out == ()


def test_other_splits_than_train_are_left_out_and_said(tmp_path):
    parts = ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet")
    source = find_source(filled(tmp_path / "a", *(f"data/{part}" for part in parts)))
    assert names(source) == list(parts[:2])
    assert source.left_out == ("1 file of other splits than train (test-00000-of-00001.parquet, ...)",)
    source = find_source(filled(tmp_path / "b", "train/0.jsonl", "validation/0.jsonl", "extra.jsonl"))
    assert [str(path.relative_to(tmp_path / "b")) for path in source.files] == ["extra.jsonl", "train/0.jsonl"]
    # Where no file is called train, the others' names mean nothing.
    assert names(find_source(filled(tmp_path / "c", "test.jsonl", "dev.jsonl"))) == ["dev.jsonl", "test.jsonl"]
    assert names(find_source(filled(tmp_path / "d", "training_a.jsonl", "tests.jsonl"))) == [
        "tests.jsonl",
        "training_a.jsonl",
    ]


def test_text_and_rows_in_one_folder_are_told_apart(tmp_path):
    with pytest.raises(InputError, match=r"holds text and rows \(text\.txt, rows\.jsonl"):
        find_source(filled(tmp_path / "a", "text.txt", "rows.jsonl"))
    project = find_source(filled(tmp_path / "b", "main.py", "package.json", "table.csv", "README.md"))
    assert names(project) == ["README.md", "main.py"]
    assert project.left_out == ("2 files that are not text (package.json, ...)",)
    with pytest.raises(InputError, match=r"holds rows\.csv and rows\.jsonl, the same rows twice\?"):
        find_source(filled(tmp_path / "c", "rows.jsonl", "rows.csv"))


def test_paths_that_lead_nowhere_are_sentences(tmp_path):
    filled(tmp_path, "texts/text.txt")
    with pytest.raises(
        InputError, match=rf"^data: .*texd\.txt does not exist; did you mean {tmp_path}/texts/text\.txt"
    ):
        find_source(tmp_path / "texts" / "texd.txt")
    with pytest.raises(InputError, match=rf"did you mean {tmp_path}/texts\?"):
        find_source(tmp_path / "text" / "text.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: has no text files \(\.txt, .* and no rows \(\.jsonl, "):
        find_source(tmp_path / "empty")


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.arrow", "rows.xlsx", "rows.zip", "rows.PDF"])
def test_formats_that_are_not_read_are_refused_by_name(tmp_path, name):
    filled(tmp_path, name)
    with pytest.raises(
        UnsupportedChoice, match=rf"\.{name.rpartition('.')[2].lower()} is not read; unpack it or write"
    ):
        find_source(tmp_path / name)


def test_the_digest_is_of_content_and_names_inside(tmp_path):
    first, same, renamed = (filled(tmp_path / name, "a.txt", "b/c.txt") for name in ("first", "same", "renamed"))
    assert find_source(first).digest() == find_source(same).digest()
    (renamed / "a.txt").rename(renamed / "d.txt")
    changed = filled(tmp_path / "changed", "a.txt", "b/c.txt")
    (changed / "a.txt").write_text("y")
    digests = {find_source(folder).digest() for folder in (first, renamed, changed)}
    assert len(digests) == 3
    assert find_source(first / "a.txt").digest() != find_source(changed / "a.txt").digest()


def test_a_cache_inside_the_data_is_refused(tmp_path):
    written_rows(tmp_path, {"text": "a"})
    with pytest.raises(InputError, match=r"^cache: .*/cache lies inside the data, .*; set it to a folder elsewhere"):
        corpus_of(tmp_path, cache=tmp_path / "cache")
    corpus_of(tmp_path / "data.jsonl", cache=tmp_path / "cache")


def test_data_that_change_while_they_are_read_are_not_cached(tmp_path, monkeypatch):
    path = written_rows(tmp_path, {"text": "a"})
    original = executor.data.corpus.write_rows

    def meanwhile(*given, **named):
        original(*given, **named)
        with path.open("a") as file:
            file.write('{"text": "b"}\n')

    with monkeypatch.context() as patched:
        patched.setattr(executor.data.corpus, "write_rows", meanwhile)
        with pytest.raises(InputError, match="has changed while it was read"):
            corpus_of(path)
    assert [whole for whole, _ in all_shown(corpus_of(path))] == ["a<eos>", "b<eos>"]


def test_names_and_rows_that_no_terminal_takes_are_shown_with_question_marks(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    with open(path, "w") as file:
        file.write('{"text": "", "more": "\\ud800"}\n{"text": "\\ud800"}\n')
    corpus = corpus_of(tmp_path)
    report = corpus.report(corpus.documents, num_rows=1, num_held_out=0)
    assert report.first_skipped == {"empty text": f'{tmp_path}/caf?.jsonl:1: {{"text": "", "more": "?"}}'}
    assert "\n".join(report.lines()).encode()
