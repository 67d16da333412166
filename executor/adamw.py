"""AdamW, one formula for every home of the optimizer: host or GPU, compiled or not, the bits are the same.

    g = gradient * clip_factor
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    m = 0 where |m| < tiny;  v = 0 where m = 0 and v < tiny
    p = p * decay - step_size * (m / (sqrt(v) / root_bias_correction2 + eps))

Every operation is rounded on its own: no fused multiply-add, IEEE division and square root, denormals kept but for the
third line, where tiny is the smallest normal number. Without it a moment that gets no gradients any more, as that of a
token's embedding seen once, decays to a denormal that rounding gives back for ever, and processors are slow with those;
the weights are off by less than 1e-30 for it. A second moment goes last, so that no step divides by it alone. It is
Loshchilov and Hutter's AdamW (arXiv 1711.05101) as torch.optim.AdamW orders it. The master is fp32 in bf16 and fp32
runs (in bf16 runs split in two planes, see executor/planes.py) and fp64 in fp64 runs; moments have its precision.

What depends on the data comes as five numbers, `scalars`, of the master's precision:

    [apply, clip_factor, decay, step_size, root_bias_correction2]

with decay = 1 - learning_rate * weight_decay, step_size = learning_rate / (1 - beta1^t), root_bias_correction2 =
sqrt(1 - beta2^t). Where apply is 0 no bit of any tensor changes: that is how a non-finite step is skipped without
asking the host. Weight decay covers the first `num_decay_elements` of a block (its matrices); decay is 1 behind them.

Zero gradients leave zero weights and moments zero, so the padding between a block's tensors stays zero.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from executor.kernels.host_adamw import FUNCTIONS, host_library, run_adamw
from executor.planes import merge_planes, split_planes
from simulator.errors import InputError

# Elements that plain torch operations take at a time. On the host the share of a thread stays in its second-level
# cache from one operation to the next; on a GPU the size only bounds the scratch memory.
HOST_CHUNK_ELEMENTS_PER_THREAD = 1 << 16
DEVICE_CHUNK_ELEMENTS = 1 << 24


class Constants(NamedTuple):
    """What stays the same over a run, rounded to the master's precision."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float


class Block(NamedTuple):
    """The planes of one update, all flat and of one length; `low` is None where the weights are their own master."""

    weights: Tensor
    low: Tensor | None
    first_moment: Tensor
    second_moment: Tensor
    gradient: Tensor

    def part(self, begin: int, end: int) -> "Block":
        return Block(*(None if plane is None else plane[begin:end] for plane in self))  # type: ignore[arg-type]


