"""Frozen parameters: which tensors a run leaves as they are, by patterns over transformers' parameter names.

Freezing is part of the model's spec, so that everything that reads it knows: a block of which nothing is trained has no
gradient, no optimizer state and no update; blocks below the lowest trained one are run forward only. A block that is
trained in part keeps its layout: its frozen tensors get no gradient and no update touches them.

Embeddings that are tied are one parameter, that of the input: freezing it freezes the output projection too.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from simulator.errors import InputError
from simulator.model import PROJECTION, BlockSpec, ModelSpec
from simulator.nearest import did_you_mean, nearest_name


def freeze(model: ModelSpec, patterns: Sequence[str]) -> ModelSpec:
    """The model with every parameter frozen that one of the `patterns` matches; without patterns, all trained.

    Patterns are shell globs over whole names (`model.layers.0.*`, `*.bias`, `model.embed_tokens.weight`). Raises
    InputError for a pattern that matches nothing, naming the nearest parameter, and where nothing is left to train.
    """
    names = parameter_names(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"freeze: {pattern!r} matches no parameter{_hint(model, pattern, names)}")
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if len(frozen) == len(names):
        raise InputError("freeze: every parameter is frozen, so there is nothing to train; take a pattern out")
    blocks = [_frozen_block(model, block, frozen) for block in range(model.num_blocks)]
    lowest = next(index for index, block in enumerate(blocks) if block.trained)
    blocks = [block.model_copy(update={"forward_only": index < lowest}) for index, block in enumerate(blocks)]
    kinds = tuple(dict.fromkeys(blocks))
    return model.model_copy(update={"kinds": kinds, "kind_of_block": tuple(kinds.index(block) for block in blocks)})


def unfrozen(model: ModelSpec) -> ModelSpec:
    """The same model with all parameters trained."""
    return freeze(model, ())


def frozen_patterns(model: ModelSpec) -> tuple[str, ...]:
    """Patterns that freeze what is frozen here: one for a layer that is frozen as a whole, else names."""
    found: list[str] = []
    for block in range(model.num_blocks):
        prefix = model.block_prefix(block)
        if block in model.layers and not model.block(block).trained:
            found.append(f"{prefix}*")
        else:
            found += [prefix + tensor.name for tensor in model.block(block).tensors if tensor.frozen]
    return tuple(found)


def parameter_names(model: ModelSpec) -> list[str]:
    """transformers' name of every parameter, in the order of the blocks."""
    return [
        model.block_prefix(block) + tensor.name
        for block in range(model.num_blocks)
        for tensor in model.block(block).tensors
    ]


def _frozen_block(model: ModelSpec, block: int, frozen: set[str]) -> BlockSpec:
    spec, prefix = model.block(block), model.block_prefix(block)
    tensors = tuple(tensor.model_copy(update={"frozen": prefix + tensor.name in frozen}) for tensor in spec.tensors)
    return spec.model_copy(update={"tensors": tensors})


def _hint(model: ModelSpec, pattern: str, names: Sequence[str]) -> str:
    if model.tied_embeddings and fnmatchcase(PROJECTION, pattern):
        embedding = model.block_prefix(0) + model.embedding.name
        return f": the output projection is tied to the embedding, {embedding!r}, which would freeze both"
    # Wildcards match nothing in the comparison of names: what stands between them counts.
    folders = {name.rpartition(".")[0] + ".*" for name in names}
    return did_you_mean(nearest_name(pattern, [*names, *sorted(folders)]))
