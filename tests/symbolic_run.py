"""Programs run on symbols instead of numbers: what a policy computes, compared with a plain trainer's loops.

A value is a nested tuple folded into one integer, so equal values were computed from equal inputs by equal
operations in equal order. `plain_training` knows no policy; `run` knows nothing but a program's operations.
"""

import random
from collections.abc import Sequence
from typing import Any, Literal

from simulator.model import ModelSpec
from simulator.program import Kind, Operation, Role, StepProgram

Value = int
Variant = Literal["first", "steady", "drain"]
TORN = -1  # a buffer that is being written, or a value computed from one


def symbol(*parts: Any) -> Value:
    return TORN if TORN in parts else hash(parts) & (2**61 - 1)


def plain_training(model: ModelSpec, num_micro_batches: int, num_steps: int, *, clipping: str) -> dict[int, Value]:
    """Each block's weights after `num_steps` of a trainer that holds everything and accumulates in order."""
    layers, head, tied = model.num_layers, model.num_layers + 1, model.tied_embeddings
    weights = {b: symbol("weights", b) for b in range(layers + 2)}
    states = {b: symbol("state", b) for b in weights}
    for step in range(num_steps):
        sums: dict[Any, list[Value]] = {b: [] for b in [*weights, "tied"]}
        for m in range(num_micro_batches):
            batch = symbol("batch", step, m)
            hidden = [0, symbol("forward", 0, weights[0], batch)]
            for b in range(1, head):
                hidden.append(symbol("forward", b, weights[b], hidden[b]))
            projection = weights[0] if tied else 0
            upstream = symbol("loss", weights[head], projection, hidden[head], batch)
            sums[head].append(symbol("share", head, upstream))
            if tied:
                sums["tied"].append(symbol("share", "tied", upstream))
            for b in reversed(range(1, head)):
                sums[b].append(symbol("share", b, weights[b], hidden[b], upstream))
                upstream = symbol("backward", b, weights[b], hidden[b], upstream)
            sums[0].append(symbol("share", 0, upstream, batch))
        gradients = {
            b: symbol("gradient", total(sums[b]), total(sums["tied"]) if tied and b == 0 else 0) for b in weights
        }
        norms = {b: symbol("norm", gradients[b]) for b in weights}
        for b in weights:
            scalars = symbol("clip", *norms.values()) if clipping == "global" else symbol("clip", norms[b])
            inputs = (weights[b], states[b], gradients[b], scalars)
            weights[b], states[b] = symbol("new weights", *inputs), symbol("new state", *inputs)
    return weights


def total(shares: Sequence[Value]) -> Value:
    value = 0
    for number, share in enumerate(shares):
        value = symbol("first", share) if number == 0 else symbol("add", value, share)
    return value


