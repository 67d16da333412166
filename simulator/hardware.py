"""HardwareProfile: a machine's capacities and what it sustains, each figure with its source; and the catalogue.

Rates are those of sustained load: a GPU that is hot and power limited, links that have run for a while. The probe
measures them (`simulator/probe.py`); machines that nobody measured come from datasheets (`simulator/datasheet.py`).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Self

import pydantic

from simulator.errors import InputError
from simulator.figure import (
    Bytes,
    BytesOrNone,
    BytesPerSecond,
    FlopsPerSecond,
    NamedFigure,
    Price,
    Seconds,
    Share,
    interpolate,
)
from simulator.formats import PRECISIONS, Precision
from simulator.machine import Device, Disk, Execution, Host
from simulator.nearest import did_you_mean, nearest_name, nearest_path
from simulator.schema import Schema, identity_hash
from simulator.units import format_bytes

LinkDirection = Literal["h2d", "d2h"]
PassDirection = Literal["forward", "backward"]

LINK_DIRECTIONS: tuple[LinkDirection, ...] = ("h2d", "d2h")
CATALOGUE = Path(__file__).parent / "catalogue" / "hardware"
MOST_TOKENS = 2**40  # far above what any point is measured at, and low enough to compute with


class MatmulPoint(Schema):
    """What matrix products of a decoder layer's shapes sustain at `tokens` rows: 2 m k n FLOPs a product."""

    precision: Precision
    tokens: int = pydantic.Field(gt=0, le=MOST_TOKENS)
    flops_per_second: FlopsPerSecond


class AttentionPoint(Schema):
    """What causal attention sustains at a sequence length with one backend of torch's SDPA.

    FLOPs count the causal half: 2 s^2 heads head_dim a sequence forward (two products of which half is masked) and
    twice that backward, the convention behind `6 L heads head_dim sum(s^2)` a step. Kernels that form the scores again
    in the backward do 2.5 times the forward's work: rates published by that count are 1.25 times higher than these.
    """

    precision: Precision
    sequence_length: int = pydantic.Field(gt=0, le=MOST_TOKENS)
    backend: str = pydantic.Field(min_length=1)
    forward_flops_per_second: FlopsPerSecond
    backward_flops_per_second: FlopsPerSecond


class LinkPoint(Schema):
    """What one direction of the link, alone, carries in copies of `num_bytes` between pinned memory and the device."""

    direction: LinkDirection
    num_bytes: int = pydantic.Field(gt=0, le=2**50)
    bytes_per_second: BytesPerSecond


class LinkRates(Schema):
    """A rate for each direction of the link."""

    h2d: BytesPerSecond
    d2h: BytesPerSecond


class Link(Schema):
    """The link between host and device memory. On a CPU machine: copies between two host buffers."""

    points: tuple[LinkPoint, ...] = pydantic.Field(min_length=2)
    duplex: LinkRates  # large copies both ways at once
    duplex_host_busy: LinkRates  # the same while the host's cores run an optimizer
    pageable: LinkRates | None = None  # large copies from and to memory that is not pinned

    def direction_points(self, direction: LinkDirection) -> list[LinkPoint]:
        """The points of one direction, smallest copies first."""
        return sorted((p for p in self.points if p.direction == direction), key=lambda point: point.num_bytes)


