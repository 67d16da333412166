"""Bytes per parameter: the one table that planner, executor and doctor read.

A bf16 run keeps each weight as one fp32 number in two planes: `high`, the bf16 weight that the GPU computes with,
and `low`, the signed 16-bit remainder that stays with the optimizer. In fp32 and fp64 runs the weight is its own
master and the low plane is empty. fp64 exists to compare with an independent trainer, not for training.
"""

from typing import Literal, NamedTuple

Precision = Literal["bf16", "fp32", "fp64"]
GradientFormat = Literal["bf16", "fp32"]
StateFormat = Literal["fp32", "8bit"]

# Tensors of a block start on 256 bytes in its narrowest plane, bf16.
BLOCK_ALIGNMENT_ELEMENTS = 128


class PrecisionBytes(NamedTuple):
    """Bytes a parameter takes in each plane of a run's precision."""

    weight: int  # the plane that the GPU computes with
    low: int  # the remainder of the split master
    accumulator: int  # sums of gradients over micro-batches


PRECISIONS: dict[Precision, PrecisionBytes] = {
    "bf16": PrecisionBytes(weight=2, low=2, accumulator=4),
    "fp32": PrecisionBytes(weight=4, low=0, accumulator=4),
    "fp64": PrecisionBytes(weight=8, low=0, accumulator=8),
}


def gradient_bytes(precision: Precision, gradient_format: GradientFormat) -> int:
    """Bytes a parameter's completed gradient takes. fp64 runs keep fp64 gradients."""
    if precision == "fp64":
        return 8
    return 2 if gradient_format == "bf16" else 4


def state_bytes(precision: Precision, state_format: StateFormat) -> int:
    """Bytes a parameter takes beside its weight plane: low plane and both moments."""
    if state_format == "8bit":
        raise ValueError("8-bit state has no size yet: the format is not built")
    return PRECISIONS[precision].low + 2 * (8 if precision == "fp64" else 4)
