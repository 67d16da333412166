"""Cross-entropy of a chunk of logits, and its gradient in their place, as a Triton kernel; importing it needs Triton.

One program a row reads it twice, the second time from the L2 cache, and writes it once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 2048
NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, targets, losses, num_columns, WITH_GRADIENT: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * num_columns
    target = tl.load(targets + row)
    counts = target >= 0
    column = tl.maximum(target, 0)
    # Finite: -inf minus -inf, in lanes past the last column, would be NaN.
    maximum = tl.full((TILE,), -3.0e38, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    at_column = tl.zeros((TILE,), tl.float32)
    for start in range(0, num_columns, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(first + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(maximum, value)
        total = total * tl.exp(maximum - larger) + tl.exp(value - larger)
        maximum = larger
        at_column += tl.where(at == column, value, 0.0)
    highest = tl.max(maximum, axis=0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(maximum - highest), axis=0))

    # Picked out above, not loaded here: a warp ahead of this one may have written its gradient there already.
    log_p = tl.sum(at_column, axis=0) - log_sum
    tl.store(losses + row, tl.where(counts, -log_p, 0.0))
    if WITH_GRADIENT:
        # p - 1 from the exact log p: near p = 1 the difference would lose the digits that matter.
        series = log_p * (1.0 + log_p * (0.5 + log_p * (1.0 / 6.0 + log_p / 24.0)))
        at_target = tl.where(log_p > -0.03, series, tl.exp(log_p) - 1.0)
        for start in range(0, num_columns, TILE):
            at = start + tl.arange(0, TILE)
            value = tl.load(first + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
            gradient = tl.where(at == column, at_target, tl.exp(value - log_sum))
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(first + at, gradient.to(logits.dtype.element_ty), mask=at < num_columns)


def run_cross_entropy(logits: Tensor, targets: Tensor, losses: Tensor, *, with_gradient: bool) -> None:
    """Write each row's loss, in nats; `with_gradient` turns `logits` into softmax minus one-hot.

    logits: [rows, columns] contiguous, bf16 or fp32. targets: [rows] int64; a negative one has loss and gradient 0.
    losses: [rows] fp32. On the current stream, without a host sync; checks nothing. Everything is computed in fp32,
    each row by one program in one order: the same bits at every call.
    """
    rows, columns = logits.shape
    with torch.cuda.device(logits.device):
        _cross_entropy[(rows,)](
            logits, targets, losses, columns, WITH_GRADIENT=with_gradient, TILE=TILE_ELEMENTS, num_warps=NUM_WARPS
        )