class HardwareProfile(Schema):
    """A machine as the simulator and the planner see it."""

    name: str = pydantic.Field(min_length=1)
    device: Device
    host: Host
    disk: Disk
    execution: Execution
    shared_memory: bool  # device and host tier are the same RAM: their capacities are one, not a sum
    versions: dict[str, str] = pydantic.Field(default_factory=dict)
    matmul: tuple[MatmulPoint, ...] = pydantic.Field(min_length=1)
    attention: tuple[AttentionPoint, ...] = pydantic.Field(min_length=1)
    hbm_bytes_per_second: BytesPerSecond  # device memory, read + written
    link: Link
    # All that moves through host DRAM at once: DMA of the link, once a byte, and what the host's cores read and write.
    # Where memory is shared a copied byte is both read and written, and counts twice.
    host_dram_bytes_per_second: BytesPerSecond
    host_optimizer_bytes_per_second: BytesPerSecond  # an AdamW-like pass on all cores, alone: read + written
    launch_seconds: Seconds  # from one small operation to the next, as one Python thread issues them
    context_bytes: BytesOrNone  # device memory in use before the first allocation; 0 on a CPU machine
    # Device memory that libraries take beside a run's buffers: workspaces, one a stream; None: not known, counted as 0.
    library_bytes: BytesOrNone | None = None
    host_base_bytes: Bytes  # of a process that has trained a step of a small model: simulator.bench.process
    sustained_factor: Share | None = None  # hot over cold rate of one product; the points are hot already
    price_per_hour: Price | None = None

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> Self:
        wrong = [*self._contradictions(), *self._repeated_points()]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _contradictions(self) -> Iterator[str]:
        cpu = self.device.kind == "cpu"
        if cpu != (self.execution == "inline"):
            yield f"execution: {self.execution!r} is impossible on a {self.device.kind!r} device"
        if cpu and not self.shared_memory:
            yield "shared_memory: false is impossible on a 'cpu' device, which computes in host memory"
        if self.shared_memory and self.device.memory_bytes > self.host.memory_bytes:
            yield "device.memory_bytes: is more than host.memory_bytes although memory is shared"
        if (self.host.pinned_limit_bytes or 0) > self.host.memory_bytes:
            yield "host.pinned_limit_bytes: is more than host.memory_bytes"
        if self.context_bytes.value >= self.device.memory_bytes:
            yield "context_bytes: leaves nothing of device.memory_bytes"
        if self.host_base_bytes.value >= self.host.memory_bytes:
            yield "host_base_bytes: leaves nothing of host.memory_bytes"
        if self.host_optimizer_bytes_per_second.value > self.host_dram_bytes_per_second.value:
            yield "host_optimizer_bytes_per_second: is more than host_dram_bytes_per_second, of which it is a part"
        for direction in LINK_DIRECTIONS:
            points = self.link.direction_points(direction)
            if not points:
                yield f"link.points: has no point for {direction!r}"
                continue
            alone = max(point.bytes_per_second.value for point in points)
            duplex = getattr(self.link.duplex, direction).value
            if duplex > alone:
                yield f"link.duplex.{direction}: is more than the direction carries alone"
            if getattr(self.link.duplex_host_busy, direction).value > duplex:
                yield f"link.duplex_host_busy.{direction}: is more than link.duplex.{direction}"

    def _repeated_points(self) -> Iterator[str]:
        keys: Mapping[str, list[tuple[object, ...]]] = {
            "matmul": [(p.precision, p.tokens) for p in self.matmul],
            "attention": [(p.precision, p.sequence_length, p.backend) for p in self.attention],
            "link.points": [(p.direction, p.num_bytes) for p in self.link.points],
        }
        for field, points in keys.items():
            repeated = sorted({str(key) for key in points if points.count(key) > 1})
            if repeated:
                yield f"{field}: more than one point for {', '.join(repeated)}"

    @property
    def identity_hash(self) -> str:
        """Hash of device, capacities and versions. Measured rates and the disk's free space, which drift, stay out."""
        fields = {"device", "host", "execution", "shared_memory", "versions"}
        return identity_hash(self.model_dump(mode="json", include=fields))

    @property
    def total_memory_bytes(self) -> int:
        """Device and host memory together; one of them where they are the same RAM."""
        return self.host.memory_bytes + (0 if self.shared_memory else self.device.memory_bytes)

    @property
    def usable_host_bytes(self) -> int:
        """Host memory that a run may take: all, or with a limit of its own on pinned memory that and the bare process.

        All that a run holds on the host is pinned, but where nothing crosses a link.
        """
        pinned, memory_bytes = self.host.pinned_limit_bytes, self.host.memory_bytes
        if pinned is None or self.shared_memory or self.device.kind != "cuda":
            return memory_bytes
        return min(memory_bytes, pinned + round(self.host_base_bytes.value))

    def matmul_flops_per_second(self, precision: Precision, tokens: float) -> float:
        """Sustained rate of a layer's matrix products over `tokens` rows, linear in log(tokens) between the points.

        Beyond the points the nearest one holds; below the first, never more than reading the weights allows.
        Raises InputError where the profile knows nothing of the precision.
        """
        points = sorted((p.tokens, p.flops_per_second.value) for p in self.matmul if p.precision == precision)
        if not points:
            raise self._unknown_precision("matmul", precision, {point.precision for point in self.matmul})
        rate = interpolate([(math.log(at), value) for at, value in points], math.log(tokens))
        if tokens < points[0][0]:
            weights_read = 2 * tokens * self.hbm_bytes_per_second.value / PRECISIONS[precision].weight
            rate = min(rate, weights_read)
        return rate

    def attention_flops_per_second(
        self, precision: Precision, sequence_length: float, direction: PassDirection, *, backend: str | None = None
    ) -> float:
        """Rate of causal attention in AttentionPoint's FLOPs, linear in log(sequence_length) between the points.

        `backend` None takes the fastest one at this length. Raises InputError for an unknown precision or backend.
        """
        series: dict[str, list[tuple[float, float]]] = {}
        for point in sorted(self.attention, key=lambda point: point.sequence_length):
            if point.precision == precision and backend in (None, point.backend):
                forward, backward = point.forward_flops_per_second, point.backward_flops_per_second
                rate = (forward if direction == "forward" else backward).value
                series.setdefault(point.backend, []).append((math.log(point.sequence_length), rate))
        if not series and backend is not None:
            known = sorted({point.backend for point in self.attention if point.precision == precision})
            if known:
                raise InputError(f"hardware {self.name!r}: no attention backend {backend!r}, only {', '.join(known)}")
        if not series:
            raise self._unknown_precision("attention", precision, {point.precision for point in self.attention})
        return max(interpolate(points, math.log(sequence_length)) for points in series.values())

    def link_seconds(
        self, direction: LinkDirection, num_bytes: float, *, duplex: bool = False, host_busy: bool = False
    ) -> float:
        """Time of one pinned copy: linear in bytes between the points, latency + bytes / rate below the first.

        `duplex`: the other direction is busy too; `host_busy`: both are, and the host's cores run an optimizer.
        """
        points = self.link.direction_points(direction)
        times = [(float(p.num_bytes), p.num_bytes / p.bytes_per_second.value) for p in points]
        (first_bytes, first), (last_bytes, last) = times[0], times[-1]
        if num_bytes >= last_bytes:
            seconds = last * num_bytes / last_bytes
        elif num_bytes < first_bytes:
            slope = (times[1][1] - first) / (times[1][0] - first_bytes) if len(times) > 1 else first / first_bytes
            latency = min(max(first - slope * first_bytes, 0.0), first)
            seconds = latency + (first - latency) * num_bytes / first_bytes
        else:
            seconds = interpolate(times, num_bytes)
        alone = max(point.bytes_per_second.value for point in points)
        if host_busy:
            return seconds * alone / float(getattr(self.link.duplex_host_busy, direction).value)
        if duplex:
            return seconds * alone / float(getattr(self.link.duplex, direction).value)
        return seconds

    def link_bytes_per_second(
        self, direction: LinkDirection, num_bytes: float, *, duplex: bool = False, host_busy: bool = False
    ) -> float:
        """Rate of one pinned copy of `num_bytes` > 0; see `link_seconds`."""
        return num_bytes / self.link_seconds(direction, num_bytes, duplex=duplex, host_busy=host_busy)

    def figures(self) -> Iterator[NamedFigure]:
        """Every figure of the profile, with a label that is unique in it."""
        for m in self.matmul:
            yield NamedFigure(f"matmul {m.precision}, {m.tokens:,} tokens", "FLOP/s", m.flops_per_second)
        for a in self.attention:
            label = f"attention {a.precision} {a.backend}, {a.sequence_length:,} long"
            yield NamedFigure(f"{label}, forward", "FLOP/s", a.forward_flops_per_second)
            yield NamedFigure(f"{label}, backward", "FLOP/s", a.backward_flops_per_second)
        yield NamedFigure("device memory, read + written", "bytes/s", self.hbm_bytes_per_second)
        for p in self.link.points:
            yield NamedFigure(f"{p.direction}, copies of {format_bytes(p.num_bytes)}", "bytes/s", p.bytes_per_second)
        for words, rates in (
            ("both directions at once", self.link.duplex),
            ("both at once, host optimizer running", self.link.duplex_host_busy),
            ("pageable memory", self.link.pageable),
        ):
            if rates is not None:
                yield NamedFigure(f"h2d, {words}", "bytes/s", rates.h2d)
                yield NamedFigure(f"d2h, {words}", "bytes/s", rates.d2h)
        yield NamedFigure("host DRAM, link and optimizer together", "bytes/s", self.host_dram_bytes_per_second)
        yield NamedFigure("host DRAM, optimizer alone", "bytes/s", self.host_optimizer_bytes_per_second)
        yield NamedFigure("launch of one operation", "s", self.launch_seconds)
        yield NamedFigure("device memory before the first allocation", "bytes", self.context_bytes)
        if self.library_bytes is not None:
            yield NamedFigure("device memory that kernels of libraries take", "bytes", self.library_bytes)
        yield NamedFigure("host memory of the bare process", "bytes", self.host_base_bytes)
        if self.disk.read_bytes_per_second is not None:
            yield NamedFigure("disk read", "bytes/s", self.disk.read_bytes_per_second)
        if self.disk.write_bytes_per_second is not None:
            yield NamedFigure("disk write", "bytes/s", self.disk.write_bytes_per_second)
        if self.sustained_factor is not None:
            yield NamedFigure("sustained over burst rate", "", self.sustained_factor)
        if self.price_per_hour is not None:
            yield NamedFigure("price", "per hour", self.price_per_hour)

    def _unknown_precision(self, what: str, precision: str, known: set[Precision]) -> InputError:
        return InputError(
            f"hardware {self.name!r}: has no {what} figures in {precision}, only in {', '.join(sorted(known))}; "
            "train in one of these, or probe the machine"
        )


