"""Capacities of a machine: its device, host and disk. What a plan must fit, and what identifies the machine."""

from typing import Annotated, Literal

import pydantic

from simulator.figure import BytesPerSecond
from simulator.schema import Schema

DeviceKind = Literal["cuda", "cpu"]
# How the executor runs a step program: on streams and threads, or all operations on one thread, in order.
Execution = Literal["streams", "inline"]


def _check_memory(num_bytes: int) -> int:
    if not 2**26 <= num_bytes <= 2**50:
        shown = f"{num_bytes} bytes" if abs(num_bytes) < 10**20 else "a number of so many digits"
        raise ValueError(f"{shown} is impossible: it lies between 64 MiB and 1 PiB, in bytes")
    return num_bytes


MemoryBytes = Annotated[int, pydantic.AfterValidator(_check_memory)]


class Device(Schema):
    """What computes. On a CPU machine the device is the host's own cores and memory."""

    kind: DeviceKind
    name: str = pydantic.Field(min_length=1)
    memory_bytes: MemoryBytes
    num_multiprocessors: int | None = pydantic.Field(default=None, gt=0, le=4096)


class Host(Schema):
    """The host's share that this process may use: memory by cgroup limit, not MemTotal."""

    cpu: str = pydantic.Field(min_length=1)
    num_cores: int | None = pydantic.Field(default=None, gt=0, le=4096)
    memory_bytes: MemoryBytes
    pinned_limit_bytes: MemoryBytes | None = None  # None: no limit of its own is known


class Disk(Schema):
    """The disk under the output folder. Rates bypass the page cache."""

    free_bytes: int = pydantic.Field(ge=0, le=2**60)
    read_bytes_per_second: BytesPerSecond | None = None
    write_bytes_per_second: BytesPerSecond | None = None
