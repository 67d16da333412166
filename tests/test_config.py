"""The run config: what is read, what is refused, and what the refusal says."""

from pathlib import Path

import pytest

from executor.config import TrainConfig, load_config, resolved_yaml
from executor.foreign_names import FOREIGN_NAMES
from simulator.errors import InputError
from simulator.policy import Workload

GOOD = """\
model: models/tiny
data: rows.jsonl
output: runs/first
sequence_length: 128
tokens_per_step: 1024
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> list[str]:
    """The mistakes that loading `text` names, one a line, without the folder."""
    with pytest.raises(InputError) as caught:
        load_config(write(folder, text), overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_a_file_is_read_and_the_rest_has_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD + "learning_rate: 2e-5\nbetas: [0.9, 0.95]\nhost_memory: 1.5GiB\n"))
    assert config.learning_rate == 0.00002
    assert config.betas == (0.9, 0.95)
    assert config.host_memory == 3 * 2**29
    assert (config.clipping, config.precision, config.micro_batch_size) == ("global", "bf16", "auto")
    assert {"learning_rate", "host_memory"} < config.model_fields_set
    assert "seed" not in config.model_fields_set


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-5", 2e-5), ("1E3", 1000.0), ("3.e-4", 3e-4), (".5e1", 5.0), ("0.001", 0.001), ("1", 1.0), ("1e+2", 100.0)],
)
def test_numbers_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    assert load_config(write(tmp_path, f"{GOOD}max_grad_norm: {text}\n")).max_grad_norm == value
    assert load_config(write(tmp_path, GOOD), [f"max_grad_norm={text}"]).max_grad_norm == value


@pytest.mark.parametrize(
    "change",
    [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n"), lambda text: f"\n# note\n\n{text}"],
)
def test_marks_line_ends_and_blank_lines_make_no_difference(tmp_path: Path, change) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(change(GOOD).encode())
    assert load_config(path) == load_config(None, settings=dict(load_config(write(tmp_path, GOOD)).model_dump()))


def test_overrides_win_over_the_file_and_settings_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "seed: 1\nmax_steps: 1\nresume: auto\n")
    config = load_config(path, ["seed=2", "max_steps=2", "betas=[0.8, 0.9]"], settings={"max_steps": 3})
    assert (config.seed, config.max_steps, config.resume, config.betas) == (2, 3, "auto", (0.8, 0.9))


def test_a_plan_stands_in_for_model_and_sizes() -> None:
    config = load_config(None, settings={"plan": "plan.json", "data": "synthetic", "output": "out", "max_steps": 4})
    assert config.model is None
    with pytest.raises(InputError, match="the plan holds them"):
        config.workload(compiled=False)
    with pytest.raises(InputError, match=r"set model .*, sequence_length, tokens_per_step .*; or a plan"):
        load_config(None, ["data=a", "output=b"])


@pytest.mark.parametrize("more", ["", "clipping: none\nlearning_rate: 1e-30\ncompiled: true\ndevice_memory: 24GiB\n"])
def test_the_resolved_config_reads_back_to_itself(tmp_path: Path, more: str) -> None:
    config = load_config(write(tmp_path, GOOD + more))
    text = resolved_yaml(config)
    assert load_config(write(tmp_path, text)) == config
    assert "warmup_steps: 0" in text


def test_settings_of_data_are_read_with_their_truth_values(tmp_path: Path) -> None:
    lines = "columns: {prompt: question}\npacking: no\nskip_invalid: yes\nlong_samples: drop\ncache: /somewhere\n"
    config = load_config(write(tmp_path, GOOD + lines), ["columns={text: body}", "train_on_prompt=true"])
    assert config.columns == {"text": "body"}
    assert (config.packing, config.skip_invalid, config.train_on_prompt) == (False, True, True)
    assert (config.long_samples, config.cache) == ("drop", "/somewhere")


def test_a_map_of_columns_that_are_none_is_told_with_the_other_contradictions(tmp_path: Path) -> None:
    mistakes = refusal(tmp_path, GOOD + "columns: {promt: question}\nwarmup_steps: 9\nmax_steps: 3\n")
    assert "run.yaml: columns: unknown column 'promt'; did you mean 'prompt'?" in mistakes[0]
    assert "warmup_steps: 9" in mistakes[1]


def test_workload_is_the_simulators_view(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD + "micro_batch_size: 2\nstate_format: auto\ngradient_format: bf16\n"))
    assert config.workload(compiled=True) == Workload(
        sequence_length=128, tokens_per_step=1024, gradient_format="bf16", compiled=True, micro_batch_rows=2
    )


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", "run.yaml:1:1: ", "is empty"),
        ("# only a note\n", "run.yaml:1:1: ", "is empty"),
        ("- model: a\n- data: b\n", "run.yaml:1:1: ", "is a list"),
        ("just words\n", "run.yaml:1:1: ", "is a single value"),
        ("model: a\nbetas:\n\t- 1\n", "run.yaml:3:1: ", "a tab"),
        ("model: a\ndata: [1, 2\noutput: b\n", "run.yaml:3:7: ", ""),
        ("model: a\ndata: b\nmodel: c\n", "run.yaml:3:1: ", "the key 'model' stands here and on line 1"),
        ("model: a\nx: {y: 1, y: 2}\n", "run.yaml:2:11: ", "the key 'y' stands here and on line 2"),
        ("model: a\n? [1]\n: b\n", "run.yaml:2:3: ", "a key must be a name"),
        ("model: a\ndata: \x07\n", "run.yaml:2:7: ", "character that YAML does not allow"),
        ("model: a\n---\nmodel: b\n", "run.yaml:2:1: ", "another document"),
        ("model: !!python/object/apply:os.system [ls]\n", "run.yaml:1:8: ", "could not determine a constructor"),
    ],
)
def test_text_that_is_no_mapping_names_line_and_column(tmp_path: Path, text: str, place: str, reason: str) -> None:
    (mistake,) = refusal(tmp_path, text)
    assert mistake.startswith(place)
    assert reason in mistake


def test_a_file_that_is_not_there_suggests_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(InputError, match=r"rum\.yaml: does not exist; did you mean '.*/run\.yaml'\?"):
        load_config(tmp_path / "rum.yaml")
    with pytest.raises(InputError, match="is a folder; name a file of YAML in it"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("model: caf\xe9\n".encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("learnin_rate: 1", "unknown key 'learnin_rate'; did you mean 'learning_rate'?"),
        ("per_device_train_batch_size: 4", "here it is micro_batch_size"),
        ("cutoff_len: 4096", "here it is sequence_length"),
        ("num_train_epochs: 3", "here it is num_epochs"),
        ("val_set_size: 0.05", "here it is eval_fraction"),
        ("per_device_eval_batch_size: 8", "here it is micro_batch_size"),
        ("report_to: wandb", "here it is loggers"),
        ("lr_scheduler_type: cosine", "here it is lr_schedule"),
        ("optim: adamw_torch", "the optimizer is AdamW"),
        ("gradient_checkpointing: true", "here it is the planner's to decide"),
        ("sample_packing: true", "here it is packing"),
        ("train_on_inputs: true", "here it is train_on_prompt"),
        ("zzz: 1", "unknown key 'zzz'"),
        ("optimizer: {epsilon: 1e-6, weight_decay: 0}", "epsilon and weight_decay stand at the top level"),
        ("train.seed: 3", "'seed' stands at the top level"),
        ("on: 1", "unknown key 'on'"),
        ("optimizer.lr: 1", "'optimizer.lr'; here it is learning_rate"),
        (
            "optimizer: {lr: 1, epsilon: 1}",
            "epsilon stands at the top level; lr: here it is learning_rate",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_its_name_here(tmp_path: Path, line: str, answer: str) -> None:
    (mistake,) = refusal(tmp_path, f"{GOOD}{line}\n")
    assert mistake.startswith("run.yaml:6: ")
    assert answer in mistake


def test_names_of_other_tools_are_no_names_of_ours_and_lead_to_ours() -> None:
    assert not set(FOREIGN_NAMES) & set(TrainConfig.model_fields)
    for answer in FOREIGN_NAMES.values():
        assert answer.startswith(("the planner's", *TrainConfig.model_fields))


@pytest.mark.parametrize(
    ("tool", "keys"),
    {
        "TrainingArguments and TRL": "output_dir per_device_train_batch_size per_device_eval_batch_size eval_strategy "
        "eval_steps num_train_epochs lr_scheduler_type lr_scheduler_kwargs logging_steps save_strategy save_steps "
        "save_total_limit bf16 optim report_to run_name resume_from_checkpoint gradient_checkpointing max_length "
        "adam_beta1 adam_epsilon torch_compile deepspeed fsdp dataloader_num_workers data_seed auto_find_batch_size",
        "LLaMA-Factory": "model_name_or_path dataset cutoff_len val_size eval_dataset freeze_trainable_layers template "
        "finetuning_type lora_rank lora_target flash_attn quantization_bit",
        "axolotl": "base_model datasets sequence_len val_set_size test_datasets lr_scheduler cosine_min_lr_ratio "
        "saves_per_epoch evals_per_epoch early_stopping_patience wandb_project unfrozen_parameters",
        "torchtune": "epochs max_steps_per_epoch batch_size clip_grad_norm enable_activation_checkpointing "
        "enable_activation_offloading compile dtype optimizer_in_bwd metric_logger num_warmup_steps "
        "log_every_n_steps run_val_every_n_steps",
    }.items(),
)
def test_a_config_of_another_tool_is_translated_key_by_key(tmp_path: Path, tool: str, keys: str) -> None:
    text = GOOD + "".join(f"{key}: 1\n" for key in keys.split())
    mistakes = refusal(tmp_path, text)
    assert len(mistakes) == len(keys.split())
    assert [mistake for mistake in mistakes if "here it is" not in mistake] == []


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("columns: {prompt: no}", "columns: input should be a valid string"),
        ("columns: [prompt]", "columns: input should be a valid dictionary"),
        ("long_samples: cut", "long_samples: input should be 'auto', 'truncate', 'split' or 'drop', not 'cut'"),
        ("packing: best", "packing: input should be a valid boolean"),
        ("skip_invalid: 2", "skip_invalid: input should be a valid boolean"),
        ("learning_rate: fast", "learning_rate: input should be a valid number"),
        ("learning_rate: 0", "learning_rate: input should be greater than 0, not 0"),
        ("learning_rate: .nan", "learning_rate: "),
        ("learning_rate: .inf", "learning_rate: input should be a finite number"),
        ("micro_batch_size: half", "micro_batch_size: "),
        ("micro_batch_size: yes", "takes no truth value"),
        ("max_steps: 2.5", "max_steps: input should be a valid integer"),
        ("resume: no", "resume: takes no truth value"),
        ("betas: [0.9]", "betas: "),
        ("betas: [0.9, 1.0]", "betas: input should be less than 1"),
        ("lr_schedule: exponential", "lr_schedule: input should be 'constant', 'linear', 'cosine' or 'wsd'"),
        ("device_memory: 24 apples", "device_memory: should be a size"),
        ("host_memory: -5", "host_memory: "),
        ("keep_checkpoints: 0", "keep_checkpoints: input should be greater than 0"),
        ("warmup_ratio: 1.5", "warmup_ratio: input should be less than 1"),
        ("eval_fraction: 0", "eval_fraction: input should be greater than 0"),
        ("min_lr_ratio: 2", "min_lr_ratio: input should be less than or equal to 1"),
        ("loggers: [mlflow]", "loggers: input should be 'tensorboard', 'wandb' or 'trackio'"),
        ("early_stop_patience: 0", "early_stop_patience: input should be greater than 0"),
        ("epsilon:", "epsilon: input should be a valid number, not None"),
    ],
)
def test_a_wrong_value_names_file_line_and_key(tmp_path: Path, line: str, answer: str) -> None:
    (mistake,) = refusal(tmp_path, f"{GOOD}{line}\n")
    assert mistake.startswith("run.yaml:6: ")
    assert answer in mistake


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    text = "<<: &shared {seed: 5}\n" + GOOD.replace("128", "&length 128").replace("1024", "*length")
    config = load_config(write(tmp_path, text))
    assert (config.seed, config.tokens_per_step) == (5, 128)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("micro_batch_size: 3", "micro_batch_size 3 does not divide the 8 rows of a step"),
        ("tokens_per_step: 1000", "tokens_per_step 1000 is not a multiple of sequence_length 128"),
        ("{max_steps: 3, warmup_steps: 9}", "warmup_steps: 9, but the run has 3 steps"),
        ("data: synthetic", "max_steps: synthetic data has no end"),
        ("{clipping: none, max_grad_norm: 1.0}", "has no effect with clipping 'none'"),
        ("{max_steps: 9, num_epochs: 2}", "max_steps and num_epochs: both say how long the run is"),
        ("{warmup_steps: 2, warmup_ratio: 0.1}", "warmup_steps and warmup_ratio: both say how long the warm-up is"),
        ("{eval_data: a, eval_fraction: 0.1}", "eval_data and eval_fraction: both say what to evaluate on"),
        ("eval_data: synthetic", "eval_data: synthetic data has no end"),
        ("eval_every: 5", "eval_every: there is nothing to evaluate on"),
        ("{eval_data: a, early_stop_patience: 2}", "early_stop_patience: counts evaluations during the run; set"),
        ("{data: synthetic, max_steps: 2, eval_fraction: 0.1}", "eval_fraction: synthetic data has no end"),
        ("global_batch_size: 16", "16 rows, but tokens_per_step 1024 / sequence_length 128 = 8 rows"),
        ("gradient_accumulation_steps: 3", "3 does not divide a step: tokens_per_step 1024 / sequence_length 128 = 8"),
        (
            "{micro_batch_size: 2, gradient_accumulation_steps: 8}",
            "micro_batch_size 2 x 8 = 16 rows, but tokens_per_step 1024 / sequence_length 128 = 8 rows",
        ),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, line: str, answer: str) -> None:
    overrides = [part.strip().replace(": ", "=") for part in line.strip("{}").split(",")]
    (mistake,) = refusal(tmp_path, GOOD, *overrides)
    assert answer in mistake


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("data:", "dataset:") + "seed: x\nmax_steps: 3\nwarmup_steps: 5\nwarmup: 4\n"
    mistakes = refusal(tmp_path, text, "lr=1", "epsilon", "weight_decay=[", "save_every=0")
    assert [mistake.split(":")[0] for mistake in mistakes] == [
        *["'epsilon'", "'weight_decay=['"],
        *["run.yaml", "run.yaml", "'lr=1'"],  # dataset, warmup
        *["run.yaml", "'save_every=0'"],  # seed
        "run.yaml and the command line",  # the warm-up is longer than the run
    ]
    assert "2: unknown key 'dataset'; here it is data" in mistakes[2]
    assert not any("is missing" in mistake for mistake in mistakes), "misnamed is not missing"
    assert "warmup_steps: 5, but the run has 3 steps" in mistakes[-1]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    mistakes = refusal(tmp_path, "sequence_length: 128\nmodel: a\n")
    assert mistakes == [
        "run.yaml: data: is missing: a file or a folder, hub:owner/name, or synthetic",
        "run.yaml: output: is missing: the run's own directory",
        "run.yaml: set tokens_per_step (or global_batch_size in rows, or micro_batch_size with "
        "gradient_accumulation_steps); or a plan, which holds what is missing",
    ]


@pytest.mark.parametrize(
    ("lines", "tokens", "micro_batch"),
    [
        ("tokens_per_step: 1024\ngradient_accumulation_steps: 4\n", 1024, 2),
        ("global_batch_size: 6\n", 768, "auto"),
        ("global_batch_size: 6\nmicro_batch_size: 3\ngradient_accumulation_steps: 2\n", 768, 3),
        ("micro_batch_size: 4\ngradient_accumulation_steps: 16\n", 8192, 4),  # as other tools say it
    ],
)
def test_a_step_may_be_said_in_tokens_rows_or_micro_batches(
    tmp_path: Path, lines: str, tokens: int, micro_batch: int | str
) -> None:
    text = GOOD.replace("tokens_per_step: 1024\n", lines)
    config = load_config(write(tmp_path, text))
    assert (config.tokens_per_step, config.micro_batch_size) == (tokens, micro_batch)
    assert load_config(write(tmp_path, resolved_yaml(config))) == config


def test_a_single_pattern_or_logger_is_a_list_of_one(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD + "freeze: '*.bias'\nloggers: tensorboard\n"))
    assert (config.freeze, config.loggers) == (("*.bias",), ("tensorboard",))
    assert load_config(write(tmp_path, GOOD), ["freeze=[a.*, b.*]"]).freeze == ("a.*", "b.*")


def test_the_schedule_of_a_config(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD + "lr_schedule: wsd\nwarmup_ratio: 0.1\nmin_lr_ratio: 0.1\n"))
    assert config.schedule(50).warmup_steps == 5
    assert config.schedule(1).warmup_steps == 0
    late = load_config(write(tmp_path, GOOD + "warmup_steps: 7\n"))
    with pytest.raises(InputError, match="warmup_steps: 7, but the run has 7 steps"):
        late.schedule(7)
