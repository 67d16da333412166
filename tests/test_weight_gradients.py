"""Gradients added to their sums where compiled layers form them are those added afterwards."""

import pytest
import torch

from executor.gradients import accumulate
from executor.layer import LayerTemplates, tensor_views
from simulator.formats import Precision
from simulator.model import model_spec
from simulator.policy import SaveLevel
from tests.tiny import tiny_config


# Each precision and each level; ten seconds of compiling each, where no other test compiles the same.
@pytest.mark.parametrize(
    ("precision", "level"),
    [
        ("bf16", "keep"),
        ("fp32", "keep"),
        ("fp32", "input"),
        ("bf16", "budget_50"),
        pytest.param("bf16", "input", marks=pytest.mark.slow),
        pytest.param("fp32", "budget_50", marks=pytest.mark.slow),
    ],
)
def test_sums_are_the_same_bits_as_when_added_afterwards(precision: Precision, level: SaveLevel) -> None:
    config = tiny_config()
    model = model_spec(config)
    block = model.block(1)
    templates = LayerTemplates(config, model, precision=precision, compiled=True)
    generator = torch.Generator().manual_seed(2)
    flat = (0.05 * torch.randn(block.num_elements, generator=generator)).to(templates.dtype)
    sums = {way: torch.full((block.num_elements,), float("nan")) for way in ("inside", "afterwards")}
    inside, afterwards = (list(tensor_views(block, sums[way]).values()) for way in sums)
    for micro_batch in range(3):
        first = micro_batch == 0
        hidden = torch.randn(2, 16, model.hidden_size, generator=generator).to(templates.dtype)
        upstream = torch.randn(2, 16, model.hidden_size, generator=generator).to(templates.dtype)

        _, kept = templates.forward(1, flat, hidden, level)
        grad_hidden, gradients = templates.backward(1, flat, kept, upstream)
        accumulate(sums["afterwards"], afterwards, gradients, first=first)

        _, kept = templates.forward(1, flat, hidden, level)
        other_grad_hidden, others = templates.backward(1, flat, kept, upstream, inside, first=first)
        # Every matrix, no vector: those are sums over tokens, not products.
        assert [gradient is view for gradient, view in zip(others, inside, strict=True)] == [
            view.dim() == 2 for view in inside
        ]
        accumulate(sums["inside"], inside, others, first=first)
        assert torch.equal(grad_hidden, other_grad_hidden)
    assert torch.equal(sums["inside"], sums["afterwards"])
    assert not sums["inside"].isnan().any()


def test_one_micro_batch_writes_the_gradient_that_its_sum_is_rounded_to() -> None:
    config = tiny_config()
    model = model_spec(config)
    block = model.block(1)
    templates = LayerTemplates(config, model, precision="bf16", compiled=True)
    generator = torch.Generator().manual_seed(3)
    flat = (0.05 * torch.randn(block.num_elements, generator=generator)).bfloat16()
    hidden, upstream = torch.randn(2, 2, 16, model.hidden_size, generator=generator).bfloat16()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        accumulator = torch.full((block.num_elements,), float("nan"), dtype=dtype)
        views = list(tensor_views(block, accumulator).values())
        _, kept = templates.forward(1, flat, hidden, "keep")
        _, gradients = templates.backward(1, flat, kept, upstream, views, first=True)
        accumulate(accumulator, views, gradients, first=True)
        found[dtype] = accumulator.bfloat16()
    assert torch.equal(found[torch.float32], found[torch.bfloat16])
    assert found[torch.bfloat16].any()
