"""Requests to stop a training run: the first ends it after its step, with a checkpoint; the second ends it at once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Ctrl-C, and what clusters and `kill` send before they end a process by force.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class StopRequest:
    """Whether somebody asks the run to stop. `signal_number` is 0 until then."""

    signal_number: int = 0

    @property
    def is_made(self) -> bool:
        return self.signal_number != 0

    @property
    def exit_code(self) -> int:
        """As shells report the signal: 130 of an interrupt, 143 of SIGTERM."""
        return 128 + self.signal_number


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While open, the first interrupt or SIGTERM makes the request; the next one is the system's, or the front door's.

    Open it in the main thread; elsewhere signals cannot be set, and no request is ever made.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def ask(number: int, frame: object) -> None:
        stop.signal_number = number
        again = "interrupt again" if number == signal.SIGINT else "a second SIGTERM is the way"
        print(
            f"conveyor: stopping after this step, then saving; {again} to end at once, without saving",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
