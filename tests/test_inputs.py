"""Wrong inputs and broken runs, through the front door: one clear sentence, the right exit code, and nothing lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from front_door import WORKLOAD, content, steps, training
from safetensors.torch import load_file, save_file
from tiny_model import tiny_config

from analysis.cli import main
from executor import step_log
from executor.run import MOST_LOST_STEPS
from executor.run_directory import append_metrics, load_run

ROOT = Path(__file__).parents[1]


# The output directory


def test_a_directory_that_holds_a_run_is_not_trained_into(given, tmp_path, complaint):
    output = tmp_path / "run"
    complaint(*training(given, output), code=0)
    before = content(output)
    assert "holds a run already" in complaint(*training(given, output, "seed=1"))
    # Nor is the machine probed first, for a plan that nothing follows.
    settings = ["sequence_length=16", "tokens_per_step=64", f"data={given / 'data.txt'}", f"output={output}"]
    assert "holds a run already" in complaint("train", f"model={given / 'model'}", *settings)
    assert content(output) == before


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("learning_rate=1", "learning_rate is 1.0, the checkpoint was made with 0.01"),
        ("max_steps=6", "max_steps is 6, the checkpoint was made with 4"),
        ("max_steps=2", "3 steps are done, more than the 2 of this run"),
        ("data=/nowhere", "does not exist"),
    ],
)
def test_a_refused_resume_leaves_the_run_as_it_was(given, tmp_path, complaint, setting, reason):
    output = tmp_path / "run"
    complaint(*training(given, output, "save_every=3"), code=0)
    shutil.rmtree(output / "checkpoints" / "step-00000004")
    before = content(output)
    arguments = training(given, output, "save_every=3", "resume=auto", setting)
    if setting.startswith("data="):
        arguments[arguments.index("--data") + 1] = "/nowhere"
    assert reason in complaint(*arguments)
    assert content(output) == before


def test_a_damaged_checkpoint_is_named_with_the_one_to_go_on_from(given, tmp_path, complaint):
    output = tmp_path / "run"
    complaint(*training(given, output, "save_every=2"), code=0)
    older, newest = sorted((output / "checkpoints").iterdir())
    newest.rename(newest.with_name("step-00000003"))
    newest = newest.with_name("step-00000003")
    record = json.loads((newest / "checkpoint.json").read_text())
    record["progress"] |= {"step": 3, "applied_steps": 3}
    (newest / "checkpoint.json").write_text(json.dumps(record))
    block = newest / "block-00001.safetensors"
    damaged = bytearray(block.read_bytes())
    damaged[-50] ^= 255
    block.write_bytes(damaged)
    before = content(output)
    err = complaint(*training(given, output, "save_every=2", "resume=auto"))
    assert f"{block}: is damaged" in err
    assert f"resume={older}" in err
    assert content(output) == before
    (newest / "checkpoint.json").write_text('{"form')
    assert f"resume={older}" in complaint(*training(given, output, "save_every=2", "resume=auto"))
    complaint(*training(given, output, "save_every=2", f"resume={older}"), code=0)
    assert steps(output) == [0, 1, 2, 3, 2, 3]


def test_the_model_is_not_written_over(given, tmp_path, complaint):
    for model, output in (("model", "model"), ("run/model", "run")):
        shutil.copytree(given / "model", tmp_path / model)
        before = content(tmp_path / model)
        err = complaint(*training(given, tmp_path / output, f"model={tmp_path / model}"))
        assert "the folder of the model it starts from" in err
        assert content(tmp_path / model) == before


def test_outputs_that_cannot_be_written_are_found_before_the_work(given, tmp_path, complaint):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        assert f"{output}: cannot be written" in complaint(*training(given, output))
    missing, model = tmp_path / "absent" / "x.json", given / "model"
    assert "there is no folder" in complaint("plan", "--model", model, *WORKLOAD, "--output", missing)
    assert "there is no folder" in complaint("simulate", given / "plan.json", "--trace", missing)
    assert "is a folder" in complaint("simulate", given / "plan.json", "--trace", tmp_path)
    assert "there is no folder" in complaint("probe", "--output", missing)
    rows = ["--hardware", "cpu-2-core", "--sequence-length", "16", "--micro-batch-size", "1"]
    assert "there is no folder" in complaint("measure", "--model", model, *rows, "--output", missing)


def test_a_disk_that_fills_up_is_named(given, tmp_path, complaint, monkeypatch):
    def full(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("executor.checkpoint.write_shard", full)
    err = complaint(*training(given, tmp_path / "run"), code=1)
    assert "No space left on device" in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


# Contradictions between config and plan


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("device_memory=1KiB", "device_memory: the run may take 1.0 KiB"),
        ("host_memory=1MiB", "host_memory: the run may take 1.0 MiB"),
        ("device_memory=0", "device_memory: input should be greater than 0"),
        ("hardware=h200", "hardware: has no effect beside a plan"),
        ("costs=x.json", "costs: has no effect beside a plan"),
        ("precision=bf16", "precision is 'bf16', the plan has 'fp32'"),
        ("resume=atuo", "did you mean 'auto'?"),
    ],
)
def test_a_setting_that_the_plan_would_not_honour_is_refused(given, tmp_path, complaint, setting, reason):
    assert reason in complaint(*training(given, tmp_path / "run", setting))


def test_a_path_that_leads_nowhere_is_named_by_its_key_with_the_nearest_name(given, tmp_path, complaint):
    output = tmp_path / "run"
    plan = given / "plan.jsn"
    assert f"{plan}: does not exist; did you mean '{given / 'plan.json'}'?" in complaint(
        *training(given, output, plan=plan)
    )
    err = complaint(*training(given, output, f"eval_data={given / 'data.text'}"))
    assert f"eval_data: {given / 'data.text'} does not exist; did you mean {given / 'data.txt'}?" in err
    settings = [f"model={given / 'model'}", f"data={given / 'data.txt'}", f"output={output}", "max_steps=1"]
    settings += ["sequence_length=16", "tokens_per_step=64"]
    costs = given / "plan.js"
    assert f"did you mean '{given / 'plan.json'}'?" in complaint("train", *settings, f"costs={costs}")
    assert "did you mean 'h200'?" in complaint("train", *settings, "hardware=h20")
    assert not output.exists()


def test_all_names_that_lead_nowhere_are_told_at_once(given, tmp_path, complaint):
    names = {"model": "modle", "data": "data.text", "eval_data": "eval.txt", "hardware": "h20", "costs": "costs.json"}
    wrong = [f"{key}={name if key == 'hardware' else given / name}" for key, name in names.items()]
    sizes = ["sequence_length=16", "tokens_per_step=64", "max_steps=2", f"output={tmp_path / 'run'}"]
    lines = complaint("train", *wrong, *sizes).splitlines()
    assert len(lines) == len(names)
    for line, name in zip(lines, names.values(), strict=True):
        assert name in line
    assert f"did you mean {given / 'data.txt'}?" in lines[1]
    assert "h200" in lines[3]
    assert not (tmp_path / "run").exists()


def test_the_resolved_config_of_a_run_trains_the_same_again(given, tmp_path, complaint):
    plan = tmp_path / "plan.json"
    options = ["--gradient-format", "bf16", "--clipping", "none", "--output", plan]
    complaint("plan", "--model", given / "model", *WORKLOAD, *options, code=0)
    complaint(*training(given, tmp_path / "a", plan=plan), code=0)
    complaint("train", tmp_path / "a" / "config.yaml", f"output={tmp_path / 'b'}", code=0)
    assert content(tmp_path / "a" / "model") == content(tmp_path / "b" / "model")
    assert "max_grad_norm: has no effect" in complaint(
        *training(given, tmp_path / "c", "max_grad_norm=1", plan=plan)
    )  # fmt: skip


# Files of the wrong content


def test_a_plan_of_another_version_is_called_that(given, tmp_path, complaint):
    content = json.loads((given / "plan.json").read_text()) | {"version": 2, "new_key": 1}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert "has plan version 2, this version reads 1" in complaint("simulate", tmp_path / "plan.json")


@pytest.mark.parametrize("weight_map", [{"lm_head.weight": 5}, {"lm_head.weight": ""}, [1]])
def test_an_index_of_nonsense_is_refused(given, tmp_path, complaint, weight_map: Any):
    shutil.copytree(given / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    err = complaint(*training(given, tmp_path / "run", f"model={tmp_path / 'model'}"))
    assert "model.safetensors.index.json" in err


def test_brackets_without_end_are_a_sentence(given, tmp_path, complaint):
    deep = "[" * 100_000
    (tmp_path / "run.yaml").write_text(f"seed: {deep}\n")
    assert "nested too deeply" in complaint("train", tmp_path / "run.yaml")
    (tmp_path / "data.jsonl").write_text(f'{{"text": {deep}\n')
    assert "data.jsonl:1: its JSON is nested too deeply" in complaint(
        *training(given, tmp_path / "run", data=tmp_path / "data.jsonl")
    )
    (tmp_path / "config.json").write_text(f'{{"model_type": {deep}')
    assert "config.json" in complaint("plan", "--model", tmp_path, *WORKLOAD)


def test_a_wrong_model_config_is_named_by_its_file(given, tmp_path, complaint):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config() | {"hidden_size": -1}))
    assert f"{tmp_path}: model config: hidden_size is -1" in complaint("plan", "--model", tmp_path, *WORKLOAD)
    assert f"did you mean '{given / 'model'}'?" in complaint("plan", "--model", given / "modle", *WORKLOAD)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", '{"messages": [{"role": "robot", "content": "x"}]}', "a.jsonl:1: messages[0] has the role 'robot'"),
        ("a.jsonl", '{"text": "a"}\n{"input": "b", "output": "c"}', "a.jsonl:2: has no 'instruction'"),
        ("a.jsonl", '{"prompt": "a", "completion": ""}', "no usable rows (1 row read; 1 skipped: empty answer)"),
        ("a.json", '[{"text": "a"},\n {"text": "hal', "a.json:2:11: is not JSON (Unterminated string"),
        ("a.csv", "question,answer\n1,2\n", "a.csv:2: has none of 'text', 'messages', "),
        ("a.txt", '{"text": "a"}\n', "holds JSON, not text; name it .jsonl"),
        ("a.gz", "x", ".gz is not read; unpack it"),
    ],
)
def test_data_of_no_use_are_refused_and_put_right_in_the_same_place(given, tmp_path, complaint, name, text, reason):
    (tmp_path / name).write_text(text)
    assert reason in complaint(*training(given, tmp_path / "run", data=tmp_path / name))
    complaint(*training(given, tmp_path / "run"), code=0)


def test_rows_under_other_names_train_and_the_run_says_what_it_read(given, tmp_path, complaint, capsys):
    rows = "\n".join(f"question {number},answer {number}" for number in range(9))
    (tmp_path / "a.csv").write_text(f"q,a\n{rows}\nempty,\n", encoding="utf-8")
    settings = ["columns={prompt: q, completion: a}", f"cache={tmp_path / 'cache'}", "long_samples=split"]
    capsys.readouterr()
    assert main([str(part) for part in training(given, tmp_path / "run", *settings, data=tmp_path / "a.csv")]) == 0
    out = capsys.readouterr().out
    assert "10 read from 1 file, 9 as prompt-completion, tokenizer bytes" in out
    assert f"warning: 1 skipped: empty answer (first: {tmp_path / 'a.csv'}:11: " in out
    assert "⟦question 0⟧answer" in out
    complaint("train", tmp_path / "run" / "config.yaml", f"output={tmp_path / 'again'}", code=0)
    assert content(tmp_path / "again" / "model") == content(tmp_path / "run" / "model")


def test_packed_rows_train_through_the_front_door_and_by_no_plan_for_other_rows(given, tmp_path, complaint, capsys):
    rows = [{"instruction": f"say {n}", "output": "x" * (n % 5 + 1)} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    settings = ["sequence_length=256", "tokens_per_step=512", "precision=fp32", "hardware=cpu-2-core", "max_steps=4"]
    paths = [f"model={given / 'model'}", f"data={tmp_path / 'a.jsonl'}", f"output={tmp_path / 'run'}"]
    capsys.readouterr()
    assert main(["train", *paths, *settings, "packing=true"]) == 0
    assert "40 as alpaca" in (out := capsys.readouterr().out)
    assert "; packed, " in out
    steps_of_run = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0.5 * 512 < step["tokens"] <= 512 for step in steps_of_run[:3])
    plan = tmp_path / "run" / "plan.json"
    refused = training(given, tmp_path / "other", "packing=false", data=tmp_path / "a.jsonl", plan=plan)
    assert "packing is False, the plan has True; plan again" in complaint(*refused)


def test_costs_are_not_measured_in_the_name_of_other_hardware(given, tmp_path, complaint):
    if torch.cuda.is_available():
        pytest.skip("this machine has the other hardware")
    rows = ["--sequence-length", "16", "--micro-batch-size", "1", "--output", tmp_path / "costs.json"]
    assert "timed on 'cpu'" in complaint("measure", "--model", given / "model", "--hardware", "h200", *rows)


@pytest.mark.parametrize("option", ["--device-memory", "--host-memory"])
def test_a_limit_of_nothing_is_no_limit_left_out(given, complaint, option):
    assert "leaves nothing to plan with" in complaint("plan", "--model", given / "model", *WORKLOAD, option, "0")


def test_sizes_beyond_all_machines_are_refused(given, complaint):
    lengths = ["--sequence-length", 10**20, "--tokens-per-step", 10**20]
    assert "sequence_length" in complaint("plan", "--model", given / "model", "--hardware", "cpu-2-core", *lengths)


def test_a_plan_in_place_of_a_config_is_told_in_short_lines(given, complaint):
    assert max(map(len, complaint("train", given / "plan.json").splitlines())) < 400


# Failures while running


def test_weights_that_are_not_finite_do_not_count_as_trained(given, tmp_path, complaint):
    shutil.copytree(given / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    err = complaint(*training(given, tmp_path / "run", f"model={tmp_path / 'model'}"), code=1)
    assert "all 4 steps were skipped" in err
    assert not (tmp_path / "run" / "model").exists()
    err = complaint(*training(given, tmp_path / "long", f"model={tmp_path / 'model'}", "max_steps=300"), code=1)
    assert f"all {MOST_LOST_STEPS} steps were skipped" in err  # and not 300, which would be skipped too


def test_an_interrupt_saves_and_the_resumed_run_ends_as_if_there_was_none(given, tmp_path, complaint, monkeypatch):
    complaint(*training(given, tmp_path / "whole"), code=0)

    def interrupted(directory: Path, row: dict[str, Any]) -> None:
        append_metrics(directory, row)
        if row["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(step_log, "append_metrics", interrupted)
        err = complaint(*training(given, tmp_path / "cut"), code=130)
    assert "resume=auto" in err
    complaint(*training(given, tmp_path / "cut", "resume=auto"), code=0)
    assert steps(tmp_path / "cut") == [0, 1, 2, 3]
    assert content(tmp_path / "cut" / "model") == content(tmp_path / "whole" / "model")


def test_an_interrupt_while_planning_leaves_no_plan(given, tmp_path, complaint, monkeypatch):
    monkeypatch.setattr("planner.search.plan", lambda *given, **named: os.kill(os.getpid(), signal.SIGINT))
    complaint("plan", "--model", given / "model", *WORKLOAD, "--output", tmp_path / "plan.json", code=130)
    assert not (tmp_path / "plan.json").exists()


def test_a_run_killed_while_it_saves_resumes_bit_for_bit(given, tmp_path, complaint):
    complaint(*training(given, tmp_path / "whole", "save_every=1"), code=0)
    output = tmp_path / "killed"
    program = f"""
