"""Launch: a planned run from its first check to its record, whatever happens in between."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from executor.checkpoint import latest
from executor.config import TrainConfig, resolved_yaml
from executor.record import PredictedFrom, RunRecord, Status, installed_versions
from executor.run import Outcome, Run
from executor.run_directory import CHECKPOINTS, CONFIG, RECORD, finish_run, open_directory, start_run
from executor.source_tree import source_tree
from planner.plan import Plan, require_same_inputs
from simulator.errors import InputError, OutOfMemory
from simulator.hardware_check import check_capacity
from simulator.model import ModelSpec
from simulator.probe import current_device, current_host
from simulator.timeline import Timeline, largest_deviations
from simulator.units import format_bytes, format_seconds


def launch(
    config: TrainConfig,
    plan: Plan,
    model_config: dict[str, Any],
    model: ModelSpec,
    *,
    say: Callable[[str], None] = print,
) -> RunRecord:
    """Train by a plan into `config.output`. The record is written there too, also of a run that failed.

    A run that is refused leaves the record of an earlier run in the same directory as it is.

    Raises InputError before anything is allocated when the plan was made for another model or a larger machine,
    OutOfMemory naming tier and bytes when memory runs out all the same, Interrupted when the user stops the run.
    """
    require_same_inputs(plan, model=model)
    _require_agreement(config, plan)
    _require_no_earlier_run(config)
    limits = plan.inputs.limits
    check_capacity(
        plan.hardware, current_device(), current_host(),
        device_limit_bytes=limits.device_memory_bytes, host_limit_bytes=limits.host_memory_bytes,
    )  # fmt: skip
    device = torch.device("cuda", 0) if plan.hardware.device.kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        _hold_to_limit(plan, device)
    directory = Path(config.output)
    open_directory(directory)
    finished_before = (directory / RECORD).exists()
    predicted = plan.replay().timeline

    def start() -> None:
        start_run(directory, plan=plan, config=config.model_dump(mode="json"), predicted=predicted)
        (directory / CONFIG).write_text(resolved_yaml(config), encoding="utf-8")

    try:
        outcome = _train(config, plan, model_config, model, directory, device, say, start)
    except BaseException as error:
        if isinstance(error, InputError) and finished_before:
            raise  # a typo must not cost the earlier run its record: nothing was started
        failure = _explained(error, plan)
        status: Status = "out_of_memory" if isinstance(failure, OutOfMemory) else "failed"
        if isinstance(failure, InputError):
            status = "refused"
        start()
        finish_run(directory, _record(config, plan, status, message=str(failure) or type(failure).__name__))
        if failure is error:
            raise
        raise failure from error
    record = _record(config, plan, "ok", outcome=outcome)
    finish_run(directory, record, measured=outcome.timeline)
    for line in comparison(plan, outcome, predicted):
        say(line)
    return record


def _require_agreement(config: TrainConfig, plan: Plan) -> None:
    """Refuse a config that asks for another step than the plan's. What the config leaves open, the plan decides."""
    workload = plan.inputs.workload
    planned: dict[str, object] = {
        "sequence_length": workload.sequence_length,
        "tokens_per_step": workload.tokens_per_step,
        "micro_batch_size": plan.policy.micro_batch_rows,
        "precision": workload.precision,
        "gradient_format": workload.gradient_format,
        "state_format": workload.state_format,
        "clipping": workload.clipping,
        "compiled": workload.compiled,
    }
    different = [
        f"{key} is {getattr(config, key)!r}, the plan has {value!r}"
        for key, value in planned.items()
        if key in config.model_fields_set and getattr(config, key) not in ("auto", None, value)
    ]
    if different:
        raise InputError(f"the plan was made for another step: {'; '.join(different)}; plan again")


def _require_no_earlier_run(config: TrainConfig) -> None:
    """Refuse to start anew where checkpoints lie, unless asked to: the first saves would remove them."""
    if "resume" in config.model_fields_set:
        return
    newest = latest(Path(config.output) / CHECKPOINTS) if (Path(config.output) / CHECKPOINTS).is_dir() else None
    if newest is not None:
        raise InputError(
            f"{newest} is of an earlier run: resume=auto goes on from it, resume=never starts anew and gives it up; "
            "or set another output"
        )


