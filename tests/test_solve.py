"""The solver's answers are checked, its output is silenced, and another solver finds the same optimum."""

import importlib.util
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
from planning_cases import random_case, tight_limits

import planner.solve
from planner.mip import Linear, MixedIntegerProgram, total
from planner.outlines import outlines
from planner.problem import Problem
from planner.solve import pulp_problem, solve


def knapsack(*, limit: float) -> MixedIntegerProgram:
    """Least cost 5 - (value taken): things of weights 2, 3, 4 and values 3, 4, 5."""
    mip = MixedIntegerProgram()
    taken = [mip.decide(f"taken {number}", 0, 1) for number in range(3)]
    cost = mip.quantity("cost")
    mip.at_least("cost", cost, 20 - total(value * one for value, one in zip((3, 4, 5), taken, strict=True)))
    mip.at_most("weight", total(weight * one for weight, one in zip((2, 3, 4), taken, strict=True)), limit)
    mip.objective = cost
    return mip


def test_optimum_of_a_small_program() -> None:
    solution = solve(knapsack(limit=6), gap=0)
    assert solution.status == "solved"
    assert solution.objective == pytest.approx(20 - 3 - 5)
    assert solution.bound == pytest.approx(solution.objective)
    assert [solution.values[f"taken {number}"] for number in range(3)] == [1, 0, 1]


def test_infeasible_programs_are_said_to_be() -> None:
    assert solve(knapsack(limit=-1), gap=0).status == "infeasible"


def test_a_constant_in_the_objective_counts() -> None:
    mip = knapsack(limit=6)
    mip.objective = mip.objective + 100
    solution = solve(mip, gap=0)
    assert solution.objective == pytest.approx(112)
    assert solution.bound == pytest.approx(112)


def test_an_answer_that_breaks_a_row_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the solver had called the program that everything fits solved.
    real = planner.solve._checked
    wrong = knapsack(limit=1)

    def confused(mip: MixedIntegerProgram, highs: Any, found: dict[str, float | None]) -> planner.solve.Solution:
        return real(wrong, highs, found)

    monkeypatch.setattr(planner.solve, "_checked", confused)
    solution = solve(knapsack(limit=9), gap=0)
    assert solution.status == "no solution"
    assert solution.values == {}


def test_evaluate_finds_the_least_quantities() -> None:
    mip = MixedIntegerProgram()
    number = mip.decide("number", 0, 10)
    twice, some = mip.quantity("twice"), mip.indicator("some")
    mip.at_least("twice", twice, 2 * number)
    mip.at_least("at least five", twice, 5)
    mip.at_least("some", some, number * 0.1)
    assert mip.evaluate({"number": 0}) == {"number": 0, "twice": 5, "some": 0}
    assert mip.evaluate({"number": 4}) == {"number": 4, "twice": 8, "some": 1}


def test_linear_expressions_keep_the_rules_of_algebra() -> None:
    x, y = Linear({"x": 1.0}), Linear({"y": 1.0})
    expression = 3 * (x - 2 * y + 1) - (5 - x)
    assert expression.terms == {"x": 4.0, "y": -6.0}
    assert expression.constant == -2.0
    assert expression.value({"x": 1.0, "y": 2.0}) == 4 - 12 - 2


def test_a_name_is_taken_once() -> None:
    mip = MixedIntegerProgram()
    mip.decide("number", 0, 1)
    with pytest.raises(ValueError, match="number"):
        mip.quantity("number")


def test_standard_output_stays_clean() -> None:
    # HiGHS prints a banner when the first solver of a process is made.
    script = "from test_solve import *; print(solve(knapsack(limit=6), gap=0).objective)"
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tests.parent, check=True,
        env={"PYTHONPATH": f"{tests}:{tests.parent}", "PATH": ""},
    )  # fmt: skip
    assert float(done.stdout) == pytest.approx(12)
    assert done.stdout.count("\n") == 1


def cbc() -> Any:
    """CBC as a PuLP solver: PuLP's own up to 3.x, else that of the package cbcbox or of the system. None: no CBC."""
    pulp = pytest.importorskip("pulp")
    options = {"msg": False, "gapRel": 1e-6, "timeLimit": 20}
    if hasattr(pulp, "PULP_CBC_CMD"):
        return pulp.PULP_CBC_CMD(**options)
    path = shutil.which("cbc")
    if importlib.util.find_spec("cbcbox"):
        path = importlib.import_module("cbcbox").cbc_bin_path()
    return pulp.COIN_CMD(path=str(path), **options) if path else None


@pytest.mark.parametrize("seed", range(6))
def test_cbc_finds_the_same_optimum(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        solver = cbc()
    if solver is None:
        pytest.skip("this PuLP brings no CBC, and neither cbcbox nor the system has one")
    random = Random(seed)
    case = random_case(random)
    problem = Problem(case.model, case.workload, case.hardware, tight_limits(random, case), case.costs)
    compared = 0
    for outline in outlines(case.model, case.workload):
        mip = problem.formulation(outline).mip
        ours = solve(mip, gap=1e-6)
        theirs, columns = pulp_problem(mip)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            status = theirs.solve(solver)
        # Its bundled version calls some feasible programs infeasible: it counts where it claims an optimum. PuLP 3
        # returns the status, PuLP 4 something that has it, and there an optimum within the gap has one of its own (-7).
        status = getattr(status, "status", status)
        if getattr(status, "value", status) not in (1, -7):
            continue
        decisions = {name: round(columns[name].value()) for name, v in mip.variables.items() if v.decision}
        values = mip.evaluate(decisions)
        if mip.violated(values):
            continue
        assert ours.status == "solved"
        assert mip.objective.value(values) == pytest.approx(ours.objective, rel=1e-4)
        compared += 1
    assert compared
