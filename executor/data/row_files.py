"""Files of rows: JSONL, JSON, CSV, TSV and Parquet, read as a stream of rows with their places."""

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from simulator.errors import InputError
from simulator.json_text import RepeatedKey, object_of, parse_json

_CHUNK_CHARACTERS = 2**20
_SPACE = re.compile(r"[ \t\n\r]+")
_MOST_CHARACTERS = 2**28  # of one row of JSON: where a mistake would have the rest of a file read as one
PARQUET_BATCH_ROWS = 512
# Of what files are called by mistake: first bytes, name, remedy.
_FIRST_BYTES = (
    (b"\x1f\x8b", "gzip", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unpack it"),
    (b"PK\x03\x04", "zip", "unpack it"),
    (b"PAR1", "parquet", "name it .parquet"),
    (codecs.BOM_UTF16_LE, "UTF-16", "save it as UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16", "save it as UTF-8"),
    (b"version ", "a Git LFS pointer", "fetch it with `git lfs pull`"),
)


class Unreadable(NamedTuple):
    """In place of a value that Python cannot hold, as a date beyond the year 9999 or text that is not UTF-8."""

    reason: str


class Record(NamedTuple):
    """A row as it was read, or why it could not be: the end of a sentence that begins with file and line.

    `line` counts from 1: the line where the row begins, or the number of the row where a format has no lines.
    """

    line: int
    value: Any = None
    mistake: str = ""


def read_records(path: Path) -> Iterator[Record]:
    """Rows of a file by its suffix, one of `ROW_SUFFIXES`; blank lines are passed over.

    Raises InputError for a file that cannot be read on, naming file, line and column where there are any.
    """
    try:
        if mistake := _another_format(path):
            raise InputError(f"{path}: {mistake}")
        yield from _READERS[path.suffix.lower()](path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or _first_line(error)})") from error


def _another_format(path: Path) -> str:
    """What a file is by its first bytes, and what to do, where that is not what its name says; else empty."""
    with path.open("rb") as file:
        begin = file.read(8)
    for first_bytes, what, remedy in _FIRST_BYTES:
        if begin.startswith(first_bytes) and what != path.suffix[1:].lower():
            return f"is {what} by its content, not {path.suffix[1:].upper()}; {remedy}"
    return ""


def require_package(name: str, *, what: str, extra: str) -> Any:
    """An optional package's module. Raises InputError that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(
            f"{what} needs the package {package}, which is not installed: pip install 'conveyor-train[{extra}]'"
        ) from error


def _read_jsonl(path: Path) -> Iterator[Record]:
    is_first = True
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if not line.strip():
                continue
            record = _json_line(number, line)
            if is_first and record.mistake and (line.strip() == b"{" or line.lstrip().startswith(b"[")):
                belongs = "; an array, or a row of several lines, belongs in a file named .json"
                record = record._replace(mistake=record.mistake + belongs)
            yield record
            is_first = False


def _json_line(number: int, raw: bytes) -> Record:
    try:
        return Record(number, parse_json(raw.decode("utf-8").rstrip()))
    except UnicodeDecodeError as error:
        return Record(number, mistake=f":{error.start + 1}: is not UTF-8 text")
    except json.JSONDecodeError as error:
        # Only the last line of a file has no line end.
        cut_off = "" if raw.endswith(b"\n") else "; the last line looks half-written"
        return Record(number, mistake=f":{error.colno}: is not JSON ({error.msg}){cut_off}")
    except RecursionError:
        return Record(number, mistake=": its JSON is nested too deeply")
    except RepeatedKey as error:
        return Record(number, mistake=f": {error}")
    except ValueError as error:  # a number of more digits than Python reads
        return Record(number, mistake=f": is not JSON that can be read ({_first_clause(error)})")


def _first_line(error: Exception) -> str:
    """What a library says, without the lines that follow."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _first_clause(error: Exception) -> str:
    """What Python says of a number, without its advice to programmers."""
    return str(error).partition(";")[0]


