"""Tiny random models of each supported family, as flat blocks and as transformers' own whole model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.layer import COMPUTE_DTYPES, tensor_views
from simulator.model import ModelSpec, transformers_config

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 2.0,
    },
    "glm": {"head_dim": 8, "attention_bias": True},
    "glm4": {"head_dim": 8, "attention_bias": True},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    "phi3": {"sliding_window": 7},
    "smollm3": {
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
TINY_FAMILIES = tuple(_FAMILIES)

# Operations whose value or output size the host has to wait for.
WAITING_OPERATIONS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::is_nonzero",
}


def tiny_config(family: str, *, tied: bool = False, **overrides: Any) -> dict[str, Any]:
    """Two layers, of different kinds where the family has several, and windows that tests' sequences are longer than.

    GPT-2 has its own names of sizes, which no override of the plain names changes.
    """
    sizes = _SIZES
    if family == "gpt2":
        sizes = {key: value for key, value in _SIZES.items() if "token" in key or key == "vocab_size"} | _GPT2_SIZES
    return {"model_type": family, **sizes, **_FAMILIES[family], "tie_word_embeddings": tied, **overrides}


def random_blocks(model: ModelSpec, precision: Any, *, seed: int = 0, device: str = "cpu") -> list[Tensor]:
    """Flat weights of every block; what belongs to no tensor is NaN, so that nobody reads it unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for index in range(model.num_blocks):
        flat = torch.full((model.block(index).num_elements,), float("nan"), dtype=torch.float64)
        for view in tensor_views(model.block(index), flat).values():
            noise = torch.randn(view.shape, generator=generator, dtype=torch.float64)
            view.copy_(1 + 0.1 * noise if view.dim() == 1 else 0.3 * noise)
        blocks.append(flat.to(COMPUTE_DTYPES[precision]).to(device))
    return blocks


def blocks_of(model: ModelSpec, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Flat fp32 blocks that hold `weights`, by transformers' names."""
    blocks = [torch.zeros(model.block(block).num_elements) for block in range(model.num_blocks)]
    for block, flat in enumerate(blocks):
        for name, view in tensor_views(model.block(block), flat).items():
            view.copy_(weights[model.block_prefix(block) + name])
    return blocks


def empty_accumulators(model: ModelSpec, dtype: torch.dtype) -> list[Tensor]:
    """Accumulators full of NaN: a first micro-batch must write all of them."""
    return [
        torch.full((model.block(index).num_elements,), float("nan"), dtype=dtype) for index in range(model.num_blocks)
    ]


def whole_model(config: dict[str, Any], model: ModelSpec, blocks: list[Tensor]) -> Any:
    """transformers' own model with the weights of `blocks`."""
    from transformers import AutoModelForCausalLM

    # Scores that are capped are what its eager attention alone computes.
    attention = "eager" if config["model_type"] == "gemma2" else "sdpa"
    whole = AutoModelForCausalLM.from_config(transformers_config(config), attn_implementation=attention)
    whole = whole.to(blocks[0].dtype).train()
    parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for index, flat in enumerate(blocks):
            for name, view in tensor_views(model.block(index), flat).items():
                parameters[model.block_prefix(index) + name].copy_(view)
    return whole


def random_batch(model: ModelSpec, *, rows: int, sequence_length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and shifted labels; each row has a masked prompt, padding at its right and a last label of -100."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (rows, sequence_length), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((rows, 1), -100)], dim=1)
    for row in range(rows):
        labels[row, : row % 3] = -100
        length = sequence_length - 2 * (row % 4)
        tokens[row, length:] = 0
        labels[row, max(length - 1, 0) :] = -100
    return tokens, labels
