"""Task: what `plan()` is asked, as data, and the same task on a changed machine or with a changed workload."""

from dataclasses import dataclass, replace
from typing import Any

from planner import search
from planner.plan import Limits, Plan
from planner.problem import Problem
from simulator.costs import OperationCosts
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.policy import Workload
from simulator.rates import faster
from simulator.schema import validated


@dataclass(frozen=True, slots=True)
class Task:
    """One planning task. Changes give new tasks and raise InputError for what is impossible."""

    model: ModelSpec
    workload: Workload
    hardware: HardwareProfile
    limits: Limits
    costs: OperationCosts | None = None
    model_path: str = ""

    @classmethod
    def of(cls, plan: Plan) -> "Task":
        """What a plan was made for."""
        inputs = plan.inputs
        return cls(plan.model, inputs.workload, plan.hardware, inputs.limits, plan.costs, inputs.model.path)

    def problem(self) -> Problem:
        return Problem(self.model, self.workload, self.hardware, self.limits, self.costs)

    def plan(self, *, with_baselines: bool = False, with_suggestions: bool = False) -> Plan:
        """Plan it. Raises InfeasiblePlan; see `planner.search.plan`."""
        return search.plan(
            self.model,
            self.workload,
            self.hardware,
            self.limits,
            self.costs,
            model_path=self.model_path,
            with_baselines=with_baselines,
            with_suggestions=with_suggestions,
        )

    def with_model(self, model: ModelSpec) -> "Task":
        return replace(self, model=model)

    def with_workload(self, **changes: Any) -> "Task":
        """The task with other sizes, which are checked."""
        return replace(self, workload=validated(Workload, **{**self.workload.model_dump(), **changes}))

    def with_memory(self, *, device_bytes: int | None = None, host_bytes: int | None = None) -> "Task":
        """The task with other limits, on a machine that has as much.

        Where device and host are the same RAM there is one figure to change, and either name changes it.
        """
        device = device_bytes or self.limits.device_memory_bytes
        host = host_bytes or self.limits.host_memory_bytes
        if self.hardware.shared_memory and (device_bytes is None) != (host_bytes is None):
            device = host = device_bytes or host_bytes or host
        limits = self.limits.model_copy(update={"device_memory_bytes": device, "host_memory_bytes": host})
        profile = self.hardware.model_dump()
        for tier, num_bytes in (("device", device), ("host", host)):
            profile[tier]["memory_bytes"] = max(profile[tier]["memory_bytes"], num_bytes)
        if host > self.hardware.usable_host_bytes:
            profile["host"]["pinned_limit_bytes"] = None
        return replace(self, limits=limits, hardware=validated(HardwareProfile, **profile))

    def with_rates(self, *, compute: float = 1.0, link: float = 1.0, host_dram: float = 1.0) -> "Task":
        """The task on a machine whose rates are so many times higher, measured operations included."""
        hardware, costs = faster(self.hardware, self.costs, compute=compute, link=link, host_dram=host_dram)
        return replace(self, hardware=hardware, costs=costs)
