"""Fixtures of tests on CUDA: kernels that repeat themselves, and waits for the device that are errors.

Every process of the tests reads this file, the one that only hands tests out too: torch is imported where it is used.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import pytest


@pytest.fixture
def deterministic() -> Iterator[None]:
    import torch

    from executor.layer import use_deterministic_kernels

    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


class NoWaits(AbstractContextManager[None]):
    """A context in which an operation that waits for the device is an error."""

    def __enter__(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_waits() -> Iterator[NoWaits]:
    import torch

    yield NoWaits()
    torch.cuda.set_sync_debug_mode("default")
