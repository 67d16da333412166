"""The nearest known name: an error about an unknown one says what was probably meant."""

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None if none is alike; one that `name-` begins is most like it."""
    known = list(known)
    longer = [candidate for candidate in known if name and candidate.startswith(f"{name}-")]
    if longer:
        return longer[0]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def nearest_path(path: Path | str) -> Path | None:
    """The existing path most like a missing one: the first part that does not exist is replaced, the rest kept."""
    path = Path(path)
    for parent in reversed(path.parents):
        missing = path.relative_to(parent).parts[0]
        if parent.is_dir() and not (parent / missing).exists():
            name = nearest_name(missing, (entry.name for entry in parent.iterdir()))
            candidate = parent / name / Path(*path.relative_to(parent).parts[1:]) if name else None
            return candidate if candidate and candidate.exists() else None
    return None


def did_you_mean(suggestion: object) -> str:
    """`; did you mean 'X'?`, or nothing where there is no suggestion."""
    return f"; did you mean '{suggestion}'?" if suggestion else ""
