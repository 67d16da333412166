"""Layer templates: transformers' own decoder layers without weights, called with those of any block.

A block keeps its weights in one flat tensor of compute dtype; a gradient accumulator has the same layout in fp32 (or
fp64). One template serves all blocks of a kind, through torch.func.functional_call. Rows are padded on the right and
padding has no labels, so causal attention needs no mask: no position that counts sees padding. Packed rows hold several
documents: rotary positions restart, and attention stays within a document.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from executor.attention import (
    Attention,
    attention_tensors,
    choose_attention,
    document_bound,
    register_attention,
)
from executor.compiled import compile_layer
from executor.saved import SavedLayer, SavedTensors
from simulator.errors import UnsupportedChoice
from simulator.families import FAMILIES
from simulator.formats import Precision
from simulator.model import BlockSpec, ModelSpec, transformers_config
from simulator.policy import EAGER_SAVE_LEVELS, SAVE_LEVELS, SaveLevel

COMPUTE_DTYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
ACCUMULATOR_DTYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# Tokens whose embedding gradient is widened to the accumulator's dtype at a time: bounds the copy, not the result.
_EMBEDDING_CHUNK_TOKENS = 8192


def tensor_views(block: BlockSpec, flat: Tensor) -> dict[str, Tensor]:
    """The block's tensors as views of `flat`, shape [block.num_elements], in the block's order."""
    assert flat.is_contiguous()
    assert flat.shape == (block.num_elements,)
    start = flat.storage_offset()
    # One call a tensor, half the time of a slice and its view: this runs in every pass of a layer.
    return {
        tensor.name: flat.as_strided(tensor.shape, tensor.stride, start + tensor.offset) for tensor in block.tensors
    }


def zero_padding(block: BlockSpec, flat: Tensor) -> None:
    """Zero the elements of `flat` that belong to no tensor, so that sums over the whole block count tensors only."""
    end = 0
    for tensor in block.tensors:
        flat[end : tensor.offset].zero_()
        end = tensor.offset + tensor.num_elements
    flat[end:].zero_()


def use_deterministic_kernels() -> None:
    """Make every kernel of this process repeat itself bit for bit; call once, before the first CUDA operation.

    On CUDA this selects attention's backward without atomics (the plain one sums its query gradient in any order) and
    refuses operations that cannot repeat themselves, among them matrix products with another workspace than cuBLAS's
    documented one, which is what torch gives it on Hopper anyway.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory guards against reads of uninitialised elements, at the cost of a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def meta_model(config: dict[str, Any]) -> Any:
    """transformers' whole model on the meta device: modules and shapes, no parameter memory.

    Raises InputError when the config asks for dropout, which no layer here applies.
    """
    from transformers import AutoModelForCausalLM

    hf_config = transformers_config(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config, attn_implementation=register_attention()).eval()


@dataclass(frozen=True)
class Documents:
    """What layers know of the documents in one packed micro-batch: made once, read by all its layers."""

    positions: Tensor  # int64 [rows, sequence], each token's place in its document
    by_kind: Mapping[int, tuple[Tensor, ...]]  # rotary tables and attention's own tensors, by kind of layer


