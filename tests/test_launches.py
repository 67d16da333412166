"""What the launching thread reckons with: operations of a few launches are no more than they say."""

from typing import Any

import pytest
import torch
from tiny import SEQUENCE, make_trainer, random_weights, run_steps, tiny_batches
from tiny import tiny_config as plain_config
from tiny_models import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from executor.operations import Operations
from executor.runner import LAYER_LAUNCHES
from executor.trainer import Trainer
from simulator.model import model_spec
from simulator.policy import Workload, uniform_policy
from simulator.program import Kind, Operation

# They look at a tensor in another way, or take memory: no kernel.
NO_KERNELS = {
    "view", "as_strided", "select", "slice", "unbind", "expand", "detach", "alias", "t", "transpose", "unsqueeze",
    "permute", "squeeze", "split", "_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "diff",
}  # fmt: skip
EVENTS = 3


class Count(TorchDispatchMode):
    """Counts operators that run a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.found += function.overloadpacket.__name__ not in NO_KERNELS
        return function(*arguments, **(keywords or {}))


def light(operation: Operation) -> bool:
    return operation.kind in (Kind.FINISH_GRADIENT, Kind.CLIP, Kind.REPORT) or (
        operation.kind in (Kind.FORWARD, Kind.BACKWARD) and operation.block == 0
    )


def trainer_of(family: str, *, packed: bool, frozen: tuple[str, ...] = ()) -> Trainer:
    config = plain_config(family) if family == "qwen2" else tiny_config(family)
    workload = Workload(sequence_length=SEQUENCE, tokens_per_step=6 * SEQUENCE, precision="fp32", packed=packed)
    model = model_spec(config)
    policy = uniform_policy(model, workload, micro_batch_rows=2, groups=(3,))
    return make_trainer(config, workload, policy, random_weights(config, torch.float32), frozen=frozen)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt2"])
def test_light_operations_launch_no_more_than_they_say(family: str, packed: bool) -> None:
    trainer = trainer_of(family, packed=packed)
    counted: dict[str, tuple[int, int]] = {}

    def counting(kind: Kind) -> Any:
        run = trainer.runner.functions[kind]

        def function(operation: Operation) -> None:
            with Count() as count:
                run(operation)
            if light(operation):
                counted[operation.name] = count.found + EVENTS, trainer.operations.launches(operation)

        return function

    trainer.runner.functions = {kind: counting(kind) for kind in trainer.runner.functions}
    try:
        run_steps(trainer, tiny_batches(2, vocab=trainer.model.vocab_size))
    finally:
        trainer.close()
    assert {name.split(".")[0] for name in counted} == {"forward", "backward", "finish_gradient", "clip", "report"}
    assert {name: (found, said) for name, (found, said) in counted.items() if found > said} == {}
    forwards = [found for name, (found, _) in counted.items() if name.startswith("forward")]
    assert min(forwards) >= (10 if packed else 1 + EVENTS)  # it does count


def test_more_blocks_more_tokens_and_frozen_tensors_are_more_launches() -> None:
    trainer = trainer_of("qwen2", packed=False, frozen=("*.mlp.*",))
    try:
        operations: Operations = trainer.operations
        few = {
            kind: operations.launches(Operation("", kind, trainer.program.steady.operations[0].resource, block=block))
            for kind, block in ((Kind.CLIP, -1), (Kind.BACKWARD, 0), (Kind.FINISH_GRADIENT, 1), (Kind.FORWARD, 1))
        }
        assert few[Kind.CLIP] == 30 + trainer.model.num_blocks
        assert few[Kind.BACKWARD] == 10 + 16
        assert few[Kind.FINISH_GRADIENT] == 15 + 3
        assert few[Kind.FORWARD] == LAYER_LAUNCHES
        assert operations.templates.embed_backward_launches(8 * 8192 + 1) == 9 * 16
    finally:
        trainer.close()
