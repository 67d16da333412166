"""One function a command: arguments in, exit code out. Each imports what it needs when it is called."""

import argparse
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.hardware import HardwareProfile
    from simulator.predict import StepFigures


def doctor(arguments: argparse.Namespace) -> int:
    """Print what this machine has. 1 if something indispensable is missing."""
    from analysis.doctor import check_machine, print_checks

    checks = check_machine()
    print_checks(checks)
    return 1 if any(check.verdict == "blocker" for check in checks) else 0


def probe(arguments: argparse.Namespace) -> int:
    """Measure this machine and write its profile."""
    from executor.folder import require_writable
    from simulator.hardware_table import describe
    from simulator.probe import probe as run_probe

    require_writable(arguments.output, what="--output")
    profile = run_probe(arguments.output)
    print(describe(profile))
    print(f"written to {arguments.output}")
    return 0


def measure(arguments: argparse.Namespace) -> int:
    """Time operations of a model on this machine and write their costs."""
    import torch

    from executor.folder import require_no_input, require_writable
    from executor.measure import measure as run_measure
    from simulator.hardware import load_hardware
    from simulator.model import read_model_config
    from simulator.policy import Workload
    from simulator.schema import validated

    require_writable(arguments.output, what="--output")
    require_no_input(arguments.output, _model_and_hardware_files(arguments), what="--output")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    workload = validated(
        Workload,
        sequence_length=arguments.sequence_length,
        tokens_per_step=arguments.sequence_length,
        precision=arguments.precision,
        gradient_format=arguments.gradient_format,
        compiled=device.type == "cuda" if arguments.compiled is None else arguments.compiled,
    )
    costs = run_measure(
        read_model_config(arguments.model), load_hardware(arguments.hardware), workload,
        micro_batch_rows=arguments.micro_batch_size, device=device, levels=arguments.levels, report=print,
    )  # fmt: skip
    costs.save(arguments.output)
    print(f"{len(costs.entries)} operations written to {arguments.output}")
    return 0


def _model_and_hardware_files(arguments: argparse.Namespace) -> dict[str, list[Path]]:
    """The files that `--model` and `--hardware` may name, by option."""
    return {
        "--model": [Path(arguments.model), Path(arguments.model, "config.json")],
        "--hardware": [Path(arguments.hardware)],
    }


def _say_limits_above(hardware: "HardwareProfile", arguments: argparse.Namespace) -> None:
    """Tell of limits that ask for more memory than the machine has: what it has is planned with."""
    from simulator.units import format_bytes

    for option, asked_bytes, has_bytes in (
        ("--device-memory", arguments.device_memory, hardware.device.memory_bytes),
        ("--host-memory", arguments.host_memory, hardware.usable_host_bytes),
    ):
        if asked_bytes is not None and asked_bytes > has_bytes:
            print(
                f"conveyor: {option}: {format_bytes(asked_bytes)} is more than the {format_bytes(has_bytes)} of "
                f"{hardware.name}, with which it is planned; for a machine with more, edit a copy of its profile",
                file=sys.stderr,
            )