class LayerTemplates:
    """The embedding and the decoder layers of a model, as functions of flat weights.

    Blocks are named by their index: 0 is the embedding, 1 to num_layers are the layers. `compiled` runs the layers
    through torch.compile, with every save level; eager layers know `keep` and `input`. Eager levels agree bit for bit
    and so, on the CPU, do compiled ones; compiled and eager differ in rounding. In `packed` rows every call is given
    the micro-batch's Documents. Holds rotary tables and the masks of windows only.
    """

    def __init__(
        self,
        config: dict[str, Any],
        model: ModelSpec,
        *,
        precision: Precision,
        compiled: bool = False,
        packed: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model
        self.dtype = COMPUTE_DTYPES[precision]
        self.accumulator_dtype = ACCUMULATOR_DTYPES[precision]
        self.compiled, self.packed = compiled, packed
        self.device = torch.device(device)
        meta = meta_model(config)
        self._family = FAMILIES[model.family]
        body = getattr(meta, self._family.body)
        self.final_norm: nn.Module = getattr(body, self._family.norm)
        self.logit_cap: float | None = getattr(meta.config, self._family.capped_logits or "_", None)
        self._capped_scores = getattr(meta.config, self._family.capped_scores or "_", None) is not None
        # As transformers scales: by a root rounded to fp32, then to the compute dtype.
        root = torch.tensor(model.hidden_size**0.5, dtype=torch.float32).to(self.dtype).item()
        self._embedding_scale = root if self._family.scaled_embedding else 1.0
        self._config = meta.config
        self._rotary_type: Any = type(getattr(body, "rotary_emb", None))
        self._rotary_tables: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        self._first_of_kind = {model.kind_of_block[block]: block for block in reversed(model.layers)}
        self._layers = {
            kind: getattr(body, self._family.layers)[block - 1] for kind, block in self._first_of_kind.items()
        }
        self._attention: dict[tuple[int, int], Attention] = {}
        self._constants: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._functions: dict[tuple[int, Attention], Callable[..., Tensor]] = {}
        self._compiled: dict[tuple[int, Attention, SaveLevel], Callable[..., Tensor]] = {}

    def documents(self, positions: Tensor, *, bound: int) -> Documents:
        """What the layers of a packed micro-batch are given, from `positions` int64 [rows, sequence].

        A token's position is its place in its document; padding at a row's end is a document too. bound: at least the
        number of documents (executor.attention.document_bound).
        """
        assert self.packed
        rows, length = positions.shape
        by_kind: dict[int, tuple[Tensor, ...]] = {}
        made: dict[tuple[Attention, str], tuple[Tensor, ...]] = {}
        for kind, block in self._first_of_kind.items():
            attention, layer_type = self._attention_of(kind, length), self._rotary_key(block)
            if (attention, layer_type) not in made:
                own = attention_tensors(
                    attention, positions=positions, sequence_length=length, rows=rows, device=self.device, bound=bound
                )
                made[attention, layer_type] = (*(table[0][positions] for table in self._rotary(block, length)), *own)
            by_kind[kind] = made[attention, layer_type]
        return Documents(positions, by_kind)

    def embed(self, flat: Tensor, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        """The first layer's input, [rows, sequence, hidden size], of `tokens` [rows, sequence] int64."""
        views = tensor_views(self.model.block(0), flat)
        with torch.no_grad():
            hidden = nn.functional.embedding(tokens, views[self.model.embedding.name])
            if self._embedding_scale != 1.0:
                hidden *= self._embedding_scale
            if self.model.positions is not None:
                hidden += nn.functional.embedding(self._positions(tokens, documents), views[self.model.positions.name])
            return hidden

    def embed_backward(
        self,
        tokens: Tensor,
        grad_hidden: Tensor,
        accumulator: Tensor,
        documents: Documents | None = None,
        *,
        first: bool,
    ) -> None:
        """Add the gradient of the embedding's rows to `accumulator` (flat, accumulator dtype), or write if `first`.

        Each row's contributions are added in the order of the tokens, in the accumulator's precision, without atomics:
        on CUDA by sorting the tokens (stable) and summing each run of equal ones, on the CPU row after row. Every
        token counts, the config's pad token too: where it only pads, its gradient is zero already.
        """
        with torch.no_grad():
            if first:
                accumulator.zero_()
            views = tensor_views(self.model.block(0), accumulator)
            table = views[self.model.embedding.name]
            indices, rows = tokens.reshape(-1), grad_hidden.reshape(-1, self.model.hidden_size)
            positions = None
            if self.model.positions is not None:
                positions = self._positions(tokens, documents).expand(tokens.shape).reshape(-1)
            for start in range(0, indices.numel(), _EMBEDDING_CHUNK_TOKENS):
                chunk = slice(start, start + _EMBEDDING_CHUNK_TOKENS)
                part = rows[chunk].to(table.dtype)
                scaled = part if self._embedding_scale == 1.0 else part * self._embedding_scale
                _add_rows(table, indices[chunk], scaled)
                if self.model.positions is not None and positions is not None:
                    _add_rows(views[self.model.positions.name], positions[chunk], part)

    def embed_backward_launches(self, num_tokens: int) -> int:
        """How many kernels `embed_backward` launches on CUDA for so many tokens, at most."""
        tables = 1 if self.model.positions is None else 2
        return 16 * tables * -(-num_tokens // _EMBEDDING_CHUNK_TOKENS)

    def forward(
        self, block: int, flat: Tensor, hidden: Tensor, level: SaveLevel, documents: Documents | None = None
    ) -> tuple[Tensor, SavedLayer]:
        """One layer's output, [rows, sequence, hidden size] like `hidden`, and what its backward needs.

        The output carries no graph. What is saved refers to `hidden` (which must not change until then) but not to
        the weights, which may move. Where no backward follows, drop it; with level `input` it may also be dropped and
        the backward given the layer's input. Raises UnsupportedChoice for a level that eager layers do not know.
        """
        self._check_level(level)
        if self.model.block(block).forward_only or (level == "input" and not self.compiled):
            with torch.no_grad():
                weights = tensor_views(self.model.block(block), flat).values()
                context = self._context(block, hidden, documents)
                output = self._function(block, hidden, level)(hidden, context, *weights)
            return output, SavedLayer(hidden)
        return self._forward_with_graph(block, flat, hidden, level, documents)

    def backward(
        self,
        block: int,
        flat: Tensor,
        kept: SavedLayer | Tensor,
        grad_output: Tensor,
        sums: Sequence[Tensor] = (),
        *,
        first: bool = False,
        documents: Documents | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of one layer: of its input, like `grad_output`, and of its tensors, in the block's order.

        None for a frozen tensor.

        `kept` is what the forward saved, which is used up, or the layer's input [rows, sequence, hidden size], from
        which the forward is run again at level `input` (compiled layers then compute the forward once more than
        needed). `flat` holds the weights that the forward saw, in any memory. With `sums` (one a tensor, in the
        block's order) a compiled layer adds gradients where it forms them, or writes them if `first`, and returns the
        sum in place of such a gradient.
        """
        if isinstance(kept, Tensor) or not kept.has_graph:
            hidden = kept if isinstance(kept, Tensor) else kept.take_hidden()
            _, kept = self._forward_with_graph(block, flat, hidden, "input", documents)
        return kept.backward(flat, grad_output, sums, first=first)

    def warm_up(self, block: int, flat: Tensor, *, rows: int, sequence_length: int, level: SaveLevel) -> None:
        """Compile a layer's forward and backward for one shape ahead of the first step (eager: checks it runs)."""
        hidden = torch.zeros(rows, sequence_length, self.model.hidden_size, dtype=self.dtype, device=self.device)
        documents = None
        if self.packed:
            positions = torch.arange(sequence_length, device=self.device).expand(rows, -1)
            documents = self.documents(positions, bound=document_bound(rows, rows * sequence_length))
        output, saved = self.forward(block, flat, hidden, level, documents)
        self.backward(block, flat, saved, output, documents=documents)

    def _forward_with_graph(
        self, block: int, flat: Tensor, hidden: Tensor, level: SaveLevel, documents: Documents | None
    ) -> tuple[Tensor, SavedLayer]:
        context = self._context(block, hidden, documents)
        leaf, spec = hidden.detach().requires_grad_(), self.model.block(block)
        weights = [
            view.detach().requires_grad_(not tensor.frozen)
            for tensor, view in zip(spec.tensors, tensor_views(spec, flat).values(), strict=True)
        ]
        tensors = SavedTensors(flat, constants=context)
        with torch.enable_grad(), tensors.hooks():
            output = self._function(block, hidden, level)(leaf, context, *weights)
        return output.detach(), SavedLayer(leaf, output=output, weights=weights, tensors=tensors)

    def _function(self, block: int, hidden: Tensor, level: SaveLevel) -> Callable[..., Tensor]:
        kind = self.model.kind_of_block[block]
        attention = self._attention_of(kind, hidden.shape[1])
        if (kind, attention) not in self._functions:
            num_tables = 0 if self._family.rotary == "none" else 2
            self._functions[kind, attention] = _layer_function(
                self._layers[kind], self.model.block(block), attention, num_tables
            )
        function = self._functions[kind, attention]
        if not self.compiled:
            return function
        if (kind, attention, level) not in self._compiled:
            name = f"layer_kind_{kind}_{level}"
            self._compiled[kind, attention, level] = compile_layer(function, budget=SAVE_LEVELS[level], name=name)
        return self._compiled[kind, attention, level]

    def _check_level(self, level: SaveLevel) -> None:
        if not self.compiled and level not in EAGER_SAVE_LEVELS:
            raise UnsupportedChoice(f"save level {level!r} needs compiled layers; eager ones know {EAGER_SAVE_LEVELS}")

    def _attention_of(self, kind: int, sequence_length: int) -> Attention:
        if (kind, sequence_length) not in self._attention:
            self._attention[kind, sequence_length] = choose_attention(
                window=self.model.kinds[kind].window,
                capped=self._capped_scores,
                packed=self.packed,
                sequence_length=sequence_length,
                head_dim=self.model.head_dim,
                dtype=self.dtype,
                device=self.device,
            )
        return self._attention[kind, sequence_length]

    def _context(self, block: int, hidden: Tensor, documents: Documents | None) -> tuple[Tensor, ...]:
        """What a layer reads beside its input and its weights: rotary tables and attention's own tensors."""
        assert (documents is not None) == self.packed, "packed rows come with their documents, others without"
        kind, (rows, length) = self.model.kind_of_block[block], hidden.shape[:2]
        if documents is not None:
            return documents.by_kind[kind]
        attention = self._attention_of(kind, length)
        if (kind, rows, length) not in self._constants:
            self._constants[kind, rows, length] = attention_tensors(
                attention, positions=None, sequence_length=length, rows=rows, device=self.device,
                bound=document_bound(rows, rows * length),
            )  # fmt: skip
        return (*self._rotary(block, length), *self._constants[kind, rows, length])

    def _positions(self, tokens: Tensor, documents: Documents | None) -> Tensor:
        if documents is not None:
            return documents.positions
        return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)

    def _rotary_key(self, block: int) -> str:
        """The layer type that a block's rotary tables are for, "" where all layers share one."""
        if self._family.rotary != "a table per layer type":
            return ""
        return self.model.block(block).variant

    def _rotary(self, block: int, sequence_length: int) -> tuple[Tensor, ...]:
        """Cosine and sine tables, [1, sequence, rotated dimensions] each, from transformers' rotary module."""
        if self._family.rotary == "none":
            return ()
        layer_type = self._rotary_key(block)
        if (layer_type, sequence_length) not in self._rotary_tables:
            # A module of its own for each length: some rotary variants remember the longest sequence they saw.
            rotary = self._rotary_type(config=self._config).to(self.device)
            positions = torch.arange(sequence_length, device=self.device).unsqueeze(0)
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            with torch.no_grad():
                tables = rotary(like, positions, layer_type) if layer_type else rotary(like, positions)
            self._rotary_tables[layer_type, sequence_length] = tables
        return self._rotary_tables[layer_type, sequence_length]


def _layer_function(
    template: nn.Module, block: BlockSpec, attention: Attention, num_tables: int
) -> Callable[..., Tensor]:
    """A layer as a function of its input, of `num_tables` rotary tables with what attention reads, and of its weights.

    executor/weight_gradients.py knows a compiled layer's weights by the name of its last argument.
    """
    names = tuple(tensor.name for tensor in block.tensors)

    def layer(hidden: Tensor, context: tuple[Tensor, ...], *weights: Tensor) -> Tensor:
        keywords = attention.keywords(context[num_tables:])
        if num_tables:
            keywords["position_embeddings"] = context[:num_tables]
        output: Tensor = functional_call(template, dict(zip(names, weights, strict=True)), (hidden,), keywords)
        return output

    return layer


def _add_rows(table: Tensor, indices: Tensor, rows: Tensor) -> None:
    if table.device.type == "cpu":
        table.index_add_(0, indices, rows)
    else:
        # The kernel that indexing's own backward uses: sorts, then adds each run in order. `unsafe` leaves out the
        # range check, which would wait for the device; the forward's lookup has checked.
        torch._index_put_impl_(table, (indices,), rows, accumulate=True, unsafe=True)
