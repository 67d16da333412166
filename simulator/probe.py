"""Probe: measure the raw machine with torch and write down what it sustains.

Matrix products, attention, device memory, the link in both directions alone, together and beside a host optimizer,
host DRAM, launches and the disk (`simulator/bench/`); about 25 s on a CPU machine and 90 s on a GPU. No clock or power
setting is touched.
"""

import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from simulator.bench.bench import CPU_SCALE, CUDA_SCALE, QUICK_SCALE, Bench, new_bench
from simulator.bench.compute import measure_attention, measure_launch, measure_matmul
from simulator.bench.disk import measure_disk
from simulator.bench.memory import measure_device_memory, measure_link_and_dram
from simulator.bench.process import bare_process_bytes
from simulator.datasheet import LIBRARIES
from simulator.figure import Figure, format_value
from simulator.hardware import HardwareProfile
from simulator.machine import Device, Disk, Host
from simulator.system import host_memory_limit_bytes, package_versions, process_tree_bytes
from simulator.units import format_bytes


def probe(
    output: Path | str | None = None,
    *,
    name: str | None = None,
    folder: Path | str | None = None,
    quick: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> HardwareProfile:
    """Measure this machine: the first CUDA device, or the CPU where there is none.

    `output`: the JSON file to write. `folder`: where the disk is measured (default: the output's folder). `quick`
    measures small sizes in seconds, to see that everything works: such figures are not for planning. `report` takes a
    line for each figure. Raises InputError for a folder that cannot be written, ConveyorError where the system refuses
    memory.
    """
    folder = (
        Path(folder) if folder is not None else Path(output).absolute().parent if output is not None else Path.cwd()
    )
    host = current_host()
    cuda = torch.cuda.is_available()
    scale = QUICK_SCALE if quick else CUDA_SCALE if cuda else CPU_SCALE
    bench = new_bench(scale, num_cores=host.num_cores, report=report)

    # First of all, what the device holds before this process allocates anything.
    context = _context_bytes(bench)
    device = current_device()
    base = _process_bytes(bench, quick=quick)
    disk = _disk(bench, folder)
    matmul, sustained_factor = measure_matmul(bench, memory_bytes=device.memory_bytes)
    attention = measure_attention(bench)
    device_memory = measure_device_memory(bench)
    rates = measure_link_and_dram(bench)
    launch = measure_launch(bench)
    if cuda:
        torch.cuda.empty_cache()  # a caller that goes on gets the device back
    profile = HardwareProfile(
        name=name or _machine_name(device, host),
        device=device,
        host=host,
        disk=disk,
        execution="streams" if cuda else "inline",
        shared_memory=not cuda,
        versions=current_versions(),
        matmul=matmul,
        attention=attention,
        hbm_bytes_per_second=device_memory,
        link=rates.link,
        host_dram_bytes_per_second=rates.dram,
        host_optimizer_bytes_per_second=rates.optimizer,
        launch_seconds=launch,
        context_bytes=context,
        library_bytes=None if bench.cpu else LIBRARIES,
        host_base_bytes=base,
        sustained_factor=sustained_factor,
    )
    if output is not None:
        profile.save(output)
    return profile


def current_device() -> Device:
    """Capacities of the first CUDA device, or of the CPU where there is none. Nothing is timed."""
    if not torch.cuda.is_available():
        host = current_host()
        return Device(kind="cpu", name=host.cpu, memory_bytes=host.memory_bytes)
    properties = torch.cuda.get_device_properties(0)
    return Device(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        num_multiprocessors=properties.multi_processor_count,
    )


def current_host() -> Host:
    """The share of the host that this process may use. Nothing is timed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(cpu=_cpu_name(), num_cores=cores, memory_bytes=host_memory_limit_bytes())


def current_versions() -> dict[str, str]:
    """Versions that speed and memory depend on."""
    installed = package_versions()
    versions: dict[str, str] = {name: installed[name] for name in ("python", "transformers") if name in installed}
    versions["torch"] = str(torch.__version__)  # names the build too (+cpu, +cu130), which package metadata may not
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return versions


def _machine_name(device: Device, host: Host) -> str:
    if device.kind == "cpu":
        return f"cpu-{host.num_cores}-core"
    return re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _context_bytes(bench: Bench) -> Figure:
    if bench.cpu:
        return bench.figure(0, "a CPU has no context beside the process")
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved()
    bench.report(f"device memory before the first allocation: {format_bytes(used)}")
    return bench.figure(used, "device memory in use once the context is created")


def _process_bytes(bench: Bench, *, quick: bool) -> Figure:
    if quick:
        return bench.figure(process_tree_bytes(), "anonymous and shared memory of the probe's own process")
    taken = bare_process_bytes("cpu" if bench.cpu else "cuda")
    bench.report(f"host memory of the bare process: {format_bytes(taken)}")
    return bench.figure(taken, "anonymous and shared memory of a process after a step of a small model")


def _disk(bench: Bench, folder: Path) -> Disk:
    rates = measure_disk(folder, num_bytes=bench.scale.disk_bytes, seconds=bench.scale.disk_seconds)
    how = "8 MiB blocks, " + ("direct I/O" if rates.direct else "fsync after writing, cache dropped before reading")
    bench.report(f"disk: write {format_value(rates.write, 'bytes/s')}, read {format_value(rates.read, 'bytes/s')}")
    return Disk(
        free_bytes=shutil.disk_usage(folder).free,
        write_bytes_per_second=bench.figure(rates.write, how),
        read_bytes_per_second=bench.figure(rates.read, how),
    )
