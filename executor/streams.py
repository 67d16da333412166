"""What CUDA streams and the host tell each other: that a host thread is done, and a few values."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

WAIT_VALUE_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ, compared as a cyclic difference


class Worker(Protocol):
    def wait_until(self, number: int) -> None: ...


@cache
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


def write_to_host(target: Tensor, source: Tensor) -> None:
    """Copy a few values into pinned host memory, on the source's current stream, without waiting for them.

    `target` is contiguous and of the source's shape and dtype. The device's processors write them: in the queue of its
    copy engine they would stand behind whole gradients on their way out, and compute with them. On the CPU, and without
    Triton, a copy.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"{tuple(source.shape)} {source.dtype} does not go into {tuple(target.shape)} {target.dtype}")
    kernel = _write_kernel() if source.is_cuda and target.is_pinned() else None
    if kernel is None:
        target.copy_(source, non_blocking=True)
    else:
        kernel(target, source)


@cache
def _write_kernel() -> Callable[[Tensor, Tensor], None] | None:
    try:
        from executor.kernels.triton_write import run_write as kernel
    except ImportError:  # whoever lacks Triton has been told by the optimizer
        return None
    return kernel
