"""Each family end to end on the CPU: steps equal transformers' own model, folders go out and in, plans are made."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_FAMILIES, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from analysis.cli import main
from executor.huggingface import export, initialise, load_weights, state_sink
from executor.measure import measure, shallow
from executor.store import BlockState, tensor_view, zero_state
from planner.search import plan
from simulator.costs import shape_hash
from simulator.errors import InputError, UnsupportedChoice
from simulator.families import FAMILIES, markdown_table
from simulator.hardware import load_hardware
from simulator.model import ModelSpec, model_spec
from simulator.policy import Policy, Workload, uniform_policy
from tests.plain_trainer import plain_train
from tests.tiny import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    ROWS,
    SEQUENCE,
    WEIGHT_DECAY,
    make_trainer,
    master_weights,
    random_weights,
    run_steps,
    state_bits,
    tiny_batches,
)

ROOT = Path(__file__).parents[1]
MAX_GRAD_NORM = 0.5


def workload(**changes: Any) -> Workload:
    settings = {"sequence_length": SEQUENCE, "tokens_per_step": ROWS * SEQUENCE, "precision": "fp32", **changes}
    return Workload.model_validate(settings)


def policies(config: dict[str, Any], work: Workload) -> dict[str, Policy]:
    """Policies that share sizes alone, with both save levels: all kept in HBM, all streamed, and a mix of the two."""
    model = model_spec(config)

    def uniform(**choices: Any) -> Policy:
        return uniform_policy(model, work, **{"micro_batch_rows": 2, "head_chunk_tokens": 10, **choices})

    streamed: dict[str, Any] = {"weights": "host", "optimizer": "host"}
    return {
        "kept": uniform(groups=(1, 1, 1)),
        "streamed": uniform(groups=(2, 1), save_level="input", checkpoint_interval=2, **streamed),
        "mixed levels, the upper layer depth-first": uniform(
            groups=(1, 2), depth_first_layers=1, **streamed
        ).model_copy(update={"save_levels": ("input", "keep")}),
    }


def test_every_family_of_the_table_has_a_tiny_config() -> None:
    assert set(TINY_FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_steps_equal_transformers_with_plain_autograd(family: str, tied: bool) -> None:
    config, work = tiny_config(family, tied=tied), workload()
    weights, batches = random_weights(config, torch.float32), tiny_batches(2)
    plain = plain_train(
        config, weights, [(b.tokens, b.labels) for b in batches], micro_batch_rows=2, learning_rate=LEARNING_RATE,
        betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, dtype=torch.float32,
    )  # fmt: skip
    expected: tuple[Any, list[torch.Tensor]] | None = None
    for title, policy in policies(config, work).items():
        trainer = make_trainer(config, work, policy, weights, max_grad_norm=MAX_GRAD_NORM)
        results = run_steps(trainer, batches)
        found = ([(r.loss, r.gradient_norm) for r in results], state_bits(trainer))
        trained = master_weights(trainer)
        trainer.close()
        if expected is not None:
            assert found[0] == expected[0], title
            assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True)), title
            continue
        expected = found
        for step, result in enumerate(results):
            assert result.loss == pytest.approx(plain.losses[step], rel=2e-6)
            assert result.gradient_norm == pytest.approx(plain.norms[step], rel=1e-5)
        assert set(trained) == set(plain.weights)
        for name, weight in plain.weights.items():
            moved = (weight - weights[name]).norm()
            # Softmax ignores what is added to all keys alike: the gradient of keys' biases is rounding, and Adam moves
            # a weight by about the rate whatever the size of its gradient.
            tolerance = 0.2 if name.endswith(("k_proj.bias", "c_attn.bias")) else 1e-3
            assert (trained[name] - weight).norm() <= tolerance * moved, name


@pytest.mark.slow  # 124 M parameters, three times
def test_a_streamed_step_of_gpt_2_in_its_published_size_equals_transformers() -> None:
    config: dict[str, Any] = {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": True, "use_cache": False,
    }  # fmt: skip
    work = workload(micro_batch_rows=2)
    assert model_spec(config).num_parameters == 124_439_808
    weights, batches = random_weights(config, torch.float32), tiny_batches(1)
    plain = plain_train(
        config, weights, [(b.tokens, b.labels) for b in batches], micro_batch_rows=2, learning_rate=LEARNING_RATE,
        betas=BETAS, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, dtype=torch.float32,
    )  # fmt: skip
    policy = uniform_policy(
        model_spec(config), work, micro_batch_rows=2, groups=(2, 1), weights="host", optimizer="host",
        save_level="input", checkpoint_interval=2,
    )  # fmt: skip
    trainer = make_trainer(config, work, policy, weights, max_grad_norm=MAX_GRAD_NORM)
    (result,) = run_steps(trainer, batches)
    trained = master_weights(trainer)
    trainer.close()
    assert result.loss == pytest.approx(plain.losses[0], rel=1e-6)
    # torch sums the squares of the embedding's 38 M elements in fp32, we in fp64: they differ by parts in 10,000.
    assert result.gradient_norm == pytest.approx(plain.norms[0], rel=5e-4)
    moved = sum(float((plain.weights[name] - weights[name]).double().square().sum()) for name in weights)
    apart = sum(float((plain.weights[name] - trained[name]).double().square().sum()) for name in weights)
    assert apart <= (1e-2**2) * moved


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_folders_go_out_and_in_with_the_same_logits(family: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(family, tied=tied)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.3)
    reference.eval().save_pretrained(tmp_path / "source")
    model = model_spec(json.loads((tmp_path / "source/config.json").read_text()))
    states = _zero_states(model)
    load_weights(tmp_path / "source", model, state_sink(states))
    export(tmp_path / "out", model=model, config=config, states=states, max_shard_bytes=9000)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(24).reshape(2, 12) * 7 % 61
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, reference(tokens).logits)
    assert type(exported) is type(reference)
    assert exported.config.tie_word_embeddings == tied


def _zero_states(model: ModelSpec) -> list[BlockState]:
    return [zero_state(model.block(block), precision="fp32", device="cpu") for block in range(model.num_blocks)]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_drawn_as_transformers_draws_them(family: str) -> None:
    """Norms, biases and the padding token's row are equal, matrices have the same spread."""
    config = tiny_config(family, pad_token_id=5)
    config |= {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64}
    model = model_spec(config)
    states = _zero_states(model)
    initialise(model, config, states, seed=0)
    reference = dict(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).named_parameters())
    for block, state in enumerate(states):
        for tensor in model.block(block).tensors:
            name = model.block_prefix(block) + tensor.name
            ours, theirs = tensor_view(state.weights, tensor), reference[name].detach()
            if ours.dim() == 1:
                assert torch.equal(ours, theirs), name
            else:
                assert float(ours.std() / theirs.std()) == pytest.approx(1.0, abs=0.15), name
    embedding = tensor_view(states[0].weights, model.embedding)
    name = model.block_prefix(0) + model.embedding.name
    assert bool(embedding[5].any()) == bool(reference[name][5].any())


