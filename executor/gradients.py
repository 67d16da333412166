"""Gradients of a block: summed over micro-batches, then rounded once.

A completed gradient is rounded once to the run's gradient format wherever it waits for the update, and the norm is
taken of the rounded values: so neither its home nor its storage changes a bit of the step.
"""

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

# Sums run over rows of one length, each summed by one thread: torch's number of threads must not change the bits.
ROW_ELEMENTS = 1 << 12
HOST_CHUNK_ELEMENTS = 1 << 18  # 2 MiB of scratch in double precision
DEVICE_CHUNK_ELEMENTS = 1 << 22

# What an accumulator may be rounded to. One of bf16 has nothing to sum: its gradient was rounded as it was formed.
GRADIENT_DTYPES = {
    torch.bfloat16: (torch.bfloat16,),
    torch.float32: (torch.bfloat16, torch.float32),
    torch.float64: (torch.float64,),
}


def gradients_of(output: Tensor | GradientEdge, inputs: Sequence[Tensor], grad_output: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `inputs`, from that of a graph's `output`, by a backward in the calling thread.

    Autograd's own thread, which serves a GPU otherwise, lets go of the last tensors when it is scheduled, after the
    backward has returned: what is allocated next would find their memory free by chance, and reserve more by chance.
    """
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(output, inputs, grad_output)


@torch.no_grad()
def accumulate(
    accumulator: Tensor, views: Sequence[Tensor], gradients: Sequence[Tensor | None], *, first: bool
) -> None:
    """Write (`first`) or add the gradients of one micro-batch to a block's flat `accumulator`.

    `views[i]`, of the parameter's shape, is the part of `accumulator` that `gradients[i]` (bf16, fp32 or fp64) belongs
    to: a parameter's place does not depend on which other gradients arrive. None is a gradient of zeros; the view
    itself is one that was added already. The first micro-batch also writes zeros between the views, so the buffer need
    not be cleared. Sums are the accumulator's
    precision, in the order of the calls. Raises ValueError where a gradient does not have its view's shape.
    """
    for index, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
        if gradient is not None and gradient.shape != view.shape:
            raise ValueError(f"gradient {index}: has shape {tuple(gradient.shape)}, its place {tuple(view.shape)}")
    if first:
        covered = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        _zero_between(accumulator, covered)
    pairs = [(v, g) for v, g in zip(views, gradients, strict=True) if g is not None and g is not v]
    targets, arrived = [view for view, _ in pairs], [gradient for _, gradient in pairs]
    if not arrived:
        return
    if first:
        torch._foreach_copy_(targets, arrived)
    else:
        torch._foreach_add_(targets, arrived)


@torch.no_grad()
def finish_gradient(accumulator: Tensor, out: Tensor, squared_norm: Tensor, *, gradient_dtype: torch.dtype) -> None:
    """Round the flat `accumulator` once to `gradient_dtype` and write it into `out`.

    An fp32 accumulator is rounded to bf16 or kept in fp32; bf16 and fp64 stay what they are.

    `out`, as long as the accumulator, is of `gradient_dtype`, or is the accumulator itself: then the rounded values
    stand in the accumulator's wider storage. `squared_norm` (one element, double precision) receives the sum of
    squares of the rounded values, the same bits whatever `out` is; inf and NaN make it non-finite. No host sync.
    Raises ValueError when a tensor does not fit.
    """
    in_place = out.data_ptr() == accumulator.data_ptr() and out.dtype == accumulator.dtype
    if gradient_dtype not in GRADIENT_DTYPES.get(accumulator.dtype, ()):
        raise ValueError(f"gradient: a {accumulator.dtype} accumulator is not rounded to {gradient_dtype}")
    if out.shape != accumulator.shape or (out.dtype != gradient_dtype and not in_place):
        raise ValueError(
            f"gradient: out is {out.dtype} {tuple(out.shape)}; expected {gradient_dtype} {tuple(accumulator.shape)}, "
            "or the accumulator itself"
        )
    if accumulator.ndim != 1 or not (accumulator.is_contiguous() and out.is_contiguous()):
        raise ValueError("gradient: accumulator and out must be flat and contiguous")
    if squared_norm.dtype != torch.float64 or squared_norm.numel() != 1:
        raise ValueError(f"gradient: squared_norm is {squared_norm.dtype} {tuple(squared_norm.shape)}, not one float64")

    kernel = _triton_kernel() if accumulator.device.type == "cuda" else None
    if kernel is not None:
        kernel(accumulator, out, squared_norm, gradient_dtype=gradient_dtype)
        return
    chunk_elements = HOST_CHUNK_ELEMENTS if accumulator.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    total = torch.zeros((), dtype=torch.float64, device=accumulator.device)
    parts, targets = torch.split(accumulator, chunk_elements), torch.split(out, chunk_elements)
    for part, target in zip(parts, targets, strict=True):
        rounded = part.to(gradient_dtype)
        if rounded.data_ptr() != target.data_ptr():
            target.copy_(rounded)
        total.add_(_sum_of_squares(rounded.to(torch.float64)))
    squared_norm.copy_(total.view_as(squared_norm))


def _sum_of_squares(values: Tensor) -> Tensor:
    squares = values * values
    whole = squares.numel() // ROW_ELEMENTS * ROW_ELEMENTS
    rows = squares[:whole].view(-1, ROW_ELEMENTS).sum(dim=1)
    return rows.sum() + squares[whole:].sum()


def _zero_between(accumulator: Tensor, views: Sequence[Tensor]) -> None:
    """Zero every element of `accumulator` that no view covers."""
    size = accumulator.element_size()
    spans = sorted(((view.data_ptr() - accumulator.data_ptr()) // size, view.numel()) for view in views)
    covered = 0
    for start, num_elements in spans:
        if start > covered:
            accumulator[covered:start].zero_()
        covered = start + num_elements
    if covered < accumulator.numel():
        accumulator[covered:].zero_()


@functools.cache
def _triton_kernel() -> Callable[..., None] | None:
    try:
        from executor.kernels.triton_gradients import run_finish as kernel
    except ImportError as error:
        warnings.warn(
            f"gradients on the GPU are rounded by plain torch operations, which is slower: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return kernel
