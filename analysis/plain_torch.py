"""Plain PyTorch with everything in HBM: the rival where a model fits, measured on the same work.

transformers' model, each layer through torch.compile at an activation memory budget, the loss in checkpointed chunks,
bf16 gradients that accumulate in place, exact clipping, and AdamW on an fp32 master kept as two planes: what a careful
user of PyTorch reaches without moving anything to the host.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from executor.adamw import adamw_device, clip_scalars, step_scalars
from executor.planes import merge_planes
from simulator.model import transformers_config

BETAS, EPSILON = (0.9, 0.999), 1e-8
LOSS_CHUNK_TOKENS = 2048
WARM_STEPS, TIMED_STEPS = 3, 5


class PlainTorch:
    """One model and its optimizer on one GPU. `budget`: torch's activation memory budget of the layers, 0 to 1."""

    def __init__(self, config: dict[str, Any], *, budget: float, max_grad_norm: float, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.max_grad_norm, self.device = max_grad_norm, device
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(transformers_config(config), dtype=torch.bfloat16)
        self.budget = budget
        for index, layer in enumerate(self.model.model.layers if device.type == "cuda" else ()):
            self.model.model.layers[index] = torch.compile(layer, dynamic=False)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.states = []
        for parameter in self.parameters:
            flat = parameter.detach().view(-1)
            moments = [torch.zeros(flat.numel(), dtype=torch.float32, device=device) for _ in range(2)]
            self.states.append((flat, torch.zeros(flat.numel(), dtype=torch.int16, device=device), *moments))
        self.table = step_scalars([1e-5] * 10_000, BETAS, 0.0).to(device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.scalars = torch.zeros(5, device=device)
        self.norm = torch.zeros((), dtype=torch.float64, device=device)

    def step(self, tokens: Tensor, labels: Tensor, *, micro_batch_rows: int) -> Tensor:
        """One step on [rows, sequence_length]; the summed loss a target."""
        num_targets = int((labels >= 0).sum())
        total = torch.zeros((), device=self.device)
        with torch._functorch.config.patch(activation_memory_budget=self.budget):
            for rows, targets in zip(tokens.split(micro_batch_rows), labels.split(micro_batch_rows), strict=True):
                hidden = self.model.model(input_ids=rows.to(self.device), use_cache=False).last_hidden_state
                loss = self._loss(hidden.flatten(0, 1), targets.to(self.device).flatten()) / num_targets
                loss.backward()
                total += loss.detach()
        self._update()
        return total

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        def chunk_loss(chunk: Tensor, wanted: Tensor) -> Tensor:
            logits = self.model.lm_head(chunk).float()
            return nn.functional.cross_entropy(logits, wanted, reduction="sum")

        losses = [
            checkpoint(chunk_loss, chunk, wanted, use_reentrant=False)
            for chunk, wanted in zip(hidden.split(LOSS_CHUNK_TOKENS), targets.split(LOSS_CHUNK_TOKENS), strict=True)
        ]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _update(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        assert all(gradient is not None for gradient in gradients)
        norms = torch._foreach_norm([g.view(-1) for g in gradients if g is not None], dtype=torch.float32)
        squared = torch.stack(list(norms)).double().square()
        clip_scalars(
            squared.sum().view(1), self.table, self.count, self.max_grad_norm, scalars=self.scalars, norm=self.norm
        )
        for parameter, state in zip(self.parameters, self.states, strict=True):
            assert parameter.grad is not None
            decays = parameter.numel() if parameter.dim() > 1 else 0
            flat, low, first_moment, second_moment = state
            adamw_device(
                flat, low, first_moment, second_moment, parameter.grad.view(-1), self.scalars,
                num_decay_elements=decays, betas=BETAS, eps=EPSILON,
            )  # fmt: skip
            parameter.grad.zero_()

    def master(self, index: int) -> Tensor:
        """The fp32 master of a parameter, flat."""
        return merge_planes(self.states[index][0], self.states[index][1])


def measure_plain(
    config: dict[str, Any],
    tokens: Tensor,
    labels: Tensor,
    *,
    micro_batch_rows: int,
    budget: float,
    max_grad_norm: float,
    device: torch.device,
    warm_seconds: float = 0.0,
) -> float:
    """Seconds of a step: the median of 5 after 3, and after `warm_seconds` of load. Raises torch's OutOfMemoryError."""
    plain = PlainTorch(config, budget=budget, max_grad_norm=max_grad_norm, device=device)

    def timed() -> float:
        start = time.perf_counter()
        plain.step(tokens, labels, micro_batch_rows=micro_batch_rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    started, steps = time.perf_counter(), 0
    while steps < WARM_STEPS or time.perf_counter() - started < warm_seconds:
        timed()
        steps += 1
    return statistics.median(timed() for _ in range(TIMED_STEPS))
