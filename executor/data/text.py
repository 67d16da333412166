"""Plain text: a file, or all text files of a folder, as one stream of tokens."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from executor.data.report import Tally
from executor.tokenizer import TokenArray, Tokenizer
from simulator.errors import InputError

TEXT_SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".log"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql"),
)
# Installed packages and caches inside a source tree are not the source.
SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages", "node_modules")
_PIECE_CHARACTERS = 2**20  # of a long document, tokenized at once
_BATCH_CHARACTERS = 2**22


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


def read_stream(files: Sequence[Path], tokenizer: Tokenizer, tally: Tally) -> TokenArray:
    """All documents one after the other, each ended by the end-of-sequence token once.

    A byte order mark and CRLF line ends make no difference. Files that are empty, not UTF-8 text, or JSON by content
    are skipped and counted; when there is one file only, InputError says what is wrong with it. Returns uint16 where
    the vocabulary allows.
    """
    eos = np.array([tokenizer.eos_id], np.uint32)
    chunks: list[TokenArray] = []
    for batch in _batches(_documents(files, tally)):
        for (_, first, last), tokens in zip(batch, tokenizer.encode([text for text, _, _ in batch]), strict=True):
            if first and not np.array_equal(tokens[: len(tokenizer.prefix)], tokenizer.prefix):
                chunks.append(_narrow(tokenizer.prefix, tokenizer))
            chunks.append(_narrow(tokens, tokenizer))
            if last and not (tokens.size and tokens[-1] == tokenizer.eos_id):
                chunks.append(_narrow(eos, tokenizer))
    return np.concatenate(chunks) if chunks else _narrow(eos[:0], tokenizer)


def _narrow(tokens: TokenArray, tokenizer: Tokenizer) -> TokenArray:
    return tokens.astype(np.uint16) if tokenizer.vocab_size <= 2**16 else tokens


def _documents(files: Sequence[Path], tally: Tally) -> Iterator[str]:
    for path in files:
        tally.num_files += 1
        tally.num_read += 1
        text, reason = _read(path)
        if reason and len(files) == 1:
            raise InputError(f"{path}: {reason}")
        if reason:
            tally.skip(reason.split(" (")[0], str(path))
        else:
            yield text


def _read(path: Path) -> tuple[str, str]:
    """A file's text and an empty string, or the reason why it is of no use."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        return "", f"cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        return "", f"is not UTF-8 text (byte {error.start})"
    text = text.replace("\r\n", "\n")
    if not text.strip():
        return "", "is empty"
    if path.suffix.lower() == ".txt" and text.lstrip()[0] in "{[" and _is_json(text):
        return "", "holds JSON, not text; name it .jsonl (one row a line) to train on its rows"
    return text, ""


def _is_json(text: str) -> bool:
    """Whether the whole text, or its first line as in JSONL, is a JSON object or array."""
    for candidate in (text.lstrip().split("\n", 1)[0], text):
        try:
            return isinstance(json.loads(candidate), dict | list)
        except ValueError:
            continue
        except RecursionError:  # brackets a thousand deep are no prose
            return True
    return False


def _batches(documents: Iterator[str]) -> Iterator[list[tuple[str, bool, bool]]]:
    """Pieces of documents, each with whether it is its document's first and last, in batches of bounded size."""
    batch: list[tuple[str, bool, bool]] = []
    size = 0
    for text in documents:
        begin = 0
        while begin < len(text):
            end = _piece_end(text, begin)
            batch.append((text[begin:end], begin == 0, end == len(text)))
            size += end - begin
            begin = end
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _piece_end(text: str, begin: int) -> int:
    """Where to cut a long document: after the last line end in reach, where tokens seldom straddle."""
    end = begin + _PIECE_CHARACTERS
    if end >= len(text):
        return len(text)
    return text.rfind("\n", begin, end) + 1 or end
