"""Files that are replaced whole: a write that fails leaves what was there."""

import os
from contextlib import suppress
from pathlib import Path


def may_write_whole(path: Path | str) -> bool:
    """Whether this user may `write_whole` there: a file is replaced by one beside it, a device written in place."""
    if Path(path).exists() and not os.access(path, os.W_OK):
        return False
    in_place = Path(path).exists() and not Path(path).is_file()
    return in_place or os.access(Path(os.path.realpath(path)).parent, os.W_OK)


def write_whole(path: Path | str, text: str) -> None:
    """Write a file beside its place and rename it: readers see the old file or the new one, never a part.

    A link stays and what it names is written; a device or a pipe, as /dev/stdout, is written in place.
    """
    if Path(path).exists() and not Path(path).is_file():
        Path(path).write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two processes may write one file: the last one stays
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
