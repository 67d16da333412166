"""Launch: a planned run from its first check to its record, whatever happens in between."""

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from executor.batch_size import BatchSize
from executor.config import TrainConfig, resolved_yaml
from executor.folder import require_nameable, taken_folder
from executor.forecast import forecast, require_free_memory
from executor.huggingface import is_exported
from executor.out_of_memory import explained
from executor.record import PredictedFrom, RunRecord, Status, installed_versions
from executor.run import Outcome, Run
from executor.run_directory import EXPORTED, RECORD, finish_run, holds_run, start_run
from executor.run_inputs import RunInputs
from executor.source_tree import source_tree
from planner.plan import Plan, require_same_inputs
from simulator.errors import ConveyorError, InputError, OutOfMemory
from simulator.freezing import freeze, frozen_patterns, unfrozen
from simulator.hardware_check import check_capacity
from simulator.model import ModelSpec
from simulator.model_config import beyond_positions
from simulator.predict import device_process_bytes
from simulator.probe import current_device, current_host
from simulator.system import HostPeak
from simulator.timeline import Timeline, largest_deviations
from simulator.units import format_bytes, format_rate, format_seconds

TOLD_GAPS = 0.01  # of a step, in which nothing was launched; less is no matter


def launch(
    config: TrainConfig,
    plan: Plan,
    model_config: dict[str, Any],
    model: ModelSpec,
    *,
    inputs: RunInputs | None = None,
    say: Callable[[str], None] = print,
) -> RunRecord:
    """Train by a plan into `config.output`. The record is written there too, also of a run that failed.

    `inputs` are those of the config, where they are open already.

    A directory that holds a run is taken again only to resume it, and stays as it is until the checkpoint is read.

    Raises InputError before anything is allocated when the plan was made for another model or a larger machine,
    OutOfMemory naming tier and bytes when memory runs out all the same, Interrupted when the user stops the run.
    """
    require_possible(plan, model)
    config, model = settled(config, plan), plan.model
    known, length = model_config.get("max_position_embeddings"), plan.inputs.workload.sequence_length
    if isinstance(known, int) and length > known:
        say(
            f"warning: rows have {length} tokens, and the model's config says max_position_embeddings {known}: "
            "it has not seen places beyond"
        )
    device = torch.device("cuda", 0) if plan.hardware.device.kind == "cuda" else torch.device("cpu")
    require_own_directory(config)
    require_free_memory(plan, device)
    if device.type == "cuda":
        _hold_to_limit(plan, device)
    with taken_folder(Path(config.output)):
        require_own_directory(config)  # what another process left there until now
        return _launched(config, plan, model_config, model, device, say, inputs)


def _launched(
    config: TrainConfig, plan: Plan, model_config: dict[str, Any], model: ModelSpec, device: torch.device,
    say: Callable[[str], None], inputs: RunInputs | None,
) -> RunRecord:  # fmt: skip
    directory = Path(config.output)
    earlier = holds_run(directory)
    predicted = plan.replay().timeline
    started = False

    def start() -> None:
        nonlocal started
        start_run(directory, plan=plan, config=resolved_yaml(config), predicted=predicted)
        started = True

    if not earlier:
        start()
    try:
        outcome = _train(
            config, plan, model_config, model, directory, device, say, inputs, filled=start if earlier else None
        )
    except BaseException as error:
        if earlier and not started:  # what the directory says of the earlier run still holds
            failure = explained(error, plan, directory)
            if failure is error:
                raise
            raise failure from error
        failure = explained(error, plan, directory)
        status: Status = "out_of_memory" if isinstance(failure, OutOfMemory) else "failed"
        if isinstance(failure, InputError):
            status = "refused"
        with suppress(ConveyorError):  # what failed first is what the user must read
            finish_run(directory, _record(config, plan, status, message=str(failure) or type(failure).__name__))
        if failure is error:
            raise
        raise failure from error
    if outcome is None:
        say(f"nothing was left to train; trained model: {directory / EXPORTED}")
        if (directory / RECORD).exists():
            return RunRecord.load(directory / RECORD)
        message = "it was stopped between its last step and its export; the model is exported, no step was measured"
        record = _record(config, plan, "failed", message=message)
        finish_run(directory, record)
        return record
    record = _record(config, plan, "ok", outcome=outcome)
    finish_run(directory, record, measured=outcome.timeline)
    for line in comparison(plan, outcome, predicted):
        say(line)
    return record


