"""What a model config may say: sizes and numbers that a model can have, and no parts that its family does not have."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from simulator.errors import InputError, UnsupportedChoice
from simulator.families import EXPERTS, RECURRENT, Family
from simulator.nearest import did_you_mean, nearest_name

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
MOST_LAYERS = 4096  # each is built once to read its shapes
MOST_SIZE = 2**31 - 1
# Numbers that a forward divides by, or takes the root or a power of.
_POSITIVE = (
    "norm_eps",
    "layer_norm_epsilon",
    "layer_norm_eps",
    "norm_epsilon",
    "rope_theta",
    "max_position_embeddings",
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_SHOWN = 40  # characters of a wrong value


def require_possible(config: Mapping[str, Any], family: Family) -> None:
    """Refuse values that no model has, before anything is built of them. Raises InputError naming key and value."""
    layers = family.sizes.get("num_hidden_layers", "num_hidden_layers")
    for key in (*SIZES, *family.sizes.values()):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"model config: {key} is {shown(value)}; it must be a whole number of at least 1")
        most = MOST_LAYERS if key in (layers, "num_hidden_layers") else MOST_SIZE
        if value > most:
            raise InputError(f"model config: {key} is {shown(value)}; no model has more than {most:,}")
    for key, value in _numbers(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"model config: {key} is {shown(value)}; it must be a finite number")
        if key.rpartition(".")[2].endswith(_POSITIVE) and not 0 < value < 1e30:
            raise InputError(f"model config: {key} is {shown(value)}; it must lie between 0 and 1e30")
    _require_known_parts(config)


def require_known_functions(hf_config: Any) -> None:
    """Refuse names of activations and rotary tables that transformers has none of. Raises InputError naming the key."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    named = [(key, getattr(hf_config, key, None), ACT2FN) for key in _ACTIVATIONS]
    rotary = getattr(hf_config, "rope_parameters", None)
    for table in (rotary, *rotary.values()) if isinstance(rotary, Mapping) else ():
        if isinstance(table, Mapping):
            named.append(("rope_type", table.get("rope_type"), {"default": None, **ROPE_INIT_FUNCTIONS}))
    for key, name, known in named:
        if isinstance(name, str) and name not in known:
            hint = did_you_mean(nearest_name(name, known))
            raise InputError(f"model config: {key} is {shown(name)}, which transformers does not know{hint}")


def _numbers(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Dotted key and value of every number; in lists too, under the list's key."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}.")
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, int | float) and not isinstance(item, bool):
                yield name, item


def _require_known_parts(config: Mapping[str, Any]) -> None:
    """transformers builds a supported family without parts that it does not have, whatever the config says of them."""
    for key, value in config.items():
        if not value or (isinstance(value, int | float) and value == 1):
            continue  # switched off, or one expert
        part = "mixtures of experts" if key in EXPERTS else ""
        part = part or ("recurrent layers" if any(word in key for word in RECURRENT) else "")
        part = part or ("vision or audio" if key in ("vision_config", "audio_config") else "")
        if part:
            raise UnsupportedChoice(
                f"model config: {key} is {shown(value)}, and {config['model_type']} models have no {part}; "
                "is model_type right?"
            )


def shown(value: Any) -> str:
    """A value in a sentence: cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a number of so many digits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def beyond_positions(config: Mapping[str, Any], sequence_length: int) -> str | None:
    """What there is to say where sequences are longer than the model's config names positions."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions >= sequence_length:
        return None
    return f"the model's config names {positions:,} positions: beyond them it has seen nothing"
