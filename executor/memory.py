"""Memory: the tensors behind a program's buffers.

Persistent buffers are allocated once, by the sizes of the program's own table; what passes through a step (layer
inputs, saved activations, their gradients) is kept by name from the operation that writes it to the one that
releases it.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from executor.layer import Documents
from executor.out_of_memory import first_line
from executor.saved import SavedLayer, aligned
from executor.store import BlockLayout, BlockState, HostRegion, HostStore, Plane, cuda_pinning, plane_dtype
from simulator.errors import OutOfMemory
from simulator.formats import PRECISIONS
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload
from simulator.program import Buffer, Role, Tier
from simulator.system import host_memory_available_bytes
from simulator.units import format_bytes

STATE_PLANES: tuple[Plane, ...] = ("low", "first_moment", "second_moment")


class Memory:
    """Tensors by buffer name, for one model, workload and policy on one device."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        policy: Policy,
        buffers: Mapping[str, Buffer],
        device: torch.device,
    ) -> None:
        self.model, self.device = model, device
        self.precision = workload.precision
        self.gradient_format = policy.gradient_format
        self.passing: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensors_on_host: dict[str, torch.Tensor] = {}  # activations that wait
        self._device_states: dict[str, dict[Plane, torch.Tensor]] = {}  # by buffer
        self.host = HostStore(
            model,
            [_layout(buffers, block, streamed=home == "streamed") for block, home in enumerate(policy.optimizer_homes)],
            precision=self.precision,
            gradient_format=self.gradient_format,
            pinning=cuda_pinning() if device.type == "cuda" else None,
        )
        self._input_shape = (policy.micro_batch_rows, workload.sequence_length, model.hidden_size)
        places = [buffer for buffer in buffers.values() if buffer.role in (Role.ACTIVATION, Role.SAVED_PLACE)]
        self._waiting = HostRegion(
            sum(aligned(place.num_bytes) for place in places),
            what="activations that wait on the host",
            pinning=cuda_pinning() if device.type == "cuda" else None,
        )
        compute_dtype = plane_dtype("weights", self.precision, self.gradient_format)
        assert compute_dtype is not None
        offset = 0
        for place in places:
            of_input = place.role is Role.ACTIVATION
            shape, dtype = (self._input_shape, compute_dtype) if of_input else ((place.num_bytes,), torch.uint8)
            self._tensors_on_host[place.name] = self._waiting.tensor(offset, shape, dtype)
            offset += aligned(place.num_bytes)
        for buffer in buffers.values():
            if buffer.persistent:
                self._allocate(buffer)
        real = torch.float64 if self.precision == "fp64" else torch.float32
        self.norms = torch.zeros(model.num_blocks, dtype=torch.float64, device=device)
        self.loss = torch.zeros((), dtype=real, device=device)
        suffixes = [name.removeprefix("host.scalars") for name in buffers if name.startswith("host.scalars")]
        self.scalars = {suffix: torch.zeros(5, dtype=real, device=device) for suffix in suffixes}
        self.host_scalars = {suffix: self._host_zeros(5, real) for suffix in suffixes}
        self.report = self._host_zeros((2, 2), torch.float64)  # loss and norm, for even and odd steps
        rows = (policy.num_micro_batches, policy.micro_batch_rows, workload.sequence_length)
        planes = 3 if workload.packed else 2  # tokens, labels, positions
        self.host_tokens = self._host_zeros((2, planes, *rows), torch.int64)  # even and odd steps
        self.tokens = torch.zeros((planes, *rows), dtype=torch.int64, device=device)
        # Of the step being launched, one a micro-batch: how many documents the kernels are told of.
        self.document_bounds = [1] * policy.num_micro_batches
        self.host_loss_scale = self._host_zeros(2, torch.float64)
        self.loss_scales = torch.zeros(policy.num_micro_batches, dtype=torch.float64, device=device)

    def _allocate(self, buffer: Buffer) -> None:
        if buffer.tier is Tier.HOST:
            return  # in the host store, among what waits, or one of the scalars
        if buffer.role in (Role.STATE, Role.STATE_SLOT):
            dtypes = {plane: plane_dtype(plane, self.precision, self.gradient_format) for plane in STATE_PLANES}
            plane_dtypes = {plane: dtype for plane, dtype in dtypes.items() if dtype is not None}
            num_elements = buffer.num_bytes // sum(dtype.itemsize for dtype in plane_dtypes.values())
            self._device_states[buffer.name] = {
                plane: torch.zeros(num_elements, dtype=dtype, device=self.device)
                for plane, dtype in plane_dtypes.items()
            }
            return
        dtype = self._dtype(buffer)
        if dtype is None:
            return  # one of the scalars
        # Zeros, not garbage: the padding between a block's tensors must be zero for ever.
        self._tensors[buffer.name] = torch.zeros(buffer.num_bytes // dtype.itemsize, dtype=dtype, device=self.device)

    def _dtype(self, buffer: Buffer) -> torch.dtype | None:
        match buffer.role:
            case Role.WEIGHTS | Role.SLOT | Role.UPDATE_SLOT | Role.STAGE:
                return plane_dtype("weights", self.precision, self.gradient_format)
            case Role.SAVED_STAGE:
                return torch.uint8
            case Role.GRADIENT | Role.SLAB:
                return plane_dtype("gradient", self.precision, self.gradient_format)
            case Role.ACCUMULATOR:
                return torch.float64 if PRECISIONS[self.precision].accumulator == 8 else torch.float32
        return None

    def _host_zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            num_bytes = math.prod([shape] if isinstance(shape, int) else shape) * dtype.itemsize
            raise OutOfMemory(
                f"pinned host memory: {num_bytes} bytes ({format_bytes(num_bytes)}) for batches and scalars were "
                f"refused ({first_line(error)}), {format_bytes(host_memory_available_bytes())} of host memory are "
                "free; raise the limit (ulimit -l), end other programs, or plan again with a lower --host-memory"
            ) from error

    def plane(self, buffer: str, block: int) -> torch.Tensor:
        """The flat tensor [num_elements] that `buffer` holds for `block`; slots and slabs serve blocks of any size."""
        if buffer == f"host.weights.{block}":
            return self.host.plane(block, "weights")
        if buffer == f"host.gradient.{block}":
            return self.host.plane(block, "gradient")
        return self._tensors[buffer][: self.model.block(block).num_elements]

    def state_planes(self, buffer: str, block: int) -> dict[Plane, torch.Tensor]:
        """The planes [num_elements] of a block's state that `buffer` holds; slots serve blocks of any size."""
        if buffer == f"host.state.{block}":
            return {plane: self.host.plane(block, plane) for plane in STATE_PLANES if self.host.has(block, plane)}
        num_elements = self.model.block(block).num_elements
        return {plane: values[:num_elements] for plane, values in self._device_states.get(buffer, {}).items()}

    def activation(self, buffer: str) -> torch.Tensor:
        """A layer's input in its place on the host or in a stage, [rows, sequence, hidden size]."""
        if buffer in self._tensors_on_host:
            return self._tensors_on_host[buffer]
        return self._tensors[buffer].view(self._input_shape)

    def saved(self, buffer: str) -> torch.Tensor:
        """What a layer saved, in its place on the host or in a stage: flat uint8."""
        return self._tensors_on_host[buffer] if buffer in self._tensors_on_host else self._tensors[buffer]

    def state(self, block: int) -> BlockState:
        """The master state of a block at home: what is loaded, saved and exported.

        Of a block whose state alone streams, weights are on the device and all else is on the host.
        """
        tier = "host" if self.host.has(block, "weights") else "device"
        planes = self.state_planes(f"host.state.{block}", block) or self.state_planes(f"device.state.{block}", block)
        return block_state(self.plane(f"{tier}.weights.{block}", block), planes)

    def states(self) -> list[BlockState]:
        return [self.state(block) for block in range(self.model.num_blocks)]

    def refresh_resident_weights(self) -> None:
        """Copy host-homed weights into their resident place, after loading or restoring them."""
        for block in range(self.model.num_blocks):
            name = f"device.weights.{block}"
            if self.host.has(block, "weights") and name in self._tensors:
                self.plane(name, block).copy_(self.host.plane(block, "weights"))

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes allocated for blocks and for what waits, by tier: to compare with the program's table."""
        device = [*self._tensors.values(), *(t for planes in self._device_states.values() for t in planes.values())]
        return {
            "device": sum(tensor.numel() * tensor.itemsize for tensor in device),
            "host": self.host.bytes.resident + self._waiting.num_bytes,
        }

    def device_bytes(self) -> int:
        """Bytes that the device's buffers take now; where the device is the CPU, counted from what is held."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        storages: dict[int, int] = {}
        held = 0
        for value in self.passing.values():
            if not isinstance(value, SavedLayer):
                # Positions are a view of the batch's own memory, which is persistent.
                tensors = itertools.chain(*value.by_kind.values()) if isinstance(value, Documents) else value
                tensors = [value] if isinstance(value, torch.Tensor) else tensors
                storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            else:
                held += value.bytes_beside_hidden()
        return self.persistent_bytes()["device"] + held + sum(storages.values())

    def close(self) -> None:
        """Unpin and drop everything."""
        self.passing.clear()
        self._tensors.clear()
        self._device_states.clear()
        self._tensors_on_host.clear()
        self.host.close()
        self._waiting.close()


def block_state(weights: torch.Tensor, planes: Mapping[Plane, torch.Tensor]) -> BlockState:
    """A block's state from its weights and the planes of its optimizer; a frozen one has none."""
    return BlockState(weights, planes.get("low"), planes.get("first_moment"), planes.get("second_moment"))


def _layout(buffers: Mapping[str, Buffer], block: int, *, streamed: bool) -> BlockLayout:
    """The planes that a block has on the host. `streamed`: its state goes to the device and back in every step."""
    planes: list[Plane] = []
    pinned: list[Plane] = []
    if f"host.weights.{block}" in buffers:
        planes.append("weights")
        pinned.append("weights")
    if f"host.gradient.{block}" in buffers:
        planes.append("gradient")
        pinned.append("gradient")
    if f"host.state.{block}" in buffers:
        planes += STATE_PLANES
        pinned += STATE_PLANES if streamed else ()
    return BlockLayout(tuple(planes), tuple(pinned))
