"""Layer templates: transformers' own decoder layers without weights, called with those of any block.

A block keeps its weights in one flat tensor of compute dtype; a gradient accumulator has the same layout in fp32 (or
fp64). One template serves all blocks of a kind, through torch.func.functional_call. Rows are padded on the right and
padding has no labels, so causal attention needs no mask: no position that counts sees padding.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from executor.compiled import compile_layer
from executor.saved import SavedLayer, SavedTensors
from simulator.errors import InputError, UnsupportedChoice
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
    assert flat.dim() == 1
    assert flat.numel() == block.num_elements
    return {
        tensor.name: flat[tensor.offset : tensor.offset + tensor.num_elements].view(tensor.shape)
        for tensor in block.tensors
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
    for key, value in hf_config.to_dict().items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, int | float) and value:
            raise InputError(f"model config: {key} is {value}; dropout is not supported, set it to 0")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa").eval()


class LayerTemplates:
    """The embedding and the decoder layers of a model, as functions of flat weights.

    Blocks are named by their index: 0 is the embedding, 1 to num_layers are the layers. `compiled` runs the layers
    through torch.compile, with every save level; eager layers know `keep` and `input`. Eager levels agree bit for bit
    and so, on the CPU, do compiled ones; compiled and eager differ in rounding. Holds the rotary tables only.
    """

    def __init__(
        self,
        config: dict[str, Any],
        model: ModelSpec,
        *,
        precision: Precision,
        compiled: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model
        self.dtype = COMPUTE_DTYPES[precision]
        self.accumulator_dtype = ACCUMULATOR_DTYPES[precision]
        self.compiled = compiled
        self.device = torch.device(device)
        meta = meta_model(config)
        self.final_norm: nn.Module = meta.model.norm
        self._config = meta.config
        self._rotary_type = type(meta.model.rotary_emb)
        self._rotary_tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._functions: dict[int, Callable[..., Tensor]] = {}
        self._windows: dict[int, int | None] = {}
        for block in model.layers:
            kind = model.kind_of_block[block]
            if kind not in self._functions:
                self._functions[kind] = _layer_function(meta.model.layers[block - 1], model.block(block))
                self._windows[kind] = _attention_window(meta.config, model.block(block))
        self._compiled: dict[tuple[int, SaveLevel], Callable[..., Tensor]] = {}

    def embed(self, flat: Tensor, tokens: Tensor) -> Tensor:
        """The first layer's input, [rows, sequence, hidden size], of `tokens` [rows, sequence] int64."""
        with torch.no_grad():
            return nn.functional.embedding(tokens, tensor_views(self.model.block(0), flat)["embed_tokens.weight"])

    def embed_backward(self, tokens: Tensor, grad_hidden: Tensor, accumulator: Tensor, *, first: bool) -> None:
        """Add the gradient of the embedding's rows to `accumulator` (flat, accumulator dtype), or write if `first`.

        Each row's contributions are added in the order of the tokens, in the accumulator's precision, without atomics:
        on CUDA by sorting the tokens (stable) and summing each run of equal ones, on the CPU row after row. Every
        token counts, the config's pad token too: where it only pads, its gradient is zero already.
        """
        with torch.no_grad():
            if first:
                accumulator.zero_()
            table = tensor_views(self.model.block(0), accumulator)["embed_tokens.weight"]
            tokens, rows = tokens.reshape(-1), grad_hidden.reshape(-1, self.model.hidden_size)
            for start in range(0, tokens.numel(), _EMBEDDING_CHUNK_TOKENS):
                chunk = slice(start, start + _EMBEDDING_CHUNK_TOKENS)
                _add_rows(table, tokens[chunk], rows[chunk].to(table.dtype))

    def forward(self, block: int, flat: Tensor, hidden: Tensor, level: SaveLevel) -> tuple[Tensor, SavedLayer]:
        """One layer's output, [rows, sequence, hidden size] like `hidden`, and what its backward needs.

        The output carries no graph. What is saved refers to `hidden` (which must not change until then) but not to
        the weights, which may move. Where no backward follows, drop it; with level `input` it may also be dropped and
        the backward given the layer's input. Raises UnsupportedChoice for a level that eager layers do not know, or a
        sequence longer than the attention window.
        """
        self._check_level(level)
        if self.model.block(block).forward_only or (level == "input" and not self.compiled):
            with torch.no_grad():
                weights = tensor_views(self.model.block(block), flat).values()
                output = self._function(block, level)(hidden, *self._rotary(block, hidden.shape[1]), *weights)
            return output, SavedLayer(hidden)
        return self._forward_with_graph(block, flat, hidden, level)

    def backward(
        self,
        block: int,
        flat: Tensor,
        kept: SavedLayer | Tensor,
        grad_output: Tensor,
        sums: Sequence[Tensor] = (),
        *,
        first: bool = False,
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
            _, kept = self._forward_with_graph(block, flat, hidden, "input")
        return kept.backward(flat, grad_output, sums, first=first)

    def warm_up(self, block: int, flat: Tensor, *, rows: int, sequence_length: int, level: SaveLevel) -> None:
        """Compile a layer's forward and backward for one shape ahead of the first step (eager: checks it runs)."""
        hidden = torch.zeros(rows, sequence_length, self.model.hidden_size, dtype=self.dtype, device=self.device)
        output, saved = self.forward(block, flat, hidden, level)
        self.backward(block, flat, saved, output)

    def _forward_with_graph(
        self, block: int, flat: Tensor, hidden: Tensor, level: SaveLevel
    ) -> tuple[Tensor, SavedLayer]:
        tables = self._rotary(block, hidden.shape[1])
        leaf, spec = hidden.detach().requires_grad_(), self.model.block(block)
        weights = [
            view.detach().requires_grad_(not tensor.frozen)
            for tensor, view in zip(spec.tensors, tensor_views(spec, flat).values(), strict=True)
        ]
        tensors = SavedTensors(flat, constants=tables)
        with torch.enable_grad(), tensors.hooks():
            output = self._function(block, level)(leaf, *tables, *weights)
        return output.detach(), SavedLayer(leaf, output=output, weights=weights, tensors=tensors)

    def _function(self, block: int, level: SaveLevel) -> Callable[..., Tensor]:
        kind = self.model.kind_of_block[block]
        if not self.compiled:
            return self._functions[kind]
        if (kind, level) not in self._compiled:
            name = f"layer_kind_{kind}_{level}"
            self._compiled[kind, level] = compile_layer(self._functions[kind], budget=SAVE_LEVELS[level], name=name)
        return self._compiled[kind, level]

    def _check_level(self, level: SaveLevel) -> None:
        if not self.compiled and level not in EAGER_SAVE_LEVELS:
            raise UnsupportedChoice(f"save level {level!r} needs compiled layers; eager ones know {EAGER_SAVE_LEVELS}")

    def _rotary(self, block: int, sequence_length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables, [1, sequence, head_dim] each, from transformers' rotary module."""
        window = self._windows[self.model.kind_of_block[block]]
        if window is not None and sequence_length > window:
            raise UnsupportedChoice(
                f"sequence_length {sequence_length} is longer than the model's sliding_window {window}: attention in "
                f"a window is not built yet; use a sequence length of at most {window}"
            )
        if sequence_length not in self._rotary_tables:
            # A module of its own for each length: some rotary variants remember the longest sequence they saw.
            rotary = self._rotary_type(config=self._config).to(self.device)
            positions = torch.arange(sequence_length, device=self.device).unsqueeze(0)
            with torch.no_grad():
                cosine, sine = rotary(torch.empty(0, dtype=self.dtype, device=self.device), positions)
            self._rotary_tables[sequence_length] = (cosine, sine)
        return self._rotary_tables[sequence_length]


def _layer_function(template: nn.Module, block: BlockSpec) -> Callable[..., Tensor]:
    names = tuple(tensor.name for tensor in block.tensors)

    def layer(hidden: Tensor, cosine: Tensor, sine: Tensor, *weights: Tensor) -> Tensor:
        output: Tensor = functional_call(
            template,
            dict(zip(names, weights, strict=True)),
            (hidden,),
            {"position_embeddings": (cosine, sine)},
        )
        return output

    return layer


def _attention_window(config: Any, block: BlockSpec) -> int | None:
    """Tokens a position attends to, or None for all before it. Mistral's window has no layer types."""
    window = getattr(config, "sliding_window", None)
    if window is None or not (block.variant == "sliding_attention" or config.model_type == "mistral"):
        return None
    return int(window)


def _add_rows(table: Tensor, indices: Tensor, rows: Tensor) -> None:
    if table.device.type == "cpu":
        table.index_add_(0, indices, rows)
    else:
        # The kernel that indexing's own backward uses: sorts, then adds each run in order. `unsafe` leaves out the
        # range check, which would wait for the device; the forward's lookup has checked.
        torch._index_put_impl_(table, (indices,), rows, accumulate=True, unsafe=True)
