"""MegaTrain's training step as a step program, and the programs of what is compared with it.

Written after its paper (Yuan et al. 2026, arXiv:2604.05091) and the order of operations in its public code
(github.com/DLYuanGod/MegaTrain, infinity/model/cpu_master.py and examples/train.py, in the version that keeps flat
pinned copies of the layers). One batch passes a layer before the next:

1. Forward without a graph, layer by layer through two flat buffers; every k-th layer input is kept until the step ends.
2. The loss in chunks of 128 positions whose logits all wait for one backward.
3. From the top, block by block of k layers: every layer of the block forward again, then backward, which goes forward a
   third time to have a graph. Weights come for each of the three passages. A gradient goes through a slab of the host
   to its place there, which a thread fills.
4. With an idle GPU and one after the other: the norm and the clip factor over all gradients, AdamW on the host, the
   refresh of the pinned copies and of the resident blocks, and the zeroing of all gradients.

A `Variant` says what an ablation leaves out or another system does otherwise. Nothing is decided here that `Variant`
does not say, and no prices are known: `simulator/megatrain_costs.py` has them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from simulator.dependencies import derive_waits
from simulator.model import ModelSpec
from simulator.program import Access, Buffer, Kind, Operation, Program, Resource, Role, StepProgram, Tier, Wait

InputHome = Literal["device", "host", "recompute"]

WEIGHT_BYTES = 2  # weights, gradients and what passes between layers are bf16
MOMENT_BYTES = 8  # two moments in fp32: DeepSpeedCPUAdam's default


@dataclass(frozen=True, slots=True)
class Variant:
    """What of MegaTrain's step is done, and how; the defaults are its published configuration.

    `input_homes`, one a layer, says where the input of each layer waits for the backward, in place of
    `checkpoint_interval`; the first layer's cannot be recomputed. `recomputes_kept`: also blocks of one layer, and the
    last layer of every block, go forward before they go backward, although nobody reads what comes out.
    `frees_inputs`: kept inputs go when they have been used, not when the step ends. `phases` follow the backward.
    """

    double_buffering: bool = True
    gradient_slabs: int = 12
    checkpoint_interval: int = 4
    input_homes: tuple[InputHome, ...] | None = None
    recomputes_kept: bool = True
    frees_inputs: bool = False
    phases: tuple[Kind, ...] = (Kind.CLIP, Kind.UPDATE, Kind.LOAD_WEIGHTS, Kind.ZERO_GRADIENT)
    moment_bytes: float = MOMENT_BYTES  # a parameter's optimizer state on the host

    @property
    def num_buffers(self) -> int:
        return 2 if self.double_buffering else 1

    def homes(self, num_layers: int) -> tuple[InputHome, ...]:
        """Where each layer's input waits for the backward."""
        if self.input_homes is not None:
            return self.input_homes
        return tuple("recompute" if layer % self.checkpoint_interval else "device" for layer in range(num_layers))


def build_megatrain(model: ModelSpec, tokens: int, variant: Variant) -> StepProgram:
    """The step program of `tokens` tokens. A step leaves nothing pending: `steady` is `first`, `drain` is empty."""
    order = issue_order(model, tokens, variant)
    derived = derive_waits({"first": order.operations, "steady": order.operations, "drain": []})
    first, steady, drain = (
        Program(name, _one_thread(operations), order.buffers) for name, operations in derived.items()
    )
    return StepProgram(first=first, steady=steady, drain=drain, buffers=order.buffers)


def issue_order(model: ModelSpec, tokens: int, variant: Variant) -> Program:
    """The operations of a step without their waits: enough to follow its memory, and quick to write."""
    homes = variant.homes(model.num_layers)
    if len(homes) != model.num_layers or homes[0] == "recompute":
        raise ValueError(f"{model.num_layers} layers need as many input homes, the first of them kept; not {homes}")
    buffers = {buffer.name: buffer for buffer in _buffers(model, tokens, variant, homes)}
    return Program("steady", tuple(_Step(model, variant, homes).operations()), buffers)


