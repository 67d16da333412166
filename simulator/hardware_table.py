"""The table of a hardware profile: capacities, then every figure with its unit and a number for its source."""

from collections.abc import Iterator

from simulator.figure import format_value
from simulator.hardware import HardwareProfile
from simulator.units import format_bytes


def describe(profile: HardwareProfile) -> str:
    """The profile as plain text: capacities, figures in columns, and the sources they refer to. No final newline."""
    figures = list(profile.figures())
    # Many figures of one measurement share their source: it is printed once.
    sources = {source: number for number, source in enumerate(dict.fromkeys(f.figure.source for f in figures), 1)}
    label_width = max(len(f.label) for f in figures)
    values = [format_value(f.figure.value, f.unit) for f in figures]
    value_width = max(len(value) for value in values)
    rows = [
        f"  {f.label:<{label_width}}  {value:>{value_width}}  [{sources[f.figure.source]}]"
        for f, value in zip(figures, values, strict=True)
    ]
    return "\n".join([*_capacities(profile), *rows, *(f"[{number}] {source}" for source, number in sources.items())])


def _capacities(profile: HardwareProfile) -> Iterator[str]:
    device, host, disk = profile.device, profile.host, profile.disk
    yield f"{profile.name} ({profile.identity_hash})"
    chip = f", {device.num_multiprocessors} multiprocessors" if device.num_multiprocessors else ""
    yield f"  device  {device.name}, {format_bytes(device.memory_bytes)}{chip}"
    cores = f", {host.num_cores} cores" if host.num_cores else ""
    pinned = f", at most {format_bytes(host.pinned_limit_bytes)} pinned" if host.pinned_limit_bytes else ""
    shared = ", the device's memory too" if profile.shared_memory else ""
    yield f"  host    {host.cpu}{cores}, {format_bytes(host.memory_bytes)}{shared}{pinned}"
    yield f"  disk    {format_bytes(disk.free_bytes)} free" if disk.free_bytes else "  disk    unknown"
    if profile.versions:
        yield "  with    " + ", ".join(f"{package} {version}" for package, version in profile.versions.items())