def _train(
    config: TrainConfig, plan: Plan, model_config: dict[str, Any], model: ModelSpec, directory: Path,
    device: torch.device, say: Callable[[str], None], start: Callable[[], None],
) -> Outcome:  # fmt: skip
    """Train. `start` is called when everything that can refuse the run has been asked."""
    run = Run(config, model_config, model, plan.inputs.workload, plan.policy, directory, device=device, say=say)
    try:
        run.prepare()
        start()
        return run.train()
    finally:
        run.close()


def _hold_to_limit(plan: Plan, device: torch.device) -> None:
    """Make the allocator refuse what the plan may not use, so that a wrong prediction fails here and not elsewhere."""
    total = torch.cuda.get_device_properties(device).total_memory
    limit = plan.inputs.limits.device_memory_bytes - round(plan.hardware.context_bytes.value)
    if limit < total:
        torch.cuda.set_per_process_memory_fraction(max(limit, 1) / total, device)


def _explained(error: BaseException, plan: Plan) -> BaseException:
    """torch's out-of-memory error, in terms of the plan."""
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return error
    reserved = torch.cuda.max_memory_reserved()
    return OutOfMemory(
        f"device memory ran out: {format_bytes(reserved)} were reserved, the plan foresaw "
        f"{format_bytes(plan.prediction.device_peak_bytes)} of {format_bytes(plan.inputs.limits.device_memory_bytes)}; "
        f"plan again with a lower --device-memory, or with fewer tokens a micro-batch ({first_line(error)})"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _record(
    config: TrainConfig, plan: Plan, status: Status, *, outcome: Outcome | None = None, message: str = ""
) -> RunRecord:
    hashes = plan.inputs.hashes
    return RunRecord(
        case=Path(config.output).resolve().name,
        inputs=plan.inputs.model_dump(mode="json"),
        policy=plan.policy.model_dump(mode="json"),
        status=status,
        message=message,
        source_tree=source_tree(),
        versions=installed_versions(),
        device_name=current_device().name,
        predicted=plan.prediction,
        predicted_from=PredictedFrom(
            hardware=hashes.hardware,
            costs=hashes.costs or None,
            folded_runs=plan.inputs.costs.folded_runs if plan.inputs.costs is not None else (),
        ),
        measured=outcome.figures if outcome is not None else None,
        clip_factors=tuple(outcome.clip_factors) if outcome is not None else (),
        steps_timed=outcome.steps_timed if outcome is not None else 0,
    )


def comparison(plan: Plan, outcome: Outcome, predicted: Timeline) -> list[str]:
    """Predicted against measured, in lines: step, TFLOPS, memory, and the operations that deviate most."""
    expected, found = plan.prediction, outcome.figures
    error = expected.step_seconds / found.step_seconds - 1  # of the prediction, as the report has it
    seconds = [format_seconds(figures.step_seconds) for figures in (expected, found)]
    lines = [
        "                 predicted     measured",
        f"step time    {seconds[0]:>13}{seconds[1]:>13}  (error {error:+.1%})",
        f"TFLOPS       {expected.tflops:>13.4g}{found.tflops:>13.4g}  (6 N T, N = {plan.model.num_parameters:,})",
        f"tokens/s     {expected.tokens_per_second:>13.5g}{found.tokens_per_second:>13.5g}",
        f"device peak  {format_bytes(expected.device_peak_bytes):>13}{format_bytes(found.device_peak_bytes):>13}",
        f"host peak    {format_bytes(expected.host_peak_bytes):>13}{format_bytes(found.host_peak_bytes):>13}",
        "largest deviations, seconds a step:",
    ]
    for kind, before, after in largest_deviations(predicted, outcome.timeline):
        lines.append(f"  {kind:28}{before:>12.4g}{after:>13.4g}")
    if outcome.exported is not None:
        lines.append(f"trained model: {outcome.exported}")
    return lines
