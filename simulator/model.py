"""ModelSpec: a decoder's blocks and tensors, read from a Hugging Face config by meta-device instantiation.

A block is the unit that streams: block 0 is the input embedding, blocks 1..L are the decoder layers, block L+1 is
the head (final norm and, unless tied, the output projection).
"""

import math
import textwrap
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

from simulator.errors import InputError, UnsupportedChoice
from simulator.families import FAMILIES, Family, require_plain, require_supported, variant_of, window_of
from simulator.formats import BLOCK_ALIGNMENT_ELEMENTS
from simulator.json_text import RepeatedKey, parse_json
from simulator.model_config import MOST_SIZE, require_known_functions, require_possible
from simulator.nearest import did_you_mean, nearest_path
from simulator.schema import Schema

BlockKind = Literal["embedding", "layer", "head"]

PROJECTION = "lm_head.weight"

Size = Annotated[int, pydantic.Field(ge=1, le=MOST_SIZE)]


class TensorSpec(Schema):
    """One parameter tensor: its name inside the block, its shape, its first element in the block."""

    name: str
    shape: tuple[Size, ...] = pydantic.Field(max_length=8)
    offset: int = pydantic.Field(ge=0, le=2**62)
    # Never updated; simulator/freezing.py sets it. Left out where it is not, so that hashes of models without frozen
    # tensors are what they were before there was freezing.
    frozen: bool = pydantic.Field(default=False, exclude_if=lambda frozen: not frozen)

    @cached_property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Elements from one index to the next, in each dimension: the tensor lies row by row."""
        return tuple(math.prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape)))


class BlockSpec(Schema):
    """Tensors that live in one contiguous block, matrices first, each aligned to 256 bytes.

    `variant` names what the block computes (for layers: the attention type): blocks with equal shapes and different
    variants are different blocks. `window` is how many tokens, itself included, a token attends to; None for all before
    it.
    """

    kind: BlockKind
    variant: str
    tensors: tuple[TensorSpec, ...] = pydantic.Field(min_length=1)
    # Left out where there is none, so that hashes of models without windows are what they were before windows.
    window: int | None = pydantic.Field(default=None, ge=1, exclude_if=lambda window: window is None)
    # Nothing in it or below it is trained, so no gradient passes through it.
    forward_only: bool = pydantic.Field(default=False, exclude_if=lambda forward_only: not forward_only)

    @cached_property
    def trained(self) -> bool:
        """Whether any of its tensors is: else the block has neither gradient nor optimizer state."""
        return not all(tensor.frozen for tensor in self.tensors)

    @cached_property
    def num_trained_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors if not tensor.frozen)

    @cached_property
    def trained_ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges of elements, padding behind each tensor included, that updates cover: none reaches a frozen tensor."""
        ranges: list[tuple[int, int]] = []
        for tensor in self.tensors:
            begin, end = tensor.offset, _aligned(tensor.offset + tensor.num_elements)
            if tensor.frozen:
                continue
            if ranges and ranges[-1][1] == begin:
                begin = ranges.pop()[0]
            ranges.append((begin, end))
        return tuple(ranges)

    @cached_property
    def num_trained_elements(self) -> int:
        """Elements that updates cover, padding included."""
        return sum(end - begin for begin, end in self.trained_ranges)

    @cached_property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @cached_property
    def num_elements(self) -> int:
        """Elements with alignment padding: what a plane of the block holds."""
        return _aligned(max(tensor.offset + tensor.num_elements for tensor in self.tensors))

    @cached_property
    def num_matrix_elements(self) -> int:
        """The block's leading elements that belong to matrices: the part that weight decay applies to."""
        ends = [tensor.offset + tensor.num_elements for tensor in self.tensors if len(tensor.shape) > 1]
        return _aligned(max(ends, default=0))


