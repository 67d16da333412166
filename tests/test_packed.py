"""Packed rows: documents in one row do not see each other, and train as if each had a row to itself."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import TINY_FAMILIES, blocks_of, random_blocks, tiny_config, whole_model
from torch import Tensor

from executor.attention import attention_tensors, choose_attention, document_bound
from executor.capped_attention import capped_attention
from executor.data.dataset import Batch
from executor.layer import Documents, LayerTemplates
from simulator.build import build
from simulator.check import check
from simulator.model import ModelSpec, model_spec
from simulator.placement import batch_bytes, micro_batch_bytes
from simulator.policy import Workload, uniform_policy
from simulator.schema import identity_hash
from tests.tiny import make_trainer, master_weights, random_weights, run_steps, state_bits

LENGTH = 20
# Rows as lengths of documents; what is left of a row is padding.
ROWS = ((20,), (7, 9, 4), (1, 12, 2), (3, 3, 3, 11))


@dataclass(frozen=True)
class Packed:
    """Rows of documents, and the documents alone."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: list[Tensor]

    @property
    def num_targets(self) -> int:
        return int((self.labels >= 0).sum())


def packed_rows(rows: tuple[tuple[int, ...], ...] = ROWS, *, seed: int = 0) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    labels, positions, documents = torch.full_like(tokens, -100), torch.zeros_like(tokens), []
    for row, lengths in enumerate(rows):
        begin = 0
        for length in lengths:
            document = torch.randint(1, 61, (length,), generator=generator)
            documents.append(document)
            tokens[row, begin : begin + length] = document
            labels[row, begin : begin + length - 1] = document[1:]
            positions[row, begin : begin + length] = torch.arange(length)
            begin += length
        positions[row, begin:] = torch.arange(LENGTH - begin)
    return Packed(tokens, labels, positions, documents)


def templates_of(
    config: dict[str, Any], precision: Any = "fp64", **choices: Any
) -> tuple[ModelSpec, LayerTemplates, list[Tensor]]:
    model = model_spec(config)
    return model, LayerTemplates(config, model, precision=precision, **choices), random_blocks(model, precision)


def last_hidden(templates: LayerTemplates, blocks: list[Tensor], tokens: Tensor, documents: Documents | None) -> Tensor:
    hidden = templates.embed(blocks[0], tokens, documents)
    for block in templates.model.layers:
        hidden, _ = templates.forward(block, blocks[block], hidden, "input", documents)
    return hidden


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_document_is_unchanged_by_the_others_in_its_row(family: str) -> None:
    _, templates, blocks = templates_of(tiny_config(family), packed=True)
    packed, other = packed_rows(((8, 12),)), packed_rows(((8, 12),), seed=1)
    documents = templates.documents(packed.positions, bound=8)
    mixed = torch.cat([other.tokens[:, :8], packed.tokens[:, 8:]], dim=1)
    before = last_hidden(templates, blocks, packed.tokens, documents)
    after = last_hidden(templates, blocks, mixed, documents)
    assert torch.equal(before[:, 8:], after[:, 8:])
    assert not torch.allclose(before[:, :8], after[:, :8])
    # Nor by its place in the row: alone in a row it comes out the same.
    alone = packed_rows(((12,),))
    alone.tokens[0, :12] = packed.tokens[0, 8:]
    single = last_hidden(templates, blocks, alone.tokens, templates.documents(alone.positions, bound=8))
    tolerance = 1e-5 if family.startswith("gemma") else 1e-11  # Gemma's norms compute in fp32
    torch.testing.assert_close(before[0, 8:], single[0, :12], rtol=tolerance, atol=tolerance)


# One compiled family for each way of attending and of positions; by default one layer, capped and within a window.
_COMPILED = [
    pytest.param("gemma2", 1, True),
    *(pytest.param(family, 2, True, marks=pytest.mark.slow) for family in ("gemma2", "llama", "gpt2")),
]


