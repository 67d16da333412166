"""Prices and memory of the programs of `simulator/megatrain.py`, from a machine's profile.

A layer takes its matrix products, its attention, and the bytes that transformers' eager Qwen2 layer reads and writes
elsewhere, counted operation by operation (`tests/test_megatrain.py` counts again): norms in fp32 read and write 36
bytes an element, where a fused kernel takes 4. Embedding and loss are rooflines of `simulator/roofline.py`. The phases
that follow the backward depend on code more than on bandwidth; their rates are those of MegaTrain's public code on the
reference H200 host, in proportion to host DRAM on other hosts. They are in no published table.
"""

from dataclasses import dataclass, field

from simulator import formulas
from simulator.costs import Pricing
from simulator.figure import Figure
from simulator.hardware import HardwareProfile, LinkDirection
from simulator.megatrain import WEIGHT_BYTES
from simulator.model import ModelSpec
from simulator.policy import Workload, uniform_policy
from simulator.program import Buffer, Kind, Operation, Program, Resource
from simulator.replay import Price, Sharing

REFERENCE_DRAM = Figure(
    value=148.5e9, source="measured: 2026-11-29 on one NVIDIA H200 host, torch 2.11+cu130, all that DRAM moved at once"
)
# Positions of all rows whose logits are formed at a time; infinity/model/cpu_master.py, chunk_size.
LOSS_CHUNK_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class HostPhase:
    """What the host does to every parameter between two steps of the GPU."""

    parameters_per_second: Figure  # on the reference host
    dram_bytes: float  # read + written, a parameter

    def seconds(self, num_parameters: int, hardware: HardwareProfile) -> float:
        """Time on a host of `hardware`, in proportion to what its DRAM moves."""
        scale = hardware.host_dram_bytes_per_second.value / REFERENCE_DRAM.value
        return num_parameters / (self.parameters_per_second.value * scale)


def _phase(num_parameters: float, seconds: float, dram_bytes: float, how: str) -> HostPhase:
    source = f"measured: 2026-11-29 on one NVIDIA H200 host, torch 2.11+cu130, {seconds} s {how}"
    return HostPhase(Figure(value=num_parameters / seconds, source=source), dram_bytes)


_SEVEN = 7_615_616_512  # Qwen2.5-7B
_OF_SEVEN = "of a step of MegaTrain's public code, Qwen2.5-7B, 98,304 tokens"
MEGATRAIN_PHASES: dict[Kind, HostPhase] = {
    Kind.CLIP: _phase(_SEVEN, 3.5, 6, f"for the norm and the scaling {_OF_SEVEN}"),
    Kind.UPDATE: _phase(_SEVEN, 1.8, 22, f"for DeepSpeed's CPUAdam on bf16 weights {_OF_SEVEN}"),
    Kind.LOAD_WEIGHTS: _phase(_SEVEN, 0.8, 4, f"for the refresh of pinned copies {_OF_SEVEN}"),
    Kind.ZERO_GRADIENT: _phase(_SEVEN, 0.9, 2, f"for zeroing {_OF_SEVEN}"),
    Kind.FINISH_GRADIENT: _phase(
        _SEVEN, 0.8, 4, f"for the refresh of pinned copies, which copies as much, {_OF_SEVEN}"
    ),
}
# ZeRO-3 with parameters and optimizer offloaded took 2.99 s for 16,384 tokens and 5.57 s for 65,536 with 4.35 B
# parameters: 2.13 s do not depend on the tokens. Their parts were not measured: copies as MegaTrain's, 0.46 s, the rest
# the update.
ZERO_PHASES: dict[Kind, HostPhase] = {
    Kind.UPDATE: _phase(
        4.35e9, 1.67, 22, "of the 2.13 s that do not depend on the tokens of a step of DeepSpeed 0.19.8, 4.35 B"
    ),
    Kind.LOAD_WEIGHTS: MEGATRAIN_PHASES[Kind.LOAD_WEIGHTS],
    Kind.FINISH_GRADIENT: MEGATRAIN_PHASES[Kind.FINISH_GRADIENT],
}
# LazyTrain's own operator was not measured. Its update is priced as this project's 8-bit AdamW on the host; its
# clipping takes no pass over the gradients ("fast clipping counteracts the additional CPU-side update overhead").
LAZYTRAIN_PHASES: dict[Kind, HostPhase] = {
    **{kind: phase for kind, phase in MEGATRAIN_PHASES.items() if kind is not Kind.CLIP},
    Kind.UPDATE: _phase(4.15e9, 1.0, 14, "for an 8-bit AdamW in C++, 4.15 G parameters"),
}