def catalogue_names() -> list[str]:
    """Names that `load_hardware` takes: machines that were measured, and machines known by datasheet."""
    return sorted(path.stem for path in CATALOGUE.rglob("*.json"))


def load_hardware(name_or_path: str | Path) -> HardwareProfile:
    """The profile of a catalogue name, or of a file that `conveyor probe` wrote. Raises InputError."""
    name, path = str(name_or_path), Path(name_or_path)
    if name in catalogue_names():
        return _load_catalogue(name)
    if path.is_file():
        return HardwareProfile.load(path)
    known = ", ".join(catalogue_names())
    if path.suffix == ".json" or len(path.parts) > 1:
        hint = did_you_mean(nearest_path(path))
        raise InputError(f"hardware: there is no file {name!r}{hint}; the catalogue has {known}")
    hint = did_you_mean(nearest_name(name.lower(), catalogue_names()))
    raise InputError(f"hardware: {name!r} is neither a file nor one of {known}{hint}")


def _load_catalogue(name: str) -> HardwareProfile:
    measured = CATALOGUE / f"{name}.json"
    if measured.is_file():
        return HardwareProfile.load(measured)
    # Imported here: a datasheet builds a HardwareProfile, so its module imports this one.
    from simulator.datasheet import Datasheet

    return Datasheet.load(CATALOGUE / "datasheets" / f"{name}.json").profile()
