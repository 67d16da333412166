"""FLOP formulas against torch's own counter and against arithmetic by hand."""

import re
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from simulator import formulas
from simulator.freezing import freeze
from simulator.model import ModelSpec, model_spec

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "use_cache": False,
}
ROWS, LENGTH = 2, 32


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return model_spec(CONFIG)


def counted(*, backward: bool) -> dict[str, int]:
    """FLOPs by operator of the whole model, as torch counts them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), attn_implementation="sdpa")
    tokens = torch.zeros((ROWS, LENGTH), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel([SDPBackend.MATH]):
        loss = model(tokens, labels=tokens).loss
        if backward:
            loss.backward()
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


def test_matmuls_of_layers_and_head_are_what_torch_counts(spec: ModelSpec) -> None:
    tokens = ROWS * LENGTH
    layers = sum(formulas.layer_matmul_flops(spec, block, tokens) for block in spec.layers)
    head = formulas.head_matmul_flops(spec, tokens)
    linear = {name: flops for name, flops in counted(backward=False).items() if "bmm" not in name}
    assert sum(linear.values()) == layers + head
    linear = {name: flops for name, flops in counted(backward=True).items() if "bmm" not in name}
    assert sum(linear.values()) == 3 * (layers + head)


def test_causal_attention_is_half_of_what_torch_counts_for_full_attention(spec: ModelSpec) -> None:
    attention = sum(flops for name, flops in counted(backward=False).items() if "bmm" in name)
    ours = sum(formulas.layer_attention_flops(spec, layer, ROWS, LENGTH) for layer in spec.layers)
    # Rotary frequencies are formed by a small product too.
    assert ours == formulas.attention_flops(spec, [LENGTH] * ROWS)
    assert attention / 2 == pytest.approx(ours, rel=0.05)


def test_tflops_by_hand(spec: ModelSpec) -> None:
    # Embedding and head 512 x 64, three layers, one norm.
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160 + 64 + 2 * 32 + 2 * 64
    parameters = 2 * 512 * 64 + 3 * layer + 64
    assert spec.num_parameters == parameters
    assert formulas.tflops(spec, 1000, 2.0) == pytest.approx(6 * parameters * 1000 / 2 / 1e12)
    squares = 10**2 + 20**2
    with_attention = formulas.tflops_with_attention(spec, 1000, 2.0, [10, 20])
    assert with_attention - formulas.tflops(spec, 1000, 2.0) == pytest.approx(6 * 3 * 64 * squares / 2 / 1e12)


@pytest.mark.parametrize("patterns", [[], ["model.embed_tokens.*", "model.layers.0.*", "model.layers.2.mlp.*"]])
def test_the_formula_of_a_model_gives_its_tflops(spec: ModelSpec, patterns: list[str]) -> None:
    frozen = freeze(spec, patterns)
    text = formulas.tflops_formula(frozen)
    numbers = {letter: int(number) for letter, number in re.findall(r"([NPR]) = (\d+)", text)}
    factor, letters = re.match(r"(\d) \(?([NPR +]+?)\)? T", text).groups()
    flops = int(factor) * sum(numbers[letter] for letter in letters.split(" + "))
    assert formulas.tflops(frozen, 1000, 2.0) == pytest.approx(flops * 1000 / 2 / 1e12)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    assert numbers["N"] == sum(parameter.numel() for parameter in whole.parameters())
    # Gradients end above the embedding and the first layer; the third layer's MLP lets them pass.
    if patterns:
        layer = spec.block(1).num_parameters
        assert numbers["P"] == numbers["N"] - 512 * 64 - layer
        assert numbers["R"] == numbers["P"] - 3 * 64 * 160


def test_attention_counts_documents_not_rows(spec: ModelSpec) -> None:
    # Two documents of half the length cost half of one.
    assert formulas.attention_flops(spec, [16, 16]) == formulas.attention_flops(spec, [32]) / 2
