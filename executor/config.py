"""The run config: what the user asks of a training run, from YAML and `key=value` overrides.

Every choice about numbers is here; where and when things happen is the plan's.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml

from executor.batch_size import BatchSize
from executor.data.documents import LongSamples
from executor.data.row_kind import check_columns
from executor.foreign_names import FOREIGN_NAMES
from executor.loggers import LoggerName
from executor.resume import ResumeChanges
from executor.schedule import MOST_STEPS, LearningRateSchedule, Schedule, check_schedule, warmup_steps_of
from executor.yaml_mapping import no_truth_value, parse_yaml_value, read_yaml_mapping
from simulator.errors import InputError
from simulator.formats import GradientFormat, Precision, StateFormat
from simulator.nearest import did_you_mean, nearest_name
from simulator.policy import Clipping, Workload
from simulator.schema import Schema, describe
from simulator.units import parse_bytes

SYNTHETIC_DATA = "synthetic"  # in place of a path: random tokens, to benchmark
# What a user may set in place of a key, and what may stand there.
_HOW_TO_SAY = {
    "model": "model (a Hugging Face folder, or its config.json)",
    "tokens_per_step": "tokens_per_step (or global_batch_size in rows, or micro_batch_size with "
    "gradient_accumulation_steps)",
    "data": "a file or a folder, hub:owner/name, or synthetic",
    "output": "the run's own directory",
}
_TRUTH_VALUES = ("compiled", "train_on_prompt", "skip_invalid", "packing")

Name = Annotated[str, pydantic.Field(min_length=1)]


def _expanded(value: Any) -> Any:
    """`~` as the user's home: no shell has read a YAML file."""
    return os.path.expanduser(value) if isinstance(value, str) else value


PathName = Annotated[Name, pydantic.BeforeValidator(_expanded)]
Count = Annotated[int, pydantic.Field(gt=0)]


def _bytes(value: Any) -> Any:
    """`24GiB` and plain numbers of bytes. Anything else is left for the type to refuse."""
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except InputError as error:
        raise ValueError("should be a size: a number of bytes, or one with KiB, MiB, GiB, KB, MB or GB") from error


Size = Annotated[int, pydantic.BeforeValidator(_bytes), pydantic.Field(ge=0)]
Memory = Annotated[int, pydantic.BeforeValidator(_bytes), pydantic.Field(gt=0)]
Share = Annotated[float, pydantic.Field(gt=0, lt=1)]


def _listed(value: Any) -> Any:
    """A single name where a list is meant."""
    return [value] if isinstance(value, str) else value


Patterns = Annotated[tuple[Name, ...], pydantic.BeforeValidator(_listed)]
Loggers = Annotated[tuple[LoggerName, ...], pydantic.BeforeValidator(_listed)]


