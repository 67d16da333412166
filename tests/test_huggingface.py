import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import logits, save_pretrained, tiny_config, tiny_spec, transformers_model, zero_states
from transformers import AutoModelForCausalLM, AutoTokenizer

from executor.huggingface import export, has_weights, initialise, load_weights, state_sink
from executor.planes import merge_planes
from executor.store import tensor_view, zero_state
from executor.tokenizer import ByteTokenizer
from simulator.errors import InputError
from simulator.model import model_spec

FOREIGN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def master(model, states) -> dict[str, torch.Tensor]:
    """Every tensor's master value by its transformers name."""
    values = {}
    for index, state in enumerate(states):
        plane = state.weights if state.low is None else merge_planes(state.weights, state.low)
        for tensor in model.block(index).tensors:
            values[model.block_prefix(index) + tensor.name] = tensor_view(plane, tensor)
    return values


def loaded(folder, model, precision):
    states = zero_states(model, precision)
    load_weights(folder, model, state_sink(states))
    return states


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_loaded_master_is_the_source_bit_for_bit(tmp_path, tied, source, precision):
    config = tiny_config(tied=tied)
    reference = save_pretrained(config, tmp_path, dtype=FOREIGN_DTYPES[source])
    model = model_spec(config)
    values = master(model, loaded(tmp_path, model, precision))
    expected = dict(reference.named_parameters())
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


def test_padding_between_tensors_stays_zero(tmp_path):
    config = tiny_config()
    save_pretrained(config, tmp_path)
    model = model_spec(config)
    for index, state in enumerate(loaded(tmp_path, model, "bf16")):
        covered = torch.zeros(state.weights.numel(), dtype=torch.bool)
        for tensor in model.block(index).tensors:
            tensor_view(covered, tensor).fill_(True)
        assert not covered.all()
        assert not state.weights[~covered].any()
        assert not state.low[~covered].any()


def test_sharded_and_single_folders_load_the_same(tmp_path):
    config = tiny_config()
    save_pretrained(config, tmp_path / "single")
    save_pretrained(config, tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    model = model_spec(config)
    single, sharded = (master(model, loaded(tmp_path / name, model, "fp32")) for name in ("single", "sharded"))
    assert all(torch.equal(single[name], sharded[name]) for name in single)


@pytest.fixture
def sharded(tmp_path):
    """A sharded folder: (folder, model, index path, the map from tensor to shard)."""
    config = tiny_config()
    save_pretrained(config, tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    return tmp_path, model_spec(config), index, json.loads(index.read_text())["weight_map"]


def refusal(folder, model) -> str:
    """The message of the refusal, which comes before any value is written."""

    def sink(*_) -> None:
        raise AssertionError("a value was written")

    with pytest.raises(InputError) as error:
        load_weights(folder, model, sink)
    return str(error.value)


def test_missing_shard_is_refused_with_file_and_tensor(sharded):
    folder, model, index, weight_map = sharded
    name = "model.layers.1.mlp.up_proj.weight"
    (folder / weight_map[name]).unlink()
    message = refusal(folder, model)
    assert str(index) in message
    assert weight_map[name] in message
    assert any(tensor in message for tensor, file in weight_map.items() if file == weight_map[name])


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_truncated_shard_is_refused_with_its_file(sharded, kept):
    folder, model, _, weight_map = sharded
    shard = folder / weight_map["model.layers.1.mlp.up_proj.weight"]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    message = refusal(folder, model)
    assert str(shard) in message
    assert "cut off" in message
    if kept in (0.5, -1):
        assert any(repr(tensor) in message for tensor, file in weight_map.items() if file == shard.name)


def test_index_that_puts_a_tensor_in_the_wrong_shard_is_refused(sharded):
    folder, model, index, weight_map = sharded
    other = next(file for file in weight_map.values() if file != weight_map["model.norm.weight"])
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": other}}))
    assert refusal(folder, model).startswith(f"{folder / other}: lacks tensor 'model.norm.weight'")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index_is_refused(sharded, text):
    folder, model, index, _ = sharded
    index.write_text(text)
    assert refusal(folder, model).startswith(f"{index}: is not a safetensors index")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"), "lack tensor 'model.layers.0.mlp.up_proj."),
        (lambda tensors: tensors.pop("lm_head.weight"), "lack tensor 'lm_head.weight'"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(25)}), "'model.norm.weight' has shape [25]"),
        (lambda tensors: tensors.update({"score.weight": torch.ones(2)}), "'score.weight' is not part of the model"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)}),
            "'model.norm.weight' is I8",
        ),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(tmp_path, change, expected):
    config = tiny_config()
    save_pretrained(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path, model_spec(config))
    assert expected in message
    assert str(tmp_path) in message


