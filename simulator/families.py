"""Families: the model types that can be trained, and what in each differs from the plain case.

The plain case is Llama's: token embedding, alike layers that rotate queries and keys by one table and attend to all
earlier tokens, a final norm, a projection. What happens inside a layer is transformers' own code and needs no row here;
what happens around the layers does. Simulator and executor read this one table; docs/families.md shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from simulator.errors import InputError, UnsupportedChoice

Rotary = Literal["one table", "a table per layer type", "none"]
Windows = Literal["none", "by layer type", "every layer"]
LAYER_TYPES = ("full_attention", "sliding_attention")
WITHOUT_ROTARY = "_without_rotary"

# Keys that hold dropout of parts which no language model here has.
_OTHER_HEADS_DROPOUT = ("classifier_dropout", "summary_first_dropout")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "moe_num_experts")
RECURRENT = ("mamba", "ssm_", "state_size", "conv_kernel", "conv_L_cache", "rwkv", "lru_width", "linear_attn", "slstm")


@dataclass(frozen=True, slots=True)
class Family:
    """What differs from the plain case. Module names are transformers'; `""` where a family has none of a kind."""

    title: str
    body: str = "model"  # the module that holds all but the projection
    embedding: str = "embed_tokens"
    positions: str = ""  # a table of learned positions, added to the embedding
    layers: str = "layers"
    norm: str = "norm"
    rotary: Rotary = "one table"
    rotary_layers: str = ""  # config key with an entry a layer, zero where a layer does not rotate
    windows: Windows = "none"  # which layers attend within `sliding_window` only
    scaled_embedding: bool = False  # by the root of the hidden size, rounded to the compute dtype
    capped_scores: str = ""  # config key: attention scores become cap x tanh(score / cap)
    capped_logits: str = ""  # config key: the same for the logits
    norms_start_at: float = 1.0  # Gemma's norms multiply by 1 + weight
    padding_starts_at_zero: bool = True  # the embedding of the config's padding token
    small_residuals: tuple[str, ...] = ()  # matrices that start smaller by the root of twice the number of layers
    sizes: Mapping[str, str] = field(default_factory=dict)  # the family's own names of sizes
    refused: tuple[tuple[str, str], ...] = ()  # config keys that must be off, and what they would do


_TWO_WAYS = ("use_bidirectional_attention", "lets tokens see later ones")
_GPT2_SIZES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}

FAMILIES: dict[str, Family] = {
    "gemma": Family("Gemma", scaled_embedding=True, norms_start_at=0.0, refused=(_TWO_WAYS,)),
    "gemma2": Family(
        "Gemma 2",
        windows="by layer type",
        scaled_embedding=True,
        capped_scores="attn_logit_softcapping",
        capped_logits="final_logit_softcapping",
        norms_start_at=0.0,
        refused=(_TWO_WAYS,),
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        rotary="a table per layer type",
        windows="by layer type",
        scaled_embedding=True,
        capped_logits="final_logit_softcapping",
        norms_start_at=0.0,
        refused=(_TWO_WAYS,),
    ),
    "glm": Family("GLM-4 (9B)"),
    "glm4": Family("GLM-4 (0414)"),
    "gpt2": Family(
        "GPT-2",
        body="transformer",
        embedding="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
        rotary="none",
        padding_starts_at_zero=False,
        small_residuals=("attn.c_proj.weight", "mlp.c_proj.weight"),
        sizes=_GPT2_SIZES,
        refused=(
            ("add_cross_attention", "adds attention to an encoder"),
            ("scale_attn_by_inverse_layer_idx", "makes every layer compute something else"),
            ("reorder_and_upcast_attn", "is for transformers' eager attention alone"),
        ),
    ),
    "llama": Family("Llama"),
    "mistral": Family("Mistral", windows="every layer"),
    "olmo2": Family("OLMo 2"),
    "olmo3": Family("OLMo 3", rotary="a table per layer type", windows="by layer type"),
    "phi3": Family("Phi-3", windows="every layer"),
    "qwen2": Family("Qwen2", windows="by layer type"),
    "qwen3": Family("Qwen3", windows="by layer type"),
    "smollm3": Family("SmolLM3", rotary_layers="no_rope_layers", windows="by layer type"),
}


