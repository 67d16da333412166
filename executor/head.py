"""The head: final norm, output projection and cross-entropy, a chunk of tokens at a time.

Each chunk's logits become its gradients in place and are used up before the next chunk starts, so no [tokens, vocab]
tensor outlives its chunk. Log-sum-exp and softmax run in fp32 (fp64 in fp64 runs) whatever the compute dtype.
"""

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from executor.gradients import gradients_of
from executor.layer import ACCUMULATOR_DTYPES, COMPUTE_DTYPES, tensor_views, zero_padding
from simulator.formats import Precision
from simulator.model import PROJECTION, BlockSpec, ModelSpec

# Elements of logits that are widened to fp32 at a time, and of the projection's gradient formed at a time: they bound
# the memory beside the chunk's logits to about three times 256 MiB. Rows are independent, so results do not change.
_SLICE_ELEMENTS = 2**26


class HeadTemplate:
    """The head of a model as functions of flat weights.

    `norm` is transformers' final norm on the meta device (LayerTemplates.final_norm). `logit_cap` makes logits
    cap x tanh(logit / cap), in the accumulator's dtype (LayerTemplates.logit_cap). Where embeddings are tied, the
    projection's weight is the embedding's; its gradient then goes to an accumulator apart from the one of the input
    side, so that the order of sums is the same however micro-batches are grouped.
    """

    def __init__(
        self, norm: nn.Module, model: ModelSpec, *, precision: Precision, logit_cap: float | None = None
    ) -> None:
        self.model = model
        self.dtype = COMPUTE_DTYPES[precision]
        self.accumulator_dtype = ACCUMULATOR_DTYPES[precision]
        self._norm, self._logit_cap = norm, logit_cap
        self._head = model.block(model.head)
        self._norm_names = tuple(tensor.name for tensor in self._head.tensors if tensor.name != PROJECTION)
        self._embedding = model.block(0)

    def loss_and_gradients(
        self,
        flat_head: Tensor,
        flat_embedding: Tensor | None,
        hidden: Tensor,
        labels: Tensor,
        loss_scale: float | Tensor,
        *,
        chunk_tokens: int,
        head_accumulator: Tensor | None,
        embedding_accumulator: Tensor | None = None,
        first: bool,
        grad_hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum of the token losses (a scalar in accumulator dtype, unscaled), and the gradient of `hidden`.

        hidden: the last layer's output, [rows, sequence, hidden size]. labels: [rows, sequence] int64, already
        shifted; -100 does not count. loss_scale: 1 / (tokens with a label in the whole step), which weights
        micro-batches by their tokens; it multiplies every gradient and not the loss. Gradients of the weights are
        formed in compute dtype, chunk after chunk in ascending order, and added in the accumulator's dtype; `first`
        writes where later micro-batches add. flat_embedding and embedding_accumulator (layout of block 0) are for
        tied embeddings and None otherwise. A frozen block has no accumulator; in one that is frozen in part nothing is
        written to the frozen tensor's place. grad_hidden: where to write, `hidden` itself allowed; None allocates.
        """
        tied = self.model.tied_embeddings
        assert (flat_embedding is not None) == tied
        with torch.no_grad():
            norm_weights, projection = self._weights(flat_head, flat_embedding)
            norm_sums = [self._sum(self._head, head_accumulator, name) for name in self._norm_names]
            if tied:
                projection_sum = self._sum(self._embedding, embedding_accumulator, self.model.embedding.name)
            else:
                projection_sum = self._sum(self._head, head_accumulator, PROJECTION)
            if first and head_accumulator is not None:
                zero_padding(self._head, head_accumulator)
            if first and embedding_accumulator is not None:
                # Padding, and learned positions, whose gradient has no share of the head's.
                embedding_accumulator[self.model.embedding.num_elements :].zero_()
            if grad_hidden is None:
                grad_hidden = torch.empty_like(hidden)
            scale = self._scale(loss_scale, hidden.device)
            tokens, gradients, targets = self._flat(hidden), self._flat(grad_hidden), labels.reshape(-1)
            losses = torch.empty(targets.shape, dtype=self.accumulator_dtype, device=hidden.device)
            for start in range(0, targets.numel(), chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                self._chunk(
                    tokens[chunk],
                    targets[chunk],
                    norm_weights,
                    projection,
                    scale,
                    losses=losses[chunk],
                    norm_sums=norm_sums,
                    projection_sum=projection_sum,
                    grad_tokens=gradients[chunk],
                    first=first and start == 0,
                )
            return losses.sum(), grad_hidden

    def _sum(self, block: BlockSpec, accumulator: Tensor | None, name: str) -> Tensor | None:
        """Where the gradient of a tensor is summed, or None where it is frozen."""
        if accumulator is None or next(tensor for tensor in block.tensors if tensor.name == name).frozen:
            return None
        return tensor_views(block, accumulator)[name]

    def loss(
        self, flat_head: Tensor, flat_embedding: Tensor | None, hidden: Tensor, labels: Tensor, *, chunk_tokens: int
    ) -> Tensor:
        """The sum of the token losses alone, for evaluation: the same number as loss_and_gradients gives."""
        with torch.no_grad():
            norm_weights, projection = self._weights(flat_head, flat_embedding)
            tokens, targets = self._flat(hidden), labels.reshape(-1)
            losses = torch.empty(targets.shape, dtype=self.accumulator_dtype, device=hidden.device)
            for start in range(0, targets.numel(), chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                logits = self._normed(tokens[chunk], norm_weights) @ projection.t()
                self._token_losses(logits, targets[chunk], losses[chunk], with_gradient=False)
                del logits  # before the next chunk's are made
            return losses.sum()

    def _chunk(
        self,
        tokens: Tensor,
        targets: Tensor,
        norm_weights: Sequence[Tensor],
        projection: Tensor,
        scale: Tensor,
        *,
        losses: Tensor,
        norm_sums: Sequence[Tensor | None],
        projection_sum: Tensor | None,
        grad_tokens: Tensor,
        first: bool,
    ) -> None:
        tokens = tokens.detach().requires_grad_()
        norm_weights = [weight.detach().requires_grad_() for weight in norm_weights]
        with torch.enable_grad():
            normed_graph = self._normed(tokens, norm_weights)
        normed = normed_graph.detach()
        grad_logits = normed @ projection.t()
        self._token_losses(grad_logits, targets, losses, with_gradient=True)  # turns logits into their gradient

        # The gradient is unscaled and covers tokens without a label. Both are put right on [tokens, hidden size]
        # tensors, which are a hundred times smaller.
        counted = (targets >= 0).unsqueeze(1)
        grad_normed = ((grad_logits @ projection) * (counted * scale)).to(normed.dtype)
        if projection_sum is not None:
            _accumulate_product(projection_sum, grad_logits, normed, counted, scale, first=first)
        grad, *grad_norms = gradients_of(normed_graph, (tokens, *norm_weights), grad_normed)
        for norm_sum, grad_norm in zip(norm_sums, grad_norms, strict=True):
            if norm_sum is not None:
                _accumulate(norm_sum, grad_norm, None, first=first)
        grad_tokens.copy_(grad)

    def _token_losses(self, logits: Tensor, targets: Tensor, losses: Tensor, *, with_gradient: bool) -> None:
        """Write each token's loss (0 without a label); with_gradient: turn logits into softmax minus one-hot."""
        plain = logits.is_cuda and losses.dtype == torch.float32 and self._logit_cap is None
        kernel = _triton_kernel() if plain else None
        if kernel is not None:
            kernel(logits, targets, losses, with_gradient=with_gradient)
            return
        targets_or_zero = targets.clamp(min=0).unsqueeze(1)
        rows = max(1, _SLICE_ELEMENTS // logits.shape[1])
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            values, share = logits[part].to(self.accumulator_dtype), None
            if self._logit_cap is not None:
                share = torch.tanh(values / self._logit_cap)
                values = share * self._logit_cap
            log_softmax = torch.log_softmax(values, dim=1)
            at_target = log_softmax.gather(1, targets_or_zero[part])
            torch.mul(at_target.squeeze(1).neg(), targets[part] >= 0, out=losses[part])
            if with_gradient:
                torch.exp(log_softmax, out=logits[part])
                # p - 1 from the exact log p: in bf16 the difference would lose the digits that matter near p = 1.
                _write_columns(logits[part], targets_or_zero[part], at_target.expm1().to(logits.dtype))
                if share is not None:
                    logits[part].mul_(share.square_().neg_().add_(1))

    def _normed(self, tokens: Tensor, norm_weights: Sequence[Tensor]) -> Tensor:
        # The norm's own names of its weights are the last parts of theirs in the model.
        weights = {name.rpartition(".")[2]: weight for name, weight in zip(self._norm_names, norm_weights, strict=True)}
        normed: Tensor = functional_call(self._norm, weights, (tokens,))
        return normed

    def _weights(self, flat_head: Tensor, flat_embedding: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """The norm's tensors and the projection's, in weights or in accumulators."""
        views = tensor_views(self._head, flat_head)
        norms = [views[name] for name in self._norm_names]
        if flat_embedding is None:
            return norms, views[PROJECTION]
        return norms, tensor_views(self._embedding, flat_embedding)[self.model.embedding.name]

    def _flat(self, hidden: Tensor) -> Tensor:
        return hidden.view(-1, self.model.hidden_size)

    def _scale(self, loss_scale: float | Tensor, device: torch.device) -> Tensor:
        # One element in one dimension: a scalar without dimensions would not lift bf16 products to fp32.
        if isinstance(loss_scale, Tensor):
            return loss_scale.to(device, self.accumulator_dtype).reshape(1)
        return torch.full((1,), loss_scale, dtype=self.accumulator_dtype, device=device)


def _accumulate_product(
    total: Tensor, grad_logits: Tensor, normed: Tensor, counted: Tensor, scale: Tensor, *, first: bool
) -> None:
    """total [vocab, hidden] = (if `first`, else +=) grad_logits.T @ (normed * counted) * scale."""
    if normed.is_cuda and normed.dtype == torch.bfloat16:
        # The product is added in fp32 where it is formed: a bf16 product and a pass over the sum for each chunk would
        # cost half as much again. The scale goes into the smaller factor.
        normed = (normed * (counted * scale)).to(normed.dtype)
        if first:
            torch.mm(grad_logits.t(), normed, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, grad_logits.t(), normed, out_dtype=torch.float32, out=total)
        return
    normed = normed * counted
    rows = max(1, _SLICE_ELEMENTS // normed.shape[1])
    for start in range(0, total.shape[0], rows):
        part = slice(start, start + rows)
        _accumulate(total[part], grad_logits[:, part].t() @ normed, scale, first=first)


def _accumulate(total: Tensor, gradient: Tensor, scale: Tensor | None, *, first: bool) -> None:
    """total = gradient * scale if `first`, else total += gradient * scale, in the dtype of `total`."""
    if scale is None:
        _ = total.copy_(gradient) if first else total.add_(gradient)
    elif first:
        torch.mul(gradient, scale, out=total)
    else:
        total.addcmul_(gradient, scale)


def _write_columns(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """matrix[i, columns[i, 0]] = values[i, 0], without the wait for the device of a checked or sorted scatter."""
    if matrix.device.type == "cpu":
        matrix.scatter_(1, columns, values)
    else:
        rows = torch.arange(matrix.shape[0], device=matrix.device)
        torch._index_put_impl_(matrix, (rows, columns.squeeze(1)), values.squeeze(1), accumulate=False, unsafe=True)


@functools.cache
def _triton_kernel() -> Callable[..., None] | None:
    try:
        from executor.kernels.triton_cross_entropy import run_cross_entropy as kernel
    except ImportError as error:
        warnings.warn(
            f"the loss on the GPU is computed by plain torch operations, which is slower: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return kernel
