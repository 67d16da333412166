"""Training state in host memory: one contiguous region a block, exactly as large as planned, pinned where it streams.

torch's pinned allocator rounds sizes up to powers of two and fails without a word on what was asked. Here every
region is mapped in its exact size, touched in parallel, and only the planes that stream over the link are registered
with CUDA.
"""

import contextlib
import math
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from simulator.errors import OutOfMemory
from simulator.formats import GradientFormat, Precision
from simulator.model import BlockSpec, ModelSpec, TensorSpec
from simulator.system import host_memory_available_bytes
from simulator.units import GIB, MIB, format_bytes

# What a block keeps, in the order of its region: planes that stream come first, so that one range is pinned.
Plane = Literal["weights", "gradient", "low", "first_moment", "second_moment"]
PLANES: tuple[Plane, ...] = get_args(Plane)

_COMPUTE_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

# A single registration of 512 GiB or more fails on new drivers with a misleading "out of memory".
MAX_REGISTERED_BYTES = 64 * GIB
_TOUCHED_BYTES = 64 * MIB  # a thread's share of the first touch


@dataclass(frozen=True)
class BlockState:
    """The training state of one block: flat tensors of `BlockSpec.num_elements`, wherever they live.

    `weights` has the compute dtype: the high plane in bf16 runs, else the master itself. `low` is the int16
    remainder of the split master, None in fp32 and fp64 runs. Elements between tensors are zero and stay zero.
    A block of which nothing is trained has its weights only.
    """

    weights: torch.Tensor
    low: torch.Tensor | None
    first_moment: torch.Tensor | None
    second_moment: torch.Tensor | None

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments of a block that is trained."""
        assert self.first_moment is not None, "a frozen block has no moments"
        assert self.second_moment is not None, "a frozen block has no moments"
        return self.first_moment, self.second_moment

    @property
    def precision(self) -> Precision:
        return next(precision for precision, dtype in _COMPUTE_DTYPES.items() if dtype == self.weights.dtype)


@dataclass(frozen=True)
class BlockLayout:
    """The planes a block keeps on the host, and those of them that stream and are therefore pinned."""

    planes: tuple[Plane, ...]
    pinned: tuple[Plane, ...] = ()

    def __post_init__(self) -> None:
        assert set(self.pinned) <= set(self.planes), f"pinned {self.pinned} are not among {self.planes}"

    @property
    def order(self) -> tuple[Plane, ...]:
        """The planes as they follow each other in the region: pinned ones first."""
        return tuple(sorted(self.planes, key=lambda plane: (plane not in self.pinned, PLANES.index(plane))))


class HostBytes(NamedTuple):
    """Host memory in whole pages: all that is resident, and the part of it that is pinned."""

    resident: int
    pinned: int


class Pinning(NamedTuple):
    """The driver's calls that make host memory streamable; each returns 0 or an error code."""

    register: Callable[[int, int], int]  # address, bytes
    unregister: Callable[[int], int]  # address
    describe: Callable[[int], str]  # error code


def cuda_pinning() -> Pinning | None:
    """CUDA's registration of host memory, or None on a machine without CUDA."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.init()
    runtime = torch.cuda.cudart()
    portable = 1  # cudaHostRegisterPortable: pinned for every context
    return Pinning(
        register=lambda address, num_bytes: int(runtime.cudaHostRegister(address, num_bytes, portable)),
        unregister=lambda address: int(runtime.cudaHostUnregister(address)),
        describe=lambda code: str(torch.cuda.CudaError(code)),
    )


def plane_dtype(plane: Plane, precision: Precision, gradient_format: GradientFormat) -> torch.dtype | None:
    """The dtype of a plane; None where the precision has no such plane (`low` outside bf16)."""
    match plane:
        case "weights":
            return _COMPUTE_DTYPES[precision]
        case "low":
            return torch.int16 if precision == "bf16" else None
        case "gradient" if precision != "fp64":
            return _COMPUTE_DTYPES[gradient_format]
    return torch.float64 if precision == "fp64" else torch.float32


def zero_state(block: BlockSpec, *, precision: Precision, device: torch.device | str) -> BlockState:
    """A block's state, all zeros, in memory of its own on `device`. Of a frozen one it is the weights."""

    def zeros(plane: Plane) -> torch.Tensor | None:
        dtype = plane_dtype(plane, precision, "fp32")
        return None if dtype is None else torch.zeros(block.num_elements, dtype=dtype, device=device)

    weights, first_moment, second_moment = zeros("weights"), zeros("first_moment"), zeros("second_moment")
    assert weights is not None
    if not block.trained:
        return BlockState(weights, None, None, None)
    return BlockState(weights, zeros("low"), first_moment, second_moment)


