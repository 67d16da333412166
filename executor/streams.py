"""Letting a CUDA stream wait for a host thread, through the driver's stream memory operations."""

import ctypes
from functools import lru_cache
from typing import Any, Protocol

import torch

WAIT_VALUE_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ, compared as a cyclic difference


class Worker(Protocol):
    def wait_until(self, number: int) -> None: ...


@lru_cache(maxsize=1)
def _driver_wait() -> Any | None:
    """cuStreamWaitValue32 of the driver, or None where the driver or the device does not offer it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    for name in ("cuStreamWaitValue32_v2", "cuStreamWaitValue32"):
        function = getattr(driver, name, None)
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            function.restype = ctypes.c_int
            return function
    return None


class StreamWait:
    """Makes a stream wait until a pinned word has reached a number.

    Where the driver refuses (return code not 0), the launching thread waits instead: right, but it stops launching
    ahead, so `blocking` tells the caller once.
    """

    def __init__(self) -> None:
        self.function = _driver_wait()
        self.blocking = self.function is None

    def until(self, stream: torch.cuda.Stream, word: torch.Tensor, number: int, worker: Worker) -> None:
        if self.function is not None and not self.blocking:
            code = self.function(stream.cuda_stream, word.data_ptr(), number, WAIT_VALUE_GEQ)
            if code == 0:
                return
            self.blocking = True
        worker.wait_until(number)
