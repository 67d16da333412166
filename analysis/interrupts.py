"""Ctrl-C: the first interrupt asks the program to stop, the second ends it at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130  # 128 + SIGINT, as shells report it


@contextmanager
def interrupt_once() -> Iterator[None]:
    """While open, the first SIGINT raises KeyboardInterrupt in the main thread and a second ends the process (130).

    Python runs its signal handlers between bytecodes only, so a long call into C++ (a solver, a kernel) would swallow
    both. The second is therefore seen by a thread, which the C-level handler wakes through a pipe.
    Open it in the main thread; elsewhere signals cannot be set.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_end_on_second, args=(reader,), name="interrupts", daemon=True)
    old_handler = signal.signal(signal.SIGINT, _raise_interrupt)
    old_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_wakeup)
        signal.signal(signal.SIGINT, old_handler)
        os.close(writer)  # the watcher reads the end of the pipe and returns
        watcher.join()
        os.close(reader)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_on_second(reader: int) -> None:
    num_interrupts = 0
    while received := os.read(reader, 64):  # one byte a signal: its number
        num_interrupts += received.count(signal.SIGINT)
        if num_interrupts > 1:
            os._exit(EXIT_CODE)
