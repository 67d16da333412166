"""OperationCosts: measured seconds and bytes of Conveyor's own operations; Pricing: what an operation costs in a plan.

A price is looked up measured first (exactly, else interpolated over rows), and computed by roofline from the hardware
profile where nothing was measured. `Pricing.origins` says which operations got which, so no estimate hides.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated

import numpy
import pydantic

from simulator.errors import InputError
from simulator.freezing import unfrozen
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.placement import gradients_written_once
from simulator.policy import EAGER_SAVE_LEVELS, SAVE_LEVELS, Policy, SaveLevel, Workload
from simulator.program import Buffer, Kind, Operation, Role
from simulator.replay import Price, Sharing
from simulator.roofline import Roofline
from simulator.schema import Schema, identity_hash

# What depends on tokens ends in ROWSxLENGTH: `operation_key`.
EntryKey = Annotated[str, pydantic.Field(pattern=r"^(.*\.)?([^.x]*|[1-9][0-9]{0,17}x[1-9][0-9]{0,17})$")]


class MeasuredCost(Schema):
    """One operation, measured alone: seconds, bytes that live only while it runs, bytes it keeps for the backward."""

    seconds: float = pydantic.Field(ge=0, le=86_400)  # no operation takes a day
    transient_bytes: int | None = pydantic.Field(default=None, ge=0, le=2**50)  # None: not measured, estimated
    kept_bytes: int = pydantic.Field(default=0, ge=0, le=2**50)
    source: str


class OperationCosts(Schema):
    """A table of measured operations for one machine, one layer shape and one precision. Depth does not matter."""

    hardware: str  # identity hash of the profile it was measured under
    shape: str  # `shape_hash` of the model
    precision: str
    compiled: bool
    entries: dict[EntryKey, MeasuredCost] = pydantic.Field(default_factory=dict)
    compute_beside_copies: float = pydantic.Field(default=1.0, gt=0, le=1)  # rate of compute while both links run
    # What measured them; empty in files from before they said it.
    device_name: str = pydantic.Field(default="", exclude_if=lambda name: not name)
    folded_runs: tuple[str, ...] = ()  # runs whose measured operations were folded in: calibrated, not held out

    def with_entries(self, entries: Mapping[str, MeasuredCost], *, runs: tuple[str, ...] = ()) -> "OperationCosts":
        return self.model_copy(
            update={"entries": {**self.entries, **entries}, "folded_runs": (*self.folded_runs, *runs)}
        )

    def other_device(self, device_name: str) -> bool:
        """Whether they were measured on a device of another name. `NVIDIA H200` and `NVIDIA H200 SXM` are one."""
        if not self.device_name:
            return False
        shorter, longer = sorted((self.device_name.split(), device_name.split()), key=len)
        return longer[: len(shorter)] != shorter

    def measured_levels(self, sequence_length: int | None = None) -> frozenset[str]:
        """Save levels of which a layer's backward was measured, with sequences of this length or of any."""
        ends = "" if sequence_length is None else f"x{sequence_length}"
        keys = [key.split(".") for key in self.entries if key.startswith(f"{Kind.BACKWARD.value}.layer.")]
        return frozenset(level for *_, level, tokens in keys if tokens.endswith(ends))


def comparable_levels(workload: Workload, costs: OperationCosts | None = None) -> tuple[SaveLevel, ...]:
    """Save levels whose prices can be held against each other: of all six compiled, of the two ends eager.

    Where both ends were measured, at the sequences' length or else at any, those that were not are left out: a roofline
    among measured prices would win or lose by its own error. A table with fewer comes from runs, which tell nothing of
    the levels they did not use.
    """
    levels: tuple[SaveLevel, ...] = tuple(SAVE_LEVELS) if workload.compiled else EAGER_SAVE_LEVELS
    if costs is None:
        return levels
    for length in (workload.sequence_length, None):
        measured = costs.measured_levels(length)
        if measured >= {levels[0], levels[-1]}:
            return tuple(level for level in levels if level in measured)
    return levels


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
    if operation.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.STORE_ACTIVATION, Kind.LOAD_ACTIVATION):
        return ".".join([*parts, *([operation.level] if operation.level else []), tokens])
    if operation.kind is Kind.RECOMPUTE:
        return ".".join(["forward", *parts[1:], "input", tokens])
    if operation.kind in (Kind.LOSS, Kind.EVALUATE):
        return ".".join([*parts, str(policy.head_chunk_tokens), tokens])
    if operation.kind is Kind.UPDATE:
        return ".".join([*parts, operation.resource.value, policy.gradient_format, policy.state_format])
    if operation.kind in (Kind.LOAD_STATE, Kind.STORE_STATE):
        return ".".join([*parts, policy.state_format])
    if operation.kind is Kind.FINISH_GRADIENT and operation.block in model.layers:
        parts += ["written"] if gradients_written_once(workload, policy) else []
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
        self.roofline = Roofline(model, workload, policy, hardware)
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
            self._kept_bytes[key] = self.roofline.kept_bytes(buffer.level) if measured is None else measured
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
        seconds = measured.seconds if measured is not None else self.roofline.seconds(operation)
        self.origins[key] = "roofline" if measured is None else "measured" if key in self.entries else "interpolated"
        transient = None if measured is None else measured.transient_bytes
        if transient is None:
            transient = self.roofline.transient_bytes(operation)
        return Price(seconds, self.roofline.dram_bytes(operation), transient)

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
            seconds = near.seconds * self.roofline.seconds(operation) / there.seconds(operation)
            transient = near.transient_bytes
            if transient is not None:
                here = self.roofline.transient_bytes(operation)
                transient = round(transient * here / max(1, there.transient_bytes(operation)))
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
        share = self.roofline.seconds(operation) / whole.roofline.seconds(like)
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

    def _at_rows(self, rows: int) -> Roofline:
        """The roofline of another micro-batch size."""
        policy = self.policy.model_copy(update={"micro_batch_rows": rows})
        return Roofline(self.model, self.workload, policy, self.hardware)

    def _same_prefix(self, prefix: str, sequence_length: int) -> list[tuple[str, MeasuredCost]]:
        return [
            (key, cost)
            for key, cost in self.entries.items()
            if key.rpartition(".")[0] == prefix and key.endswith(f"x{sequence_length}")
        ]


def _check_costs(costs: OperationCosts, model: ModelSpec, workload: Workload) -> None:
    if costs.shape != shape_hash(model):
        raise InputError(
            f"costs: measured for layers of another model (shape {costs.shape}; this model's are {shape_hash(model)}); "
            "measure this one"
        )
    for what, measured, wanted in (
        ("precision", costs.precision, workload.precision),
        ("execution", _execution(costs.compiled), _execution(workload.compiled)),
    ):
        if measured != wanted:
            raise InputError(f"costs: measured for {what} {measured}, this run has {wanted}; measure again")


def _execution(compiled: bool) -> str:
    return "compiled" if compiled else "eager"
