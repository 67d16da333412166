"""Gradients: summed by place, rounded once, the same norm wherever they wait."""

import math

import pytest
import torch
from torch import Tensor

from executor.gradients import HOST_CHUNK_ELEMENTS, accumulate, finish_gradient


def finish(accumulator: Tensor, out: Tensor, gradient_dtype: torch.dtype) -> float:
    squared_norms = torch.full((3,), -1.0, dtype=torch.float64)
    finish_gradient(accumulator, out, squared_norms[1], gradient_dtype=gradient_dtype)
    assert squared_norms[[0, 2]].tolist() == [-1.0, -1.0]
    return float(squared_norms[1])


def block() -> tuple[Tensor, list[Tensor]]:
    """An accumulator full of rubbish with three parameters in it and padding between them."""
    accumulator = torch.full((512,), math.nan)
    return accumulator, [accumulator[0:100].view(10, 10), accumulator[128:256].view(8, 16), accumulator[384:389]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_first_writes_later_add_and_padding_is_zero(dtype: torch.dtype) -> None:
    accumulator, views = block()
    micro_batches = [[torch.randn(view.shape).to(dtype) for view in views] for _ in range(4)]
    for index, gradients in enumerate(micro_batches):
        accumulate(accumulator, views, gradients, first=index == 0)
    covered = torch.zeros(512, dtype=torch.bool)
    for view, *gradients in zip(views, *micro_batches, strict=True):
        expected = gradients[0].float()
        for gradient in gradients[1:]:
            expected = expected + gradient.float()
        assert torch.equal(view, expected)
        covered[view.storage_offset() : view.storage_offset() + view.numel()] = True
    assert not accumulator[~covered].any()


def test_fp64_sums_are_fp64() -> None:
    accumulator = torch.empty(128, dtype=torch.float64)
    gradients = [torch.randn(128, dtype=torch.float64) for _ in range(2)]
    for index, gradient in enumerate(gradients):
        accumulate(accumulator, [accumulator], [gradient], first=index == 0)
    assert torch.equal(accumulator, gradients[0] + gradients[1])


def test_a_missing_gradient_shifts_nothing() -> None:
    accumulator, views = block()
    third = torch.randn(5)
    accumulate(accumulator, views, [None, None, third], first=True)
    accumulate(accumulator, views, [None, torch.ones(8, 16), None], first=False)
    assert not views[0].any()
    assert (views[1] == 1).all()
    assert torch.equal(views[2], third)
    assert not accumulator[256:384].any()
    accumulate(accumulator, views, [None] * 3, first=True)
    assert not accumulator.any()


def test_a_strided_gradient_lands_in_order() -> None:
    accumulator, views = block()
    gradient = torch.randn(10, 10).t()
    accumulate(accumulator, views, [gradient, None, None], first=True)
    accumulate(accumulator, views, [gradient, None, None], first=False)
    assert torch.equal(views[0], gradient + gradient)


def test_a_gradient_of_another_shape_is_refused_and_nothing_is_written() -> None:
    accumulator, views = block()
    accumulator.zero_()
    with pytest.raises(ValueError, match=r"gradient 2: has shape \(1,\), its place \(5,\)"):
        accumulate(accumulator, views, [torch.ones(10, 10), None, torch.ones(1)], first=True)
    assert not accumulator.any()


@pytest.mark.parametrize("num_elements", [0, 1, 4096, 5000, HOST_CHUNK_ELEMENTS * 2 + 12_345])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_rounded_once_and_the_same_bits_wherever_it_waits(num_elements: int, gradient_dtype: torch.dtype) -> None:
    accumulator = torch.randn(num_elements, generator=torch.Generator().manual_seed(num_elements)) * 1e-3
    rounded = accumulator.to(gradient_dtype)
    out = torch.empty_like(rounded)
    in_place = accumulator.clone()
    before = accumulator.clone()
    elsewhere = finish(accumulator, out, gradient_dtype)
    at_home = finish(in_place, in_place, gradient_dtype)
    assert torch.equal(accumulator, before)
    assert torch.equal(out, rounded)
    assert torch.equal(in_place, rounded.float())
    assert elsewhere == at_home
    assert elsewhere == pytest.approx(math.fsum((rounded.double() ** 2).tolist()), rel=1e-14)


def test_what_was_rounded_as_it_was_formed_stays_and_has_the_norm_of_its_sum() -> None:
    accumulator = torch.randn(70_000, generator=torch.Generator().manual_seed(4)) * 1e-3
    written = accumulator.bfloat16()
    before = written.clone()
    norm = finish(written, written, torch.bfloat16)
    assert torch.equal(written, before)
    assert norm == finish(accumulator, torch.empty_like(written), torch.bfloat16)


def test_threads_do_not_change_the_norm() -> None:
    accumulator = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    before, norms = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            norms.add(finish(accumulator, torch.empty(700_001, dtype=torch.bfloat16), torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("place", [0, 300_000, 400_000])
def test_one_non_finite_value_spoils_the_norm(value: float, place: int) -> None:
    accumulator = torch.zeros(400_001)
    accumulator[place] = value  # 3.4e38 becomes an infinity when it is rounded to bf16
    assert not math.isfinite(finish(accumulator, torch.empty_like(accumulator).bfloat16(), torch.bfloat16))
    assert not math.isfinite(finish(accumulator, accumulator, torch.bfloat16))


def test_large_and_small_gradients_have_an_exact_norm() -> None:
    for scale in (1e-30, 1e30):
        accumulator = torch.full((1000,), scale)
        exact = 1000 * float(accumulator[0]) ** 2
        assert finish(accumulator, accumulator.clone(), torch.float32) == pytest.approx(exact, rel=1e-14)


def test_fp64_gradients_stay_as_they_are() -> None:
    accumulator = torch.randn(1000, dtype=torch.float64)
    out = torch.empty_like(accumulator)
    squared = finish(accumulator, out, torch.float64)
    assert torch.equal(out, accumulator)
    assert squared == finish(accumulator, accumulator, torch.float64)


@pytest.mark.parametrize(
    ("out", "gradient_dtype"),
    [
        (torch.zeros(8), torch.bfloat16),  # fp32 storage that is not the accumulator
        (torch.zeros(9).bfloat16(), torch.bfloat16),
        (torch.zeros(8).bfloat16(), torch.float32),
        (torch.zeros(8).half(), torch.float16),
        (torch.zeros(16).bfloat16()[::2], torch.bfloat16),
    ],
)
def test_an_output_that_does_not_fit_is_refused(out: Tensor, gradient_dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^gradient: "):
        finish_gradient(torch.zeros(8), out, torch.zeros((), dtype=torch.float64), gradient_dtype=gradient_dtype)
