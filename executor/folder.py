"""Folders and files: paths that must exist, disk that must be free, folders that appear whole or not at all."""

import difflib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from simulator.errors import ConveyorError, InputError
from simulator.files import may_write_whole
from simulator.nearest import did_you_mean, nearest_path
from simulator.system import free_disk_bytes
from simulator.units import format_bytes

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"


def require_path(path: Path | str, *, what: str) -> Path:
    """`path`, if it exists. Raises InputError that names the nearest existing name where the path goes wrong."""
    path = Path(path).expanduser()
    if path.exists():
        return path
    if path.is_symlink():
        raise InputError(f"{what}: {path} is a link to {os.readlink(path)}, which does not exist")
    wrong = path
    while not wrong.parent.exists():
        wrong = wrong.parent
    if not wrong.parent.is_dir():
        raise InputError(f"{what}: {path} does not exist; {wrong.parent} is a file")
    try:
        names = sorted(entry.name for entry in os.scandir(wrong.parent))
    except OSError:
        names = []
    nearest = difflib.get_close_matches(wrong.name, names, n=1, cutoff=0.6)
    hint = f"; did you mean {wrong.parent / nearest[0]}?" if nearest else ""
    raise InputError(f"{what}: {path} does not exist{hint}")


def require_nameable(path: Path | str, *, what: str) -> None:
    """Raise InputError for a path that no file can have, or that cannot be followed; it need not exist."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # what has to exist is asked for by name elsewhere
    except OSError as error:  # too long, links in a circle, a folder that may not be entered
        raise InputError(f"{what}: {path} cannot be used ({error.strerror or error}); name another place") from error
    except ValueError as error:
        raise InputError(f"{what}: {str(path)!r} cannot be used ({error}); name another place") from error


def require_writable(path: Path | str, *, what: str) -> None:
    """Raise InputError unless a file can be written at `path`: to be asked before long work, not found after it."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{what}: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InputError(f"{what}: there is no folder {path.parent}{did_you_mean(nearest_path(path.parent))}")
    if not may_write_whole(path):
        raise InputError(f"{what}: {path} cannot be written; set it to a place where you may write")


def require_no_input(path: Path | str, inputs: Mapping[str, Iterable[Path | str | None]], *, what: str) -> None:
    """Raise InputError where `path`, which will be written, is one of the files that were named to be read.

    `inputs`: files by the option that names them; None and files that do not exist are no such files.
    """
    if not os.path.isfile(path):
        return
    for option, files in inputs.items():
        for file in files:
            if file is not None and os.path.isfile(file) and os.path.samefile(path, file):
                raise InputError(f"{what}: {path} is what {option} names, and would be lost; name another file")


def require_free_disk(
    path: Path, num_bytes: int, *, what: str, error: type[ConveyorError] = ConveyorError, remedy: str = ""
) -> None:
    """Raise `error` when the disk of `path` has fewer than `num_bytes` free: InputError before a run, else 1."""
    free = free_disk_bytes(path)
    if free < num_bytes:
        raise error(
            f"{path}: disk short by {format_bytes(num_bytes - free)}: {what} needs {num_bytes} bytes "
            f"({format_bytes(num_bytes)}), {format_bytes(free)} are free" + (f"; {remedy}" if remedy else "")
        )


def disk_refused(path: Path, error: OSError, *, what: str, num_bytes: int) -> str:
    """A clause for a disk that refuses to take `what`, `num_bytes` in all: why, and on a full disk what to change."""
    reason = f"{path}: {what} could not be written ({error.strerror or error})"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason
    return (
        f"{reason}: it takes {num_bytes} bytes ({format_bytes(num_bytes)}), {format_bytes(free_disk_bytes(path))} of "
        "disk are free now; free some, lower keep_checkpoints, or set output to a larger disk"
    )


@contextmanager
def appearing_folder(target: Path) -> Iterator[Path]:
    """An empty folder to write in, which becomes `target` when the block ends without an error.

    Whoever looks at `target` sees the old folder or the new one, whole and on disk, at any moment but one: between
    the two renames of a replacement the old one is called `target.replaced`. After an error nothing has changed.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    replaced = target.with_name(target.name + REPLACED_SUFFIX)
    discard(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        # Rename only what the disk holds: after a power cut a name must not stand for missing bytes.
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        if target.exists():
            discard(replaced)
            target.rename(replaced)
        partial.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def taken_folder(path: Path) -> Iterator[None]:
    """Make a folder, if it is missing, and hold it: a second process that wants it is refused. Raises InputError.

    Whoever dies lets go. Where the file system knows no locks nobody is refused.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror or error
        raise InputError(f"{path}: cannot be written ({reason}); set output to another directory") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(f"{path}: another process writes a run here; wait for its end, or name another one") from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a folder with all that it holds, or a file in its place, if there is any."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or a folder's own entries, to disk. At once where all of it is there already."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
