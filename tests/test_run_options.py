"""What a run config asks of training itself: how long, what is frozen, evaluation and early stop, loggers, dry runs."""

import gc
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from analysis.cli import main
from executor.config import TrainConfig
from executor.launch import launch
from executor.run import MOST_LOST_STEPS, Interrupted
from executor.run_directory import load_run
from planner.plan import Plan
from planner.search import plan
from simulator.errors import ConveyorError, InputError
from simulator.freezing import freeze, frozen_patterns, unfrozen
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.timeline import OTHER_WAIT, WAITING
from tests.test_run import CONFIG, WORKLOAD, machine, model, planned, run_config, silent, text

__all__ = ["machine", "model", "planned", "text"]  # fixtures


def other_text(text: Path) -> str:
    """Text of the same kind that is not trained on."""
    path = text.with_name("other.txt")
    path.write_text("".join(f"line {n}: the conveyor carries layer {n * 5 % 29}\n" for n in range(400, 440)))
    return str(path)


def rising_loss(text: Path, *, patience: int) -> dict[str, Any]:
    """Settings at whose rate the loss rises from the start, so that evaluations end the run."""
    return {
        "max_steps": 40, "learning_rate": 3.0, "lr_schedule": "constant", "warmup_steps": 0,
        "eval_data": other_text(text), "eval_every": 2, "early_stop_patience": patience,
    }  # fmt: skip


def run(config: TrainConfig, planned: Plan, model: ModelSpec, say: Any = silent) -> Any:
    launch(config, planned, CONFIG, model, say=say)
    return load_run(config.output)


def test_epochs_are_counted_in_steps_and_told(tmp_path: Path, text: Path, model: ModelSpec, planned: Plan) -> None:
    text.write_text(text.read_text()[:1000])
    whole = run(run_config(text, tmp_path / "one", max_steps=None), planned, model)
    steps = len(whole.metrics)
    assert steps == math.ceil(1000 / WORKLOAD.tokens_per_step)
    assert whole.metrics[-1]["epoch"] == 1.0
    config = run_config(text, tmp_path / "more", max_steps=None, num_epochs=1.5, warmup_steps=0, warmup_ratio=0.3)
    more = run(config, planned, model)
    assert len(more.metrics) == math.ceil(1.5 * steps)
    assert more.metrics[0]["lr"] == pytest.approx(1e-2 / (1 + math.ceil(0.3 * len(more.metrics))))
    assert more.metrics[-1]["epoch"] == pytest.approx(len(more.metrics) / steps)


