"""Workload (what the user asks for) and Policy (where and when, which the planner decides).

A policy changes where and when, never what: policies with the same `micro_batch_rows` and `head_chunk_tokens` give
the same losses and weights.
"""

from collections.abc import Sequence
from typing import Literal, Self

import pydantic

from simulator.errors import InputError, UnsupportedChoice
from simulator.formats import GradientFormat, Precision, StateFormat
from simulator.model import ModelSpec
from simulator.schema import Schema

Home = Literal["device", "host", "nvme"]
OptimizerHome = Literal["device", "host", "streamed", "nvme"]
Clipping = Literal["global", "layerwise", "none"]
SaveLevel = Literal["keep", "budget_70", "budget_50", "budget_30", "budget_10", "input"]

# Share of what autograd wants to keep that each compiled save level may keep: torch's activation memory budget.
# Eager runs know the two ends only. "input" keeps the layer's input and recomputes the rest.
SAVE_LEVELS: dict[SaveLevel, float] = {
    "keep": 1.0,
    "budget_70": 0.7,
    "budget_50": 0.5,
    "budget_30": 0.3,
    "budget_10": 0.1,
    "input": 0.0,
}
# Tokens whose logits exist at a time, where a micro-batch has as many.
HEAD_CHUNK_TOKENS = 4096
EAGER_SAVE_LEVELS: tuple[SaveLevel, ...] = ("keep", "input")
# One state comes while another leaves.
MIN_STATE_SLOTS = 2


class Workload(Schema):
    """One training step as the user asks for it: sizes, and every choice that changes numbers."""

    # Far above any machine, and low enough for byte counts that a solver can still tell apart.
    sequence_length: int = pydantic.Field(gt=0, le=2**30)
    tokens_per_step: int = pydantic.Field(gt=0, le=2**36)
    precision: Precision = "bf16"
    gradient_format: GradientFormat = "fp32"
    state_format: StateFormat = "fp32"
    clipping: Clipping = "global"
    compiled: bool = False  # layers through torch.compile, which rounds otherwise than eager
    micro_batch_rows: int | None = pydantic.Field(default=None, gt=0)  # None: the planner splits
    # Rows hold several documents, which do not see each other. Left out of hashes where false.
    packed: bool = pydantic.Field(default=False, exclude_if=lambda packed: not packed)

    @pydantic.model_validator(mode="after")
    def _rows_divide(self) -> Self:
        if self.tokens_per_step % self.sequence_length:
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} is not a multiple of sequence_length {self.sequence_length}"
            )
        if self.micro_batch_rows is not None and self.rows_per_step % self.micro_batch_rows:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_rows} does not divide the {self.rows_per_step} rows of a step"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _formats_agree(self) -> Self:
        if self.precision == "fp64" and self.gradient_format != "fp32":
            raise ValueError("gradient_format: fp64 runs keep fp64 gradients; leave it at fp32")
        return self

    @property
    def rows_per_step(self) -> int:
        return self.tokens_per_step // self.sequence_length


