"""The chunked head against cross-entropy over all logits, formed the plain way."""

import pytest
import torch
from tiny_models import WAITING_OPERATIONS, random_blocks, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from executor.head import HeadTemplate
from executor.layer import LayerTemplates, tensor_views
from simulator.model import model_spec


def _case(precision="fp64", *, tied=False, rows=3, sequence_length=8, spread=1.0):
    config = tiny_config("qwen2", tied=tied)
    model = model_spec(config)
    head = HeadTemplate(LayerTemplates(config, model, precision=precision).final_norm, model, precision=precision)
    blocks = random_blocks(model, precision)
    generator = torch.Generator().manual_seed(2)
    hidden = (spread * torch.randn(rows, sequence_length, model.hidden_size, generator=generator)).to(head.dtype)
    labels = torch.randint(model.vocab_size, (rows, sequence_length), generator=generator)
    labels[0, :3], labels[-1, 2:] = -100, -100
    return model, head, blocks, hidden, labels


def _run(model, head, blocks, hidden, labels, *, chunk_tokens=5, loss_scale=0.25, first=True, sums=None, **choices):
    tied = model.tied_embeddings
    if sums is None:
        sums = [torch.full((model.block(i).num_elements,), float("nan"), dtype=head.accumulator_dtype) for i in (0, -1)]
    loss, grad = head.loss_and_gradients(
        blocks[-1],
        blocks[0] if tied else None,
        hidden,
        labels,
        loss_scale,
        chunk_tokens=chunk_tokens,
        head_accumulator=sums[1],
        embedding_accumulator=sums[0] if tied else None,
        first=first,
        **choices,
    )
    return loss, grad, sums


def _projection(model, tensors):
    if model.tied_embeddings:
        return tensor_views(model.block(0), tensors[0])["embed_tokens.weight"]
    return tensor_views(model.block(model.head), tensors[-1])["lm_head.weight"]


def _expected(model, blocks, hidden, labels, loss_scale, eps=1e-6):
    """Loss sum and gradients in fp64, from the formulas: RMS norm, logits, cross-entropy."""
    hidden = hidden.double().requires_grad_()
    norm = tensor_views(model.block(model.head), blocks[-1])["model.norm.weight"].double().requires_grad_()
    projection = _projection(model, blocks).double().requires_grad_()
    normed = norm * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    logits = (normed @ projection.t()).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return loss, torch.autograd.grad(loss * loss_scale, (hidden, norm, projection))


def _error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


# fp64 runs keep transformers' norm, which works in fp32 inside: hence not 1e-12 against the formulas. In bf16 a
# product rounds to 2^-9.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 5e-7), ("fp32", 2e-6), ("bf16", 1e-2)])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_formulas(precision, tolerance, tied):
    model, head, blocks, hidden, labels = _case(precision, tied=tied)
    loss, grad, sums = _run(model, head, blocks, hidden, labels)
    expected_loss, (grad_hidden, grad_norm, grad_projection) = _expected(model, blocks, hidden, labels, 0.25)
    assert abs(loss - expected_loss) <= tolerance * expected_loss
    assert loss.dtype == head.accumulator_dtype
    assert grad.dtype == head.dtype
    assert _error(grad, grad_hidden) <= tolerance
    assert _error(_projection(model, sums), grad_projection) <= tolerance
    assert _error(tensor_views(model.block(model.head), sums[1])["model.norm.weight"], grad_norm) <= tolerance
    assert not sums[1].isnan().any()
    assert tied == (not sums[0].isnan().any())


