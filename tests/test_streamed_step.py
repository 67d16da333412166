"""A streamed step equals a plain torch step; a policy changes where and when, never what."""

import pytest
import torch

from executor.data.dataset import Batch
from executor.planes import split_planes
from executor.trainer import Trainer
from simulator.model import model_spec
from simulator.policy import OptimizerHome, Policy, Workload, uniform_policy
from simulator.program import Kind
from tests.plain_trainer import plain_train
from tests.tiny import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    ROWS,
    SEQUENCE,
    WEIGHT_DECAY,
    Bits,
    assert_same_bits,
    make_trainer,
    master_weights,
    random_weights,
    run_steps,
    state_bits,
    tiny_batches,
    tiny_config,
)

MAX_GRAD_NORM = 0.5


def tiny_workload(precision: str, **changes: object) -> Workload:
    settings = {"sequence_length": SEQUENCE, "tokens_per_step": ROWS * SEQUENCE, "precision": precision, **changes}
    return Workload.model_validate(settings)


def streamed_policy(
    config: dict, workload: Workload, optimizer: OptimizerHome = "host", depth_first_layers: int = 0
) -> Policy:
    """Everything rides: weights streamed, host optimizer or streamed state, recompute, two groups."""
    return uniform_policy(
        model_spec(config), workload, micro_batch_rows=2, groups=(2, 1), weights="host", optimizer=optimizer,
        save_level="input", head_chunk_tokens=10, depth_first_layers=depth_first_layers,
    )  # fmt: skip


def compare_with_plain(
    config: dict, precision: str, steps: int = 5, optimizer: OptimizerHome = "host", depth_first_layers: int = 0
):
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    workload, weights, batches = tiny_workload(precision), random_weights(config, dtype), tiny_batches(steps)
    plain = plain_train(
        config, weights, [(b.tokens, b.labels) for b in batches], micro_batch_rows=2, learning_rate=LEARNING_RATE,
        betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, dtype=dtype,
    )  # fmt: skip
    policy = streamed_policy(config, workload, optimizer, depth_first_layers)
    trainer = make_trainer(config, workload, policy, weights, max_grad_norm=MAX_GRAD_NORM)
    results = run_steps(trainer, batches)
    streamed = master_weights(trainer)
    trainer.close()
    return plain, results, streamed


