"""Hugging Face folders: weights in, random weights from a config, weights out.

Weights stream between disk and the blocks' planes in pieces; there is never a second copy of the model.
"""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from os import sched_getaffinity
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.folder import appearing_folder, disk_refused, require_free_disk, require_path
from executor.planes import split_planes
from executor.shard import StoredTensor, read_header, read_pieces, write_shard
from executor.store import BlockState, tensor_view
from simulator.errors import ConveyorError, InputError
from simulator.families import FAMILIES
from simulator.formats import PRECISIONS, Precision
from simulator.json_text import parse_json
from simulator.model import ModelSpec, TensorSpec, transformers_config
from simulator.predict import transit_bytes
from simulator.units import MIB

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
ROOM_BYTES = 16 * MIB  # beside the weights of an export: its tokenizer, config and headers

# What a trained model's folder needs beside weights and config, copied from the folder it came from.
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Buffers that old checkpoints carry; transformers computes them and ignores these too.
_IGNORED = ("*.rotary_emb.inv_freq", "*.attn.masked_bias", "*.attn.bias")
_HEAD_NAME = "lm_head.weight"
_PICKLED = ("pytorch_model*.bin*", "*.pth")
_SOURCE_DTYPES = ("BF16", "F16", "F32", "F64")
_RANDOM_PIECE = 2**20  # elements with a generator of their own
# Elements that are drawn or split on a GPU at a time. Its allocator keeps what that took on the default stream, where
# no step can use it: pieces of 2^26 left 0.5 to 0.75 GiB so.
_PIECE_ON_GPU = 2**22

# Takes a block's index, a tensor of the block, and flat host values for the elements from the given one on.
Sink = Callable[[int, TensorSpec, int, torch.Tensor], None]
# A block's index, a tensor's position in the block and the tensor, the piece's first element.
_Piece = tuple[int, int, TensorSpec, int]


def state_sink(states: Sequence[BlockState]) -> Sink:
    """A sink that writes values into the blocks' planes, wherever these live.

    In bf16 runs the fp32 value is split, so that nothing of an fp32 source is lost.
    """

    def write(block: int, tensor: TensorSpec, first: int, values: torch.Tensor) -> None:
        state = states[block]
        begin = tensor.offset + first
        weights = state.weights[begin : begin + values.numel()]
        if state.low is None:
            weights.copy_(values)
            return
        low = state.low[begin : begin + values.numel()]
        # Split where the values are if that is a GPU: the host would take a hundred times as long.
        where = values.device if values.device.type == "cuda" else weights.device
        for flat, upper, lower in zip(*(plane.split(_PIECE_ON_GPU) for plane in (values, weights, low)), strict=True):
            part = flat.to(device=where, dtype=torch.float32)
            if upper.device == lower.device == where:
                split_planes(part, upper, lower)
                continue
            high, remainder = torch.empty_like(part, dtype=torch.bfloat16), torch.empty_like(part, dtype=torch.int16)
            split_planes(part, high, remainder)
            upper.copy_(high)
            lower.copy_(remainder)

    return write


def has_weights(path: Path | str) -> bool:
    """Whether a model path is a folder with weights of any format; a config.json alone is not."""
    path = Path(path)
    return path.is_dir() and any(any(path.glob(pattern)) for pattern in ("*.safetensors*", *_PICKLED, "*.gguf"))


def require_weights(folder: Path | str, model: ModelSpec) -> None:
    """Raise InputError where `load_weights` would, by reading little more than headers: to be asked before long work.

    The `lm_head.weight` of a tied model is read: one that differs from the embedding is another model.
    """
    stored = _checked_tensors(require_path(folder, what="model folder"), model)
    embedding, head = stored[model.block_prefix(0) + model.embedding.name], stored.get(_HEAD_NAME)
    if model.tied_embeddings and head is not None and not _same_values(embedding, head):
        raise InputError(
            f"{head.file}: tensor {head.name!r} differs from the embedding, with which config.json ties it; set "
            "tie_word_embeddings to false in config.json to train both, or take the tensor out"
        )


def load_weights(folder: Path | str, model: ModelSpec, sink: Sink) -> None:
    """Stream a folder's safetensors weights (bf16, fp16, fp32 or fp64; sharded or not) into `sink`, piece by piece.

    Everything is checked before the first value is given away. Raises InputError naming file and tensor for a shard
    that is missing or cut off, and for tensors that are missing, unexpected, of the wrong shape or quantized. The
    `lm_head.weight` of a tied model is ignored: the embedding is the head. Names may lack their first part, as those of
    a model that was saved without its head.
    """
    folder = require_path(folder, what="model folder")
    expected = _expected_tensors(model)
    stored = _checked_tensors(folder, model)
    for name, source in sorted(stored.items(), key=lambda item: (item[1].file, item[1].begin)):
        if name in expected:
            index, tensor = expected[name]
            for first, piece in read_pieces(source):
                sink(index, tensor, first, piece)


def _expected_tensors(model: ModelSpec) -> dict[str, tuple[int, TensorSpec]]:
    """The block's index and the tensor, by the tensor's full name."""
    return {
        model.block_prefix(index) + tensor.name: (index, tensor)
        for index in range(model.num_blocks)
        for tensor in model.block(index).tensors
    }