def test_chunks_change_sums_by_rounding_only():
    model, head, blocks, hidden, labels = _case()
    loss, grad, sums = _run(model, head, blocks, hidden, labels, chunk_tokens=1000)
    for chunk_tokens in (1, 7, 24):
        other_loss, other_grad, other_sums = _run(model, head, blocks, hidden, labels, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(other_loss, loss, rtol=1e-14, atol=0)
        assert _error(other_grad, grad) < 1e-7
        assert _error(other_sums[1], sums[1]) < 1e-7


def test_later_micro_batches_add_and_weights_are_by_tokens():
    model, head, blocks, hidden, labels = _case(rows=4)
    loss, grad, sums = _run(model, head, blocks, hidden, labels, chunk_tokens=8)
    loss_a, grad_a, parts = _run(model, head, blocks, hidden[:1], labels[:1], chunk_tokens=8)
    loss_b, grad_b, parts = _run(model, head, blocks, hidden[1:], labels[1:], chunk_tokens=8, first=False, sums=parts)
    torch.testing.assert_close(loss_a + loss_b, loss, rtol=1e-14, atol=0)
    assert torch.equal(torch.cat([grad_a, grad_b]), grad)
    # The same chunks in the same order: the same bits, however rows are cut into calls.
    assert torch.equal(parts[1], sums[1])


def test_slices_within_a_chunk_do_not_change_results(monkeypatch):
    model, head, blocks, hidden, labels = _case("fp32")
    loss, grad, sums = _run(model, head, blocks, hidden, labels, chunk_tokens=24)
    monkeypatch.setattr("executor.head._SLICE_ELEMENTS", 200)
    sliced_loss, sliced_grad, sliced_sums = _run(model, head, blocks, hidden, labels, chunk_tokens=24)
    assert torch.equal(sliced_loss, loss)
    assert torch.equal(sliced_grad, grad)
    torch.testing.assert_close(sliced_sums[1], sums[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_evaluation_gives_the_training_loss(tied):
    model, head, blocks, hidden, labels = _case("bf16", tied=tied)
    loss, _, _ = _run(model, head, blocks, hidden, labels)
    assert head.loss(blocks[-1], blocks[0] if tied else None, hidden, labels, chunk_tokens=5) == loss


def test_the_gradient_may_overwrite_the_hidden_states():
    model, head, blocks, hidden, labels = _case("fp32")
    _, grad, sums = _run(model, head, blocks, hidden, labels)
    place = hidden.clone()
    _, grad_in_place, sums_in_place = _run(model, head, blocks, place, labels, grad_hidden=place)
    assert grad_in_place is place
    assert torch.equal(place, grad)
    assert torch.equal(sums_in_place[1], sums[1])


def test_loss_scale_may_be_a_tensor():
    model, head, blocks, hidden, labels = _case("bf16")
    _, grad, sums = _run(model, head, blocks, hidden, labels, loss_scale=0.3)
    _, other_grad, other_sums = _run(model, head, blocks, hidden, labels, loss_scale=torch.tensor(0.3))
    assert torch.equal(other_grad, grad)
    assert torch.equal(other_sums[1], sums[1])


def test_tokens_without_a_label_have_no_loss_and_no_gradient():
    model, head, blocks, hidden, labels = _case()
    loss, grad, sums = _run(model, head, blocks, hidden, torch.full_like(labels, -100))
    assert loss == 0
    assert not grad.any()
    assert not sums[1].any()


def test_loss_near_certainty_keeps_its_digits():
    """bf16 logits, p close to 1: the loss and its gradient come from log p in fp32, not from p rounded to bf16."""
    model, head, blocks, hidden, labels = _case("bf16", rows=1, sequence_length=1)
    projection = _projection(model, blocks)
    projection.zero_()
    projection[5] = 0.25  # the norm's output has unit scale: a logit of about 0.25 * sum
    hidden.fill_(1.0)
    norm = tensor_views(model.block(model.head), blocks[-1])["model.norm.weight"]
    norm.fill_(1.0)
    labels.fill_(5)
    loss, _, sums = _run(model, head, blocks, hidden, labels, loss_scale=1.0)
    logit = 0.25 * model.hidden_size
    missing = (model.vocab_size - 1) * torch.tensor(-logit, dtype=torch.float64).exp()
    torch.testing.assert_close(loss.double(), torch.log1p(missing), rtol=1e-5, atol=0)
    gradient = _projection(model, sums)[5, 0].double()
    torch.testing.assert_close(gradient, -missing / (1 + missing), rtol=1e-2, atol=0)


class _Operations(TorchDispatchMode):
    """Records the names of all operations and the elements of the largest tensor they make."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.add(function._schema.name)
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits_and_nothing_waits():
    model, head, blocks, hidden, labels = _case("fp32", rows=64)
    sums = [torch.empty(blocks[index].numel()) for index in (0, -1)]
    chunk_tokens = 64
    allowed = max(chunk_tokens * model.vocab_size, hidden.numel())
    with _Operations() as operations:
        _run(model, head, blocks, hidden, labels, chunk_tokens=chunk_tokens, sums=sums)
        head.loss(blocks[-1], None, hidden, labels, chunk_tokens=chunk_tokens)
    assert operations.largest <= allowed < hidden[..., 0].numel() * model.vocab_size
    assert not operations.names & WAITING_OPERATIONS
