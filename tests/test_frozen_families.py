"""Frozen parameters and evaluation in every family, with packed rows, against transformers over documents alone."""

from fnmatch import fnmatchcase

import pytest
import torch
from test_packed import LENGTH, ROWS, packed_rows
from tiny_models import TINY_FAMILIES, blocks_of, tiny_config, whole_model

from executor.data.dataset import Batch
from simulator.freezing import freeze, parameter_names
from simulator.model import model_spec
from simulator.policy import Workload, uniform_policy
from tests.tiny import make_trainer, master_weights, random_weights, run_steps, state_bits


@pytest.mark.parametrize("part", ["bottom", "positions or norms"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_packed_rows_of_a_frozen_model_are_transformers_documents(family: str, part: str) -> None:
    config = tiny_config(family)
    model, packed = model_spec(config), packed_rows()
    names = parameter_names(model)
    if part == "bottom":
        patterns = [model.block_prefix(0) + tensor.name for tensor in model.block(0).tensors]
        patterns.append(model.block_prefix(1) + "*")
    else:  # a part of a block: GPT-2's learned positions, others' norms
        patterns = [names[1]] if model.positions is not None else ["*norm*"]
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}

    weights = random_weights(config, torch.float32)
    whole = whole_model(config, model, blocks_of(model, weights))
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name not in frozen)
    losses = []
    for document in packed.documents:
        logits = whole(input_ids=document[None, :-1]).logits[0] if len(document) > 1 else torch.zeros(0, 61)
        losses.append(torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum"))
    expected = torch.stack(losses).sum() / packed.num_targets
    expected.backward()
    norm = torch.stack([p.grad.norm() for name, p in whole.named_parameters() if name not in frozen]).norm()

    work = Workload(sequence_length=LENGTH, tokens_per_step=len(ROWS) * LENGTH, precision="fp32", packed=True)
    batch = Batch(packed.tokens, packed.labels, packed.num_targets, LENGTH, positions=packed.positions)
    bits = None
    for groups, level, home in (((1, 1), "keep", "device"), ((2,), "input", "host")):
        policy = uniform_policy(
            freeze(model, patterns), work, micro_batch_rows=2, groups=groups, save_level=level, weights=home,
            optimizer=home, head_chunk_tokens=10,
        )  # fmt: skip
        trainer = make_trainer(config, work, policy, weights, max_grad_norm=1e9, frozen=patterns)
        assert trainer.evaluate([batch]).loss == pytest.approx(expected.item(), rel=1e-5)
        (result,) = run_steps(trainer, [batch])
        found, trained = state_bits(trainer), master_weights(trainer)
        assert not trainer.memory.passing
        trainer.close()
        assert result.loss == pytest.approx(expected.item(), rel=1e-5)
        assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
        for name in names:
            assert torch.equal(trained[name], weights[name]) == (name in frozen), name
        assert bits is None or all(torch.equal(a, b) for a, b in zip(found, bits, strict=True))
        bits = found