class ModelSpec(Schema):
    """What the simulator, the planner and the executor know of a model."""

    family: str
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    vocab_size: Size
    tied_embeddings: bool
    kinds: tuple[BlockSpec, ...]
    kind_of_block: tuple[int, ...]
    num_parameters: int

    @pydantic.model_validator(mode="after")
    def _holds_together(self) -> Self:
        """A spec may come from a plan's file, and not from a config."""
        for wrong in self._contradictions():
            raise ValueError(wrong)
        return self

    def _contradictions(self) -> Iterator[str]:
        if self.family not in FAMILIES:
            yield f"family: {self.family!r} is none of {', '.join(sorted(FAMILIES))}"
        if len(self.kind_of_block) != self.num_layers + 2:
            yield (
                f"kind_of_block: has {len(self.kind_of_block)} entries; {self.num_layers} layers with embedding and "
                f"head are {self.num_layers + 2}"
            )
        if not all(0 <= kind < len(self.kinds) for kind in self.kind_of_block):
            yield f"kind_of_block: names a kind that is none of the {len(self.kinds)} in kinds"
        kinds = [self.kinds[kind].kind for kind in self.kind_of_block]
        if kinds != ["embedding", *["layer"] * self.num_layers, "head"]:
            yield "kind_of_block: the blocks are not an embedding, layers and a head, in this order"
        counted = sum(self.kinds[kind].num_parameters for kind in self.kind_of_block)
        if counted != self.num_parameters:
            yield f"num_parameters: {self.num_parameters}, but the tensors of all blocks hold {counted}"
        if not any(self.kinds[kind].trained for kind in self.kind_of_block):
            yield "kinds: every tensor is frozen, so there is nothing to train"

    @property
    def num_blocks(self) -> int:
        return len(self.kind_of_block)

    @property
    def head(self) -> int:
        """The index of the head's block."""
        return self.num_blocks - 1

    @property
    def layers(self) -> range:
        """Block indices of the decoder layers."""
        return range(1, self.num_blocks - 1)

    def block(self, index: int) -> BlockSpec:
        return self.kinds[self.kind_of_block[index]]

    @property
    def trained_blocks(self) -> list[int]:
        """Blocks with a tensor that is trained: those that have a gradient, a state and an update."""
        trained = [kind.trained for kind in self.kinds]
        return [block for block, kind in enumerate(self.kind_of_block) if trained[kind]]

    @property
    def backward_layers(self) -> range:
        """The layers that a backward passes through: all above the lowest trained block, and that block."""
        return range(max(1, self.trained_blocks[0]), self.num_blocks - 1)

    @property
    def num_trained_parameters(self) -> int:
        return sum(self.block(block).num_trained_parameters for block in range(self.num_blocks))

    def kinds_of(self, blocks: Iterable[int]) -> dict[int, list[int]]:
        """`blocks` by kind, in ascending order of the kinds' first blocks."""
        found: dict[int, list[int]] = {}
        for block in blocks:
            found.setdefault(self.kind_of_block[block], []).append(block)
        return found

    def block_prefix(self, index: int) -> str:
        """The transformers name that a block's tensor names follow, e.g. `model.layers.3.`."""
        family = FAMILIES[self.family]
        if index == 0:
            return f"{family.body}."
        return "" if index == self.head else f"{family.body}.{family.layers}.{index - 1}."

    @property
    def embedding(self) -> TensorSpec:
        """The token embedding, which tied models also project with."""
        return self.block(0).tensors[0]

    @property
    def projection(self) -> TensorSpec:
        """The matrix of the head, which turns hidden states into logits: the embedding where the two are tied."""
        return self.embedding if self.tied_embeddings else self.block(self.head).tensors[0]

    @property
    def positions(self) -> TensorSpec | None:
        """The table of learned positions, or None: a sequence cannot be longer than it."""
        tensors = self.block(0).tensors
        return tensors[1] if len(tensors) > 1 else None


def read_model_config(path: Path | str) -> dict[str, Any]:
    """The config.json of a Hugging Face folder, or of the file itself. Raises InputError."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); a model is a Hugging Face folder or its config.json"
            f"{did_you_mean(nearest_path(path))}"
        ) from error
    except RepeatedKey as error:
        raise InputError(f"{path}: {error}; keep one of them") from error
    except (ValueError, RecursionError) as error:
        if "BOM" in str(error):
            raise InputError(
                f"{path}: begins with a byte order mark, which transformers refuses; save it without"
            ) from error
        raise InputError(f"{path}: is not JSON ({error})") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path}: has no key 'model_type'; it is not a Hugging Face model config")
    return config


def transformers_config(config: dict[str, Any]) -> Any:
    """transformers' config object. Raises InputError for unknown families, dropout or impossible values."""
    from transformers import AutoConfig

    family = require_supported(config)
    if config.get("quantization_config"):
        raise UnsupportedChoice("the model is quantized ('quantization_config'); train from full-precision weights")
    require_possible(config, family)
    try:
        hf_config = AutoConfig.for_model(**config)
        hf_config.to_dict()  # where it finds fault with the rest
    except Exception as error:
        raise InputError(f"model config: transformers refuses it ({_one_line(error)})") from error
    require_plain(family, hf_config)
    require_known_functions(hf_config)
    _check_heads(family, hf_config)
    return hf_config


