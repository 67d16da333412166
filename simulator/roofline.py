"""Rooflines: what an operation takes where nobody measured it, from the machine's profile.

The larger of arithmetic and memory time, or their sum where kernels alternate.
"""

from simulator import formulas
from simulator.activations import hidden_bytes
from simulator.formats import PRECISIONS, gradient_bytes, state_bytes
from simulator.hardware import HardwareProfile, LinkDirection
from simulator.model import ModelSpec
from simulator.placement import batch_bytes, gradients_written_once
from simulator.policy import SAVE_LEVELS, Policy, Workload
from simulator.program import Kind, Operation, Resource

# Share of the forward that a backward repeats at each save level: measured on one Qwen2.5-7B layer, H200, 16K tokens.
RECOMPUTED_SHARE: dict[str, float] = {
    "keep": 0.0,
    "budget_70": 0.0,
    "budget_50": 0.15,
    "budget_30": 0.42,
    "budget_10": 0.64,
    "input": 0.74,
}
# Share of the bytes that level "keep" keeps, beside the layer's input: same measurement.
KEPT_SHARE: dict[str, float] = {
    "keep": 1.0,
    "budget_70": 0.66,
    "budget_50": 0.5,
    "budget_30": 0.3,
    "budget_10": 0.1,
    "input": 0.0,
}
# Where nothing is measured: what eager keeps beyond a compiled layer, and the share of peak that kernels reach.
EAGER_KEPT_FACTOR = 2.0
BACKWARD_ELEMENTWISE_FACTOR = 2.0
# Kernels that a layer launches, forward and backward: eager, counted by dispatch on Llama and Qwen2 layers; compiled,
# its matrix products and attention with about one fused kernel between neighbours.
LAUNCHES = {False: (40, 75), True: (14, 30)}

assert set(RECOMPUTED_SHARE) == set(KEPT_SHARE) == set(SAVE_LEVELS)


