"""Tiny models, batches and runs that several tests share."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from executor.adamw import step_scalars
from executor.data.dataset import Batch
from executor.operations import Optimization
from executor.planes import merge_planes, split_planes
from executor.store import tensor_view
from executor.trainer import StepResult, Trainer
from simulator.freezing import freeze
from simulator.model import ModelSpec, model_spec
from simulator.policy import Policy, Workload

SEQUENCE = 16
ROWS = 6
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1


def tiny_config(family: str = "qwen2", *, tied: bool = False, layers: int = 4) -> dict[str, Any]:
    """A config of a few thousand parameters, grouped-query attention included."""
    return {
        "model_type": family, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, "initializer_range": 0.2,
        "sliding_window": None, "use_cache": False,
    }  # fmt: skip


def tiny_spec(config: dict[str, Any]) -> ModelSpec:
    """The model of a config, which is built once: tests make a dozen trainers of the same one."""
    return _spec_of(json.dumps(config))


@functools.cache
def _spec_of(text: str) -> ModelSpec:
    return model_spec(json.loads(text))


def tiny_batches(num_steps: int, *, rows: int = ROWS, vocab: int = 61) -> list[Batch]:
    """Random rows of ragged lengths: labels are masked behind each row's end."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(num_steps):
        stream = torch.randint(0, vocab, (rows, SEQUENCE + 1), generator=generator)
        tokens, labels = stream[:, :-1].contiguous(), stream[:, 1:].clone()
        for row in range(rows):
            labels[row, SEQUENCE - 2 * (row % 4) :] = -100
        batches.append(Batch(tokens, labels, int((labels != -100).sum()), tokens.numel()))
    return batches


def random_weights(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Seeded random weights by transformers' names; norms near one, biases not zero."""
    model = tiny_spec(config)
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for block in range(model.num_blocks):
        for tensor in model.block(block).tensors:
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.15
            if "norm" in tensor.name or "ln_" in tensor.name:
                values = 1.0 + 0.1 * values
            weights[model.block_prefix(block) + tensor.name] = values.to(dtype)
    return weights


def make_trainer(
    config: dict[str, Any],
    workload: Workload,
    policy: Policy,
    weights: dict[str, Tensor],
    *,
    max_grad_norm: float | None = 0.5,
    learning_rates: Sequence[float] = (LEARNING_RATE,) * 64,
    weight_decay: float = WEIGHT_DECAY,
    frozen: Sequence[str] = (),
    device: str = "cpu",
) -> Trainer:
    """A trainer whose state is `weights`, ready to step."""
    model = freeze(tiny_spec(config), frozen)
    dtype = torch.float64 if workload.precision == "fp64" else torch.float32
    table = step_scalars(learning_rates, BETAS, weight_decay, dtype=dtype)
    trainer = Trainer(
        config, model, workload, policy, Optimization(table, BETAS, EPSILON, max_grad_norm), device=torch.device(device)
    )
    for block in range(model.num_blocks):
        state = trainer.memory.state(block)
        for tensor in model.block(block).tensors:
            value = weights[model.block_prefix(block) + tensor.name]
            target = tensor_view(state.weights, tensor)
            if state.low is None:
                target.copy_(value)
            else:
                high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty(value.shape, dtype=torch.int16)
                split_planes(value.float(), high, low)
                target.copy_(high)
                tensor_view(state.low, tensor).copy_(low)
    trainer.start()
    return trainer


def run_steps(trainer: Trainer, batches: Sequence[Batch]) -> list[StepResult]:
    """All steps and their results; the trainer is drained."""
    results = [trainer.step(batch) for batch in batches]
    found = [result for result in [*results, trainer.drain()] if result is not None]
    assert len(found) == len(batches)
    return found


def master_weights(trainer: Trainer) -> dict[str, Tensor]:
    """The master by transformers' names, on the CPU."""
    model: ModelSpec = trainer.model
    found = {}
    for block in range(model.num_blocks):
        state = trainer.memory.state(block)
        master = state.weights if state.low is None else merge_planes(state.weights.cpu(), state.low.cpu())
        for tensor in model.block(block).tensors:
            found[model.block_prefix(block) + tensor.name] = tensor_view(master, tensor).detach().cpu().clone()
    return found


def state_bits(trainer: Trainer) -> list[Tensor]:
    """Every plane of every block as bytes, on the CPU, to compare bit for bit."""
    planes = []
    for state in trainer.memory.states():
        for plane in (state.weights, state.low, state.first_moment, state.second_moment):
            if plane is not None:
                planes.append(plane.detach().cpu().view(torch.uint8).clone())
    return planes


Bits = tuple[list[tuple[float, float]], list[torch.Tensor]]  # losses with norms, and the state


def assert_same_bits(found: Bits, expected: Bits, title: str) -> None:
    assert found[0] == expected[0], title
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True)), title
