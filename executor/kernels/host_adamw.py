"""adamw.cpp as a Python function on CPU tensors."""

import ctypes
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

from executor.kernels.build import BuildError, load_library

SOURCE = Path(__file__).with_name("adamw.cpp")

# (weights, gradient) -> the function in adamw.cpp.
FUNCTIONS = {
    (torch.bfloat16, torch.bfloat16): "adamw_bf16_bf16",
    (torch.bfloat16, torch.float32): "adamw_bf16_fp32",
    (torch.float32, torch.bfloat16): "adamw_fp32_bf16",
    (torch.float32, torch.float32): "adamw_fp32_fp32",
    (torch.float64, torch.float64): "adamw_fp64_fp64",
}
_ARGUMENTS = (*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)

_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []  # empty until the first call


def host_library() -> ctypes.CDLL | None:
    """The compiled kernel, built at the first call, or None, after one RuntimeWarning, where no compiler works."""
    with _lock:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def run_adamw(
    library: ctypes.CDLL,
    weights: Tensor,
    low: Tensor | None,
    first_moment: Tensor,
    second_moment: Tensor,
    gradient: Tensor,
    scalars: Tensor,
    *,
    num_decay_elements: int,
    constants: tuple[float, ...],
    threads: int,
) -> None:
    """One step in place on contiguous CPU tensors, without the interpreter lock. Checks nothing: executor.adamw does.

    `constants` are beta1, 1 - beta1, beta2, 1 - beta2 and eps, rounded to the master's precision.
    """
    getattr(library, FUNCTIONS[weights.dtype, gradient.dtype])(
        weights.data_ptr(),
        None if low is None else low.data_ptr(),
        first_moment.data_ptr(),
        second_moment.data_ptr(),
        gradient.data_ptr(),
        weights.numel(),
        num_decay_elements,
        scalars.data_ptr(),
        (ctypes.c_double * len(constants))(*constants),
        threads,
    )


def _load() -> ctypes.CDLL | None:
    try:
        library = load_library(SOURCE)
    except BuildError as error:
        warnings.warn(
            f"the host optimizer runs as plain torch operations, with the same results but slower: {error}; "
            "install a C++ compiler (g++ or clang++) for the fast one",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
    for name in FUNCTIONS.values():
        function = getattr(library, name)
        function.argtypes, function.restype = _ARGUMENTS, None
    return library
