"""Attention: which kernel a layer's attention runs on, and what that kernel must know of a row's documents.

transformers' layers call attention through its interface, under a name; ours is registered there. Four ways:

- `causal`: rows of one document, no window: transformers' own call of torch's attention, which needs no mask;
- `documents`: a kernel for documents of several lengths (CUDA, bf16), windows included;
- `mask`: torch's attention under an exact mask: all other windows and documents, and the truth to test against;
- `capped`: scores that are capped, windows and documents included.

Nothing here waits for the device, and shapes depend on the number of tokens alone, but for the documents' boundaries:
their number is padded with empty documents to a bound, of which there are few.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from executor.capped_attention import capped_attention

Backend = Literal["causal", "documents", "mask", "capped"]

ATTENTION = "conveyor"  # our name in transformers' attention interface
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_MAX_KERNEL_HEAD_DIM = 256
# Blocks of an empty document cost the kernel a launch each: few are reserved, and more where a micro-batch has more.
_TOKENS_A_DOCUMENT = 256
_FEWEST_DOCUMENTS = 8


@dataclass(frozen=True, slots=True)
class Attention:
    """How the layers of one kind attend at one sequence length. `window` counts tokens, itself included."""

    backend: Backend
    window: int | None = None
    packed: bool = False

    @property
    def num_tensors(self) -> int:
        """How many tensors beside queries, keys and values the kernel reads: the mask, boundaries or starts."""
        return int(self.backend in ("documents", "mask") or (self.backend == "capped" and self.packed))

    def keywords(self, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        """What a layer is called with, so that `attend` finds its tensor and its window."""
        if self.backend == "mask":
            return {"attention_mask": tensors[0]}
        if self.backend == "documents":
            return {"boundaries": tensors[0], "window": self.window}
        if self.backend == "capped":
            return {"starts": tensors[0] if tensors else None, "window": self.window}
        return {}


def choose_attention(
    *,
    window: int | None,
    capped: bool,
    packed: bool,
    sequence_length: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Attention:
    """The way of attending for layers with these properties. Warns where CUDA has to do with a mask."""
    if window is not None and window >= sequence_length:
        window = None
    if capped:
        return Attention("capped", window, packed)
    if window is None and not packed:
        return Attention("causal")
    if device.type != "cuda":
        return Attention("mask", window, packed)
    missing = _why_no_kernel(head_dim, dtype, device)
    if missing is None:
        return Attention("documents", window, packed)
    what = "packed rows" if packed else "sliding windows"
    warnings.warn(
        f"attention in {what} runs under a mask of every pair of tokens, slower and with more memory: {missing}",
        stacklevel=2,
    )
    return Attention("mask", window, packed)


def attention_tensors(
    attention: Attention, *, positions: Tensor | None, sequence_length: int, rows: int, device: torch.device, bound: int
) -> tuple[Tensor, ...]:
    """What the kernel reads beside queries, keys and values, for one micro-batch.

    positions: int64 [rows, sequence_length], each token's place in its document; None where a row is one document.
    bound: at least the number of documents in all rows.
    """
    if attention.num_tensors == 0:
        return ()
    if positions is None:
        positions = torch.arange(sequence_length, device=device).unsqueeze(0)
        if attention.backend == "documents":
            positions = positions.expand(rows, -1)
    if attention.backend == "documents":
        return (_boundaries(positions, bound),)
    at = torch.arange(sequence_length, device=device)
    starts = at - positions
    if attention.backend == "capped":
        return (starts,)
    query, key = at.view(1, 1, -1, 1), at.view(1, 1, 1, -1)
    mask = (key <= query) & (key >= starts[:, None, :, None])
    if attention.window is not None:
        mask &= query - key < attention.window
    return (mask,)


def document_bound(num_documents: int, num_tokens: int) -> int:
    """How many documents a kernel is told of: a function of the two, with few values, so that few are compiled."""
    bound = max(_FEWEST_DOCUMENTS, num_tokens // _TOKENS_A_DOCUMENT)
    while bound < num_documents:
        bound *= 2
    return bound


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    boundaries: Tensor | None = None,
    starts: Tensor | None = None,
    window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: [rows, heads, sequence, head_dim] in, [rows, sequence, heads, head_dim] out."""
    if softcap is not None:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        output, _ = capped_attention(query, key, value, starts, scale, softcap, window)
        return output.transpose(1, 2).contiguous(), None
    if boundaries is not None:
        return _attend_documents(query, key, value, boundaries, scaling, window), None
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **keywords
    )
    return result


def register_attention() -> str:
    """Make `attend` known to transformers. Returns the name to build models with."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def _boundaries(positions: Tensor, bound: int) -> Tensor:
    """Where documents begin among all tokens, then the number of tokens: int32 [bound + 1]."""
    num_tokens = positions.numel()
    index = torch.arange(num_tokens, device=positions.device)
    starts = torch.where(positions.reshape(-1) == 0, index, num_tokens).sort().values
    starts = torch.nn.functional.pad(starts[:bound], (0, max(1, bound + 1 - num_tokens)), value=num_tokens)
    return starts.to(torch.int32)


def _attend_documents(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    rows, heads, length, head_dim = query.shape
    kernel = _KERNEL
    assert kernel is not None
    flat = [part.transpose(1, 2).reshape(rows * length, part.shape[1], head_dim) for part in (query, key, value)]
    choices: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if _KERNEL_NAMES_GROUPS and heads != key.shape[1]:
        choices["enable_gqa"] = True
    output: Tensor = kernel(*flat, boundaries, boundaries, length, length, **choices)
    return output.view(rows, length, heads, head_dim)


def _why_no_kernel(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    if _KERNEL is None:
        return f"torch {torch.__version__} has no kernel for documents of several lengths; 2.11 has"
    if dtype not in _KERNEL_DTYPES:
        return (
            f"the kernel for documents of several lengths knows bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
        )
    if head_dim > _MAX_KERNEL_HEAD_DIM or head_dim % 8:
        return f"that kernel takes multiples of 8 up to {_MAX_KERNEL_HEAD_DIM} as head_dim, not {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "that kernel needs a GPU of compute capability 8.0 or newer"
    return None


def _find_kernel() -> tuple[Callable[..., Tensor] | None, bool]:
    """torch's attention for documents of several lengths, if it knows windows; whether it must be told of groups."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, False
    names = inspect.signature(varlen_attn).parameters
    known = "window_size" in names and "scale" in names
    kernel: Any = varlen_attn if known else None
    return kernel, "enable_gqa" in names


_KERNEL, _KERNEL_NAMES_GROUPS = _find_kernel()