def require_possible(plan: Plan, model: ModelSpec) -> None:
    """Refuse a plan of another model, or for a larger machine than this one. Raises InputError."""
    if unfrozen(model) != unfrozen(plan.model):
        require_same_inputs(plan, model=model)
    limits = plan.inputs.limits
    check_capacity(
        plan.hardware, current_device(), current_host(),
        device_limit_bytes=limits.device_memory_bytes, host_limit_bytes=limits.host_memory_bytes,
    )  # fmt: skip


def settled(config: TrainConfig, plan: Plan) -> TrainConfig:
    """The config with what it leaves open as the plan decides it. Raises InputError where the two contradict."""
    workload, limits = plan.inputs.workload, plan.inputs.limits
    planned: dict[str, Any] = {
        "sequence_length": workload.sequence_length,
        "tokens_per_step": workload.tokens_per_step,
        "micro_batch_size": plan.policy.micro_batch_rows,
        "precision": workload.precision,
        "gradient_format": workload.gradient_format,
        "state_format": workload.state_format,
        "clipping": workload.clipping,
        "compiled": workload.compiled,
        "packing": workload.packed,
    }
    different = [
        f"{key} is {getattr(config, key)!r}, the plan has {value!r}"
        for key, value in planned.items()
        if key in config.model_fields_set and getattr(config, key) not in ("auto", None, value)
    ]
    if "freeze" in config.model_fields_set and freeze(plan.model, config.freeze) != plan.model:
        frozen = ", ".join(frozen_patterns(plan.model)) or "nothing"
        different.append(f"freeze is {list(config.freeze)}, the plan freezes {frozen}")
    if different:
        raise InputError(f"the plan was made for another step: {'; '.join(different)}; plan again")
    for key in ("hardware", "costs"):
        if config.plan is not None and getattr(config, key) is not None:
            raise InputError(f"{key}: has no effect beside a plan, which holds its own; leave one of the two out")
    for key, allowed, taken in (
        ("device_memory", config.device_memory, limits.device_memory_bytes),
        ("host_memory", config.host_memory, limits.host_memory_bytes),
    ):
        if allowed is not None and allowed < taken:
            raise InputError(
                f"{key}: the run may take {format_bytes(allowed)}, and the plan was made for {format_bytes(taken)}; "
                f"plan again with that limit, or leave {key} out"
            )
    if workload.clipping == "none" and "max_grad_norm" in config.model_fields_set:
        raise InputError("max_grad_norm: has no effect on a plan whose clipping is 'none'; leave it out, or plan again")
    if "freeze" not in config.model_fields_set:
        planned["freeze"] = frozen_patterns(plan.model)
    config = config.model_copy(update=planned)
    if contradictions := BatchSize.of(dict(config)).contradictions():
        raise InputError(f"the plan was made for another step: {'; '.join(contradictions)}")
    return config


def require_own_directory(config: TrainConfig) -> None:
    """Refuse an output directory that would mix two runs, or a run with the model it starts from. Raises InputError."""
    directory = Path(config.output)
    require_nameable(directory / EXPORTED, what="output")
    if config.model is not None and (folder := Path(config.model)).exists():
        source = (folder if folder.is_dir() else folder.parent).resolve()
        if source in (directory.resolve(), (directory / EXPORTED).resolve()):
            raise InputError(
                f"output: the run would write into {source}, the folder of the model it starts from; "
                "set output to another directory"
            )
    exported = directory / EXPORTED
    if exported.exists() and not is_exported(exported):
        raise InputError(f"output: {exported} holds other files than a model that a run left; set another directory")
    if config.resume == "never" and holds_run(directory):
        raise InputError(
            f"output: {directory} holds a run already; set output to another directory, or go on with resume=auto"
        )


