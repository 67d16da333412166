"""Layers and head on CUDA: compiled save levels, moving weights, repeatability, no waits for the device."""

import pytest
import torch
from tiny_models import random_batch, random_blocks, tiny_config

from executor.head import HeadTemplate
from executor.layer import LayerTemplates, tensor_views
from simulator.model import model_spec
from simulator.policy import SAVE_LEVELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler and its synchronisation checks warn about themselves
]

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
}
SHAPES = ((4, 512), (2, 384))


def _layer(*, compiled, family="qwen2", precision="bf16"):
    config = tiny_config(family, **SIZES)
    model = model_spec(config)
    templates = LayerTemplates(config, model, precision=precision, compiled=compiled, device="cuda")
    flat = random_blocks(model, "fp64")[1].mul_(0.1)  # about what a trained layer's matrices have
    return templates, flat.to("cuda", templates.dtype)


def _inputs(templates, rows, sequence_length):
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, sequence_length, templates.model.hidden_size)
    return [torch.randn(shape, generator=generator).to("cuda", templates.dtype) for _ in range(2)]


def _run(templates, flat, hidden, grad_output, level):
    output, saved = templates.forward(1, flat, hidden, level)
    grad_hidden, gradients = templates.backward(1, flat, saved, grad_output)
    return [output, grad_hidden, *gradients]


def _all_equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _largest_error(actual, expected):
    return max(
        float((a.double() - e.double()).norm() / e.double().norm()) for a, e in zip(actual, expected, strict=True)
    )


def test_six_levels_keep_less_and_less_and_agree(no_waits):
    templates, flat = _layer(compiled=True)
    eager, _ = _layer(compiled=False)
    for rows, sequence_length in SHAPES:
        hidden, grad_output = _inputs(templates, rows, sequence_length)
        expected = _run(eager, flat, hidden, grad_output, "keep")
        kept = []
        for level in SAVE_LEVELS:
            templates.warm_up(1, flat, rows=rows, sequence_length=sequence_length, level=level)
            with no_waits:
                output, saved = templates.forward(1, flat, hidden, level)
                kept.append(saved.kept_bytes())
                grad_hidden, gradients = templates.backward(1, flat, saved, grad_output)
            assert _largest_error([output, grad_hidden, *gradients], expected) < 0.02, level
        print(f"{rows} x {sequence_length}: kept bytes {dict(zip(SAVE_LEVELS, kept, strict=True))}")
        assert kept == sorted(kept, reverse=True)
        assert len(set(kept)) == len(kept)
        assert kept[-1] == hidden.untyped_storage().nbytes()


