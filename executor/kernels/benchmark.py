"""How fast the optimizer updates parameters, against copy bandwidth measured in the same run.

    python -m executor.kernels.benchmark [--parameters N] [--threads 1,2,4] [--seconds S]

Speeds of a shared or hot machine drift: compare ratios within one run. `of copy` is the bytes that an update moves
per second over the bytes that a plain copy reads and writes; it can exceed 1, because a copy also fetches the lines
it overwrites and an update, which reads what it writes, does not.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from executor.adamw import adamw_device, adamw_host
from executor.kernels.host_adamw import FUNCTIONS, host_library

BETAS, EPS = (0.9, 0.999), 1e-8


def make_block(
    weights: torch.dtype, gradient: torch.dtype, num_parameters: int, device: str
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Planes of a model in training, as `adamw_host` takes them."""
    real = torch.float64 if weights == torch.float64 else torch.float32
    values = torch.randn(num_parameters, device=device)
    low = None
    if weights == torch.bfloat16:
        low = torch.randint(-(2**15), 2**15, (num_parameters,), dtype=torch.int16, device=device)
    return (
        (values * 0.02).to(weights),
        low,
        (values * 1e-3).to(real),
        (values * 1e-3).square_().to(real),
        values.mul_(1e-2).to(gradient),
    )


def update_bytes(planes: tuple[Tensor | None, ...]) -> int:
    """Bytes an update moves per parameter: it reads everything and writes all but the gradient."""
    sizes = [0 if plane is None else plane.element_size() for plane in planes]
    return 2 * sum(sizes[:-1]) + sizes[-1]


def time_call(call: Callable[[], object], *, seconds: float, device: str) -> float:
    """Median seconds of one call, after a first one that warms up."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    samples = [once()]
    while len(samples) < 3 or sum(samples) < seconds:
        samples.append(once())
    return statistics.median(samples)


def copy_bandwidth(num_bytes: int, *, seconds: float, device: str) -> float:
    """Bytes read and written per second by torch's own copy, on its current number of threads."""
    source = torch.zeros(num_bytes // 8, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    return 2 * source.nbytes / time_call(lambda: target.copy_(source), seconds=seconds, device=device)


def fused_rate(num_parameters: int, *, seconds: float, device: str) -> float:
    """Parameters per second of torch.optim.AdamW(fused=True), everything in fp32."""
    parameter = torch.nn.Parameter(torch.randn(num_parameters, device=device))
    parameter.grad = torch.randn(num_parameters, device=device)
    optimizer = torch.optim.AdamW([parameter], lr=1e-5, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True)
    return num_parameters / time_call(optimizer.step, seconds=seconds, device=device)


def report(*, device: str, threads: int, num_parameters: int, seconds: float) -> None:
    """Print one table: copy, torch's fused AdamW, and every format of ours."""
    where = "CUDA" if device == "cuda" else f"{threads} thread{'s' if threads > 1 else ''}"
    if device == "cpu":
        torch.set_num_threads(threads)
    copied = copy_bandwidth(26 * num_parameters, seconds=seconds, device=device)
    fused = fused_rate(num_parameters, seconds=seconds, device=device)
    print(f"{where}: copy {copied / 1e9:.1f} GB/s; torch's fused AdamW, fp32: {fused / 1e9:.2f} Gparam/s")
    print("  weights  gradient  Gparam/s     GB/s  of copy  of fused")
    for weights, gradient in FUNCTIONS:
        planes = make_block(weights, gradient, num_parameters, device)
        scalars = torch.tensor([1.0, 0.5, 0.99999, 1e-5, 0.3], dtype=planes[2].dtype, device=device)
        rate = num_parameters / time_call(
            lambda planes=planes, scalars=scalars: update(planes, scalars, threads),  # type: ignore[misc]
            seconds=seconds,
            device=device,
        )
        moved = rate * update_bytes(planes)
        print(
            f"  {_name(weights):8} {_name(gradient):8} {rate / 1e9:9.2f} {moved / 1e9:8.1f} {moved / copied:8.2f} "
            f"{rate / fused:9.2f}"
        )


def update(planes: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor], scalars: Tensor, threads: int) -> None:
    num_decay_elements = planes[0].numel() // 2
    if planes[0].device.type == "cpu":
        adamw_host(*planes, scalars, num_decay_elements=num_decay_elements, betas=BETAS, eps=EPS, threads=threads)
    else:
        adamw_device(*planes, scalars, num_decay_elements=num_decay_elements, betas=BETAS, eps=EPS)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    parser = argparse.ArgumentParser(description="Optimizer speed against copy bandwidth, on the host and on CUDA.")
    parser.add_argument("--parameters", type=int, default=1 << 26, help="parameters of the block (default: 67,108,864)")
    parser.add_argument("--threads", default=",".join(map(str, [*powers, cores])), help="host threads, e.g. 1,8,16")
    parser.add_argument("--seconds", type=float, default=0.5, help="at least this long for every figure")
    arguments = parser.parse_args()
    kind = "torch operations: no compiled kernel" if host_library() is None else "the compiled kernel"
    print(f"torch {torch.__version__}, {cores} cores, {arguments.parameters:,} parameters; the host runs {kind}")
    for threads in map(int, arguments.threads.split(",")):
        report(device="cpu", threads=threads, num_parameters=arguments.parameters, seconds=arguments.seconds)
    if torch.cuda.is_available():
        report(device="cuda", threads=1, num_parameters=arguments.parameters, seconds=arguments.seconds)


if __name__ == "__main__":
    main()