def plan(arguments: argparse.Namespace) -> int:
    """Plan a run and print, or write, what was found; and answer what is asked beside."""
    from analysis.options import WHAT_IF_FOLDER
    from analysis.questions import largest, longest, progress_lines, require_folder, said_after_a_while, sweeps
    from executor.folder import require_no_input, require_writable
    from executor.run_plan import allowed_bytes
    from planner.calibrate import fold_runs, load_run, require_same_device
    from planner.explain import plan_table
    from planner.explanation import explanation, explanation_text
    from planner.plan import Limits
    from planner.price import price_of
    from planner.sweep import parse_sweep
    from planner.task import Task
    from simulator.costs import OperationCosts
    from simulator.errors import InputError
    from simulator.freezing import freeze
    from simulator.hardware import load_hardware
    from simulator.model import load_model_spec, read_model_config
    from simulator.policy import Workload
    from simulator.schema import validated

    asked = bool(arguments.what_if or arguments.largest or arguments.longest_sequence)
    if arguments.json and (asked or arguments.explain):
        raise InputError("--json: prints a plan and nothing else; leave it out where questions are asked")
    for text in arguments.what_if:
        parse_sweep(text)  # known to be wrong before anything is planned
    if arguments.output:
        require_writable(arguments.output, what="--output")
        measured = [Path(run, name) for run in arguments.calibrate for name in ("plan.json", "timeline.json")]
        inputs = {**_model_and_hardware_files(arguments), "--costs": [arguments.costs], "--calibrate": measured}
        require_no_input(arguments.output, inputs, what="--output")
    if arguments.figures is not None and not arguments.what_if:
        raise InputError("--figures: has no effect without --what-if, whose figures it is for; leave it out")
    if arguments.what_if:
        require_folder(Path(arguments.figures or WHAT_IF_FOLDER), what="--figures")
    hardware = load_hardware(arguments.hardware)
    price = price_of(hardware, arguments.price_per_hour)
    if arguments.model.encode("utf-8", "replace").decode() != arguments.model:  # the plan names it, in UTF-8
        raise InputError(f"--model: {arguments.model!r} holds bytes that are no text; give the folder another name")
    model = freeze(load_model_spec(arguments.model), arguments.freeze)
    compiled = hardware.device.kind == "cuda" if arguments.compiled is None else arguments.compiled
    workload = validated(
        Workload,
        sequence_length=arguments.sequence_length,
        tokens_per_step=arguments.tokens_per_step,
        micro_batch_rows=arguments.micro_batch_size,
        precision=arguments.precision,
        gradient_format=arguments.gradient_format,
        state_format="fp32" if arguments.state_format == "auto" else arguments.state_format,
        clipping=arguments.clipping,
        compiled=compiled,
        packed=arguments.packed,
    )
    costs = OperationCosts.load(arguments.costs) if arguments.costs else None
    if arguments.calibrate:
        runs = [load_run(run) for run in arguments.calibrate]
        require_same_device(runs, hardware)
        if costs is None:
            print(
                "conveyor: --calibrate: without --costs only what the runs did is measured, and all else computed from "
                "the machine's profile, so that another policy may look faster than it is; name costs of `measure` too",
                file=sys.stderr,
            )
        costs = fold_runs(runs, costs)
    _say_limits_above(hardware, arguments)
    if costs is not None and costs.other_device(hardware.device.name):
        print(
            f"conveyor: costs: measured on {costs.device_name}, and {hardware.name} has {hardware.device.name}: its "
            "operations take other times; measure there, or leave the costs out",
            file=sys.stderr,
        )
    limits = Limits(
        device_memory_bytes=allowed_bytes("--device-memory", arguments.device_memory, hardware.device.memory_bytes),
        host_memory_bytes=allowed_bytes("--host-memory", arguments.host_memory, hardware.usable_host_bytes),
        nvme_memory_bytes=arguments.nvme_memory,
    )
    task = Task(model, workload, hardware, limits, costs, arguments.model)
    report = progress_lines()
    if arguments.explain or arguments.output or not asked:
        with said_after_a_while("planning; a large model with many micro-batch sizes takes up to a minute or two"):
            found = task.plan(with_baselines=True, with_suggestions=True)
        if arguments.output:
            found.save(arguments.output)
        if arguments.json:
            print(found.model_dump_json(indent=1))
            return 0
        print(plan_table(found))
        if arguments.explain:
            print(explanation_text(found, explanation(found, report=report)))
        if price is not None:
            print(price.of(found.prediction))
        if arguments.output:
            print(f"written to {arguments.output}")
    for answer in sweeps(task, arguments.what_if, Path(arguments.figures or WHAT_IF_FOLDER), price, report):
        print(f"{answer}\n")
    if arguments.largest:
        print(largest(task, read_model_config(arguments.model), arguments.freeze, price, report))
    if arguments.longest_sequence:
        print(longest(task, read_model_config(arguments.model), price, report))
    return 0


