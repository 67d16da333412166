"""Packed rows train what their documents would train in rows of their own."""

import json

import pytest
import torch

from executor.data.corpus import DataChoices
from executor.data.dataset import open_dataset
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
