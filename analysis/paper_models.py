"""Models of the papers' tables as ModelSpecs, from their sizes: neither torch nor transformers is imported."""

import math
from collections.abc import Iterator
from pathlib import Path

import pydantic
import yaml

from simulator.formats import BLOCK_ALIGNMENT_ELEMENTS
from simulator.model import PROJECTION, BlockKind, BlockSpec, ModelSpec, TensorSpec
from simulator.schema import Schema, validated

MODELS = Path(__file__).parent / "papers" / "models.yaml"


class LinearAttention(Schema):
    """Gated DeltaNet layers between full attention: of every `interval` layers all but the last."""

    interval: int
    key_heads: int
    value_heads: int
    head_dim: int
    convolution: int  # tokens
    chunk: int  # tokens whose scores are formed among each other


class PaperModel(Schema):
    """A decoder with gated MLPs, in sizes."""

    source: str = pydantic.Field(min_length=1)
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    projection_bias: bool  # of queries, keys and values: Qwen2
    linear_attention: LinearAttention | None = None

    def scaled(self, *, num_layers: int | None = None, width: float | None = None) -> "PaperModel":
        """Another depth; or hidden size, MLP and numbers of heads times `width`, at the same head dimension."""
        update: dict[str, int] = {} if num_layers is None else {"num_layers": num_layers}
        if width is not None:
            for size in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
                update[size] = round(width * getattr(self, size))
        return self.model_copy(update=update)

    def spec(self) -> ModelSpec:
        """Blocks and tensors, as `simulator.model.model_spec` reads them from a config of the same sizes."""
        embedding = _block("embedding", "embedding", {"embed_tokens.weight": (self.vocab_size, self.hidden_size)})
        full = _block("layer", "full_attention", {**dict(self._attention()), **dict(self._mlp())})
        head: dict[str, tuple[int, ...]] = {"model.norm.weight": (self.hidden_size,)}
        if not self.tied_embeddings:
            head[PROJECTION] = (self.vocab_size, self.hidden_size)
        last = _block("head", "tied" if self.tied_embeddings else "untied", head)
        layers = [full] * self.num_layers
        linear = self.linear_attention
        if linear is not None:
            tensors = {**dict(self._delta_net(linear)), **dict(self._mlp())}
            delta_net = _block("layer", "linear_attention", tensors, window=linear.chunk)
            layers = [full if layer % linear.interval == 0 else delta_net for layer in range(1, self.num_layers + 1)]
        blocks = [embedding, *layers, last]
        kinds = list(dict.fromkeys(blocks))
        return ModelSpec(
            family="qwen2",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            kinds=tuple(kinds),
            kind_of_block=tuple(kinds.index(block) for block in blocks),
            num_parameters=sum(block.num_parameters for block in blocks),
        )

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        # Hybrids gate what attention gives: the projection of queries is twice as wide.
        gated = 1 if self.linear_attention is None else 2
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for name, width in (("q", gated * queries), ("k", keys), ("v", keys)):
            yield f"self_attn.{name}_proj.weight", (width, self.hidden_size)
            if self.projection_bias:
                yield f"self_attn.{name}_proj.bias", (width,)
        yield "self_attn.o_proj.weight", (self.hidden_size, queries)

    def _delta_net(self, linear: LinearAttention) -> Iterator[tuple[str, tuple[int, ...]]]:
        keys, values = linear.key_heads * linear.head_dim, linear.value_heads * linear.head_dim
        yield "linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, self.hidden_size)
        yield "linear_attn.in_proj_ba.weight", (2 * linear.value_heads, self.hidden_size)
        yield "linear_attn.conv1d.weight", (2 * keys + values, 1, linear.convolution)
        yield "linear_attn.out_proj.weight", (self.hidden_size, values)

    def _mlp(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "mlp.gate_proj.weight", (self.intermediate_size, self.hidden_size)
        yield "mlp.up_proj.weight", (self.intermediate_size, self.hidden_size)
        yield "mlp.down_proj.weight", (self.hidden_size, self.intermediate_size)
        yield "input_layernorm.weight", (self.hidden_size,)
        yield "post_attention_layernorm.weight", (self.hidden_size,)


def load_models(path: Path = MODELS) -> dict[str, PaperModel]:
    """The models of the tables by name."""
    sizes = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: validated(PaperModel, **values) for name, values in sizes.items()}


def _block(
    kind: BlockKind, variant: str, shapes: dict[str, tuple[int, ...]], *, window: int | None = None
) -> BlockSpec:
    """A block's tensors, matrices first, each on the alignment of all blocks."""
    tensors, offset = [], 0
    for name, shape in sorted(shapes.items(), key=lambda item: len(item[1]) < 2):
        tensors.append(TensorSpec(name=name, shape=shape, offset=offset))
        end = offset + math.prod(shape)
        offset = -(-end // BLOCK_ALIGNMENT_ELEMENTS) * BLOCK_ALIGNMENT_ELEMENTS
    return BlockSpec(kind=kind, variant=variant, tensors=tuple(tensors), window=window)
