"""`bench`: a matrix of workloads, each planned, trained and recorded beside its ideal and beside plain PyTorch.

All stages of a row run in one process, one after another, so that their ratios are of one machine in one state: ideal,
training, ideal again.
"""

import gc
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import pydantic
import torch

from analysis.plain_torch import measure_plain
from executor.config import Memory, load_config
from executor.data.dataset import SYNTHETIC, open_dataset
from executor.ideal import MeasuredIdeal, measure_ideal
from executor.launch import launch
from executor.record import RunRecord, append_result, load_results
from executor.run import Interrupted
from executor.run_directory import RECORD, holds_run
from executor.run_plan import allowed_bytes
from executor.yaml_mapping import no_truth_value, read_yaml_mapping
from planner.ablation import ABLATIONS, ablate
from planner.plan import Limits, Plan
from planner.search import plan as run_plan
from simulator.costs import OperationCosts
from simulator.errors import ConveyorError, InputError
from simulator.families import with_layers
from simulator.formats import GradientFormat
from simulator.hardware import HardwareProfile
from simulator.ideal import IdealStep, ideal_steps
from simulator.model import ModelSpec, model_spec, read_model_config, transformers_config
from simulator.policy import Workload
from simulator.predict import step_figures
from simulator.schema import Schema, describe
from simulator.units import format_bytes, format_seconds

WIDTH, _CASE = 100, 25  # columns of the table, and of a case's name in it
WARM_SECONDS = 30.0
TIMED_STEPS = 5
# Norms of random models are between 1 and 100: one limit clips every step, the other none.
CLIPS = {"clipped": 1e-3, "unclipped": 1e6}
PLAIN_BUDGET, PLAIN_TOKENS = 0.7, 8192  # the fastest of those tried on an H200 that leave room for the state

Count = Annotated[int, pydantic.Field(gt=0)]


class Row(Schema):
    """One workload of the matrix."""

    case: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=100)]  # names folders
    model: str  # a Hugging Face folder or its config.json
    num_layers: Count | None = None  # the model cut to its first layers
    sequence_length: Count
    tokens_per_step: Count
    micro_batch_size: Count | None = None
    gradient_format: GradientFormat = "bf16"
    device_memory: Memory | None = None
    host_memory: Memory | None = None
    costs: str | None = None  # measured costs of this row's layers, where they are not those given for all

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any) -> Any:
        return no_truth_value(value)

    @pydantic.model_validator(mode="after")
    def _is_a_workload(self) -> Self:
        try:
            self.workload()
        except pydantic.ValidationError as error:
            raise ValueError(describe(error)) from error
        return self

    def workload(self) -> Workload:
        return Workload(
            sequence_length=self.sequence_length, tokens_per_step=self.tokens_per_step, precision="bf16",
            gradient_format=self.gradient_format, micro_batch_rows=self.micro_batch_size, compiled=True,
        )  # fmt: skip