class Roofline:
    """Seconds and bytes of the operations of one model, workload and policy on one machine, all computed."""

    def __init__(self, model: ModelSpec, workload: Workload, policy: Policy, hardware: HardwareProfile) -> None:
        self.model, self.workload, self.policy, self.hardware = model, workload, policy, hardware
        self.tokens = policy.micro_batch_rows * workload.sequence_length

    def seconds(self, operation: Operation) -> float:
        """What an operation takes alone."""
        model, hardware, precision = self.model, self.hardware, self.workload.precision
        width = PRECISIONS[precision]
        if operation.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD) and operation.block in model.layers:
            forward = self._layer_forward_seconds(operation.block)
            if operation.kind is not Kind.BACKWARD:
                return forward
            share = RECOMPUTED_SHARE[operation.level]
            recomputed = 1.0 if share and not self.workload.compiled else share
            return self._layer_backward_seconds(operation.block) + forward * recomputed
        elements = model.block(operation.block).num_elements if operation.block >= 0 else 0
        completed = gradient_bytes(precision, self.policy.gradient_format)
        hbm = hardware.hbm_bytes_per_second.value
        launch = hardware.launch_seconds.value
        match operation.kind:
            case Kind.FORWARD:  # embedding: a gather
                return launch + 2 * self.tokens * model.hidden_size * width.weight / hbm
            case Kind.BACKWARD:  # embedding: a scatter over the whole accumulator
                return launch + (elements * width.accumulator + 4 * self.tokens * model.hidden_size * 4) / hbm
            case Kind.LOSS:
                rate = hardware.matmul_flops_per_second(precision, self.policy.head_chunk_tokens)
                logits = self.tokens * model.vocab_size
                chunks = -(-self.tokens // self.policy.head_chunk_tokens)
                sums = chunks * model.vocab_size * model.hidden_size  # the projection's gradient, added a chunk
                # One kernel and sums in the product on CUDA; plain operations, slice after slice, elsewhere.
                num_bytes, a_sum = (8 * logits, 8) if self._fused_loss else (20 * logits, 10)
                passes = 1 + (model.trained_blocks[0] < model.head)  # logits, and the gradient of what they come from
                if not model.projection.frozen:
                    passes, num_bytes = passes + 1, num_bytes + a_sum * sums
                return passes * formulas.head_matmul_flops(model, self.tokens) / rate + num_bytes / hbm
            case Kind.EVALUATE:
                rate = hardware.matmul_flops_per_second(precision, self.policy.head_chunk_tokens)
                num_bytes = (4 if self._fused_loss else 10) * self.tokens * model.vocab_size
                return formulas.head_matmul_flops(model, self.tokens) / rate + num_bytes / hbm
            case Kind.FINISH_GRADIENT if operation.block in model.layers and self._gradients_written_once:
                return launch + elements * completed / hbm  # the norm alone
            case Kind.FINISH_GRADIENT:
                return launch + elements * (width.accumulator + completed) / hbm
            case Kind.UPDATE:
                state = state_bytes(precision, self.policy.state_format) + width.weight
                traffic = elements * (2 * state + completed)
                if operation.resource is Resource.HOST:
                    return traffic / hardware.host_optimizer_bytes_per_second.value
                return launch + traffic / hbm
            case Kind.LOAD_WEIGHTS:
                return self._link_seconds("h2d", elements * width.weight)
            case Kind.STORE_GRADIENT:
                return self._link_seconds("d2h", elements * completed)
            case Kind.LOAD_STATE:
                return self._link_seconds("h2d", elements * state_bytes(precision, self.policy.state_format))
            case Kind.STORE_STATE:
                return self._link_seconds("d2h", elements * state_bytes(precision, self.policy.state_format))
            case Kind.STORE_WEIGHTS:
                return self._link_seconds("d2h", elements * width.weight)
            case Kind.LOAD_ACTIVATION:
                return self._link_seconds("h2d", self._waiting_bytes(operation))
            case Kind.STORE_ACTIVATION:
                return self._link_seconds("d2h", self._waiting_bytes(operation))
            case Kind.LOAD_BATCH:
                return self._link_seconds("h2d", batch_bytes(self.tokens, packed=self.workload.packed) - 8)
            case _:
                return 4 * launch

    def _waiting_bytes(self, operation: Operation) -> int:
        """What a layer leaves to wait on the host of one micro-batch: its input, and what it saves beside it."""
        saved = 0 if operation.level in ("", "input") else self.policy.saved_bytes[operation.block - 1]
        return hidden_bytes(self.model, self.workload, self.policy.micro_batch_rows) + saved

    @property
    def _gradients_written_once(self) -> bool:
        return gradients_written_once(self.workload, self.policy)

    @property
    def _fused_loss(self) -> bool:
        return self.hardware.device.kind == "cuda" and self.workload.precision == "bf16"

    def _link_seconds(self, direction: LinkDirection, num_bytes: int) -> float:
        rate = self.hardware.link_bytes_per_second(direction, num_bytes)
        return self.hardware.launch_seconds.value + num_bytes / rate

    def _layer_forward_seconds(self, block: int) -> float:
        model, hardware, precision = self.model, self.hardware, self.workload.precision
        matmul = formulas.layer_matmul_flops(model, block, self.tokens)
        attention = formulas.layer_attention_flops(
            model, block, self.policy.micro_batch_rows, self.workload.sequence_length
        )
        seconds = (
            matmul / hardware.matmul_flops_per_second(precision, self.tokens)
            + attention / hardware.attention_flops_per_second(precision, self.workload.sequence_length, "forward")
            + self._layer_elementwise_seconds(block)
        )
        return max(seconds, LAUNCHES[self.workload.compiled][0] * hardware.launch_seconds.value)

    def _layer_backward_seconds(self, block: int) -> float:
        model, hardware, precision = self.model, self.hardware, self.workload.precision
        # The gradient of the input takes all matrices, those of the weights the trained ones.
        trained = formulas.layer_matmul_flops(model, block, self.tokens, trained_only=True)
        matmul = formulas.layer_matmul_flops(model, block, self.tokens) + trained
        rows, sequence_length = self.policy.micro_batch_rows, self.workload.sequence_length
        attention = 2 * formulas.layer_attention_flops(model, block, rows, sequence_length)
        accumulate = 10 * model.block(block).num_trained_elements / hardware.hbm_bytes_per_second.value
        seconds = (
            matmul / hardware.matmul_flops_per_second(precision, self.tokens)
            + attention / hardware.attention_flops_per_second(precision, self.workload.sequence_length, "backward")
            + BACKWARD_ELEMENTWISE_FACTOR * self._layer_elementwise_seconds(block)
            + accumulate
        )
        return max(seconds, LAUNCHES[self.workload.compiled][1] * hardware.launch_seconds.value)

    def _layer_elementwise_seconds(self, block: int) -> float:
        width = PRECISIONS[self.workload.precision].weight
        num_bytes = formulas.layer_elementwise_elements(self.model, self.tokens) * width
        # Compiled kernels fuse: about half the traffic of eager ones.
        num_bytes /= 2.0 if self.workload.compiled else 1.0
        rows, sequence_length = self.policy.micro_batch_rows, self.workload.sequence_length
        num_bytes += 4 * formulas.capped_score_accesses(self.model, block, rows, sequence_length)
        return num_bytes / self.hardware.hbm_bytes_per_second.value

    def kept_bytes(self, level: str) -> int:
        """What a layer keeps at a save level, beside its input."""
        model = self.model
        kept = 5 * model.hidden_size + 3 * model.intermediate_size
        if not self.workload.compiled:
            kept = int(EAGER_KEPT_FACTOR * kept)
        return round(KEPT_SHARE[level] * self.tokens * kept * PRECISIONS[self.workload.precision].weight)

    def transient_bytes(self, operation: Operation) -> int:
        """What lives on the device only while an operation runs."""
        model, width = self.model, PRECISIONS[self.workload.precision].weight
        layer = self.tokens * (4 * model.hidden_size + 3 * model.intermediate_size) * width
        rows, sequence_length = self.policy.micro_batch_rows, self.workload.sequence_length
        layer += 6 * 4 * formulas.capped_chunk_elements(model, rows, sequence_length)  # six tensors of scores in fp32
        match operation.kind:
            case Kind.FORWARD | Kind.RECOMPUTE if operation.block in model.layers:
                return layer
            case Kind.BACKWARD if operation.block in model.layers:
                recomputed = self.kept_bytes("keep") if operation.level != "keep" else 0
                return layer + recomputed + model.block(operation.block).num_elements * width
            case Kind.LOSS | Kind.EVALUATE:
                chunk = min(self.policy.head_chunk_tokens, self.tokens)
                hidden = 4 * self.tokens * model.hidden_size * width
                if self._fused_loss:
                    return chunk * model.vocab_size * width + hidden
                vocabulary = model.vocab_size * model.hidden_size * width
                return chunk * model.vocab_size * (width + 8) + vocabulary + hidden
            case Kind.BACKWARD:
                return 4 * self.tokens * model.hidden_size * 4
            case _:
                return 0

    def dram_bytes(self, operation: Operation) -> float:
        """Host DRAM traffic: what a copy moves, and what a host update reads and writes."""
        if operation.block < 0:
            return 0.0
        elements = self.model.block(operation.block).num_elements
        precision = self.workload.precision
        completed = gradient_bytes(precision, self.policy.gradient_format)
        weight = PRECISIONS[precision].weight
        match operation.kind:
            case Kind.LOAD_WEIGHTS | Kind.STORE_WEIGHTS:
                return float(elements * weight)
            case Kind.LOAD_STATE | Kind.STORE_STATE:
                return float(elements * state_bytes(precision, self.policy.state_format))
            case Kind.STORE_GRADIENT:
                return float(elements * completed)
            case Kind.LOAD_ACTIVATION | Kind.STORE_ACTIVATION:
                return float(self._waiting_bytes(operation))
            case Kind.UPDATE if operation.resource is Resource.HOST:
                return float(elements * (2 * (state_bytes(precision, self.policy.state_format) + weight) + completed))
            case _:
                return 0.0