# Those with several kinds of layers, and one for each way to attend; the others take a second each.
MEASURED = ("gemma2", "gemma3_text", "gpt2", "llama", "mistral", "olmo3", "smollm3")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in MEASURED else pytest.mark.slow) for family in FAMILIES]
)
def test_every_kind_of_layer_is_measured_and_the_plan_runs_on_it(family: str) -> None:
    config = tiny_config(family)
    hardware = load_hardware("cpu-2-core")
    work = workload(tokens_per_step=2 * SEQUENCE, micro_batch_rows=1)
    costs = measure(config, hardware, work, micro_batch_rows=(1,), device=torch.device("cpu"), levels=("input",))
    model = model_spec(config)
    variants = {model.block(block).variant for block in model.layers}
    for variant in variants:
        assert f"forward.layer.{variant}.input.1x{SEQUENCE}" in costs.entries
    planned = plan(model, work, hardware, costs=costs, with_baselines=False)
    assert planned.price_shares["measured"] > 0
    assert planned.prediction.step_seconds > 0


def test_a_shallow_model_has_every_kind_of_layer_in_the_same_order() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 3
    config = tiny_config("gemma3_text", num_hidden_layers=9, layer_types=types)
    cut = shallow(config)
    assert cut["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert shape_hash(model_spec(cut)) == shape_hash(model_spec(config))
    assert model_spec(shallow(tiny_config("gpt2", n_layer=7))).num_layers == 3
    rotates = [1, 1, 1, 0] * 2
    config = tiny_config(
        "smollm3", num_hidden_layers=8, no_rope_layers=rotates, use_sliding_window=False, layer_types=None
    )
    model, cut = model_spec(config), model_spec(shallow(config))
    assert {model.block(block).variant for block in model.layers} == {
        "full_attention",
        "full_attention_without_rotary",
    }
    assert (cut.num_layers, cut.kinds) == (3, model.kinds)


# Published configs, shortened to what decides shapes and attention, with the published number of parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], int, set[tuple[str, int | None]]]] = {
    "gpt2": (
        {"model_type": "gpt2", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        124_439_808,
        {("full_attention", None)},
    ),
    "gemma-2-9b": (
        {
            "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
            "sliding_window": 4096,
        },
        9_241_705_984,
        {("sliding_attention", 4096), ("full_attention", None)},
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
            "sliding_window": 512,
        },
        999_885_952,
        {("sliding_attention", 512), ("full_attention", None)},
    ),
    "phi-3-mini": (
        {
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 2047,
        },
        3_821_079_552,
        {("sliding_attention", 2047)},
    ),
    "smollm3-3b": (
        {
            "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "tie_word_embeddings": True,
        },
        3_075_098_624,
        {("full_attention", None), ("full_attention_without_rotary", None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters_and_kinds_and_plan_on_a_gpu(name: str) -> None:
    config, num_parameters, kinds = PUBLISHED[name]
    model = model_spec(config)
    assert model.num_parameters == num_parameters
    assert {(model.block(block).variant, model.block(block).window) for block in model.layers} == kinds
    length = 1024 if name == "gpt2" else 4096
    work = Workload(sequence_length=length, tokens_per_step=8 * length, compiled=True, micro_batch_rows=2)
    planned = plan(model, work, load_hardware("h200"), with_baselines=False)
    assert planned.prediction.step_seconds > 0
    assert 0 <= planned.bound.gap < 0.2


def test_more_positions_than_were_learned_are_refused_when_planning() -> None:
    model = model_spec(tiny_config("gpt2"))
    with pytest.raises(InputError, match="65 is more than the 64 positions that the model has learned"):
        plan(model, Workload(sequence_length=65, tokens_per_step=65), load_hardware("cpu-2-core"))


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedChoice) as error:
        model_spec(config)
    return str(error.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mixtral", "mixtures of experts"),
        ("qwen3_moe", "mixtures of experts"),
        ("deepseek_v3", "mixtures of experts"),
        ("gpt_oss", "mixtures of experts"),
        ("mamba2", "recurrent"),
        ("jamba", "recurrent|experts"),
        ("recurrent_gemma", "recurrent"),
        ("lfm2", "recurrent"),
        ("t5", "encoder and a decoder"),
        ("bart", "encoder and a decoder"),
        ("qwen2_vl", "more than text"),
        ("gemma3", "'gemma3_text'"),
        ("whisper", "encoder and a decoder"),
        ("vit", "no causal language model"),
        ("opt", "no test compares it"),
        ("made_up", "transformers does not know it"),
    ],
)
def test_other_models_are_refused_with_the_reason(model_type: str, reason: str) -> None:
    message = refused({"model_type": model_type})
    assert repr(model_type) in message
    assert any(part in message for part in reason.split("|")), message


def test_remote_code_is_refused_as_such() -> None:
    message = refused({"model_type": "my_decoder", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}})
    assert "its own repository, which is never run" in message


def test_every_other_model_type_of_transformers_is_refused_in_one_sentence() -> None:
    others = [name for name in CONFIG_MAPPING_NAMES if name not in FAMILIES]
    assert len(others) > 100
    for name in others:
        message = refused({"model_type": name})
        assert repr(name) in message
        assert ", ".join(sorted(FAMILIES)) in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (tiny_config("gpt2", attn_pdrop=0.1, resid_pdrop=0.2), "attn_pdrop is 0.1; dropout|resid_pdrop is 0.2"),
        (tiny_config("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx makes every"),
        (tiny_config("gpt2", add_cross_attention=True), "add_cross_attention"),
        (tiny_config("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention lets tokens"),
        (tiny_config("phi3", resid_pdrop=0.1), "resid_pdrop is 0.1"),
        (tiny_config("mistral", sliding_window=0), "sliding_window is 0"),
        (tiny_config("gpt2", n_layer=0), "n_layer is 0"),
    ],
)
def test_options_that_no_layer_applies_are_refused_by_key(config: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        model_spec(config)
    assert any(part in str(error.value) for part in told.split("|"))


@pytest.mark.parametrize("capped", [False, True])
def test_the_flops_of_a_window_are_its_pairs(capped: bool) -> None:
    """Against a count of pairs: the formula leaves out half of the diagonal, as it does without a window."""
    from simulator.formulas import layer_attention_flops

    model = model_spec(tiny_config("gemma2" if capped else "mistral"))
    for length in (3, 5, 7, 40):
        for block in model.layers:
            window = model.block(block).window or length
            pairs = sum(min(query + 1, window) for query in range(length))
            exact = 4 * model.num_heads * model.head_dim * 2 * pairs
            counted = layer_attention_flops(model, block, 2, length)
            assert math.isclose(counted, exact, rel_tol=1 / min(window, length))


def test_the_table_in_the_docs_is_the_codes() -> None:
    text = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert markdown_table() in text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_commands_plan_and_replay_every_family(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family)))
    file = str(tmp_path / "plan.json")
    made = ["plan", "--model", str(tmp_path), "--hardware", "cpu-2-core", "--precision", "fp32", "--output", file]
    assert main([*made, "--sequence-length", "16", "--tokens-per-step", "64"]) == 0
    assert main(["simulate", file]) == 0


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "smollm3"])
def test_layers_of_several_kinds_train_end_to_end_into_a_folder(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family, vocab_size=257)))
    (tmp_path / "data.txt").write_text("one two three four five six seven eight nine ten. " * 40)
    settings = {
        "model": tmp_path, "data": tmp_path / "data.txt", "output": tmp_path / "run", "sequence_length": 16,
        "tokens_per_step": 64, "precision": "fp32", "max_steps": 12, "learning_rate": 3e-3,
        "hardware": "cpu-2-core", "warmup_steps": 1,
    }  # fmt: skip
    assert main(["train", *(f"{key}={value}" for key, value in settings.items())]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert trained.config.model_type == family