def _read_json(path: Path) -> Iterator[Record]:
    """An array of rows, or rows one after another, never more than one in memory."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = _JsonText(path, file)
        if text.peek() != "[":
            while text.peek():
                yield text.record()
            return
        text.take()
        mark = text.peek()
        while mark != "]":
            yield text.record()
            mark = text.peek()
            if mark not in (",", "]"):
                raise text.wrong("Expecting ',' or ']'" if mark else "the array has no end")
            if mark == ",":
                text.take()
                if not text.peek():
                    raise text.wrong("the array has no end")
        text.take()
        if text.peek():  # a second array would be lost without a word
            raise text.wrong("more follows the end of the array; rows stand in one array")


class _JsonText:
    """A window on a file of JSON that moves from value to value and knows its line and column."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._at, self._ended = "", 0, False
        self._line, self._column = 1, 1
        self._repeated = ""  # what is wrong with the value that is being read, and does not hide its end
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            if found := _SPACE.match(self._text, self._at):
                self._advance(found.end() - self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_more()

    def take(self) -> None:
        self._advance(1)

    def record(self) -> Record:
        """The value that begins here. Raises InputError with its place."""
        line = self._line
        while True:
            self._repeated = ""
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > _MOST_CHARACTERS:
                    self._advance(error.pos - self._at)
                    raise self.wrong(error.msg) from error
            except RecursionError as error:
                raise InputError(f"{self._path}:{line}: its JSON is nested too deeply") from error
            except ValueError as error:  # a number of more digits than Python reads
                reason = _first_clause(error)
                raise InputError(f"{self._path}:{line}: is not JSON that can be read ({reason})") from error
            else:
                if end < len(self._text) or self._ended:  # a number may go on in the next chunk
                    self._advance(end - self._at)
                    return Record(line, value, self._repeated and f": {self._repeated}")
            self._read_more()

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return object_of(pairs)
        except RepeatedKey as error:
            self._repeated = str(error)
            return dict(pairs)

    def wrong(self, reason: str) -> InputError:
        rest = self._text[self._at :].strip()
        cut_off = "; the file looks half-written" if self._ended and (not rest or "Unterminated" in reason) else ""
        return InputError(f"{self._path}:{self._line}:{self._column}: is not JSON ({reason}){cut_off}")

    def _read_more(self) -> None:
        rest = self._text[self._at :]
        try:
            more = self._file.read(max(_CHUNK_CHARACTERS, len(rest)))
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path}: is not UTF-8 text (after line {self._line})") from error
        self._text, self._at, self._ended = rest + more, 0, not more

    def _advance(self, count: int) -> None:
        passed = self._text[self._at : self._at + count]
        self._at += count
        if lines := passed.count("\n"):
            self._line += lines
            self._column = len(passed) - passed.rfind("\n")
        else:
            self._column += count


def _read_csv(path: Path) -> Iterator[Record]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)  # a text may be longer than the default of 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except UnicodeDecodeError as error:
                raise InputError(f"{path}: is not UTF-8 text (after line {line - 1})") from error
            except csv.Error as error:
                cut_off = "; the file looks half-written" if "end of data" in str(error) else ""
                raise InputError(f"{path}:{line}: is not {path.suffix[1:].upper()} ({error}){cut_off}") from error
            if cells is None:
                return
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = _header(path, line, cells)
            elif len(cells) != len(header):
                wrong = f": has {len(cells)} cells, and the header names {len(header)} columns"
                yield Record(line, mistake=f"{wrong}; write cells that hold {delimiter!r} in quotes")
            else:
                yield Record(line, {name: cell.replace("\r\n", "\n") for name, cell in zip(header, cells, strict=True)})


def _header(path: Path, line: int, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path}:{line}: the header names the column {twice!r} twice")
    if len(names) == 1 and (other := next((mark for mark in ";\t|," if mark in names[0]), "")):
        raise InputError(
            f"{path}:{line}: the header is one column, {names[0]!r}; .csv is separated by commas, .tsv by tabs, "
            f"and this file seems to be by {other!r}"
        )
    return names


def _read_parquet(path: Path) -> Iterator[Record]:
    parquet = require_package("pyarrow.parquet", what=f"{path}: Parquet", extra="parquet")
    arrow = import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for value in arrow_rows(batch):
                    number += 1
                    yield Record(number, value)
    except arrow.ArrowException as error:
        raise InputError(f"{path}: cannot be read as Parquet ({_first_line(error)})") from error


def arrow_rows(table: Any) -> list[dict[str, Any]]:
    """Rows of an Arrow table; a value that Python cannot hold is `Unreadable`: its column may be of no interest."""
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    except (ValueError, OverflowError):
        columns = {name: [_arrow_value(value) for value in table[name]] for name in table.schema.names}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return rows


def _arrow_value(value: Any) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError) as error:
        return Unreadable(_first_clause(error))


_READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
ROW_SUFFIXES = tuple(_READERS)