def step_scalars(
    learning_rates: Iterable[float],
    betas: tuple[float, float],
    weight_decay: float,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[decay, step_size, root_bias_correction2] of steps t = 1, 2, ...: a CPU table [steps, 3].

    A skipped step does not count, so which row holds is known to the device alone: `clip_scalars` looks it up.
    Computed in double precision and rounded once.
    """
    # One number after another: a run may have millions of steps.
    numbers = np.fromiter(
        (
            number
            for step, rate in enumerate(learning_rates, start=1)
            for number in (1 - rate * weight_decay, rate / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step))
        ),
        np.float64,
    )
    table = torch.from_numpy(numbers).to(dtype).view(-1, 3)
    if not table.isfinite().all():
        raise InputError(
            f"learning_rate and weight_decay: some of their steps are beyond what {dtype} holds; lower the larger one"
        )
    return table


@torch.no_grad()
def clip_scalars(
    squared_norms: Tensor,
    table: Tensor,
    count: Tensor,
    max_grad_norm: float | None,
    *,
    scalars: Tensor,
    norm: Tensor,
) -> None:
    """Write the `scalars` [5] of this step and the gradient's `norm` (0-d), and advance `count`; no host sync.

    `squared_norms` [num_blocks] are summed in block order in double precision. The clip factor is
    min(1, max_grad_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_, and 1 where `max_grad_norm` is None.
    `count` (int64, 0-d) is the number of steps applied so far, hence the row of `table` (of `step_scalars`) that
    holds now. A non-finite norm gives apply = 0 and leaves `count` as it is. All tensors lie on one device.
    """
    # One by one: the order of the sum is part of the result, and there are few blocks.
    total = functools.reduce(torch.add, squared_norms.to(torch.float64).unbind())
    exact_norm = total.sqrt()
    applies = exact_norm.isfinite()
    clip = torch.ones_like(exact_norm)
    if max_grad_norm is not None:
        # A number divided by a tensor would be a multiplication by the rounded reciprocal.
        clip = torch.full_like(exact_norm, max_grad_norm).div_(exact_norm + 1e-6).clamp_(max=1.0)
    scalars[0].copy_(applies)
    scalars[1].copy_(clip.masked_fill_(~applies, 0.0))
    scalars[2:].copy_(table.index_select(0, count.view(1)).view(3))
    norm.copy_(exact_norm)
    count.add_(applies)


@torch.no_grad()
def adamw_host(
    weights: Tensor,
    low: Tensor | None,
    first_moment: Tensor,
    second_moment: Tensor,
    gradient: Tensor,
    scalars: Tensor,
    *,
    num_decay_elements: int,
    betas: tuple[float, float],
    eps: float,
    threads: int,
) -> None:
    """One step, in place, on a block in host memory; `scalars` are read when the call runs.

    Weights bf16 with `low` int16, fp32 or fp64; moments of the master's precision; gradient bf16 or fp32 (fp64 for
    fp64). The compiled kernel uses `threads` threads and holds no interpreter lock; without a compiler the same
    formula runs as torch operations on torch's own threads, whatever `threads` says. Raises ValueError when a tensor
    does not fit, InputError for impossible betas or eps.
    """
    block = Block(weights, low, first_moment, second_moment, gradient)
    constants = _constants(betas, eps, first_moment.dtype)
    _check(block, scalars, num_decay_elements, "cpu")
    library = host_library()
    if library is not None:
        run_adamw(library, *block, scalars, num_decay_elements=num_decay_elements, constants=constants, threads=threads)
    elif scalars[0].item() != 0:
        chunk_elements = HOST_CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads()
        scratch = first_moment.new_empty(2, min(chunk_elements, weights.numel()))
        for part, decays in _parts(block, num_decay_elements, chunk_elements):
            _update(part, scalars, constants, scratch, decays=decays)


@torch.no_grad()
def adamw_device(
    weights: Tensor,
    low: Tensor | None,
    first_moment: Tensor,
    second_moment: Tensor,
    gradient: Tensor,
    scalars: Tensor,
    *,
    num_decay_elements: int,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """`adamw_host` on the device where the tensors and `scalars` lie, on its current stream, without a host sync.

    One Triton kernel on CUDA; torch operations where Triton is missing and in fp64. On the CPU it is `adamw_host`
    with torch's number of threads.
    """
    if weights.device.type == "cpu":
        adamw_host(
            weights,
            low,
            first_moment,
            second_moment,
            gradient,
            scalars,
            num_decay_elements=num_decay_elements,
            betas=betas,
            eps=eps,
            threads=torch.get_num_threads(),
        )
        return
    block = Block(weights, low, first_moment, second_moment, gradient)
    constants = _constants(betas, eps, first_moment.dtype)
    _check(block, scalars, num_decay_elements, weights.device.type)
    kernel = _triton_kernel() if weights.device.type == "cuda" and weights.dtype != torch.float64 else None
    if kernel is not None:
        kernel(*block, scalars, num_decay_elements=num_decay_elements, constants=constants)
        return
    scratch = first_moment.new_empty(2, min(DEVICE_CHUNK_ELEMENTS, weights.numel()))
    for part, decays in _parts(block, num_decay_elements, DEVICE_CHUNK_ELEMENTS):
        before = [None if plane is None else plane.clone() for plane in part[:4]]
        _update(part, scalars, constants, scratch, decays=decays)
        for plane, old in zip(part[:4], before, strict=True):
            if plane is not None and old is not None:
                torch.where(scalars[0] != 0, plane, old, out=plane)


def _update(block: Block, scalars: Tensor, constants: Constants, scratch: Tensor, *, decays: bool) -> None:
    """The formula as torch operations. Scalars stay tensors: CUDA divides by a number through its reciprocal."""
    g, spare = scratch[:, : block.weights.numel()].unbind()
    _, clip, decay, step_size, root_bias_correction2 = scalars.unbind()
    m, v = block.first_moment, block.second_moment
    g.copy_(block.gradient).mul_(clip)
    m.mul_(constants.beta1).add_(torch.mul(g, constants.one_minus_beta1, out=spare))
    v.mul_(constants.beta2).add_(g.mul_(g).mul_(constants.one_minus_beta2))
    tiny = torch.finfo(m.dtype).tiny
    m.masked_fill_(m.abs() < tiny, 0.0)
    v.masked_fill_((v < tiny).logical_and_(m == 0), 0.0)
    denominator = _square_root(v, out=g).div_(root_bias_correction2).add_(constants.eps)
    step = torch.div(m, denominator, out=denominator).mul_(step_size)
    master = block.weights if block.low is None else merge_planes(block.weights, block.low, out=spare)
    if decays:
        master.mul_(decay)
    master.sub_(step)
    if block.low is not None:
        # Some NaN payloads would round to a high plane of -0 and hide the NaN from the model: one NaN for all.
        torch.nan_to_num(master, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=master)
        split_planes(master, block.weights, block.low)


def _square_root(values: Tensor, *, out: Tensor) -> Tensor:
    """IEEE square root. On the CPU torch.sqrt is a vector library's, and 0.6 % of its results are an ulp off."""
    if values.device.type != "cpu":
        return torch.sqrt(values, out=out)
    np.sqrt(values.numpy(), out=out.numpy())
    return out


def _parts(block: Block, num_decay_elements: int, chunk_elements: int) -> Iterator[tuple[Block, bool]]:
    """Pieces of at most `chunk_elements`, none across the end of the weight decay, and whether they decay."""
    num_elements = block.weights.numel()
    borders = sorted({*range(0, num_elements, chunk_elements), num_decay_elements, num_elements})
    for begin, end in itertools.pairwise(borders):
        yield block.part(begin, end), begin < num_decay_elements


@functools.lru_cache(maxsize=16)
def _constants(betas: tuple[float, float], eps: float, dtype: torch.dtype) -> Constants:
    beta1, beta2 = betas
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise InputError(f"betas: {betas} must lie in [0, 1)")
    exact = torch.tensor([beta1, 1 - beta1, beta2, 1 - beta2, eps], dtype=torch.float64)
    constants = Constants(*exact.to(dtype).tolist())
    if not 0 < constants.eps < math.inf:
        raise InputError(f"eps: {eps} is not a positive {dtype} number; without it a zero gradient divides 0 by 0")
    return constants


def _check(block: Block, scalars: Tensor, num_decay_elements: int, device_type: str) -> None:
    """The compiled kernels follow bare pointers, so nothing may be off by a byte."""
    weights, low, gradient = block.weights, block.low, block.gradient
    if (weights.dtype, gradient.dtype) not in FUNCTIONS:
        raise ValueError(f"AdamW: {weights.dtype} weights with a {gradient.dtype} gradient are not supported")
    if (low is not None) != (weights.dtype == torch.bfloat16):
        raise ValueError("AdamW: bf16 weights, and only they, have a low plane")
    real = torch.float32 if weights.dtype == torch.bfloat16 else weights.dtype
    dtypes = (weights.dtype, torch.int16, real, real, gradient.dtype)
    for name, tensor, dtype in zip(Block._fields, block, dtypes, strict=True):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != (weights.numel(),) or tensor.device.type != device_type:
            raise ValueError(
                f"AdamW: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"expected {dtype} [{weights.numel()}] on {device_type}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"AdamW: {name} is not contiguous")
    if scalars.dtype != real or scalars.shape != (5,) or scalars.device.type != device_type:
        raise ValueError(f"AdamW: scalars must be {real} [5] on {device_type}")
    if not scalars.is_contiguous():
        raise ValueError("AdamW: scalars are not contiguous")
    if not 0 <= num_decay_elements <= weights.numel():
        raise ValueError(f"AdamW: num_decay_elements {num_decay_elements} of {weights.numel()}")


@functools.cache
def _triton_kernel() -> Callable[..., None] | None:
    try:
        from executor.kernels.triton_adamw import run_adamw as kernel
    except ImportError as error:
        warnings.warn(
            f"the GPU optimizer runs as plain torch operations, with the same results but slower: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return kernel
