"""Disk speed: one file written and read again in large blocks, past the page cache."""

import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from simulator.errors import InputError
from simulator.units import MIB

_BLOCK_BYTES = 8 * MIB


class DiskRates(NamedTuple):
    """Bytes per second of one writer or reader, and whether the page cache was bypassed by direct I/O."""

    write: float
    read: float
    direct: bool


def measure_disk(folder: Path, *, num_bytes: int, seconds: float) -> DiskRates:
    """Write a temporary file in `folder` and read it back, each for about `seconds`.

    The file takes at most `num_bytes` and a tenth of what is free. Direct I/O where the file system knows it; else
    fsync after writing and the cache dropped before reading. Raises InputError where the folder cannot be written.
    """
    block = mmap.mmap(-1, _BLOCK_BYTES)  # page-aligned, as direct I/O demands
    block.write(os.urandom(_BLOCK_BYTES))
    try:
        num_blocks = max(1, min(num_bytes, shutil.disk_usage(folder).free // 10) // _BLOCK_BYTES)
        handle, path = tempfile.mkstemp(prefix=".conveyor-disk-", dir=folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); the disk is measured there") from error
    os.close(handle)
    try:
        try:
            return _measure(path, block, num_blocks, seconds, flags=getattr(os, "O_DIRECT", 0))
        except OSError:  # memory file systems and some network ones have no direct I/O
            return _measure(path, block, num_blocks, seconds, flags=0)
    finally:
        os.unlink(path)


def _measure(path: str, block: mmap.mmap, num_blocks: int, seconds: float, *, flags: int) -> DiskRates:
    file = os.open(path, os.O_RDWR | flags)
    try:
        start = time.perf_counter()
        written = 0
        while written < num_blocks and time.perf_counter() - start < seconds:
            _whole_block(os.pwrite(file, block, written * _BLOCK_BYTES))
            written += 1
        os.fsync(file)
        write_seconds = time.perf_counter() - start

        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        read = 0
        while read < written and time.perf_counter() - start < seconds:
            _whole_block(os.preadv(file, [block], read * _BLOCK_BYTES))
            read += 1
        read_seconds = time.perf_counter() - start
    finally:
        os.close(file)
    return DiskRates(
        write=written * _BLOCK_BYTES / write_seconds, read=read * _BLOCK_BYTES / read_seconds, direct=bool(flags)
    )


def _whole_block(num_bytes: int) -> None:
    if num_bytes != _BLOCK_BYTES:
        raise OSError(f"the disk moved {num_bytes} of {_BLOCK_BYTES} bytes")