@pytest.mark.parametrize("level", ["keep", "budget_50", "input"])
def test_compiled_weights_may_move_between_forward_and_backward(level):
    templates, flat = _layer(compiled=True)
    hidden, grad_output = _inputs(templates, *SHAPES[0])
    expected = _run(templates, flat, hidden, grad_output, level)
    slot = flat.clone()
    output, saved = templates.forward(1, slot, hidden, level)
    slot.fill_(float("nan"))
    grad_hidden, gradients = templates.backward(1, flat.clone(), saved, grad_output)
    assert _all_equal([output, grad_hidden, *gradients], expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_keep_repeats_itself_and_moves_its_weights(compiled):
    templates, flat = _layer(compiled=compiled)
    hidden, grad_output = _inputs(templates, *SHAPES[0])
    expected = _run(templates, flat, hidden, grad_output, "keep")
    for _ in range(5):
        assert _all_equal(_run(templates, flat.clone(), hidden, grad_output, "keep"), expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_eager_levels_agree_bit_for_bit_without_waits(family, no_waits):
    templates, flat = _layer(compiled=False, family=family)
    hidden, grad_output = _inputs(templates, *SHAPES[0])
    _run(templates, flat, hidden, grad_output, "keep")  # makes the rotary tables
    with no_waits:
        kept = _run(templates, flat, hidden, grad_output, "keep")
        recomputed = _run(templates, flat, hidden, grad_output, "input")
    assert _all_equal(kept, recomputed)


def test_bf16_attention_is_flash():
    templates, flat = _layer(compiled=False)
    hidden, grad_output = _inputs(templates, *SHAPES[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _run(templates, flat, hidden, grad_output, "keep")
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention" in names
    assert "aten::_scaled_dot_product_flash_attention_backward" in names


def test_memory_returns_after_backward_and_after_a_dropped_forward():
    templates, flat = _layer(compiled=False)
    hidden, grad_output = _inputs(templates, *SHAPES[0])
    _run(templates, flat, hidden, grad_output, "keep")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    _run(templates, flat, hidden, grad_output, "keep")
    templates.forward(1, flat, hidden, "keep")
    assert torch.cuda.memory_allocated() == before


def test_embedding_gradient_equals_the_cpus_and_repeats_itself(no_waits):
    config = tiny_config("llama", **SIZES | {"vocab_size": 300})
    model = model_spec(config)
    on_cpu = LayerTemplates(config, model, precision="bf16")
    on_cuda = LayerTemplates(config, model, precision="bf16", device="cuda")
    tokens = torch.randint(300, (8, 2048), generator=torch.Generator().manual_seed(0))
    tokens[:, 1000:] = 7  # a long run of one token
    gradient = torch.randn(8, 2048, model.hidden_size).bfloat16()
    expected = torch.empty(model.block(0).num_elements)
    on_cpu.embed_backward(tokens, gradient, expected, first=True)
    tokens, gradient, results = tokens.cuda(), gradient.cuda(), []
    for _ in range(3):
        accumulator = torch.empty(model.block(0).num_elements, device="cuda")
        with no_waits:
            on_cuda.embed_backward(tokens, gradient, accumulator, first=True)
        results.append(accumulator)
    assert _all_equal(results[:2], results[1:])
    assert _largest_error([results[0].cpu()], [expected]) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_head_equals_fp64_repeats_itself_and_keeps_no_logits(tied, no_waits):
    vocab_size, rows, sequence_length, chunk_tokens = 32000, 8, 1024, 512
    config = tiny_config("qwen2", tied=tied, **SIZES | {"vocab_size": vocab_size})
    model = model_spec(config)

    def run(precision, *, watched):
        templates = LayerTemplates(config, model, precision=precision, device="cuda")
        head = HeadTemplate(templates.final_norm, model, precision=precision)
        weights = [block.mul(0.1).to("cuda", templates.dtype) for block in random_blocks(model, "fp64")]
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, sequence_length, model.hidden_size, generator=generator).bfloat16()
        hidden = hidden.to("cuda", templates.dtype)
        labels = random_batch(model, rows=rows, sequence_length=sequence_length)[1].cuda()
        weights = [block.bfloat16().to(templates.dtype) for block in weights]
        sums = [torch.empty(weights[i].numel(), dtype=head.accumulator_dtype, device="cuda") for i in (0, -1)]
        arguments = (weights[-1], weights[0] if tied else None, hidden, labels)
        for _ in range(2):  # the second run is watched: the first creates cuBLAS's workspace
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with no_waits:
                loss, grad = head.loss_and_gradients(
                    *arguments,
                    1e-4,
                    chunk_tokens=chunk_tokens,
                    head_accumulator=sums[1],
                    embedding_accumulator=sums[0] if tied else None,
                    first=True,
                )
                evaluated = head.loss(*arguments, chunk_tokens=chunk_tokens)
            peak = torch.cuda.max_memory_allocated() - before
        assert torch.equal(loss, evaluated)
        if watched:
            assert peak < rows * sequence_length * vocab_size * 2 / 2  # half of all logits in bf16
        norm = tensor_views(model.block(model.head), sums[1])["model.norm.weight"]
        projection = tensor_views(model.block(0), sums[0])["embed_tokens.weight"] if tied else sums[1]
        return [loss, grad, norm, projection]

    first, second = run("bf16", watched=True), run("bf16", watched=True)
    assert _all_equal(first, second)
    expected = run("fp64", watched=False)
    assert abs(first[0].double() - expected[0]) < 1e-3 * expected[0]
    assert _largest_error(first[1:], expected[1:]) < 0.02
