"""FLOP and TFLOPS formulas, each with its reference.

6 FLOPs per parameter and token: forward 2, backward 4 (Kaplan et al. 2020, section 2.1), with N all parameters, the
input embedding counted too although looking it up costs nothing. Attention is left out; `attention_flops` adds it.
The backward's 4 are 2 for the gradient of what a parameter is multiplied with and 2 for its own: where parameters are
frozen, their own 2 are not counted, and of those below the lowest trained block none.
"""

from collections.abc import Sequence

from simulator.model import ModelSpec


def tflops(model: ModelSpec, tokens: int, seconds: float) -> float:
    """6 N T / seconds / 1e12, less what frozen parameters save."""
    return parameter_flops(model) * tokens / seconds / 1e12


def parameter_flops(model: ModelSpec) -> int:
    """FLOPs a token of all parameters: 6 N where all are trained."""
    lowest, blocks = model.trained_blocks[0], range(model.num_blocks)
    passed = sum(model.block(block).num_parameters for block in blocks if block >= lowest)
    return 2 * model.num_parameters + 2 * passed + 2 * model.num_trained_parameters


def tflops_with_attention(model: ModelSpec, tokens: int, seconds: float, document_lengths: Sequence[int]) -> float:
    """6 N T plus causal attention, forward and backward: 6 L heads head_dim sum(s^2) over the documents of a step."""
    passes = 1 + 2 * len(model.backward_layers) / model.num_layers
    return tflops(model, tokens, seconds) + passes * attention_flops(model, document_lengths) / seconds / 1e12


def attention_flops(model: ModelSpec, document_lengths: Sequence[int]) -> float:
    """FLOPs of causal attention in the forward of all layers: 2 L heads head_dim sum(s^2); the backward takes twice."""
    squares = sum(length * length for length in document_lengths)
    return 2.0 * model.num_layers * model.num_heads * model.head_dim * squares


def layer_attention_flops(model: ModelSpec, rows: int, sequence_length: int) -> float:
    """Forward FLOPs of causal attention in one layer for `rows` rows."""
    return 2.0 * model.num_heads * model.head_dim * rows * sequence_length**2


def layer_matmul_flops(model: ModelSpec, block: int, tokens: int, *, trained_only: bool = False) -> float:
    """Forward FLOPs of a layer's matrices, or of the trained ones: 2 per element and token."""
    matrices = (t for t in model.block(block).tensors if len(t.shape) > 1 and not (trained_only and t.frozen))
    return 2.0 * tokens * sum(tensor.num_elements for tensor in matrices)


def head_matmul_flops(model: ModelSpec, tokens: int) -> float:
    """Forward FLOPs of the projection to logits; the backward takes twice."""
    return 2.0 * tokens * model.vocab_size * model.hidden_size


def layer_elementwise_elements(model: ModelSpec, tokens: int) -> float:
    """Elements that norms, rotary, residuals and the gated MLP read or write in an eager layer's forward.

    Two norms (read, write, in fp32 twice over), two residual additions, rotary on q and k, and the gate's activation
    and product. An estimate from the layer's definition, within 30 % of a profile; used only where nothing is measured.
    """
    rotary = 4 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return tokens * (2 * 6 * model.hidden_size + 2 * 3 * model.hidden_size + rotary + 5 * model.intermediate_size)