def _one_thread(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """A wait that no buffer asks for: the one Python thread begins a step when the last one's phases are over."""
    return tuple(
        operation.with_waits((*operation.waits, Wait(operations[-1].name, -1)))
        if operation.kind is Kind.LOAD_BATCH
        else operation
        for operation in operations
    )


class _Step:
    """The operations of one step, in the order in which the one Python thread issues them."""

    def __init__(self, model: ModelSpec, variant: Variant, homes: tuple[InputHome, ...]) -> None:
        self.model, self.variant, self.homes = model, variant, homes
        self.blocks = range(model.num_blocks)

    def operations(self) -> Iterator[Operation]:
        yield Operation("load_batch", Kind.LOAD_BATCH, Resource.H2D, writes=(_own("batch"),))
        yield from self._forward()
        yield from self._loss()
        for start, end in self._segments():
            yield from self._backward(start, end)
        yield from self._embedding_backward()
        yield from self._phases()

    def _forward(self) -> Iterator[Operation]:
        model = self.model
        yield Operation(
            "forward.0", Kind.FORWARD, Resource.COMPUTE, 0, reads=(_weights("device.weights.0", 0), _own("batch")),
            writes=(_own("hidden.1"),),
        )  # fmt: skip
        yield self._load(1, "forward")
        for layer in model.layers:
            if layer < model.num_layers and self.variant.double_buffering:
                yield self._load(layer + 1, "forward")
            if self.homes[layer - 1] == "host":
                yield Operation(
                    f"store_activation.{layer}", Kind.STORE_ACTIVATION, Resource.D2H, layer,
                    reads=(_own(f"hidden.{layer}"),), writes=(_host_input(layer),),
                )  # fmt: skip
            reads, releases = self._copied(layer)
            if self.homes[layer - 1] == "recompute":
                releases = (*releases, f"hidden.{layer}")
            yield Operation(
                f"forward.{layer}", Kind.FORWARD, Resource.COMPUTE, layer,
                reads=(self._flat(layer), _own(f"hidden.{layer}"), *reads), writes=(_own(f"hidden.{layer + 1}"),),
                releases=releases,
            )  # fmt: skip
            if layer < model.num_layers and not self.variant.double_buffering:
                yield self._load(layer + 1, "forward")

    def _copied(self, block: int) -> tuple[tuple[Access, ...], tuple[str, ...]]:
        """An input on its way to the host goes when the layer after the one that read it starts, if it has arrived."""
        if block < 2 or self.homes[block - 2] != "host":
            return (), ()
        return (_own(f"hidden.{block - 1}"), _host_input(block - 1)), (f"hidden.{block - 1}",)

    def _loss(self) -> Iterator[Operation]:
        head, top = self.model.head, f"hidden.{self.model.head}"
        weights = [_weights(f"device.weights.{head}", head)]
        if self.model.tied_embeddings:
            weights.append(_weights("device.weights.0", 0))
        reads, releases = self._copied(head)
        yield Operation(
            "loss", Kind.LOSS, Resource.COMPUTE, head, reads=(*weights, _own(top), _own("batch"), *reads),
            writes=(_own(f"grad_hidden.{head}"), Access("device.gradient.head", f"gradient.{head}")),
            releases=(*releases, top) if self.variant.frees_inputs else releases,
        )  # fmt: skip
        yield from self._store(head, "device.gradient.head", "host.slab.head")

    def _segments(self) -> list[tuple[int, int]]:
        """First and last layer of each block, from the top: blocks begin at a kept input."""
        starts = [layer for layer in self.model.layers if self.homes[layer - 1] != "recompute"]
        ends = [start - 1 for start in starts[1:]] + [self.model.num_layers]
        return list(zip(starts, ends, strict=True))[::-1]

    def _backward(self, start: int, end: int) -> Iterator[Operation]:
        if self.homes[start - 1] == "host":
            yield Operation(
                f"load_activation.{start}", Kind.LOAD_ACTIVATION, Resource.H2D, start,
                reads=(_host_input(start),), writes=(_own(f"hidden.{start}"),),
            )  # fmt: skip
        last = end if self.variant.recomputes_kept else end - 1
        for layer in range(start, last + 1):
            yield self._load(layer, "recompute")
            yield Operation(
                f"recompute.{layer}", Kind.RECOMPUTE, Resource.COMPUTE, layer,
                reads=(self._flat(layer), self._input(layer, start)), writes=(_own(f"recomputed.{layer + 1}"),),
            )  # fmt: skip
        for layer in range(end, start - 1, -1):
            yield self._load(layer, "backward")
            used = [f"grad_hidden.{layer + 1}"]
            if layer <= last:
                used.append(f"recomputed.{layer + 1}")
            from_host = layer == start and self.homes[start - 1] == "host"
            if from_host or (layer == start and self.variant.frees_inputs):
                used.append(f"hidden.{layer}")
            if from_host:
                used.append(f"host.hidden.{layer}")
            gradient = f"device.gradient.{layer % self.variant.num_buffers}"
            yield Operation(
                f"backward.{layer}", Kind.BACKWARD, Resource.COMPUTE, layer, level="input",
                reads=(
                    self._flat(layer), self._input(layer, start), _own(f"grad_hidden.{layer + 1}"),
                    *((_host_input(layer),) if from_host else ()),
                ),
                writes=(_own(f"grad_hidden.{layer}"), Access(gradient, f"gradient.{layer}")), releases=tuple(used),
            )  # fmt: skip
            yield from self._store(layer, gradient, f"host.slab.{layer % self.variant.gradient_slabs}")

    def _embedding_backward(self) -> Iterator[Operation]:
        kept = [] if self.variant.frees_inputs else [f"hidden.{self.model.head}"]
        if not self.variant.frees_inputs:
            kept += [f"hidden.{layer}" for layer in self.model.layers if self.homes[layer - 1] == "device"]
        yield Operation(
            "backward.0", Kind.BACKWARD, Resource.COMPUTE, 0, reads=(_own("batch"), _own("grad_hidden.1")),
            writes=(Access("device.gradient.embedding", "gradient.0"),), releases=("batch", "grad_hidden.1", *kept),
        )  # fmt: skip
        yield from self._store(0, "device.gradient.embedding", "host.slab.embedding")

    def _store(self, block: int, gradient: str, slab: str) -> Iterator[Operation]:
        """A gradient on its way: over the link into a slab, and from there to its place by a thread of the host."""
        content = f"gradient.{block}"
        yield Operation(
            f"store_gradient.{block}", Kind.STORE_GRADIENT, Resource.D2H, block, reads=(Access(gradient, content),),
            writes=(Access(slab, content),), releases=(gradient,),
        )  # fmt: skip
        yield Operation(
            f"accumulate.{block}", Kind.FINISH_GRADIENT, Resource.HOST, block, reads=(Access(slab, content),),
            writes=(Access(f"host.gradient.{block}", content),),
        )  # fmt: skip

    def _phases(self) -> Iterator[Operation]:
        gradients = tuple(Access(f"host.gradient.{block}", f"gradient.{block}") for block in self.blocks)
        for phase in self.variant.phases:
            if phase is Kind.CLIP:
                yield Operation("clip", Kind.CLIP, Resource.HOST, reads=gradients, writes=gradients)
            for block in self.blocks if phase is Kind.UPDATE else ():
                master = _weights(f"host.weights.{block}", block)
                yield Operation(
                    f"update.{block}", Kind.UPDATE, Resource.HOST, block, reads=(gradients[block], master),
                    writes=(master,),
                )  # fmt: skip
            for block in self.blocks if phase is Kind.LOAD_WEIGHTS else ():
                copy = f"host.pinned.{block}" if block in self.model.layers else f"device.weights.{block}"
                yield Operation(
                    f"refresh.{block}", Kind.LOAD_WEIGHTS, Resource.HOST, block,
                    reads=(_weights(f"host.weights.{block}", block),), writes=(_weights(copy, block),),
                )  # fmt: skip
            for block in self.blocks if phase is Kind.ZERO_GRADIENT else ():
                # A read for the program's order: what is zeroed is never looked at, the next gradient overwrites it.
                yield Operation(f"zero.{block}", Kind.ZERO_GRADIENT, Resource.HOST, block, reads=(gradients[block],))

    def _load(self, layer: int, phase: str) -> Operation:
        return Operation(
            f"load_weights.{layer}.{phase}", Kind.LOAD_WEIGHTS, Resource.H2D, layer,
            reads=(_weights(f"host.pinned.{layer}", layer),), writes=(self._flat(layer),),
        )  # fmt: skip

    def _flat(self, layer: int) -> Access:
        return _weights(f"device.flat.{layer % self.variant.num_buffers}", layer)

    @staticmethod
    def _input(layer: int, start: int) -> Access:
        return _own(f"hidden.{layer}" if layer == start else f"recomputed.{layer}")


def _own(buffer: str) -> Access:
    """A buffer that holds the value it is called after."""
    return Access(buffer, buffer)


def _host_input(layer: int) -> Access:
    return Access(f"host.hidden.{layer}", f"hidden.{layer}")


def _weights(buffer: str, block: int) -> Access:
    return Access(buffer, f"weights.{block}")


def _buffers(model: ModelSpec, tokens: int, variant: Variant, homes: tuple[InputHome, ...]) -> Iterator[Buffer]:
    parameters = {block: model.block(block).num_parameters for block in range(model.num_blocks)}
    largest = WEIGHT_BYTES * max(parameters[layer] for layer in model.layers)
    host, device = Tier.HOST, Tier.DEVICE
    for block, count in parameters.items():
        yield Buffer(f"host.weights.{block}", host, Role.WEIGHTS, WEIGHT_BYTES * count, block)
        yield Buffer(f"host.state.{block}", host, Role.STATE, round(variant.moment_bytes * count), block)
        yield Buffer(f"host.gradient.{block}", host, Role.GRADIENT, WEIGHT_BYTES * count, block)
        if block in model.layers:
            yield Buffer(f"host.pinned.{block}", host, Role.WEIGHTS, WEIGHT_BYTES * count, block)
        else:
            yield Buffer(f"device.weights.{block}", device, Role.WEIGHTS, WEIGHT_BYTES * count, block)
    for slab in range(variant.gradient_slabs):
        yield Buffer(f"host.slab.{slab}", host, Role.SLAB, largest)
    for slot in range(variant.num_buffers):
        # Weights arrive flat and are copied into a layer of the library's own class.
        yield Buffer(f"device.flat.{slot}", device, Role.SLOT, largest)
        yield Buffer(f"device.template.{slot}", device, Role.SLOT, largest)
        yield Buffer(f"device.gradient.{slot}", device, Role.GRADIENT, largest, persistent=False)
    for name, block in (("head", model.head), ("embedding", 0)):
        num_bytes = WEIGHT_BYTES * parameters[block]
        yield Buffer(f"host.slab.{name}", host, Role.SLAB, num_bytes, block)
        yield Buffer(f"device.gradient.{name}", device, Role.GRADIENT, num_bytes, block, persistent=False)
    hidden = WEIGHT_BYTES * tokens * model.hidden_size
    yield Buffer("batch", device, Role.BATCH, 3 * 8 * tokens, persistent=False)  # tokens, mask and labels
    for block in range(1, model.num_blocks):
        yield Buffer(f"hidden.{block}", device, Role.HIDDEN, hidden, block, persistent=False)
        yield Buffer(f"recomputed.{block}", device, Role.HIDDEN, hidden, block, persistent=False)
        yield Buffer(f"grad_hidden.{block}", device, Role.GRAD_HIDDEN, hidden, block, persistent=False)
        if block in model.layers and homes[block - 1] == "host":
            yield Buffer(f"host.hidden.{block}", host, Role.HIDDEN, hidden, block, persistent=False)
