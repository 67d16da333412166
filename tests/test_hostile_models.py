"""Model folders that are not what they say: found before a plan is made, and never trained as another model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import save_pretrained, tiny_config, tiny_spec
from tiny_tokenizer import byte_level_folder

from executor.huggingface import require_weights
from executor.shard import read_header
from executor.tokenizer import open_tokenizer
from simulator.errors import InputError

RUN = ["hardware=cpu-2-core", "sequence_length=16", "tokens_per_step=64", "precision=fp32", "max_steps=1"]


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}, path)


def test_wrong_weights_are_found_before_a_plan_is_made(given, tmp_path, complaint):
    model = shutil.copytree(given / "model", tmp_path / "model")
    (model / "model.safetensors").write_bytes((given / "model" / "model.safetensors").read_bytes()[:-100])
    run = ["train", f"model={model}", f"data={given / 'data.txt'}", f"output={tmp_path / 'run'}", *RUN]
    assert "model.safetensors: is cut off: tensor" in complaint(*run)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path, family):
    """transformers does not tie these two: trained as tied it would be another model."""
    save_pretrained(tiny_config(family, tied=True), tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    spec = tiny_spec(family=family, tied=True)
    require_weights(tmp_path, spec)
    change_weights(tmp_path, lm_head__weight=embedding.clone())
    require_weights(tmp_path, spec)
    embedding[-1, -1] += 1e-3
    change_weights(tmp_path, lm_head__weight=embedding)
    with pytest.raises(InputError, match=r"model\.safetensors: tensor 'lm_head\.weight' differs .*tie_word_embeddings"):
        require_weights(tmp_path, spec)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3)}, path)
    assert set(read_header(path)) == {"a"}
    path.write_bytes(path.read_bytes() + b"and more")
    with pytest.raises(InputError, match=r"x\.safetensors: is damaged: 8 bytes follow its last tensor, 'a'"):
        read_header(path)


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path, kind):
    """transformers opens it, and every text becomes nothing, or unknown tokens only."""
    byte_level_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": kind}))
    with pytest.raises(InputError, match=r"its tokenizer (has no vocabulary, of the files|cannot be read)"):
        open_tokenizer(tmp_path, vocab_size=320)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "sylu"}, "hidden_act is 'sylu', which transformers does not know; did you mean 'silu'?"),
        (
            {"rope_scaling": {"rope_type": "yarnn", "factor": 2.0}},
            "rope_type is 'yarnn', which transformers does not know; did you mean 'yarn'?",
        ),
    ],
)
def test_functions_that_transformers_does_not_know_are_named(changes, reason):
    with pytest.raises(InputError) as refused:
        tiny_spec(**changes)
    assert str(refused.value) == f"model config: {reason}"


def test_what_transformers_only_finds_when_it_writes_a_config_is_a_sentence():
    with pytest.raises(InputError, match="model config: transformers refuses it"):
        tiny_spec(dtype=["full_attention"])
