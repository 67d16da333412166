"""A streamed step with frozen parameters equals a plain torch step with requires_grad_(False), under every policy."""

from fnmatch import fnmatchcase

import pytest
import torch

from executor.layer import LayerTemplates
from simulator.freezing import freeze, parameter_names
from simulator.model import model_spec
from simulator.policy import Policy, Workload, uniform_policy
from tests.freezing_cases import fitted
from tests.plain_trainer import plain_train
from tests.test_streamed_step import MAX_GRAD_NORM, tiny_workload, very_different_policies
from tests.tiny import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    ROWS,
    WEIGHT_DECAY,
    make_trainer,
    master_weights,
    random_weights,
    run_steps,
    state_bits,
    tiny_batches,
    tiny_config,
)

PATTERNS = {
    "the embedding": ["model.embed_tokens.*"],
    "the bottom": ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"],
    "all but the head": ["model.embed_tokens.*", "model.layers.*"],
    "a layer between trained ones": ["model.layers.2.*"],
    "all but the biases": ["*.weight"],
    "the biases": ["*.bias"],
    "one matrix a layer": ["model.layers.*.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.weight"],
    "the head's norm": ["model.norm.weight"],
    "bottom, a part of the middle, head": ["model.embed_tokens.*", "model.layers.0.*", "*.2.*_proj.*", "model.norm.*"],
}


def names_of(config: dict, patterns: list[str]) -> set[str]:
    return {n for n in parameter_names(model_spec(config)) if any(fnmatchcase(n, pattern) for pattern in patterns)}


def streamed_policy(config: dict, workload: Workload, patterns: list[str]) -> Policy:
    return uniform_policy(
        freeze(model_spec(config), patterns), workload, micro_batch_rows=2, groups=(2, 1), weights="host",
        optimizer="host", save_level="input", head_chunk_tokens=10,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("title", PATTERNS)
def test_frozen_steps_equal_plain_torch(title: str, tied: bool) -> None:
    config, patterns, workload = tiny_config(tied=tied), PATTERNS[title], tiny_workload("fp64")
    frozen, weights, batches = names_of(config, patterns), random_weights(config, torch.float64), tiny_batches(4)
    plain = plain_train(
        config, weights, [(b.tokens, b.labels) for b in batches], micro_batch_rows=2, learning_rate=LEARNING_RATE,
        betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, dtype=torch.float64,
        frozen=frozen,
    )  # fmt: skip
    policy = streamed_policy(config, workload, patterns)
    trainer = make_trainer(config, workload, policy, weights, max_grad_norm=MAX_GRAD_NORM, frozen=patterns)
    results = run_steps(trainer, batches)
    streamed = master_weights(trainer)
    trainer.close()
    for step, result in enumerate(results):
        assert result.loss == pytest.approx(plain.losses[step], abs=1e-10)
        assert result.gradient_norm == pytest.approx(plain.norms[step], rel=1e-10)
    for name, weight in plain.weights.items():
        if name in frozen:
            assert torch.equal(streamed[name], weights[name]), name
        else:
            assert not torch.equal(streamed[name], weights[name]), name
            torch.testing.assert_close(streamed[name], weight, rtol=0, atol=1e-10, msg=name)


RUNS = [("fp32", "fp32", "global", True), ("bf16", "bf16", "global", False), ("bf16", "fp32", "layerwise", True)]
TITLES = ["the bottom", "a layer between trained ones", "bottom, a part of the middle, head"]


# Each pattern and each kind of run once; every pair takes half a minute.
@pytest.mark.parametrize(
    ("title", "precision", "gradient_format", "clipping", "tied"),
    [
        pytest.param(title, *run, marks=() if place == other else pytest.mark.slow)
        for place, run in enumerate(RUNS)
        for other, title in enumerate(TITLES)
    ],
)
def test_policies_give_the_same_bits(
    title: str, precision: str, gradient_format: str, clipping: str, tied: bool
) -> None:
    config, patterns = tiny_config(tied=tied), PATTERNS[title]
    workload = tiny_workload(precision, gradient_format=gradient_format, clipping=clipping)
    weights, batches = random_weights(config, torch.float32), tiny_batches(2)
    model, frozen_names = freeze(model_spec(config), patterns), names_of(config, patterns)
    expected = None
    for name, policy in very_different_policies(config, workload).items():
        fitting = fitted(policy, model)
        trainer = make_trainer(config, workload, fitting, weights, frozen=patterns)
        before = master_weights(trainer)
        results = run_steps(trainer, batches)
        after = master_weights(trainer)
        for frozen in frozen_names:
            assert torch.equal(before[frozen], after[frozen]), (name, frozen)
        found = ([(r.loss, r.gradient_norm) for r in results], state_bits(trainer))
        planned = {"device": 0, "host": 0}
        for buffer in trainer.program.buffers.values():
            if buffer.persistent and buffer.role not in ("scalars", "batch"):
                planned[buffer.tier] += buffer.num_bytes
        allocated = trainer.memory.persistent_bytes()
        assert allocated["device"] == planned["device"], name
        assert planned["host"] <= allocated["host"] <= planned["host"] + 2 * 4096 * trainer.model.num_blocks, name
        trainer.close()
        expected = expected or found
        assert found[0] == expected[0], name
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True)), name


def test_frozen_weights_take_no_gradient_work() -> None:
    config = tiny_config()
    model = freeze(model_spec(config), ["model.layers.0.*", "model.layers.1.mlp.*"])
    templates = LayerTemplates(config, model, precision="fp32")
    flat = torch.randn(model.block(1).num_elements) * 0.1
    hidden = torch.randn(1, 8, model.hidden_size)
    for block in (1, 2):
        output, saved = templates.forward(block, flat, hidden, "keep")
        _, gradients = templates.backward(block, flat, saved, torch.ones_like(output))
        for tensor, gradient in zip(model.block(block).tensors, gradients, strict=True):
            assert (gradient is None) == tensor.frozen


def test_compiled_layers_are_frozen_alike() -> None:
    config = tiny_config(layers=3)
    patterns = ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.mlp.*"]
    workload = tiny_workload("fp32", compiled=True)
    weights, batches = random_weights(config, torch.float32), tiny_batches(2)
    model = freeze(model_spec(config), patterns)
    found = []
    for level, home, depth_first in (("keep", "device", 0), ("input", "host", 0), ("keep", "device", 2)):
        policy = uniform_policy(
            model, workload, micro_batch_rows=2, groups=(3,) if home == "device" else (1, 2), weights=home,
            optimizer=home, save_level=level, depth_first_layers=depth_first,
        )  # fmt: skip
        trainer = make_trainer(config, workload, policy, weights, frozen=patterns)
        results = run_steps(trainer, batches)
        found.append(([r.loss for r in results], state_bits(trainer)))
        trainer.close()
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], state, strict=True))
    eager_workload = tiny_workload("fp32")
    policy = uniform_policy(model, eager_workload, micro_batch_rows=2, groups=(1,) * (ROWS // 2))
    trainer = make_trainer(config, eager_workload, policy, weights, frozen=patterns)
    assert [r.loss for r in run_steps(trainer, batches)] == pytest.approx(found[0][0], rel=1e-5)
    trainer.close()
