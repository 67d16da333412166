"""The allocator's retries: counted from the run's start, and told once, when steps have settled."""

from collections.abc import Iterator

import pytest
import torch

from executor.retries import Retries


@pytest.fixture
def allocator() -> Iterator[dict[str, int]]:
    """The counters that CUDA's allocator would show."""
    counters = {"num_alloc_retries": 5}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "memory_stats", lambda device: dict(counters))
        yield counters


def test_retries_count_from_the_run_s_start(allocator: dict[str, int]) -> None:
    retries = Retries(torch.device("cuda"))
    assert retries.count() == 0
    allocator["num_alloc_retries"] += 3
    assert retries.count() == 3
    assert Retries(torch.device("cpu")).count() is None


def test_retries_of_the_first_steps_are_no_fault_and_later_ones_are_told_once(allocator: dict[str, int]) -> None:
    retries = Retries(torch.device("cuda"))
    allocator["num_alloc_retries"] += 2
    assert retries.advice(warm=False) == ""
    assert retries.advice(warm=True) == ""
    allocator["num_alloc_retries"] += 32
    advice = retries.advice(warm=True)
    assert "32 times" in advice
    assert "plan again with a lower --device-memory" in advice
    allocator["num_alloc_retries"] += 32
    assert retries.advice(warm=True) == ""


def test_a_device_without_an_allocator_has_no_advice() -> None:
    assert Retries(torch.device("cpu")).advice(warm=True) == ""
