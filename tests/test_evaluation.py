"""Evaluation: the loss of plain torch, whatever the policy and the cut; programs that are sound and priced."""

from random import Random

import numpy as np
import pytest
import torch
from freezing_cases import fitted, randomly_frozen
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import random_case, random_policy
from small_models import random_case as random_program
from small_models import small_model, small_workload
from transformers import AutoConfig, AutoModelForCausalLM

from executor.data.dataset import open_dataset
from executor.evaluation import all_batches, evaluations_without_improvement
from simulator.build import build, build_evaluation
from simulator.check import check
from simulator.errors import InputError
from simulator.freezing import freeze
from simulator.model import model_spec
from simulator.policy import uniform_policy
from simulator.predict import predict, predict_evaluation
from simulator.program import Kind, Program
from tests.test_streamed_step import tiny_workload, very_different_policies
from tests.tiny import ROWS, SEQUENCE, make_trainer, random_weights, run_steps, state_bits, tiny_batches, tiny_config


def plain_loss(config: dict, weights: dict[str, torch.Tensor], batches: list) -> float:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float64)
    model.load_state_dict(weights, strict=not config["tie_word_embeddings"])
    model.tie_weights()
    total, targets = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = model(batch.tokens, use_cache=False).logits
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
            ).item()
            targets += int((batch.labels != -100).sum())
    return total / targets


@pytest.mark.parametrize("tied", [False, True])
def test_an_evaluation_is_plain_torch_s_loss_over_all_tokens(tied: bool) -> None:
    config, workload = tiny_config(tied=tied), tiny_workload("fp64")
    weights, batches = random_weights(config, torch.float64), [*tiny_batches(3), *tiny_batches(1, rows=2)]
    policy = uniform_policy(
        model_spec(config), workload, micro_batch_rows=2, groups=(2, 1), weights="host", optimizer="host",
        save_level="input", head_chunk_tokens=10,
    )  # fmt: skip
    trainer = make_trainer(config, workload, policy, weights)
    found = trainer.evaluate(batches)
    trainer.close()
    assert found.num_targets == sum(batch.num_targets for batch in batches)
    assert found.loss == pytest.approx(plain_loss(config, weights, batches), rel=1e-12)


@pytest.mark.parametrize(("precision", "tied"), [("bf16", False), ("fp32", True)])
def test_policies_evaluate_to_the_same_bits_and_change_none(precision: str, tied: bool) -> None:
    config, workload = tiny_config(tied=tied), tiny_workload(precision)
    weights, batches = random_weights(config, torch.float32), tiny_batches(2)
    losses = set()
    for policy in very_different_policies(config, workload).values():
        trainer = make_trainer(config, workload, policy, weights)
        run_steps(trainer, batches[:1])
        before = state_bits(trainer)
        losses.add(trainer.evaluate(batches).loss)
        assert all(torch.equal(a, b) for a, b in zip(before, state_bits(trainer), strict=True))
        assert not trainer.memory.passing
        trainer.close()
    assert len(losses) == 1


def test_training_goes_on_after_an_evaluation_as_if_there_was_none() -> None:
    config, workload = tiny_config(), tiny_workload("fp32")
    weights, batches = random_weights(config, torch.float32), tiny_batches(4)
    ends = []
    for evaluates in (False, True):
        policy = very_different_policies(config, workload)["all streamed, layer-major"]
        trainer = make_trainer(config, workload, policy, weights)
        run_steps(trainer, batches[:2])
        if evaluates:
            trainer.evaluate(batches)
        run_steps(trainer, batches[2:])
        ends.append(state_bits(trainer))
        trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3, 6])
