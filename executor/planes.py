"""The split-plane master: one fp32 weight as a bf16 plane that computes and a 16-bit remainder.

    high = (bits + 0x8000) >> 16      bf16, nearest; ties go away from zero
    low  = bits - (high << 16)        signed 16 bits
    bits = (high << 16) + low         modulo 2^32

The three lines hold for every 32-bit pattern: zeros, denormals, infinities and NaNs come back bit for bit. Rounding
ties to even could not be undone: 65,537 fp32 patterns would share one bf16 value.

Beyond the largest finite bf16 value `high` is an infinity; a NaN with a payload of 0x7FFF8000 or more has a `high` of
-0, which is why the optimizer stores every NaN weight as 0x7FC00000.
"""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20


def split_planes(values: Tensor, high: Tensor, low: Tensor) -> None:
    """Write fp32 `values` into the planes `high` (bf16) and `low` (int16), all contiguous and of one shape.

    Runs on any device; scratch memory is at most 4 * CHUNK_ELEMENTS bytes. Raises ValueError when a tensor does not
    fit.
    """
    _check(values, high, low)
    planes = (values.detach().view(-1).view(torch.int32), high.detach().view(-1).view(torch.int16), low.view(-1))
    for bits, upper, lower in zip(*(torch.split(plane, CHUNK_ELEMENTS) for plane in planes), strict=True):
        # Integer sums wrap and conversions to int16 keep the lower half.
        upper.copy_((bits + 0x8000).bitwise_right_shift_(16))
        lower.copy_(bits)


def merge_planes(high: Tensor, low: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The fp32 master of planes `high` (bf16) and `low` (int16), written into `out` (fp32, same shape) if given.

    Inverse of `split_planes` for every bit pattern. Raises ValueError when a tensor does not fit.
    """
    values = torch.empty(high.shape, dtype=torch.float32, device=high.device) if out is None else out
    _check(values, high, low)
    bits = values.detach().view(-1).view(torch.int32)
    bits.copy_(high.detach().view(-1).view(torch.int16)).bitwise_left_shift_(16).add_(low.view(-1))
    return values


def _check(values: Tensor, high: Tensor, low: Tensor) -> None:
    expected = {"values": (values, torch.float32), "high": (high, torch.bfloat16), "low": (low, torch.int16)}
    for name, (tensor, dtype) in expected.items():
        if tensor.dtype != dtype or tensor.shape != values.shape or tensor.device != values.device:
            raise ValueError(
                f"{name}: is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"split planes need {dtype} {tuple(values.shape)} on {values.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: split planes need contiguous tensors")
