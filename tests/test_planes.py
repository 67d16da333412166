"""The split-plane master: exact for every pattern, high is the nearest bf16."""

import pytest
import torch
from torch import Tensor

from executor.adamw import adamw_host
from executor.kernels.host_adamw import host_library
from executor.planes import merge_planes, split_planes

EDGES = [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00008000, 0x00007FFF, 0x80008000, 0x007FFFFF, 0x00800000),
    *(0x3F800000, 0x3F808000, 0x3F807FFF, 0x3F818000, 0xBF808000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF),
    *(0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF),
]


def sampled_patterns() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2**32, (1 << 18,), generator=generator)
    # Every upper half with the remainders around a tie, and every remainder.
    ties = ((torch.arange(2**16) << 16)[:, None] + torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).flatten()
    remainders = 0x3F80_0000 + torch.arange(2**16)
    return torch.cat([torch.tensor(EDGES), drawn, ties, remainders])


def as_floats(patterns: Tensor) -> Tensor:
    """fp32 numbers of patterns 0 .. 2^32 - 1 (int64)."""
    return torch.where(patterns < 2**31, patterns, patterns - 2**32).to(torch.int32).view(torch.float32)


def as_patterns(values: Tensor) -> Tensor:
    return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def planes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split_planes(values, high, low)
    return high, low


def check_planes(patterns: Tensor) -> None:
    """The definition in 64-bit integers, and the way back."""
    high, low = planes_of(as_floats(patterns))
    expected_high = ((patterns + 0x8000) % 2**32) >> 16
    remainder = patterns % 2**16
    expected_low = torch.where(remainder < 2**15, remainder, remainder - 2**16)
    assert torch.equal(high.view(torch.int16).to(torch.int64) & 0xFFFF, expected_high)
    assert torch.equal(low.to(torch.int64), expected_low)
    assert torch.equal(as_patterns(merge_planes(high, low)), patterns)


def check_compiled_planes(patterns: Tensor) -> None:
    """A step of size 0 through the compiled optimizer merges and splits again: it gives every number back."""
    values = as_floats(patterns)
    values = torch.where(values.isnan(), torch.nan, values)  # the one NaN that the optimizer stores
    high, low = planes_of(values)
    written_high, written_low = high.clone(), low.clone()
    moments, gradient = torch.zeros(2, len(values)), torch.zeros_like(high)
    scalars = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    adamw_host(
        *(written_high, written_low, *moments, gradient, scalars),
        num_decay_elements=len(values),
        betas=(0.9, 0.999),
        eps=1e-8,
        threads=2,
    )
    assert torch.equal(written_high.view(torch.int16), high.view(torch.int16))
    assert torch.equal(written_low, low)


def test_planes_hold_every_sampled_pattern() -> None:
    check_planes(sampled_patterns())


def test_compiled_optimizer_merges_and_splits_every_sampled_pattern() -> None:
    if host_library() is None:
        pytest.skip("no C++ compiler")
    check_compiled_planes(sampled_patterns())


@pytest.mark.slow
def test_planes_hold_all_patterns() -> None:
    for start in range(0, 2**32, 2**24):
        check_planes(torch.arange(start, start + 2**24))


@pytest.mark.slow
def test_compiled_optimizer_merges_and_splits_all_patterns() -> None:
    assert host_library() is not None
    for start in range(0, 2**32, 2**24):
        check_compiled_planes(torch.arange(start, start + 2**24))


def test_high_is_the_nearest_bf16_and_ties_go_away_from_zero() -> None:
    values = as_floats(sampled_patterns())
    values = values[values.abs() <= torch.finfo(torch.bfloat16).max]
    high = planes_of(values)[0].double()
    even = values.bfloat16().double()  # torch rounds ties to even
    exact = values.double()
    assert torch.equal((high - exact).abs(), (even - exact).abs())
    tied = high != even
    assert tied.any()
    assert (high[tied].abs() > exact[tied].abs()).all()


def test_zero_and_bf16_values_have_no_remainder() -> None:
    values = torch.randn(1000).bfloat16().float()
    values[::7] = 0.0
    high, low = planes_of(values)
    assert torch.equal(high.float(), values)
    assert not low.any()


def test_any_shape_and_a_given_output() -> None:
    values = torch.randn(3, 5, 7)
    high, low = planes_of(values)
    out = torch.empty(3, 5, 7)
    assert merge_planes(high, low, out=out) is out
    assert torch.equal(out, values)


@pytest.mark.parametrize(
    ("values", "high", "low", "named"),
    [
        (torch.zeros(4).double(), torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int16), "values"),
        (torch.zeros(4), torch.zeros(5).bfloat16(), torch.zeros(4, dtype=torch.int16), "high"),
        (torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int32), "low"),
        (torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(8, dtype=torch.int16)[::2], "low"),
    ],
)
def test_unfit_planes_are_refused_by_name(values: Tensor, high: Tensor, low: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        split_planes(values, high, low)
