"""Compute rates: matrix products and causal attention, forward and backward, and the launch of one operation."""

import contextlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulator.bench.bench import Bench
from simulator.bench.timing import median_seconds, run_for
from simulator.figure import Figure, format_value
from simulator.formats import PRECISIONS, Precision
from simulator.hardware import AttentionPoint, MatmulPoint

# On the CPU torch has one way and picks it itself.
CUDA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CPU_BACKENDS: dict[str, SDPBackend | None] = {"default": None}


def measure_matmul(bench: Bench, *, memory_bytes: int) -> tuple[tuple[MatmulPoint, ...], Figure]:
    """Points of a hot chip, and the hot over the cold rate at the middle size. Sizes beyond a third of memory drop."""
    scale = bench.scale
    sizes = scale.matmul_tokens["bf16"]
    middle = sizes[len(sizes) // 2]
    operation, flops = _products(bench, "bf16", middle)
    cold = flops / median_seconds(operation, device=bench.device, seconds=scale.point_seconds / 2)
    run_for(operation, device=bench.device, seconds=scale.hot_seconds)
    hot = flops / median_seconds(operation, device=bench.device, seconds=scale.point_seconds / 2)
    how = (
        f"median after {scale.hot_seconds:g} s of load; forward, input gradient and weight gradient of "
        f"{scale.hidden_size}x{scale.intermediate_size} and {scale.hidden_size}x{scale.hidden_size}"
    )
    points = []
    for precision, tokens in ((p, t) for p, sizes in scale.matmul_tokens.items() for t in sizes):
        row_bytes = 2 * (3 * scale.hidden_size + scale.intermediate_size) * PRECISIONS[precision].weight
        if tokens * row_bytes > memory_bytes / 3:
            bench.report(f"matmul {precision}, {tokens:,} tokens: left out, too large for this device")
            continue
        operation, flops = _products(bench, precision, tokens)
        # Making the data let the chip cool: half of the time heats it again.
        run_for(operation, device=bench.device, seconds=scale.point_seconds / 2)
        rate = flops / median_seconds(operation, device=bench.device, seconds=scale.point_seconds)
        bench.report(f"matmul {precision}, {tokens:,} tokens: {format_value(rate, 'FLOP/s')}")
        points.append(MatmulPoint(precision=precision, tokens=tokens, flops_per_second=bench.figure(rate, how)))
    factor = bench.figure(min(hot / cold, 1.0), f"bf16 products of {middle:,} tokens, hot over cold")
    return tuple(points), factor


def _products(bench: Bench, precision: Precision, tokens: int) -> tuple[Callable[[], None], int]:
    """The three products of training a linear layer, for the MLP's and the attention's shape, and their FLOPs."""
    hidden, intermediate = bench.scale.hidden_size, bench.scale.intermediate_size
    products, flops = [], 0
    for num_inputs, num_outputs in ((hidden, intermediate), (hidden, hidden)):
        x = bench.random(tokens, num_inputs, precision=precision)
        grad_y = bench.random(tokens, num_outputs, precision=precision)
        weight = bench.random(num_outputs, num_inputs, precision=precision)
        y, grad_x, grad_weight = torch.empty_like(grad_y), torch.empty_like(x), torch.empty_like(weight)
        products += [(x, weight.T, y), (grad_y, weight, grad_x), (grad_y.T, x, grad_weight)]
        flops += 3 * 2 * tokens * num_inputs * num_outputs

    def operation() -> None:
        for left, right, out in products:
            torch.mm(left, right, out=out)

    return operation, flops


def measure_attention(bench: Bench) -> tuple[AttentionPoint, ...]:
    """Points of every backend that takes the shapes; a refusal is reported."""
    scale = bench.scale
    backends = CPU_BACKENDS if bench.cpu else CUDA_BACKENDS
    how = (
        f"median, causal, {scale.num_heads} query and {scale.num_kv_heads} key heads of {scale.head_dim}, "
        "backward counted as twice the forward"
    )
    points = []
    for precision, lengths in scale.attention_lengths.items():
        for length, (name, backend) in itertools.product(lengths, backends.items()):
            label = f"attention {precision} {name}, {length:,} long"
            rates = _attention_rates(bench, precision, length, backend, label)
            if rates is None:
                continue
            forward, backward = rates
            bench.report(
                f"{label}: forward {format_value(forward, 'FLOP/s')}, backward {format_value(backward, 'FLOP/s')}"
            )
            points.append(
                AttentionPoint(
                    precision=precision,
                    sequence_length=length,
                    backend=name,
                    forward_flops_per_second=bench.figure(forward, how),
                    backward_flops_per_second=bench.figure(backward, how),
                )
            )
    return tuple(points)


def _attention_rates(
    bench: Bench, precision: Precision, length: int, backend: SDPBackend | None, label: str
) -> tuple[float, float] | None:
    """Forward and backward rate, or None where the backend has no kernel for the shapes."""
    scale = bench.scale
    batch = max(1, scale.attention_tokens // length)
    flops = 2 * batch * scale.num_heads * scale.head_dim * length**2

    def tensor(num_heads: int) -> torch.Tensor:
        return bench.random(batch, num_heads, length, scale.head_dim, precision=precision).requires_grad_()

    refusal = ""
    # A backend without grouped heads gets the key heads repeated.
    for num_kv_heads in (scale.num_kv_heads, scale.num_heads):
        q, k, v = tensor(scale.num_heads), tensor(num_kv_heads), tensor(num_kv_heads)
        try:
            forward, backward = _attention_seconds(bench, q, k, v, backend)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            refusal = str(error).strip().partition("\n")[0]
            continue
        return flops / forward, 2 * flops / backward
    bench.report(f"{label}: refused ({refusal})")
    return None


def _attention_seconds(
    bench: Bench, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend | None
) -> tuple[float, float]:
    grouped = q.shape[1] != k.shape[1]

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    choice = contextlib.nullcontext() if backend is None else sdpa_kernel([backend])
    with choice, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains in many warnings why a backend refuses; the error says enough
        out = forward()
        grad_out = torch.randn_like(out)

        def backward() -> object:
            return torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)

        backward_seconds = median_seconds(backward, device=bench.device, seconds=bench.scale.point_seconds)
        with torch.no_grad():
            forward_seconds = median_seconds(forward, device=bench.device, seconds=bench.scale.point_seconds / 2)
    return forward_seconds, backward_seconds


def measure_launch(bench: Bench) -> Figure:
    """Seconds from one small operation to the next, as one Python thread issues them."""
    x = torch.rand(1, device=bench.device)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            x.mul_(1.0001)
        times.append((time.perf_counter() - start) / 100)
        if not bench.cpu:
            torch.cuda.synchronize()
    seconds = statistics.median(times)
    bench.report(f"launch: {format_value(seconds, 's')}")
    return bench.figure(seconds, "median, one-element operations issued from Python")
