"""Files that are written, and folders that are taken: what was there stays, or is replaced whole."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from front_door import WORKLOAD, content, training

from executor.folder import discard, taken_folder
from planner.calibrate import fold_runs, load_run
from planner.plan import Plan
from simulator.files import may_write_whole, write_whole
from simulator.hardware import load_hardware


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


@pytest.mark.parametrize("option", ["--model", "--hardware", "--costs", "--calibrate"])
def test_a_plan_is_not_written_over_what_it_is_made_from(given, tmp_path, complaint, option):
    shutil.copytree(given / "model", tmp_path / "model")
    for name, source in (("mine.json", load_hardware("cpu-2-core")), ("run/plan.json", None)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source.model_dump_json() if source else (given / "plan.json").read_text())
    (tmp_path / "costs.json").write_text("{}")
    files = {"--model": "model/config.json", "--hardware": "mine.json", "--costs": "costs.json"}
    output = tmp_path / files.get(option, "run/plan.json")
    before = content(tmp_path)
    named = ["--model", tmp_path / "model", "--hardware", tmp_path / "mine.json", "--costs", tmp_path / "costs.json"]
    sizes = ["--sequence-length", 16, "--tokens-per-step", 64, "--calibrate", tmp_path / "run"]
    said = complaint("plan", *named, *sizes, "--output", output)
    assert f"--output: {output} is what {option} names, and would be lost" in said
    assert content(tmp_path) == before


def test_a_plan_from_a_run_alone_says_what_nobody_measured(given, tmp_path, complaint):
    (tmp_path / "run").mkdir()
    shutil.copy(given / "plan.json", tmp_path / "run")
    Plan.load(given / "plan.json").replay().timeline.save(tmp_path / "run" / "timeline.json")
    asked = ["plan", "--model", given / "model", *WORKLOAD, "--calibrate", tmp_path / "run"]
    assert complaint(*asked, code=0).startswith("conveyor: --calibrate: without --costs only what the runs did is ")
    costs = tmp_path / "costs.json"
    fold_runs([load_run(tmp_path / "run")]).save(costs)
    assert complaint(*asked, "--costs", costs, code=0) == ""


def test_a_trace_is_not_written_over_the_plan(given, complaint):
    before = (given / "plan.json").read_bytes()
    assert "would be lost" in complaint("simulate", given / "plan.json", "--trace", given / "plan.json")
    assert (given / "plan.json").read_bytes() == before


def test_a_replay_on_another_machine_says_what_does_not_fit_there(given, tmp_path, complaint):
    profile = json.loads(load_hardware("cpu-2-core").model_dump_json())
    for tier in ("device", "host"):
        profile[tier]["memory_bytes"] = 350 * 2**20
    profile["host"]["pinned_limit_bytes"] = None
    (tmp_path / "small.json").write_text(json.dumps(profile))
    said = complaint("simulate", given / "plan.json", "--hardware", tmp_path / "small.json", code=0)
    assert said.startswith("conveyor: host peak: ")
    assert "more than the 350.0 MiB of cpu-2-core: the plan does not fit there" in said
    assert complaint("simulate", given / "plan.json", "--hardware", "h200", code=0) == ""


def test_a_pipe_is_written_in_place():
    """`--output /dev/stdout | jq`: what the link names is no path of a file."""
    reading, writing = os.pipe()
    write_whole(f"/dev/fd/{writing}", "new")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "new"


def test_a_file_in_a_folder_that_takes_no_other_cannot_be_replaced_and_a_device_can_be_written(tmp_path, monkeypatch):
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "there").touch()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed" / "there")
    (tmp_path / "closed" / "link").symlink_to(tmp_path / "open" / "there")
    closed = {tmp_path / "closed", Path("/dev")}  # to whoever is not root
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in closed)
    assert may_write_whole("/dev/null")
    writable = {name: may_write_whole(tmp_path / name) for name in ("open/there", "open/new", "closed/link")}
    assert all(writable.values()), writable
    assert not any(may_write_whole(tmp_path / name) for name in ("closed/there", "closed/new", "open/link"))


def test_two_writers_of_one_file_leave_the_work_of_one(tmp_path, monkeypatch):
    """The other process writes the same file between this one's writing and its renaming."""
    replace, own = os.replace, os.getpid()

    def late(*paths):
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        write_whole(tmp_path / "a.json", "other, and longer")
        replace(*paths)

    monkeypatch.setattr(os, "replace", late)
    write_whole(tmp_path / "a.json", "mine")
    assert content(tmp_path) == {"a.json": b"mine"}


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
