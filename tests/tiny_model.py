"""Tiny Hugging Face configs whose tensors need padding, with transformers as the independent reader and writer."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from executor.store import BlockState, zero_state
from simulator.formats import Precision
from simulator.model import ModelSpec, model_spec


def tiny_config(family: str = "qwen2", *, tied: bool = False, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": family,
        "vocab_size": 301,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    return config | changes


def tiny_spec(**kwargs: Any) -> ModelSpec:
    return model_spec(tiny_config(**kwargs))


def zero_states(model: ModelSpec, precision: Precision, device: str = "cpu") -> list[BlockState]:
    return [zero_state(model.block(i), precision=precision, device=device) for i in range(model.num_blocks)]


def transformers_model(config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model, every parameter drawn at random, norms and biases included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.to(dtype).eval()


def save_pretrained(config: dict[str, Any], folder: Path, *, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    model = transformers_model(config, dtype=dtype)
    model.save_pretrained(folder, **kwargs)
    return model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(20).reshape(2, 10) * 13 % 300
    with torch.no_grad():
        return model(tokens).logits
