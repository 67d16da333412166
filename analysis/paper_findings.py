"""What published values say against themselves or against the hardware, with the arithmetic.

Nothing here is a simulation but the work that a step asks of the GPU: FLOPs and bytes, by `simulator/formulas.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from analysis.reproduce import TIME_GOAL, Reproduced, published_seconds, tflops_of_table_7
from simulator import formulas
from simulator.datasheet import H200_DERATING
from simulator.megatrain import WEIGHT_BYTES
from simulator.model import ModelSpec
from simulator.units import GIB

# Values that should be one and differ by more contradict each other.
TOLERANCE = 0.05
# Host bytes a parameter that nothing can do without: bf16 weight and gradient, two moments in fp32.
LEAST_HOST_BYTES = 2 + 2 + 8


class Finding(NamedTuple):
    """A contradiction of one row, in a sentence or a few with their arithmetic."""

    where: str
    about: Literal["time", "memory"]
    text: str


def findings(reproduced: Sequence[Reproduced]) -> list[Finding]:
    """Every contradiction; what compares two rows comes first."""
    found = [Finding(a.row.where, "time", text) for a, b in _pairs(reproduced) for text in _buffers(a, b)]
    for item in reproduced:
        found += [Finding(item.row.where, about, text) for check, about in _CHECKS for text in check(item)]
    return found


def step_flops(model: ModelSpec, rows: int, length: int, forwards: int) -> tuple[float, float]:
    """FLOPs of the matrix products and of causal attention in a step that goes forward `forwards` times."""
    tokens = rows * length
    layers = sum(formulas.layer_matmul_flops(model, layer, tokens) for layer in model.layers)
    attention = formulas.attention_flops(model, [length] * rows)
    return (forwards + 2) * layers + 3 * formulas.head_matmul_flops(model, tokens), (forwards + 2) * attention


def _formula(item: Reproduced) -> Iterator[str]:
    """TFLOPS that do not follow from the step by the table's own formula."""
    values, model, row = item.row.values, item.simulation.model, item.row
    printed, seconds = values.tflops_with_attention, values.step_seconds
    if printed is None or seconds is None:
        return
    computed = tflops_of_table_7(model, row.rows, row.length, seconds)
    if abs(computed / printed - 1) <= TOLERANCE:
        return
    linear = 6 * model.num_parameters * row.rows * row.length
    attention = 12 * model.num_layers * model.hidden_size * row.length**2 * row.rows
    without = f"{linear / seconds / 1e12:.1f}"
    yield (
        f"its TFLOPS do not follow the table's formula. 6 N D = {linear / 1e15:.2f} PFLOP, 12 L H T² = "
        f"{attention / 1e15:.2f} PFLOP, together over {seconds:g} s {computed:.1f} TFLOPS; printed are {printed:g} "
        f"({printed / computed - 1:+.0%}). 6 N D alone gives {without}."
    )


def _work(item: Reproduced) -> Iterator[str]:
    """Steps that are shorter than their products and attention take at the machine's rates."""
    row, model, machine = item.row, item.simulation.model, item.simulation.machine
    seconds = published_seconds(row, model)
    if seconds is None or not row.rows:
        return
    forwards = 2 if row.variant == "zero_offload" else 3
    products, attention = step_flops(model, row.rows, row.length, forwards)
    sustained = machine.matmul_flops_per_second("bf16", row.rows * row.length)
    forward = machine.attention_flops_per_second("bf16", row.length, "forward")
    backward = machine.attention_flops_per_second("bf16", row.length, "backward")
    part = attention / (forwards + 2)
    least = products / sustained, forwards * part / forward + 2 * part / backward
    if sum(least) <= (1 + TIME_GOAL) * seconds:
        return
    rate, nominal = (products + attention) / seconds, sustained / H200_DERATING.matmul
    verdict = "more than the nominal peak of" if rate > nominal else "of a nominal peak of"
    yield (
        f"{seconds:.4g} s are too short for the GPU. {forwards} forwards and a backward are {products / 1e15:.2f} "
        f"PFLOP of products and {attention / 1e15:.2f} of causal attention: {rate / 1e12:.0f} TFLOP/s, {verdict} "
        f"{nominal / 1e12:.0f}. Products take {least[0]:.1f} s at {sustained / 1e12:.0f} TFLOP/s, attention "
        f"{least[1]:.1f} s at {forward / 1e12:.0f} forward and {backward / 1e12:.0f} backward (FlashAttention-2)."
    )


