"""Tokenized samples on disk, memory-mapped: written once as a stream, and found again by content.

    KEY/tokens.bin     uint16 or uint32, all samples end to end
        trained.bin    bool, for every token whether it is a target
        bounds.bin     int64, where samples begin, and the end
        origins.bin    int64, three for each sample: index of its file, line, index of its kind in KINDS
        cache.json     types, checksums, and what was read: written last

A cache that is cut off or damaged is written again. Readers hold the files open, so a cache may be deleted any time.
"""

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from executor.data.report import ReadReport, Tally
from executor.folder import appearing_folder
from executor.tokenizer import BoolArray, TokenArray
from simulator.errors import ConveyorError, InputError
from simulator.schema import Schema, identity_hash

RECORD_NAME = "cache.json"
_ARRAYS = ("tokens", "trained", "bounds", "origins")
_CHECKED_BYTES = 2**24  # at once
_REPORT_SECONDS = 30.0

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Samples end to end: sample i is `tokens[bounds[i]:bounds[i + 1]]`; `trained` marks the targets.

    `origins[i]` is (index of its file, line, index of its kind in KINDS). Every sample has a target behind its first
    token.
    """

    tokens: TokenArray
    trained: BoolArray
    bounds: IntArray
    origins: IntArray  # [samples, 3]
    fingerprint: int  # of tokens, marks and bounds: another text gives another one

    @property
    def num_samples(self) -> int:
        return len(self.bounds) - 1


class CacheRecord(Schema):
    """What a finished cache says of itself."""

    token_dtype: Literal["uint16", "uint32"]
    num_bytes: dict[str, int]
    checksums: dict[str, int]  # CRC-32
    read: ReadReport


class SampleWriter:
    """Writes samples to the files of a cache, piece by piece: nothing but the sample's length is kept in memory."""

    def __init__(self, folder: Path, *, vocab_size: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.token_dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
        self.num_bytes = dict.fromkeys(_ARRAYS, 0)
        self.checksums = dict.fromkeys(_ARRAYS, 0)
        self.num_samples = 0
        self._num_tokens = 0
        self._say, self._started, self._said = say, time.monotonic(), time.monotonic()
        self._open = ExitStack()
        self._files = {name: self._open.enter_context((folder / f"{name}.bin").open("wb")) for name in _ARRAYS}

    def __enter__(self) -> Self:
        self._write("bounds", np.zeros(1, np.int64))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        self._open.close()

    def add(self, tokens: TokenArray, trained: BoolArray) -> None:
        """Tokens of the sample that `end` will end."""
        self._write("tokens", tokens.astype(self.token_dtype))
        self._write("trained", trained.astype(np.bool_))
        self._num_tokens += len(tokens)

    def end(self, *, file: int, line: int, kind: int) -> None:
        self._write("bounds", np.array([self._num_tokens], np.int64))
        self._write("origins", np.array([file, line, kind], np.int64))
        self.num_samples += 1
        if time.monotonic() - self._said > _REPORT_SECONDS:
            self._said = time.monotonic()
            seconds = self._said - self._started
            self._say(f"data: {self.num_samples:,} samples, {self._num_tokens:,} tokens after {seconds:.0f} s")

    def _write(self, name: str, values: npt.NDArray[Any]) -> None:
        data = values.tobytes()
        self._files[name].write(data)
        self.num_bytes[name] += len(data)
        self.checksums[name] = zlib.crc32(data, self.checksums[name])


def default_folder() -> Path:
    """Where caches are kept that the user names no place for: under XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "conveyor" / "data"


def cache_key(parts: Mapping[str, Any]) -> str:
    """The name of a cache that everything in `parts` (JSON) decides."""
    return identity_hash(dict(parts))


def cached_samples(
    folder: Path,
    key: str,
    write: Callable[[SampleWriter, Tally], None],
    *,
    vocab_size: int,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Samples, ReadReport]:
    """The samples of a key from the cache, or as `write` writes them.

    Of several processes that want one key, one writes and the others wait. Raises ConveyorError where the disk
    refuses while writing, InputError where the folder cannot be written at all, and whatever `write` raises; then
    nothing is left.
    """
    target = folder / key
    if found := _opened(target):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            if found := _opened(target):
                return found
            _write_cache(target, write, vocab_size, say)
    except OSError as error:
        kind = ConveyorError if folder.is_dir() and os.access(folder, os.W_OK) else InputError
        raise kind(
            f"cache: tokens cannot be written to {target} ({error.strerror or error}); set cache to a folder with room"
        ) from error
    found = _opened(target)
    if found is None:
        raise ConveyorError(f"cache: {target} is not what was just written to it; set cache to another disk")
    return found


def _write_cache(
    target: Path, write: Callable[[SampleWriter, Tally], None], vocab_size: int, say: Callable[[str], None]
) -> None:
    with appearing_folder(target) as partial:
        tally = Tally()
        with SampleWriter(partial, vocab_size=vocab_size, say=say) as writer:
            write(writer, tally)
        record = CacheRecord(
            token_dtype=writer.token_dtype,
            num_bytes=writer.num_bytes,
            checksums=writer.checksums,
            read=tally.read_report(),
        )
        record.save(partial / RECORD_NAME)


def _opened(target: Path) -> tuple[Samples, ReadReport] | None:
    """A whole cache, every byte of it checked; None where there is none, or a damaged one."""
    try:
        record = CacheRecord.load(target / RECORD_NAME)
        dtypes = {"tokens": record.token_dtype, "trained": "bool", "bounds": "int64", "origins": "int64"}
        arrays = {name: _mapped(target / f"{name}.bin", dtype, record) for name, dtype in dtypes.items()}
    except (InputError, OSError, KeyError, ValueError):
        return None
    fingerprint = zlib.crc32(repr([record.checksums[name] for name in ("tokens", "trained", "bounds")]).encode())
    origins = arrays["origins"].reshape(-1, 3)
    return Samples(arrays["tokens"], arrays["trained"], arrays["bounds"], origins, fingerprint), record.read


def _mapped(path: Path, dtype: str, record: CacheRecord) -> npt.NDArray[Any]:
    size = path.stat().st_size
    if size != record.num_bytes[path.stem]:
        raise ValueError
    if not size:  # nothing can be mapped of an empty file
        return np.zeros(0, dtype)
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(_CHECKED_BYTES):
            checksum = zlib.crc32(data, checksum)
    if checksum != record.checksums[path.stem]:
        raise ValueError
    return np.memmap(path, dtype=dtype, mode="r")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; a process that dies lets go."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
