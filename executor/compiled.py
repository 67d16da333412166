"""Layers through torch.compile at a save level: how much of what autograd wants to keep the compiled layer keeps.

The level is torch's activation memory budget, read by the partitioner that cuts the joint graph into forward and
backward. Two things make it stick. Each level compiles a function with a code object of its own, since torch.compile
finds earlier results by code object. And the budget is set inside the backend, which runs again for every new input
shape and in whichever thread meets it first; set around the call it would be lost there.

What the backend has compiled is called directly from the second call on. torch.compile would check before every call
that a layer's module, its globals and torch's modes are what they were, which takes the launching thread a quarter of a
layer's forward; here nothing but the shapes of what comes in and the wish for gradients can differ.
"""

import itertools
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from executor.weight_gradients import add_in_product, layer_arguments
from simulator.errors import ConveyorError

# Rounds intermediates to bf16 where eager would: without it save levels differ by what they fuse.
INDUCTOR_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}

# Each takes a quarter of a GiB of host memory for the rest of the run, and a layer has some twenty kernels to compile.
COMPILE_WORKERS = 4

_serial = itertools.count()


def compile_layer(function: Callable[..., Tensor], *, budget: float, name: str) -> Callable[..., Tensor]:
    """`function` compiled whole for each input shape, keeping at most the share `budget` (0 to 1) for its backward.

    Raises ConveyorError when it cannot be compiled, or when it meets more shapes than torch keeps compiled: a run
    that compiles in every step would pass for a slow one.
    """
    graphs: list[_Graph] = []  # of the call that compiles
    known: dict[tuple[Any, ...], _Graph] = {}  # by what differs between calls
    compiled = torch.compile(
        _own_code(function, f"{name}_{next(_serial)}"), backend=_backend(budget, graphs), dynamic=False, fullgraph=True
    )

    def call(hidden: Tensor, context: tuple[Tensor, ...], *weights: Tensor) -> Tensor:
        gradients = torch.is_grad_enabled(), hidden.requires_grad, *(weight.requires_grad for weight in weights)
        key = (gradients, hidden.shape, hidden.stride(), *(tensor.shape for tensor in context))
        if key in known:
            return known[key](hidden, context, weights)
        graphs.clear()
        try:
            output = compiled(hidden, context, *weights)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise ConveyorError(
                f"{name}: met more input shapes than torch keeps compiled "
                f"({torch._dynamo.config.recompile_limit}); use one micro-batch size and sequence length"
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConveyorError(f"{name}: torch.compile failed ({cause}); set compiled to false") from error
        if graphs:
            known[key] = graphs.pop()
        return output

    return call


class _Graph:
    """A compiled layer for inputs of one shape. `arguments` says which of the layer's arguments each input is."""

    def __init__(self, run: Callable[..., Sequence[Tensor]], arguments: Sequence[tuple[str, int]]) -> None:
        self._run, self._arguments = run, arguments

    def __call__(self, hidden: Tensor, context: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
        given: dict[str, tuple[Tensor, ...]] = {"hidden": (hidden,), "context": context, "weights": weights}
        (output,) = self._run(*[given[name][index] for name, index in self._arguments])
        return output


def _backend(budget: float, graphs: list[_Graph]) -> Callable[..., Any]:
    """A backend for one save level; adds to `graphs` what it has compiled, if that can be called alone."""

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        # Before the import that starts the workers. Seconds to import, and eager runs do without.
        torch._inductor.config.compile_threads = min(COMPILE_WORKERS, os.cpu_count() or 1)
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        from executor.recompute_cost import RecomputeCost

        arguments = layer_arguments(graph)

        def compile_half(half: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
            if options.get("is_backward"):
                add_in_product(half, arguments)
            return compile_fx_inner(half, inputs, **options)

        with torch._functorch.config.patch(
            activation_memory_budget=budget, activation_memory_budget_runtime_estimator=RecomputeCost()
        ):
            # As config_patches, the options also reach the backward, which is compiled when it first runs.
            run: Any = compile_fx(graph, example_inputs, inner_compile=compile_half, config_patches=INDUCTOR_OPTIONS)
        of_layer = [argument for argument in arguments if argument is not None]
        if len(of_layer) == len(arguments):
            graphs.append(_Graph(run, of_layer))
        return run

    return backend


def _own_code(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
