"""Blocks to update, and AdamW written a second time, in numpy, where every operation is rounded on its own."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.planes import merge_planes, split_planes

FORMATS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]
BETAS, EPS = (0.9, 0.999), 1e-8
REAL = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class State:
    """What a step changes; `planes` are the arguments of adamw_host in their order."""

    weights: Tensor
    low: Tensor | None
    first_moment: Tensor
    second_moment: Tensor

    @property
    def planes(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return self.weights, self.low, self.first_moment, self.second_moment

    @property
    def master(self) -> Tensor:
        return self.weights if self.low is None else merge_planes(self.weights, self.low)

    def to(self, device: str) -> "State":
        return State(*(None if plane is None else plane.to(device, copy=True) for plane in self.planes))


def any_number(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Finite numbers of every magnitude, denormals and both zeros included."""
    integers = INTEGERS[dtype.itemsize]
    info = torch.iinfo(integers)
    values = torch.randint(info.min, info.max, (count,), dtype=integers, generator=generator).view(dtype)
    values[:: max(1, count // 16)] = 0.0
    return torch.where(values.isfinite(), values, 0.25)


def make_state(weights: torch.dtype, master: Tensor, first_moment: Tensor, second_moment: Tensor) -> State:
    low = None
    plane = master.clone()
    if weights == torch.bfloat16:
        plane, low = torch.empty_like(master, dtype=weights), torch.empty_like(master, dtype=torch.int16)
        split_planes(master, plane, low)
    return State(plane, low, first_moment.clone(), second_moment.clone())


def make_case(
    weights: torch.dtype, gradient: torch.dtype, count: int, kind: str, seed: int = 0
) -> tuple[State, Tensor]:
    """A state and a gradient; kind "usual" is a model in training, "any" every number that fits.

    Kind "fading" has moments about the smallest normal number, and gradients that are zero or make moments like them.
    """
    generator = torch.Generator().manual_seed(0)
    real = REAL[weights]
    if kind == "usual":
        draws = [torch.randn(count, dtype=torch.float64, generator=generator) for _ in range(4)]
        master, first, second = draws[0] * 0.02, draws[1] * 1e-3, (draws[2] * 1e-3).square()
        state = make_state(weights, master.to(real), first.to(real), second.to(real))
        return state, (draws[3] * 1e-2).to(gradient)
    if kind == "fading":
        signs, powers = torch.randn(2, count, generator=generator).sign(), torch.rand(3, count, generator=generator)
        first, second, squared = torch.finfo(real).tiny * torch.exp2(20 * powers.double() - 16)
        slope = torch.where(powers[2] < 0.5, squared.sqrt() * 1e-3, squared) * signs[1]
        slope[::3] = 0.0
        master = torch.randn(count, generator=generator).to(real)
        return make_state(weights, master, (first * signs[0]).to(real), second.to(real)), slope.to(gradient)
    master, first, second = (any_number(count, real, generator) for _ in range(3))
    return make_state(weights, master, first, second.abs()), any_number(count, gradient, generator)


def make_scalars(dtype: torch.dtype, *, apply: float = 1.0, clip: float = 0.37) -> Tensor:
    return torch.tensor([apply, clip, 1 - 3e-4 * 0.1, 3e-4 / (1 - 0.9**3), (1 - 0.999**3) ** 0.5], dtype=dtype)


def numpy_step(state: State, gradient: Tensor, scalars: Tensor, num_decay_elements: int) -> State:
    """The state after the step, by numpy."""
    real = NUMPY[scalars.dtype]
    _, clip, decay, step_size, root = scalars.numpy()
    beta1, rest1, beta2, rest2, eps = (real(x) for x in (BETAS[0], 1 - BETAS[0], BETAS[1], 1 - BETAS[1], EPS))
    master = state.master.clone().numpy()
    decays = np.where(np.arange(master.size) < num_decay_elements, decay, real(1))
    with np.errstate(all="ignore"):
        g = gradient.to(scalars.dtype).numpy() * clip
        m = state.first_moment.numpy() * beta1 + g * rest1
        v = state.second_moment.numpy() * beta2 + (g * g) * rest2
        m[np.abs(m) < np.finfo(real).tiny] = 0
        v[(m == 0) & (v < np.finfo(real).tiny)] = 0
        p = master * decays - step_size * (m / (np.sqrt(v) / root + eps))
    assert p.dtype == m.dtype == v.dtype == real
    if state.low is not None:
        p[np.isnan(p)] = real(np.nan)
    return make_state(state.weights.dtype, *(torch.from_numpy(x) for x in (p, m, v)))


def differing(left: State, right: State) -> dict[str, int]:
    """Elements whose bits differ, by plane; empty if none. A NaN of a moment may carry any payload."""
    found = {}
    for name in ("weights", "low", "first_moment", "second_moment"):
        ours, theirs = getattr(left, name), getattr(right, name)
        if ours is None and theirs is None:
            continue
        ours, theirs = ours.cpu(), theirs.cpu()
        integers = INTEGERS[ours.dtype.itemsize]
        same = ours.view(integers) == theirs.view(integers)
        if not (name == "low" or (name == "weights" and left.low is not None)):
            same |= ours.isnan() & theirs.isnan()
        if not same.all():
            found[name] = int((~same).sum())
    return found
