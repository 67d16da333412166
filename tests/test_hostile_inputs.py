"""Inputs that nobody means to give: damaged files, paths of no use, numbers beyond reason, two runs in one place."""

import errno
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
from front_door import WORKLOAD, content, training

from analysis.cli import main
from executor.folder import discard, taken_folder
from simulator.files import write_whole

DIGITS = "1" * 5000  # more than Python turns into a number


# Paths


@pytest.mark.parametrize("key", ["output", "data", "plan", "model", "cache", "resume"])
def test_a_path_that_no_file_can_have_is_named_by_its_key(given, tmp_path, complaint, key):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in ("x" * 300, '"a\\0/b"', tmp_path / "circle"):
        settings = {"plan": given / "plan.json", "data": given / "data.txt", "output": tmp_path / "run"} | {key: path}
        err = complaint("train", "max_steps=2", *(f"{name}={value}" for name, value in settings.items()))
        assert f"{key}: " in err
        assert "cannot be used" in err


def test_a_model_whose_path_is_no_text_is_refused_by_the_plan_that_would_name_it(given, tmp_path, complaint):
    folder = tmp_path / os.fsdecode(b"model-\xff")
    shutil.copytree(given / "model", folder)
    assert "holds bytes that are no text" in complaint("plan", "--model", folder, *WORKLOAD)


def test_a_file_in_the_caches_place_is_wrong_input(given, tmp_path, complaint):
    (tmp_path / "file").touch()
    settings = training(given, tmp_path / "run", f"cache={tmp_path / 'file'}")
    assert "cache: tokens cannot be written" in complaint(*settings)


def test_what_the_system_refuses_is_a_sentence(given, complaint):
    err = complaint("simulate", given / "plan.json", "--trace", "/dev/full", code=1)
    assert "cannot be read or written (No space left on device); free some space" in err
    long = "x" * 300
    err = complaint("plan", "--model", given / "model", "--hardware", long, *WORKLOAD[2:])
    assert f"{long}: cannot be read or written (File name too long)" in err


def test_output_that_a_full_disk_does_not_take_is_no_traceback(given, complaint, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert "No space left on device" in complaint("simulate", given / "plan.json", code=1)


def test_a_sample_that_the_terminals_encoding_lacks_ends_no_run(given, tmp_path, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main([str(part) for part in training(given, tmp_path / "run")]) == 0
    assert b"\\u27e6masked\\u27e7" in printed.getvalue()


# Files that are written, and folders that are taken


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.json", "old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "a.json", "new")
    assert content(tmp_path) == {"a.json": b"old"}


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "a.json")
    write_whole(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real" / "a.json").read_text() == "new"
    write_whole("/dev/null", "new")
    assert not Path("/dev/null").is_file()


def test_a_directory_in_which_a_run_is_at_work_is_refused(given, tmp_path, complaint):
    output = tmp_path / "run"
    with taken_folder(output):
        assert "another process writes a run here" in complaint(*training(given, output))
        assert content(output) == {}
    complaint(*training(given, output, "save_every=2"), code=0)
    shutil.rmtree(output / "model")
    before = content(output)
    with taken_folder(output):
        assert "another process writes a run here" in complaint(*training(given, output, "resume=auto"))
    assert content(output) == before


def test_files_in_the_place_of_leftovers_stop_no_save(given, tmp_path, complaint):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000009.partial").touch()
    complaint(*training(given, tmp_path / "run"), code=0)
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004"]
    discard(checkpoints / "nothing")
