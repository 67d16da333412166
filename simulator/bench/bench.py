"""Bench: what every measurement needs to know: the device, how much to measure, whom to tell, and random data."""

import datetime
from collections.abc import Callable
from typing import NamedTuple

import torch

from simulator.errors import ConveyorError
from simulator.figure import Figure
from simulator.formats import Precision
from simulator.units import GIB, KIB, MIB, format_bytes

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Scale(NamedTuple):
    """How much is measured: shapes of a decoder layer, sizes beyond the caches, seconds for each figure."""

    hot_seconds: float  # of load before anything is timed: clocks fall once the chip is warm
    point_seconds: float
    lane_seconds: float
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    matmul_tokens: dict[Precision, tuple[int, ...]]
    attention_tokens: int  # in one call: as many sequences as fit
    attention_lengths: dict[Precision, tuple[int, ...]]
    copy_bytes: tuple[int, ...]  # ascending powers of two
    stream_bytes: int  # of each array of a streaming pass
    disk_bytes: int
    disk_seconds: float


# 7B shapes: hidden 3,584, intermediate 18,944, 28 query and 4 key heads of 128.
CUDA_SCALE = Scale(
    hot_seconds=12.0,
    point_seconds=0.6,
    lane_seconds=2.5,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    matmul_tokens={"bf16": (512, 2048, 8192, 32768, 98304), "fp32": (2048, 8192)},
    attention_tokens=32768,
    attention_lengths={"bf16": (1024, 4096, 32768), "fp32": (1024, 4096)},
    copy_bytes=(256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    stream_bytes=GIB,
    disk_bytes=GIB,
    disk_seconds=3.0,
)
# A model that a CPU trains in minutes.
CPU_SCALE = Scale(
    hot_seconds=1.0,
    point_seconds=0.3,
    lane_seconds=1.0,
    hidden_size=512,
    intermediate_size=1536,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    matmul_tokens={"bf16": (64, 512, 4096), "fp32": (64, 512, 4096), "fp64": (512,)},
    attention_tokens=2048,
    attention_lengths={"bf16": (128, 512, 2048), "fp32": (128, 512, 2048), "fp64": (512,)},
    copy_bytes=(64 * KIB, MIB, 16 * MIB, 256 * MIB),
    stream_bytes=256 * MIB,
    disk_bytes=512 * MIB,
    disk_seconds=2.0,
)
# To see that everything works: the sizes fit in caches, so these figures are not for planning.
QUICK_SCALE = Scale(
    hot_seconds=0.0,
    point_seconds=0.01,
    lane_seconds=0.05,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    matmul_tokens={"bf16": (64,), "fp32": (16, 64), "fp64": (16,)},
    attention_tokens=128,
    attention_lengths={"bf16": (64,), "fp32": (64, 128), "fp64": (64,)},
    copy_bytes=(64 * KIB, MIB),
    stream_bytes=4 * MIB,
    disk_bytes=8 * MIB,
    disk_seconds=0.5,
)


class Bench(NamedTuple):
    """Where and how much to measure. `stamp` opens the source of every figure."""

    device: torch.device
    scale: Scale
    stamp: str
    report: Callable[[str], None]

    @property
    def cpu(self) -> bool:
        return self.device.type == "cpu"

    def figure(self, value: float, how: str) -> Figure:
        """A measured figure, to six digits: the rest is noise."""
        return Figure(value=float(f"{value:.6g}"), source=f"{self.stamp}, {how}")

    def random(self, *shape: int, precision: Precision) -> torch.Tensor:
        """Normal numbers on the device. Zeros would draw less power, and run faster than any training does."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(DTYPES[precision])

    def random_bytes(self, num_bytes: int) -> torch.Tensor:
        """Random numbers that fill so many bytes of device memory."""
        return _fill(torch.empty(num_bytes // 4, device=self.device))

    def host_bytes(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Random numbers that fill so many bytes of host memory. Powers of two: torch rounds pinned memory up to them.

        Raises ConveyorError where the memory is refused.
        """
        try:
            return _fill(torch.empty(num_bytes // 4, pin_memory=pinned))
        except RuntimeError as error:
            raise ConveyorError(
                f"probe: {format_bytes(num_bytes)} of {'pinned ' if pinned else ''}host memory were refused ({error})"
            ) from error


def new_bench(scale: Scale, *, num_cores: int | None, report: Callable[[str], None]) -> Bench:
    """A bench on the first CUDA device, or on the CPU where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    date = datetime.datetime.now(datetime.UTC).date()
    return Bench(device, scale, f"measured: {date}, torch {torch.__version__}, {num_cores} cores", report)


def _fill(memory: torch.Tensor) -> torch.Tensor:
    """A mebibyte of normal numbers, then copies of what is there: drawing gigabytes would outlast the measurements."""
    filled = min(MIB // memory.element_size(), memory.numel())
    memory[:filled] = torch.randn(filled)
    while filled < memory.numel():
        more = min(filled, memory.numel() - filled)
        memory[filled : filled + more] = memory[:more]
        filled += more
    return memory
