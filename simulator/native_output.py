"""Keeping native libraries off standard output, where a script may be reading JSON."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_native_stdout() -> Iterator[None]:
    """While open, what C and C++ print to standard output is dropped.

    HiGHS 1.16 prints a banner when a solver is constructed, before any option can turn it off. The whole process's
    file descriptor 1 is redirected, so keep the block short and other threads quiet. Buffers are flushed on both
    sides: C keeps its own, which would otherwise come out after the block.
    """
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    saved = os.dup(1)
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.close(sink)
        yield
    finally:
        sys.stdout.flush()
        libc.fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
