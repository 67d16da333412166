"""What a layer's forward keeps for its backward, with the weights taken out.

Weights may leave their memory between a layer's forward and its backward: their slot is given to another layer, and
they come back elsewhere. So a saved tensor that lies in the weights' memory is remembered as (offset, shape, stride)
and read, in the backward, from the weights that are bound then. So is a view of the layer's input, once that leaves to
wait on the host, and whatever else leaves with it. All that stays is kept as it is and handed over once.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from executor.gradients import gradients_of
from executor.weight_gradients import SUMS
from simulator.errors import ProgramError

PLACE_ALIGNMENT = 256  # bytes; kernels rely on what they read being aligned as the allocator aligns it


def aligned(num_bytes: int) -> int:
    """The next place at or behind so many bytes at which a tensor may start."""
    return -(-num_bytes // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


class WeightView(NamedTuple):
    """A saved tensor that is a view of the block's flat weights; `offset` counts elements from their start."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class InputView(NamedTuple):
    """A saved tensor that is a view of the layer's input, which is elsewhere; `offset` counts its elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class PlaceView(NamedTuple):
    """A saved tensor that waits on the host; `offset` counts elements from the start of its storage's place there."""

    place: int  # bytes
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedTensors:
    """The tensors one autograd graph saved, and where the graph finds its weights.

    The graph refers to this object, never the other way: a cycle through autograd's nodes is invisible to Python's
    collector and would keep the activations for ever.
    """

    def __init__(self, flat: Tensor, constants: Sequence[Tensor]) -> None:
        self._weights_start = flat.data_ptr()
        self._weights_end = self._weights_start + flat.numel() * flat.element_size()
        self._dtype, self._device = flat.dtype, flat.device
        self._constants = {constant.untyped_storage().data_ptr() for constant in constants}
        self._tensors: list[Tensor | InputView | PlaceView | None] = []
        self._bound: Tensor | None = None

    def hooks(self) -> saved_tensors_hooks:
        """The context in which a layer's forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def bind(self, flat: Tensor) -> None:
        """Give the memory that holds the weights now. They must be the forward's, bit for bit."""
        self._bound = flat

    def clear(self) -> None:
        self._tensors.clear()
        self._bound = None

    def tensors(self) -> list[Tensor]:
        """What is kept, without weights and without the constants all layers share."""
        kept = [tensor for tensor in self._tensors if isinstance(tensor, Tensor)]
        return [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in self._constants]

    def let_go_of(self, hidden: Tensor) -> None:
        """Keep views of the layer's input by their place in it, so that its memory may be given away."""
        storage = hidden.untyped_storage().data_ptr()
        for index, tensor in enumerate(self._tensors):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == storage:
                assert tensor.dtype == hidden.dtype, "a layer's input was saved as a view of another dtype"
                offset = (tensor.data_ptr() - hidden.data_ptr()) // tensor.element_size()
                self._tensors[index] = InputView(offset, tuple(tensor.shape), tuple(tensor.stride()))

    def take_back(self, hidden: Tensor) -> None:
        """Give the memory that holds the layer's input now, laid out as it was."""
        for index, view in enumerate(self._tensors):
            if isinstance(view, InputView):
                self._tensors[index] = hidden.as_strided(view.shape, view.stride, hidden.storage_offset() + view.offset)

    def leave(self, place: Tensor) -> tuple[list[Tensor], int]:
        """Copy what is kept to `place`, flat uint8, as far as it fits, and keep it by its place there.

        Returns what is being copied, flat uint8 too, which the caller holds until the copies have ended, and how many
        bytes of `place` are used. Whole storages are copied, each once, so that views of one stay views of one.
        """
        leaving: list[Tensor] = []
        starts: dict[int, int] = {}
        used = 0
        for index, tensor in enumerate(self._tensors):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            # Attention's random state may be on the host as it is.
            if storage.data_ptr() in self._constants or tensor.device != self._device:
                continue
            if storage.data_ptr() not in starts:
                end = used + storage.nbytes()
                if end > place.numel():
                    continue
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                place[used:end].copy_(whole, non_blocking=True)
                leaving.append(whole)
                starts[storage.data_ptr()] = used
                used = aligned(end)
            start, shape, stride = starts[storage.data_ptr()], tuple(tensor.shape), tuple(tensor.stride())
            self._tensors[index] = PlaceView(start, tensor.dtype, int(tensor.storage_offset()), shape, stride)
        return leaving, min(used, place.numel())

    def come_back(self, stage: Tensor) -> None:
        """Give the memory, flat uint8, that holds what `leave` has copied, laid out as it was in its place."""
        for index, view in enumerate(self._tensors):
            if isinstance(view, PlaceView):
                end = view.place + (stage.numel() - view.place) // view.dtype.itemsize * view.dtype.itemsize
                whole = stage[view.place : end].view(view.dtype)
                self._tensors[index] = whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset)

    def _pack(self, tensor: Tensor) -> WeightView | int:
        if self._weights_start <= tensor.data_ptr() < self._weights_end:
            assert tensor.dtype == self._dtype, "a weight was saved as a view of another dtype"
            offset = (tensor.data_ptr() - self._weights_start) // tensor.element_size()
            return WeightView(offset, tuple(tensor.shape), tuple(tensor.stride()))
        # detach: the tensor may be the output of the node that saves it, which would close a cycle.
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1

    def _unpack(self, packed: WeightView | int) -> Tensor:
        if isinstance(packed, WeightView):
            if self._bound is None:
                raise ProgramError("a layer's backward ran without its weights bound")
            return self._bound.as_strided(packed.shape, packed.stride, self._bound.storage_offset() + packed.offset)
        tensor = self._tensors[packed]
        assert tensor is not None, "a saved tensor was read twice"
        if isinstance(tensor, InputView):
            raise ProgramError("a layer's backward ran before its input had come back")
        if isinstance(tensor, PlaceView):
            raise ProgramError("a layer's backward ran before what it saved had come back")
        # Compiled backwards write into what they are given, and memory is free as soon as its reader is done.
        self._tensors[packed] = None
        return tensor


