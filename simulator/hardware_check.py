"""Does this machine bear a plan made for another profile? Capacities must; rates may drift, with a warning."""

from collections.abc import Iterator

from simulator.errors import InputError
from simulator.figure import Unit, format_value
from simulator.hardware import LINK_DIRECTIONS, HardwareProfile, PassDirection
from simulator.machine import Device, Host
from simulator.units import format_bytes

# A host's memory differs by some MiB from boot to boot and from driver to driver.
CAPACITY_TOLERANCE = 0.005

_PASSES: tuple[PassDirection, ...] = ("forward", "backward")


def check_capacity(
    planned: HardwareProfile,
    device: Device,
    host: Host,
    *,
    device_limit_bytes: int | None = None,
    host_limit_bytes: int | None = None,
) -> None:
    """Refuse to train where a capacity is below the plan's. Raises InputError naming each one and the bytes short.

    `device` and `host` are those of the machine at hand (`simulator.probe.current_device`, `current_host`). The limits
    are what the plan was held to, where that is less than its whole machine.
    """
    short = []
    if device.kind != planned.device.kind:
        short.append(f"it computes on a {planned.device.kind!r} device and this machine has {device.kind!r} only")
    for tier, limit, planned_bytes, actual_bytes in (
        ("device", device_limit_bytes, planned.device.memory_bytes, device.memory_bytes),
        ("host", host_limit_bytes, planned.host.memory_bytes, host.memory_bytes),
    ):
        needed = planned_bytes if limit is None else min(limit, planned_bytes)
        if actual_bytes < needed * (1 - CAPACITY_TOLERANCE):
            short.append(
                f"it may use {format_bytes(needed)} of {tier} memory and this machine has "
                f"{format_bytes(actual_bytes)}, {format_bytes(needed - actual_bytes)} less"
            )
    if short:
        raise InputError(
            f"the plan was made for {planned.name!r}: {'; '.join(short)}; plan again with the profile of this machine"
        )


def warn_if_rates_differ(planned: HardwareProfile, actual: HardwareProfile, tolerance: float = 0.05) -> list[str]:
    """A sentence for each rate of this machine that differs from the plan's by more than `tolerance`, largest first.

    Rates at the plan's points are compared with this machine's, interpolated where it was measured at other sizes; what
    only one of them knows is left out.
    """
    warnings = []
    for label, unit, expected, found in _comparable(planned, actual):
        change = found / expected - 1
        if abs(change) > tolerance:
            sentence = (
                f"{label}: {format_value(found, unit)} on this machine, {format_value(expected, unit)} in the plan's "
                f"profile ({change:+.0%})"
            )
            warnings.append((abs(change), sentence))
    return [sentence for _, sentence in sorted(warnings, key=lambda item: -item[0])]


def _comparable(planned: HardwareProfile, actual: HardwareProfile) -> Iterator[tuple[str, Unit, float, float]]:
    precisions = {point.precision for point in actual.matmul}
    for m in planned.matmul:
        if m.precision in precisions:
            found = actual.matmul_flops_per_second(m.precision, m.tokens)
            yield f"matmul {m.precision}, {m.tokens:,} tokens", "FLOP/s", m.flops_per_second.value, found
    series = {(point.precision, point.backend) for point in actual.attention}
    for a in planned.attention:
        if (a.precision, a.backend) not in series:
            continue
        for direction in _PASSES:
            label = f"attention {a.precision} {a.backend}, {a.sequence_length:,} long, {direction}"
            expected = a.forward_flops_per_second if direction == "forward" else a.backward_flops_per_second
            found = actual.attention_flops_per_second(a.precision, a.sequence_length, direction, backend=a.backend)
            yield label, "FLOP/s", expected.value, found
    for p in planned.link.points:
        found = actual.link_bytes_per_second(p.direction, p.num_bytes)
        yield f"{p.direction}, copies of {format_bytes(p.num_bytes)}", "bytes/s", p.bytes_per_second.value, found
    for words, expected_rates, found_rates in (
        ("both directions at once", planned.link.duplex, actual.link.duplex),
        ("both at once, host optimizer running", planned.link.duplex_host_busy, actual.link.duplex_host_busy),
    ):
        for link_direction in LINK_DIRECTIONS:
            expected, found_figure = (getattr(rates, link_direction) for rates in (expected_rates, found_rates))
            yield f"{link_direction}, {words}", "bytes/s", expected.value, found_figure.value
    for label, expected, found_figure in (
        ("device memory", planned.hbm_bytes_per_second, actual.hbm_bytes_per_second),
        ("host DRAM", planned.host_dram_bytes_per_second, actual.host_dram_bytes_per_second),
        ("host optimizer", planned.host_optimizer_bytes_per_second, actual.host_optimizer_bytes_per_second),
    ):
        yield label, "bytes/s", expected.value, found_figure.value
