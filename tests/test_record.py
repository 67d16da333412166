"""Run records: what they must hold, the hashes that name the code, and the committed lists."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pydantic
import pytest
from sample_runs import failed_record, figures, record

from executor.record import append_result, installed_versions, load_results, without_paths
from executor.source_tree import PACKAGES, source_tree
from simulator.errors import InputError

ROOT = Path(__file__).resolve().parent.parent

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is the independent truth here")


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "core.autocrlf=false", "-c", "core.excludesFile=/dev/null"]
    return subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def git_trees(folder: Path) -> dict[str, str]:
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    return {package: git(folder, "write-tree", f"--prefix={package}/") for package in PACKAGES}


@needs_git
def test_source_tree_equals_git_for_every_kind_of_entry(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f'"""{package}"""\n')
    simulator = tmp_path / "simulator"
    # git sorts the folder `a` between `a.b` and `a0`, as if it were named `a/`.
    for name in ("a.b", "a0", "Z", "ä.py"):
        (simulator / name).write_text(name)
    (simulator / "a" / "deep").mkdir(parents=True)
    (simulator / "a" / "deep" / "x.json").write_bytes(b"\x00\xff")
    (simulator / "script").write_text("#!/bin/sh\n")
    (simulator / "script").chmod(0o755)
    os.symlink("a/deep/x.json", simulator / "link")
    (simulator / "empty").mkdir()
    (simulator / "empty_file").touch()
    for folder in ("__pycache__", ".mypy_cache", "build", "runs"):
        (simulator / "a" / folder).mkdir()
        (simulator / "a" / folder / "x").write_bytes(b"1")
    (simulator / "build.py").write_text("a file, not a folder of products")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    assert source_tree(tmp_path) == git_trees(tmp_path)


@needs_git
def test_source_tree_of_this_project_equals_git(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    assert source_tree() == git_trees(tmp_path)


def test_source_tree_changes_with_the_sources_of_one_package(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    before = source_tree(tmp_path)
    assert before == source_tree()
    module = tmp_path / "executor" / "record.py"
    module.write_text(module.read_text() + "\n")
    after = source_tree(tmp_path)
    assert {package for package in PACKAGES if before[package] != after[package]} == {"executor"}


def test_record_has_the_keys_that_scripts_read():
    keys = {
        "case", "inputs", "status", "source_tree", "versions", "device_name", "predicted", "predicted_from", "measured",
        "ideal", "clip_factors", "steps_timed",
    }  # fmt: skip
    data = record(ideal=figures(646.0)).model_dump(mode="json")
    assert keys <= set(data)
    assert set(data["predicted"]) == set(data["measured"]) == set(data["ideal"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"measured": None}, "measured"),
        ({"predicted": None}, "predicted"),
        ({"steps_timed": 0}, "steps_timed"),
        ({"status": "failed"}, "message"),
        ({"predicted_from": None}, "predicted_from"),
        ({"status": "fine"}, "status"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_record_refuses_what_is_incomplete(changes, complaint):
    with pytest.raises(pydantic.ValidationError, match=complaint):
        record(**changes)


@pytest.mark.parametrize("key", ["tflops", "tokens_per_second", "device_peak_bytes", "host_peak_bytes"])
def test_figures_below_nothing_are_refused_by_name(tmp_path, key):
    path = tmp_path / "box.json"
    append_result(path, record())
    damaged = json.loads(path.read_text())
    damaged[0]["measured"][key] = -1
    path.write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=rf"0\.measured\.{key}"):
        load_results(path)


def test_installed_versions_are_those_of_the_imported_libraries():
    import numpy

    versions = installed_versions()
    assert versions["numpy"] == numpy.__version__
    assert {"python", "torch"} <= set(versions)


def test_results_round_trip_in_order(tmp_path):
    path = tmp_path / "results" / "box.json"
    records = [record("first"), failed_record(), record("third", ideal=figures(646.0))]
    for one in records:
        append_result(path, one)
    assert load_results(path) == records
    assert [row["case"] for row in json.loads(path.read_text())] == ["first", "too large", "third"]
    assert [entry.name for entry in path.parent.iterdir()] == ["box.json"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "JSON"),
        ("{}", "list"),
        ('[{"case": "x"}]', "0.inputs"),
        ('[{"case": 3}]', "0.case"),
    ],
)
def test_damaged_results_get_one_sentence_and_stay_as_they_were(tmp_path, content, complaint):
    path = tmp_path / "box.json"
    path.write_text(content)
    with pytest.raises(InputError, match=complaint) as caught:
        append_result(path, record())
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/someone/models/qwen/config.json", "config.json"),
        ("/mnt/my data/run 1", "run 1"),
        ("~/models/qwen", "qwen"),
        ("/home/a/b.json: cannot be read (No such file)", "b.json: cannot be read (No such file)"),
        ("disk full at '/srv/x/step-3', see (/var/log/y.txt)", "disk full at 'step-3', see (y.txt)"),
        ("config=/etc/a/run.yaml failed", "config=run.yaml failed"),
        ("50 GB/s h2d/d2h and 6 N T / seconds", "50 GB/s h2d/d2h and 6 N T / seconds"),
        ("https://example.org/a/b and data/train.jsonl", "https://example.org/a/b and data/train.jsonl"),
    ],
)
def test_results_keep_no_machine_paths(text, expected):
    cleaned = without_paths(failed_record(message=text, inputs={"model": {"path": text, "sizes": [1, text]}}))
    assert cleaned.message == expected
    assert cleaned.inputs == {"model": {"path": expected, "sizes": [1, expected]}}
    assert without_paths(cleaned) == cleaned
