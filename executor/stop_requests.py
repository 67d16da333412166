"""Interrupts of a training run: the first asks it to stop after its step, the second ends it."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """The first interrupt asks the run to stop after its step; the next one is Python's own, or the front door's."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: object) -> None:
        stop.set()
        print(
            "conveyor: stopping after this step, then saving; interrupt again to end at once, without saving",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
