"""What each kind of operation does: the table that the runner looks functions up in.

Every function takes its tensors by the buffer names that the operation carries; nothing here decides an order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from executor.adamw import Block, adamw_device, adamw_host, clip_scalars
from executor.gradients import accumulate, finish_gradient
from executor.head import HeadTemplate
from executor.layer import LayerTemplates, tensor_views
from executor.memory import Memory, block_state
from executor.runner import LAYER_LAUNCHES
from executor.saved import SavedLayer
from executor.store import plane_dtype, tensor_view
from executor.streams import write_to_host
from simulator.model import ModelSpec
from simulator.policy import Policy, SaveLevel
from simulator.program import Kind, Operation, Resource


@dataclass(frozen=True)
class Optimization:
    """AdamW's hyperparameters for a run. `table` [max_steps, 3] comes from executor.adamw.step_scalars."""

    table: torch.Tensor
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float | None


class Operations:
    """The functions of one run, bound to its memory, templates and optimizer."""

    def __init__(
        self,
        model: ModelSpec,
        policy: Policy,
        memory: Memory,
        templates: LayerTemplates,
        optimization: Optimization,
        *,
        host_threads: int,
    ) -> None:
        self.model, self.policy, self.memory, self.templates = model, policy, memory, templates
        self.head = HeadTemplate(templates.final_norm, model, precision=memory.precision, logit_cap=templates.logit_cap)
        self.optimization = optimization
        gradient_dtype = plane_dtype("gradient", memory.precision, memory.gradient_format)
        assert gradient_dtype is not None
        self.gradient_dtype = gradient_dtype
        self.host_threads = host_threads
        self.parity = 0  # of the step being launched: which half of the double-buffered host tensors it uses
        self.table = optimization.table.to(memory.device)
        # Steps applied so far, per set of scalars: a skipped step does not count, and only the device knows.
        self.counts = {suffix: torch.zeros((), dtype=torch.int64, device=memory.device) for suffix in memory.scalars}
        self.norm = torch.zeros((), dtype=torch.float64, device=memory.device)
        self.reported = torch.zeros(2, dtype=torch.float64, device=memory.device)  # loss and norm
        self.saved_bytes: dict[str, int] = {}  # of places on the host, what is used now
        # Called before a block's state changes: a checkpoint that is being written may have to read it first.
        self.before_update: Callable[[int], None] = lambda block: None

    def functions(self) -> Mapping[Kind, Callable[[Operation], None]]:
        """The table that the runner looks an operation's function up in."""
        return {
            Kind.LOAD_BATCH: self.load_batch,
            Kind.LOAD_WEIGHTS: self.copy_weights,
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.recompute,
            Kind.LOSS: self.loss,
            Kind.EVALUATE: self.evaluate,
            Kind.BACKWARD: self.backward,
            Kind.FINISH_GRADIENT: self.finish_gradient,
            Kind.STORE_GRADIENT: self.store_gradient,
            Kind.LOAD_STATE: self.copy_state,
            Kind.STORE_STATE: self.copy_state,
            Kind.STORE_WEIGHTS: self.copy_weights,
            Kind.STORE_ACTIVATION: self.store_activation,
            Kind.LOAD_ACTIVATION: self.load_activation,
            Kind.CLIP: self.clip,
            Kind.UPDATE: self.update,
            Kind.REPORT: self.report,
        }

    def launches(self, operation: Operation) -> int:
        """How many kernels a compute operation launches on CUDA, at most, events beside it counted.

        With Triton: without it no launch holds the interpreter lock, which is what the count is for.
        """
        match operation.kind:
            case Kind.FORWARD if operation.block == 0:
                return 60 if self.templates.packed else 10
            case Kind.BACKWARD if operation.block == 0:
                return 10 + self.templates.embed_backward_launches(self.memory.tokens[0, 0].numel())
            case Kind.FINISH_GRADIENT:
                return 15 + sum(tensor.frozen for tensor in self.model.block(operation.block).tensors)
            case Kind.CLIP:
                return 30 + self.memory.norms.numel()
            case Kind.REPORT:
                return 15
        return LAYER_LAUNCHES

    def load_batch(self, operation: Operation) -> None:
        memory, m = self.memory, operation.micro_batch
        memory.tokens[:, m].copy_(memory.host_tokens[self.parity, :, m], non_blocking=True)
        memory.loss_scales[m].copy_(memory.host_loss_scale[self.parity], non_blocking=True)

    def copy_weights(self, operation: Operation) -> None:
        block = operation.block
        source = self.memory.plane(operation.source("weights"), block)
        self.memory.plane(operation.target("weights"), block).copy_(source, non_blocking=True)

    def forward(self, operation: Operation) -> None:
        block, m, passing = operation.block, operation.micro_batch, self.memory.passing
        weights = self.memory.plane(operation.source("weights"), block)
        if block == 0:
            documents = None
            if self.templates.packed:
                documents = self.templates.documents(self.memory.tokens[2, m], bound=self.memory.document_bounds[m])
                passing[f"batch.{m}"] = documents
            passing[f"hidden.1.{m}"] = self.templates.embed(weights, self.memory.tokens[0, m], documents)
            return
        hidden = passing[f"hidden.{block}.{m}"]
        kept = f"hidden.{block}.{m}" not in operation.releases  # for the backward: it waits with its input
        # What is dropped at once costs compiled layers another compilation, and eager ones nothing.
        level = cast(SaveLevel, operation.level if kept or self.templates.compiled else "input")
        place = self._place_ahead(operation, hidden)
        output, saved = self.templates.forward(block, weights, hidden, level, passing.get(f"batch.{m}"))
        del hidden
        passing[f"hidden.{block + 1}.{m}"] = output if place is None else place.copy_(output)
        # At level `input` this is the input and, compiled, a graph over it: it costs no bytes of its own.
        if kept:
            passing[f"saved.{block}.{m}"] = saved
        del saved
        self._release(operation)

    def recompute(self, operation: Operation) -> None:
        block, m, passing = operation.block, operation.micro_batch, self.memory.passing
        weights, hidden = self.memory.plane(operation.source("weights"), block), self._layer_input(operation)
        place = self._place_ahead(operation, hidden)
        output, _ = self.templates.forward(block, weights, hidden, "input", passing.get(f"batch.{m}"))
        passing[f"hidden.{block + 1}.{m}"] = output if place is None else place.copy_(output)
        self._release(operation)

    def loss(self, operation: Operation) -> None:
        memory, block, m = self.memory, operation.block, operation.micro_batch
        tied, tied_trained = self.model.tied_embeddings, self.model.block(0).trained
        loss_sum, grad_hidden = self.head.loss_and_gradients(
            memory.plane(f"device.weights.{block}", block),
            memory.plane("device.weights.0", 0) if tied else None,
            memory.passing[f"hidden.{block}.{m}"],
            memory.tokens[1, m],
            memory.loss_scales[m],
            chunk_tokens=self.policy.head_chunk_tokens,
            head_accumulator=self._accumulator(operation),
            embedding_accumulator=memory.plane("device.accumulator.tied", 0) if tied and tied_trained else None,
            first=operation.first,
        )
        if operation.first:
            memory.loss.copy_(loss_sum)
        else:
            memory.loss.add_(loss_sum)
        if operation.writes_to(f"grad_hidden.{block}.{m}"):
            memory.passing[f"grad_hidden.{block}.{m}"] = grad_hidden
        self._release(operation)

    def evaluate(self, operation: Operation) -> None:
        memory, block, m = self.memory, operation.block, operation.micro_batch
        loss_sum = self.head.loss(
            memory.plane(f"device.weights.{block}", block),
            memory.plane("device.weights.0", 0) if self.model.tied_embeddings else None,
            memory.passing[f"hidden.{block}.{m}"],
            memory.tokens[1, m],
            chunk_tokens=self.policy.head_chunk_tokens,
        )
        if operation.first:
            memory.loss.copy_(loss_sum)
        else:
            memory.loss.add_(loss_sum)
        self._release(operation)

    def backward(self, operation: Operation) -> None:
        memory, block, m = self.memory, operation.block, operation.micro_batch
        passing = memory.passing
        upstream = passing[f"grad_hidden.{block + 1}.{m}"]
        accumulator = self._accumulator(operation)
        documents = passing.get(f"batch.{m}")  # of packed rows only
        if block == 0:
            assert accumulator is not None, "a frozen embedding has no backward"
            self.templates.embed_backward(memory.tokens[0, m], upstream, accumulator, documents, first=operation.first)
        else:
            hidden = self._layer_input(operation)
            passing.pop(f"hidden.{block}.{m}", None)
            kept = passing.pop(f"waiting.{block}.{m}", None) or passing.pop(f"saved.{block}.{m}", hidden)
            stage: torch.Tensor | None = None
            if self._waited(operation) and isinstance(kept, SavedLayer):
                kept.take_hidden_back(hidden)
                if operation.level != "input":
                    stage = memory.saved(operation.source("saved"))
                    kept.take_saved_back(stage)
            del hidden  # what was kept holds it, and lets go of it as the backward proceeds
            weights = memory.plane(operation.source("weights"), block)
            views: list[torch.Tensor] = []
            if accumulator is not None:
                views = list(tensor_views(self.model.block(block), accumulator).values())
            place = self._place_ahead(operation, upstream)
            grad_hidden, gradients = self.templates.backward(
                block, weights, kept, upstream, views, first=operation.first, documents=documents
            )
            if stage is not None and _share_memory(grad_hidden, stage):
                grad_hidden = grad_hidden.clone()  # a compiled backward may reuse what it is given for what it returns
            if operation.writes_to(f"grad_hidden.{block}.{m}"):
                passing[f"grad_hidden.{block}.{m}"] = grad_hidden if place is None else place.copy_(grad_hidden)
            del grad_hidden, place
            if accumulator is not None:
                accumulate(accumulator, views, gradients, first=operation.first)
        del upstream
        self._release(operation)

    def finish_gradient(self, operation: Operation) -> None:
        memory, block = self.memory, operation.block
        accumulator = memory.plane(operation.source("gradient_sum"), block)
        if block == 0 and self.model.tied_embeddings:
            accumulator.add_(memory.plane("device.accumulator.tied", 0))
        for tensor in self.model.block(block).tensors:
            if tensor.frozen:  # the norm is that of what is trained
                tensor_view(accumulator, tensor).zero_()
        finish_gradient(
            accumulator,
            memory.plane(operation.target("gradient."), block),
            memory.norms[block : block + 1],
            gradient_dtype=self.gradient_dtype,
        )

    def store_gradient(self, operation: Operation) -> None:
        block = operation.block
        source = self.memory.plane(operation.source("gradient"), block)
        self.memory.plane(operation.target("gradient"), block).copy_(source, non_blocking=True)

    def copy_state(self, operation: Operation) -> None:
        block = operation.block
        source = self.memory.state_planes(operation.source("state"), block)
        for plane, values in self.memory.state_planes(operation.target("state"), block).items():
            values.copy_(source[plane], non_blocking=True)

    def store_activation(self, operation: Operation) -> None:
        passing, name = self.memory.passing, f"{operation.block}.{operation.micro_batch}"
        hidden, saved = f"hidden.{name}", f"saved.{name}"
        self.memory.activation(operation.target(hidden)).copy_(passing[hidden], non_blocking=True)
        # From here on `passing` alone holds the input, until the operation that releases it.
        kept = passing[saved]
        kept.let_go_of_hidden()
        if operation.level != "input":
            # And what leaves with it.
            leaving, num_bytes = kept.let_go_of_saved(self.memory.saved(operation.target(saved)))
            passing[saved], passing[f"waiting.{name}"] = leaving, kept
            self.saved_bytes[operation.target(saved)] = num_bytes

    def load_activation(self, operation: Operation) -> None:
        name = f"{operation.block}.{operation.micro_batch}"
        hidden, saved = f"hidden.{name}", f"saved.{name}"
        source = self.memory.activation(operation.source(hidden))
        self.memory.activation(operation.target(hidden)).copy_(source, non_blocking=True)
        if operation.level != "input":
            place = operation.source(saved)
            used = slice(self.saved_bytes[place])
            self.memory.saved(operation.target(saved))[used].copy_(self.memory.saved(place)[used], non_blocking=True)

    def clip(self, operation: Operation) -> None:
        memory, clipping = self.memory, self.policy.clipping
        suffix = "" if operation.block < 0 else f".{operation.block}"
        norms = memory.norms if operation.block < 0 else memory.norms[operation.block : operation.block + 1]
        scalars = memory.scalars[suffix]
        clip_scalars(
            norms,
            self.table,
            self.counts[suffix],
            None if clipping == "none" else self.optimization.max_grad_norm,
            scalars=scalars,
            norm=self.norm,
        )
        write_to_host(memory.host_scalars[suffix], scalars)

    def update(self, operation: Operation) -> None:
        memory, block = self.memory, operation.block
        self.before_update(block)
        weights = memory.plane(operation.target("weights"), block)
        state = block_state(weights, memory.state_planes(operation.target("state"), block))
        gradient = memory.plane(operation.source("gradient"), block)
        suffix = "" if self.policy.clipping == "global" else f".{block}"
        on_host = operation.resource is Resource.HOST
        planes = Block(state.weights, state.low, *state.moments(), gradient)
        spec = self.model.block(block)
        betas, eps = self.optimization.betas, self.optimization.epsilon
        for begin, end in spec.trained_ranges:  # one, unless tensors between are frozen
            part = planes.part(begin, end)
            decay = min(max(spec.num_matrix_elements - begin, 0), end - begin)
            if on_host:
                adamw_host(
                    *part, memory.host_scalars[suffix], num_decay_elements=decay, betas=betas, eps=eps,
                    threads=self.host_threads,
                )  # fmt: skip
            else:
                adamw_device(*part, memory.scalars[suffix], num_decay_elements=decay, betas=betas, eps=eps)

    def report(self, operation: Operation) -> None:
        memory = self.memory
        # With layerwise or no clipping nobody has put the norm together yet.
        norm = self.norm if self.policy.clipping == "global" else memory.norms.sum().sqrt()
        self.reported[0].copy_(memory.loss)
        self.reported[1].copy_(norm)
        write_to_host(memory.report[self.parity], self.reported)

    def _place_ahead(self, operation: Operation, like: torch.Tensor) -> torch.Tensor | None:
        """Memory for what a layer at level `input` passes on, taken before the layer runs; None where it need not be.

        Made by the layer, it would lie amid what the layer frees, and the next layer would find its memory in pieces:
        under a cap, which such layers are for, the allocator then unmaps and maps memory in every operation.
        """
        if operation.level != "input" or not like.is_cuda:
            return None
        return torch.empty_like(like)

    def _accumulator(self, operation: Operation) -> torch.Tensor | None:
        """Where the operation's block sums its gradient; None where it is frozen."""
        if not self.model.block(operation.block).trained:
            return None
        return self.memory.plane(operation.target("gradient_sum"), operation.block)

    def _layer_input(self, operation: Operation) -> torch.Tensor:
        """A layer's input, [rows, sequence, hidden size]: from the stage that it came back into, if it has waited."""
        hidden = f"hidden.{operation.block}.{operation.micro_batch}"
        if self._waited(operation):
            return self.memory.activation(operation.source(hidden))
        return cast(torch.Tensor, self.memory.passing[hidden])

    def _waited(self, operation: Operation) -> bool:
        """Whether the layer's input has waited on the host."""
        hidden = f"hidden.{operation.block}.{operation.micro_batch}"
        return operation.source(hidden) != hidden

    def _release(self, operation: Operation) -> None:
        for name in operation.releases:
            self.memory.passing.pop(name, None)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
