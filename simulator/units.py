"""Units: sizes as people write them (`24GiB`, `64 GB`) and back."""

import re

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
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Bytes of a size such as `24GiB`, `1.5 GB` or `0`. Raises InputError naming `name`."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match.group(2).upper() not in _MULTIPLIERS:
        raise InputError(f"{name}: {text!r} is not a size; write a number with B, KiB, MiB, GiB, KB, MB or GB")
    return round(float(match.group(1)) * _MULTIPLIERS[match.group(2).upper()])


def format_bytes(num_bytes: float) -> str:
    """A size for people: the largest binary unit that leaves at least 1."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration for people: s, ms or µs with three significant digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
