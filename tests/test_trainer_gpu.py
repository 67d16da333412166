"""On CUDA: streams give what inline execution gives, policies give the same bits, steps follow plain torch."""

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.data.dataset import Batch
from executor.runner import InlineRunner
from executor.trainer import Trainer
from simulator.freezing import freeze
from simulator.model import model_spec
from simulator.policy import Policy, SaveLevel, Workload, uniform_policy
from simulator.program import Kind, Operation, Resource, Role, StepProgram
from tests.freezing_cases import fitted
from tests.tiny import (
    assert_same_bits,
    make_trainer,
    master_weights,
    random_weights,
    run_steps,
    state_bits,
    tiny_config,
)

pytestmark = pytest.mark.gpu

ROWS, SEQUENCE = 6, 256
SAVED_BYTES = 32 * 2**20  # more than a layer keeps of a micro-batch


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.fail("pytest -m gpu needs a CUDA device")


def gpu_config(*, tied: bool = False) -> dict[str, Any]:
    return {
        **tiny_config(tied=tied),
        "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 1024, "initializer_range": 0.02,
    }  # fmt: skip


def gpu_workload(**changes: object) -> Workload:
    settings = {"sequence_length": SEQUENCE, "tokens_per_step": ROWS * SEQUENCE, "precision": "bf16", **changes}
    return Workload.model_validate(settings)


