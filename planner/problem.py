"""Problem: one planning task, with the coefficients, budgets and replays that its parts share."""

from copy import copy

from planner.coefficient_table import CoefficientTable
from planner.coefficients import Coefficients
from planner.formulation import Formulation
from planner.memory_rows import Budget
from planner.outlines import Outline
from planner.plan import Limits
from simulator.costs import OperationCosts, Pricing
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.predict import Prediction, StepFigures, device_process_bytes, host_process_bytes, predict


class Problem:
    """What to plan. Policies are replayed once; `replayed_operations` counts what the replays cost."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        hardware: HardwareProfile,
        limits: Limits,
        costs: OperationCosts | None = None,
    ) -> None:
        self.model, self.workload, self.hardware, self.limits, self.costs = model, workload, hardware, limits, costs
        self._table = CoefficientTable(model, workload, self._prices, costs)
        self._figures: dict[Policy, StepFigures] = {}
        self.replayed_operations = 0

    def with_limits(self, limits: Limits) -> "Problem":
        """The same problem with other limits; what was priced and replayed for this one holds for it too."""
        other = copy(self)
        other.limits = limits
        return other

    def with_workload(self, workload: Workload) -> "Problem":
        """The same problem with another workload."""
        return Problem(self.model, workload, self.hardware, self.limits, self.costs)

    def on(self, hardware: HardwareProfile, costs: OperationCosts | None) -> "Problem":
        """The same problem on another machine."""
        return Problem(self.model, self.workload, hardware, self.limits, costs)

    def _prices(self, policy: Policy) -> Pricing:
        return Pricing(self.model, self.workload, policy, self.hardware, self.costs)

    @property
    def num_replays(self) -> int:
        return len(self._figures)

    @property
    def budget(self) -> Budget:
        """The limits, and what a process takes before its first buffer."""
        return Budget(
            device_bytes=self.limits.device_memory_bytes,
            host_bytes=self.limits.host_memory_bytes,
            device_process_bytes=device_process_bytes(self.hardware),
            host_process_bytes=host_process_bytes(self.model, self.workload, self.hardware),
            shared_memory=self.hardware.shared_memory,
        )

    def coefficients(self, outline: Outline) -> Coefficients:
        return self._table.of(outline)

    def formulation(self, outline: Outline, budget: Budget | None = None) -> Formulation:
        return Formulation(self.coefficients(outline), budget or self.budget)

    def figures(self, policy: Policy) -> StepFigures:
        """What the policy's replay finds."""
        if policy not in self._figures:
            self._figures[policy] = self.predict(policy).figures
        return self._figures[policy]

    def replayed(self) -> list[tuple[Policy, StepFigures]]:
        """Every policy replayed so far, first ones first, with what its replay found."""
        return list(self._figures.items())

    def predict(self, policy: Policy) -> Prediction:
        """The policy's replay, with its timeline and program."""
        prediction = predict(self.model, self.workload, policy, self.hardware, self.costs)
        self.replayed_operations += len(prediction.program.steady)
        return prediction

    def excess_bytes(self, figures: StepFigures) -> dict[str, int]:
        """By how much a policy is over each limit; empty where it fits."""
        over = {
            "device": figures.device_peak_bytes - self.limits.device_memory_bytes,
            "host": figures.host_peak_bytes - self.limits.host_memory_bytes,
        }
        return {tier: num_bytes for tier, num_bytes in over.items() if num_bytes > 0}