import os, signal, sys
from analysis.cli import main
from executor import checkpoint
write, num_written = checkpoint.write_shard, 0
def killed(path, *given, **named):
    global num_written
    num_written += 1
    found = write(path, *given, **named)
    if num_written == 10:  # of 4 files a checkpoint: inside the third
        os.kill(os.getpid(), signal.SIGKILL)
    return found
checkpoint.write_shard = killed
main({[str(argument) for argument in training(given, output, "save_every=1")]})
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(path.name.endswith(".partial") for path in (output / "checkpoints").iterdir())
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a line that the kill cut off
    complaint(*training(given, output, "save_every=1", "resume=auto"), code=0)
    assert steps(output)[-2:] == [2, 3]  # step 3 may have run beside the save that was killed
    assert [row["step"] for row in load_run(output).metrics] == [0, 1, 2, 3]
    for name in ("model", "checkpoints/step-00000004"):
        ours, expected = content(output / name), content(tmp_path / "whole" / name)
        assert {key: value for key, value in ours.items() if key != "checkpoint.json"} == {
            key: value for key, value in expected.items() if key != "checkpoint.json"
        }
    complaint("plot", output, "--output", tmp_path / "report", code=0)


def test_a_folder_in_the_models_place_is_found_before_the_work(given, tmp_path, complaint):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "mine.txt").touch()
    assert "holds other files than a model" in complaint(*training(given, tmp_path / "run", "resume=auto"))
    assert list(content(tmp_path / "run")) == ["model/mine.txt"]