class TrainConfig(Schema):
    """All settings of a run. `model_fields_set` says which the user gave: a plan may decide the others.

    `model`, `sequence_length` and `tokens_per_step` may be left out where `plan` holds them.
    """

    # What to train, on what, to where
    model: PathName | None = None  # a Hugging Face folder, or its config.json: random weights, for benchmarks
    data: PathName  # a file or a folder, "hub:owner/name", or "synthetic"
    output: PathName  # the run directory
    plan: PathName | None = None  # a plan.json; without one the run is planned first
    hardware: PathName | None = None  # a catalogue name or a profile; without one this machine is probed
    costs: PathName | None = None  # measured operation costs; modelled where there are none

    # What of the data is trained
    columns: dict[Name, Name] = pydantic.Field(default_factory=dict)  # column here -> the rows' own name for it
    train_on_prompt: bool = False  # prompts are masked otherwise
    skip_invalid: bool = False  # count rows that cannot be read, instead of refusing them
    long_samples: LongSamples = "auto"  # auto: text is split, other samples are cut off
    packing: bool = False  # several documents in a row, which do not see each other
    cache: PathName | None = None  # the folder of tokenized data; None: in the user's cache folder

    # One step
    sequence_length: Count | None = None  # tokens in a row
    tokens_per_step: Count | None = None  # decides the result; micro-batches only cut it up
    global_batch_size: Count | None = None  # the same in rows: tokens_per_step / sequence_length
    micro_batch_size: Count | Literal["auto"] = "auto"  # rows; a number pins the planner
    gradient_accumulation_steps: Count | None = None  # micro-batches of a step: follows from the others, and must agree

    # The optimizer: AdamW
    learning_rate: float = pydantic.Field(default=2e-5, gt=0, le=10)  # the peak
    lr_schedule: LearningRateSchedule = "cosine"  # what follows the warm-up; wsd: stable, then a decay
    warmup_steps: int = pydantic.Field(default=0, ge=0)  # the rate rises over these; the first one's is not 0
    warmup_ratio: Share | None = None  # the same as a share of the run, rounded up
    min_lr_ratio: float = pydantic.Field(default=0.0, ge=0, le=1)  # where the fall would end, as a share of the peak
    wsd_decay_ratio: float = pydantic.Field(default=0.2, gt=0, le=1)  # share of the steps after the warm-up that decay
    weight_decay: float = pydantic.Field(
        default=0.0, ge=0, le=100
    )  # on matrices, embeddings too; not on norms and biases
    betas: tuple[
        Annotated[float, pydantic.Field(ge=0, lt=1)],
        Annotated[float, pydantic.Field(ge=0, lt=1)],
    ] = (0.9, 0.999)  # how slowly the two moments forget
    epsilon: float = pydantic.Field(default=1e-8, gt=0, le=1)  # beside the root of the second moment
    max_grad_norm: float = pydantic.Field(default=1.0, gt=0, le=1e9)  # of all trained parameters together
    freeze: Patterns = ()  # parameters that are not trained, as globs: model.layers.0.*, *.bias

    # Evaluation
    eval_data: PathName | None = None  # what to evaluate on, read like data
    eval_fraction: Share | None = None  # or a part of data that is held out
    eval_every: Count | None = None  # steps between evaluations; None: one at the end
    early_stop_patience: Count | None = None  # stop after so many evaluations without a lower loss

    # The run
    max_steps: Count | None = None  # None: once through the data, or num_epochs
    num_epochs: float | None = pydantic.Field(default=None, gt=0)  # in place of max_steps; may be a fraction
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)  # of the order of rows, and of random weights
    log_every: Count = 1  # steps between lines on the console; metrics.jsonl has every step
    loggers: Loggers = ()  # where metrics go as well: tensorboard, wandb, trackio
    save_every: Count | None = None  # steps between checkpoints; None: one at the end
    keep_checkpoints: Count = 2  # the newest ones; earlier ones are removed
    resume: PathName = "never"  # "never"; "auto": the newest complete one in output, if any; or a checkpoint's path
    resume_changes: ResumeChanges = "refuse"  # "accept": go on also where data, schedule or optimizer have changed

    # Numbers
    precision: Precision = "bf16"  # of weights and activations; the master is fp32 in bf16 runs too; fp64 is to compare
    gradient_format: GradientFormat = "fp32"  # of completed gradients; sums are fp32 whatever it is
    state_format: StateFormat | Literal["auto"] = "fp32"  # auto: the planner may choose
    clipping: Clipping = "global"  # by the norm of all gradients, of each layer's alone, or not at all
    compiled: bool | Literal["auto"] = "auto"  # auto: on a GPU

    # Limits of the plan; None: what the hardware has
    device_memory: Memory | None = None  # of the GPU
    host_memory: Memory | None = None  # of the process and its children
    nvme_memory: Size = 0  # of the disk, for state: not built yet

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        return value if info.field_name in _TRUTH_VALUES else no_truth_value(value)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_batch_size(cls, values: Any) -> Any:
        return {**values, **BatchSize.of(values).filled()} if isinstance(values, dict) else values

    @pydantic.model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if contradictions := list(self._contradictions()):
            raise ValueError("\n".join(contradictions))
        return self

    def _contradictions(self) -> Iterator[str]:
        missing = [key for key in ("model", "sequence_length", "tokens_per_step") if getattr(self, key) is None]
        if "tokens_per_step" in missing and BatchSize.of(dict(self)).rows is not None:
            missing.remove("tokens_per_step")  # said in rows, it lacks the length only
        if self.plan is None and missing:
            wanted = ", ".join(_HOW_TO_SAY.get(key, key) for key in missing)
            yield f"set {wanted}; or a plan, which holds what is missing"
        try:
            check_columns(self.columns)
        except InputError as error:
            yield str(error)
        if self.sequence_length is not None and self.tokens_per_step is not None:
            try:
                self.workload(compiled=False)
            except InputError as error:
                yield str(error)
        yield from BatchSize.of(dict(self)).contradictions()
        if self.max_steps is not None:
            try:
                check_schedule(warmup_steps=self.warmup_steps, max_steps=self.max_steps)
            except InputError as error:
                yield str(error)
        elif self.data == SYNTHETIC_DATA:
            yield "max_steps: synthetic data has no end; set the number of steps"
        if self.max_steps is not None and self.num_epochs is not None:
            yield "max_steps and num_epochs: both say how long the run is; leave one of the two out (null)"
        if self.warmup_steps and self.warmup_ratio is not None:
            yield "warmup_steps and warmup_ratio: both say how long the warm-up is; leave one of the two out"
        yield from self._contradictions_of_evaluation()
        if (decay := self.learning_rate * self.weight_decay) > 1:
            yield (
                f"learning_rate and weight_decay: a step would take {decay:.3g} of each weight away, more than there "
                "is; lower one of the two"
            )
        if self.resume == "never" and self.resume_changes == "accept":
            yield "resume_changes: has no effect without resume; set resume=auto or a checkpoint's path"
        if self.clipping == "none" and "max_grad_norm" in self.model_fields_set:
            yield "max_grad_norm: has no effect with clipping 'none'; leave one of the two out"

    def _contradictions_of_evaluation(self) -> Iterator[str]:
        if self.eval_data is not None and self.eval_fraction is not None:
            yield "eval_data and eval_fraction: both say what to evaluate on; leave one of the two out"
        if self.eval_data is None and self.eval_fraction is None:
            for key in ("eval_every", "early_stop_patience"):
                if getattr(self, key) is not None:
                    yield f"{key}: there is nothing to evaluate on; set eval_data or eval_fraction"
        elif self.early_stop_patience is not None and self.eval_every is None:
            yield "early_stop_patience: counts evaluations during the run; set eval_every"
        if self.eval_data == SYNTHETIC_DATA:
            yield "eval_data: synthetic data has no end; name a file or a folder"
        if self.eval_fraction is not None and self.data == SYNTHETIC_DATA:
            yield "eval_fraction: synthetic data has no end, so no part of it; leave eval_fraction out"

    def schedule(self, max_steps: int) -> Schedule:
        """The learning rate of a run of so many steps. Raises InputError where the warm-up is longer."""
        warmup_steps = self.warmup_steps
        if self.warmup_ratio is not None:
            warmup_steps = warmup_steps_of(self.warmup_ratio, max_steps)
        check_schedule(warmup_steps=warmup_steps, max_steps=max_steps)
        return Schedule(
            self.learning_rate, self.lr_schedule, warmup_steps, max_steps, self.min_lr_ratio, self.wsd_decay_ratio
        )

    def workload(self, *, compiled: bool) -> Workload:
        """The simulator's view of one step, `compiled` and `state_format` resolved from auto. Raises InputError."""
        if self.sequence_length is None or self.tokens_per_step is None:
            raise InputError("sequence_length and tokens_per_step: not set; the plan holds them")
        try:
            return Workload(
                sequence_length=self.sequence_length,
                tokens_per_step=self.tokens_per_step,
                precision=self.precision,
                gradient_format=self.gradient_format,
                state_format="fp32" if self.state_format == "auto" else self.state_format,
                clipping=self.clipping,
                compiled=compiled,
                micro_batch_rows=None if self.micro_batch_size == "auto" else self.micro_batch_size,
                packed=self.packing,
            )
        except pydantic.ValidationError as error:
            raise InputError(describe(error)) from error


