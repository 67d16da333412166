"""Rounding a completed gradient and its sum of squares in one pass, as a Triton kernel; importing it needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 4096
NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    accumulator, out, partial_sums, num_elements, ROUND: tl.constexpr, STORE: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_elements
    value = tl.load(accumulator + at, mask=inside, other=0.0)
    if ROUND:
        rounded = value.to(tl.bfloat16)
        value = rounded.to(tl.float32)
    if STORE:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    wide = value.to(tl.float64)
    tl.store(partial_sums + tl.program_id(0), tl.sum(wide * wide, axis=0))


def run_finish(accumulator: Tensor, out: Tensor, squared_norm: Tensor, *, gradient_dtype: torch.dtype) -> None:
    """`executor.gradients.finish_gradient` on flat CUDA tensors, on the current stream. Checks nothing.

    Tiles have one size and their sums are added in one order: the same bits at every call, whatever `out` is.
    """
    num_tiles = triton.cdiv(accumulator.numel(), TILE_ELEMENTS)
    partial_sums = torch.empty(num_tiles, dtype=torch.float64, device=accumulator.device)
    rounds = gradient_dtype != accumulator.dtype
    if num_tiles:
        with torch.cuda.device(accumulator.device):
            _finish[(num_tiles,)](
                accumulator,
                out,
                partial_sums,
                accumulator.numel(),
                ROUND=rounds,
                STORE=rounds or out.data_ptr() != accumulator.data_ptr(),
                TILE=TILE_ELEMENTS,
                num_warps=NUM_WARPS,
            )
    squared_norm.copy_(partial_sums.sum())