def simulate(arguments: argparse.Namespace) -> int:
    """Replay a plan, on its own machine or another, and print what it does."""
    import json

    from executor.folder import require_no_input, require_writable
    from planner.plan import Plan
    from simulator.files import write_whole
    from simulator.hardware import load_hardware
    from simulator.timeline import chrome_trace
    from simulator.units import format_bytes, format_rate, format_seconds

    if arguments.trace:
        require_writable(arguments.trace, what="--trace")
        inputs = {"the plan's name": [arguments.plan], "--hardware": [arguments.hardware]}
        require_no_input(arguments.trace, inputs, what="--trace")
    planned = Plan.load(arguments.plan)
    other = load_hardware(arguments.hardware) if arguments.hardware else None
    prediction = planned.replay(other)
    figures, timeline = prediction.figures, prediction.timeline
    print(f"step time    {format_seconds(figures.step_seconds)}")
    print(f"TFLOPS       {figures.tflops:.4g} (6 N T), {figures.tflops_with_attention:.4g} with attention")
    print(f"tokens/s     {format_rate(figures.tokens_per_second)}")
    print(f"device peak  {format_bytes(figures.device_peak_bytes)}")
    print(f"host peak    {format_bytes(figures.host_peak_bytes)}")
    print("the step, by what compute does or waits for:")
    for reason, seconds in sorted(figures.breakdown_seconds.items(), key=lambda item: -item[1]):
        print(f"  {reason:30}{format_seconds(seconds):>10}  {seconds / figures.step_seconds:6.1%}")
    print("busy, by resource:")
    for resource, seconds in sorted(timeline.busy_seconds().items(), key=lambda item: -item[1]):
        print(f"  {resource:30}{format_seconds(seconds):>10}  {seconds / figures.step_seconds:6.1%}")
    if arguments.trace:
        write_whole(arguments.trace, json.dumps(chrome_trace({"predicted": timeline})))
        print(f"trace written to {arguments.trace}")
    if other is not None:
        _say_peaks_above(other, figures)
    return 0


def _say_peaks_above(hardware: "HardwareProfile", figures: "StepFigures") -> None:
    """Tell where a plan that was replayed on another machine takes more memory than that machine has."""
    from simulator.units import format_bytes

    for tier, peak_bytes, has_bytes in (
        ("device", figures.device_peak_bytes, hardware.device.memory_bytes),
        ("host", figures.host_peak_bytes, hardware.usable_host_bytes),
    ):
        if peak_bytes > has_bytes:
            print(
                f"conveyor: {tier} peak: {format_bytes(peak_bytes)} is more than the {format_bytes(has_bytes)} of "
                f"{hardware.name}: the plan does not fit there",
                file=sys.stderr,
            )


def train(arguments: argparse.Namespace) -> int:
    """Train by a plan: the one given, or one made first."""
    from executor.config import load_config, resolved_yaml
    from executor.folder import require_nameable
    from executor.launch import launch, require_own_directory, require_possible, settled
    from executor.run_inputs import RunInputs
    from executor.run_plan import earlier_plan, new_plan, require_named_files
    from planner.explain import plan_table
    from planner.plan import Plan
    from simulator.errors import InputError
    from simulator.freezing import freeze
    from simulator.model import load_model_spec, read_model_config
    from simulator.model_config import beyond_positions

    settings = {
        key: value
        for key, value in (
            ("plan", arguments.plan),
            ("data", arguments.data),
            ("output", arguments.output),
            ("max_steps", arguments.steps),
        )
        if value is not None
    }
    config = load_config(arguments.config, arguments.overrides, settings=settings)
    for key in ("output", "cache", "resume"):
        if getattr(config, key) is not None:
            require_nameable(getattr(config, key), what=key)
    require_named_files(config)
    given = Plan.load(config.plan) if config.plan else None
    path = config.model or (given.inputs.model.path if given is not None else None)
    if not path:
        raise InputError("model: not set, and the plan does not say where its model lies")
    config = config.model_copy(update={"model": path})
    if given is not None:
        config = settled(config, given)
    if not arguments.dry_run:
        require_own_directory(config)
    model_config = read_model_config(path)
    model = freeze(load_model_spec(path), config.freeze)
    say = _comment if arguments.dry_run else print
    if given is None and (given := earlier_plan(config, model, say=say)) is not None:
        config, model = settled(config, given), given.model
    if given is not None and not arguments.dry_run:
        require_possible(given, model)
    if arguments.dry_run:
        inputs = RunInputs(config, model, say=lambda line: None)
        with tempfile.TemporaryDirectory() as folder:
            planned = given or new_plan(config, model, Path(folder), say=say)
        print(resolved_yaml(settled(config, planned)), end="")
        _comment(plan_table(planned))
        for dataset in (inputs.dataset, inputs.eval_dataset):
            if dataset is not None:
                _comment("\n".join(dataset.report.lines()))
        if (beyond := beyond_positions(model_config, planned.inputs.workload.sequence_length)) is not None:
            _comment(beyond)
        return 0
    inputs = RunInputs(config, model)  # wrong data are found before the minutes that probing and planning may take
    planned = given or new_plan(config, model)
    print(plan_table(planned))
    launch(config, planned, model_config, model, inputs=inputs)
    print(f"run directory: {config.output}; draw it with: conveyor plot {config.output}")
    return 0