def family_of(model_type: Any) -> Family:
    """The family's row. Raises UnsupportedChoice naming what is supported."""
    if model_type not in FAMILIES:
        raise UnsupportedChoice(
            f"model family {model_type!r} is not supported; this version trains {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def require_supported(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises UnsupportedChoice with the reason, as far as config or transformers tell."""
    model_type = config["model_type"]
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise UnsupportedChoice(
        f"model family {repr(model_type)[:80]} is not supported: {_reason(config)}; "
        f"this version trains {', '.join(sorted(FAMILIES))}"
    )


def require_plain(family: Family, hf_config: Any) -> None:
    """Refuse options of a supported family that no layer here applies. Raises InputError naming key and value."""
    values = hf_config.to_dict()
    dropped = [
        f"{key} is {value}"
        for key, value in values.items()
        if ("dropout" in key or key.endswith("_pdrop")) and key not in _OTHER_HEADS_DROPOUT
        if isinstance(value, int | float) and value
    ]
    if dropped:
        raise InputError(f"model config: {', '.join(dropped)}; dropout is not supported, set it to 0")
    for key, effect in family.refused:
        if values.get(key):
            raise UnsupportedChoice(f"model config: {key} {effect}, which is not supported; set it to false")
    if not getattr(hf_config, "is_causal", True):
        raise UnsupportedChoice("model config: is_causal is false; only causal language models are trained")


def window_of(family: Family, hf_config: Any, layer: int) -> int | None:
    """How many tokens, itself included, a token of a layer (from 0) attends to; None for all before it.

    Raises InputError where the layer types ask for a window and none is set.
    """
    window = getattr(hf_config, "sliding_window", None)
    if family.windows == "none" or (family.windows == "by layer type" and _layer_type(hf_config, layer) == "full"):
        return None
    if window is None:
        if family.windows == "every layer":
            return None
        raise InputError(
            f"model config: layer_types has sliding_attention for layer {layer}, and no sliding_window is set"
        )
    if not isinstance(window, int) or window < 1:
        raise InputError(f"model config: sliding_window is {window!r}; it must be a whole number of at least 1")
    return window


def variant_of(family: Family, hf_config: Any, layer: int) -> str:
    """What a layer (from 0) computes, by name: layers of one name and equal shapes share a template."""
    name = "full_attention" if window_of(family, hf_config, layer) is None else "sliding_attention"
    rotates = getattr(hf_config, family.rotary_layers, None) if family.rotary_layers else None
    return name if rotates is None or rotates[layer] else name + WITHOUT_ROTARY


def _layer_type(hf_config: Any, layer: int) -> Literal["full", "sliding"]:
    layer_types = getattr(hf_config, "layer_types", None)
    layer_type = "full_attention" if layer_types is None else layer_types[layer]
    if layer_type not in LAYER_TYPES:
        raise UnsupportedChoice(
            f"model config: layer_types has {layer_type!r} for layer {layer}; {' and '.join(LAYER_TYPES)} are supported"
        )
    return "full" if layer_type == "full_attention" else "sliding"


def with_layers(config: Mapping[str, Any], hf_config: Any, layers: list[int]) -> dict[str, Any]:
    """The config of a model of some of a model's layers (from 0), in that order; each computes what it did."""
    family = family_of(config["model_type"])
    own_name = family.sizes.get("num_hidden_layers", "num_hidden_layers")
    cut = {key: value for key, value in config.items() if key not in (own_name, "num_hidden_layers")}
    cut[own_name] = len(layers)
    for key in ("layer_types", family.rotary_layers):
        entries = getattr(hf_config, key, None) if key else None
        if entries is not None:
            cut[key] = [entries[layer] for layer in layers]
    return cut


def _reason(config: Mapping[str, Any]) -> str:
    """Why a family is not supported, in a few words."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    model_type = config["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        if config.get("auto_map"):
            return "its code is in its own repository, which is never run"
        return "transformers does not know it"
    config_class: Any = CONFIG_MAPPING[model_type]
    keys = {*config, *vars(config_class), *getattr(config_class, "__annotations__", {})}
    text = getattr(config_class, "sub_configs", {}).get("text_config")
    text_type = getattr(text, "model_type", None)
    both = config.get("is_encoder_decoder") or getattr(config_class, "is_encoder_decoder", False) is True
    if both or model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "it is an encoder and a decoder"
    if any("vision" in key or "audio" in key for key in (*keys, *getattr(config_class, "sub_configs", {}))):
        alone = f" (its text model alone has model_type {text_type!r})" if text_type in FAMILIES else ""
        return f"it reads more than text{alone}"
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "it is no causal language model"
    if any(key in keys for key in EXPERTS):
        return "its layers are mixtures of experts"
    if any(part in key for key in keys for part in RECURRENT) or any(part in model_type for part in RECURRENT):
        return "its layers are recurrent, or a mix of recurrent and attention layers"
    return "no test compares it with transformers' own model yet"


def markdown_table() -> str:
    """The table of families as docs/families.md shows it."""
    rows = ["| `model_type` | family | what differs from the plain case |", "| --- | --- | --- |"]
    for model_type, family in sorted(FAMILIES.items()):
        rows.append(f"| `{model_type}` | {family.title} | {'; '.join(_differences(family)) or 'nothing'} |")
    return "\n".join(rows) + "\n"


def _differences(family: Family) -> list[str]:
    plain = Family("")
    names = ("body", "embedding", "positions", "layers", "norm")
    renamed = [f"`{getattr(family, name)}`" for name in names if getattr(family, name) != getattr(plain, name)]
    found = [f"modules {', '.join(renamed)}"] if renamed else []
    if family.positions:
        found.append("learned positions")
    if family.rotary != plain.rotary:
        found.append("no rotary positions" if family.rotary == "none" else f"rotary positions: {family.rotary}")
    if family.rotary_layers:
        found.append(f"layers without rotary positions (`{family.rotary_layers}`)")
    if family.windows != "none":
        found.append(f"attention in a window: {family.windows}")
    if family.scaled_embedding:
        found.append("embedding times the root of the hidden size")
    if family.capped_scores:
        found.append(f"capped attention scores (`{family.capped_scores}`)")
    if family.capped_logits:
        found.append(f"capped logits (`{family.capped_logits}`)")
    if family.norms_start_at != plain.norms_start_at:
        found.append(f"norms start at {family.norms_start_at:g}")
    if family.small_residuals:
        found.append("smaller start of residual matrices")
    if family.sizes:
        found.append(f"sizes {', '.join(f'`{name}`' for name in family.sizes.values())}")
    if family.refused:
        found.append(f"refused when on: {', '.join(f'`{key}`' for key, _ in family.refused)}")
    return found
