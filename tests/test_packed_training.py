"""Packed rows train what their documents would train in rows of their own."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from executor.data.corpus import DataChoices
from executor.data.dataset import open_dataset
from executor.store import tensor_view
from simulator.model import model_spec
from simulator.policy import Workload, uniform_policy
from tests.plain_trainer import plain_train
from tests.tiny import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    SEQUENCE,
    WEIGHT_DECAY,
    make_trainer,
    master_weights,
    random_weights,
    run_steps,
    tiny_config,
)

STEPS = 3


def test_a_packed_step_is_a_plain_step_on_the_same_documents(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q" * (n % 4), "completion": f"answer {n}"[: n % 9 + 2]} for n in range(17)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = tiny_config() | {"vocab_size": 300}
    model = model_spec(config)
    weights = random_weights(config, torch.float64)

    def all_in_one_step(packing):
        # Every step is the whole data, so that both train on the same documents in every step.
        sizes = {"vocab_size": 300, "sequence_length": SEQUENCE, "seed": 3, "choices": DataChoices(packing=packing)}
        num_rows = open_dataset(path, rows_per_step=1, **sizes).rows.num_rows
        rows_per_step = num_rows + num_rows % 2
        dataset = open_dataset(path, rows_per_step=rows_per_step, **sizes)
        return rows_per_step, [dataset.batch(step) for step in range(STEPS)]

    plain_rows, plain = all_in_one_step(False)
    packed_rows, packed = all_in_one_step(True)
    assert packed_rows < plain_rows
    assert packed[0].num_targets == plain[0].num_targets
    expected = plain_train(
        config, weights, [(batch.tokens, batch.labels) for batch in plain], micro_batch_rows=plain_rows,
        learning_rate=LEARNING_RATE, betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=0.5,
        dtype=torch.float64,
    )  # fmt: skip
    workload = Workload(sequence_length=SEQUENCE, tokens_per_step=packed_rows * SEQUENCE, precision="fp64", packed=True)
    policy = uniform_policy(model, workload, micro_batch_rows=packed_rows // 2, groups=(2,))
    trainer = make_trainer(config, workload, policy, weights)
    try:
        results = run_steps(trainer, packed)
        assert [result.loss for result in results] == pytest.approx(expected.losses, rel=1e-9)
        found = master_weights(trainer)
    finally:
        trainer.close()
    for name, value in expected.weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-10)


def test_packed_masked_rows_have_the_loss_and_gradients_of_the_rows_one_by_one(tmp_path):
    """fp32. What is a target is written down by hand here: answers and the end of sequence, each after its token."""
    rows = [("q" * (n % 5), f"answer {n}"[: n % 9 + 2]) for n in range(13)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in rows))
    config = tiny_config() | {"vocab_size": 300}
    model, weights = model_spec(config), random_weights(config, torch.float32)
    dataset = open_dataset(
        path, vocab_size=300, sequence_length=SEQUENCE, rows_per_step=12, seed=3, choices=DataChoices(packing=True)
    )
    assert dataset.steps_per_epoch == 1
    assert dataset.rows.num_rows < len(rows)
    eos = dataset.tokenizer.eos_id

    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    whole.load_state_dict(weights)
    total, num_targets = torch.zeros(()), 0
    for prompt, answer in rows:
        tokens = torch.tensor([*prompt.encode(), *answer.encode(), eos])
        logits = whole(tokens[None], use_cache=False).logits[0]
        for place in range(max(1, len(prompt)), len(tokens)):  # the first token of all is nobody's next one
            total = total - logits[place - 1].log_softmax(0)[tokens[place]]
            num_targets += 1
    (total / num_targets).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in whole.parameters()]).norm()

    workload = Workload(sequence_length=SEQUENCE, tokens_per_step=12 * SEQUENCE, precision="fp32", packed=True)
    policy = uniform_policy(
        model, workload, micro_batch_rows=4, groups=(2, 1), head_chunk_tokens=10, depth_first_layers=1
    )
    trainer = make_trainer(config, workload, policy, weights, max_grad_norm=1e9)
    try:
        (result,) = run_steps(trainer, [dataset.batch(0)])
        assert dataset.batch(0).num_targets == num_targets
        assert result.loss == pytest.approx(total.item() / num_targets, rel=1e-6)
        for block in range(model.num_blocks):
            moments = trainer.memory.state(block).first_moment
            for tensor in model.block(block).tensors:
                found = tensor_view(moments, tensor) / (1 - BETAS[0])  # of a first step: the gradient
                expected = whole.get_parameter(model.block_prefix(block) + tensor.name).grad
                error = (found - expected).norm()
                assert error <= 1e-6 * norm, tensor.name
                assert error <= 5e-6 * expected.norm(), tensor.name
    finally:
        trainer.close()
