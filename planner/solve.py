"""The one place that calls PuLP: hands a program to HiGHS and checks what comes back.

Written against what PuLP 3.3 and 4 share. HiGHS runs in this process on one thread: its scheduler is fixed at first
use, and another thread count later in the same process would silently return nothing. A solver's status is not
trusted: a solution counts if its rounded decisions satisfy every row, and a bound only if it lies below the solution.
"""

import math
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal

from planner.mip import Linear, MixedIntegerProgram
from simulator.native_output import silent_native_stdout

THREADS = 1
# Time is the last guard against a solve that does not end: it makes results depend on the machine's load.
TIME_LIMIT_SECONDS = 20.0

Status = Literal["solved", "infeasible", "no solution"]


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solve gave. `bound` is below the objective of every solution; -inf where the solver gave none."""

    status: Status
    values: dict[str, float]  # empty unless solved
    objective: float
    bound: float
    timed_out: bool = False


def solver_version() -> str | None:
    """`HiGHS 1.x through PuLP y`, or None where no solver can be loaded."""
    if solver_failure():
        return None
    return f"HiGHS {metadata.version('highspy')} through PuLP {metadata.version('pulp')}"


@cache
def solver_failure() -> str:
    """Why no solver can be loaded; empty where one can."""
    try:
        with silent_native_stdout():
            import highspy
            import pulp

            highspy.Highs()  # the first one in a process prints a banner
            if not pulp.HiGHS(msg=False).available():
                return "PuLP does not find HiGHS"
    except Exception as error:  # a broken binary may raise anything; without a solver the greedy planner answers
        return f"{type(error).__name__}: {error}"
    return ""


def solve(mip: MixedIntegerProgram, *, gap: float, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> Solution:
    """Minimise a program within the relative `gap`. Raises RuntimeError where no solver can be loaded."""
    if solver_failure():
        raise RuntimeError("no solver can be loaded")
    import pulp

    problem, columns = pulp_problem(mip)
    problem.solve(
        pulp.HiGHS(
            msg=False,
            gapRel=gap,
            threads=THREADS,
            timeLimit=time_limit_seconds,
            # Below the tolerance of HiGHS' own last check, which else rejects what the search has accepted.
            mip_feasibility_tolerance=1e-7,
        )
    )
    return _checked(mip, problem.solverModel, {name: column.value() for name, column in columns.items()})


def pulp_problem(mip: MixedIntegerProgram) -> tuple[Any, dict[str, Any]]:
    """The program as a PuLP problem, and its variables by our names."""
    import pulp

    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    # Numbers for names: PuLP maps some characters to others, so that two names could become one.
    columns = {}
    for number, variable in enumerate(mip.variables.values()):
        high = None if math.isinf(variable.high) else variable.high
        category = pulp.LpInteger if variable.integer else pulp.LpContinuous
        columns[variable.name] = problem.add_variable(f"v{number}", variable.low, high, category)

    def expression(linear: Linear) -> Any:
        found = pulp.lpSum([])
        for name, factor in linear.terms.items():
            found.addterm(columns[name], factor)  # a sum of products takes three times as long
        return found

    problem += expression(mip.objective)
    for row in mip.rows:
        left, right = expression(row.expression), -row.expression.constant
        problem += left == right if row.sense == "==" else left <= right
    return problem, columns


def _checked(mip: MixedIntegerProgram, highs: Any, found: dict[str, float | None]) -> Solution:
    import highspy

    status = highs.getModelStatus()
    infeasible = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
    timed_out = status == highspy.HighsModelStatus.kTimeLimit
    if status in infeasible:
        return Solution("infeasible", {}, math.inf, math.inf)
    bound = -math.inf
    if timed_out or status == highspy.HighsModelStatus.kOptimal:
        bound = highs.getInfo().mip_dual_bound + mip.objective.constant
    if any(value is None or not math.isfinite(value) for value in found.values()):
        return Solution("no solution", {}, math.inf, bound, timed_out)
    decisions = {name: float(round(found[name] or 0.0)) for name, v in mip.variables.items() if v.decision}
    values = mip.evaluate(decisions)
    if mip.violated(values):
        return Solution("no solution", {}, math.inf, bound, timed_out)
    objective = mip.objective.value(values)
    return Solution("solved", values, objective, min(bound, objective), timed_out)
