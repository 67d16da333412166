"""Causal attention whose scores are capped, cap x tanh(score / cap), a chunk of queries at a time.

No fused kernel of torch caps scores outside a compiled flex_attention, and all scores at once, as transformers' eager
attention makes them, are gigabytes a layer. Here a chunk's scores live as long as the chunk, and the backward makes
them again. It is one operation to the compiler, which would otherwise find the two computations equal and keep them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simulator.formulas import CAPPED_CHUNK_ELEMENTS


class _Chunk(NamedTuple):
    """Queries of one stretch of every row, and the keys that any of them may see."""

    queries: slice
    keys: slice
    allowed: Tensor  # bool [rows or 1, 1, queries, keys]


def _chunks(query: Tensor, starts: Tensor | None, window: int | None) -> Iterator[_Chunk]:
    rows, heads, length, _ = query.shape
    size = max(1, CAPPED_CHUNK_ELEMENTS // (rows * heads * length))
    for begin in range(0, length, size):
        end = min(begin + size, length)
        first = 0 if window is None else max(0, begin - window + 1)
        at = torch.arange(begin, end, device=query.device).unsqueeze(1)
        seen = torch.arange(first, end, device=query.device).unsqueeze(0)
        allowed = (seen <= at).unsqueeze(0)
        if window is not None:
            allowed = allowed & (at - seen < window)
        if starts is not None:
            allowed = allowed & (seen >= starts[:, begin:end, None])
        yield _Chunk(slice(begin, end), slice(first, end), allowed.unsqueeze(1))


def _capped_scores(query: Tensor, key: Tensor, allowed: Tensor, scaling: float, cap: float) -> tuple[Tensor, Tensor]:
    """Scores [rows, heads, queries, keys] in fp32 (fp64 in fp64 runs), -inf where not allowed; and score / cap."""
    products = _matmul(query, key.transpose(2, 3))
    share = products.to(_score_dtype(query)).mul_(scaling / cap).tanh_()
    return (share * cap).masked_fill_(~allowed, float("-inf")), share


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """[rows, heads, n, k] @ [rows, key-value heads, k, m]: the heads of a group share what is on the right."""
    rows, heads, length, _ = left.shape
    groups = right.shape[1]
    grouped = left.reshape(rows, groups, heads // groups * length, -1) @ right
    return grouped.view(rows, heads, length, -1)


def _sum_groups(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """[rows, heads, n, m] and [rows, heads, n, k] -> [rows, key-value heads, m, k], summed over n and each group."""
    rows, heads, length, _ = left.shape
    merged = (rows, groups, heads // groups * length, -1)
    return left.reshape(merged).transpose(2, 3) @ right.reshape(merged)


def _score_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.custom_op("conveyor::capped_attention", mutates_args=())
def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, scaling: float, cap: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention's output, like `query` [rows, heads, sequence, head_dim], and the scores' log-sum-exp.

    key, value: [rows, key-value heads, sequence, head_dim]. starts: [rows, sequence], the first token of each token's
    document, or None where a row is one document. window: how many tokens, itself included, a token attends to.
    """
    output = torch.empty_like(query)
    log_sums = torch.empty(query.shape[:3], dtype=_score_dtype(query), device=query.device)
    for queries, keys, allowed in _chunks(query, starts, window):
        scores, _ = _capped_scores(query[:, :, queries], key[:, :, keys], allowed, scaling, cap)
        log_sum = scores.logsumexp(3)
        weights = scores.sub_(log_sum.unsqueeze(3)).exp_().to(query.dtype)
        output[:, :, queries] = _matmul(weights, value[:, :, keys])
        log_sums[:, :, queries] = log_sum
    return output, log_sums


@capped_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, scaling: float, cap: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=_score_dtype(query))


@torch.library.custom_op("conveyor::capped_attention_backward", mutates_args=())
def capped_attention_backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor,
    starts: Tensor | None, scaling: float, cap: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value. Those of key and value are summed over chunks, ascending, in fp32."""
    dtype, groups = _score_dtype(query), key.shape[1]
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros(part.shape, dtype=dtype, device=part.device) for part in (key, value))
    for queries, keys, allowed in _chunks(query, starts, window):
        part, grad = query[:, :, queries], grad_output[:, :, queries]
        scores, share = _capped_scores(part, key[:, :, keys], allowed, scaling, cap)
        weights = scores.sub_(log_sums[:, :, queries, None]).exp_()
        grad_value[:, :, keys] += _sum_groups(weights.to(query.dtype), grad, groups)
        inner = (grad.to(dtype) * output[:, :, queries].to(dtype)).sum(3, keepdim=True)
        grad_scores = _matmul(grad, value[:, :, keys].transpose(2, 3)).to(dtype).sub_(inner).mul_(weights)
        grad_products = grad_scores.mul_(1 - share.square()).mul_(scaling).to(query.dtype)
        grad_query[:, :, queries] = _matmul(grad_products, key[:, :, keys])
        grad_key[:, :, keys] += _sum_groups(grad_products, part, groups)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


@capped_attention_backward.register_fake
def _(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor,
    starts: Tensor | None, scaling: float, cap: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, ctx.scaling, ctx.cap, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *kept, starts = ctx.saved_tensors
    gradients = capped_attention_backward(grad_output, *kept, starts, ctx.scaling, ctx.cap, ctx.window)
    return (*gradients, None, None, None, None)


capped_attention.register_autograd(_backward, setup_context=_keep)
