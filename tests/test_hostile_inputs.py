"""Inputs that nobody means to give: damaged files, paths of no use, numbers beyond reason, two runs in one place."""

import errno
import io
import json
import os
import shutil
import sys
from typing import Any

import pytest
from front_door import WORKLOAD, training

from analysis.cli import main
from executor.adamw import step_scalars
from executor.config import load_config
from executor.run import MOST_LOST_STEPS
from executor.schedule import MOST_STEPS, check_schedule
from executor.shard import read_header
from executor.yaml_mapping import parse_yaml_value, read_yaml_mapping
from simulator.costs import MeasuredCost, OperationCosts
from simulator.errors import InputError
from simulator.hardware import load_hardware

DIGITS = "1" * 5000  # more than Python turns into a number


# Values


def test_home_is_the_users_in_a_file_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {key: f"~/{key}" for key in ("model", "data", "output", "plan", "hardware", "costs", "cache", "resume")}
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {path}\n" for key, path in paths.items()))
    config = load_config(tmp_path / "run.yaml", ["eval_data=~/eval_data"])
    for key in (*paths, "eval_data"):
        assert getattr(config, key) == str(tmp_path / key)
    assert load_config(None, ["data=hub:a/b", "output=a~b", "plan=p"]).output == "a~b"


@pytest.mark.parametrize("value", ["2026-01-31", "123", "1e5"])
def test_a_name_that_yaml_reads_as_something_else_is_told_of_quotes(value):
    with pytest.raises(InputError, match=r"'output=.*': output: .*in quotes"):
        load_config(None, ["data=synthetic", "plan=p", f"output={value}"])
    quoted = load_config(None, ["data=synthetic", "plan=p", "max_steps=1", f"output='{value}'"])
    assert quoted.output == value


def test_a_byte_order_mark_before_json_makes_no_difference(tmp_path):
    profile = load_hardware("h200")
    (tmp_path / "mine.json").write_text(profile.model_dump_json(), encoding="utf-8-sig")
    assert load_hardware(str(tmp_path / "mine.json")) == profile


def test_a_plan_of_another_version_is_told_so_behind_a_byte_order_mark_too(given, tmp_path, complaint):
    old = json.loads((given / "plan.json").read_text()) | {"version": 0}
    (tmp_path / "plan.json").write_text(json.dumps(old), encoding="utf-8-sig")
    assert "has plan version 0, this version reads 1" in complaint("simulate", tmp_path / "plan.json")


def twice(text: str, key: str) -> str:
    """A JSON text in which `key`, which stands once, stands twice."""
    assert text.count(f'"{key}"') == 1
    return text.replace(f'"{key}"', f'"{key}": 5, "{key}"')


