"""Weight gradients of compiled layers, added to their sums in the product that forms them.

A layer's backward ends in one matrix product for each weight matrix. Written out in compute dtype and added to an fp32
sum afterwards, it costs a second pass over 12 bytes an element. `add_in_product` rewrites the backward graph so that
the product is added to the sum directly; the sums are those that `Sums.bound` names while the backward runs.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx


class Sums:
    """The sums of one block's weights while its backward runs, and which of them have received their gradient.

    Backwards run one at a time, so there is one such object.
    """

    def __init__(self) -> None:
        self._views: Sequence[Tensor] | None = None
        self._first = False
        self._added: set[int] = set()

    @contextmanager
    def bound(self, views: Sequence[Tensor], *, first: bool) -> Iterator[set[int]]:
        """Add to `views`, one a weight in the block's order, or write if `first`; gives the indices that were."""
        self._views, self._first, self._added = views, first, set()
        try:
            yield self._added
        finally:
            self._views = None

    def take(self, left: Tensor, right: Tensor, index: int) -> Tensor:
        """The gradient left @ right of weight `index`; unwritten memory of its shape where a sum has received it."""
        if self._views is None:
            return left @ right
        total = self._views[index]
        self._added.add(index)
        if left.is_cuda and left.dtype == total.dtype and self._first:
            torch.mm(left, right, out=total)
        elif left.is_cuda and left.dtype == torch.bfloat16 and total.dtype == torch.float32:
            if self._first:
                torch.mm(left, right, out_dtype=torch.float32, out=total)
            else:
                torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        elif self._first:
            total.copy_(left @ right)
        else:
            total.add_(left @ right)
        return torch.empty_like(total, dtype=left.dtype)


SUMS = Sums()


def _shape_only(left: Tensor, right: Tensor, index: int) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


# Not by torch.library.custom_op, whose checks in Python take as long at every call as the launches of the product.
_LIBRARY = torch.library.Library("conveyor", "DEF")
_LIBRARY.define("weight_gradient(Tensor left, Tensor right, int index) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.impl("weight_gradient", SUMS.take, "CompositeExplicitAutograd")
torch.library.register_fake("conveyor::weight_gradient", _shape_only, lib=_LIBRARY)

_ARGUMENT = re.compile(r"L\['(\w+)'\](?:\[(\d+)\])?$")


def layer_arguments(graph: fx.GraphModule) -> list[tuple[str, int] | None]:
    """For each input of a captured layer: the layer's argument that it is, and its index there; None for others."""
    arguments: list[tuple[str, int] | None] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            argument = node.meta.get("grapharg")
            found = _ARGUMENT.search(argument.source.name) if argument is not None and argument.source else None
            arguments.append((found[1], int(found[2] or 0)) if found else None)
    return arguments


def add_in_product(backward: fx.GraphModule, arguments: Sequence[tuple[str, int] | None]) -> None:
    """Let the products that `backward` returns as gradients of weights be formed by `weight_gradient`.

    `arguments` are those of the forward's inputs, to which the backward's outputs belong one by one. Gradients that
    are no plain product (of norms, biases) stay as they are.
    """
    (output,) = (node for node in backward.graph.nodes if node.op == "output")
    (gradients,) = output.args
    assert len(gradients) == len(arguments), "a backward returns one gradient, or None, for each input of the forward"
    for node, argument in zip(gradients, arguments, strict=True):
        if argument is None or argument[0] != "weights":
            continue
        if node is None or node.target is not torch.ops.aten.mm.default or len(node.users) > 1:
            continue
        with backward.graph.inserting_before(node):
            inputs = (*node.args, argument[1])
            product = backward.graph.call_function(torch.ops.conveyor.weight_gradient.default, inputs)
        product.meta.update(node.meta)
        node.replace_all_uses_with(product)
        backward.graph.erase_node(node)
    backward.recompile()
