"""The AdamW of executor/adamw.py as one Triton kernel; importing it needs Triton.

Bit for bit the formula: contraction into fused multiply-adds is off, division and square root are the IEEE ones, and
Triton keeps denormals where the formula does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 1024
TINY = tl.constexpr(2.0**-126)  # the smallest normal number
NUM_WARPS = 4  # 8 elements a thread: one 16-byte load of a bf16 plane, two of an fp32 plane


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    weights,  # the high plane's bits (int16) if SPLIT, else fp32
    low,  # int16 if SPLIT, else unused
    first_moment,
    second_moment,
    gradient,
    scalars,
    num_elements,
    num_decay_elements,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    if tl.load(scalars) == 0.0:
        return
    clip = tl.load(scalars + 1)
    decay = tl.load(scalars + 2)
    step_size = tl.load(scalars + 3)
    root_bias_correction2 = tl.load(scalars + 4)

    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_elements
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * clip
    m = tl.load(first_moment + at, mask=inside, other=0.0) * beta1 + g * one_minus_beta1
    v = tl.load(second_moment + at, mask=inside, other=0.0) * beta2 + (g * g) * one_minus_beta2
    m = tl.where(tl.abs(m) < TINY, 0.0, m)
    v = tl.where((m == 0.0) & (v < TINY), 0.0, v)
    direction = tl.math.div_rn(m, tl.math.div_rn(tl.math.sqrt_rn(v), root_bias_correction2) + eps)
    tl.store(first_moment + at, m, mask=inside)
    tl.store(second_moment + at, v, mask=inside)

    if SPLIT:
        upper = tl.load(weights + at, mask=inside, other=0).to(tl.int32) << 16
        p = (upper + tl.load(low + at, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weights + at, mask=inside, other=0.0)
    p = tl.where(at < num_decay_elements, p * decay, p) - step_size * direction
    if SPLIT:
        # Some NaN payloads, CUDA's own among them, would round to a high plane of -0: one NaN for all.
        bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))
        tl.store(weights + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(low + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(weights + at, p, mask=inside)


def run_adamw(
    weights: Tensor,
    low: Tensor | None,
    first_moment: Tensor,
    second_moment: Tensor,
    gradient: Tensor,
    scalars: Tensor,
    *,
    num_decay_elements: int,
    constants: tuple[float, ...],
) -> None:
    """One step in place on flat CUDA tensors, on the current stream. Checks nothing: executor.adamw does."""
    num_elements = weights.numel()
    if num_elements == 0:
        return
    with torch.cuda.device(weights.device):
        _adamw[(triton.cdiv(num_elements, TILE_ELEMENTS),)](
            weights if low is None else weights.view(torch.int16),
            weights if low is None else low,
            first_moment,
            second_moment,
            gradient,
            scalars,
            num_elements,
            num_decay_elements,
            *constants,
            SPLIT=low is not None,
            TILE=TILE_ELEMENTS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