def test_lm_head_of_a_tied_model_is_ignored(tmp_path):
    config = tiny_config(tied=True)
    save_pretrained(config, tmp_path)
    model = model_spec(config)
    before = master(model, loaded(tmp_path, model, "fp32"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    inverse_frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file(tensors | {"lm_head.weight": torch.ones(301, 24)} | inverse_frequencies, tmp_path / "model.safetensors")
    after = master(model, loaded(tmp_path, model, "fp32"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_folders_without_safetensors_are_refused(tmp_path):
    model = tiny_spec()
    assert "has no weights" in refusal(tmp_path, model)
    (tmp_path / "training_args.bin").touch()
    assert not has_weights(tmp_path)
    assert "is a file" in refusal(tmp_path / "training_args.bin", model)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "save_pretrained" in refusal(tmp_path, model)
    assert has_weights(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(tmp_path, model)
    assert f"did you mean {tmp_path}?" in refusal(tmp_path.with_name(tmp_path.name + "x"), model)


def test_loading_needs_no_second_copy_of_the_model(tmp_path):
    """In a process of its own: the peak above the states is a few pieces, not the 88 MB of weights."""
    config = tiny_config(hidden_size=512, intermediate_size=2048, vocab_size=20_000, head_dim=64)
    save_pretrained(config, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 80e6
    code = """
import re, sys
from pathlib import Path
import executor.shard
from executor.huggingface import load_weights, state_sink
from executor.store import BlockLayout, HostStore
from simulator.model import load_model_spec
executor.shard.PIECE_BYTES = 2**20
model = load_model_spec(sys.argv[1])
layouts = [BlockLayout(("weights", "low"))] * model.num_blocks
store = HostStore(model, layouts, precision="bf16", gradient_format="bf16", pinning=None)
class Weights:  # moments are of no interest here
    def __init__(self, i): self.weights, self.low = store.plane(i, "weights"), store.plane(i, "low")
def status(key): return int(re.findall(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
load_weights(sys.argv[1], model, state_sink([Weights(i) for i in range(model.num_blocks)]))
print(status("VmHWM") - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert int(result.stdout) < 16_000  # KiB


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_initial_weights_are_distributed_as_transformers_draws_them(precision):
    config = tiny_config(hidden_size=192, head_dim=48, intermediate_size=700, initializer_range=0.05, pad_token_id=7)
    model = model_spec(config)
    states = zero_states(model, precision)
    initialise(model, config, states, seed=1)
    values = master(model, states)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(transformers_model(config).config)
    for name, expected in reference.named_parameters():
        value = values[name]
        if expected.dim() == 1:
            assert torch.equal(value, expected), name
        else:
            assert value.std().item() == pytest.approx(expected.std().item(), rel=0.03), name
            assert value.mean().abs() < 5 * 0.05 / value.numel() ** 0.5, name
    assert not values["model.embed_tokens.weight"][7].any()
    matrices = [value.flatten()[:4096] for value in values.values() if value.dim() > 1]
    correlations = torch.corrcoef(torch.stack(matrices)) - torch.eye(len(matrices))
    assert correlations.abs().max() < 0.1


def test_initial_weights_depend_on_the_seed_alone(monkeypatch):
    config = tiny_config()
    model = model_spec(config)

    def drawn(seed):
        states = zero_states(model, "fp32")
        initialise(model, config, states, seed=seed)
        return torch.cat([state.weights for state in states])

    first = drawn(1)
    monkeypatch.setattr("executor.huggingface.sched_getaffinity", lambda _: set(range(7)))
    assert torch.equal(drawn(1), first)
    assert (drawn(2) != first).float().mean() > 0.8


@pytest.mark.gpu
def test_a_gpu_draws_the_same_weights_for_every_home():
    config = tiny_config(hidden_size=192, head_dim=48, intermediate_size=700, initializer_range=0.05)
    model = model_spec(config)
    device = torch.device("cuda", 0)
    on_host = zero_states(model, "bf16")
    on_device = [zero_state(model.block(block), precision="bf16", device=device) for block in range(model.num_blocks)]
    for states in (on_host, on_device):
        initialise(model, config, states, seed=1, device=device)
    here, there = master(model, on_host), master(model, on_device)
    for name, value in here.items():
        assert torch.equal(value, there[name].cpu()), name
        if value.dim() > 1:
            assert value.std().item() == pytest.approx(0.05, rel=0.03), name


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_filling_state_takes_little_of_a_gpu(home):
    config = tiny_config(vocab_size=80_000, hidden_size=1024, head_dim=256, intermediate_size=1024)
    model, device = model_spec(config), torch.device("cuda", 0)
    states = [
        zero_state(model.block(block), precision="bf16", device=torch.device(home)) for block in range(model.num_blocks)
    ]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    initialise(model, config, states, seed=1, device=device)
    assert torch.cuda.max_memory_reserved(device) - before < 128 * 2**20  # the embedding has 312 MiB in fp32


def test_values_are_split_into_planes_in_pieces(monkeypatch):
    model = model_spec(tiny_config())
    whole, pieces = zero_states(model, "bf16"), zero_states(model, "bf16")
    values = torch.randn(model.embedding.num_elements, generator=torch.Generator().manual_seed(1))
    state_sink(whole)(0, model.embedding, 0, values)
    monkeypatch.setattr("executor.huggingface._PIECE_ON_GPU", 777)
    state_sink(pieces)(0, model.embedding, 0, values)
    assert torch.equal(pieces[0].weights, whole[0].weights)
    assert torch.equal(pieces[0].low, whole[0].low)
    assert torch.equal(master(model, pieces)["model.embed_tokens.weight"].flatten(), values)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_exported_folder_gives_the_same_logits_in_transformers(tmp_path, family, tied):
    config = tiny_config(family, tied=tied)
    reference = save_pretrained(config, tmp_path / "source")
    model = model_spec(config)
    states = loaded(tmp_path / "source", model, "fp32")
    export(tmp_path / "out", model=model, config=config, states=states, max_shard_bytes=9000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    names = Counter(name for shard in shards for name in load_file(tmp_path / "out" / shard))
    assert ("lm_head.weight" in names) == (not tied)
    assert max(names.values()) == 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.float32
    assert torch.equal(logits(exported), logits(reference))


def test_bf16_run_exports_the_weights_it_computes_with(tmp_path):
    config = tiny_config(tied=True) | {"torch_dtype": "float32"}
    save_pretrained(tiny_config(tied=True), tmp_path / "source")
    model = model_spec(config)
    states = loaded(tmp_path / "source", model, "bf16")
    export(tmp_path / "out", model=model, config=config, states=states)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    assert exported.config.tie_word_embeddings
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(value.nbytes for value in written.values()) == 2 * model.num_parameters
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    for index, state in enumerate(states):
        for tensor in model.block(index).tensors:
            computed = tensor_view(state.weights, tensor)
            assert torch.equal(exported.get_parameter(model.block_prefix(index) + tensor.name), computed)


def test_export_carries_the_tokenizer_and_replaces_only_exports(tmp_path):
    config = tiny_config()
    save_pretrained(config, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "notes.txt").write_text("mine")
    model = model_spec(config)
    states = loaded(tmp_path / "source", model, "fp32")
    choices = {"model": model, "config": config, "states": states, "source": tmp_path / "source"}
    out = tmp_path / "out"
    export(out, **choices, max_shard_bytes=9000)
    export(out, **choices)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}

    # A run on bytes brings its own tokenizer: the source's would give other ids.
    export(out, **choices, save_tokenizer=ByteTokenizer(301).save)
    assert AutoTokenizer.from_pretrained(out)("hi")["input_ids"] == [*b"hi"]
    assert not (out / "generation_config.json").exists()
    export(out, **choices)

    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="holds other files"):
        export(out, **choices)
    with pytest.raises(InputError, match="the model that was trained"):
        export(tmp_path / "source", **choices)
    assert (out / "thesis.tex").exists()


def test_failed_export_leaves_the_earlier_one(tmp_path, monkeypatch):
    config = tiny_config()
    model = model_spec(config)
    states = zero_states(model, "fp32")
    initialise(model, config, states, seed=0)
    out = export(tmp_path / "out", model=model, config=config, states=states)
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr("executor.huggingface.write_shard", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(tmp_path / "out", model=model, config=config, states=states)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_export_to_a_full_disk_is_refused_first(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    model = tiny_spec()
    with pytest.raises(Exception, match=r"disk short by .*: the exported model needs \d+ bytes"):
        export(tmp_path / "out", model=model, config=tiny_config(), states=zero_states(model, "fp32"))
    assert not list(tmp_path.iterdir())