def load_config(
    path: Path | str | None, overrides: Sequence[str] = (), *, settings: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The config of a YAML file (None: an empty one), then `key=value` overrides, then `settings`; the last one wins.

    Raises InputError that lists every mistake, one a line, each with its place.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}  # key -> where the user wrote it
    mistakes: list[str] = []
    if path is not None:
        mapping = read_yaml_mapping(path)
        values = dict(mapping.values)
        places = {key: f"{path}:{line}: " for key, line in mapping.lines.items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            mistakes.append(f"'{override}': an override is written key=value")
            continue
        places[key] = f"'{override}': "
        try:
            values[key] = parse_yaml_value(text)
        except InputError as error:
            values.pop(key, None)
            mistakes.append(f"{places[key]}{error}")
    for key, value in (settings or {}).items():
        values[key] = value
        places[key] = ""

    meant = set()  # keys written under another name: not missing, only misnamed
    for key in [key for key in values if key not in TrainConfig.model_fields]:
        sentence, names = _unknown(key, values.pop(key))
        mistakes.append(f"{places.get(key, '')}{sentence}")
        meant.update(names)
    # Where keys contradict each other, either place may be the one to mend.
    source = f"{path}{' and the command line' if overrides else ''}: " if path is not None else ""
    config, more = _validated(values, meant, places, source)
    mistakes += more
    if config is None or mistakes:
        raise InputError("\n".join(mistakes))
    return config


def resolved_yaml(config: TrainConfig) -> str:
    """Every setting, defaults included, as YAML that `load_config` reads back to the same config."""
    idle = {"max_grad_norm"} if config.clipping == "none" else set()
    return yaml.safe_dump(config.model_dump(mode="json", exclude=idle), sort_keys=False, allow_unicode=True)


def _validated(
    values: Mapping[str, Any], meant: set[str], places: Mapping[str, str], source: str
) -> tuple[TrainConfig | None, list[str]]:
    """The config and no mistakes, or None and all of them: of single keys, then between those keys that are right."""
    try:
        return TrainConfig.model_validate(_with_stand_ins(values, meant)), []
    except pydantic.ValidationError as error:
        between: list[str] = []
        by_key: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "string_type":  # a folder called 2026-01-31 is a date to YAML
                message += ", in quotes where it looks like something else"
            if item["loc"]:
                by_key.setdefault(str(item["loc"][0]), []).append(message[0].lower() + message[1:])
            else:
                between += [source + line for line in message.splitlines()]
    mistakes = []
    for key, reasons in by_key.items():
        wrong = f"{' or '.join(dict.fromkeys(reasons))}, not"
        what = f"{wrong} {_short(values[key])}" if key in values else f"is missing: {_HOW_TO_SAY[key]}"
        mistakes.append(f"{places.get(key) or source}{key}: {what}")
    if by_key:
        # pydantic compares keys only where each is right by itself, and the user wants to hear all at once.
        right = {key: value for key, value in values.items() if key not in by_key}
        between = _validated(right, meant | set(by_key), places, source)[1]
    return None, mistakes + between


def _short(value: Any) -> str:
    """A value as the user may know it again, also where a whole file stands in place of a number."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _with_stand_ins(values: Mapping[str, Any], wrong: set[str]) -> dict[str, Any]:
    """`values` without the wrong keys' absence: what is written, though wrongly, is not missing."""
    stand_ins = {"data": "-", "output": "-", "max_steps": MOST_STEPS}
    filled = {**{key: value for key, value in stand_ins.items() if key in wrong}, **values}
    if wrong & {"model", "sequence_length", "tokens_per_step", "global_batch_size"}:
        filled.setdefault("plan", "-")
    return filled


def _unknown(key: str, value: Any) -> tuple[str, list[str]]:
    """What to say of an unknown key, and the known keys that it was probably meant for."""
    known, last = TrainConfig.model_fields, key.rpartition(".")[2]
    if isinstance(value, dict) and key not in FOREIGN_NAMES:
        inside = [name for name in value if name in known]
        foreign = [name for name in value if name in FOREIGN_NAMES]
        verb = "stands" if len(inside) == 1 else "stand"
        told = [f"{' and '.join(inside)} {verb} at the top level"] * bool(inside)
        told += [f"{name}: here it is {FOREIGN_NAMES[name]}" for name in foreign]
        if told:
            return f"unknown section '{key}'; {'; '.join(told)}", [*inside, *(n for f in foreign for n in _ours(f))]
    if last != key and last in known:
        return f"unknown key '{key}'; '{last}' stands at the top level", [last]
    for name in (key, last):
        if name in FOREIGN_NAMES:
            return f"unknown key '{key}'; here it is {FOREIGN_NAMES[name]}", _ours(name)
    nearest = nearest_name(key, known)
    return f"unknown key '{key}'{did_you_mean(nearest)}", [nearest] if nearest else []


def _ours(foreign: str) -> list[str]:
    """The keys that another trainer's name stands for."""
    return [name for name in TrainConfig.model_fields if FOREIGN_NAMES[foreign].startswith(name)]