def test_json_on_standard_output_is_json_and_a_closed_pipe_is_no_traceback(given, capfd):
    capfd.readouterr()
    assert main(["plan", "--model", str(given / "model"), *WORKLOAD, "--json"]) == 0
    written = capfd.readouterr().out  # of libraries too, which write past sys.stdout
    assert json.loads(written)["inputs"]["model"]["num_parameters"] == 23880
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "analysis.cli", "simulate", str(given / "plan.json")]
    piped = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert piped.returncode == 1
    assert piped.stderr == "conveyor: error: standard output was closed before all was written\n"


def test_a_limit_above_what_the_machine_has_is_told_and_planned_with_what_it_has(given, complaint):
    line = ["plan", "--model", given / "model", *WORKLOAD]
    err = complaint(*line, "--host-memory", "5000GiB", code=0)
    assert err.count("\n") == 1
    assert "--host-memory: 4.9 TiB is more than" in err
    assert "cpu-2-core" in err
    assert complaint(*line, "--host-memory", "2GiB", code=0) == ""


def test_figures_without_a_question_that_draws_them_are_refused(complaint, tmp_path):
    said = complaint(
        "plan", "--model", ROOT / "simulator/catalogue/models/llama-3.2-1b.json", "--hardware", "h200",
        "--sequence-length", 128, "--tokens-per-step", 1024, "--figures", tmp_path / "figures",
    )  # fmt: skip
    assert "--figures: has no effect without --what-if, whose figures it is for; leave it out" in said
    assert not (tmp_path / "figures").exists()
