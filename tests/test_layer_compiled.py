"""Compiled save levels on the CPU: they keep different amounts and compute the same numbers."""

import shutil
import threading
import weakref

import pytest
import torch
from tiny_models import random_blocks, tiny_config

from executor.compiled import compile_layer
from executor.layer import LayerTemplates
from simulator.errors import ConveyorError
from simulator.model import model_spec
from simulator.policy import SAVE_LEVELS

pytestmark = [
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"),
    # torch's compiler imports and calls deprecated parts of torch.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def _templates(precision="fp32", *, compiled=True, family="qwen2", **overrides):
    config = tiny_config(family, num_hidden_layers=1, **overrides)
    model = model_spec(config)
    templates = LayerTemplates(config, model, precision=precision, compiled=compiled)
    return templates, random_blocks(model, precision)[1]


def _inputs(templates, rows, sequence_length):
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, sequence_length, templates.model.hidden_size)
    return [torch.randn(shape, generator=generator).to(templates.dtype) for _ in range(2)]


def _run(templates, flat, hidden, grad_output, level):
    """Output, gradients and kept bytes; the weights move, and their old place is overwritten, before the backward."""
    slot = flat.clone()
    output, saved = templates.forward(1, slot, hidden, level)
    kept_bytes = saved.kept_bytes()
    slot.fill_(float("nan"))
    grad_hidden, gradients = templates.backward(1, flat.clone(), saved, grad_output)
    return [output, grad_hidden, *gradients], kept_bytes


def _run_waiting(templates, flat, hidden, grad_output, level):
    """Output and gradients where all that is kept leaves, its memory is overwritten, and it comes back elsewhere."""
    source = hidden.clone()
    output, saved = templates.forward(1, flat, source, level)
    saved.let_go_of_hidden()
    place = torch.zeros(2 * saved.bytes_beside_hidden() + 4096, dtype=torch.uint8)
    leaving, used = saved.let_go_of_saved(place)
    assert leaving
    assert saved.kept_bytes() == 0
    for tensor in (source.view(torch.uint8), *leaving):
        tensor.fill_(255)
    stage = torch.zeros_like(place)
    stage[:used] = place[:used]
    saved.take_hidden_back(hidden.clone())
    saved.take_saved_back(stage)
    grad_hidden, gradients = templates.backward(1, flat, saved, grad_output)
    return [output, grad_hidden, *gradients]


def _all_equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_compiled_layer_follows_its_weights_and_keeps_what_its_level_says():
    # Sizes of tests/test_weight_gradients.py: torch keeps what it has compiled, for other tests too.
    templates, flat = _templates()
    hidden, grad_output = _inputs(templates, 2, 16)
    templates.warm_up(1, flat, rows=2, sequence_length=16, level="input")
    actual, kept_bytes = _run(templates, flat, hidden, grad_output, "input")
    assert kept_bytes == hidden.untyped_storage().nbytes()

    eager, _ = _templates(compiled=False)
    expected, _ = _run(eager, flat, hidden, grad_output, "keep")
    for compiled_tensor, eager_tensor in zip(actual, expected, strict=True):
        assert (compiled_tensor - eager_tensor).norm() <= 2e-5 * eager_tensor.norm()

    # From the layer's input alone, as after a checkpoint: the same numbers.
    grad_hidden, gradients = templates.backward(1, flat, hidden, grad_output)
    assert _all_equal([grad_hidden, *gradients], actual[1:])

    # From the graph of a forward whose input has left and come back elsewhere: the same numbers.
    memory = hidden.numpy().copy()
    alive, source = weakref.ref(memory), torch.from_numpy(memory)
    del memory
    _, saved = templates.forward(1, flat, source, "input")
    saved.let_go_of_hidden()
    del source
    assert alive() is None
    assert saved.kept_bytes() == 0
    saved.take_hidden_back(hidden.clone())
    grad_hidden, gradients = templates.backward(1, flat, saved, grad_output)
    assert _all_equal([grad_hidden, *gradients], actual[1:])

    # A second shape would have to be compiled; where torch keeps no more, that is an error and not a slow run.
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(ConveyorError, match="more input shapes than torch keeps compiled"),
    ):
        templates.forward(1, flat, torch.cat([hidden, hidden]), "input")

    # What has run once goes by torch.compile: the same bits where that has forgotten all, and nothing compiled anew.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    again, _ = _run(templates, flat, hidden, grad_output, "input")
    assert _all_equal(again, actual)
    assert not torch._dynamo.utils.counters["stats"]


def test_a_compiled_layer_that_ran_without_gradients_has_them_afterwards():
    layer = compile_layer(lambda hidden, context, *weights: hidden @ weights[0] + context[0], budget=1.0, name="layer")
    hidden, weight, shift = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4)
    with torch.no_grad():
        plain = [layer(hidden, (shift,), weight) for _ in range(2)]
    weight.requires_grad_()
    with torch.no_grad():
        plain += [layer(hidden, (shift,), weight) for _ in range(2)]
    trained = [layer(hidden, (shift,), weight) for _ in range(2)]
    assert [output.requires_grad for output in (*plain, *trained)] == [False] * 4 + [True] * 2
    for output in trained:
        (gradient,) = torch.autograd.grad(output.sum(), weight)
        torch.testing.assert_close(gradient, hidden.sum(dim=0)[:, None].expand(4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_six_levels_keep_less_and_less_and_agree_bit_for_bit(precision):
    templates, flat = _templates(precision, hidden_size=64, intermediate_size=160)
    for rows, sequence_length in ((2, 32), (3, 48)):
        hidden, grad_output = _inputs(templates, rows, sequence_length)
        results = {level: _run(templates, flat, hidden, grad_output, level) for level in SAVE_LEVELS}
        kept = [kept_bytes for _, kept_bytes in results.values()]
        assert kept == sorted(kept, reverse=True)
        assert len(set(kept)) == len(kept), kept
        for level, (tensors, _) in results.items():
            assert _all_equal(tensors, results["keep"][0]), level
            if level != "input":
                assert _all_equal(_run_waiting(templates, flat, hidden, grad_output, level), tensors), level


@pytest.mark.slow
def test_a_level_holds_in_a_thread_that_meets_a_new_shape():
    templates, flat = _templates(hidden_size=64, intermediate_size=160)
    kept = {}

    def run(level, rows):
        kept[level, rows] = _run(templates, flat, *_inputs(templates, rows, 32), level)[1]

    for level in ("keep", "budget_30"):
        run(level, 2)
        thread = threading.Thread(target=run, args=(level, 4))
        thread.start()
        thread.join()
    assert kept["budget_30", 2] < kept["keep", 2]
    assert kept["budget_30", 4] < kept["keep", 4]
    assert kept["keep", 4] == 2 * kept["keep", 2]
