"""Plain text: every file a document, read in pieces."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from executor.data.report import Tally
from executor.data.source import CODE_SUFFIXES, Source
from simulator.errors import InputError

_PIECE_CHARACTERS = 2**20  # of a long document, tokenized at once
# Source code, and logs, whose lines may well be JSON and are trained as they are.
MAY_BE_JSON = (*CODE_SUFFIXES, ".log")
_JSON_CHARACTERS = 2**24  # up to here a text is parsed as a whole to see whether it is JSON


class Document(NamedTuple):
    """A piece of a document, and whether it is the document's first and its last."""

    text: str
    file: int
    is_first: bool
    is_last: bool


def documents(source: Source, tally: Tally) -> Iterator[Document]:
    """The files of a source in pieces of bounded size, cut where tokens seldom straddle.

    A byte order mark and CRLF line ends make no difference. Files that are empty, not UTF-8 text, or JSON by content
    are skipped and counted; when there is one file only, InputError says what is wrong with it.
    """
    for index, path in enumerate(source.files):
        tally.num_files += 1
        tally.num_read += 1
        reason = _reason_against(path)
        if reason and len(source.files) == 1:
            raise InputError(f"{path}: {reason}")
        if reason:
            tally.skip(reason.split(" (")[0], index, 0)
            continue
        tally.kinds["text"] += 1
        yield from _pieces(path, index)


def _pieces(path: Path, index: int) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        text, is_first, more = "", True, True
        while more:
            # Filled up before it is cut, so that where pieces end depends on nothing but the text.
            while more and len(text) <= _PIECE_CHARACTERS:
                chunk = _read_lines(file)
                text, more = text + chunk, bool(chunk)
            while len(text) > _PIECE_CHARACTERS:
                end = text.rfind("\n", 0, _PIECE_CHARACTERS) + 1 or _PIECE_CHARACTERS
                yield Document(text[:end], index, is_first, False)
                text, is_first = text[end:], False
        yield Document(text, index, is_first, True)


def _read_lines(file: TextIO) -> str:
    """The next characters with line ends as `\\n`; empty at the end of the file."""
    chunk = file.read(_PIECE_CHARACTERS)
    while chunk.endswith("\r") and (more := file.read(1)):
        chunk += more
    return chunk.replace("\r\n", "\n")


def _reason_against(path: Path) -> str:
    """Why a file is no text to train on; empty where it is. Reads all of it, since its last byte may say so."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_blank, begin, size = True, "", 0
            while chunk := _read_lines(file):
                is_blank = is_blank and not chunk.strip()
                size += len(chunk)
                if path.suffix.lower() not in MAY_BE_JSON and len(begin) < _JSON_CHARACTERS:
                    begin += chunk
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return f"is not UTF-8 text (byte {_first_wrong_byte(path)})"
    if is_blank:
        return "is empty"
    if begin.lstrip()[:1] in ("{", "[") and _is_json(begin, whole=size == len(begin)):
        return "holds JSON, not text; name it .jsonl (one row a line) or .json to train on its rows"
    return ""


def _first_wrong_byte(path: Path) -> int:
    """Where a file stops being UTF-8. A decoder that is given pieces counts from the piece's beginning."""
    position = 0
    with path.open("rb") as file:
        rest = b""
        while chunk := file.read(_PIECE_CHARACTERS):
            data = rest + chunk
            try:
                data.decode("utf-8")
                rest = b""
            except UnicodeDecodeError as error:
                if error.end < len(data) or error.reason != "unexpected end of data":
                    return position + error.start
                rest = data[error.start :]
            position += len(data) - len(rest)
    return position


def _is_json(text: str, *, whole: bool) -> bool:
    """Whether a text, its first line as in JSONL, or the first entry of its array, is a JSON object or array."""
    text = text.lstrip()
    decoder = json.JSONDecoder()
    try:
        for candidate in (text.split("\n", 1)[0], text if whole else ""):
            try:
                if isinstance(json.loads(candidate), dict | list):
                    return True
            except ValueError:
                continue
        # Too long to be read as a whole, or cut off: an array of objects is known by its first.
        inside = text[1:].lstrip()
        return text[0] == "[" and inside[:1] == "{" and isinstance(decoder.raw_decode(inside)[0], dict)
    except ValueError:
        return False
    except RecursionError:  # brackets a thousand deep are no prose
        return True
