"""The deepest model and the longest sequence: they fit, the next do not; and the questions through the front door."""

import csv
from pathlib import Path
from typing import Any

import pytest
from front_door import WORKLOAD
from planning_cases import machine, toy_model

from analysis.cli import main
from analysis.questions import grown, progress_lines, said_after_a_while
from planner import extent
from planner.extent import SEQUENCE_STEP, largest_model, longest_sequence
from planner.plan import Limits
from planner.task import Task
from simulator.errors import InfeasiblePlan, InputError
from simulator.model import ModelSpec, model_spec
from simulator.policy import Workload

MIB = 2**20
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
# Every second layer attends within a window.
GEMMA = {
    "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def deep(num_layers: int) -> ModelSpec:
    return toy_model(num_layers, layer_elements=128 * 12_000, edge_elements=128 * 800)


def task(device_mib: int = 60, host_mib: int = 300, **workload: Any) -> Task:
    wanted = {"sequence_length": 1024, "tokens_per_step": 4096, "micro_batch_rows": 2, **workload}
    limits = Limits(device_memory_bytes=device_mib * MIB, host_memory_bytes=host_mib * MIB)
    return Task(deep(4), Workload.model_validate(wanted), machine(), limits)


@pytest.mark.parametrize(("device_mib", "host_mib"), [(60, 300)])
def test_the_largest_model_fits_and_one_layer_more_does_not(device_mib: int, host_mib: int) -> None:
    asked = task(device_mib, host_mib)
    found = largest_model(asked, deep)
    assert found.size > 4
    assert found.plan.model == deep(found.size)
    assert found.plan.prediction.device_peak_bytes <= device_mib * MIB
    assert found.plan.prediction.host_peak_bytes <= host_mib * MIB
    assert asked.with_model(deep(found.size)).plan().prediction == found.plan.prediction
    assert found.too_large == found.size + 1
    with pytest.raises(InfeasiblePlan):
        asked.with_model(deep(found.size + 1)).plan()


@pytest.mark.slow
def test_a_model_that_is_too_deep_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = task()
    whole = largest_model(asked, deep).size
    deeper = asked.with_model(deep(3 * whole))
    assert largest_model(deeper, deep).size == whole
    monkeypatch.setattr(extent, "MAX_LAYERS", whole - 1)  # where the search ends before the machine does
    ended = largest_model(asked, deep)
    assert (ended.size, ended.too_large) == (whole - 1, None)


def test_where_not_one_layer_fits_it_is_said_why() -> None:
    with pytest.raises(InfeasiblePlan, match=r"device memory is short by .* it would fit with"):
        largest_model(task(device_mib=8), deep)
    with pytest.raises(InfeasiblePlan, match="memory is short by"):
        longest_sequence(task(host_mib=20, device_mib=8))


def test_the_longest_sequence_fits_and_a_little_more_does_not() -> None:
    asked = task()
    found = longest_sequence(asked)
    workload = found.plan.inputs.workload
    assert (workload.sequence_length, workload.tokens_per_step) == (found.size, found.size)
    assert found.size % SEQUENCE_STEP == 0
    assert found.too_large == found.size + SEQUENCE_STEP
    longer = {"sequence_length": found.too_large, "tokens_per_step": found.too_large, "micro_batch_rows": None}
    with pytest.raises(InfeasiblePlan):
        asked.with_workload(**longer).plan()


@pytest.mark.parametrize("true", [1, 2, 5, 6, 11])
@pytest.mark.parametrize("said", [1, 3, 6, 15, 29])
def test_what_the_program_takes_for_possible_is_cut_to_what_is(
    true: int, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program says up to `said` layers; the replay knows that it is `true`."""
    for name, most in {"close": max(true, said), "feasible": true}.items():
        monkeypatch.setattr(extent, name, lambda problem, most=most, **_: problem.model.num_layers <= most or None)
    monkeypatch.setattr(Task, "plan", lambda self, **_: self.model.num_layers)
    assert largest_model(task(), deep) == (true, true, true + 1)


def test_learned_positions_end_a_sequence() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 512}
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = model_spec(config)
    small = task(device_mib=2000, host_mib=4000, sequence_length=128, tokens_per_step=512).with_model(model)
    found = longest_sequence(small)
    assert (found.size, found.too_large) == (512, None)
    with pytest.raises(InputError, match="learned 64 positions, fewer than 128"):
        longest_sequence(small.with_model(model_spec(config | {"n_positions": 64})))


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma2"])
def test_a_grown_model_has_the_layers_of_its_config_over_and_over(config: dict[str, Any]) -> None:
    own, five = model_spec(config), grown(config)(5)
    assert [five.block(layer) for layer in five.layers] == [own.block(1 + layer % 2) for layer in range(5)]
    assert five.block(0) == own.block(0)
    assert five.block(five.head) == own.block(own.head)
    assert grown(config)(2) == own


def test_a_grown_model_is_frozen_by_the_same_patterns() -> None:
    model = grown(LLAMA, ["model.layers.0.*"])(4)
    assert [model.block(layer).trained for layer in model.layers] == [False, True, True, True]


# Through the front door


def test_questions_are_answered_with_figures_and_files(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "plan", "--model", str(given / "model"), *WORKLOAD, "--host-memory", "2GiB", "--device-memory", "2GiB",
        "--what-if", "tokens-per-step=64..256", "--what-if", "tokens-per-step=96", "--price-per-hour", "0.5",
        "--figures", str(tmp_path / "sweeps"), "--longest-sequence",
    ]  # fmt: skip
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "what lives where" not in out  # the plan itself was not asked for
    assert "per million tokens" in out
    assert "longest sequence, one a step: " in out
    assert "names" in out  # the config's positions are fewer than 2 GiB hold
    with (tmp_path / "sweeps" / "tokens-per-step.csv").open(newline="") as file:
        assert [int(row["tokens_per_step"]) for row in csv.DictReader(file)] == [64, 96, 128, 256]
    assert (tmp_path / "sweeps" / "tokens-per-step.png").read_bytes().startswith(b"\x89PNG")


def test_an_explanation_follows_its_plan(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", str(given / "model"), *WORKLOAD, "--explain", "--price-per-hour", "2"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    places = [out.index(words) for words in ("what lives where", "what more would buy", "next best", "binds", "cost: ")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--what-if", "memory=1GiB"], "there is no 'memory' to change"),
        (["--what-if", "tokens-per-step=65"], "not a multiple of sequence_length 16"),
        (["--what-if", "tokens-per-step=64", "--json"], "--json: prints a plan and nothing else"),
        (["--explain", "--json"], "--json: prints a plan and nothing else"),
        (["--what-if", "tokens-per-step=64", "--figures", "missing/deeper"], "there is no folder missing"),
        (["--what-if", "tokens-per-step=64", "--figures", __file__], "is a file; name a folder"),
        (["--price-per-hour", "-1"], "is not a price"),
        (["--price-per-hour", "cheap"], "'cheap' is not a number, as 2.5"),
        (["--largest", "--host-memory", "100MiB"], "memory is short by"),
    ],
)
def test_what_is_asked_wrongly_is_a_sentence_and_exit_code_2(
    given: Path, complaint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in complaint("plan", "--model", given / "model", *WORKLOAD, *more)
    assert list(tmp_path.iterdir()) == []


def test_a_long_silence_is_broken_and_a_short_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with said_after_a_while("planning", patience_seconds=1e6):
        pass
    said = ""
    with said_after_a_while("planning", patience_seconds=0.0):
        while not said:  # however long it takes the other thread to come to it
            said = capsys.readouterr().err
    assert said == "conveyor: planning\n"
    assert capsys.readouterr().err == ""


def test_progress_is_told_to_who_waits_and_to_nobody_else(capsys: pytest.CaptureFixture[str]) -> None:
    progress_lines(patience_seconds=1e6)("planning")
    assert capsys.readouterr().err == ""
    progress_lines(patience_seconds=0.0)("planning")
    assert capsys.readouterr().err == "conveyor: planning\n"
