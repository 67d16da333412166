"""Hugging Face's own library under `hub:` names, without a network: from a folder, from its cache, and from nowhere."""

import json
import shutil
from pathlib import Path

import pytest

from executor.data.hub import download
from simulator.errors import InputError

datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")
import huggingface_hub  # noqa: E402  comes with datasets

TRAIN = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(5)]
TEST = [{"prompt": "1 + 1 =", "completion": " 2"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library's cache, and no network: what is in neither folder nor cache cannot be had."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def write_dataset(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, rows in (("train", TRAIN), ("test", TEST)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("hub:owner/sums", TRAIN),
        ("hub:owner/sums:test", TEST),
        ("hub:owner/sums:train[1:3]", TRAIN[1:3]),
        ("hub:owner/sums/default:train[60%:]", TRAIN[3:]),
    ],
)
def test_splits_and_parts_are_read_by_the_library(name: str, rows: list[dict[str, str]]) -> None:
    write_dataset(Path("owner/sums"))
    found = download(name)
    assert [record.value for record in found.records()] == rows
    assert [record.line for record in found.records()] == list(range(1, len(rows) + 1))
    assert all(path.is_file() for path in found.files)


def test_parts_of_one_dataset_have_names_of_their_own() -> None:
    write_dataset(Path("owner/sums"))
    parts = ["hub:owner/sums", "hub:owner/sums:train[:2]", "hub:owner/sums:train[2:4]", "hub:owner/sums:test"]
    assert len({download(name).identity for name in parts}) == len(parts)
    assert download(parts[1]).identity == download(parts[1]).identity


def test_what_was_downloaded_once_is_found_without_a_network(cache: Path) -> None:
    write_dataset(Path("owner/sums"))
    download("hub:owner/sums")
    shutil.rmtree("owner")
    (cache / "sums").rename(cache / "owner___sums")  # as the library calls what came from the Hub
    assert [record.value for record in download("hub:owner/sums").records()] == TRAIN


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("hub:nobody/nothing", ("Couldn't reach 'nobody/nothing' on the Hub", "without a network only what")),
        ("hub:owner/sums:validation", ('Unknown split "validation"', "train", "test")),
        ("hub:owner/sums/french", ("french",)),
    ],
)
def test_what_cannot_be_had_is_a_sentence(name: str, reasons: tuple[str, ...]) -> None:
    write_dataset(Path("owner/sums"))
    with pytest.raises(InputError) as refused:
        download(name)
    message = str(refused.value)
    assert message.startswith(f"data: {name} cannot be opened (")
    assert all(reason in message for reason in reasons), message
    assert "\n" not in message