def gpu_batches(num_steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(num_steps):
        stream = torch.randint(0, 4096, (ROWS, SEQUENCE + 1), generator=generator)
        labels = stream[:, 1:].clone()
        labels[1, SEQUENCE // 2 :] = -100
        batches.append(Batch(stream[:, :-1].contiguous(), labels, int((labels != -100).sum()), labels.numel()))
    return batches


def policies(config: dict[str, Any], workload: Workload, level: SaveLevel) -> dict[str, Policy]:
    """Homes, groupings, depths and slabs differ; the save level does not."""
    model = model_spec(config)

    def uniform(**choices: object) -> Policy:
        settings = {
            "micro_batch_rows": 1, "groups": (1,) * ROWS, "head_chunk_tokens": 128, "save_level": level, **choices,
        }  # fmt: skip
        return uniform_policy(model, workload, **settings)  # type: ignore[arg-type]

    return {
        "all in HBM": uniform(),
        "one group": uniform(groups=(ROWS,)),
        "streamed": uniform(groups=(ROWS,), weights="host", optimizer="host"),
        "streamed, batch-major, deep": uniform(weights="host", optimizer="host", prefetch_depth=2, gradient_slabs=3),
        "resident weights, host optimizer": uniform(groups=(3, 1, 1, 1), optimizer="host"),
        "mixed": uniform(groups=(4, 2)).model_copy(
            update={
                "weight_homes": ("device", "device", "device", "host", "host", "device"),
                "optimizer_homes": ("device", "device", "host", "host", "host", "device"),
                "gradient_homes": ("device", "device", "host", "host", "host", "device"),
            }
        ),
        "depth-first": uniform(groups=(ROWS,), depth_first_layers=2),
        "depth-first, streamed": uniform(groups=(4, 2), weights="host", optimizer="host", depth_first_layers=3),
        "all layers depth-first": uniform(groups=(ROWS,), optimizer="streamed", depth_first_layers=model.num_layers),
        "saved tensors wait on the host": uniform(
            activations="host", saved_bytes=SAVED_BYTES, weights="host", optimizer="host"
        ),
        "saved tensors wait, as far as there is room, depth-first": uniform(
            groups=(4, 2), activations="host", saved_bytes=SAVED_BYTES // 16, depth_first_layers=2
        ),
        "streamed state": uniform(groups=(ROWS,), optimizer="streamed"),
        "streamed state and weights": uniform(weights="host", optimizer="streamed", state_slots=3),
        "every optimizer": uniform(groups=(4, 2), depth_first_layers=2).model_copy(
            update={
                "weight_homes": ("device", "device", "host", "device", "host", "device"),
                "optimizer_homes": ("device", "streamed", "streamed", "streamed", "host", "device"),
                "gradient_homes": ("device", "device", "device", "device", "host", "device"),
            }
        ),
    }


def run_bits(trainer: Trainer, batches: list[Batch]) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    results = run_steps(trainer, batches)
    bits = ([(result.loss, result.gradient_norm) for result in results], state_bits(trainer))
    trainer.close()
    return bits


@pytest.mark.parametrize(
    ("gradient_format", "clipping", "compiled", "level"),
    [
        ("bf16", "global", False, "keep"),
        ("fp32", "global", False, "input"),
        ("bf16", "layerwise", False, "input"),
        ("bf16", "global", True, "keep"),
        ("bf16", "global", True, "budget_50"),
    ],
)
def test_policies_give_the_same_bits(gradient_format: str, clipping: str, compiled: bool, level: SaveLevel) -> None:
    config = gpu_config(tied=clipping == "layerwise")
    workload = gpu_workload(gradient_format=gradient_format, clipping=clipping, compiled=compiled)
    weights, batches = random_weights(config, torch.float32), gpu_batches(3)
    expected = None
    for title, policy in policies(config, workload, level).items():
        if config["tie_word_embeddings"] and title == "mixed":
            continue
        found = run_bits(make_trainer(config, workload, policy, weights, device="cuda"), batches)
        expected = expected or found
        assert_same_bits(found, expected, title)


@pytest.mark.parametrize(("compiled", "level"), [(False, "input"), (True, "keep"), (True, "budget_50")])
def test_one_micro_batch_gives_the_same_bits_under_all_policies(compiled: bool, level: SaveLevel) -> None:
    """Its layers write their gradients where these stay or leave from, in the products that form them."""
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16", compiled=compiled)
    weights, batches = random_weights(config, torch.float32), gpu_batches(3)

    def uniform(**choices: object) -> Policy:
        settings = {"micro_batch_rows": ROWS, "groups": (1,), "save_level": level, **choices}
        return uniform_policy(model_spec(config), workload, **settings)  # type: ignore[arg-type]

    expected = run_bits(make_trainer(config, workload, uniform(), weights, device="cuda"), batches)
    for title, policy in {
        "all streamed": uniform(weights="host", optimizer="host"),
        "more slabs": uniform(optimizer="host", gradient_slabs=3),
        "streamed states": uniform(weights="host", optimizer="streamed"),
    }.items():
        assert_same_bits(
            run_bits(make_trainer(config, workload, policy, weights, device="cuda"), batches), expected, title
        )


def waiting_policies(config: dict[str, Any], workload: Workload) -> dict[str, Policy]:
    """Save level `input`, whose activations wait on the host in all or some layers."""
    on_device = policies(config, workload, "input")
    everywhere = ("host",) * model_spec(config).num_layers
    found = {title: on_device[title].model_copy(update={"activation_homes": everywhere}) for title in on_device}
    mixed = {"activation_homes": ("host", "device", "host", "device"), "leaving_passes": 2}
    found["mixed"] = on_device["mixed"].model_copy(update=mixed)
    found["sparse"] = found["streamed"].model_copy(update={"checkpoint_interval": 2, "groups": (4, 2)})
    return found


@pytest.mark.parametrize(("compiled", "gradient_format"), [(False, "fp32"), (True, "bf16")])
def test_inputs_that_wait_on_the_host_give_the_same_bits(compiled: bool, gradient_format: str) -> None:
    config, workload = gpu_config(), gpu_workload(gradient_format=gradient_format, compiled=compiled)
    weights, batches = random_weights(config, torch.float32), gpu_batches(3)
    on_device = policies(config, workload, "input")["all in HBM"]
    expected = run_bits(make_trainer(config, workload, on_device, weights, device="cuda"), batches)
    for title, policy in waiting_policies(config, workload).items():
        assert_same_bits(
            run_bits(make_trainer(config, workload, policy, weights, device="cuda"), batches), expected, title
        )


def allocated_at_loss(
    config: dict[str, Any], workload: Workload, policy: Policy, weights: dict[str, torch.Tensor], batch: Batch
) -> tuple[int, StepProgram, dict[str, int]]:
    """Bytes on the device when the last loss is launched, the program, and what of its places on the host is used.

    Reserved memory has settled by then.
    """
    gc.collect()  # trainers of before
    torch._C._cuda_clearCublasWorkspaces()  # of streams that are gone: this trainer's are counted alone
    torch.cuda.empty_cache()
    trainer = make_trainer(config, workload, policy, weights, device="cuda")
    original, allocated = trainer.operations.loss, []

    def loss(operation: Operation) -> None:
        allocated.append(torch.cuda.memory_allocated())
        original(operation)

    trainer.runner.functions = {**trainer.operations.functions(), Kind.LOSS: loss}
    for _ in range(5):
        trainer.step(batch)
    trainer.drain()
    reserved = torch.cuda.memory_reserved()
    at_loss = allocated[-1]  # the last micro-batch's: all that leaves has left
    for _ in range(20):
        trainer.step(batch)
    trainer.drain()
    assert torch.cuda.memory_reserved() == reserved
    trainer.close()
    return at_loss, trainer.program, trainer.operations.saved_bytes


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_that_wait_on_the_host_leave_the_device(compiled: bool) -> None:
    """At the loss each layer that waits holds none of its inputs."""
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16", compiled=compiled)
    weights, (batch,) = random_weights(config, torch.float32), gpu_batches(1)
    kept = policies(config, workload, "input")["one group"]
    waiting = waiting_policies(config, workload)["one group"]
    on_device, _, _ = allocated_at_loss(config, workload, kept, weights, batch)
    on_host, program, _ = allocated_at_loss(config, workload, waiting, weights, batch)
    layers, stages = model_spec(config).num_layers, 2
    expected = (layers * ROWS - stages) * program.buffers["hidden.1.0"].num_bytes
    assert on_device - on_host == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_saved_tensors_that_wait_on_the_host_leave_the_device(compiled: bool) -> None:
    """At the loss nothing that layers saved is there but what the loss releases."""
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16", compiled=compiled)
    weights, (batch,) = random_weights(config, torch.float32), gpu_batches(1)
    homes = ("weight_homes", "optimizer_homes", "gradient_homes")
    kept, waiting = (
        policies(config, workload, "keep")[title].model_copy(update=dict.fromkeys(homes, ("device",) * 6))
        for title in ("all in HBM", "saved tensors wait on the host")
    )
    on_device, _, _ = allocated_at_loss(config, workload, kept, weights, batch)
    on_host, program, used = allocated_at_loss(config, workload, waiting, weights, batch)
    stages = sum(b.num_bytes for b in program.buffers.values() if b.role in (Role.STAGE, Role.SAVED_STAGE))
    # The last layer's are on their way out until the loss has been launched.
    released = next(operation.releases for operation in program.steady if operation.kind is Kind.LOSS)
    leave = [layer for layer in range(1, model_spec(config).num_layers + 1) if f"saved.{layer}.0" not in released]
    leaves = sum(used[f"host.saved.{layer}.0"] + program.buffers[f"hidden.{layer}.0"].num_bytes for layer in leave)
    assert on_device - on_host == pytest.approx(leaves - stages, abs=0.05 * leaves)


@pytest.mark.parametrize(
    ("title", "waits"),
    [
        ("mixed", False),
        ("mixed", True),
        ("every optimizer", False),
        ("depth-first, streamed", False),
        ("depth-first, streamed", True),
        ("saved tensors wait on the host", False),
        ("saved tensors wait, as far as there is room, depth-first", False),
    ],
)
def test_streams_with_random_sleeps_equal_inline_execution(title: str, waits: bool) -> None:
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16")
    weights, batches = random_weights(config, torch.float32), gpu_batches(3)
    level: SaveLevel = "keep" if title.startswith("saved") else "input"
    policy = (waiting_policies(config, workload) if waits else policies(config, workload, level))[title]
    inline = make_trainer(config, workload, policy, weights, device="cuda")
    inline.runner.close()
    inline.runner = InlineRunner(inline.operations.functions(), inline.device, device_bytes=lambda: 0)
    expected = run_bits(inline, batches)
    for seed in range(12):
        trainer = make_trainer(config, workload, policy, weights, device="cuda")
        chance = random.Random(seed)

        def delayed(function: Callable[[Operation], None], chance: random.Random = chance) -> Callable[..., None]:
            def run(operation: Operation) -> None:
                on_host = operation.resource is Resource.HOST
                if chance.random() < 0.5:
                    time.sleep(chance.random() * 2e-3) if on_host else torch.cuda._sleep(int(chance.random() * 4e6))
                function(operation)
                if chance.random() < 0.5 and not on_host:
                    torch.cuda._sleep(int(chance.random() * 4e6))

            return run

        slow = {kind: delayed(function) for kind, function in trainer.operations.functions().items()}
        trainer.runner.functions = slow
        trainer.runner.worker.functions = slow  # type: ignore[union-attr]
        assert_same_bits(run_bits(trainer, batches), expected, f"seed {seed}")


def test_a_failing_host_update_ends_the_run_with_its_own_error() -> None:
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16")
    policy = policies(config, workload, "input")["streamed"]
    trainer = make_trainer(config, workload, policy, random_weights(config, torch.float32), device="cuda")
    original = trainer.operations.update

    def fails(operation: Operation) -> None:
        if operation.block == 2:
            raise ArithmeticError("the update of block 2 failed")
        original(operation)

    functions = {**trainer.operations.functions()}
    functions[next(kind for kind in functions if kind == "update")] = fails
    trainer.runner.worker.functions = functions  # type: ignore[union-attr]
    with pytest.raises(ArithmeticError, match="block 2"):
        run_steps(trainer, gpu_batches(4))
    trainer.close()


def test_streamed_step_follows_plain_torch_in_fp32() -> None:
    from tests.plain_trainer import plain_train
    from tests.tiny import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, master_weights

    config, workload = gpu_config(), gpu_workload(precision="fp32")
    weights, batches = random_weights(config, torch.float32), gpu_batches(3)
    policy = policies(config, workload, "input")["streamed"]
    plain = plain_train(
        config, weights, [(b.tokens, b.labels) for b in batches], micro_batch_rows=1, learning_rate=LEARNING_RATE,
        betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=0.5, dtype=torch.float32,
    )  # fmt: skip
    trainer = make_trainer(config, workload, policy, weights, device="cuda")
    results = run_steps(trainer, batches)
    streamed = master_weights(trainer)
    trainer.close()
    for step, result in enumerate(results):
        # The first step is the same arithmetic up to the order of sums; then AdamW turns the sign of gradients near
        # zero, which is a matter of their last bit, into moves of the whole rate.
        assert result.loss == pytest.approx(plain.losses[step], rel=1e-5 if step == 0 else 1e-2)
        assert result.gradient_norm == pytest.approx(plain.norms[step], rel=1e-4 if step == 0 else 1e-2)
    moved = torch.cat([(streamed[name] - weights[name]).flatten() for name in plain.weights])
    expected = torch.cat([(weight - weights[name]).flatten() for name, weight in plain.weights.items()])
    assert (moved - expected).norm() <= 0.1 * expected.norm()


def test_reserved_memory_does_not_grow_after_the_first_steps() -> None:
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16")
    policy = policies(config, workload, "input")["streamed, batch-major, deep"]
    trainer = make_trainer(config, workload, policy, random_weights(config, torch.float32), device="cuda")
    batches = gpu_batches(1)
    for _ in range(5):
        trainer.step(batches[0])
    trainer.drain()
    reserved = torch.cuda.memory_reserved()
    for _ in range(50):
        trainer.step(batches[0])
    trainer.drain()
    assert torch.cuda.memory_reserved() == reserved
    trainer.close()


@pytest.mark.parametrize(("compiled", "level", "clipping"), [(False, "keep", "global"), (True, "input", "layerwise")])
def test_frozen_blocks_stay_and_policies_give_the_same_bits(compiled: bool, level: SaveLevel, clipping: str) -> None:
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16", clipping=clipping, compiled=compiled)
    patterns = ["model.embed_tokens.*", "model.layers.0.*", "model.layers.2.*", "model.layers.3.mlp.*"]
    frozen = freeze(model_spec(config), patterns)
    weights, batches = random_weights(config, torch.float32), gpu_batches(3)
    expected = None
    for title, policy in policies(config, workload, level).items():
        trainer = make_trainer(config, workload, fitted(policy, frozen), weights, frozen=patterns, device="cuda")
        before = master_weights(trainer)
        results = run_steps(trainer, batches)
        after = master_weights(trainer)
        for name in before:
            still = "embed_tokens" in name or ".0." in name or ".2." in name or ".3.mlp" in name
            assert torch.equal(before[name], after[name]) == still, (title, name)
        found = ([(r.loss, r.gradient_norm) for r in results], state_bits(trainer))
        trainer.close()
        expected = expected or found
        assert_same_bits(found, expected, title)


@pytest.mark.parametrize("compiled", [False, True])
def test_evaluations_between_steps_give_the_same_loss_and_change_nothing(compiled: bool) -> None:
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16", compiled=compiled)
    weights, batches = random_weights(config, torch.float32), gpu_batches(4)
    losses, ends = [], []
    for evaluates in (False, True):
        for policy in policies(config, workload, "input").values():
            trainer = make_trainer(config, workload, policy, weights, device="cuda")
            run_steps(trainer, batches[:2])
            if evaluates:
                losses += [trainer.evaluate(batches).loss, trainer.evaluate(batches).loss]
            run_steps(trainer, batches[2:])
            ends.append(state_bits(trainer))
            trainer.close()
    assert len(set(losses)) == 1
    for end in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(end, ends[0], strict=True))


def test_every_step_tells_its_lost_time_while_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config, workload = gpu_config(), gpu_workload(gradient_format="bf16")
    policy = policies(config, workload, "input")["streamed"]
    trainer = make_trainer(config, workload, policy, random_weights(config, torch.float32), device="cuda")
    batches = gpu_batches(8)
    sleep_seconds, update = 0.02, trainer.operations.update

    def slow(operation: Operation) -> None:
        if operation.resource is Resource.HOST:
            time.sleep(sleep_seconds)  # in every layer, and nothing else takes as long: compute waits for updates
        update(operation)

    clock = None
    for step, batch in enumerate(batches):
        if step == 3:
            monkeypatch.setitem(trainer.runner.functions, Kind.UPDATE, slow)
        result = trainer.step(batch, record=step == 5)
        if result is None:
            continue
        if clock is not None:
            seconds = result.reported - clock
            found = trainer.lost_seconds(seconds)
            assert all(lost >= 0 for lost in found.values())
            assert sum(found.values()) <= seconds * 1.001
            if result.step >= 3:
                layers = trainer.model.num_layers
                assert found["waiting for updates"] > 0.5 * layers * sleep_seconds
                assert found["waiting for updates"] == max(found.values())
            if result.step == 5:
                timeline = trainer.timeline(seconds)
                assert {s.name for s in timeline.spans} == {operation.name for operation in trainer.program.steady}
                recorded = timeline.lost_seconds()
                assert found["waiting for updates"] == pytest.approx(recorded["waiting for updates"], rel=0.1)
        clock = result.reported
    trainer.drain()
    trainer.close()