def test_a_key_that_stands_twice_is_refused_in_every_file_of_settings(given, tmp_path, complaint):
    told = "the key {!r} stands twice"
    plan = tmp_path / "plan.json"
    plan.write_text(twice((given / "plan.json").read_text(), "plan_hash"))
    assert f"{plan}: {told.format('plan_hash')}" in complaint("simulate", plan)
    profile = tmp_path / "mine.json"
    profile.write_text(twice(load_hardware("h200").model_dump_json(), "context_bytes"))
    assert f"{profile}: {told.format('context_bytes')}" in complaint(
        "simulate", given / "plan.json", "--hardware", profile
    )
    for name, key in (("config.json", "hidden_size"), ("model.safetensors.index.json", "lm_head.weight")):
        folder = tmp_path / name
        shutil.copytree(given / "model", folder)
        shard = folder / "model.safetensors"
        index = {"metadata": {}, "weight_map": dict.fromkeys(read_header(shard), "shard.safetensors")}
        shard.rename(folder / "shard.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / name).write_text(twice((folder / name).read_text(), key))
        err = complaint(*training(given, tmp_path / "run", f"model={folder}"))
        assert f"{folder / name}: " in err
        assert told.format(key) in err


def test_host_memory_that_is_not_there_is_a_sentence(given, tmp_path, complaint, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise MemoryError("Unable to allocate 8.00 GiB")

    monkeypatch.setattr("executor.data.corpus.cached_samples", full)
    said = complaint(*training(given, tmp_path / "run"), code=1)
    assert "host memory: not enough for this process (Unable to allocate 8.00 GiB); free some" in said


@pytest.mark.parametrize("setting", ["resume=autoo", "resume=nowhere/step-1", "loggers=trackio"])
def test_a_dry_run_refuses_what_the_run_would_refuse(given, tmp_path, complaint, setting, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = complaint(*training(given, tmp_path / "run", setting))
    assert said == complaint(*training(given, tmp_path / "run", setting, "--dry-run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["2024-99-99", DIGITS, "!!int ''", "!!float x", "!!bool x", "!!timestamp x"])
def test_a_yaml_value_that_no_type_takes_is_named_with_its_place(tmp_path, value):
    (tmp_path / "run.yaml").write_text(f"seed: 1\noutput: {value}\n")
    with pytest.raises(InputError, match=r"run.yaml:2:9: cannot be read as \w+, which it looks like"):
        read_yaml_mapping(tmp_path / "run.yaml")
    with pytest.raises(InputError, match="cannot be read as"):
        parse_yaml_value(value)


@pytest.mark.parametrize("setting", ["max_steps=100000000000000000000", "num_epochs=1e300"])
def test_a_run_without_end_is_refused_at_once(given, tmp_path, complaint, setting):
    arguments = [part for part in training(given, tmp_path / "run", setting) if part != "max_steps=4"]
    assert "that a run may have" in complaint(*arguments)


def test_the_longest_run_is_one_of_ten_million_steps():
    check_schedule(warmup_steps=0, max_steps=MOST_STEPS)
    with pytest.raises(InputError, match="max_steps"):
        check_schedule(warmup_steps=0, max_steps=MOST_STEPS + 1)


@pytest.mark.parametrize(("rate", "weight_decay"), [(1e300, 0.0), (1.0, 1e300)])
def test_rates_beyond_the_masters_numbers_are_refused(rate, weight_decay):
    with pytest.raises(InputError, match="learning_rate and weight_decay"):
        step_scalars([rate], (0.9, 0.999), weight_decay)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("weight_decay=1e30", "weight_decay: input should be less than or equal to 100, not 1e+30"),
        ("learning_rate=50", "learning_rate: input should be less than or equal to 10, not 50"),
        ("epsilon=3", "epsilon: input should be less than or equal to 1, not 3"),
        ("max_grad_norm=1e300", "max_grad_norm: input should be less than or equal to 1000000000, not 1e+300"),
        ("weight_decay=99", ""),
        ("weight_decay=.inf", "weight_decay: input should be a finite number"),
    ],
)
def test_settings_beyond_all_reason_are_refused_with_their_range(given, tmp_path, complaint, setting, reason):
    assert reason in complaint(*training(given, tmp_path / "run", setting), code=2 if reason else 0)


def test_a_decay_of_more_than_the_weight_is_refused(given, tmp_path, complaint):
    err = complaint(*training(given, tmp_path / "run", "learning_rate=5", "weight_decay=1"))
    assert "learning_rate and weight_decay: a step would take 5 of each weight away, more than there is" in err


# Rows


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", f'{{"text": "a"}}\n{{"text": {DIGITS}}}\n', "a.jsonl:2: is not JSON that can be read"),
        ("a.json", f'[{{"text": "a"}},\n{{"text": {DIGITS}}}]', "a.json:2: is not JSON that can be read"),
        ("a.json", '[{"text": "a"}]\n[{"text": "b"}]', "a.json:2:1: is not JSON (more follows the end of the array"),
        ("a.json", '[{"text": "a"},]', "a.json:1:16: is not JSON"),
        ("a.json", '[{"text": "a"},', "the array has no end"),
        (
            "a.json",
            '[{"text": "a"},\n{"text": "b", "text": "c"}]',
            "a.json:2: the key 'text' stands twice",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "b", "text": "c"}',
            "a.jsonl:2: the key 'text' stands twice",
        ),
        ("a.csv", 'messages\n"[{""role"": 1, ""role"": 2}]"', "a.csv:2: the key 'role' stands twice in one object"),
        ("a.jsonl", '{"instruction": "a", "output": "b", "history": 5}', "a.jsonl:1: 'history' is int"),
        ("a.jsonl", '{"instruction": "a", "output": "b", "history": true}', "a.jsonl:1: 'history' is bool"),
        ("a.jsonl", '{"input_ids": [[1, 2], [3]]}', "a.jsonl:1: 'input_ids' is not a list of whole numbers"),
        ("a.jsonl", '{"input_ids": [true, false, true]}', "a.jsonl:1: 'input_ids' is not a list of whole numbers"),
        ("a.jsonl", '{"input_ids": [5, true, 6]}', "a.jsonl:1: 'input_ids' is not a list of whole numbers"),
        ("a.jsonl", '{"input_ids": [5, 1], "labels": [5, true]}', "a.jsonl:1: 'labels' is not a list of whole numbers"),
        ("a.csv", "question,answer\nwhy,so\n", "as with columns: {prompt: question, completion: answer}"),
        ("a.csv", "answer,id,question\nso,1,why\n", "as with columns: {prompt: question, completion: answer}"),
        ("a.csv", "body\nwhy\n", "as with columns: {text: body}"),
        ("a.jsonl", '{"frage": "why", "antwort": "so"}', "as with columns: {prompt: frage, completion: antwort}"),
        ("a.jsonl", '{"id": 5}', "its keys are ['id']\n"),
    ],
)
def test_rows_that_cannot_be_read_are_named(given, tmp_path, complaint, name, text, reason):
    (tmp_path / name).write_text(text)
    assert reason in complaint(*training(given, tmp_path / "run", data=tmp_path / name))


