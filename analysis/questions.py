"""Questions to the planner beside a plan: what if, how deep, how long. Answers are text; figures go into a folder."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.what_if import save, table
from planner.explain import parameters_text, seconds_text
from planner.extent import Extent, largest_model, longest_sequence
from planner.price import Price
from planner.sensitivity import Report
from planner.sweep import parse_sweep, sweep
from planner.task import Task
from simulator.errors import InputError
from simulator.families import with_layers
from simulator.freezing import freeze
from simulator.model import ModelSpec, model_spec, transformers_config
from simulator.model_config import beyond_positions
from simulator.units import format_bytes

# What answers sooner needs no lines about its progress.
PATIENCE_SECONDS = 3.0
LINE_SECONDS = 1.0


def progress_lines(patience_seconds: float = PATIENCE_SECONDS) -> Report:
    """Prints what is being done on standard error, once it has taken longer than a reader waits without a word."""
    quiet_until = time.monotonic() + patience_seconds

    def report(words: str) -> None:
        nonlocal quiet_until
        if time.monotonic() >= quiet_until:
            print(f"conveyor: {words}", file=sys.stderr, flush=True)
            quiet_until = time.monotonic() + LINE_SECONDS

    return report


@contextmanager
def said_after_a_while(words: str, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Print `words` on standard error if what runs inside takes longer than a reader waits without a word."""
    timer = threading.Timer(patience_seconds, lambda: print(f"conveyor: {words}", file=sys.stderr, flush=True))
    timer.daemon = True  # an interrupt must not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def sweeps(task: Task, asked: Sequence[str], folder: Path, price: Price | None, report: Report) -> Iterator[str]:
    """The table of every sweep and the files that were written. Raises InputError before the first is planned."""
    wanted: dict[str, tuple[int, ...]] = {}
    for text in asked:
        key, values = parse_sweep(text)
        wanted[key] = tuple(sorted({*wanted.get(key, ()), *values}))
    for key, values in wanted.items():
        found = sweep(task, key, values, report=report)
        written = save(found, folder, price)
        yield "\n".join([table(found, price), *(f"written to {path}" for path in written)])


def require_folder(path: Path, *, what: str) -> None:
    """Raise InputError unless files can be written into a folder of this path, which may be made."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{what}: {path} is a file; name a folder")
    home = path if path.exists() else path.parent
    if not home.is_dir():
        raise InputError(f"{what}: there is no folder {home}; make it first")
    if not os.access(home, os.W_OK):
        raise InputError(f"{what}: {home} cannot be written; name a folder where you may write")


def grown(config: dict[str, Any], frozen: Sequence[str] = ()) -> Callable[[int], ModelSpec]:
    """The models of a config at any depth: its layers, over and over, at the same width and with the same frozen."""
    hf_config = transformers_config(config)
    own_layers = int(hf_config.num_hidden_layers)

    def deep(num_layers: int) -> ModelSpec:
        layers = [layer % own_layers for layer in range(num_layers)]
        return freeze(model_spec(with_layers(config, hf_config, layers)), frozen)

    return deep


def largest(task: Task, config: dict[str, Any], frozen: Sequence[str], price: Price | None, report: Report) -> str:
    """How deep a model of this width may be, in words."""
    extent = largest_model(task, grown(config, frozen), report=report)
    model = extent.plan.model
    what = f"{parameters_text(model.num_parameters)} parameters in {_count(model.num_layers, 'layer')}"
    return _answer(f"largest model of this width: {what}", extent, "layers", price)


def longest(task: Task, config: dict[str, Any], price: Price | None, report: Report) -> str:
    """How long a sequence may be, in words; a config that names fewer positions is told."""
    extent = longest_sequence(task, report=report)
    text = _answer(f"longest sequence, one a step: {extent.size:,} tokens", extent, "tokens", price)
    beyond = beyond_positions(config, extent.size)
    return text if beyond is None else f"{text}\n  {beyond}"


def _answer(title: str, extent: Extent, unit: str, price: Price | None) -> str:
    plan = extent.plan
    figures, limits = plan.prediction, plan.inputs.limits
    peaks = f"{format_bytes(figures.host_peak_bytes)} of {format_bytes(limits.host_memory_bytes)} of host memory"
    if plan.hardware.shared_memory:
        peaks = peaks.replace("host memory", "memory")
    else:
        device = f"{format_bytes(figures.device_peak_bytes)} of {format_bytes(limits.device_memory_bytes)}"
        peaks = f"{device} of device memory and {peaks}"
    lines = [
        title,
        f"  its plan: {seconds_text(figures.step_seconds)} a step, {figures.tokens_per_second:,.0f} tokens/s, within "
        f"{plan.bound.gap:.2%} of its bound; it takes {peaks}",
        f"  {extent.too_large:,} {unit} do not fit"
        if extent.too_large is not None
        else f"  more {unit} than that were not tried",
    ]
    if plan.solver.caution:
        lines.append(f"  {plan.solver.caution}")
    if price is not None:
        lines.append(f"  {price.of(figures)}")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
