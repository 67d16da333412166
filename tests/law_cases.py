"""Richer machines: a planning problem with one resource so many times faster, written apart from the planner's own."""

from dataclasses import replace
from typing import Any

from planning_cases import Case, figure

from simulator.costs import MeasuredCost, OperationCosts
from simulator.hardware import HardwareProfile


def faster(case: Case, *, compute: float = 1.0, link: float = 1.0, dram: float = 1.0, launch: float = 1.0) -> Case:
    """The problem with rates so many times higher, in the profile and in the measured operations.

    `dram` is the host's memory with the optimizer that runs in it; what only the launching thread takes is `launch`.
    """
    hardware, costs = case.hardware, case.costs
    factors = {"compute": compute, "link": link, "dram": dram}
    return replace(
        case,
        hardware=_faster_machine(hardware, **factors, launch=launch),
        costs=costs and _faster_costs(costs, **factors),
    )


def _faster_machine(
    hardware: HardwareProfile, *, compute: float, link: float, dram: float, launch: float
) -> HardwareProfile:
    data = hardware.model_dump()
    for point in data["matmul"]:
        _scale(point["flops_per_second"], compute)
    for point in data["attention"]:
        _scale(point["forward_flops_per_second"], compute)
        _scale(point["backward_flops_per_second"], compute)
    _scale(data["hbm_bytes_per_second"], compute)
    for point in data["link"]["points"]:
        _scale(point["bytes_per_second"], link)
    for name in ("duplex", "duplex_host_busy", "pageable"):
        for rate in (data["link"][name] or {}).values():
            _scale(rate, link)
    _scale(data["host_dram_bytes_per_second"], dram)
    _scale(data["host_optimizer_bytes_per_second"], dram)
    _scale(data["launch_seconds"], 1 / launch)
    return HardwareProfile.model_validate(data)


def _scale(rate: dict[str, Any], factor: float) -> None:
    rate |= figure(rate["value"] * factor).model_dump()


def _faster_costs(costs: OperationCosts, *, compute: float, link: float, dram: float) -> OperationCosts:
    def scaled(key: str, cost: MeasuredCost) -> MeasuredCost:
        if key.startswith(("load_", "store_")):
            factor = link
        elif key.startswith("update.") and ".host." in key:
            factor = dram
        else:
            factor = compute
        return cost.model_copy(update={"seconds": cost.seconds / factor})

    return costs.model_copy(update={"entries": {key: scaled(key, cost) for key, cost in costs.entries.items()}})


def deeper(case: Case, num_layers: int) -> Case:
    """The problem with so many layers more on top; kinds go on in turn."""
    model = case.model
    kinds = model.kind_of_block[1:-1]
    period = len(set(kinds))
    added = [kinds[index % period] for index in range(model.num_layers, model.num_layers + num_layers)]
    deep = model.model_copy(
        update={
            "num_layers": model.num_layers + num_layers,
            "kind_of_block": (0, *kinds, *added, model.kind_of_block[-1]),
            "num_parameters": model.num_parameters + sum(model.kinds[kind].num_parameters for kind in added),
        }
    )
    return replace(case, model=deep)
