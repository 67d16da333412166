"""A machine with other rates: its profile and its measured operations, as if one resource were so many times faster."""

from collections.abc import Callable
from typing import Any

import pydantic

from simulator.costs import OperationCosts
from simulator.errors import InputError
from simulator.hardware import HardwareProfile
from simulator.program import Kind, Resource
from simulator.schema import describe


def faster(
    hardware: HardwareProfile,
    costs: OperationCosts | None = None,
    *,
    compute: float = 1.0,
    link: float = 1.0,
    host_dram: float = 1.0,
) -> tuple[HardwareProfile, OperationCosts | None]:
    """The machine with each resource's rates multiplied by a factor, and its measured operations as much shorter.

    `compute`: matrix products, attention and device memory; launches take what they took. `link`: copies of all sizes,
    both ways, alone and at once. `host_dram`: host memory and the optimizer that runs in it. Raises InputError for
    rates beyond what any machine has.
    """
    profile = hardware.model_dump(mode="json")
    for points in (profile["matmul"], profile["attention"]):
        _scale(points, compute)
    _scale(profile["hbm_bytes_per_second"], compute)
    _scale(profile["link"], link)
    for name in ("host_dram_bytes_per_second", "host_optimizer_bytes_per_second"):
        _scale(profile[name], host_dram)
    try:
        changed = HardwareProfile(**profile)
    except pydantic.ValidationError as error:
        first = describe(error).split("; ")[0]  # what is true of one of a link's points is of all
        raise InputError(f"hardware {hardware.name!r} with other rates: {first}") from error
    if costs is None:
        return changed, None
    factors = {Resource.COMPUTE: compute, Resource.H2D: link, Resource.D2H: link, Resource.HOST: host_dram}
    entries = {
        key: cost.model_copy(update={"seconds": cost.seconds / factors.get(key_resource(key), 1.0)})
        for key, cost in costs.entries.items()
    }
    return changed, costs.model_copy(update={"entries": entries})


def key_resource(key: str) -> Resource:
    """What the operation of an entry of OperationCosts occupies (`simulator.costs.operation_key`)."""
    kind, *rest = key.split(".")
    if kind == Kind.UPDATE:
        # Before the formats of gradient and state. An entry that no operation is looked up by counts as compute.
        return Resource(rest[-3]) if len(rest) > 2 and rest[-3] in set(Resource) else Resource.COMPUTE
    if kind.startswith("load_"):
        return Resource.H2D
    return Resource.D2H if kind.startswith("store_") else Resource.COMPUTE


def link_bytes_per_second(hardware: HardwareProfile) -> float:
    """What large copies reach in the link's faster direction."""
    return max(point.bytes_per_second.value for point in hardware.link.points)


def _scale(node: Any, factor: float) -> None:
    """Multiply every figure in a piece of a profile's JSON, in place, and say so in its source."""
    if factor == 1.0:
        return
    if isinstance(node, dict) and set(node) == {"value", "source"}:
        node["value"] *= factor
        node["source"] = f"derived: {factor:.6g} times what is {node['source']}"
        return
    children: Callable[[Any], Any] = dict.values if isinstance(node, dict) else iter
    if isinstance(node, dict | list):
        for child in children(node):
            _scale(child, factor)