def _train(
    config: TrainConfig, plan: Plan, model_config: dict[str, Any], model: ModelSpec, directory: Path,
    device: torch.device, say: Callable[[str], None], inputs: RunInputs | None, *,
    filled: Callable[[], None] | None,
) -> Outcome | None:  # fmt: skip
    """Train. `filled` is called once the state is: from then on the directory is this run's."""

    def announce(opened: RunInputs) -> None:
        for line in forecast(plan, opened):
            say(line)
        if plan.solver.caution:
            say(f"the plan may not be the best: {plan.solver.caution}")
        length = plan.inputs.workload.sequence_length
        if (beyond := beyond_positions(model_config, length)) is not None:
            say(f"sequences have {length:,} tokens; {beyond}")

    with HostPeak() as host_peak:  # loading, training, saving, resuming
        run = Run(
            config, model_config, model, plan.inputs.workload, plan.policy, directory, device=device,
            host_peak=host_peak, say=say, inputs=inputs, before_start=announce,
        )  # fmt: skip
        try:
            run.prepare()
            if filled is not None and run.trainer.steps_done < run.num_steps:
                filled()
            return run.train()
        finally:
            run.close()


def _hold_to_limit(plan: Plan, device: torch.device) -> None:
    """Make the allocator refuse what the plan may not use, so that a wrong prediction fails here and not elsewhere."""
    total = torch.cuda.get_device_properties(device).total_memory
    limit = plan.inputs.limits.device_memory_bytes - device_process_bytes(plan.hardware)
    if limit < total:
        torch.cuda.set_per_process_memory_fraction(max(limit, 1) / total, device)


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
    # Padding is computed and is no text: compared is the prediction's part that is text.
    text = found.tokens_per_second * found.step_seconds / plan.inputs.workload.tokens_per_step
    rows = [
        ("step time", expected.step_seconds, found.step_seconds, format_seconds),
        ("TFLOPS", expected.tflops, found.tflops, lambda value: f"{value:#.4g}"),
        ("tokens/s", expected.tokens_per_second * text, found.tokens_per_second, format_rate),
        ("device peak", expected.device_peak_bytes, found.device_peak_bytes, format_bytes),
        ("host peak", expected.host_peak_bytes, found.host_peak_bytes, format_bytes),
    ]
    lines = [f"{'':12}{'predicted':>14}{'measured':>13}{'error':>9}"]
    for name, before, after, write in rows:
        error = f"{before / after - 1:+.1%}" if after else ""
        lines.append(f"{name:12}{write(before):>14}{write(after):>13}{error:>9}".rstrip())
    left_out = ", tokens/s leave padding out" if text < 0.9995 else ""
    lines.append(f"(TFLOPS are 6 N T, N = {plan.model.num_parameters:,}{left_out})")
    lines.append("largest deviations, in one step:")
    for kind, predicted_seconds, measured_seconds in largest_deviations(predicted, outcome.timeline):
        cells = [
            f"not {word}" if seconds is None else format_seconds(seconds)
            for word, seconds in (("predicted", predicted_seconds), ("measured", measured_seconds))
        ]
        lines.append(f"  {kind.replace('_', ' '):30}{cells[0]:>14}{cells[1]:>13}")
    gaps = outcome.timeline.launch_gaps() if plan.hardware.execution == "streams" else {}
    if sum(gaps.values()) > TOLD_GAPS * outcome.timeline.step_seconds:
        places = ", ".join(f"{format_seconds(seconds)} before {name}" for name, seconds in islice(gaps.items(), 3))
        lines.append(f"idle for want of launches: {format_seconds(sum(gaps.values()))}, of it {places}")
    if outcome.exported is not None:
        lines.append(f"trained model: {outcome.exported}")
    return lines