@pytest.mark.parametrize(
    ("family", "layers", "compiled"), [*((family, 2, False) for family in TINY_FAMILIES), *_COMPILED]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's compiler
def test_packed_rows_train_as_transformers_trains_the_documents_alone(family: str, layers: int, compiled: bool) -> None:
    """Loss and gradient norm of a step, and every updated weight, against autograd over one document at a time."""
    config = tiny_config(family, num_hidden_layers=layers)
    model, packed = model_spec(config), packed_rows()
    weights = random_weights(config, torch.float32)
    whole = whole_model(config, model, blocks_of(model, weights))
    losses = []
    for document in packed.documents:
        logits = whole(input_ids=document[None, :-1]).logits[0] if len(document) > 1 else torch.zeros(0, 61)
        losses.append(torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum"))
    expected = torch.stack(losses).sum() / packed.num_targets
    expected.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in whole.parameters()]).norm()

    work = Workload(
        sequence_length=LENGTH, tokens_per_step=len(ROWS) * LENGTH, precision="fp32", packed=True, compiled=compiled
    )
    batch = Batch(packed.tokens, packed.labels, packed.num_targets, LENGTH, positions=packed.positions)
    bits = None
    settings: list[tuple[tuple[int, ...], Any, Any]] = [((1, 1), "keep", "device"), ((2,), "input", "host")]
    for groups, level, home in settings[-1:] if compiled else settings:
        policy = uniform_policy(
            model, work, micro_batch_rows=2, groups=groups, save_level=level, weights=home, optimizer=home,
            head_chunk_tokens=10,
        )  # fmt: skip
        trainer = make_trainer(config, work, policy, weights, max_grad_norm=1e9)
        (result,) = run_steps(trainer, [batch])
        found = state_bits(trainer)
        trained = master_weights(trainer)
        trainer.close()
        assert result.loss == pytest.approx(expected.item(), rel=1e-5)
        assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
        assert any(not torch.equal(trained[name], weights[name]) for name in weights)
        assert bits is None or all(torch.equal(a, b) for a, b in zip(found, bits, strict=True))
        bits = found


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_gradient_is_that_of_the_documents_alone(family: str) -> None:
    """In fp64, through both save levels: of every tensor of every block below the head, and of the embedding."""
    config = tiny_config(family)
    model, templates, blocks = templates_of(config, packed=True)
    _, unpacked, _ = templates_of(config)
    packed = packed_rows()
    upstream = torch.randn(len(ROWS), LENGTH, model.hidden_size, dtype=torch.float64)
    upstream[packed.labels < 0] = 0.0  # padding has no loss

    def gradients(
        used: LayerTemplates, tokens: Tensor, grad: Tensor, documents: Documents | None, level: Any
    ) -> list[Tensor]:
        hidden, kept = used.embed(blocks[0], tokens, documents), []
        for block in model.layers:
            hidden, saved = used.forward(block, blocks[block], hidden, level, documents)
            kept.append(saved)
        found: list[Tensor] = []
        for block in reversed(model.layers):
            grad, tensors = used.backward(block, blocks[block], kept.pop(), grad, documents=documents)
            found += tensors
        embedding = torch.full((model.block(0).num_elements,), float("nan"), dtype=torch.float64)
        used.embed_backward(tokens, grad, embedding, documents, first=True)
        return [*found, embedding]

    sums: list[Tensor] | None = None
    for row, lengths in enumerate(ROWS):
        begin = 0
        for length in lengths:
            part = slice(begin, begin + length)
            alone = gradients(unpacked, packed.tokens[row : row + 1, part], upstream[row : row + 1, part], None, "keep")
            sums = alone if sums is None else [total + one for total, one in zip(sums, alone, strict=True)]
            begin += length
    assert sums is not None
    documents = templates.documents(packed.positions, bound=16)
    tolerance = 1e-5 if family.startswith("gemma") else 1e-11
    for level in ("keep", "input"):
        for found, expected in zip(gradients(templates, packed.tokens, upstream, documents, level), sums, strict=True):
            assert (found - expected).norm() <= tolerance * expected.norm().clamp(min=1e-3)