class Policy(Schema):
    """Every decision of a plan. Tuples named `..._homes` have one entry a block: embedding, layers, head.

    A frozen block has no optimizer and no gradient: its three homes are the one where its weights are. The save level
    of a layer that is run forward only is of no account.
    """

    micro_batch_rows: int = pydantic.Field(gt=0)
    groups: tuple[int, ...] = pydantic.Field(min_length=1)  # micro-batches in each consecutive group
    # The topmost layers, which each micro-batch of a group passes forward and back before the next one does. What they
    # save is one micro-batch's, so they need not recompute; their gradients are summed all the while. Left out of
    # hashes where there are none.
    depth_first_layers: int = pydantic.Field(default=0, ge=0, exclude_if=lambda n: n == 0)
    weight_homes: tuple[Home, ...]  # device: resident in HBM; host: streamed through slots
    prefetch_depth: int = pydantic.Field(default=1, ge=1)  # layers loaded ahead; slots = depth + 1
    save_levels: tuple[SaveLevel, ...]  # one a layer
    checkpoint_interval: int = pydantic.Field(default=1, ge=1)  # every k-th layer input is kept
    activation_homes: tuple[Home, ...]  # one a layer: where what a save level keeps waits
    # One a layer: room on the host for what a micro-batch saves there beside its input, where that waits. What does not
    # fit stays on the device. Left out of hashes where none waits.
    saved_bytes: tuple[pydantic.NonNegativeInt, ...] = pydantic.Field(default=(), exclude_if=lambda sizes: not sizes)
    # Passes after which what is to wait on the host has left the device.
    leaving_passes: int = pydantic.Field(default=1, ge=1, exclude_if=lambda n: n == 1)
    gradient_homes: tuple[Home, ...]  # completed gradients, until the update
    gradient_slabs: int = pydantic.Field(default=2, ge=2)  # transit to the host, never the store
    # device: state in HBM; host: state and update there; streamed: state on the host, update on the GPU
    optimizer_homes: tuple[OptimizerHome, ...]
    # Blocks whose streamed state is on the device at a time. Left out of hashes where it is the least.
    state_slots: int = pydantic.Field(
        default=MIN_STATE_SLOTS, ge=MIN_STATE_SLOTS, exclude_if=lambda n: n == MIN_STATE_SLOTS
    )
    # Layers that the first group's forward passes while a state comes, on average: what updates of streamed states are
    # apart.
    state_pace: float = pydantic.Field(default=1, ge=1, exclude_if=lambda n: n == 1)
    head_chunk_tokens: int = pydantic.Field(default=HEAD_CHUNK_TOKENS, gt=0)
    mlp_chunk_tokens: int = pydantic.Field(default=0, ge=0)  # 0: the MLP is not chunked
    clipping: Clipping = "global"
    gradient_format: GradientFormat = "fp32"
    state_format: StateFormat = "fp32"

    @pydantic.field_serializer("state_pace")
    def _whole_where_it_is(self, pace: float) -> int | float:
        """A whole number without a point, so that plans that were written with one keep their hash."""
        return int(pace) if pace == int(pace) else pace

    @property
    def num_micro_batches(self) -> int:
        return sum(self.groups)

    def depth_first(self, block: int, num_layers: int) -> bool:
        """Whether micro-batches pass a block one after the other, forward and back: top layers, then head and loss."""
        return self.depth_first_layers > 0 and block > num_layers - self.depth_first_layers

    def kept_input(self, layer: int, first: int = 1) -> bool:
        """Whether the input of block `layer` (1-based) waits for the backward: a checkpoint.

        `first` is the lowest layer that the backward passes through; the input of no layer below it is kept.
        """
        return layer >= first and (layer - first) % self.checkpoint_interval == 0


def uniform_policy(
    model: ModelSpec,
    workload: Workload,
    *,
    micro_batch_rows: int,
    groups: Sequence[int],
    weights: Home = "device",
    save_level: SaveLevel = "keep",
    activations: Home = "device",
    saved_bytes: int = 0,
    leaving_passes: int = 1,
    optimizer: OptimizerHome = "device",
    gradients: Home | None = None,
    prefetch_depth: int = 1,
    checkpoint_interval: int = 1,
    depth_first_layers: int = 0,
    gradient_slabs: int = 2,
    state_slots: int = MIN_STATE_SLOTS,
    state_pace: float = 1,
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS,
) -> Policy:
    """A policy that treats all layers alike; the embedding and the head keep their weights resident.

    Where the layers' state is `streamed`, that of the embedding and the head is on the device.
    """
    layers = model.num_layers
    weight_homes: tuple[Home, ...] = ("device", *[weights] * layers, "device")
    trained, everywhere = set(model.trained_blocks), range(model.num_blocks)
    gradient = gradients or ("host" if optimizer == "host" else "device")
    edge: OptimizerHome = "device" if optimizer == "streamed" else optimizer
    optimizers = (edge, *[optimizer] * layers, edge)
    return Policy(
        micro_batch_rows=micro_batch_rows,
        groups=tuple(groups),
        depth_first_layers=depth_first_layers,
        weight_homes=weight_homes,
        prefetch_depth=prefetch_depth,
        save_levels=(save_level,) * layers,
        checkpoint_interval=checkpoint_interval,
        activation_homes=(activations,) * layers,
        saved_bytes=(saved_bytes,) * layers if saved_bytes else (),
        leaving_passes=leaving_passes,
        gradient_homes=tuple(gradient if block in trained else weight_homes[block] for block in everywhere),
        gradient_slabs=gradient_slabs,
        optimizer_homes=tuple(optimizers[block] if block in trained else weight_homes[block] for block in everywhere),
        state_slots=state_slots,
        state_pace=state_pace,
        head_chunk_tokens=head_chunk_tokens,
        clipping=workload.clipping,
        gradient_format=workload.gradient_format,
        state_format=workload.state_format,
    )


