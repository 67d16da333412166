"""What `data:` names: a file, a folder of files of one kind, or a Hugging Face dataset; no registry stands between."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from executor.data import hub
from executor.data.row_files import ROW_SUFFIXES, Record, read_records
from executor.folder import require_path
from simulator.errors import InputError, UnsupportedChoice
from simulator.units import counted

CODE_SUFFIXES = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql"),
)
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".html", ".log", *CODE_SUFFIXES)
_NOT_READ = (".arrow", ".feather", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".xlsx", ".xls", ".pdf", ".docx")
_UNPACK = f"unpack it or write {', '.join(ROW_SUFFIXES)} or plain text"
# Installed packages and caches inside a source tree are not the source.
SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages", "node_modules")
# Rows beside which text is only about the rows, and tables beside which text is a project's.
_SURELY_ROWS = (".jsonl", ".ndjson", ".parquet")
_ABOUT_THE_ROWS = re.compile(r"(readme|license|licence|notice|citation|changelog)\b.*|dataset_infos?\.json", re.I)
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=$|[-_.0-9])", re.I)


@dataclass(frozen=True)
class Source:
    """Files of one kind in a fixed order. `name` is as the user wrote it, `folder` where the files' names begin.

    A place in a source is (file, line): the index into `files`, and a line from 1, or 0 for the file as a whole.
    """

    name: str
    files: tuple[Path, ...]
    is_text: bool
    folder: Path | None = None  # None: a file, or a dataset
    left_out: tuple[str, ...] = ()  # what the folder holds besides, in words
    dataset: hub.HubDataset | None = None  # in place of files that are read here

    def place(self, file: int, line: int) -> str:
        """A place as the user finds it: `path:line`."""
        path = self.name if self.dataset else _printable(self.files[file])
        return f"{path}:{line}" if line else path

    def records(self) -> Iterator[tuple[int, Iterator[Record]]]:
        """Each file's index with its rows. Raises InputError where one cannot be read on."""
        if self.dataset:  # which knows what of its files is meant
            yield 0, self.dataset.records()
            return
        for index, path in enumerate(self.files):
            yield index, read_records(path)

    def digest(self) -> str:
        """SHA-256 over the content of all files and their names inside the source, as hexadecimal digits."""
        total = hashlib.sha256()
        for path in self.files:
            name = os.path.relpath(path, self.folder) if self.folder else ""
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                content = f"cannot be read ({error.strerror})"
            total.update(f"{name!r} {path.suffix} {content}\n".encode())
        if self.dataset:
            total.update(self.dataset.identity.encode())
        return total.hexdigest()


def find_source(name: Path | str, *, what: str = "data") -> Source:
    """The source that a path or `hub:owner/name` names; `what` is the setting that names it.

    Raises InputError with the nearest name for a path that does not exist, for folders that hold nothing of use or
    more than one kind, and for a Hugging Face dataset that cannot be opened; UnsupportedChoice for formats that are
    not read.
    """
    if str(name).startswith(hub.PREFIX):
        dataset = hub.download(str(name), what=what)
        return Source(str(name), dataset.files, is_text=False, dataset=dataset)
    path = named_path(name, what=what)
    if hub.is_saved(path):
        dataset = hub.load_saved(path)
        return Source(_printable(path), dataset.files, is_text=False, dataset=dataset)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():  # a pipe has nothing left when it is read again, a device perhaps no end
        raise InputError(
            f"{what}: {path} is neither a file nor a folder; data are read more than once, so write a file"
        )
    suffix = path.suffix.lower()
    if suffix in _NOT_READ:
        raise UnsupportedChoice(f"{path}: {suffix} is not read; {_UNPACK}")
    return Source(_printable(path), (path,), is_text=suffix not in ROW_SUFFIXES)


def named_path(name: Path | str, *, what: str = "data") -> Path:
    """The file or folder that a name which is not of the hub names. Raises InputError where there is none."""
    if hint := _elsewhere(str(name)):
        raise InputError(f"{what}: {name} does not exist; {hint}")
    return require_path(name, what=what)