@pytest.mark.parametrize(
    ("family", "tied", "optimizer", "depth_first_layers"),
    [
        ("qwen2", False, "host", 0),
        ("qwen2", True, "streamed", 1),
        ("llama", False, "streamed", 4),
        ("llama", True, "host", 2),
    ],
)
def test_streamed_steps_equal_plain_torch_in_fp64(
    family: str, tied: bool, optimizer: OptimizerHome, depth_first_layers: int
) -> None:
    plain, results, streamed = compare_with_plain(
        tiny_config(family, tied=tied), "fp64", optimizer=optimizer, depth_first_layers=depth_first_layers
    )
    assert all(norm > MAX_GRAD_NORM for norm in plain.norms), "clipping must be active"
    for step, result in enumerate(results):
        assert result.loss == pytest.approx(plain.losses[step], abs=1e-10)
        assert result.gradient_norm == pytest.approx(plain.norms[step], rel=1e-10)
        assert 0 < result.clip_factor < 1
    assert set(streamed) == set(plain.weights)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(streamed[name], weight, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_streamed_steps_equal_plain_torch_in_fp32(tied: bool) -> None:
    plain, results, streamed = compare_with_plain(tiny_config(tied=tied), "fp32")
    for step, result in enumerate(results):
        assert result.loss == pytest.approx(plain.losses[step], abs=1e-6 * max(1.0, plain.losses[step]))
    differences = torch.cat([(streamed[name] - weight).flatten() for name, weight in plain.weights.items()])
    everything = torch.cat([weight.flatten() for weight in plain.weights.values()])
    assert differences.norm() <= 1e-6 * everything.norm()
    assert differences.abs().max() <= 1e-4


def test_streamed_bf16_steps_follow_plain_torch_with_the_same_cast() -> None:
    config, workload = tiny_config(), tiny_workload("bf16")
    weights, batches = random_weights(config, torch.float32), tiny_batches(5)

    def cast(master: torch.Tensor) -> torch.Tensor:
        high = torch.empty_like(master, dtype=torch.bfloat16)
        split_planes(master.detach(), high, torch.empty(master.shape, dtype=torch.int16))
        return high

    plain = plain_train(
        config, weights, [(b.tokens, b.labels) for b in batches], micro_batch_rows=2, learning_rate=LEARNING_RATE,
        betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, dtype=torch.bfloat16,
        cast=cast,
    )  # fmt: skip
    trainer = make_trainer(config, workload, streamed_policy(config, workload), weights, max_grad_norm=MAX_GRAD_NORM)
    results = run_steps(trainer, batches)
    trainer.close()
    # bf16 keeps 8 bits: a loss near 5 is known to about 0.02; five steps at this rate move it by more than that.
    for step, result in enumerate(results):
        assert result.loss == pytest.approx(plain.losses[step], rel=5e-3)


def very_different_policies(config: dict, workload: Workload) -> dict[str, Policy]:
    """Policies that share micro-batch and chunk sizes, and nothing else."""
    model = model_spec(config)

    def uniform(**choices: object) -> Policy:
        settings = {"micro_batch_rows": 1, "groups": (1,) * ROWS, "head_chunk_tokens": 10, **choices}
        return uniform_policy(model, workload, **settings)  # type: ignore[arg-type]

    layers = model.num_layers
    on_device = uniform()
    low_on_device = ["device"] * 3 + ["host"] * (layers - 2) + ["host"]
    if model.tied_embeddings:
        low_on_device[-1] = low_on_device[0]
    return {
        "all in HBM, batch-major": on_device,
        "all in HBM, one group": uniform(groups=(ROWS,)),
        "all streamed, layer-major": uniform(groups=(ROWS,), weights="host", optimizer="host", save_level="input"),
        "all streamed, batch-major, deep prefetch": uniform(weights="host", optimizer="host", prefetch_depth=3),
        "a large first group, streamed layers depth-first": uniform(
            groups=(3, 1, 1, 1), weights="host", optimizer="host", save_level="input", depth_first_layers=2
        ),
        "one group, half of it depth-first": uniform(groups=(ROWS,), optimizer="host", depth_first_layers=2),
        "checkpoints every 3 layers": uniform(
            groups=(2, 4), weights="host", optimizer="host", save_level="input", checkpoint_interval=3, gradient_slabs=3
        ),
        "resident weights, host optimizer": uniform(groups=(2, 2, 2), optimizer="host"),
        "mixed homes and levels": on_device.model_copy(
            update={
                "groups": (4, 2),
                "weight_homes": ("device", "device", "device", *["host"] * (layers - 2), "device"),
                "optimizer_homes": tuple(low_on_device),
                "gradient_homes": tuple(low_on_device),
                "save_levels": tuple("keep" if layer % 2 else "input" for layer in range(layers)),
            }
        ),
        "streamed state, resident weights, layer-major": uniform(groups=(ROWS,), optimizer="streamed"),
        "streamed state and weights, batch-major": uniform(
            weights="host", optimizer="streamed", save_level="input", prefetch_depth=2
        ),
        "streamed state, more slots than layers, all depth-first": uniform(
            groups=(2, 4), optimizer="streamed", state_slots=9, depth_first_layers=layers
        ),
        "all three optimizers": on_device.model_copy(
            update={
                "groups": (3, 3),
                "depth_first_layers": 1,
                "weight_homes": ("device", "device", *["host"] * (layers - 1), "device"),
                "optimizer_homes": ("device", *["streamed"] * (layers - 1), "host", "device"),
                "gradient_homes": ("device", *["device"] * (layers - 1), "host", "device"),
                "state_slots": 3,
            }
        ),
        "some inputs wait on the host beside all else": on_device.model_copy(
            update={
                "groups": (1, 3, 2),
                "weight_homes": ("device", "device", "device", *["host"] * (layers - 2), "device"),
                "optimizer_homes": tuple(low_on_device),
                "gradient_homes": tuple(low_on_device),
                "save_levels": ("input", "keep", *["input"] * (layers - 2)),
                "activation_homes": ("host", "device", *["host"] * (layers - 3), "device"),
            }
        ),
        "all that layers save waits on the host": uniform(activations="host", saved_bytes=2**20),
        "so much of it as there is room for, upper layers depth-first": uniform(
            groups=(4, 2), weights="host", optimizer="host", activations="host", saved_bytes=4096, depth_first_layers=2
        ),
        "of every other layer, between inputs that wait": uniform(groups=(2, 2, 2)).model_copy(
            update={
                "save_levels": tuple("keep" if layer % 2 else "input" for layer in range(layers)),
                "activation_homes": ("host",) * layers,
                "saved_bytes": (2**20,) * layers,
            }
        ),
    }


@pytest.mark.parametrize(
    ("precision", "gradient_format", "clipping", "tied", "steps"),
    [
        ("fp32", "fp32", "global", False, 3),
        pytest.param("fp32", "bf16", "global", True, 2, marks=pytest.mark.slow),
        ("bf16", "fp32", "global", True, 3),
        ("bf16", "bf16", "global", False, 2),
        ("bf16", "bf16", "layerwise", False, 2),
        ("fp32", "fp32", "none", True, 2),
    ],
)
def test_policies_give_the_same_bits(
    precision: str, gradient_format: str, clipping: str, tied: bool, steps: int
) -> None:
    config = tiny_config(tied=tied)
    workload = tiny_workload(precision, gradient_format=gradient_format, clipping=clipping)
    weights, batches = random_weights(config, torch.float32), tiny_batches(steps)
    compare_bits(config, workload, very_different_policies(config, workload), weights, batches)


@pytest.mark.parametrize(
    ("precision", "gradient_format", "clipping", "tied"),
    [("fp32", "bf16", "global", True), ("bf16", "bf16", "layerwise", False)],
)
def test_inputs_that_wait_on_the_host_give_the_same_bits(
    precision: str, gradient_format: str, clipping: str, tied: bool
) -> None:
    config = tiny_config(tied=tied)
    workload = tiny_workload(precision, gradient_format=gradient_format, clipping=clipping)

    def uniform(**choices: object) -> Policy:
        settings = {"micro_batch_rows": 1, "head_chunk_tokens": 10, "save_level": "input", **choices}
        return uniform_policy(model_spec(config), workload, **settings)  # type: ignore[arg-type]

    everything = {"weights": "host", "optimizer": "host", "activations": "host"}
    policies = {
        "all in HBM": uniform(groups=(1,) * ROWS),
        "one group": uniform(groups=(ROWS,), activations="host"),
        "inputs leave behind later passes": uniform(groups=(ROWS,), activations="host", leaving_passes=3),
        "batch-major, all streamed": uniform(groups=(1,) * ROWS, **everything),
        "depth-first layers too": uniform(groups=(ROWS,), depth_first_layers=2, **everything),
        "checkpoints every 2 layers": uniform(groups=(4, 2), checkpoint_interval=2, **everything),
    }
    compare_bits(config, workload, policies, random_weights(config, torch.float32), tiny_batches(2))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])  # a minute of compiling
