"""Requests to stop a training run: the first ends it after its step, with a checkpoint; the second ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

# Ctrl-C, what clusters and `kill` send before they end a process by force, and what a terminal sends when it closes.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_STDERR = 2


@dataclass(slots=True)
class StopRequest:
    """Whether somebody asks the run to stop. `signal_number` is 0 and `console_failure` empty until then."""

    signal_number: int = 0
    console_failure: str = ""

    @property
    def is_made(self) -> bool:
        return self.signal_number != 0 or bool(self.console_failure)

    @property
    def exit_code(self) -> int:
        """As shells report the signal: 129 of SIGHUP, 130 of an interrupt, 143 of SIGTERM; 1 without a signal."""
        return 128 + self.signal_number if self.signal_number else 1

    def heard(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say` for a console that may go away: a line that it does not take makes the request, and is the last one."""

        def say_while_heard(line: str) -> None:
            if self.console_failure:
                return
            try:
                say(line)
            except OSError as error:  # a closed pipe, a terminal that is gone, a full disk
                self.console_failure = f"standard output takes no more lines ({error.strerror or error}): "

        return say_while_heard


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While open, the first interrupt, SIGTERM or SIGHUP makes the request; the next one is the system's, or the front
    door's. A SIGHUP that is ignored, as under nohup, stays so; one that follows a request is ignored too, since shells
    and terminals send several.

    Open it in the main thread; elsewhere signals cannot be set, and no request is ever made by them.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]

    def ask(number: int, frame: object) -> None:
        stop.signal_number = number
        for each in before:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        again = "interrupt again" if number == signal.SIGINT else "a second SIGTERM is the way"
        said = f"conveyor: stopping after this step, then saving; {again} to end at once, without saving\n"
        with suppress(OSError):  # of a terminal that is gone
            # Not by print: the signal may come in the middle of another one, and buffers cannot be entered twice.
            os.write(_STDERR, ("\n" * os.isatty(_STDERR) + said).encode())

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
