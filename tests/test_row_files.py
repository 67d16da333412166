"""Formats of rows: the same rows in every format are the same samples, and a broken file names the place."""

import csv
import json
import sys

import numpy as np
import pytest
from data_cases import all_shown, corpus_of, skipped

import executor.data.row_files
from executor.data.row_files import read_records
from simulator.errors import InputError

datasets = pytest.importorskip("datasets", reason="needs the extras `parquet` and `hub`")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"prompt": "What is 2+2?\nSay:", "completion": ' "4", of course'},
    {"prompt": "naïve, 日本語;\t🙂", "completion": "é" * 300},
    {"prompt": "[1, 2]", "completion": "NA"},
    {"prompt": "", "completion": "007"},
]


def write(folder, form, rows=ROWS):
    path = folder / f"rows.{form}"
    if form in ("jsonl", "ndjson"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    elif form in ("csv", "tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter={"csv": ",", "tsv": "\t"}[form])
            writer.writeheader()
            writer.writerows(rows)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    else:
        datasets.disable_progress_bars()
        path = folder / "saved"
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("form", ["ndjson", "json", "csv", "tsv", "parquet", "saved"])
def test_the_same_rows_in_every_format_are_the_same_samples(tmp_path, form):
    expected, found = corpus_of(write(tmp_path, "jsonl")), corpus_of(write(tmp_path, form))
    assert all_shown(found) == all_shown(expected)
    assert found.samples.fingerprint == expected.samples.fingerprint
    assert found.read.num_read == 4


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "saved"])
def test_nested_rows_keep_their_shape(tmp_path, form):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    rows = [{"messages": turns}, {"messages": turns * 2}, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]
    if form in ("parquet", "saved"):  # every row has every column there
        columns = ("messages", "input_ids", "loss_mask")
        rows = [{column: row.get(column) for column in columns} for row in rows]
    corpus = corpus_of(write(tmp_path, form, rows))
    assert corpus.read.kinds == {"messages": 2, "pre-tokenised": 1}
    assert all_shown(corpus)[2] == ("\x01\x02\x03", "\x02\x03")


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv"])
def test_byte_order_mark_line_ends_and_blank_lines_make_no_difference(tmp_path, form):
    path = write(tmp_path, form)
    expected = corpus_of(path)
    text = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") + b"\r\n  \r\n\r\n")
    found = corpus_of(path)
    assert all_shown(found) == all_shown(expected)
    assert found.read.num_read == expected.read.num_read == 4
    # Without a line end at the end of the file the last row is as whole as any.
    path.write_bytes(text.rstrip())
    assert all_shown(corpus_of(path)) == all_shown(expected)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n\n{"text": "b", }\n{"text": "c"}\n',
            ":3:1",
        ),  # column 14 or 15, as Python's version counts
        ("a.jsonl", '{"text": "a"}\n{"text": "hal', ":2:10: is not JSON ("),
        ("a.json", '[{"text": "a"},\n\n  {"text": "b" "c"}]', ":3:16: is not JSON (Expecting ',' delimiter)"),
        ("a.json", '[\n{"text": "a"}\n{"text": "b"}]', ":3:1: is not JSON (Expecting ',' or ']')"),
        ("a.json", '[{"text": "a"},\n {"text": "hal', ":2:11: is not JSON (Unterminated string"),
        ("a.json", '[{"text": "a"},\n {"te', ":2:3: is not JSON (Unterminated string"),
        ("a.json", '[{"text": "a"},\n {"text": ', ":2:11: is not JSON (Expecting value)"),
        ("a.json", '[{"text": "a"}', ":1:15: is not JSON (the array has no end)"),
        ("a.json", '[{"text": "a"},\n', ":2:1: is not JSON (the array has no end)"),
        ("a.json", "plain words", ":1:1: is not JSON (Expecting value)"),
        ("a.csv", 'text\n"a"\n"half', ":3: is not CSV (unexpected end of data)"),
        ("a.csv", 'text\n"a"b\n', ":2: is not CSV ("),
        ("a.csv", "a,a\n1,2\n", ":1: the header names the column 'a' twice"),
        ("a.csv", "prompt;completion\n1;2\n", ":1: the header is one column, 'prompt;completion'; .csv is separated"),
        ("a.tsv", "prompt,completion\n1,2\n", ":1: the header is one column, 'prompt,completion'"),
        ("a.csv", 'prompt,completion\n"a\nb",c\n\nd\n', ":5: has 1 cells, and the header names 2 columns"),
        ("a.parquet", "PAR1 and no more", ": cannot be read as Parquet ("),
    ],
)
def test_a_broken_file_names_line_and_column(tmp_path, name, text, place):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as error:
        corpus_of(path)
    assert str(error.value).startswith(f"{path}{place}")
    if text.rstrip().endswith(("hal", "half", ":", '"te', '"}', "},")) and name != "a.parquet" and "b" not in text:
        assert str(error.value).endswith("looks half-written")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_text_in_another_encoding_is_called_that(tmp_path, name):
    content = {
        "a.jsonl": b'{"text": "a"}\n{"text": "\xff"}\n',
        "a.json": b'[{"text": "a"},\n{"text": "\xff"}]\n',
        "a.csv": b"text\na\n\xff\n",
        "a.txt": "ä".encode() * 2**20 + b"\xff",
    }[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="is not UTF-8 text") as error:
        corpus_of(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))
    if name == "a.txt":
        assert "(byte 2097152)" in str(error.value)


