"""A few values from the device into host memory: right everywhere, and on CUDA past what its copy engine has to do."""

import pytest
import torch

from executor.streams import write_to_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_the_cpu_values_are_copied(dtype: torch.dtype) -> None:
    source, target = torch.randn(5, dtype=dtype), torch.zeros(5, dtype=dtype)
    write_to_host(target, source)
    assert torch.equal(target, source)


@pytest.mark.parametrize("source", [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(())])
def test_what_does_not_fit_is_refused_and_nothing_is_written(source: torch.Tensor) -> None:
    target = torch.ones(3)
    with pytest.raises(ValueError, match=r"does not go into \(3,\) torch.float32"):
        write_to_host(target, source)
    assert torch.equal(target, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_cuda_values_arrive_in_their_row_alone(dtype: torch.dtype, pinned: bool) -> None:
    target = torch.zeros(3, 2, dtype=dtype, pin_memory=pinned)
    source = torch.tensor([1.0 / 3.0, float("nan")], dtype=dtype, device="cuda")
    write_to_host(target[1], source)
    torch.cuda.synchronize()
    assert torch.equal(target[1].isnan(), torch.tensor([False, True]))
    assert target[1, 0].item() == source[0].item()
    assert not target[0].any()
    assert not target[2].any()


@pytest.mark.gpu
def test_on_cuda_values_do_not_queue_behind_large_copies() -> None:
    pytest.importorskip("triton")
    large = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    place = torch.zeros(2**30, dtype=torch.uint8).pin_memory()
    source, target = torch.arange(5.0, device="cuda"), torch.zeros(5).pin_memory()
    write_to_host(target, source + 1.0)  # compiled
    copies, values = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        for _ in range(32):  # half a second or more
            place.copy_(large, non_blocking=True)
    with torch.cuda.stream(values):
        write_to_host(target, source)
    values.synchronize()
    assert not copies.query()
    assert torch.equal(target, torch.arange(5.0))
    copies.synchronize()
