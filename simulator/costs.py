"""OperationCosts: measured seconds and bytes of Conveyor's own operations; Pricing: what an operation costs in a plan.

A price is looked up measured first (exactly, else interpolated over rows), and computed by roofline from the hardware
profile where nothing was measured. `Pricing.origins` says which operations got which, so no estimate hides.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy
import pydantic

from simulator import formulas
from simulator.errors import InputError
from simulator.formats import PRECISIONS, gradient_bytes, state_bytes
from simulator.freezing import unfrozen
from simulator.hardware import HardwareProfile, LinkDirection
from simulator.model import ModelSpec
from simulator.placement import batch_bytes
from simulator.policy import SAVE_LEVELS, Policy, Workload
from simulator.program import Buffer, Kind, Operation, Resource, Role
from simulator.replay import Price, Sharing
from simulator.schema import Schema, identity_hash

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


class MeasuredCost(Schema):
    """One operation, measured alone: seconds, bytes that live only while it runs, bytes it keeps for the backward."""

    seconds: float = pydantic.Field(ge=0)
    transient_bytes: int | None = pydantic.Field(default=None, ge=0)  # None: not measured, estimated
    kept_bytes: int = pydantic.Field(default=0, ge=0)
    source: str


class OperationCosts(Schema):
    """A table of measured operations for one machine, one layer shape and one precision. Depth does not matter."""

    hardware: str  # identity hash of the profile it was measured under
    shape: str  # `shape_hash` of the model
    precision: str
    compiled: bool
    entries: dict[str, MeasuredCost] = pydantic.Field(default_factory=dict)
    compute_beside_copies: float = pydantic.Field(default=1.0, gt=0, le=1)  # rate of compute while both links run
    folded_runs: tuple[str, ...] = ()  # runs whose measured operations were folded in: calibrated, not held out

    def with_entries(self, entries: Mapping[str, MeasuredCost], *, runs: tuple[str, ...] = ()) -> "OperationCosts":
        return self.model_copy(
            update={"entries": {**self.entries, **entries}, "folded_runs": (*self.folded_runs, *runs)}
        )

    @property
    def measured_levels(self) -> frozenset[str]:
        """Save levels of which a layer's backward was measured."""
        keys = (key.split(".") for key in self.entries if key.startswith(f"{Kind.BACKWARD.value}.layer."))
        return frozenset(parts[-2] for parts in keys)


def _first(pair: tuple[int, MeasuredCost]) -> int:
    return pair[0]


def shape_hash(model: ModelSpec) -> str:
    """Identity of what one layer, the embedding and the head compute, whatever the depth and whatever is frozen."""
    model = unfrozen(model)
    return identity_hash(
        [model.family, model.num_heads, model.num_kv_heads, [kind.model_dump(mode="json") for kind in model.kinds]]
    )


def operation_key(operation: Operation, model: ModelSpec, workload: Workload, policy: Policy) -> str:
    """The entry of OperationCosts that an operation is measured under, e.g. `forward.layer.full_attention.keep.2x1024`.

    What depends on tokens ends in `{rows}x{sequence_length}`. A block that is frozen, wholly or in part, computes less
    in its backward: `backward.layer.full_attention.trains_0.keep.2x1024`, with the number of trained parameters.
    """
    tokens = f"{policy.micro_batch_rows}x{workload.sequence_length}"
    if operation.kind is Kind.LOAD_BATCH:
        return f"{operation.kind.value}.{tokens}"
    if operation.block < 0:
        return operation.kind.value
    block = model.block(operation.block)
    parts = [operation.kind.value, block.kind, block.variant]
    if operation.kind in (Kind.BACKWARD, Kind.LOSS):
        parts += _freezing(operation.block, model)
    if operation.kind in (Kind.FORWARD, Kind.BACKWARD):
        return ".".join([*parts, *([operation.level] if operation.level else []), tokens])
    if operation.kind is Kind.RECOMPUTE:
        return ".".join(["forward", *parts[1:], "input", tokens])
    if operation.kind in (Kind.LOSS, Kind.EVALUATE):
        return ".".join([*parts, str(policy.head_chunk_tokens), tokens])
    if operation.kind is Kind.UPDATE:
        return ".".join([*parts, operation.resource.value, policy.gradient_format, policy.state_format])
    if operation.kind in (Kind.FINISH_GRADIENT, Kind.STORE_GRADIENT):
        return ".".join([*parts, policy.gradient_format])
    return ".".join(parts)


def _freezing(block: int, model: ModelSpec) -> list[str]:
    """What a key says of a frozen block; of a tied head, whose projection is the embedding's, of both together."""
    specs = [model.block(block)]
    if block == model.head and model.tied_embeddings:
        specs.append(model.block(0))
    trained = sum(spec.num_trained_parameters for spec in specs)
    return [] if trained == sum(spec.num_parameters for spec in specs) else [f"trains_{trained}"]


