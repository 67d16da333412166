"""A safetensors file, written and read in pieces.

The safetensors library writes a file from a dictionary of whole host tensors and reads by mapping the file into
memory. Tensors in HBM would need a host copy the size of a shard, and mapped pages count as resident. Here at most
one piece is copied, whatever the shard's size; the format is the library's: an 8-byte header length, a JSON header
(dtype, shape and byte range of each tensor), the tensors' bytes.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from simulator.errors import InputError
from simulator.json_text import parse_json

PIECE_BYTES = 8 * 2**20

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I16": torch.int16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file. `dtype` is safetensors' name; offsets are absolute bytes in the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises InputError naming the file, and the first tensor whose bytes are missing, when it is not whole.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if first.startswith(b"version "):
                raise InputError(f"{path}: is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            header_bytes = int.from_bytes(first, "little")
            if len(first) < 8 or header_bytes > min(_MAX_HEADER_BYTES, size - 8):
                raise InputError(f"{path}: is not a safetensors file, or is cut off in its header ({size} bytes)")
            header = parse_json(file.read(header_bytes))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise InputError(f"{path}: its safetensors header is damaged (nested too deeply)") from error
    except ValueError as error:
        raise InputError(f"{path}: its safetensors header is damaged ({error})") from error
    try:
        header.pop("__metadata__", None)
        start = 8 + header_bytes
        tensors = [_stored_tensor(path, name, entry, start) for name, entry in header.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: its safetensors header is damaged ({error!r})") from error
    tensors.sort(key=lambda tensor: tensor.begin)
    for before, tensor in pairwise(tensors):
        if tensor.begin < before.end:
            raise InputError(
                f"{path}: its safetensors header is damaged (tensors {before.name!r} and {tensor.name!r} overlap)"
            )
    for tensor in tensors:
        if tensor.end > size:
            raise InputError(
                f"{path}: is cut off: tensor {tensor.name!r} ends at byte {tensor.end}, the file has {size} bytes"
            )
        dtype = DTYPES.get(tensor.dtype)
        if dtype is not None and tensor.end - tensor.begin != math.prod(tensor.shape) * dtype.itemsize:
            raise InputError(f"{path}: its safetensors header is damaged (size of tensor {tensor.name!r})")
    if tensors and size > tensors[-1].end:
        raise InputError(
            f"{path}: is damaged: {size - tensors[-1].end} bytes follow its last tensor, {tensors[-1].name!r}; "
            "fetch it again"
        )
    return {tensor.name: tensor for tensor in tensors}


def _stored_tensor(path: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    """A header's entry, if it has the types of one. Raises what tells that it has not."""
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"entry of tensor {name!r}")
    return StoredTensor(path, name, dtype, shape, start + begin, start + end)


def read_pieces(stored: StoredTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield `(first element, flat host tensor)` pieces; the next piece overwrites the one before."""
    dtype = DTYPES[stored.dtype]
    num_elements, step = math.prod(stored.shape), PIECE_BYTES // dtype.itemsize
    buffer = torch.empty(min(step, num_elements), dtype=dtype)
    with _opened(stored) as file:
        for first in range(0, num_elements, step):
            piece = buffer[: num_elements - first]
            _fill(piece, file, stored)
            yield first, piece


def read_tensor(stored: StoredTensor, target: torch.Tensor) -> int:
    """Read into a contiguous `target` of the stored dtype and size, on any device. Returns the bytes' CRC-32."""
    flat = target.view(-1)
    step = PIECE_BYTES // flat.element_size()
    on_host = flat.device.type == "cpu"
    buffer = flat if on_host else torch.empty(min(step, flat.numel()), dtype=flat.dtype)
    # The checksum of one piece runs beside the reading of the next: either alone keeps up with a disk.
    with ThreadPoolExecutor(1) as pool, _opened(stored) as file:
        pending = pool.submit(int, 0)
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            piece = part if on_host else buffer[: part.numel()]
            if not on_host:
                pending.result()
            _fill(piece, file, stored)
            if not on_host:
                part.copy_(piece)
            pending = pool.submit(zlib.crc32, _bytes(piece), pending.result())
        return pending.result()


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]) -> dict[str, int]:
    """Write contiguous tensors, on any device, in the order given, and flush them to disk.

    Returns each tensor's CRC-32. Raises OSError when the disk refuses.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    checksums: dict[str, int] = {}
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            checksum = 0
            flat = tensor.detach().view(-1)
            step = PIECE_BYTES // flat.element_size()
            for first in range(0, flat.numel(), step):
                piece = _bytes(flat[first : first + step].cpu())
                pending = pool.submit(zlib.crc32, piece, checksum)
                file.write(piece)
                checksum = pending.result()
            checksums[name] = checksum
        file.flush()
        os.fsync(file.fileno())
    return checksums


def shard_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the tensors' data; a header adds some 100 bytes a tensor."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@contextmanager
def _opened(stored: StoredTensor) -> Iterator[BinaryIO]:
    try:
        with stored.file.open("rb") as file:
            file.seek(stored.begin)
            yield file
    except OSError as error:
        raise InputError(f"{stored.file}: tensor {stored.name!r} cannot be read ({error.strerror})") from error


def _fill(piece: torch.Tensor, file: BinaryIO, stored: StoredTensor) -> None:
    view = _bytes(piece)
    if file.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise InputError(f"{stored.file}: is cut off in tensor {stored.name!r}")


def _bytes(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data
