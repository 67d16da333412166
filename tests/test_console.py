"""A run whose console goes away, or that is interrupted while it saves, loses no step that was saved.

Real processes, pipes and terminals: one program imports torch once and forks a run for each end.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from front_door import training

from analysis.cli import main
from executor.checkpoint import latest, read_record
from executor.run_directory import load_run
from executor.stop_requests import StopRequest, stop_requests

ROOT = Path(__file__).parents[1]
# Each run waits before its sixth batch until its console has gone, so nothing depends on who is faster.
PROGRAM = """
import io, json, os, pty, signal, sys, time
from pathlib import Path
import torch, transformers
from transformers.models.qwen2 import modeling_qwen2
from analysis.cli import main
from executor import checkpoint, launch, run
from executor.data.dataset import Dataset

batch, save = Dataset.batch, checkpoint.save


def waiting_batch(self, step):
    while step == 5 and not gone.exists():
        time.sleep(0.01)
    return batch(self, step)


def interrupted_batch(self, step):
    if step == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return batch(self, step)


def endless_save(*values, progress, written, **named):
    def written_and_stuck(block):
        written(block)
        if progress.step > 4:
            gone.touch()
            time.sleep(600)

    return save(*values, progress=progress, written=written_and_stuck, **named)


def run_on(arguments, reader, stdout):
    os.setsid()
    os.close(reader)
    if os.isatty(stdout):
        stdout = os.open(os.ttyname(stdout), os.O_RDWR)  # which makes it the session's
        os.dup2(stdout, 2)
    os.dup2(stdout, 1)
    sys.stdout = open(1, "w", closefd=False)
    sys.exit(main(arguments))


for how, arguments in json.loads(sys.argv[1]).items():
    gone = Path(sys.argv[2]) / how
    Dataset.batch, checkpoint.save = waiting_batch, save
    if how == "interrupts":
        Dataset.batch, checkpoint.save = interrupted_batch, endless_save
    reader, writer = pty.openpty() if how == "terminal" else os.pipe()
    if not (child := os.fork()):
        run_on(arguments, reader, writer)
    os.close(writer)
    seen = b""
    while b"step 5/" not in seen:
        seen += os.read(reader, 4096)
    if how == "interrupts":
        while not gone.exists():
            time.sleep(0.01)
        os.kill(child, signal.SIGINT)
    else:
        os.close(reader)
        gone.touch()
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_of_8_steps(given: Path, output: Path, *settings: str) -> list[str]:
    arguments = [str(part) for part in training(given, output, "save_every=4", *settings)]
    return ["max_steps=8" if part == "max_steps=4" else part for part in arguments]


@pytest.fixture(scope="module")
def ended(given: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A folder of runs, each ended as its name says, and their exit codes; minus the signal that ended it."""
    folder, waits = tmp_path_factory.mktemp("ended"), tmp_path_factory.mktemp("waits")
    runs = {how: run_of_8_steps(given, folder / how) for how in ("pipe", "terminal", "interrupts")}
    command = [sys.executable, "-c", PROGRAM, json.dumps(runs), str(waits)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return folder, {how: int(code) for how, code in (line.split() for line in done.stdout.splitlines())}


@pytest.fixture(scope="module")
def whole(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the run that nothing ends."""
    output = tmp_path_factory.mktemp("whole")
    assert main(run_of_8_steps(given, output)) == 0
    return output / "checkpoints" / "step-00000008"


def require_to_go_on_as(whole: Path, given: Path, output: Path) -> None:
    """Resumed, the run ends with the bits of one that nothing ended."""
    assert main(run_of_8_steps(given, output, "resume=auto")) == 0
    found = latest(output / "checkpoints")
    assert found is not None
    files = {path.name: path.read_bytes() for path in whole.glob("*.safetensors")}
    assert files == {path.name: path.read_bytes() for path in found.glob("*.safetensors")}


@pytest.mark.parametrize(("how", "exit_code"), [("pipe", 1), ("terminal", 129)])
def test_a_console_that_closes_ends_the_run_with_a_checkpoint_and_an_honest_record(
    given: Path, ended: tuple[Path, dict[str, int]], whole: Path, how: str, exit_code: int
) -> None:
    output = ended[0] / how
    assert ended[1][how] == exit_code
    found = latest(output / "checkpoints")
    assert found is not None
    saved = read_record(found).progress.step
    assert saved in (5, 6)  # the step that was under way, not the last regular save
    record = load_run(output).record
    assert record.status == "failed"
    assert f"stopped after {saved} of 8 steps; resume with resume=auto" in record.message
    if how == "pipe":
        assert "standard output takes no more lines (Broken pipe)" in record.message
    require_to_go_on_as(whole, given, output)


def test_a_second_interrupt_while_the_first_saves_ends_at_once_and_leaves_the_last_checkpoint_whole(
    given: Path, ended: tuple[Path, dict[str, int]], whole: Path
) -> None:
    output = ended[0] / "interrupts"
    assert ended[1]["interrupts"] == -signal.SIGINT  # which shells report as 130
    checkpoints = output / "checkpoints"
    assert list(checkpoints.glob("*.partial"))
    assert latest(checkpoints) == checkpoints / "step-00000004"
    require_to_go_on_as(whole, given, output)
    assert not list(checkpoints.glob("*.partial"))


def test_hangups_ask_once_and_not_under_nohup() -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_made
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with stop_requests() as stop:
            for _ in range(3):  # shells and terminals send several
                os.kill(os.getpid(), signal.SIGHUP)
            assert (stop.is_made, stop.exit_code) == (True, 129)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_line_that_is_not_taken_asks_to_stop_and_is_the_last_one() -> None:
    taken: list[str] = []

    def full(line: str) -> None:
        taken.append(line)
        if len(taken) == 2:
            raise OSError(28, "No space left on device")

    stop = StopRequest()
    say = stop.heard(full)
    say("one")
    assert not stop.is_made
    say("two")
    say("three")
    assert taken == ["one", "two"]
    assert stop.is_made
    assert stop.exit_code == 1
    assert "No space left on device" in stop.console_failure


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_started_without_its_streams_does_its_work(given: Path, tmp_path: Path, closed: str) -> None:
    """What is opened next would else take the number of standard output, and what libraries print, its place there."""
    command = f'exec "$0" -m analysis.cli simulate "$1" --trace "$2" {closed}'
    arguments = [sys.executable, str(given / "plan.json"), str(tmp_path / "trace.json")]
    assert subprocess.run(["/bin/sh", "-c", command, *arguments], cwd=ROOT, check=False).returncode == 0
    assert json.loads((tmp_path / "trace.json").read_text())