def test_rows_that_cannot_be_read_are_counted_on_request(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": "c"}\n')
    corpus = corpus_of(tmp_path / "a.jsonl", skip_invalid=True)
    assert [whole for whole, _ in all_shown(corpus)] == ["a<eos>", "c<eos>"]
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\nc\nd,e\n")
    corpus = corpus_of(tmp_path / "a.csv", skip_invalid=True)
    assert [whole for whole, _ in all_shown(corpus)] == ["ab<eos>", "de<eos>"]
    assert skipped(corpus) == {"invalid row": 1}


def test_json_is_read_the_same_however_it_is_cut_into_chunks(tmp_path, monkeypatch):
    values = [{"n": n, "text": 'x\\"y\n' * (n % 7), "nested": [[n], {"é": None}]} for n in range(60)]
    array, lines = tmp_path / "array.json", tmp_path / "lines.json"
    array.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")
    lines.write_text("\n".join(json.dumps(value, indent=1) for value in values))
    for size in (1, 7, 64, 2**20):
        monkeypatch.setattr(executor.data.row_files, "_CHUNK_CHARACTERS", size)
        for path in (array, lines):
            records = list(read_records(path))
            assert [record.value for record in records] == values
            numbered = path.read_text(encoding="utf-8").split("\n")
            assert all("{" in numbered[record.line - 1] for record in records)
    (tmp_path / "numbers.json").write_text("[12345, 67890]")
    monkeypatch.setattr(executor.data.row_files, "_CHUNK_CHARACTERS", 3)
    assert [record.value for record in read_records(tmp_path / "numbers.json")] == [12345, 67890]
    (tmp_path / "empty.json").write_text(" [ ] ")
    assert list(read_records(tmp_path / "empty.json")) == []


def test_a_long_cell_is_no_mistake(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f'text\n"{"long " * 100_000}"\n')
    assert corpus_of(path).samples.num_samples == 1


@pytest.mark.parametrize(
    ("form", "package", "extra"), [("parquet", "pyarrow", "parquet"), ("saved", "datasets", "hub")]
)
def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch, form, package, extra):
    path = write(tmp_path, form)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError) as error:
        corpus_of(path, cache=tmp_path / "cache")
    message = str(error.value)
    assert str(path) in message
    assert message.endswith(
        f"needs the package {package}, which is not installed: pip install 'conveyor-train[{extra}]'"
    )


# Hugging Face datasets


def test_a_saved_dataset_of_many_files_is_read_once(tmp_path):
    datasets.disable_progress_bars()
    rows = [{"text": str(number)} for number in range(10)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    corpus = corpus_of(tmp_path / "saved")
    assert [whole for whole, _ in all_shown(corpus)] == [f"{number}<eos>" for number in range(10)]
    assert corpus.read.num_files == 3


def test_a_saved_dataset_with_splits_trains_on_train(tmp_path):
    datasets.disable_progress_bars()
    splits = {name: datasets.Dataset.from_list([{"text": name}] * 3) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    assert {whole for whole, _ in all_shown(corpus_of(tmp_path / "both"))} == {"train<eos>"}
    assert {whole for whole, _ in all_shown(corpus_of(tmp_path / "both" / "test"))} == {"test<eos>"}
    del splits["train"]
    splits["validation"] = splits["test"]
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "others"))
    with pytest.raises(InputError, match="has the splits test, validation; name the folder of one"):
        corpus_of(tmp_path / "others")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hub:owner/name", ("owner/name", None, "train")),
        ("hub:owner/na.me:test[:10]", ("owner/na.me", None, "test[:10]")),
        ("hub:owner/name/main:train[10%:20%]", ("owner/name", "main", "train[10%:20%]")),
    ],
)
def test_a_dataset_of_the_hub_is_asked_for_by_name(tmp_path, monkeypatch, name, asked):
    saved = datasets.load_from_disk(str(write(tmp_path, "saved")))
    calls = []

    def load_dataset(path, config=None, *, split):
        calls.append((path, config, split))
        return saved

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = corpus_of(name, columns={"text": "completion"})
    assert calls == [asked]
    assert all_shown(corpus)[2] == ("NA<eos>", "NA<eos>")
    report = corpus.report(corpus.documents, num_rows=1, num_held_out=0)
    assert report.source == name
    assert report.longest_at == f"{name}:2"


def test_a_name_that_is_none_of_the_hub_s_is_refused():
    with pytest.raises(InputError, match="is not hub:owner/name"):
        corpus_of("hub:name")


def test_parts_of_one_saved_dataset_are_different_data(tmp_path, monkeypatch):
    saved = datasets.load_from_disk(str(write(tmp_path, "saved")))
    for indices in ([0, 1], [1, 2]):
        part = saved.select(indices)
        monkeypatch.setattr(datasets, "load_dataset", lambda *given, part=part, **named: part)
        expected = [ROWS[index]["prompt"] + ROWS[index]["completion"] + "<eos>" for index in indices]
        assert [whole for whole, _ in all_shown(corpus_of("hub:owner/name"))] == expected
    assert np.array_equal(corpus_of("hub:owner/name").samples.origins[:, 1], [1, 2])
