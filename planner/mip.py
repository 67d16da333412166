"""A mixed-integer program as data: variables, rows with titles, an objective to minimise. It knows no solver.

Two kinds of variables. A decision is free within its bounds and the limits; every other quantity (a time, a peak, "is
any layer streamed") is the least value that its `at_least` rows allow, each written after all that it depends on. So a
solver may take the rows as they stand, and for given decisions `evaluate` finds every quantity by going through them
once: the greedy planner and the tests need no solver.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import mul
from typing import Literal

TOLERANCE = 1e-6


class Linear:
    """A linear expression: coefficients by variable, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: Mapping[str, float] | None = None, constant: float = 0.0) -> None:
        self.terms = {name: value for name, value in (terms or {}).items() if value != 0.0}
        self.constant = constant

    def __add__(self, other: "Linear | float") -> "Linear":
        if not isinstance(other, Linear):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for name, value in other.terms.items():
            terms[name] = terms.get(name, 0.0) + value
        return Linear(terms, self.constant + other.constant)

    __radd__ = __add__

    def __sub__(self, other: "Linear | float") -> "Linear":
        return self + -1.0 * other

    def __rsub__(self, other: float) -> "Linear":
        return -1.0 * self + other

    def __mul__(self, factor: float) -> "Linear":
        return Linear({name: factor * value for name, value in self.terms.items()}, factor * self.constant)

    __rmul__ = __mul__

    @property
    def name(self) -> str:
        """The variable that this expression is."""
        (name,) = self.terms
        return name

    def value(self, values: Mapping[str, float]) -> float:
        left: float = sum(map(mul, self.terms.values(), map(values.__getitem__, self.terms)))
        return self.constant + left


def total(expressions: Iterable[Linear]) -> Linear:
    """The sum of many expressions, without quadratic copying."""
    terms: dict[str, float] = {}
    constant = 0.0
    for expression in expressions:
        constant += expression.constant
        for name, value in expression.terms.items():
            terms[name] = terms.get(name, 0.0) + value
    return Linear(terms, constant)


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    low: float
    high: float
    integer: bool
    decision: bool


@dataclass(frozen=True, slots=True)
class Row:
    """`expression sense 0`. `defines` names the variable that an at-least row bounds from below."""

    title: str
    expression: Linear
    sense: Literal["<=", "=="]
    defines: str = ""


@dataclass(slots=True)
class MixedIntegerProgram:
    """Minimise `objective` over the variables, subject to the rows."""

    variables: dict[str, Variable] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    objective: Linear = field(default_factory=Linear)

    def decide(self, name: str, low: int, high: int) -> Linear:
        """An integer decision in low..high."""
        return self._add(Variable(name, low, high, integer=True, decision=True))

    def quantity(self, name: str) -> Linear:
        """A number >= 0 that at-least rows will bound from below."""
        return self._add(Variable(name, 0.0, math.inf, integer=False, decision=False))

    def indicator(self, name: str) -> Linear:
        """0 or 1: at-least rows with a left side above 0 make it 1."""
        return self._add(Variable(name, 0, 1, integer=True, decision=False))

    def _add(self, variable: Variable) -> Linear:
        if variable.name in self.variables:
            raise ValueError(f"two variables are called {variable.name}")
        self.variables[variable.name] = variable
        return Linear({variable.name: 1.0})

    def at_least(self, title: str, quantity: Linear, expression: Linear | float) -> None:
        """quantity >= expression."""
        self.rows.append(Row(title, -1.0 * quantity + expression, "<=", quantity.name))

    def at_most(self, title: str, expression: Linear, limit: Linear | float) -> None:
        """expression <= limit, a limit on the decisions."""
        self.rows.append(Row(title, expression - limit, "<="))

    def equal(self, title: str, expression: Linear, value: Linear | float) -> None:
        """expression == value, among decisions."""
        self.rows.append(Row(title, expression - value, "=="))

    def evaluate(self, decisions: Mapping[str, float]) -> dict[str, float]:
        """The least values of all quantities for given decisions. Limits are not checked; see `violated`."""
        values = {
            variable.name: decisions[variable.name] if variable.decision else variable.low
            for variable in self.variables.values()
        }
        for row in self.rows:
            if not row.defines:
                continue
            needed = row.expression.value(values) + values[row.defines]
            if self.variables[row.defines].integer:
                needed = math.ceil(needed - TOLERANCE)
            values[row.defines] = max(values[row.defines], needed)
        return values

    def violated(self, values: Mapping[str, float]) -> list[Row]:
        """Rows that the values break by more than rounding, relative to the row's own size."""
        broken = []
        for row in self.rows:
            left = row.expression.value(values)
            size = 1.0 + sum(abs(factor * values[name]) for name, factor in row.expression.terms.items())
            if left > TOLERANCE * size or (row.sense == "==" and left < -TOLERANCE * size):
                broken.append(row)
        return broken