def _comment(text: str) -> None:
    """Print beside YAML what is not part of it."""
    print(textwrap.indent(text, "# ", lambda line: True))


def bench(arguments: argparse.Namespace) -> int:
    """Run a matrix of workloads."""
    from pathlib import Path

    from analysis.bench import CLIPS, load_matrix
    from analysis.bench import bench as run_bench
    from planner.ablation import ABLATIONS, require_known
    from simulator.costs import OperationCosts
    from simulator.errors import InputError
    from simulator.hardware import load_hardware
    from simulator.nearest import did_you_mean, nearest_name

    rows = load_matrix(arguments.matrix).rows
    if arguments.case:
        cases = [row.case for row in rows]
        for case in arguments.case:
            if case not in cases:
                raise InputError(
                    f"--case {case}: {arguments.matrix} has no such row{did_you_mean(nearest_name(case, cases))}"
                )
        rows = tuple(row for row in rows if row.case in arguments.case)
    ablations = tuple(ABLATIONS) if "all" in arguments.ablate else tuple(arguments.ablate)
    for name in ablations:
        require_known(name)
    found = run_bench(
        rows,
        load_hardware(arguments.hardware),
        Path(arguments.output),
        costs=OperationCosts.load(arguments.costs) if arguments.costs else None,
        clips=tuple(CLIPS) if arguments.clip == "both" else (arguments.clip,),
        with_ideal=not arguments.no_ideal,
        with_plain=not arguments.no_plain,
        ablations=ablations,
        warm_seconds=arguments.warm_seconds,
        results=Path(arguments.results) if arguments.results else None,
    )
    return 0 if all(record.status == "ok" for result in found for record in result.records) else 1


def plot(arguments: argparse.Namespace) -> int:
    """Draw runs and results files into figures and one page."""
    from analysis.fidelity import plot_fidelity
    from analysis.report import plot as draw

    if arguments.fidelity:
        text, written = plot_fidelity(arguments.runs, arguments.output)
        print(text)
    else:
        written = draw(arguments.runs, arguments.output)
    for path in written:
        print(path)
    return 0


def reproduce(arguments: argparse.Namespace) -> int:
    """Simulate the papers' tables, print them beside the published values, and write text, CSV and figure."""
    from analysis.paper_findings import findings
    from analysis.published import load_published
    from analysis.reproduce import rankings
    from analysis.reproduce import reproduce as run_reproduce
    from analysis.reproduction import text, write

    published = load_published().select(tuple(arguments.table))
    reproduced = run_reproduce(published)
    report = text(published, reproduced, rankings(reproduced), findings(reproduced))
    files = write(arguments.output, published, reproduced, report)
    print(report)
    print(f"written to {', '.join(str(path) for path in files)}")
    return 0