def test_an_array_with_nothing_behind_it_but_space_is_whole(given, tmp_path, complaint):
    (tmp_path / "a.json").write_text('[{"text": "abc"}]\n\n')
    complaint(*training(given, tmp_path / "run", data=tmp_path / "a.json"), code=0)


def test_data_that_cannot_be_read_twice_are_refused_before_they_are_opened(given, tmp_path, complaint):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        assert "is neither a file nor a folder" in complaint(*training(given, tmp_path / "run", data=path))


# Paths


@pytest.mark.parametrize("key", ["output", "data", "plan", "model", "cache", "resume"])
def test_a_path_that_no_file_can_have_is_named_by_its_key(given, tmp_path, complaint, key):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in ("x" * 300, '"a\\0/b"', tmp_path / "circle"):
        settings = {"plan": given / "plan.json", "data": given / "data.txt", "output": tmp_path / "run"} | {key: path}
        err = complaint("train", "max_steps=2", *(f"{name}={value}" for name, value in settings.items()))
        assert f"{key}: " in err
        assert "cannot be used" in err


def test_a_model_whose_path_is_no_text_is_refused_by_the_plan_that_would_name_it(given, tmp_path, complaint):
    folder = tmp_path / os.fsdecode(b"model-\xff")
    shutil.copytree(given / "model", folder)
    assert "holds bytes that are no text" in complaint("plan", "--model", folder, *WORKLOAD)


def test_a_file_in_the_caches_place_is_wrong_input(given, tmp_path, complaint):
    (tmp_path / "file").touch()
    settings = training(given, tmp_path / "run", f"cache={tmp_path / 'file'}")
    assert "cache: tokens cannot be written" in complaint(*settings)


def test_what_the_system_refuses_is_a_sentence(given, complaint):
    err = complaint("simulate", given / "plan.json", "--trace", "/dev/full", code=1)
    assert "cannot be read or written (No space left on device); free some space" in err
    long = "x" * 300
    err = complaint("plan", "--model", given / "model", "--hardware", long, *WORKLOAD[2:])
    assert f"{long}: cannot be read or written (File name too long)" in err