def test_a_plan_that_no_solver_found_is_told_before_the_first_step(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run(run_config(text, tmp_path / "solved", max_steps=3), planned, model, said.append)
    assert not any("greedy" in line for line in said)
    monkeypatch.setattr("planner.search.solver_version", lambda: None)
    inputs = planned.inputs
    greedy = plan(model, inputs.workload, planned.hardware, inputs.limits)
    run(run_config(text, tmp_path / "greedy", max_steps=3), greedy, model, said.append)
    told = next(number for number, line in enumerate(said) if "found by the greedy planner" in line)
    assert any(line.startswith("step 1/3") for line in said[told:])


def test_pythons_collector_walks_nothing_that_was_there_before_the_steps(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    before = gc.get_freeze_count()
    stays: list[list[object]] = [[] for _ in range(1000)]
    seen: dict[str, int] = {}

    def say(line: str) -> None:
        if line.startswith("step "):
            walked = sum(found is stays for found in gc.get_objects())
            seen[line.partition(" ")[2].partition("/")[0]] = walked
            if line.startswith("step 3/"):
                raise KeyError("as asked")

    config = run_config(text, tmp_path / "run", max_steps=4, log_every=1)
    with pytest.raises(KeyError, match="as asked"):
        run(config, planned, model, say)
    assert seen == {"1": 1, "2": 0, "3": 0}
    assert gc.get_freeze_count() == before
    assert any(found is stays for found in gc.get_objects())


def test_what_the_collector_takes_after_the_first_step_is_no_part_of_the_second(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.run.gc.collect", lambda: time.sleep(2))
    found = run(run_config(text, tmp_path / "run", max_steps=3), planned, model)
    assert all(row["seconds"] < 2 for row in found.metrics)


def test_every_step_s_line_is_complete(tmp_path: Path, text: Path, model: ModelSpec, planned: Plan) -> None:
    found = run(run_config(text, tmp_path / "run"), planned, model)
    for row in found.metrics:
        assert row["lr"] == row["learning_rate"] > 0
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["device_peak_bytes"] > 0
        assert row["host_peak_bytes"] > 0
        assert row["allocator_retries"] is None  # the CPU's allocator knows of none
        assert 0 <= row["data_wait_seconds"] < row["seconds"]
        assert row["lost_seconds"].keys() == {*WAITING.values(), OTHER_WAIT}
        assert all(seconds >= 0 for seconds in row["lost_seconds"].values())
        assert 0 < sum(row["lost_seconds"].values()) < row["seconds"]  # at least the batch had to be copied


@pytest.mark.parametrize("given", ["plan", "config"])
def test_what_is_frozen_stays_and_the_rest_is_trained(
    given: str, tmp_path: Path, text: Path, model: ModelSpec, machine: HardwareProfile
) -> None:
    patterns = ["model.embed_tokens.*", "model.layers.0.*", "*.2.mlp.*"]
    frozen = freeze(model, patterns)
    by_plan = plan(frozen, WORKLOAD, machine)
    changes: dict[str, Any] = {"freeze": patterns} if given == "config" else {}
    found = run(run_config(text, tmp_path / "run", max_steps=3, **changes), by_plan, model)
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert freeze(model, resolved["freeze"]) == frozen
    run(run_config(text, tmp_path / "more", max_steps=5, **changes), by_plan, model)
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "more"))
    for name in one:
        is_frozen = "embed_tokens" in name or ".layers.0." in name or ".2.mlp." in name
        assert torch.equal(one[name], other[name]) == is_frozen, name
    assert found.record.measured.tflops < 6 * model.num_parameters * 128 / found.record.measured.step_seconds / 1e12


def test_a_plan_that_freezes_something_else_is_refused(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, machine: HardwareProfile
) -> None:
    with pytest.raises(InputError, match=r"freeze is \['model.layers.0.\*'\], the plan freezes nothing; plan again"):
        launch(run_config(text, tmp_path / "run", freeze="model.layers.0.*"), planned, CONFIG, model, say=silent)
    assert not (tmp_path / "run").exists()


def test_patterns_are_found_again_from_what_they_freeze(model: ModelSpec) -> None:
    frozen = freeze(model, ["model.layers.1.*", "model.embed_tokens.weight", "*.input_layernorm.weight"])
    assert frozen_patterns(frozen) == (
        "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.*",
        "model.layers.2.input_layernorm.weight",
    )  # fmt: skip
    assert freeze(unfrozen(frozen), frozen_patterns(frozen)) == frozen


def test_evaluations_are_written_and_the_last_one_is_of_the_trained_model(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    said: list[str] = []
    config = run_config(text, tmp_path / "run", eval_fraction=0.1, eval_every=3)
    found = run(config, planned, model, said.append)
    assert [row["step"] for row in found.evaluations] == [2, 5, 7]
    losses = [row["eval_loss"] for row in found.evaluations]
    assert losses == sorted(losses, reverse=True), "a byte model learns in these steps"
    assert sum(line.startswith("evaluation after step") for line in said) == 3
    assert found.measured.spans, "a steady step was recorded between the evaluations"
    assert {span.name for span in found.measured.spans} == {span.name for span in found.predicted.spans}


def test_evaluating_changes_nothing_that_is_trained(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    run(run_config(text, tmp_path / "plain"), planned, model)
    run(run_config(text, tmp_path / "evaluated", eval_data=other_text(text), eval_every=2), planned, model)
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("plain", "evaluated"))
    assert one == other


def test_a_run_stops_early_when_evaluations_stop_improving_and_stays_stopped(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    said: list[str] = []
    config = run_config(text, tmp_path / "run", **rising_loss(text, patience=2))
    found = run(config, planned, model, said.append)
    losses = [row["eval_loss"] for row in found.evaluations]
    assert len(losses) < 20
    assert min(losses[-2:]) >= min(losses[:-2])
    assert len(found.metrics) == 2 * len(losses)
    assert any("stopped early" in line and "2 evaluations without a lower loss" in line for line in said)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    record = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(InputError, match="complete, it stopped early after"):
        run(config.model_copy(update={"resume": "auto"}), planned, model)
    assert (tmp_path / "run" / "run.json").read_bytes() == record


def test_patience_counts_evaluations_from_before_a_resume(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    choices: dict[str, Any] = {"max_steps": 6, "save_every": 2, "eval_data": other_text(text), "eval_every": 2}
    run(run_config(text, tmp_path / "run", **choices), planned, model)
    path = tmp_path / "run" / "evaluations.jsonl"
    # As if the first two had been better than all that follows, the second not finite.
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["eval_loss"], rows[1]["eval_loss"] = 0.0, None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    config = run_config(text, tmp_path / "run", resume=str(checkpoint), early_stop_patience=2, **choices)
    said: list[str] = []
    found = run(config, planned, model, said.append)
    assert [row["step"] for row in found.evaluations] == [1, 3, 5]
    assert not found.evaluations[-1]["improved"]
    assert any("stopped early" in line for line in said)


def interrupted_at(step: int, config: TrainConfig, planned: Plan, model: ModelSpec) -> str:
    """The run until an interrupt in the line of a step; what it says in its end."""

    def interrupt(line: str) -> None:
        if line.startswith(f"step {step}/"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        launch(config, planned, CONFIG, model, say=interrupt)
    return str(stopped.value)


@pytest.mark.parametrize("stopped_at", [[2], [3], [4], [2, 4]])
def test_an_evaluation_that_a_stop_left_out_is_made_by_the_resume(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, stopped_at: list[int]
) -> None:
    choices = rising_loss(text, patience=2)  # both runs end early, after the same step
    whole = run(run_config(text, tmp_path / "whole", **choices), planned, model)
    config = run_config(text, tmp_path / "parts", **choices)
    for step in stopped_at:
        interrupted_at(step, config, planned, model)
        config = config.model_copy(update={"resume": "auto"})
    parts = run(config, planned, model)
    evaluations = [[(row["step"], row["eval_loss"]) for row in found.evaluations] for found in (whole, parts)]
    assert evaluations[0] == evaluations[1]
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_a_resume_ends_at_once_where_the_evaluation_that_was_left_out_is_the_last(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan
) -> None:
    choices = rising_loss(text, patience=1)
    whole = run(run_config(text, tmp_path / "whole", **choices), planned, model)
    config = run_config(text, tmp_path / "parts", **choices)
    interrupted_at(len(whole.metrics), config, planned, model)
    said: list[str] = []
    launch(config.model_copy(update={"resume": "auto"}), planned, CONFIG, model, say=said.append)
    assert any("stopped early after" in line for line in said)
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_a_run_stopped_while_its_steps_are_not_finite_is_saved_beside_what_was(
    tmp_path: Path, text: Path, model: ModelSpec, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.run.learning_rate", lambda step, schedule: 1e30)
    config = run_config(text, tmp_path / "run", max_steps=20, save_every=1, keep_checkpoints=1)
    words = interrupted_at(4, config, planned, model)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["applied"] for row in rows[:4]] == [True, False, False, False]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000001", f"step-{len(rows):08}"]
    assert "saved in" in words
    assert "steps were not finite, so earlier checkpoints stay" in words
    # Left alone, it ends by itself: the loss is finite, and the gradient never will be.
    with pytest.raises(ConveyorError, match="the gradient has not been finite since step 1: the weights have diverged"):
        launch(run_config(text, tmp_path / "long", max_steps=300), planned, CONFIG, model, say=silent)
    assert len((tmp_path / "long" / "metrics.jsonl").read_text().splitlines()) <= 2 + MOST_LOST_STEPS


@pytest.mark.filterwarnings("ignore")
def test_loggers_of_a_run(tmp_path: Path, text: Path, model: ModelSpec, planned: Plan) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = run_config(text, tmp_path / "run", loggers="tensorboard", eval_fraction=0.1)
    found = run(config, planned, model)
    read = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [event.value for event in read.Scalars("loss")] == pytest.approx([row["loss"] for row in found.metrics])
    assert [event.step for event in read.Scalars("eval_loss")] == [7]


def test_a_dry_run_prints_a_config_that_reads_back_and_the_plan_and_trains_nothing(
    tmp_path: Path, text: Path, planned: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(text, tmp_path / "run")
    planned.save(tmp_path / "plan.json")
    assert main(
        ["train", f"plan={tmp_path / 'plan.json'}", f"data={text}", f"output={tmp_path / 'run'}",
         f"model={config.model}", "--dry-run"]
    ) == 0  # fmt: skip
    out = capsys.readouterr().out
    resolved = yaml.safe_load(out)
    assert resolved["tokens_per_step"] == WORKLOAD.tokens_per_step
    assert resolved["micro_batch_size"] == planned.policy.micro_batch_rows
    assert "# predicted" in out
    assert "# bound: " in out
    assert not (tmp_path / "run").exists()
    assert main(["train", f"plan={tmp_path / 'plan.json'}", "data=nowhere", "output=o", "--dry-run"]) == 2


def test_a_dry_run_plans_where_no_plan_is_given(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config(text, tmp_path / "run")
    arguments = [
        "train", f"model={config.model}", f"data={text}", f"output={tmp_path / 'run'}", "hardware=cpu-2-core",
        "sequence_length=32", "tokens_per_step=128", "precision=fp32", "freeze=[model.layers.0.*]", "--dry-run",
    ]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "positions" not in out
    longer = {"sequence_length=32": "sequence_length=8192", "tokens_per_step=128": "tokens_per_step=8192"}
    assert main([longer.get(argument, argument) for argument in arguments]) == 0
    assert "positions: beyond them it has seen nothing" in capsys.readouterr().out
    assert json.loads(json.dumps(yaml.safe_load(out)))["freeze"] == ["model.layers.0.*"]
    assert "frozen: 1" in out
    assert not (tmp_path / "run").exists()
