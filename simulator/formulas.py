"""FLOP and TFLOPS formulas, each with its reference.

6 FLOPs per parameter and token: forward 2, backward 4 (Kaplan et al. 2020, section 2.1), with N all parameters, the
input embedding counted too although looking it up costs nothing. Attention is left out; `attention_flops` adds it.
The backward's 4 are 2 for the gradient of what a parameter is multiplied with and 2 for its own: where parameters are
frozen, their own 2 are not counted, and of those below the lowest trained block none.
"""

from collections import Counter
from collections.abc import Sequence

from simulator.families import FAMILIES
from simulator.model import ModelSpec

# Scores that attention with a cap has at a time, over all rows and heads.
CAPPED_CHUNK_ELEMENTS = 2**25


def tflops(model: ModelSpec, tokens: int, seconds: float) -> float:
    """6 N T / seconds / 1e12, less what frozen parameters save."""
    return parameter_flops(model) * tokens / seconds / 1e12


def tflops_formula(model: ModelSpec) -> str:
    """The FLOPs of a step that `tflops` divides by its seconds, in letters and with the model's numbers."""
    everything, passed, trained = _parameters(model)
    if trained == everything:
        return f"6 N T, N = {everything}"
    return f"2 (N + P + R) T, N = {everything}, P = {passed} passed by gradients, R = {trained} trained"


def parameter_flops(model: ModelSpec) -> int:
    """FLOPs a token of all parameters: 6 N where all are trained."""
    return 2 * sum(_parameters(model))


def _parameters(model: ModelSpec) -> tuple[int, int, int]:
    """Numbers of parameters: all, those that gradients pass on their way down, those that are trained."""
    lowest, blocks = model.trained_blocks[0], range(model.num_blocks)
    passed = sum(model.block(block).num_parameters for block in blocks if block >= lowest)
    return model.num_parameters, passed, model.num_trained_parameters


def tflops_with_attention(model: ModelSpec, tokens: int, seconds: float, document_lengths: Sequence[int]) -> float:
    """6 N T plus causal attention, forward and backward: 6 L heads head_dim sum(s^2) over the documents of a step.

    Layers with a window count the pairs within it only, and those below all gradients their forward only.
    """
    passes = 1 + 2 * len(model.backward_layers) / model.num_layers
    return tflops(model, tokens, seconds) + passes * attention_flops(model, document_lengths) / seconds / 1e12


def attention_flops(model: ModelSpec, document_lengths: Sequence[int]) -> float:
    """FLOPs of causal attention in the forward of all layers: 2 L heads head_dim sum(s^2); the backward takes twice.

    A layer with a window of w tokens does s^2 - (s - w)^2 of a longer document's s^2: pairs farther apart are left out.
    """
    windows = Counter(model.block(layer).window for layer in model.layers)
    pairs = sum(count * _pairs(length, window) for window, count in windows.items() for length in document_lengths)
    return 2.0 * model.num_heads * model.head_dim * pairs


def layer_attention_flops(model: ModelSpec, block: int, rows: int, sequence_length: int) -> float:
    """Forward FLOPs of causal attention in one layer for `rows` rows."""
    pairs = _pairs(sequence_length, model.block(block).window)
    return 2.0 * model.num_heads * model.head_dim * rows * pairs


def capped_score_accesses(model: ModelSpec, block: int, rows: int, sequence_length: int) -> float:
    """Elements of scores in fp32 that the forward of attention with capped scores reads or writes; 0 without a cap.

    Counted from executor/capped_attention.py, whose passes no compiler fuses: 16 a score; its backward takes twice.
    """
    if not FAMILIES[model.family].capped_scores:
        return 0.0
    return 16 * rows * model.num_heads * _pairs(sequence_length, model.block(block).window) / 2


def capped_chunk_elements(model: ModelSpec, rows: int, sequence_length: int) -> int:
    """Scores of one chunk of queries, of which a few tensors in fp32 live at a time; 0 without a cap."""
    if not FAMILIES[model.family].capped_scores:
        return 0
    return min(CAPPED_CHUNK_ELEMENTS, rows * model.num_heads * sequence_length**2)


def _pairs(length: int, window: int | None) -> int:
    """Twice the pairs of query and key, half the diagonal counted as everywhere in this formula."""
    beyond = 0 if window is None else max(0, length - window)
    return length**2 - beyond**2


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