def naive_capped(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float, cap: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = cap * torch.tanh(query @ key.transpose(2, 3) * scaling / cap)
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("chunk_elements", [1, 400, 2**25])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_capped_attention_equals_autograd_over_all_scores(
    packed: bool, window: int | None, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.capped_attention.CAPPED_CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    at = torch.arange(LENGTH)
    starts = at - packed_rows(ROWS[1:3]).positions if packed else None
    allowed = (at[None, :] <= at[:, None])[None]
    if window is not None:
        allowed = allowed & (at[:, None] - at[None, :] < window)
    if starts is not None:
        allowed = allowed & (at[None, None, :] >= starts[:, :, None])
    grad = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    expected = naive_capped(*inputs, allowed[:, None], 0.7, 1.5)
    expected_gradients = torch.autograd.grad(expected, inputs, grad)
    output, _ = capped_attention(*inputs, starts, 0.7, 1.5, window)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(torch.autograd.grad(output, inputs, grad), expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_capped_attention_is_a_well_formed_operation() -> None:
    shapes = ((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    torch.library.opcheck(capped_attention, (*inputs, None, 0.5, 2.0, 3))


def boundaries(positions: Tensor, bound: int) -> list[int]:
    from executor.attention import Attention

    (found,) = attention_tensors(
        Attention("documents", None, True), positions=positions, sequence_length=positions.shape[1],
        rows=positions.shape[0], device=positions.device, bound=bound,
    )  # fmt: skip
    assert found.dtype == torch.int32
    return found.tolist()


def test_boundaries_are_where_documents_begin_and_the_rest_is_empty() -> None:
    positions = packed_rows(((7, 9, 4), (1, 12, 2))).positions
    starts = [0, 7, 16, 20, 21, 33, 35]
    assert boundaries(positions, 7) == [*starts, 40]
    assert boundaries(positions, 10) == [*starts, 40, 40, 40, 40]
    single = torch.zeros(2, 3, dtype=torch.int64)  # every token a document
    for bound in (6, 8):
        assert boundaries(single, bound) == [*range(6), *[6] * (bound - 5)]


def test_few_bounds_cover_every_number_of_documents() -> None:
    tokens = 16384
    bounds = {document_bound(found, tokens) for found in range(1, tokens + 1)}
    assert all(document_bound(found, tokens) >= found for found in range(1, tokens + 1))
    assert min(bounds) == 64
    assert len(bounds) <= 9
    assert document_bound(3, 32) == 8


@pytest.mark.parametrize("window", [None, 4])
def test_the_mask_is_the_rule_written_out(window: int | None) -> None:
    packed = packed_rows()
    attention = choose_attention(
        window=window, capped=False, packed=True, sequence_length=LENGTH, head_dim=8, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    (mask,) = attention_tensors(
        attention,
        positions=packed.positions,
        sequence_length=LENGTH,
        rows=len(ROWS),
        device=torch.device("cpu"),
        bound=8,
    )
    for row, lengths in enumerate(ROWS):
        ends = torch.tensor([*lengths, LENGTH - sum(lengths)]).cumsum(0)
        for query in range(LENGTH):
            for key in range(LENGTH):
                same = int((ends <= query).sum()) == int((ends <= key).sum())
                near = window is None or query - key < window
                assert bool(mask[row, 0, query, key]) == (same and key <= query and near)


def test_rows_of_one_document_without_windows_take_no_mask() -> None:
    _, templates, blocks = templates_of(tiny_config("llama"))
    hidden = templates.embed(blocks[0], torch.ones(2, LENGTH, dtype=torch.int64))
    assert len(templates._context(1, hidden, None)) == 2  # rotary tables alone
    mistral = tiny_config("mistral", sliding_window=LENGTH)
    _, templates, _ = templates_of(mistral)
    assert len(templates._context(1, hidden, None)) == 2


def test_packing_adds_positions_to_batches_and_readers_of_them_to_programs() -> None:
    model = model_spec(tiny_config("mistral"))
    settings: dict[str, Any] = {"sequence_length": 16, "tokens_per_step": 64, "precision": "fp32"}
    plain, packed = Workload(**settings), Workload(**settings, packed=True)
    assert "packed" not in plain.model_dump(mode="json")
    assert identity_hash(plain) != identity_hash(packed)
    assert Workload.model_validate(packed.model_dump(mode="json")) == packed
    assert batch_bytes(4, packed=True) == 4 * 24 + 8
    # Two tables of rotary positions in fp32 and a mask, for 2 rows of 16 tokens.
    assert micro_batch_bytes(model, packed, 2) == 32 * 24 + 8 + 2 * 32 * model.head_dim * 4 + 2 * 16 * 16
    programs = {}
    for work in (plain, packed):
        policy = uniform_policy(model, work, micro_batch_rows=2, groups=(1, 1))
        programs[work.packed] = build(model, work, policy)
        check(programs[work.packed])
    for operation in programs[True].steady:
        reads = {access.buffer for access in operation.reads}
        if operation.block in model.layers and operation.micro_batch >= 0:
            assert f"batch.{operation.micro_batch}" in reads
    names = [[operation.name for operation in programs[key].steady] for key in (False, True)]
    assert names[0] == names[1]


def test_without_positions_a_packed_row_is_one_document() -> None:
    config, packed = tiny_config("qwen2"), packed_rows(((20,), (20,)))
    weights = random_weights(config, torch.float32)
    losses = []
    for is_packed in (False, True):
        work = Workload(sequence_length=LENGTH, tokens_per_step=2 * LENGTH, precision="fp32", packed=is_packed)
        policy = uniform_policy(model_spec(config), work, micro_batch_rows=1, groups=(2,))
        trainer = make_trainer(config, work, policy, weights)
        (result,) = run_steps(trainer, [Batch(packed.tokens, packed.labels, packed.num_targets, 2 * LENGTH)])
        trainer.close()
        losses.append(result.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