def _tokens_per_second(item: Reproduced) -> Iterator[str]:
    """TFLOPS and tokens a second that are not 6 N apart."""
    values, model = item.row.values, item.simulation.model
    if values.tflops is None or values.tokens_per_second is None:
        return
    computed = 6 * model.num_parameters * values.tokens_per_second / 1e12
    if abs(computed / values.tflops - 1) > TOLERANCE:
        needed = values.tflops * 1e12 / 6 / values.tokens_per_second
        yield (
            f"TFLOPS and tokens/s contradict each other. 6 N x {values.tokens_per_second:g} tokens/s is "
            f"{computed:.1f} TFLOPS with N = {model.num_parameters / 1e9:.2f} B; the printed {values.tflops:g} "
            f"need N = {needed / 1e9:.2f} B. The step is taken from tokens/s."
        )


def _logits(item: Reproduced) -> Iterator[str]:
    """Peaks below what the public code's loss and kept inputs take, on devices that cannot hold them."""
    row, model, printed = item.row, item.simulation.model, item.row.values.device_gib
    if printed is None or row.paper != "MegaTrain" or "device_gib" in row.not_simulated or item.simulation.fits:
        return
    tokens = row.rows * row.length
    logits = WEIGHT_BYTES * tokens * model.vocab_size / GIB
    capacity = item.simulation.machine.device.memory_bytes / GIB
    yield (
        f"{printed:g} GB are less than the public code takes. It keeps the logits of all tokens until one backward: "
        f"{tokens:,} x {model.vocab_size:,} x 2 bytes are {logits:.1f} GiB of {capacity:.1f} GiB usable, and with "
        f"inputs, buffers and the gradient of the head the peak is {item.simulation.device_bytes / GIB:.1f} GiB. The "
        "row was measured with another loss than the code's, or on another machine."
    )


def _host(item: Reproduced) -> Iterator[str]:
    """Host memory that does not hold weights, gradients and two fp32 moments."""
    printed, model = item.row.values.host_gib, item.simulation.model
    if printed is None or printed * GIB / model.num_parameters >= LEAST_HOST_BYTES:
        return
    each = printed * GIB / model.num_parameters
    yield (
        f"{printed:g} GB of CPU memory are {each:.1f} bytes for each of {model.num_parameters / 1e9:.2f} B parameters. "
        f"bf16 weights and gradients and two moments in fp32 take {LEAST_HOST_BYTES}; {each:.0f} is what bf16 moments "
        "would take, with nothing kept in full precision."
    )


def _pairs(reproduced: Sequence[Reproduced]) -> Iterator[tuple[Reproduced, Reproduced]]:
    """A row without double buffering beside the full system's."""
    for item in reproduced:
        if item.row.variant == "single_buffer":
            for full in reproduced:
                if full.row.table == item.row.table and full.row.variant == "megatrain":
                    yield item, full


def _buffers(item: Reproduced, full: Reproduced) -> Iterator[str]:
    """What copies would have to take if single buffering cost what is published."""
    model, machine = item.simulation.model, item.simulation.machine
    slow, fast = published_seconds(item.row, model), published_seconds(full.row, model)
    if slow is None or fast is None:
        return
    # Weights come three times, gradients leave once.
    layer = WEIGHT_BYTES * max(model.block(block).num_parameters for block in model.layers)
    copies = 4 * model.num_layers
    rate = copies * layer / (slow - fast)
    link = machine.link_bytes_per_second("h2d", layer)
    if rate < link / 2:
        yield (
            f"the loss is more than the link explains. It costs {slow:.1f} - {fast:.1f} = {slow - fast:.1f} s. A step "
            f"copies {copies} times a layer's {layer / 1e9:.3f} GB; were none of it hidden, it would go at "
            f"{rate / 1e9:.1f} GB/s, where the link sustains {link / 1e9:.0f} GB/s and all copies take "
            f"{copies * layer / link:.1f} s. Pageable copies over PCIe run at 8.4 GB/s on the reference host: the "
            "ablation seems to leave out pinned staging with the second buffer."
        )


_CHECKS: tuple[tuple[Callable[[Reproduced], Iterator[str]], Literal["time", "memory"]], ...] = (
    (_formula, "time"), (_work, "time"), (_tokens_per_second, "time"), (_logits, "memory"), (_host, "memory"),
)  # fmt: skip
