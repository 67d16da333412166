"""A small hardware profile whose numbers can be computed with by hand."""

from simulator.figure import Figure
from simulator.hardware import AttentionPoint, HardwareProfile, Link, LinkPoint, LinkRates, MatmulPoint
from simulator.machine import Device, Disk, Host
from simulator.units import GIB, MIB


def figure(value: float) -> Figure:
    return Figure(value=value, source="derived: for a test")


def both(value: float) -> LinkRates:
    return LinkRates(h2d=figure(value), d2h=figure(value))


def toy_profile() -> HardwareProfile:
    """A GPU of 24 GiB: matmul 100 and 300 TFLOP/s at 100 and 10,000 tokens, a link of 10 and 20 GB/s."""
    return HardwareProfile(
        name="toy",
        device=Device(kind="cuda", name="Toy", memory_bytes=24 * GIB, num_multiprocessors=80),
        host=Host(cpu="Toy CPU", num_cores=8, memory_bytes=96 * GIB),
        disk=Disk(free_bytes=500 * GIB, read_bytes_per_second=figure(2e9), write_bytes_per_second=figure(1e9)),
        execution="streams",
        shared_memory=False,
        versions={"torch": "2.13"},
        matmul=(
            MatmulPoint(precision="bf16", tokens=10_000, flops_per_second=figure(300e12)),
            MatmulPoint(precision="bf16", tokens=100, flops_per_second=figure(100e12)),
            MatmulPoint(precision="fp32", tokens=1000, flops_per_second=figure(20e12)),
        ),
        attention=tuple(
            AttentionPoint(
                precision="bf16",
                sequence_length=length,
                backend=backend,
                forward_flops_per_second=figure(forward),
                backward_flops_per_second=figure(forward / 2),
            )
            for backend, length, forward in (
                ("flash", 1024, 200e12),
                ("flash", 4096, 400e12),
                ("cudnn", 1024, 150e12),
                ("cudnn", 4096, 600e12),
            )
        ),
        hbm_bytes_per_second=figure(1e12),
        link=Link(
            points=tuple(
                LinkPoint(direction=direction, num_bytes=num_bytes, bytes_per_second=figure(rate))
                for direction in ("h2d", "d2h")
                for num_bytes, rate in ((MIB, 10e9), (4 * MIB, 20e9))
            ),
            duplex=both(16e9),
            duplex_host_busy=both(10e9),
        ),
        host_dram_bytes_per_second=figure(100e9),
        host_optimizer_bytes_per_second=figure(80e9),
        launch_seconds=figure(4e-6),
        context_bytes=figure(512 * MIB),
        host_base_bytes=figure(1 * GIB),
    )