class Pricing:
    """Prices of the operations and buffers of one model, workload and policy on one machine.

    Raises InputError for costs that were measured for another layer shape, precision or form of execution.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        policy: Policy,
        hardware: HardwareProfile,
        costs: OperationCosts | None = None,
    ) -> None:
        if costs is not None:
            _check_costs(costs, model, workload)
        self.model, self.workload, self.policy, self.hardware = model, workload, policy, hardware
        self.entries = dict(costs.entries) if costs is not None else {}
        self.compute_beside_copies = costs.compute_beside_copies if costs is not None else 1.0
        self.tokens = policy.micro_batch_rows * workload.sequence_length
        self.origins: dict[str, str] = {}  # operation key -> measured | interpolated | roofline
        self._prices: dict[str, Price] = {}
        self._kept_bytes: dict[str, int] = {}  # by operation key of the forward

    def price(self, operation: Operation) -> Price:
        key = operation_key(operation, self.model, self.workload, self.policy)
        if key not in self._prices:
            self._prices[key] = self._price(key, operation)
        return self._prices[key]

    def size(self, buffer: Buffer) -> int:
        """Bytes of a buffer. What a save level keeps is known by measurement, or estimated."""
        if buffer.role is not Role.SAVED:
            return buffer.num_bytes
        block = self.model.block(buffer.block)
        key = f"forward.{block.kind}.{block.variant}.{buffer.level}.{self._rows}"
        if key not in self._kept_bytes:
            measured = self._kept_at_rows(key)
            self._kept_bytes[key] = self._roofline_kept_bytes(buffer.level) if measured is None else measured
        return self._kept_bytes[key]

    @cached_property
    def sharing(self) -> Sharing:
        """How operations slow each other on this machine."""
        link = self.hardware.link
        duplex = []
        for direction, both in (("h2d", link.duplex.h2d), ("d2h", link.duplex.d2h)):
            rates = [point.bytes_per_second.value for point in link.points if point.direction == direction]
            duplex.append(both.value / max(rates))
        return Sharing(
            inline=self.hardware.execution == "inline",
            duplex=min(duplex),
            dram_bytes_per_second=self.hardware.host_dram_bytes_per_second.value,
            compute_beside_copies=self.compute_beside_copies,
        )

    @property
    def _rows(self) -> str:
        return f"{self.policy.micro_batch_rows}x{self.workload.sequence_length}"

    def _price(self, key: str, operation: Operation) -> Price:
        measured = self._measured(key, operation) or self._measured_like(key, operation)
        seconds = measured.seconds if measured is not None else self._roofline_seconds(operation)
        self.origins[key] = "roofline" if measured is None else "measured" if key in self.entries else "interpolated"
        transient = None if measured is None else measured.transient_bytes
        if transient is None:
            transient = self._roofline_transient_bytes(operation)
        return Price(seconds, self._dram_bytes(operation), transient)

    def _measured(self, key: str, operation: Operation) -> MeasuredCost | None:
        """The entry of `key`, one between measured row counts, or the nearest one scaled as the rooflines are."""
        if key in self.entries:
            return self.entries[key]
        points = self._measured_rows(key)
        if not points:
            return None
        rows, at = self.policy.micro_batch_rows, [point[0] for point in points]
        if at[0] <= rows <= at[-1]:
            seconds = float(numpy.interp(rows, at, [cost.seconds for _, cost in points]))
            transients = [cost.transient_bytes for _, cost in points if cost.transient_bytes is not None]
            whole = len(transients) == len(points)
            transient = round(float(numpy.interp(rows, at, transients))) if whole else None
        else:
            # Launches, sums over micro-batches and slow small products do not shrink with the rows: rooflines know.
            near_rows, near = points[0] if rows < at[0] else points[-1]
            there = self._at_rows(near_rows)
            seconds = near.seconds * self._roofline_seconds(operation) / there._roofline_seconds(operation)
            transient = near.transient_bytes
            if transient is not None:
                here = self._roofline_transient_bytes(operation)
                transient = round(transient * here / max(1, there._roofline_transient_bytes(operation)))
        return MeasuredCost(seconds=seconds, transient_bytes=transient, source="interpolated over rows")

    def _measured_like(self, key: str, operation: Operation) -> MeasuredCost | None:
        """What does a part of a measured operation's work: its cost, scaled as the rooflines of the two are.

        A frozen block's backward is a part of the whole block's, and an evaluation's loss of the loss with gradients.
        """
        whole, like = self, operation
        if operation.kind is Kind.EVALUATE:
            like = replace(operation, kind=Kind.LOSS)
        elif "trains_" not in key:
            return None
        if self.model.num_trained_parameters < self.model.num_parameters:
            whole = self._unfrozen
        found = whole._measured(operation_key(like, whole.model, self.workload, self.policy), like)
        if found is None:
            return None
        share = self._roofline_seconds(operation) / whole._roofline_seconds(like)
        return found.model_copy(update={"seconds": found.seconds * share, "source": f"scaled from {like.kind.value}"})

    @cached_property
    def _unfrozen(self) -> "Pricing":
        """The same prices where nothing is frozen."""
        whole = Pricing(unfrozen(self.model), self.workload, self.policy, self.hardware)
        whole.entries = self.entries
        return whole

    def _kept_at_rows(self, key: str) -> int | None:
        """Kept bytes are in proportion to rows."""
        if key in self.entries:
            return self.entries[key].kept_bytes
        points = self._measured_rows(key)
        if not points:
            return None
        rows, at = self.policy.micro_batch_rows, [point[0] for point in points]
        if at[0] <= rows <= at[-1]:
            return round(float(numpy.interp(rows, at, [cost.kept_bytes for _, cost in points])))
        near_rows, near = points[0] if rows < at[0] else points[-1]
        return round(near.kept_bytes * rows / near_rows)

    def _measured_rows(self, key: str) -> list[tuple[int, MeasuredCost]]:
        """(rows, entry) of the same operation at the same sequence length, ascending; none where rows do not matter."""
        prefix, _, tokens = key.rpartition(".")
        if "x" not in tokens:
            return []
        sequence_length = int(tokens.split("x")[1])
        found = self._same_prefix(prefix, sequence_length)
        return sorted(((int(other.rpartition(".")[2].split("x")[0]), cost) for other, cost in found), key=_first)

    def _at_rows(self, rows: int) -> "Pricing":
        """The same prices for another micro-batch size."""
        policy = self.policy.model_copy(update={"micro_batch_rows": rows})
        return Pricing(self.model, self.workload, policy, self.hardware)

    def _same_prefix(self, prefix: str, sequence_length: int) -> list[tuple[str, MeasuredCost]]:
        return [
            (key, cost)
            for key, cost in self.entries.items()
            if key.rpartition(".")[0] == prefix and key.endswith(f"x{sequence_length}")
        ]

    # Rooflines: the larger of arithmetic and memory time, or their sum where kernels alternate.

    def _roofline_seconds(self, operation: Operation) -> float:
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
            case Kind.LOAD_BATCH:
                return self._link_seconds("h2d", batch_bytes(self.tokens, packed=self.workload.packed) - 8)
            case _:
                return 4 * launch

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

    def _roofline_kept_bytes(self, level: str) -> int:
        model = self.model
        kept = 5 * model.hidden_size + 3 * model.intermediate_size
        if not self.workload.compiled:
            kept = int(EAGER_KEPT_FACTOR * kept)
        return round(KEPT_SHARE[level] * self.tokens * kept * PRECISIONS[self.workload.precision].weight)

    def _roofline_transient_bytes(self, operation: Operation) -> int:
        model, width = self.model, PRECISIONS[self.workload.precision].weight
        layer = self.tokens * (4 * model.hidden_size + 3 * model.intermediate_size) * width
        rows, sequence_length = self.policy.micro_batch_rows, self.workload.sequence_length
        layer += 6 * 4 * formulas.capped_chunk_elements(model, rows, sequence_length)  # six tensors of scores in fp32
        match operation.kind:
            case Kind.FORWARD | Kind.RECOMPUTE if operation.block in model.layers:
                return layer
            case Kind.BACKWARD if operation.block in model.layers:
                recomputed = self._roofline_kept_bytes("keep") if operation.level != "keep" else 0
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

    def _dram_bytes(self, operation: Operation) -> float:
        """Host DRAM traffic: what a copy moves, and what a host update reads and writes."""
        if operation.block < 0:
            return 0.0
        elements = self.model.block(operation.block).num_elements
        precision = self.workload.precision
        completed = gradient_bytes(precision, self.policy.gradient_format)
        weight = PRECISIONS[precision].weight
        match operation.kind:
            case Kind.LOAD_WEIGHTS:
                return float(elements * weight)
            case Kind.STORE_GRADIENT:
                return float(elements * completed)
            case Kind.UPDATE if operation.resource is Resource.HOST:
                return float(elements * (2 * (state_bytes(precision, self.policy.state_format) + weight) + completed))
            case _:
                return 0.0


def _check_costs(costs: OperationCosts, model: ModelSpec, workload: Workload) -> None:
    for what, measured, wanted in (
        ("layer shape", costs.shape, shape_hash(model)),
        ("precision", costs.precision, workload.precision),
        ("execution", _execution(costs.compiled), _execution(workload.compiled)),
    ):
        if measured != wanted:
            raise InputError(f"costs: measured for {what} {measured}, this run has {wanted}; measure again")


def _execution(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


assert set(RECOMPUTED_SHARE) == set(KEPT_SHARE) == set(SAVE_LEVELS)
