"""Layer templates against transformers' whole model, and what saving and rebinding may and may not change."""

import gc
import os
import weakref

import pytest
import torch
from tiny_models import (
    TINY_FAMILIES,
    WAITING_OPERATIONS,
    empty_accumulators,
    random_batch,
    random_blocks,
    tiny_config,
    whole_model,
)
from torch.utils._python_dispatch import TorchDispatchMode

from executor.head import HeadTemplate
from executor.layer import LayerTemplates, tensor_views, use_deterministic_kernels, zero_padding
from simulator.errors import InputError, ProgramError, UnsupportedChoice
from simulator.model import model_spec

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
# Gemma's norms, and transformers' softmax of capped scores, compute in fp32 whatever the precision.
GEMMA_TOLERANCE = {"fp64": 1e-6, "fp32": 1e-5}


def _templates(config, precision="fp32", **choices):
    model = model_spec(config)
    return model, LayerTemplates(config, model, precision=precision, **choices)


def _layer_case(family="qwen3", precision="fp32", *, rows=3, sequence_length=10, **choices):
    model, templates = _templates(tiny_config(family), precision, **choices)
    flat = random_blocks(model, precision)[1]
    generator = torch.Generator().manual_seed(1)
    shape = (rows, sequence_length, model.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(flat.dtype)
    grad_output = torch.randn(shape, generator=generator).to(flat.dtype)
    return templates, flat, hidden, grad_output


def _forward_backward(templates, flat, hidden, grad_output, level, block=1):
    output, saved = templates.forward(block, flat, hidden, level)
    return [output, *_flatten(templates.backward(block, flat, saved, grad_output))]


def _flatten(gradients):
    return [gradients[0], *gradients[1]]


def _all_equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_loss_and_gradients_equal_transformers_whole_model(family, tied, precision):
    config = tiny_config(family, tied=tied)
    model, templates = _templates(config, precision)
    head = HeadTemplate(templates.final_norm, model, precision=precision, logit_cap=templates.logit_cap)
    blocks = random_blocks(model, precision)
    tokens, labels = random_batch(model, rows=6, sequence_length=12)
    loss_scale = 1 / int((labels >= 0).sum())

    whole = whole_model(config, model, blocks)
    logits = whole(input_ids=tokens).logits
    expected_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (expected_loss * loss_scale).backward()

    sums = empty_accumulators(model, templates.accumulator_dtype)
    tied_sum = torch.full_like(sums[0], float("nan")) if tied else None
    loss = torch.zeros((), dtype=templates.accumulator_dtype)
    for start, stop in ((0, 4), (4, 6)):  # two micro-batches of different size
        first = start == 0
        hidden, kept = templates.embed(blocks[0], tokens[start:stop]), []
        for block in model.layers:
            hidden, saved = templates.forward(block, blocks[block], hidden, "keep" if block == 1 else "input")
            kept.append(saved)
        loss_sum, grad = head.loss_and_gradients(
            blocks[-1],
            blocks[0] if tied else None,
            hidden,
            labels[start:stop],
            loss_scale,
            chunk_tokens=7,
            head_accumulator=sums[-1],
            embedding_accumulator=tied_sum,
            first=first,
        )
        loss += loss_sum
        for block in reversed(model.layers):
            grad, gradients = templates.backward(block, blocks[block], kept.pop(), grad)
            for view, gradient in zip(tensor_views(model.block(block), sums[block]).values(), gradients, strict=True):
                _ = view.copy_(gradient) if first else view.add_(gradient)
        templates.embed_backward(tokens[start:stop], grad, sums[0], first=first)
    if tied_sum is not None:
        sums[0] += tied_sum

    tolerance = (GEMMA_TOLERANCE if family.startswith("gemma") else TOLERANCE)[precision]
    assert abs(loss - expected_loss) <= tolerance * abs(expected_loss)
    compared = 0
    for name, parameter in whole.named_parameters():
        actual = _gradient(model, sums, name)
        error = (actual - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6)
        assert error <= tolerance, name
        compared += 1
    assert compared == sum(len(model.block(index).tensors) for index in range(model.num_blocks))


def _gradient(model, sums, name):
    for index in range(model.num_blocks):
        for tensor, view in tensor_views(model.block(index), sums[index]).items():
            if model.block_prefix(index) + tensor == name:
                return view
    raise AssertionError(name)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_keep_and_input_agree_bit_for_bit(family, precision):
    case = _layer_case(family, precision)
    kept, recomputed = _forward_backward(*case, "keep"), _forward_backward(*case, "input")
    assert _all_equal(kept, recomputed)
    templates, flat, hidden, grad_output = case
    assert _all_equal(kept[1:], _flatten(templates.backward(1, flat, hidden, grad_output)))


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_weights_may_move_between_forward_and_backward(family, precision):
    templates, flat, hidden, grad_output = _layer_case(family, precision)
    expected = _forward_backward(templates, flat, hidden, grad_output, "keep")

    # One slot inside a larger buffer, given away after the forward; the weights come back at another offset.
    slots = torch.full((3 * flat.numel(),), float("nan"), dtype=flat.dtype)
    slot = slots[: flat.numel()]
    slot.copy_(flat)
    output, saved = templates.forward(1, slot, hidden, "keep")
    slots.fill_(float("nan"))
    slots[flat.numel() + 128 : 2 * flat.numel() + 128].copy_(flat)
    moved = slots[flat.numel() + 128 : 2 * flat.numel() + 128]
    assert _all_equal(expected, [output, *_flatten(templates.backward(1, moved, saved, grad_output))])


def test_backward_reads_the_weights_it_is_given():
    templates, flat, hidden, grad_output = _layer_case()
    _, saved = templates.forward(1, flat, hidden, "keep")
    grad_hidden, gradients = templates.backward(1, torch.full_like(flat, float("nan")), saved, grad_output)
    assert grad_hidden.isnan().any()
    assert any(gradient.isnan().any() for gradient in gradients)


def test_saved_activations_serve_one_backward():
    templates, flat, hidden, grad_output = _layer_case()
    for level in ("keep", "input"):
        _, saved = templates.forward(1, flat, hidden, level)
        templates.backward(1, flat, saved, grad_output)
        assert saved.kept_bytes() == 0
        with pytest.raises(ProgramError, match="twice"):
            templates.backward(1, flat, saved, grad_output)


def test_activations_are_freed_by_reference_counting_alone():
    """After the backward, and where none follows: autograd's nodes close no cycle that only they can see."""
    templates, flat, hidden, grad_output = _layer_case()
    gc.disable()
    try:
        _, saved = templates.forward(1, flat, hidden, "keep")
        held_by_graph = weakref.ref(saved._tensors)
        del saved
        assert held_by_graph() is None

        _, saved = templates.forward(1, flat, hidden, "keep")
        held_by_graph, activation = weakref.ref(saved._tensors), weakref.ref(saved._tensors.tensors()[-1])
        assert activation() is not None
        templates.backward(1, flat, saved, grad_output)
        assert activation() is None
        assert held_by_graph() is None
    finally:
        gc.enable()


def test_kept_bytes_count_each_storage_once_and_no_weights():
    templates, flat, hidden, _ = _layer_case("llama", rows=2, sequence_length=8)
    layer_input = hidden.untyped_storage().nbytes()
    output, saved = templates.forward(1, flat, hidden, "input")
    assert saved.kept_bytes() == layer_input
    output, saved = templates.forward(1, flat, hidden, "keep")
    kept = saved.kept_bytes()
    # At least what the matrix products read: both norms' outputs, attention's output, the MLP's product (48 wide).
    assert kept >= layer_input * (1 + 3 + 48 / 32)
    assert kept < 40 * layer_input
    # Twice the rows, twice the bytes: neither weights nor rotary tables are counted, nor is the output.
    wide = torch.cat([hidden, hidden])
    assert templates.forward(1, flat, wide, "keep")[1].kept_bytes() == 2 * kept
    assert output.grad_fn is None
    # A layer input inside a larger buffer counts as itself.
    assert templates.forward(1, flat, wide[:2], "keep")[1].kept_bytes() == kept


def test_embedding_gradient_equals_a_loop_over_tokens(monkeypatch):
    monkeypatch.setattr("executor.layer._EMBEDDING_CHUNK_TOKENS", 13)
    model, templates = _templates(tiny_config("llama"), "bf16")
    tokens = torch.randint(5, (4, 9), generator=torch.Generator().manual_seed(0))  # many repeats
    gradients = [torch.randn(4, 9, model.hidden_size).bfloat16() for _ in range(2)]
    accumulator = torch.full((model.block(0).num_elements,), float("nan"))
    expected = torch.zeros(model.vocab_size, model.hidden_size)
    for first, gradient in zip((True, False), gradients, strict=True):
        templates.embed_backward(tokens, gradient, accumulator, first=first)
        for token, row in zip(tokens.flatten().tolist(), gradient.flatten(0, 1), strict=True):
            expected[token] += row.float()
    assert torch.equal(tensor_views(model.block(0), accumulator)["embed_tokens.weight"], expected)
    assert not accumulator.isnan().any()


def test_embedding_gradient_repeats_itself_with_many_threads():
    model, templates = _templates(tiny_config("llama", hidden_size=256), "fp32")
    tokens = torch.randint(7, (8, 512), generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(8, 512, model.hidden_size)
    results = []
    for _ in range(3):
        accumulator = torch.empty(model.block(0).num_elements)
        templates.embed_backward(tokens, gradient, accumulator, first=True)
        results.append(accumulator)
    assert _all_equal(results[:1] * 2, results[1:])


def test_zero_padding_touches_padding_only():
    model = model_spec(tiny_config("qwen2"))
    block = model.block(1)
    flat = torch.full((block.num_elements,), float("nan"))
    for view in tensor_views(block, flat).values():
        view.fill_(1)
    zero_padding(block, flat)
    assert flat.sum() == block.num_parameters


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn"])
def test_rotary_tables_do_not_depend_on_lengths_seen_before(rope_type):
    scaling = {"rope_type": rope_type, "factor": 2.0, "original_max_position_embeddings": 8}
    config = tiny_config("llama", max_position_embeddings=8, rope_scaling=scaling)
    _, fresh = _templates(config)
    _, used = _templates(config)
    used._rotary(1, 40)
    assert _all_equal(fresh._rotary(1, 12), used._rotary(1, 12))
    assert not torch.equal(fresh._rotary(1, 12)[0], fresh._rotary(1, 40)[0][:, :12]) or rope_type == "yarn"


@pytest.mark.parametrize("sequence_length", [5, 6, 7, 20])
@pytest.mark.parametrize("family", ["mistral", "phi3", "qwen2", "gemma2"])
def test_sequences_shorter_and_longer_than_the_window_equal_transformers(family, sequence_length):
    overrides = {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}
    config = tiny_config(family, **overrides | {"sliding_window": 6})
    model, templates = _templates(config, "fp64")
    assert 6 in {model.block(block).window for block in model.layers}
    blocks = random_blocks(model, "fp64")
    tokens, _ = random_batch(model, rows=2, sequence_length=sequence_length)
    hidden = templates.embed(blocks[0], tokens)
    for block in model.layers:
        hidden, _ = templates.forward(block, blocks[block], hidden, "input")
    expected = whole_model(config, model, blocks).model(input_ids=tokens, use_cache=False).last_hidden_state
    normed = torch.func.functional_call(
        templates.final_norm, {"weight": tensor_views(model.block(model.head), blocks[-1])["model.norm.weight"]}, hidden
    )
    tolerance = 1e-5 if family == "gemma2" else 1e-12
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)


def test_dropout_is_refused_by_key():
    with pytest.raises(InputError, match=r"attention_dropout is 0\.1"):
        _templates(tiny_config("qwen2", attention_dropout=0.1))


def test_eager_layers_refuse_budgets_by_name():
    templates, flat, hidden, _ = _layer_case()
    with pytest.raises(UnsupportedChoice, match="budget_50"):
        templates.forward(1, flat, hidden, "budget_50")


def test_templates_hold_no_parameters():
    _, templates = _templates(tiny_config("llama"))
    modules = [*templates._layers.values(), templates.final_norm]
    assert len(modules) == 2
    for module in modules:
        assert all(parameter.is_meta for parameter in module.parameters())


class _Operations(TorchDispatchMode):
    """Records the names of all operations, the backward's included."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.add(function._schema.name)
        return function(*arguments, **(keywords or {}))


def test_hot_functions_never_wait_for_the_device():
    """None of the operations whose result or size the host must know."""
    templates, flat, hidden, grad_output = _layer_case()
    accumulator = torch.empty(templates.model.block(0).num_elements)
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64)
    with _Operations() as operations:
        for level in ("keep", "input"):
            _forward_backward(templates, flat, hidden, grad_output, level)
        templates.embed_backward(tokens, grad_output, accumulator, first=True)
    assert "aten::mm" in operations.names
    assert not operations.names & WAITING_OPERATIONS


def test_deterministic_kernels_are_demanded_and_not_only_preferred(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    filling = torch.utils.deterministic.fill_uninitialized_memory
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filling


def test_unchecked_index_put_adds_in_order():
    """The private operation behind the embedding's gradient on CUDA still exists and means the same."""
    table, indices = torch.zeros(5, 4), torch.tensor([1, 3, 1, 1])
    rows = torch.randn(4, 4)
    expected = table.index_add(0, indices, rows)
    torch._index_put_impl_(table, (indices,), rows, accumulate=True, unsafe=True)
    assert torch.equal(table, expected)
