"""Units: sizes as people write them (`24GiB`, `64 GB`) and back; durations, rates and counts for people."""

import re
from decimal import Decimal

from simulator.errors import InputError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_MULTIPLIERS = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MOST_DIGITS = 30  # a size of more is no number of bytes that figures can hold
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Bytes of a size such as `24GiB`, `1.5 GB` or `0`. Raises InputError naming `name`."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match.group(2).upper() not in _MULTIPLIERS:
        raise InputError(f"{name}: {text!r} is not a size; write a number with B, KiB, MiB, GiB, KB, MB or GB")
    if len(match.group(1).split(".")[0]) > MOST_DIGITS:
        raise InputError(f"{name}: {text!r} is more than any machine has")
    # Decimal: a whole number of bytes stays what it is, also beyond 2**53.
    return round(Decimal(match.group(1)) * _MULTIPLIERS[match.group(2).upper()])


def format_bytes(num_bytes: float) -> str:
    """A size for people: the largest binary unit that leaves at least 1."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor * (1 - 0.05 / 1024):  # what rounds to 1024.0 of a unit is 1.0 of the next
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration for people: s, ms or µs with three significant digits, never an exponent."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= factor * 0.9995:  # what rounds to 1000 of a unit is 1 of the next
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def format_duration(seconds: float) -> str:
    """How long a run takes, for people: from two minutes up in minutes, from two hours up in hours and minutes."""
    if seconds < 120:
        return format_seconds(seconds)
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_rate(per_second: float) -> str:
    """A rate for people, never with an exponent: whole and with separators from 100 up, else three digits."""
    return f"{per_second:,.0f}" if abs(per_second) >= 99.95 else _three_digits(per_second)


def counted(count: int, noun: str) -> str:
    """`1 file`, `1,912 files`: for nouns whose plural ends in s."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}" if abs(value) >= 1e-3 else "0"