def test_the_loss_does_not_depend_on_the_size_of_micro_batches(micro_batch_rows: int) -> None:
    config, workload = tiny_config(), tiny_workload("fp32")
    weights, batches = random_weights(config, torch.float32), tiny_batches(2)
    policy = uniform_policy(
        model_spec(config), workload, micro_batch_rows=micro_batch_rows, groups=(ROWS // micro_batch_rows,)
    )
    trainer = make_trainer(config, workload, policy, weights)
    loss = trainer.evaluate(batches).loss
    trainer.close()
    exact = plain_loss(config, {name: weight.double() for name, weight in weights.items()}, batches)
    assert loss == pytest.approx(exact, rel=2e-6)


@pytest.mark.parametrize("part", range(3))
def test_evaluation_programs_are_sound(part: int) -> None:
    for seed in range(50):
        model, workload, policy = random_program(5000 + 1000 * part + seed)
        if seed % 2:
            model = randomly_frozen(Random(seed), model)
            policy = fitted(policy, model)
        if seed % 3 == 0:
            workload = workload.model_copy(update={"packed": True})
        evaluation = build_evaluation(model, workload, policy)
        check(build(model, workload, policy), evaluation)
        kinds = {operation.kind for operation in evaluation}
        assert kinds <= {Kind.LOAD_BATCH, Kind.LOAD_WEIGHTS, Kind.FORWARD, Kind.EVALUATE, Kind.REPORT}
        loads = [operation.block for operation in evaluation if operation.kind is Kind.LOAD_WEIGHTS]
        streamed = [block for block in model.layers if policy.weight_homes[block] == "host"]
        assert sorted(set(loads)) == streamed
        alone = policy.depth_first_layers == model.num_layers
        assert len(loads) <= (policy.num_micro_batches if alone else len(policy.groups)) * len(streamed)


def test_an_evaluation_is_predicted_to_take_less_than_a_step_in_time_and_memory() -> None:
    for seed in range(40):
        random = Random(seed)
        case = random_case(random)
        policy = random_policy(random, case, depth_first=True)
        step = predict(case.model, case.workload, policy, case.hardware, case.costs)
        found = predict_evaluation(case.model, case.workload, policy, case.hardware, case.costs)
        assert 0 < found.step_seconds <= step.timeline.step_seconds
        assert found.peak_bytes["device"] <= step.timeline.peak_bytes["device"]


@pytest.mark.parametrize("depth_first", range(4))
@pytest.mark.parametrize("frozen", [(), ("model.t0", "model.layers.0.*", "model.layers.1.*")])
def test_an_evaluation_passes_no_more_bytes_than_a_step_however_large_the_group(
    depth_first: int, frozen: tuple[str, ...]
) -> None:
    model, workload = freeze(small_model(3), frozen), small_workload(20)
    policy = uniform_policy(
        model, workload, micro_batch_rows=1, groups=(20,), save_level="input", depth_first_layers=depth_first
    )
    step, evaluation = build(model, workload, policy).steady, build_evaluation(model, workload, policy)
    assert peak_of_passing_bytes(evaluation) <= peak_of_passing_bytes(step)


def peak_of_passing_bytes(program: Program) -> int:
    """Of all that lives from an operation that writes it to one that releases it, in the order of the program."""
    alive: set[str] = set()
    peak = 0
    for operation in program:
        alive |= {access.buffer for access in operation.writes if not program.buffers[access.buffer].persistent}
        peak = max(peak, sum(program.buffers[name].num_bytes for name in alive))
        alive -= {*operation.releases}
    assert not alive
    return peak


def test_every_row_is_evaluated_once_and_endless_data_are_refused(tmp_path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n}: {n * 37 % 101}\n" for n in range(100)))
    settings = {"vocab_size": 300, "sequence_length": SEQUENCE, "rows_per_step": 4, "seed": 0}
    dataset = open_dataset(path, shuffle=False, **settings)
    num_targets = sum(batch.num_targets for batch in all_batches(dataset))
    assert num_targets == dataset.report.num_targets
    with pytest.raises(InputError, match="eval_data: synthetic data has no end"):
        all_batches(open_dataset("synthetic", **settings))


@pytest.mark.parametrize(
    ("losses", "since"),
    [([], 0), ([3.0], 0), ([3.0, 2.0], 0), ([2.0, 3.0, 2.0], 2), ([float("nan"), 1.0], 0), ([1.0, float("nan")], 1)],
)
def test_evaluations_without_improvement_by_hand(losses: list[float], since: int) -> None:
    assert evaluations_without_improvement(losses) == since


@given(st.lists(st.floats(0, 10), min_size=1))
def test_evaluations_since_the_first_of_the_lowest_losses(losses: list[float]) -> None:
    assert evaluations_without_improvement(losses) == len(losses) - 1 - int(np.argmin(losses))