def test_output_that_a_full_disk_does_not_take_is_no_traceback(given, complaint, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert "No space left on device" in complaint("simulate", given / "plan.json", code=1)


def test_a_sample_that_the_terminals_encoding_lacks_ends_no_run(given, tmp_path, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main([str(part) for part in training(given, tmp_path / "run")]) == 0
    assert b"\\u27e6masked\\u27e7" in printed.getvalue()


# Damaged files


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [40.0, 24.0]}, {"shape": [-40, -24]}, {"dtype": ["F32"]}, {"data_offsets": [0.0, 3840.0]},
        {"data_offsets": [False, 3840]}, {"data_offsets": [-3840, 0]}, {"data_offsets": [0, 3840]},
    ],
)  # fmt: skip
def test_a_header_of_nonsense_is_refused(given, tmp_path, change: dict[str, Any]):
    whole = (given / "model" / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header["model.layers.0.mlp.up_proj.weight"] |= change
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    with pytest.raises(InputError, match="its safetensors header is damaged"):
        read_header(tmp_path / "a.safetensors")


def test_a_header_of_brackets_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5)
    with pytest.raises(InputError, match="nested too deeply"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize("family", [["llama"], {}, 5, None])
def test_a_model_type_that_is_no_name_is_refused(tmp_path, complaint, family: Any):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert f"model family {family!r} is not supported" in complaint("plan", "--model", tmp_path, *WORKLOAD)


@pytest.mark.parametrize("tokens", ["axb", "x16", "0x16"])
def test_costs_whose_keys_name_no_rows_are_refused(tokens):
    entry = MeasuredCost(seconds=1.0, source="by hand")
    with pytest.raises(ValueError, match=r"\[key\]\n.*match pattern"):
        OperationCosts(hardware="h", shape="s", precision="fp32", compiled=False, entries={f"forward.{tokens}": entry})


@pytest.mark.parametrize("key", ["transient_bytes", "kept_bytes"])
@pytest.mark.parametrize("num_bytes", [-1, 10**30, 10**400])
def test_measured_bytes_that_no_machine_has_are_refused(key, num_bytes):
    with pytest.raises(ValueError, match=f"{key}\n.* than or equal to"):
        MeasuredCost(seconds=1.0, source="by hand", **{key: num_bytes})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 0}', "eval_loss of step 0 is 'missing', not a number"),
        ('{"step": 0, "eval_loss": "a"}', "eval_loss of step 0 is 'a', not a number"),
        ("[" * 100_000, "evaluations.jsonl:1: is not JSON"),
        ('{"step": true, "eval_loss": 1}', "evaluations.jsonl:1: is not an object with an integer 'step'"),
    ],
)
def test_damaged_evaluations_are_named_by_a_resume(given, tmp_path, complaint, line, reason):
    settings = ["save_every=2", "eval_fraction=0.1", "eval_every=1"]
    complaint(*training(given, tmp_path / "run", *settings), code=0)
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    (tmp_path / "run" / "evaluations.jsonl").write_text(f"{line}\n")
    assert reason in complaint(*training(given, tmp_path / "run", *settings, "resume=auto"))


def test_a_checkpoint_of_more_applied_steps_than_done_ones_is_damaged(given, tmp_path, complaint):
    complaint(*training(given, tmp_path / "run", "save_every=2"), code=0)
    shutil.rmtree(tmp_path / "run" / "model")
    record = tmp_path / "run" / "checkpoints" / "step-00000004" / "checkpoint.json"
    changed = json.loads(record.read_text())
    changed["progress"]["applied_steps"] = 1000
    record.write_text(json.dumps(changed))
    err = complaint(*training(given, tmp_path / "run", "save_every=2", "resume=auto"))
    assert "applied_steps is 1000, more than the 4 steps done" in err


# A run that diverges


def test_a_run_that_diverged_fails_and_keeps_the_checkpoints_from_before(given, tmp_path, complaint, monkeypatch):
    monkeypatch.setattr("executor.run.learning_rate", lambda step, schedule: 1e30)
    output = tmp_path / "run"
    early_stop = ["eval_fraction=0.2", "eval_every=1", "early_stop_patience=2"]
    err = complaint(*training(given, output, "save_every=1"), code=1)
    assert "the loss has not been finite since step 1: the weights have diverged, and no model is exported" in err
    assert not (output / "model").exists()
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000001"]
    assert json.loads((output / "run.json").read_text())["status"] == "failed"
    err = complaint(*training(given, tmp_path / "b", "max_steps=30", *early_stop), code=1)
    assert "the weights have diverged" in err
    complaint(*training(given, tmp_path / "c", "max_steps=300"), code=1)
    lines = (tmp_path / "c" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) <= 1 + MOST_LOST_STEPS  # not 300: the weights cannot recover