class Machine:
    """Buffers and what each kind of operation does to them."""

    def __init__(self, model: ModelSpec, step_program: StepProgram) -> None:
        self.model = model
        self.buffers: dict[str, Value] = {}
        self.persistent = {name for name, buffer in step_program.buffers.items() if buffer.persistent}
        for name, buffer in step_program.buffers.items():
            if buffer.role is Role.WEIGHTS:
                self.buffers[name] = symbol("weights", buffer.block)
            elif buffer.role is Role.STATE:
                self.buffers[name] = symbol("state", buffer.block)

    def weights(self) -> dict[int, Value]:
        """Each block's weights where its optimizer lives."""
        found = {}
        for block in range(self.model.num_blocks):
            tier = "host" if f"host.weights.{block}" in self.buffers else "device"
            found[block] = self.buffers[f"{tier}.weights.{block}"]
        return found

    def states(self) -> dict[int, Value]:
        """Each block's state at home."""
        places = {b: (f"host.state.{b}", f"device.state.{b}") for b in range(self.model.num_blocks)}
        return {b: next(self.buffers[name] for name in names if name in self.buffers) for b, names in places.items()}

    def resident_weights(self) -> dict[int, Value]:
        """The weights in HBM, of the blocks that are resident."""
        names = {f"device.weights.{block}": block for block in range(self.model.num_blocks)}
        return {block: self.buffers[name] for name, block in names.items() if name in self.buffers}

    def inputs(self, operation: Operation) -> dict[str, Value]:
        """Values by content name, from the buffers that the operation names. A missing one is torn."""
        return {access.content: self.buffers.get(access.buffer, TORN) for access in operation.reads}

    def start(self, operation: Operation) -> dict[str, Value]:
        inputs = self.inputs(operation)
        in_place = {access.buffer for access in operation.reads}
        for access in operation.writes:
            if access.buffer not in in_place:
                self.buffers[access.buffer] = TORN
        return inputs

    def end(self, operation: Operation, inputs: dict[str, Value], step: int) -> None:
        if self.inputs(operation) != inputs:  # somebody wrote what was being read
            inputs = dict.fromkeys(inputs, TORN)
        outputs = self._outputs(operation, inputs, step)
        for access in operation.writes:
            self.buffers[access.buffer] = outputs[access.content]
        for name in operation.releases:
            assert name not in self.persistent
            del self.buffers[name]

    def _outputs(self, operation: Operation, given: dict[str, Value], step: int) -> dict[str, Value]:
        b, m, head = operation.block, operation.micro_batch, self.model.head
        match operation.kind:
            case Kind.LOAD_BATCH:
                return {f"batch.{m}": symbol("batch", step, m)}
            case Kind.LOAD_WEIGHTS:
                return dict(given)
            case Kind.FORWARD | Kind.RECOMPUTE:
                source = given[f"batch.{m}"] if b == 0 else given[f"hidden.{b}.{m}"]
                output = symbol("forward", b, given[f"weights.{b}"], source)
                return {f"hidden.{b + 1}.{m}": output, f"saved.{b}.{m}": symbol("saved", output)}
            case Kind.LOSS:
                projection = given["weights.0"] if self.model.tied_embeddings else 0
                upstream = symbol(
                    "loss", given[f"weights.{head}"], projection, given[f"hidden.{head}.{m}"], given[f"batch.{m}"]
                )
                return {
                    f"grad_hidden.{head}.{m}": upstream,
                    f"gradient_sum.{head}": _added(
                        operation, given, f"gradient_sum.{head}", symbol("share", head, upstream)
                    ),
                    "device.accumulator.tied": _added(
                        operation, given, "device.accumulator.tied", symbol("share", "tied", upstream)
                    ),
                    "device.loss": _added(operation, given, "device.loss", upstream),
                }
            case Kind.BACKWARD if b == 0:
                share = symbol("share", 0, given[f"grad_hidden.1.{m}"], given[f"batch.{m}"])
                return {"gradient_sum.0": _added(operation, given, "gradient_sum.0", share)}
            case Kind.BACKWARD:
                used = (b, given[f"weights.{b}"], given[f"hidden.{b}.{m}"], given[f"grad_hidden.{b + 1}.{m}"])
                share, result = symbol("share", *used), symbol("backward", *used)
                kept = given.get(f"saved.{b}.{m}")
                if kept is not None and kept != symbol("saved", symbol("forward", *used[:3])):
                    share = result = TORN  # what another forward saved
                return {
                    f"grad_hidden.{b}.{m}": result,
                    f"gradient_sum.{b}": _added(operation, given, f"gradient_sum.{b}", share),
                }
            case Kind.FINISH_GRADIENT:
                gradient = symbol("gradient", given[f"gradient_sum.{b}"], given.get("device.accumulator.tied", 0))
                return {f"gradient.{b}": gradient, f"device.norm.{b}": symbol("norm", gradient)}
            case (
                Kind.STORE_GRADIENT | Kind.LOAD_STATE | Kind.STORE_STATE | Kind.STORE_WEIGHTS
                | Kind.STORE_ACTIVATION | Kind.LOAD_ACTIVATION
            ):  # fmt: skip
                return dict(given)
            case Kind.CLIP:
                return dict.fromkeys((a.content for a in operation.writes), symbol("clip", *given.values()))
            case Kind.UPDATE:
                scalars = next(value for name, value in given.items() if ".scalars" in name)
                inputs = (given[f"weights.{b}"], given[f"state.{b}"], given[f"gradient.{b}"], scalars)
                return {f"weights.{b}": symbol("new weights", *inputs), f"state.{b}": symbol("new state", *inputs)}
            case Kind.REPORT:
                return {"host.report": symbol("report", *given.values())}


def _added(operation: Operation, given: dict[str, Value], name: str, share: Value) -> Value:
    if operation.first:
        assert name not in given
        return symbol("first", share)
    return symbol("add", given[name], share) if name in given else TORN


def run_in_order(model: ModelSpec, step_program: StepProgram, variants: Sequence[Variant]) -> Machine:
    """One operation after another, as the programs list them."""
    machine, step = Machine(model, step_program), -1
    for variant in variants:
        step += variant != "drain"
        for operation in getattr(step_program, variant):
            machine.end(operation, machine.start(operation), step)
    return machine


def run_shuffled(
    model: ModelSpec, step_program: StepProgram, variants: Sequence[Variant], draw: random.Random
) -> Machine:
    """Operations start and end in a random order that keeps to FIFO resources and waits, and to nothing else."""
    machine = Machine(model, step_program)
    queues: dict[str, list[tuple[Operation, int, int]]] = {}
    known: set[tuple[str, int]] = set()
    step = -1
    for place, variant in enumerate(variants):
        step += variant != "drain"
        for operation in getattr(step_program, variant):
            queues.setdefault(operation.resource, []).append((operation, place, step))
            known.add((operation.name, place))
    finished: set[tuple[str, int]] = set()
    running: dict[str, dict[str, Value]] = {}
    # A favoured resource runs as far ahead as it can: races show where one stream outruns another.
    eager = {resource: draw.random() ** 3 for resource in queues}
    while queues:
        able = []
        for resource, queue in queues.items():
            operation, place, _ = queue[0]
            awaited = [(wait.operation, place + wait.step_offset) for wait in operation.waits]
            if resource in running or all(item in finished or item not in known for item in awaited):
                able.append(resource)
        resource = draw.choices(able, [eager[item] + 1e-6 for item in able])[0]
        operation, place, step = queues[resource][0]
        if resource not in running:
            running[resource] = machine.start(operation)
            continue
        machine.end(operation, running.pop(resource), step)
        finished.add((operation.name, place))
        queues[resource].pop(0)
        if not queues[resource]:
            del queues[resource]
    return machine