def check_policy(policy: Policy, model: ModelSpec, workload: Workload) -> None:
    """Refuse what contradicts itself (InputError) or is not built yet (UnsupportedChoice), by name."""
    positions = model.positions
    if positions is not None and workload.sequence_length > positions.shape[0]:
        raise InputError(
            f"sequence_length: {workload.sequence_length} is more than the {positions.shape[0]} positions that the "
            "model has learned"
        )
    lengths = {
        "weight_homes": model.num_blocks,
        "gradient_homes": model.num_blocks,
        "optimizer_homes": model.num_blocks,
        "save_levels": model.num_layers,
        "activation_homes": model.num_layers,
    }
    if policy.saved_bytes:
        lengths["saved_bytes"] = model.num_layers
    for field, expected in lengths.items():
        actual = len(getattr(policy, field))
        if actual != expected:
            raise InputError(f"policy.{field}: has {actual} entries, this model needs {expected}")
    if policy.num_micro_batches * policy.micro_batch_rows != workload.rows_per_step:
        raise InputError(
            f"policy: {policy.num_micro_batches} micro-batches of {policy.micro_batch_rows} rows are not the "
            f"{workload.rows_per_step} rows of a step"
        )
    if min(policy.groups) < 1:
        raise InputError(f"policy.groups: every group has at least one micro-batch, not {policy.groups}")
    if policy.depth_first_layers > model.num_layers:
        raise InputError(
            f"policy.depth_first_layers: {policy.depth_first_layers}, but the model has {model.num_layers} layers"
        )
    if workload.micro_batch_rows not in (None, policy.micro_batch_rows):
        raise InputError(
            f"policy.micro_batch_rows: {policy.micro_batch_rows}, but the workload pins {workload.micro_batch_rows}"
        )
    for field in ("clipping", "gradient_format", "state_format"):
        if getattr(policy, field) != getattr(workload, field):
            raise InputError(f"policy.{field}: {getattr(policy, field)!r}, the user chose {getattr(workload, field)!r}")

    if policy.state_format != "fp32":
        raise UnsupportedChoice("policy.state_format: '8bit' is not built yet; use 'fp32'")
    if policy.mlp_chunk_tokens:
        raise UnsupportedChoice("policy.mlp_chunk_tokens: chunking the MLP is not built yet; use 0")
    for field in ("weight_homes", "activation_homes", "gradient_homes", "optimizer_homes"):
        if "nvme" in getattr(policy, field):
            raise UnsupportedChoice(f"policy.{field}: 'nvme' is not built yet; use 'device' or 'host'")
    if "streamed" in (policy.optimizer_homes[0], policy.optimizer_homes[-1]):
        raise UnsupportedChoice(
            "policy.optimizer_homes: streaming the state of the embedding or the head is not built yet; use 'device' "
            "or 'host'"
        )
    for layer in model.backward_layers:
        level = policy.save_levels[layer - 1]
        if (
            policy.activation_homes[layer - 1] == "host"
            and level != "input"
            and not any(policy.saved_bytes[layer - 1 : layer])
        ):
            raise InputError(
                f"policy.saved_bytes: layer {layer}: what {level!r} keeps waits on the host, and needs room there"
            )
    if "host" in (policy.weight_homes[0], policy.weight_homes[-1]):
        raise UnsupportedChoice("policy.weight_homes: streaming the embedding or the head is not built yet")
    if not workload.compiled and set(policy.save_levels) - set(EAGER_SAVE_LEVELS):
        raise UnsupportedChoice(
            f"policy.save_levels: eager layers know {EAGER_SAVE_LEVELS} only, not "
            f"{sorted(set(policy.save_levels) - set(EAGER_SAVE_LEVELS))}; compile the layers"
        )
    if policy.checkpoint_interval > 1 and set(policy.save_levels) != {"input"}:
        raise UnsupportedChoice("policy.checkpoint_interval: more than 1 needs save level 'input' in every layer")
    if policy.checkpoint_interval > 1 and policy.depth_first_layers:
        raise UnsupportedChoice(
            "policy.depth_first_layers: layers that keep no input cannot pass micro-batches one after the other; use "
            "checkpoint_interval 1 or no depth-first layers"
        )
    trained = set(model.trained_blocks)
    for block in range(model.num_blocks):
        where = f"block {block}"
        optimizer, weights = policy.optimizer_homes[block], policy.weight_homes[block]
        if block not in trained:
            if not optimizer == policy.gradient_homes[block] == weights:
                raise InputError(f"policy: {where}: it is frozen, so its three homes are one, that of its weights")
            continue
        if optimizer == "device" and weights != "device":
            raise InputError(
                f"policy: {where}: optimizer state in HBM holds the master, so its weights are resident too"
            )
        if optimizer == "host" and policy.gradient_homes[block] != "host":
            raise InputError(f"policy: {where}: a host update reads its gradient from the host")
        if optimizer != "host" and policy.gradient_homes[block] != "device":
            raise UnsupportedChoice(
                f"policy.gradient_homes: {where}: a gradient that waits on the host for a GPU update is not built yet"
            )
    tied = model.tied_embeddings and {0, model.head} <= trained
    if tied and policy.optimizer_homes[0] != policy.optimizer_homes[-1]:
        raise InputError("policy.optimizer_homes: tied embeddings give the embedding and the head one home")
