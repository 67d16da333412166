"""Figure: a number and where it comes from. Units are the base units: FLOP/s, bytes/s, bytes, seconds."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import pydantic

from simulator.schema import Schema
from simulator.units import format_bytes, format_seconds

Unit = Literal["FLOP/s", "bytes/s", "bytes", "s", "", "per hour"]

ORIGINS = ("measured", "datasheet", "derived")


class Figure(Schema):
    """A value and its source: `measured: how, where, when`, `datasheet: whose` or `derived: from what`."""

    value: float
    source: str

    @pydantic.field_validator("source")
    @classmethod
    def _names_its_origin(cls, source: str) -> str:
        origin, _, rest = source.partition(": ")
        if origin not in ORIGINS or not rest.strip():
            raise ValueError(f"{source!r} must start with {', '.join(f'{name!r}' for name in ORIGINS)} and ': '")
        return source


class NamedFigure(NamedTuple):
    """A figure of a profile with the words and the unit it is printed with."""

    label: str
    unit: Unit
    figure: Figure


def _between(low: float, high: float, unit: str) -> pydantic.AfterValidator:
    def check(figure: Figure) -> Figure:
        if not low <= figure.value <= high:
            raise ValueError(f"{figure.value:g} {unit} is impossible: it lies between {low:g} and {high:g} {unit}")
        return figure

    return pydantic.AfterValidator(check)


# The bounds refuse zeros, signs and figures written in the wrong unit (GB/s, TFLOP/s, µs), not slow machines: a small
# operation on cores that other processes keep busy waits milliseconds for its turn.
FlopsPerSecond = Annotated[Figure, _between(1e5, 1e17, "FLOP/s")]
BytesPerSecond = Annotated[Figure, _between(1e5, 1e14, "bytes/s")]
Seconds = Annotated[Figure, _between(1e-8, 1e-1, "s")]
Bytes = Annotated[Figure, _between(2**20, 2**40, "bytes")]
BytesOrNone = Annotated[Figure, _between(0, 2**40, "bytes")]
Share = Annotated[Figure, _between(1e-4, 1.0, "of the burst rate")]
Price = Annotated[Figure, _between(1e-3, 1e4, "per hour")]


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at `x`, linear between the neighbouring points (x, y); the nearest end's y outside them. Points ascend in x."""
    xs = [point[0] for point in points]
    right = bisect_left(xs, x)
    if right == 0:
        return points[0][1]
    if right == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def format_value(value: float, unit: Unit) -> str:
    """A value for people: `55.5 GB/s`, `707.5 TFLOP/s`, `4.1 µs`, `0.6 GiB`."""
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit in ("FLOP/s", "bytes/s"):
        symbol = "FLOP/s" if unit == "FLOP/s" else "B/s"
        for prefix, factor in (("T", 1e12), ("G", 1e9)):
            if value >= factor:
                return f"{value / factor:.4g} {prefix}{symbol}"
        return f"{value / 1e6:.4g} M{symbol}"
    return f"{value:.4g} {unit}".strip()