def tensor_view(plane: torch.Tensor, tensor: TensorSpec) -> torch.Tensor:
    """A block's parameter inside one of its planes, in its shape; no copy."""
    return plane[tensor.offset : tensor.offset + tensor.num_elements].view(tensor.shape)


def planned_bytes(
    model: ModelSpec, layouts: Sequence[BlockLayout], *, precision: Precision, gradient_format: GradientFormat
) -> HostBytes:
    """What a `HostStore` of these layouts will take, exactly; allocates nothing."""
    resident = pinned = 0
    for index, layout in enumerate(layouts):
        sizes = _plane_bytes(model.block(index), layout, precision, gradient_format)
        block_pinned = _pinned_bytes(sizes, layout)
        resident += block_pinned + _whole_pages(_unpinned_bytes(sizes, layout))
        pinned += block_pinned
    return HostBytes(resident, pinned)


class HostStore:
    """Zeroed host memory for the planes of every block.

    Each block with planes has one page-aligned region; every plane starts on 256 bytes. `pinning` (see
    `cuda_pinning`) registers the planes that `BlockLayout.pinned` names; with None nothing is pinned. Regions are
    unmapped when the last tensor that views them is gone; `close` ends the registration.

    Raises OutOfMemory when the machine has less free memory than the store needs, before taking any, and when
    pinned memory is refused.
    """

    def __init__(
        self,
        model: ModelSpec,
        layouts: Sequence[BlockLayout],
        *,
        precision: Precision,
        gradient_format: GradientFormat,
        pinning: Pinning | None,
    ) -> None:
        assert len(layouts) == model.num_blocks
        planned = planned_bytes(model, layouts, precision=precision, gradient_format=gradient_format)
        _check_free(planned.resident, "the training state needs")
        self.bytes = planned if pinning else HostBytes(planned.resident, 0)
        self._unpin: Callable[[], object] | None = None
        self._planes: list[dict[Plane, torch.Tensor]] = []
        regions: list[torch.Tensor] = []
        pinned_ranges: list[tuple[int, int]] = []
        for index, layout in enumerate(layouts):
            sizes = _plane_bytes(model.block(index), layout, precision, gradient_format)
            planes: dict[Plane, torch.Tensor] = {}
            if sizes:
                num_pinned = _pinned_bytes(sizes, layout)
                region = _map_region(num_pinned + _whole_pages(_unpinned_bytes(sizes, layout)))
                regions.append(torch.frombuffer(region, dtype=torch.uint8))
                offset = 0
                for plane, size in sizes.items():
                    if plane not in layout.pinned:
                        offset = max(offset, num_pinned)
                    dtype = plane_dtype(plane, precision, gradient_format)
                    assert dtype is not None
                    # A storage of its own: torch judges by a storage's first byte whether a tensor is pinned.
                    planes[plane] = torch.frombuffer(region, dtype=dtype, offset=offset, count=size // dtype.itemsize)
                    offset += size
                if num_pinned:
                    pinned_ranges.append((regions[-1].data_ptr(), num_pinned))
            self._planes.append(planes)
        _touch(regions)
        if pinning:
            registered: list[int] = []
            self._unpin = weakref.finalize(self, _unregister, pinning, registered)
            try:
                _register(pinning, pinned_ranges, registered)
            except OutOfMemory:
                self._unpin()
                raise

    def plane(self, block: int, plane: Plane) -> torch.Tensor:
        """A plane of a block: flat, `BlockSpec.num_elements` long. Raises KeyError when the layout lacks it."""
        return self._planes[block][plane]

    def has(self, block: int, plane: Plane) -> bool:
        return plane in self._planes[block]

    def state(self, block: int) -> BlockState:
        """The state of a block that lives on the host as a whole. Raises KeyError when its weights are elsewhere."""
        planes = self._planes[block]
        state = (planes.get("low"), planes.get("first_moment"), planes.get("second_moment"))
        return BlockState(planes["weights"], *state)

    def close(self) -> None:
        """Unpin, and let go of the memory; tensors still held elsewhere stay valid, unpinned. May be called twice."""
        if self._unpin:
            self._unpin()
        self._planes = []


class HostRegion:
    """Zeroed host memory of `num_bytes` in whole pages, resident, and pinned where `pinning` is given.

    It is unmapped when the last tensor that views it is gone; `close` ends the registration. `what` says for errors
    what it holds. Raises OutOfMemory as `HostStore` does.
    """

    def __init__(self, num_bytes: int, *, what: str, pinning: Pinning | None) -> None:
        self.num_bytes = _whole_pages(num_bytes)
        self._unpin: Callable[[], object] | None = None
        if not num_bytes:
            return
        _check_free(self.num_bytes, f"{what} need")
        self._region = _map_region(self.num_bytes)
        whole = torch.frombuffer(self._region, dtype=torch.uint8)
        _touch([whole])
        if pinning:
            registered: list[int] = []
            self._unpin = weakref.finalize(self, _unregister, pinning, registered)
            try:
                _register(pinning, [(whole.data_ptr(), self.num_bytes)], registered)
            except OutOfMemory:
                self._unpin()
                raise

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that begins `offset` bytes into the region, with a storage of its own."""
        return torch.frombuffer(self._region, dtype=dtype, offset=offset, count=math.prod(shape)).view(*shape)

    def close(self) -> None:
        """Unpin; tensors still held elsewhere stay valid, unpinned. May be called twice."""
        if self._unpin:
            self._unpin()


def _check_free(num_bytes: int, needed: str) -> None:
    free = host_memory_available_bytes()
    if num_bytes > free:
        raise OutOfMemory(
            f"host memory short by {format_bytes(num_bytes - free)}: {needed} {num_bytes} bytes "
            f"({format_bytes(num_bytes)}), {format_bytes(free)} are free; end other programs, or plan again with a "
            "lower --host-memory"
        )


def _plane_bytes(
    block: BlockSpec, layout: BlockLayout, precision: Precision, gradient_format: GradientFormat
) -> dict[Plane, int]:
    """Bytes of each plane in the region's order. `num_elements` is a multiple of 128, so planes stay aligned."""
    dtypes = {plane: plane_dtype(plane, precision, gradient_format) for plane in layout.order}
    return {plane: block.num_elements * dtype.itemsize for plane, dtype in dtypes.items() if dtype is not None}


def _pinned_bytes(sizes: Mapping[Plane, int], layout: BlockLayout) -> int:
    """Bytes of the planes that stream, to the end of their last page: CUDA refuses copies of half-pinned memory."""
    return _whole_pages(sum(size for plane, size in sizes.items() if plane in layout.pinned))


def _unpinned_bytes(sizes: Mapping[Plane, int], layout: BlockLayout) -> int:
    return sum(size for plane, size in sizes.items() if plane not in layout.pinned)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _map_region(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory, page-aligned, given back when the last tensor over it is gone."""
    try:
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(
            f"host memory: {num_bytes} bytes ({format_bytes(num_bytes)}) for a block of the training state were "
            f"refused ({error.strerror}), {format_bytes(host_memory_available_bytes())} are free; raise the limit of "
            "the process (ulimit -v), end other programs, or plan again with a lower --host-memory"
        ) from error
    # A forked child (a compile worker) never reads it; sharing it would copy pages under a running transfer.
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):  # a kernel without this advice
            region.madvise(advice)
    return region


def _touch(regions: Sequence[torch.Tensor]) -> None:
    """Make every page resident, all cores at once."""
    shares = [
        region[first : first + _TOUCHED_BYTES] for region in regions for first in range(0, len(region), _TOUCHED_BYTES)
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda share: share[:: mmap.PAGESIZE].zero_(), shares))


def _register(pinning: Pinning, ranges: Sequence[tuple[int, int]], registered: list[int]) -> None:
    total = sum(num_bytes for _, num_bytes in ranges)
    done = 0
    for address, num_bytes in ranges:
        for offset in range(0, num_bytes, MAX_REGISTERED_BYTES):
            chunk = min(MAX_REGISTERED_BYTES, num_bytes - offset)
            code = pinning.register(address + offset, chunk)
            if code:
                limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                limit_text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
                raise OutOfMemory(
                    f"pinned host memory: cudaHostRegister refused {chunk} bytes ({format_bytes(chunk)}) after "
                    f"{format_bytes(done)} of {format_bytes(total)}: {pinning.describe(code)} (error {code}); "
                    f"locked memory is limited to {limit_text}, "
                    f"{format_bytes(host_memory_available_bytes())} of host memory are free; raise the limit (ulimit "
                    "-l), end other programs, or plan again with a lower --host-memory"
                )
            registered.append(address + offset)
            done += chunk


def _unregister(pinning: Pinning, registered: list[int]) -> None:
    refused = {}
    while registered:
        address = registered.pop()
        code = pinning.unregister(address)
        if code:
            refused[address] = code
    # At interpreter exit the driver may be gone already, and with it every registration.
    if refused and torch.cuda.is_initialized():
        address, code = next(iter(refused.items()))
        raise RuntimeError(f"cudaHostUnregister refused {address:#x}: {pinning.describe(code)} (error {code})")
