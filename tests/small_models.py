"""ModelSpecs written by hand, so that tests of programs need no transformers; and random workloads and policies."""

import random
from collections.abc import Sequence
from typing import Any

from simulator.formats import GradientFormat, Precision
from simulator.model import BlockKind, BlockSpec, ModelSpec, TensorSpec
from simulator.policy import Clipping, Home, OptimizerHome, Policy, SaveLevel, Workload

HIDDEN, VOCABULARY = 8, 16


def block(kind: BlockKind, variant: str, *sizes: tuple[int, ...]) -> BlockSpec:
    """Tensors of the given shapes, one after another on 128-element boundaries."""
    tensors, offset = [], 0
    for number, shape in enumerate(sizes):
        tensors.append(TensorSpec(name=f"t{number}", shape=shape, offset=offset))
        elements = 1
        for length in shape:
            elements *= length
        offset += -(-elements // 128) * 128
    return BlockSpec(kind=kind, variant=variant, tensors=tuple(tensors))


def small_model(num_layers: int, *, tied: bool = False, widths: Sequence[int] | None = None) -> ModelSpec:
    """A decoder of `num_layers` layers; layer i has a matrix of `widths[i]` x 64 (default 4) and a norm."""
    widths = widths or [4] * num_layers
    layers = [block("layer", "full_attention", (width, 64), (HIDDEN,)) for width in widths]
    embedding = block("embedding", "embedding", (VOCABULARY, HIDDEN))
    if tied:
        head = block("head", "tied", (HIDDEN,))
    else:
        head = block("head", "untied", (VOCABULARY, HIDDEN), (HIDDEN,))
    blocks = [embedding, *layers, head]
    kinds = list(dict.fromkeys(blocks))
    return ModelSpec(
        family="llama",
        hidden_size=HIDDEN,
        intermediate_size=12,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=VOCABULARY,
        tied_embeddings=tied,
        kinds=tuple(kinds),
        kind_of_block=tuple(kinds.index(item) for item in blocks),
        num_parameters=sum(item.num_parameters for item in blocks),
    )


def small_workload(num_micro_batches: int, **changes: Any) -> Workload:
    """Micro-batches of one row of 4 tokens."""
    settings = {"sequence_length": 4, "tokens_per_step": 4 * num_micro_batches, "compiled": True}
    return Workload(**{**settings, **changes})


def random_case(seed: int) -> tuple[ModelSpec, Workload, Policy]:
    """A model, a workload and a policy that check_policy accepts: any cut, clipping, format, homes, depth, interval.

    None, some or all of the layers are depth-first where every input is kept. What level `input` keeps waits on the
    host in none, some or all of the layers; what other levels save does in some.
    """
    draw = random.Random(seed)
    num_layers = draw.randint(1, 7)
    model = small_model(
        num_layers, tied=draw.random() < 0.4, widths=[draw.choice((4, 4, 4, 9)) for _ in range(num_layers)]
    )
    groups = tuple(draw.choice((1, 1, 1, 2, 3)) for _ in range(draw.randint(1, 4)))
    clipping: Clipping = draw.choice(("global", "layerwise", "none"))
    precision: Precision = draw.choice(("bf16", "fp32", "fp64"))
    gradient_format: GradientFormat = draw.choice(("bf16", "fp32")) if precision != "fp64" else "fp32"
    workload = small_workload(sum(groups), clipping=clipping, precision=precision, gradient_format=gradient_format)
    interval = draw.choice((1, 1, 1, 2, 3, 9))
    levels: tuple[SaveLevel, ...] = ("keep", "budget_70", "budget_50", "budget_30", "budget_10", "input")
    saves = ["input" if interval > 1 else draw.choice(levels) for _ in range(num_layers)]
    bias = draw.choice((0.0, 0.3, 0.7, 1.0))
    optimizers: list[OptimizerHome] = ["host" if draw.random() < bias else "device" for _ in range(model.num_blocks)]
    if model.tied_embeddings:
        optimizers[-1] = optimizers[0]
    streams = draw.choice((0.0, 0.5, 1.0))
    weights = ["device"] * model.num_blocks
    for index in model.layers:
        if optimizers[index] == "host" and draw.random() < streams:
            weights[index] = "host"
    chunk, slabs, depth = draw.choice((1, 4, 2048)), draw.choice((2, 2, 3)), draw.choice((1, 1, 2, 3, 8))
    gradients: list[Home] = ["host" if home == "host" else "device" for home in optimizers]
    by_link = draw.choice((0.0, 0.0, 0.4, 1.0))  # of the layers, streamed weights or not
    for index in model.layers:
        if draw.random() < by_link:
            optimizers[index], gradients[index] = "streamed", "device"
    waits = draw.choice((0.0, 0.0, 0.5, 1.0))
    activations = ["host" if level == "input" and draw.random() < waits else "device" for level in saves]
    slots, pace = draw.choice((2, 2, 3, 5)), draw.choice((1, 1.5, 2, 5))
    some = draw.randint(1, num_layers)
    depth_first = draw.choice((0, 0, some, some, num_layers)) if interval == 1 else 0
    if depth_first and draw.random() < 0.5:
        groups = (sum(groups),)
    saved_waits = draw.choice((0.0, 0.0, 0.4))
    activations = [
        "host" if level != "input" and draw.random() < saved_waits else home
        for level, home in zip(saves, activations, strict=True)
    ]
    policy = Policy(
        micro_batch_rows=1,
        groups=groups,
        depth_first_layers=depth_first,
        saved_bytes=(1000,) * num_layers if saved_waits else (),
        leaving_passes=draw.choice((1, 2, 4)) if saved_waits or waits else 1,
        weight_homes=tuple(weights),
        prefetch_depth=depth,
        save_levels=tuple(saves),
        checkpoint_interval=interval,
        activation_homes=tuple(activations),
        gradient_homes=tuple(gradients),
        gradient_slabs=slabs,
        optimizer_homes=tuple(optimizers),
        state_slots=slots,
        state_pace=pace,
        head_chunk_tokens=chunk,
        clipping=clipping,
        gradient_format=gradient_format,
    )
    return model, workload, policy