def _check_heads(family: Family, hf_config: Any) -> None:
    """transformers builds models with heads that do not fit together; they fail in the first forward."""
    num_heads, num_kv_heads, head_dim = _heads(hf_config)
    if num_heads % num_kv_heads:
        raise InputError(
            f"model config: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2 and family.rotary != "none":
        raise InputError(f"model config: head_dim is {head_dim}; rotary embeddings need an even one")


def _heads(hf_config: Any) -> tuple[int, int, int]:
    """Heads, key-value heads and head dimension, with transformers' defaults for the two that may be missing."""
    num_heads = int(hf_config.num_attention_heads)
    num_kv_heads = int(getattr(hf_config, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads)
    return num_heads, num_kv_heads, head_dim


def _one_line(error: Exception) -> str:
    """What transformers says in an error: the last line, for the first often says only that there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1] if len(lines) > 1 else ": ".join([type(error).__name__, *lines])
    return textwrap.shorten(said, 240, placeholder=" ...")


def load_model_spec(path: Path | str) -> ModelSpec:
    """ModelSpec of a Hugging Face folder or config.json. No weights are read or allocated."""
    config = read_model_config(path)
    try:
        return model_spec(config)
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a config dictionary, by instantiating transformers' model on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    hf_config = transformers_config(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
    except Exception as error:
        raise InputError(f"model config: transformers cannot build it ({_one_line(error)})") from error

    tied = bool(hf_config.tie_word_embeddings)
    family = FAMILIES[hf_config.model_type]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    num_layers = int(hf_config.num_hidden_layers)
    body = f"{family.body}."
    embedding = _pick(shapes, f"{body}{family.embedding}.", strip=body)
    if family.positions:
        embedding |= _pick(shapes, f"{body}{family.positions}.", strip=body)
    blocks = [_block_spec("embedding", "embedding", embedding)]
    for layer in range(num_layers):
        prefix = f"{body}{family.layers}.{layer}."
        blocks.append(
            _block_spec(
                "layer",
                variant_of(family, hf_config, layer),
                _pick(shapes, prefix, strip=prefix),
                window=window_of(family, hf_config, layer),
            )
        )
    head = {name: shape for name, shape in shapes.items() if name.startswith(f"{body}{family.norm}.")}
    if PROJECTION in shapes:
        head[PROJECTION] = shapes[PROJECTION]
    blocks.append(_block_spec("head", "tied" if tied else "untied", head))

    kinds: list[BlockSpec] = []
    for block in blocks:
        if block not in kinds:
            kinds.append(block)
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    if sum(block.num_parameters for block in blocks) != num_parameters:
        known = {f"{name}" for block in blocks for name in (tensor.name for tensor in block.tensors)}
        left = [name for name in shapes if not any(name.endswith(part) for part in known)]
        raise UnsupportedChoice(f"model config: parameters outside embedding, layers and head: {left[:3]}")
    num_heads, num_kv_heads, head_dim = _heads(hf_config)
    return ModelSpec(
        family=str(hf_config.model_type),
        hidden_size=int(hf_config.hidden_size),
        intermediate_size=_intermediate_size(family, hf_config),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(hf_config.vocab_size),
        tied_embeddings=tied,
        kinds=tuple(kinds),
        kind_of_block=tuple(kinds.index(block) for block in blocks),
        num_parameters=num_parameters,
    )


def _pick(shapes: dict[str, tuple[int, ...]], prefix: str, *, strip: str) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(strip): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _intermediate_size(family: Family, hf_config: Any) -> int:
    size = getattr(hf_config, family.sizes.get("intermediate_size", "intermediate_size"), None)
    return int(size or 4 * hf_config.hidden_size)  # GPT-2's default


def _block_spec(
    kind: BlockKind, variant: str, shapes: dict[str, tuple[int, ...]], *, window: int | None = None
) -> BlockSpec:
    # Matrices first: neighbouring projections can be fused, and weight decay covers a prefix of the block.
    ordered = sorted(shapes.items(), key=lambda item: len(item[1]) < 2)
    tensors, offset = [], 0
    for name, shape in ordered:
        tensors.append(TensorSpec(name=name, shape=shape, offset=offset))
        offset = _aligned(offset + math.prod(shape))
    return BlockSpec(kind=kind, variant=variant, tensors=tuple(tensors), window=window)


def _aligned(num_elements: int) -> int:
    return -(-num_elements // BLOCK_ALIGNMENT_ELEMENTS) * BLOCK_ALIGNMENT_ELEMENTS
