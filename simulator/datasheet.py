"""Datasheet: a machine nobody measured, from its makers' nominal figures and one set of derating factors."""

import pydantic

from simulator.figure import BytesPerSecond, Figure, FlopsPerSecond, Unit, format_value
from simulator.formats import Precision
from simulator.hardware import LINK_DIRECTIONS, AttentionPoint, HardwareProfile, Link, LinkPoint, LinkRates, MatmulPoint
from simulator.machine import Device, Disk, Host
from simulator.schema import Schema
from simulator.units import GIB, MIB


class AttentionShare(Schema):
    """The share of the dense matmul peak that causal attention reaches, in AttentionPoint's FLOPs."""

    sequence_length: int
    forward: float = pydantic.Field(gt=0, le=1)
    backward: float = pydantic.Field(gt=0, le=1)


class AttentionShares(Schema):
    """What a generation of GPUs reaches in attention, where it is known to differ from the derating's machine."""

    points: tuple[AttentionShare, ...] = pydantic.Field(min_length=1)
    source: str = pydantic.Field(min_length=1)


class LinkShare(Schema):
    """The share of a link's nominal rate that pinned copies of one size reach."""

    num_bytes: int
    share: float = pydantic.Field(gt=0, le=1)


class Derating(Schema):
    """What a machine sustains as a share of its nominal figures."""

    matmul: float = pydantic.Field(gt=0, le=1)
    attention: tuple[AttentionShare, ...]
    hbm: float = pydantic.Field(gt=0, le=1)
    link: tuple[LinkShare, ...]
    link_duplex: float = pydantic.Field(gt=0, le=1)
    host_dram: float = pydantic.Field(gt=0, le=1)
    device_memory: float = pydantic.Field(gt=0, le=1)
    host_memory: float = pydantic.Field(gt=0, le=1)
    source: str


# Nominal: 989.4 TFLOP/s dense bf16, 4.8 TB/s, PCIe Gen5 x16 = 64 GB/s a direction, 143,771 MiB (NVIDIA H200
# datasheet and driver); host DRAM about 200 GB/s (MegaTrain, table 1). Measured: catalogue/hardware/h200.json.
H200_DERATING = Derating(
    matmul=0.715,
    attention=(
        AttentionShare(sequence_length=1024, forward=0.245, backward=0.130),
        AttentionShare(sequence_length=4096, forward=0.337, backward=0.207),
        AttentionShare(sequence_length=32768, forward=0.354, backward=0.256),
    ),
    hbm=0.887,
    link=(
        LinkShare(num_bytes=MIB, share=0.734),
        LinkShare(num_bytes=4 * MIB, share=0.828),
        LinkShare(num_bytes=16 * MIB, share=0.866),
    ),
    link_duplex=0.781,
    host_dram=0.743,
    device_memory=0.98,
    host_memory=0.96,
    source="measured over nominal on one NVIDIA H200 host, 2026-11-29",
)

LAUNCH = Figure(value=5e-6, source="derived: an allowance for launches from Python, measured on no such machine")
LIBRARIES = Figure(
    value=384 * MIB,
    source="derived: an allowance for kernels that libraries load; runs on an H200 left 330 to 380 MiB of them",
)
CONTEXT = Figure(value=600 * MIB, source="derived: an allowance for a CUDA context, measured on no such machine")
HOST_BASE = Figure(
    value=1 * GIB,
    source="derived: an allowance for a process that has not compiled yet; on an H200's host it takes 0.84 GiB",
)


class Datasheet(Schema):
    """Nominal figures of a CUDA device and of a host it is used in; `profile()` derates them."""

    name: str
    device: Device
    host: Host
    matmul_flops_per_second: dict[Precision, FlopsPerSecond]  # dense, fp32 accumulation
    hbm_bytes_per_second: BytesPerSecond
    link_bytes_per_second: BytesPerSecond  # each direction
    host_dram_bytes_per_second: BytesPerSecond
    attention: AttentionShares | None = None  # in place of the derating's

    def profile(self, derating: Derating = H200_DERATING) -> HardwareProfile:
        """What these nominal figures promise after derating; the source of each figure says `datasheet: ...`."""

        def derate(nominal: Figure, factor: float, unit: Unit = "bytes/s", why: str = derating.source) -> Figure:
            document = nominal.source.removeprefix("datasheet: ")
            source = f"datasheet: {format_value(nominal.value, unit)} ({document}) x {factor:g} ({why})"
            return Figure(value=nominal.value * factor, source=source)

        attention = self.attention or AttentionShares(points=derating.attention, source=derating.source)

        dram = derate(self.host_dram_bytes_per_second, derating.host_dram)

        def within_dram(figure: Figure, sharers: int) -> Figure:
            """`figure`, or its even share of host DRAM where `sharers` streams want more than there is."""
            share = dram.value / sharers
            if figure.value <= share:
                return figure
            words = "host DRAM's rate" if sharers == 1 else f"1/{sharers} of host DRAM's rate"
            return Figure(value=share, source=f"derived: {words}, which is below the link's; {dram.source}")

        duplex = within_dram(derate(self.link_bytes_per_second, derating.link_duplex), 2)
        # Two directions and the host's cores: an even share is 37.2 GB/s on the H200 host, 36.4 were measured there.
        busy = within_dram(duplex, 3)
        return HardwareProfile(
            name=self.name,
            device=self.device.model_copy(
                update={"memory_bytes": int(self.device.memory_bytes * derating.device_memory)}
            ),
            host=self.host.model_copy(update={"memory_bytes": int(self.host.memory_bytes * derating.host_memory)}),
            disk=Disk(free_bytes=0),
            execution="streams",
            shared_memory=False,
            matmul=tuple(
                MatmulPoint(precision=precision, tokens=8192, flops_per_second=derate(peak, derating.matmul, "FLOP/s"))
                for precision, peak in self.matmul_flops_per_second.items()
            ),
            attention=tuple(
                AttentionPoint(
                    precision=precision,
                    sequence_length=share.sequence_length,
                    backend="flash",
                    forward_flops_per_second=derate(peak, share.forward, "FLOP/s", attention.source),
                    backward_flops_per_second=derate(peak, share.backward, "FLOP/s", attention.source),
                )
                for precision, peak in self.matmul_flops_per_second.items()
                for share in attention.points
            ),
            hbm_bytes_per_second=derate(self.hbm_bytes_per_second, derating.hbm),
            link=Link(
                points=tuple(
                    LinkPoint(
                        direction=direction,
                        num_bytes=share.num_bytes,
                        bytes_per_second=within_dram(derate(self.link_bytes_per_second, share.share), 1),
                    )
                    for direction in LINK_DIRECTIONS
                    for share in derating.link
                ),
                duplex=LinkRates(h2d=duplex, d2h=duplex),
                duplex_host_busy=LinkRates(h2d=busy, d2h=busy),
            ),
            host_dram_bytes_per_second=dram,
            host_optimizer_bytes_per_second=dram,
            launch_seconds=LAUNCH,
            context_bytes=CONTEXT,
            library_bytes=LIBRARIES,
            host_base_bytes=HOST_BASE,
        )