class Matrix(Schema):
    """The rows of a benchmark."""

    rows: tuple[Row, ...] = pydantic.Field(min_length=1)

    @pydantic.model_validator(mode="after")
    def _names_differ(self) -> Self:
        """A row's runs go into a folder of its name."""
        cases = [row.case for row in self.rows]
        if repeated := sorted({case for case in cases if cases.count(case) > 1}):
            raise ValueError(f"rows: more than one has the case {', '.join(repeated)}; give each a name of its own")
        return self


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row found; seconds a step, None where it was not measured."""

    row: Row
    plan: Plan
    records: tuple[RunRecord, ...]
    ideal: MeasuredIdeal | None
    plain_seconds: float | None
    ablations: dict[str, RunRecord | str] = field(default_factory=dict)  # or why there is nothing to run


def load_matrix(path: Path | str) -> Matrix:
    """A matrix from a YAML file. Raises InputError with the place of every mistake."""
    try:
        return Matrix.model_validate(dict(read_yaml_mapping(path).values))
    except pydantic.ValidationError as error:
        raise InputError(f"{path}: {describe(error, keys=list(Row.model_fields))}") from error


def bench(
    rows: Sequence[Row],
    hardware: HardwareProfile,
    output: Path,
    *,
    costs: OperationCosts | None = None,
    clips: Sequence[str] = tuple(CLIPS),
    with_ideal: bool = True,
    with_plain: bool = True,
    ablations: Sequence[str] = (),
    warm_seconds: float = WARM_SECONDS,
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[RowResult]:
    """Run every row and give what it found; each record is added to `results` as soon as it is there.

    `ablations` (of planner.ablation) are further runs of a row, with the first of `clips`, without one means each.
    A run that fails, as where memory runs out, is recorded as that, and the next one starts.

    Raises InputError for a row that no plan fits, for output directories that hold runs already and for a results file
    that is none, before the first row runs.
    """
    if hardware.device.kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"--hardware {hardware.name}: has a GPU, and torch finds none here; bench runs on this machine"
        )
    device = torch.device("cuda", 0) if hardware.device.kind == "cuda" else torch.device("cpu")
    if results is not None and results.exists():
        load_results(results)
    if output.exists() and not output.is_dir():
        raise InputError(f"--output: {output} is a file; name a folder")
    _require_own_folders(output, rows, clips, ablations)
    planned = [_planned(row, hardware, output, costs, compiled=device.type == "cuda") for row in rows]
    found = []
    for row, (config, path, plan) in zip(rows, planned, strict=True):
        model, workload = plan.model, plan.inputs.workload
        point = _ideal_point(model, workload, hardware, plan.costs) if with_ideal else None
        ideals = [_ideal(config, workload, point, device, warm_seconds)] if point else []
        records: list[RunRecord] = []
        ideal = None
        try:
            for clip in clips:
                records.append(_train(row, plan, path, output, clip, warm_seconds, say))
            if point:
                ideals.append(_ideal(config, workload, point, device, warm_seconds))
                ideal = MeasuredIdeal(sum(i.step_seconds for i in ideals) / 2, ideals[0].num_layers)
                figures = step_figures(
                    model, workload, ideal.step_seconds, device_peak_bytes=0, host_peak_bytes=0, breakdown_seconds={}
                )
                records = [record.model_copy(update={"ideal": figures}) for record in records]
        finally:  # what was measured before a stop or a failure counts too
            if results is not None:
                for record in records:
                    append_result(results, record)
        plain = _plain(config, workload, device, warm_seconds, say) if with_plain else None
        result = RowResult(row, plan, tuple(records), ideal, plain)
        found.append(result)
        say(table(found))
        for name in ablations:
            ablated = _ablated(row, plan, name, path, output, clips[0], warm_seconds, say)
            result.ablations[name] = ablated
            if results is not None and isinstance(ablated, RunRecord):
                append_result(results, ablated)
            say(table(found))
    return found


def _require_own_folders(output: Path, rows: Sequence[Row], clips: Sequence[str], ablations: Sequence[str]) -> None:
    """Refuse run directories that two runs would share, or that hold one. Raises InputError."""
    cases = [f"{row.case}-{clip}" for row in rows for clip in clips]
    cases += [f"{row.case}-{name}-{clips[0]}" for row in rows for name in ablations]
    if repeated := sorted({case for case in cases if cases.count(case) > 1}):
        raise InputError(f"--ablate: a row and a run without one means are both called {repeated[0]}; rename the row")
    for directory in (output / case for case in cases):
        if (directory / RECORD).exists() or holds_run(directory):
            raise InputError(
                f"--output: {directory} holds a run already; name another folder, or leave its row out with --case"
            )


class Planned(NamedTuple):
    """A row's model config, the file that it lies in, and its plan."""

    config: dict[str, Any]
    path: Path
    plan: Plan


def _planned(
    row: Row, hardware: HardwareProfile, output: Path, costs: OperationCosts | None, *, compiled: bool
) -> Planned:
    try:
        config, path = _config(row, output)
        limits = Limits(
            device_memory_bytes=allowed_bytes("device_memory", row.device_memory, hardware.device.memory_bytes),
            host_memory_bytes=allowed_bytes("host_memory", row.host_memory, hardware.usable_host_bytes),
        )
        prices = OperationCosts.load(row.costs) if row.costs is not None else costs
        workload = row.workload().model_copy(update={"compiled": compiled})
        plan = run_plan(model_spec(config), workload, hardware, limits, prices, model_path=str(path))
    except InputError as error:
        raise InputError(f"{row.case}: {error}") from error
    return Planned(config, path, plan)