class SavedLayer:
    """What one layer keeps of one micro-batch. Used by one backward, after which it holds nothing.

    `hidden`, shape [rows, sequence, hidden size], is the layer's input: all that save level `input` keeps.
    """

    def __init__(
        self,
        hidden: Tensor,
        *,
        output: Tensor | None = None,
        weights: Sequence[Tensor] = (),
        tensors: SavedTensors | None = None,
    ) -> None:
        self.hidden: Tensor | None = hidden
        # The edge, not the output: the output is the next layer's input and not ours to keep.
        self._output: GradientEdge | None = None if output is None else get_gradient_edge(output)
        self._weights = tuple(weights)
        self._tensors = tensors

    @property
    def has_graph(self) -> bool:
        return self._output is not None

    def let_go_of_hidden(self) -> None:
        """Keep no reference to the input's memory: it waits elsewhere until `take_hidden_back`."""
        assert self.hidden is not None, "a layer's saved input was used already"
        assert self.hidden.is_contiguous(), "a layer's input has gaps and cannot be copied as it lies"
        if self._tensors is None:
            self.hidden = None
            return
        self._tensors.let_go_of(self.hidden)
        # The graph refers to this very tensor, so it stays, without its memory.
        self.hidden.data = self.hidden.data.new_empty(0)

    def take_hidden_back(self, hidden: Tensor) -> None:
        """Give the input again, bit for bit and contiguous, in any memory."""
        if self._tensors is None or self.hidden is None:
            self.hidden = hidden
            return
        self._tensors.take_back(hidden)
        self.hidden.data = hidden

    def let_go_of_saved(self, place: Tensor) -> tuple[list[Tensor], int]:
        """Copy what is kept beside the input, which has left, to `place`; see `SavedTensors.leave`."""
        assert self._tensors is not None, "a layer that saved nothing has nothing to let go of"
        return self._tensors.leave(place)

    def take_saved_back(self, stage: Tensor) -> None:
        """Give it again, bit for bit, in any memory that is aligned like the place."""
        assert self._tensors is not None, "a layer's saved activations were used already"
        self._tensors.come_back(stage)

    def take_hidden(self) -> Tensor:
        """The layer's input, once: for a level that kept nothing else."""
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise ProgramError("a layer's saved input was used twice")
        return hidden

    def backward(
        self, flat: Tensor, grad_output: Tensor, sums: Sequence[Tensor] = (), *, first: bool = False
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of the input and of each weight tensor, in the block's order; drops all that was kept.

        A weight that requires no gradient has None. `sums`, one a weight, lets a compiled layer add (`first`: write)
        gradients where it forms them: in place of such a gradient its sum is returned.
        """
        if self._output is None or self._tensors is None or self.hidden is None:
            raise ProgramError("a layer's saved activations were used twice, or never had a graph")
        output, tensors = self._output, self._tensors
        inputs = [self.hidden, *(weight for weight in self._weights if weight.requires_grad)]
        trained = [weight.requires_grad for weight in self._weights]
        self._output, self._weights, self._tensors, self.hidden = None, (), None, None
        tensors.bind(flat)
        try:
            with SUMS.bound(sums, first=first) if sums else nullcontext(()) as added:
                grad_hidden, *found = gradients_of(output, inputs, grad_output)
        finally:
            tensors.clear()
        gradients = iter(found)
        each = [next(gradients) if is_trained else None for is_trained in trained]
        return grad_hidden, [sums[i] if i in added else gradient for i, gradient in enumerate(each)]

    def kept_bytes(self) -> int:
        """Bytes this object keeps alive: its input, and each storage once; no weights, no rotary tables."""
        hidden = self.hidden
        return self.bytes_beside_hidden() + (0 if hidden is None else hidden.numel() * hidden.element_size())

    def bytes_beside_hidden(self) -> int:
        """The same without the input, which may be a part of a larger buffer of the caller's."""
        tensors = [] if self._tensors is None else self._tensors.tensors()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        if self.hidden is not None:
            storages.pop(self.hidden.untyped_storage().data_ptr(), None)
        return sum(storages.values())
