"""Progress: a bar on a terminal, plain lines everywhere else."""

import io
import sys

import pytest

from executor.progress import step_progress

LINE = "step 1/4  loss 2.5  [brackets] and 0.5 s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_files_and_pipes_get_the_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with step_progress(print, num_steps=4, steps_done=0) as progress:
        progress.say(LINE)
        progress.show(1, "loss 2.5")
    assert file.getvalue() == LINE + "\n"


def test_a_terminal_gets_the_lines_above_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with step_progress(print, num_steps=4, steps_done=1) as progress:
        progress.say(LINE)
        progress.show(2, "loss 2.5")
    shown = terminal.getvalue()
    assert LINE in shown
    assert "\x1b[" in shown
    assert "2/4" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the bar is wiped out at the end"


def test_another_listener_than_the_terminal_gets_every_line_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, lines = Terminal(), []
    monkeypatch.setattr(sys, "stdout", terminal)
    with step_progress(lines.append, num_steps=4, steps_done=0) as progress:
        progress.say(LINE)
        progress.show(1, "loss 2.5")
    assert lines == [LINE]
    assert terminal.getvalue() == ""