def test_one_micro_batch_gives_the_same_bits_under_all_policies_and_as_a_sum(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers write their bf16 gradients where these stay or leave from: device, slabs, streamed states."""
    config, workload = tiny_config(), tiny_workload("bf16", gradient_format="bf16", compiled=compiled)

    def uniform(**choices: object) -> Policy:
        settings = {"micro_batch_rows": ROWS, "groups": (1,), "head_chunk_tokens": 10, "save_level": "input", **choices}
        return uniform_policy(model_spec(config), workload, **settings)  # type: ignore[arg-type]

    policies = {
        "all in HBM": uniform(),
        "all kept": uniform(save_level="keep", depth_first_layers=3),
        "all streamed": uniform(weights="host", optimizer="host"),
        "more slabs": uniform(optimizer="host", gradient_slabs=3),
        "streamed states, waiting inputs": uniform(weights="host", optimizer="streamed", activations="host"),
    }
    weights, batches = random_weights(config, torch.float32), tiny_batches(3)
    trainer = make_trainer(config, workload, policies["all streamed"], weights)
    assert all(gradient == total for gradient, total in sums_of(trainer))
    trainer.close()
    expected = compare_bits(config, workload, policies, weights, batches)

    for place in ("placement", "costs", "roofline"):
        monkeypatch.setattr(f"simulator.{place}.gradients_written_once", lambda workload, policy: False)
    trainer = make_trainer(config, workload, policies["all streamed"], weights)
    assert not any(gradient == total for gradient, total in sums_of(trainer))
    trainer.close()
    assert_same_bits(compare_bits(config, workload, policies, weights, batches), expected, "as a sum")


def sums_of(trainer: Trainer) -> list[tuple[str, str]]:
    """Of each layer the buffers of its completed gradient and of its sum."""
    return [
        (operation.target("gradient."), operation.source("gradient_sum"))
        for operation in trainer.program.steady
        if operation.kind is Kind.FINISH_GRADIENT and operation.block in trainer.model.layers
    ]


def compare_bits(
    config: dict,
    workload: Workload,
    policies: dict[str, Policy],
    weights: dict[str, torch.Tensor],
    batches: list[Batch],
) -> Bits:
    """Losses, norms and every bit of the state after some steps are the first policy's under all of them."""
    expected = None
    for title, policy in policies.items():
        trainer = make_trainer(config, workload, policy, weights)
        results = run_steps(trainer, batches)
        found = ([(r.loss, r.gradient_norm) for r in results], state_bits(trainer))
        trainer.close()
        if expected is None:
            expected = found
        assert_same_bits(found, expected, title)
    assert expected is not None
    return expected


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3, 6])
def test_the_gradient_does_not_depend_on_how_ragged_rows_are_cut(micro_batch_rows: int) -> None:
    config, workload = tiny_config(), tiny_workload("fp64")
    weights, batches = random_weights(config, torch.float64), tiny_batches(1)
    policy = uniform_policy(
        model_spec(config), workload, micro_batch_rows=micro_batch_rows, groups=(1,) * (ROWS // micro_batch_rows)
    )
    trainer = make_trainer(config, workload, policy, weights)
    (result,) = run_steps(trainer, batches)
    trainer.close()
    plain = plain_train(
        config, weights, [(b.tokens, b.labels) for b in batches], micro_batch_rows=ROWS, learning_rate=LEARNING_RATE,
        betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, dtype=torch.float64,
    )  # fmt: skip
    assert result.gradient_norm == pytest.approx(plain.norms[0], rel=1e-12)
    assert result.loss == pytest.approx(plain.losses[0], rel=1e-12)


def test_a_short_last_batch_is_weighted_by_its_tokens() -> None:
    config, workload = tiny_config(), tiny_workload("fp64")
    weights = random_weights(config, torch.float64)
    (short,) = tiny_batches(1, rows=4)
    trainer = make_trainer(config, workload, streamed_policy(config, workload), weights)
    (result,) = run_steps(trainer, [short])
    trainer.close()
    plain = plain_train(
        config, weights, [(short.tokens, short.labels)], micro_batch_rows=4, learning_rate=LEARNING_RATE, betas=BETAS,
        epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, dtype=torch.float64,
    )  # fmt: skip
    assert result.loss == pytest.approx(plain.losses[0], rel=1e-12)
    assert result.gradient_norm == pytest.approx(plain.norms[0], rel=1e-12)


@pytest.mark.parametrize("optimizer", ["host", "streamed"])
def test_a_non_finite_gradient_is_skipped_and_later_steps_equal_a_run_without_it(optimizer: OptimizerHome) -> None:
    config, workload = tiny_config(), tiny_workload("fp32")
    weights, batches = random_weights(config, torch.float32), tiny_batches(3)
    policy = streamed_policy(config, workload, optimizer)

    clean = make_trainer(config, workload, policy, weights)
    run_steps(clean, [batches[0], batches[2]])

    poisoned = make_trainer(config, workload, policy, weights)
    poisoned.step(batches[0])
    poisoned.drain()
    before = state_bits(poisoned)
    norm_weight = poisoned.memory.plane(f"device.weights.{poisoned.model.head}", poisoned.model.head)
    kept = norm_weight.clone()
    norm_weight.fill_(float("nan"))  # only the device's copy: the master stays whole
    (bad,) = run_steps(poisoned, [batches[1]])
    norm_weight.copy_(kept)
    assert not bad.applied
    assert poisoned.steps_applied() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state_bits(poisoned), strict=True))
    run_steps(poisoned, [batches[2]])
    assert all(torch.equal(a, b) for a, b in zip(state_bits(clean), state_bits(poisoned), strict=True))
    clean.close()
    poisoned.close()


def test_allocated_bytes_are_the_planned_bytes() -> None:
    config = tiny_config()
    workload = tiny_workload("bf16", gradient_format="bf16")
    for title, policy in very_different_policies(config, workload).items():
        trainer = make_trainer(config, workload, policy, random_weights(config, torch.float32))
        planned = {"device": 0, "host": 0}
        for buffer in trainer.program.buffers.values():
            if buffer.persistent and buffer.role not in ("scalars", "batch"):
                planned[buffer.tier] += buffer.num_bytes
        allocated = trainer.memory.persistent_bytes()
        assert allocated["device"] == planned["device"], title
        # What is pinned of a block and what is not end on whole pages each.
        assert planned["host"] <= allocated["host"] <= planned["host"] + 2 * 4096 * trainer.model.num_blocks, title
        trainer.close()