@dataclass(frozen=True)
class MegaTrainPricing:
    """Prices of a step of `rows` rows, all of which pass a layer at once. `mlp_chunk_tokens` 0: the MLP is whole."""

    model: ModelSpec
    rows: int
    sequence_length: int
    hardware: HardwareProfile
    phases: dict[Kind, HostPhase] = field(default_factory=lambda: MEGATRAIN_PHASES)
    mlp_chunk_tokens: int = 0
    _pricing: Pricing = field(init=False, repr=False)

    def __post_init__(self) -> None:
        workload = Workload(
            sequence_length=self.sequence_length, tokens_per_step=self.tokens, gradient_format="bf16", compiled=False
        )
        chunk = self.rows * min(LOSS_CHUNK_POSITIONS, self.sequence_length)
        policy = uniform_policy(
            self.model, workload, micro_batch_rows=self.rows, groups=(1,), head_chunk_tokens=chunk, save_level="input"
        )
        object.__setattr__(self, "_pricing", Pricing(self.model, workload, policy, self.hardware))

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence_length

    @property
    def sharing(self) -> Sharing:
        """How operations slow each other on this machine."""
        return self._pricing.sharing

    def price(self, operation: Operation) -> Price:
        """Seconds alone, bytes of host DRAM, and device memory that lives only while the operation runs."""
        return Price(self._seconds(operation), self._dram_bytes(operation), self.transient_bytes(operation))

    @staticmethod
    def size(buffer: Buffer) -> int:
        return buffer.num_bytes

    def _seconds(self, operation: Operation) -> float:
        hardware, kind, block = self.hardware, operation.kind, operation.block
        if operation.resource is Resource.HOST:
            return self.phases[kind].seconds(self._parameters(operation), hardware)
        if operation.resource in (Resource.H2D, Resource.D2H):
            direction: LinkDirection = "h2d" if operation.resource is Resource.H2D else "d2h"
            return hardware.link_seconds(direction, self._copied_bytes(operation))
        if block not in self.model.layers:
            return self._pricing.roofline.seconds(operation)
        seconds = self._forward_seconds(block)
        return seconds + self._backward_seconds(block) if kind is Kind.BACKWARD else seconds

    def _forward_seconds(self, block: int) -> float:
        """A layer's forward, after its flat weights were copied into the layer that computes."""
        model, hardware = self.model, self.hardware
        copied = 2 * WEIGHT_BYTES * model.block(block).num_parameters
        products = formulas.layer_matmul_flops(model, block, self.tokens)
        attention = formulas.layer_attention_flops(model, block, self.rows, self.sequence_length)
        traffic = 10 * model.intermediate_size + 84 * model.hidden_size + 20 * self._rotated
        return (
            products / hardware.matmul_flops_per_second("bf16", self.tokens)
            + attention / hardware.attention_flops_per_second("bf16", self.sequence_length, "forward")
            + (copied + traffic * self.tokens) / hardware.hbm_bytes_per_second.value
        )

    def _backward_seconds(self, block: int) -> float:
        model, hardware = self.model, self.hardware
        products = 2 * formulas.layer_matmul_flops(model, block, self.tokens)
        attention = 2 * formulas.layer_attention_flops(model, block, self.rows, self.sequence_length)
        traffic = 18 * model.intermediate_size + 220 * model.hidden_size + 36 * self._rotated
        return (
            products / hardware.matmul_flops_per_second("bf16", self.tokens)
            + attention / hardware.attention_flops_per_second("bf16", self.sequence_length, "backward")
            + traffic * self.tokens / hardware.hbm_bytes_per_second.value
        )

    @property
    def _rotated(self) -> int:
        """Elements a token of queries and keys, which the rotary embedding goes over."""
        return (self.model.num_heads + self.model.num_kv_heads) * self.model.head_dim

    def _parameters(self, operation: Operation) -> int:
        if operation.block < 0:
            return self.model.num_parameters
        return self.model.block(operation.block).num_parameters

    def _copied_bytes(self, operation: Operation) -> float:
        match operation.kind:
            case Kind.LOAD_BATCH:
                return 3 * 8 * self.tokens
            case Kind.STORE_ACTIVATION | Kind.LOAD_ACTIVATION:
                return WEIGHT_BYTES * self.tokens * self.model.hidden_size
            case _:
                return WEIGHT_BYTES * self._parameters(operation)

    def _dram_bytes(self, operation: Operation) -> float:
        if operation.resource is Resource.HOST:
            return self.phases[operation.kind].dram_bytes * self._parameters(operation)
        return 0.0 if operation.resource is Resource.COMPUTE else self._copied_bytes(operation)

    def transient_bytes(self, operation: Operation) -> int:
        """Bytes a token that transformers' eager Qwen2 layer takes, followed allocation by allocation.

        Forward: three tensors of the MLP and what surrounds them. Backward, of the layer's graph: four tensors of the
        MLP that autograd saves and two of their gradients, 24 bytes a hidden element for norms, residuals and
        projections, keys, values and the log-sum of each head. The loss: all logits, two chunks of their gradient, the
        final norm, and the head's gradient twice. `tests/test_megatrain.py` follows torch and compares.
        """
        model = self.model
        hidden, mlp = model.hidden_size, model.intermediate_size
        mlp_tokens = min(self.tokens, self.mlp_chunk_tokens or self.tokens)
        heads = 4 * model.num_kv_heads * model.head_dim + 4 * model.num_heads
        match operation.kind:
            case Kind.FORWARD | Kind.RECOMPUTE if operation.block in model.layers:
                return 6 * mlp * mlp_tokens + 4 * hidden * self.tokens
            case Kind.BACKWARD if operation.block in model.layers:
                return 12 * mlp * mlp_tokens + (24 * hidden + heads) * self.tokens
            case Kind.LOSS:
                chunk = self.rows * min(LOSS_CHUNK_POSITIONS, self.sequence_length)
                logits = WEIGHT_BYTES * model.vocab_size * (self.tokens + 2 * chunk)
                return logits + 10 * hidden * self.tokens + WEIGHT_BYTES * model.vocab_size * hidden
            case _:
                return 0


def allocated_bytes(program: Program, pricing: MegaTrainPricing) -> int:
    """Most device memory allocated at once, if the operations ran one after another: a replay's peak or a little less.

    torch's `max_memory_allocated`: without the context, and without what the allocator reserves beyond it.
    """
    live = {b.name: b.num_bytes for b in program.buffers.values() if b.persistent and b.tier == "device"}
    level = peak = sum(live.values())
    for operation in program:
        for access in operation.writes:
            buffer = program.buffers[access.buffer]
            if buffer.tier == "device" and buffer.name not in live:
                live[buffer.name] = buffer.num_bytes
                level += buffer.num_bytes
        peak = max(peak, level + pricing.transient_bytes(operation))
        level -= sum(live.pop(name, 0) for name in operation.releases)
    return peak


def persistent_device_bytes(program: Program) -> int:
    """Device memory that is allocated before the first step and stays: buffers for two layers, embedding and head."""
    return sum(b.num_bytes for b in program.buffers.values() if b.persistent and b.tier == "device")


def host_bytes(program: Program) -> int:
    """Host memory of a program's buffers; those that pass through a step all live at its turn to the backward."""
    return sum(b.num_bytes for b in program.buffers.values() if b.tier == "host")
