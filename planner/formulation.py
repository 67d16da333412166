"""The formulation: the program over save levels, weight residency, optimizer homes and prefetch depth of one outline.

Its optimum is a lower bound on the replayed step of every policy of the outline (`planner/time_rows.py` says why), and
its memory is what the replay will find (`planner/memory_rows.py`). Its size does not grow with the depth of the model.
Seconds and GB (1e9 bytes) keep all numbers near 1.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

from planner.coefficients import Coefficients
from planner.memory_rows import MEMORY_LIMITS, Budget, add_memory
from planner.mip import MixedIntegerProgram, total
from planner.time_rows import add_time
from planner.variables import MAX_SLOTS, MAX_STATE_SLOTS, Decisions, add_variables, policy_decisions
from simulator.policy import Policy


class Formulation:
    """The program of one outline under a budget."""

    def __init__(self, coefficients: Coefficients, budget: Budget) -> None:
        self.coefficients = coefficients
        self.mip = MixedIntegerProgram()
        self.variables = variables = add_variables(self.mip, coefficients)
        self.memory = add_memory(self.mip, coefficients, variables, budget)
        self.limits = [row for row in self.mip.rows if row.title in MEMORY_LIMITS]
        self.step = add_time(self.mip, coefficients, variables)
        # A tie is broken for the device: fewer host updates, less streamed, fewer slots, no input away.
        model = coefficients.model
        weight = 1e-6 * coefficients.quick_bound_seconds() / (3 * model.num_blocks)
        moved = [variables.num_host, variables.num_link, variables.num_streamed, variables.num_waiting]
        preferred = total([*moved, variables.embedding, variables.head])
        slots = variables.slots + variables.state_slots
        self.mip.objective = total([self.step, weight * preferred, 0.1 * weight * slots])
        # The most that the objective lies above the step.
        most_slots = MAX_SLOTS + MAX_STATE_SLOTS
        self.tie_break_seconds = weight * (model.num_blocks + 2 * model.num_layers + 0.1 * most_slots)

    def copy(self) -> "Formulation":
        """The same program, which takes further rows without this one."""
        other = copy(self)
        other.mip = replace(self.mip, variables=dict(self.mip.variables), rows=list(self.mip.rows))
        other.limits = list(self.limits)
        return other

    def evaluate(self, decisions: Decisions) -> dict[str, float]:
        """All variables at their least for given decisions."""
        return self.mip.evaluate(self.variables.chosen(decisions))

    def keep_on_device(self) -> None:
        """Allow no host optimizer, no streaming and no input that waits on the host."""
        v = self.variables
        away = total([v.num_host, v.num_link, v.embedding, v.head, v.num_streamed, v.num_waiting])
        self.mip.at_most("everything on the device", away, 0.0)
        self.limits.append(self.mip.rows[-1])

    def keep_states(self) -> None:
        """Allow no state to stream."""
        self.mip.at_most("no state streams", self.variables.num_link, 0.0)
        self.limits.append(self.mip.rows[-1])

    def keep_inputs(self) -> None:
        """Allow no layer input to wait on the host."""
        self.mip.at_most("every input stays", self.variables.num_waiting, 0.0)
        self.limits.append(self.mip.rows[-1])

    def fits(self, values: Mapping[str, float]) -> bool:
        """Whether these values keep the limits of memory."""
        return all(row.expression.value(values) <= 0 for row in self.limits)

    def bound_of(self, policy: Policy) -> float:
        """The relaxation's seconds for one policy of this outline, which its replay cannot undercut."""
        return self.step.value(self.evaluate(policy_decisions(self.coefficients, policy)))