def _config(row: Row, output: Path) -> tuple[dict[str, Any], Path]:
    """The model's config, cut where the row says so, and the file that it lies in."""
    config = read_model_config(row.model)
    hf_config = transformers_config(config)
    if row.num_layers is None or row.num_layers == hf_config.num_hidden_layers:
        return config, Path(row.model)
    if row.num_layers > hf_config.num_hidden_layers:
        raise InputError(f"num_layers: {row.num_layers}; {row.model} has {hf_config.num_hidden_layers}")
    config = with_layers(config, hf_config, list(range(row.num_layers)))
    path = output / f"{row.case}.config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return config, path


def _ideal_point(
    model: ModelSpec, workload: Workload, hardware: HardwareProfile, costs: OperationCosts | None
) -> tuple[IdealStep, int]:
    """The fastest point of the sweep, and how many of the model's layers it leaves room for."""
    free = workload.model_copy(update={"micro_batch_rows": None})
    fits = []
    for step in ideal_steps(model, free, hardware, costs):
        # Weights, sums and activations grow with the layers; head, embedding and context stay.
        share = (hardware.device.memory_bytes - step.device_peak_bytes) / step.device_peak_bytes
        layers = model.num_layers if share >= 0 else math.floor(model.num_layers * (1 + share) * 0.9)
        if layers >= max(1, model.num_layers // 4):
            fits.append((step, layers))
    if not fits:
        raise InputError("no ideal step fits on this device, not even with a quarter of the layers")
    return fits[0]


def _ideal(
    config: dict[str, Any],
    workload: Workload,
    point: tuple[IdealStep, int],
    device: torch.device,
    warm_seconds: float,
) -> MeasuredIdeal:
    step, layers = point
    try:
        return measure_ideal(
            config, workload, micro_batch_rows=step.micro_batch_rows, save_level=step.save_level, num_layers=layers,
            device=device, warm_seconds=warm_seconds,
        )  # fmt: skip
    finally:
        release_device()


def _train(
    row: Row, plan: Plan, model: Path, output: Path, clip: str, warm_seconds: float, say: Callable[[str], None]
) -> RunRecord:
    directory = output / f"{row.case}-{clip}"
    # The last of a run's steps has no next one to hide its updates in; the first three warm up.
    steps = 4 + max(TIMED_STEPS, math.ceil(warm_seconds / plan.prediction.step_seconds))
    settings = {
        "model": str(model), "data": SYNTHETIC, "output": str(directory), "max_steps": steps,
        "max_grad_norm": CLIPS[clip], "log_every": steps,
    }  # fmt: skip
    config = load_config(None, settings=settings | _of_plan(plan))
    try:
        return launch(config, plan, read_model_config(model), plan.model, say=say)
    except (InputError, Interrupted):
        raise
    except ConveyorError as error:  # an attempt like others: it has left its record
        say(f"{directory.name}: {error}")
        return RunRecord.load(directory / RECORD)
    finally:
        release_device()


def _ablated(
    row: Row,
    plan: Plan,
    name: str,
    model: Path,
    output: Path,
    clip: str,
    warm_seconds: float,
    say: Callable[[str], None],
) -> RunRecord | str:
    """The run of a plan that does without one means, or why there is none."""
    without = ablate(plan, name)
    if without is None:
        return "nothing fits"
    if without.policy == plan.policy:
        return "the plan does without already"
    ablated = row.model_copy(update={"case": f"{row.case}-{name}"})
    return _train(ablated, without, model, output, clip, warm_seconds, say)


def _of_plan(plan: Plan) -> dict[str, Any]:
    workload = plan.inputs.workload
    return {
        "sequence_length": workload.sequence_length, "tokens_per_step": workload.tokens_per_step,
        "gradient_format": workload.gradient_format,
    }  # fmt: skip


def _plain(
    config: dict[str, Any], workload: Workload, device: torch.device, warm_seconds: float, say: Callable[[str], None]
) -> float | None:
    """Plain PyTorch on the same step, or None where it does not fit."""
    rows = max(1, min(workload.rows_per_step, PLAIN_TOKENS // workload.sequence_length))
    batch = open_dataset(
        SYNTHETIC, vocab_size=int(config["vocab_size"]), sequence_length=workload.sequence_length,
        rows_per_step=workload.rows_per_step, seed=0,
    ).batch(0)  # fmt: skip
    try:
        return measure_plain(
            config, batch.tokens, batch.labels, micro_batch_rows=rows, budget=PLAIN_BUDGET,
            max_grad_norm=CLIPS["clipped"], device=device, warm_seconds=warm_seconds,
        )  # fmt: skip
    except torch.cuda.OutOfMemoryError as error:
        say(f"plain PyTorch does not fit: {str(error).splitlines()[0]}")
        return None
    finally:
        release_device()


def release_device() -> None:
    """Give back what the last stage held, so that the next one starts on an empty device and counts its own peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned memory in which the compiler tried kernels
        torch.cuda.reset_peak_memory_stats()


def table(results: Sequence[RowResult]) -> str:
    """All rows in lines of at most `WIDTH` columns: TFLOPS of ideal, plain PyTorch and Conveyor, ratio, peaks.

    What a step lost, or why a run failed, stands below its case.
    """
    lines = [
        "TFLOPS (6 N T), and peaks as measured",
        f"{'case':{_CASE}} {'ideal':>7} {'plain':>7} {'run':>7} {'of ideal':>9} {'predicted':>10} {'error':>7} "
        f"{'device':>10} {'host':>10}",
    ]
    for result in results:
        model, tokens = result.plan.model, result.row.tokens_per_step
        flops = 6 * model.num_parameters * tokens / 1e12
        ideal = _tflops(flops / result.ideal.step_seconds) if result.ideal else "-"
        plain = _tflops(flops / result.plain_seconds) if result.plain_seconds else "-"
        for record in result.records:
            figures, case = record.measured, record.case
            if figures is None or record.predicted is None or len(case) > _CASE:
                lines.append(case)
                case = ""
            if figures is None or record.predicted is None:
                lines += _below(f"{record.status}: {record.message}")
                continue
            ratio = f"{result.ideal.step_seconds / figures.step_seconds:.1%}" if result.ideal else "-"
            lines.append(
                f"{case:{_CASE}} {ideal:>7} {plain:>7} {_tflops(figures.tflops):>7} {ratio:>9} "
                f"{_tflops(record.predicted.tflops):>10} "
                f"{_error(record.predicted.tflops, figures.tflops):>7} "
                f"{format_bytes(figures.device_peak_bytes):>10} {format_bytes(figures.host_peak_bytes):>10}"
            )
            lost = {cause: s for cause, s in figures.breakdown_seconds.items() if cause.startswith("waiting")}
            lines += _below(", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in lost.items()))
        lines += _ablation_lines(result)
    return "\n".join(lines)


def _tflops(value: float) -> str:
    """At most seven characters: whole TFLOPS, below 100 two digits, so that what a CPU reaches is no 0."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


def _error(predicted: float, measured: float) -> str:
    """At most seven characters: from +1,000 % on, a burst of load on a CPU, whole per cent, and at most 99,999."""
    error = predicted / measured - 1
    return f"{error:+.1%}" if round(error, 3) < 10 else f"{min(error, 999.99):+.0%}"


def _ablation_lines(result: RowResult) -> Iterator[str]:
    """A line an ablation: what the row reaches without that means, and what share of the row's own speed that is."""
    whole = result.records[0].measured if result.records else None
    if result.ablations:
        yield "without one means each, and of the speed above:"
    for name, found in result.ablations.items():
        words = f"  {ABLATIONS[name].words}"
        if len(words) > _CASE:
            yield words
            words = ""
        if isinstance(found, str):
            yield f"{words:{_CASE}} {found}"
        elif found.measured is None or found.predicted is None or whole is None:
            yield f"{words:{_CASE}} {found.status}: {found.message}"
        else:
            yield (
                f"{words:{_CASE}} {'':>7} {'':>7} {_tflops(found.measured.tflops):>7} "
                f"{whole.step_seconds / found.measured.step_seconds:>9.1%} {_tflops(found.predicted.tflops):>10} "
                f"{_error(found.predicted.tflops, found.measured.tflops):>7} "
                f"{format_bytes(found.measured.device_peak_bytes):>10} "
                f"{format_bytes(found.measured.host_peak_bytes):>10}"
            )


def _below(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