def _elsewhere(name: str) -> str:
    """What to do about a name of nothing on this disk that others take; empty where it is none."""
    if re.match(r"[a-z][a-z0-9+.-]*://", name):
        return "nothing is fetched from an address: download it and name the file"
    path = Path(name)
    is_file_name = path.name.lower().endswith((*TEXT_SUFFIXES, *ROW_SUFFIXES, *_NOT_READ))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not is_file_name and not path.parent.exists():
        return f"a file's path, or {hub.PREFIX}{name} for a dataset of the Hugging Face hub?"
    return ""


def find_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files with one of the suffixes below a folder, sorted by path; hidden and skipped folders are left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        found += [
            Path(parent, name)
            for name in names
            if name.lower().endswith(tuple(suffixes)) and not name.startswith(".") and Path(parent, name).is_file()
        ]
    return sorted(found)


def _printable(path: Path) -> str:
    """A path as text; bytes of its name that are not UTF-8 are question marks."""
    return str(path).encode("utf-8", "replace").decode()


def _folder(path: Path) -> Source:
    found = find_files(path, (*TEXT_SUFFIXES, *ROW_SUFFIXES))
    files = _named_once(found)
    text = [file for file in files if file.name.lower().endswith(TEXT_SUFFIXES)]
    rows = [file for file in files if file.name.lower().endswith(ROW_SUFFIXES)]
    not_read = find_files(path, _NOT_READ)
    if not text and not rows:
        hint = f"; {not_read[0].name} is not read: {_UNPACK}" if not_read else ""
        raise InputError(
            f"{path}: has no text files ({', '.join(TEXT_SUFFIXES[:7])}, ...) and no rows ({', '.join(ROW_SUFFIXES)})"
            + hint
        )
    if rows and all(_ABOUT_THE_ROWS.fullmatch(file.name) for file in text):
        source = _rows(path, [file for file in rows if not _ABOUT_THE_ROWS.fullmatch(file.name)] or rows)
    elif surely := [file for file in rows if file.suffix.lower() in _SURELY_ROWS]:
        raise InputError(
            f"{path}: holds text and rows ({text[0].name}, {surely[0].name}, ...); "
            "name one file, or a folder of one kind"
        )
    else:
        left_out = (f"{counted(len(rows), 'file')} that are not text ({rows[0].name}, ...)",) if rows else ()
        source = Source(_printable(path), tuple(text), True, path, left_out)
    more = []
    if not_read:
        more.append(f"{counted(len(not_read), 'file')} of formats that are not read ({not_read[0].name}, ...)")
    if links := sorted(set(found) - set(files)):
        more.append(f"{len(links)} links to files that are read under another name ({links[0].name}, ...)")
    return replace(source, left_out=(*source.left_out, *more))


def _named_once(files: list[Path]) -> list[Path]:
    """Files under one name each: a link to another of them, or the second of two to one place, is left out."""
    names: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: file.is_symlink()):
        names.setdefault(file.resolve(), file)
    return sorted(names.values())


def _rows(folder: Path, files: list[Path]) -> Source:
    """Files of rows; where their names tell splits of a data set apart, those to train on."""
    by_stem: dict[Path, Path] = {}
    for file in files:
        other = by_stem.setdefault(file.with_suffix(""), file)
        if other != file:
            raise InputError(f"{folder}: holds {other.name} and {file.name}, the same rows twice? Name one of them")
    splits = {file: _split(folder, file) for file in files}
    others = [file for file in files if splits[file] not in ("", "train")]
    if "train" not in splits.values() or not others:
        return Source(_printable(folder), tuple(files), False, folder)
    left_out = f"{counted(len(others), 'file')} of other splits than train ({others[0].name}, ...)"
    return Source(_printable(folder), tuple(file for file in files if file not in others), False, folder, (left_out,))


def _split(folder: Path, file: Path) -> str:
    """The split that a file's name, or its folder's, begins with."""
    for part in reversed(file.relative_to(folder).parts):
        if found := _SPLIT.match(part):
            return found[1].lower()
    return ""