def _checked_tensors(folder: Path, model: ModelSpec) -> dict[str, StoredTensor]:
    """All tensors of a folder under the names that the model has for them, checked against it. Raises InputError."""
    expected = _expected_tensors(model)
    body = FAMILIES[model.family].body
    found = _stored_tensors(folder)
    stored = {f"{body}.{name}" if f"{body}.{name}" in expected else name: source for name, source in found.items()}
    missing = [name for name in expected if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{folder}: its weights lack tensor {missing[0]!r}{more}, which config.json asks for")
    ignored = (*_IGNORED, _HEAD_NAME) if model.tied_embeddings else _IGNORED
    for name, source in stored.items():
        if name not in expected:
            if any(fnmatch(name, pattern) for pattern in ignored):
                continue
            raise InputError(
                f"{source.file}: tensor {source.name!r} is not part of the model that config.json describes"
            )
        _, tensor = expected[name]
        if source.shape != tensor.shape:
            raise InputError(
                f"{source.file}: tensor {source.name!r} has shape {list(source.shape)}, "
                f"config.json asks for {list(tensor.shape)}"
            )
        if source.dtype not in _SOURCE_DTYPES:
            raise InputError(
                f"{source.file}: tensor {source.name!r} is {source.dtype}; "
                f"weights are read from {', '.join(_SOURCE_DTYPES)}"
            )
    return stored


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal, element by element, read in pieces."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pieces = zip(read_pieces(one), read_pieces(other), strict=True)
    return all(torch.equal(mine, others) for (_, mine), (_, others) in pieces)


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name, from the single file or from the shards of the index."""
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file; weights are read from the model's folder")
    if (folder / WEIGHTS_NAME).exists():
        return read_header(folder / WEIGHTS_NAME)
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        if any(any(folder.glob(pattern)) for pattern in _PICKLED):
            raise InputError(
                f"{folder}: holds pickled weights (.bin) only, which are not read; load the folder with transformers "
                "and save_pretrained it once: that writes safetensors"
            )
        raise InputError(f"{folder}: has no weights, neither {WEIGHTS_NAME} nor {INDEX_NAME}")
    try:
        weight_map = parse_json(index_path.read_text(encoding="utf-8"))["weight_map"]
        assert isinstance(weight_map, dict)
        assert all(isinstance(name, str) for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise InputError(f"{index_path}: is not a safetensors index ({error!r})") from error
    stored: dict[str, StoredTensor] = {}
    for file_name in dict.fromkeys(weight_map.values()):
        names = [name for name, file in weight_map.items() if file == file_name]
        if not (folder / file_name).is_file():
            raise InputError(f"{index_path}: names shard {file_name} for tensor {names[0]!r}, and it is missing")
        header = read_header(folder / file_name)
        for name in names:
            if name not in header:
                raise InputError(f"{folder / file_name}: lacks tensor {name!r}, which {INDEX_NAME} puts there")
        for name, source in header.items():
            if name in stored:
                raise InputError(f"{source.file}: tensor {name!r} is in {stored[name].file.name} too")
            stored[name] = source
    return stored


def initialise(
    model: ModelSpec,
    config: Mapping[str, Any],
    states: Sequence[BlockState],
    *,
    seed: int,
    device: torch.device | None = None,
) -> None:
    """Random weights as transformers draws them: matrices from N(0, initializer_range), norms 1, biases 0.

    Where the family's table says so, norms start at another value and the matrices that end a residual branch smaller.

    `states` come zeroed. Every value is a function of (seed, block, position) alone, so neither placement nor the
    number of cores changes it. They are drawn on `device`: a GPU draws other values than a CPU, and billions of them in
    seconds. The embedding of the padding token, if the config names one, is zero.
    """
    hf_config = transformers_config(dict(config))
    family = FAMILIES[model.family]
    deviation = float(getattr(hf_config, "initializer_range", None) or 0.02)
    smaller = (2 * model.num_layers) ** -0.5
    write = state_sink(states)
    pieces = []
    on_gpu = device is not None and device.type == "cuda"
    piece_elements = _PIECE_ON_GPU if on_gpu else _RANDOM_PIECE
    for index in range(model.num_blocks):
        for position, tensor in enumerate(model.block(index).tensors):
            if len(tensor.shape) > 1:
                firsts = range(0, tensor.num_elements, piece_elements)
                pieces += [(index, position, tensor, first) for first in firsts]
            elif not tensor.name.endswith("bias"):
                write(index, tensor, 0, torch.full((tensor.num_elements,), family.norms_start_at))

    def draw(piece: _Piece) -> torch.Tensor:
        index, position, tensor, first = piece
        sequence = np.random.SeedSequence([seed, index, position, first])
        num_elements = min(piece_elements, tensor.num_elements - first)
        scale = deviation * smaller if tensor.name in family.small_residuals else deviation
        if on_gpu:
            key = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
            drawn = torch.empty(num_elements, device=device)
            return drawn.normal_(0.0, scale, generator=torch.Generator(device).manual_seed(key))
        generator = np.random.Generator(np.random.SFC64(sequence))
        values = generator.standard_normal(num_elements, dtype=np.float32)
        values *= np.float32(scale)
        return torch.from_numpy(values)

    # What is drawn and not yet written fits into what the plan allows for loading.
    most = max(1, transit_bytes(model) // (4 * _RANDOM_PIECE))
    drawn_pieces = ((piece, draw(piece)) for piece in pieces) if on_gpu else _in_order(draw, pieces, most)
    for (index, _, tensor, first), values in drawn_pieces:
        write(index, tensor, first, values)
    padding = getattr(hf_config, "pad_token_id", None)
    if family.padding_starts_at_zero and padding is not None and 0 <= padding < model.vocab_size:
        write(0, model.embedding, padding * model.hidden_size, torch.zeros(model.hidden_size))


def _in_order(
    draw: Callable[[_Piece], torch.Tensor], pieces: Sequence[_Piece], most: int
) -> Iterator[tuple[_Piece, torch.Tensor]]:
    """Draw pieces on all cores, at most `most` ahead: the drawn and unwritten ones are all the memory it takes."""
    num_threads = len(sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as pool:
        ahead: deque[tuple[_Piece, Future[torch.Tensor]]] = deque()
        for piece in pieces:
            if len(ahead) == min(2 * num_threads, most):
                drawn, future = ahead.popleft()
                yield drawn, future.result()
            ahead.append((piece, pool.submit(draw, piece)))
        for drawn, future in ahead:
            yield drawn, future.result()


def export_bytes(model: ModelSpec, precision: Precision) -> int:
    """Bytes on disk of an exported folder, tokenizer aside."""
    return model.num_parameters * PRECISIONS[precision].weight


def export(
    folder: Path | str,
    *,
    model: ModelSpec,
    config: Mapping[str, Any],
    states: Sequence[BlockState],
    source: Path | str | None = None,
    save_tokenizer: Callable[[Path], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads: the weights the run computes with.

    bf16 runs write bf16 (the high planes), fp32 runs fp32. Tied weights are written once. Tokenizer and generation
    files are copied from the folder `source`, unless the run used another tokenizer: `save_tokenizer` then writes it
    into the folder it is given. The folder appears whole or not at all; one that an earlier export wrote is replaced,
    any other must be empty.

    Raises InputError when the folder is in use, ConveyorError when the disk is too small or refuses.
    """
    folder = Path(folder)
    if source is not None and folder.resolve() == Path(source).resolve():
        raise InputError(f"{folder}: is the folder of the model that was trained; export to another one")
    if folder.exists() and not is_exported(folder):
        raise InputError(f"{folder}: exists and holds other files than a model; export to another folder")
    precision = states[0].precision
    require_free_disk(folder, export_bytes(model, precision) + ROOM_BYTES, what="the exported model")
    try:
        with appearing_folder(folder) as partial:
            if save_tokenizer is not None:
                save_tokenizer(partial)
            elif source is not None:
                for name in COPIED_FILES:
                    if (Path(source) / name).is_file():
                        shutil.copyfile(Path(source) / name, partial / name)
            text = json.dumps(_exported_config(model, config, precision), indent=2)
            (partial / "config.json").write_text(text + "\n")
            _write_shards(partial, model, states, max_shard_bytes)
    except OSError as error:
        refused = disk_refused(folder, error, what="the exported model", num_bytes=export_bytes(model, precision))
        raise ConveyorError(f"{refused}; the checkpoints are whole: go on with resume=auto") from error
    return folder


def _exported_config(model: ModelSpec, config: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    dtype = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[precision]
    exported = {key: value for key, value in config.items() if key != "torch_dtype"}  # the old name of dtype
    exported.update(
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.family]],
        tie_word_embeddings=model.tied_embeddings,
        dtype=dtype,
    )
    return exported


def _write_shards(folder: Path, model: ModelSpec, states: Sequence[BlockState], max_shard_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = total_bytes = 0
    for index in range(model.num_blocks):
        for tensor in model.block(index).tensors:
            view = tensor_view(states[index].weights, tensor)
            num_bytes = view.numel() * view.element_size()
            if shards[-1] and shard_bytes + num_bytes > max_shard_bytes:
                shards.append({})
                shard_bytes = 0
            shards[-1][model.block_prefix(index) + tensor.name] = view
            shard_bytes += num_bytes
            total_bytes += num_bytes
    if len(shards) == 1:
        write_shard(folder / WEIGHTS_NAME, shards[0], metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / name, shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    metadata = {"total_size": total_bytes, "total_parameters": model.num_parameters}
    index_text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
    (folder / INDEX_NAME).write_text(index_text + "\n")


def is_exported(folder: Path) -> bool:
    """Whether a folder holds nothing but what `export` writes."""
    patterns = ("config.json", INDEX_NAME, WEIGHTS_NAME, "model-*-of-*.safetensors", *COPIED_FILES)
    return folder.is_dir() and all(
        any(fnmatch(entry.name, pattern) for pattern in patterns) for entry in folder.iterdir()
    )
