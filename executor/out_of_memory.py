"""Out of memory, in the plan's terms: which tier, at what, planned and actual bytes, and what to change.

Errors are noted with what was being done as they pass (`doing`), and put into words once, at the end of a run.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from planner.plan import Plan
from simulator.errors import ConveyorError, OutOfMemory
from simulator.system import free_disk_bytes, host_memory_available_bytes, process_tree_bytes
from simulator.units import format_bytes

# What torch says where no exception of its own says it: its CPU allocator, and CUDA beside torch's allocator.
_HOST = ("DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory")
_DEVICE = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_DOING = "while "


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Note on any error that passes what was being done, as `loading the weights`; the innermost note counts."""
    try:
        yield
    except BaseException as error:
        note(error, what)
        raise


def note(error: BaseException, what: str) -> None:
    """Add `while WHAT` to an error's notes, which tracebacks show too."""
    error.add_note(_DOING + what)


def exhausted_tier(error: BaseException) -> Literal["device", "host", "disk"] | None:
    """The tier that an error says is full, or None where it is another error."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk"
    if isinstance(error, RuntimeError):
        if any(words in str(error) for words in _DEVICE):
            return "device"
        if any(words in str(error) for words in _HOST):
            return "host"
    return None


def explained(error: BaseException, plan: Plan, output: Path) -> BaseException:
    """An error that says a tier is full, in terms of the plan: an OutOfMemory, or for the disk a ConveyorError.

    Others, and those of ours that say it themselves, are returned as they are.
    """
    tier = exhausted_tier(error)
    if tier is None or isinstance(error, ConveyorError):
        return error
    notes = [text for text in getattr(error, "__notes__", []) if text.startswith(_DOING)]
    place = f" {notes[0]}" if notes else ""
    reason = f"({first_line(error)})"
    if tier == "disk":
        return ConveyorError(
            f"{output}: the disk is full{place}, {format_bytes(free_disk_bytes(output))} are free; free some, lower "
            f"keep_checkpoints, or set output to a larger disk {reason}"
        )
    limits, predicted, rows = plan.inputs.limits, plan.prediction, plan.policy.micro_batch_rows
    smaller = f"micro-batches of fewer than {rows} rows" if rows > 1 else "a shorter sequence_length"
    if tier == "device":
        reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        return OutOfMemory(
            f"device memory ran out{place}: {format_bytes(reserved)} were reserved, the plan foresaw "
            f"{format_bytes(predicted.device_peak_bytes)} of {format_bytes(limits.device_memory_bytes)}; "
            f"plan again with a lower --device-memory, or with {smaller} {reason}"
        )
    return OutOfMemory(
        f"host memory ran out{place}: the run holds {format_bytes(process_tree_bytes())} and "
        f"{format_bytes(host_memory_available_bytes())} are free, the plan foresaw "
        f"{format_bytes(predicted.host_peak_bytes)} of {format_bytes(limits.host_memory_bytes)}; "
        f"end other programs, or plan again with a lower --host-memory or with {smaller} {reason}"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
