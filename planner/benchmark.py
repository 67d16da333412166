"""How long a whole search takes by depth, and how far its plans lie above their bounds.

    python -m planner.benchmark [--layers 28 48 80 128 256] [--device-memory 24GiB 48GiB] [--only depth|shapes]

Shapes are the catalogue's, on its H200 by roofline, with host memory for all of the model; deeper models repeat the
layers of the 14B. Seconds are of the whole of `plan()`, rivals included, beside the seconds of CPU it took: on a busy
machine the two differ. Aims on two cores: 5 s up to 128 layers, 20 s for 256, and a gap of at most 1 % on the shapes.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import simulator
from planner.plan import Limits, Plan
from planner.search import plan
from simulator.errors import InfeasiblePlan
from simulator.families import with_layers
from simulator.hardware import load_hardware
from simulator.model import ModelSpec, load_model_spec, model_spec, read_model_config, transformers_config
from simulator.policy import Workload
from simulator.units import GIB, format_bytes, parse_bytes

MODELS = Path(simulator.__file__).parent / "catalogue" / "models"
SEQUENCE_LENGTH = 1024
DEEP = "qwen2.5-14b"
DEEP_ROWS = (16, 64)
# What the project's own runs are: model, rows of a step.
SHAPES = (("qwen2.5-7b", 96), ("qwen2.5-7b", 16), ("qwen2.5-7b", 4), ("qwen2.5-14b", 64))
HOST_BYTES_A_PARAMETER = 16
GAP_AIM = 0.01


class Search(NamedTuple):
    """One search and what it took."""

    task: "Task"
    wall_seconds: float
    cpu_seconds: float
    plan: Plan


def deep_model(num_layers: int) -> ModelSpec:
    """The catalogue's 14B with so many layers, which repeat its own."""
    config = read_model_config(MODELS / f"{DEEP}.json")
    hf_config = transformers_config(config)
    own = int(hf_config.num_hidden_layers)
    return model_spec(with_layers(config, hf_config, [layer % own for layer in range(num_layers)]))


class Task(NamedTuple):
    """What to plan."""

    title: str
    model: ModelSpec
    rows: int
    device_bytes: int


def by_depth(depths: list[int], device_bytes: list[int]) -> Iterator[Task]:
    """A task a depth, number of rows and limit."""
    for num_layers in depths:
        model = deep_model(num_layers)
        for rows in DEEP_ROWS:
            for limit in device_bytes:
                yield Task(f"{num_layers} layers", model, rows, limit)


def by_shape(device_bytes: list[int]) -> Iterator[Task]:
    """A task a reference shape and limit."""
    for name, rows in SHAPES:
        model = load_model_spec(MODELS / f"{name}.json")
        for limit in device_bytes:
            yield Task(name, model, rows, limit)


def timed(task: Task) -> Search:
    """Plan one task. Raises InfeasiblePlan."""
    workload = Workload(
        sequence_length=SEQUENCE_LENGTH,
        tokens_per_step=task.rows * SEQUENCE_LENGTH,
        gradient_format="bf16",
        compiled=True,
    )
    host_bytes = max(120 * GIB, HOST_BYTES_A_PARAMETER * task.model.num_parameters)
    limits = Limits(device_memory_bytes=task.device_bytes, host_memory_bytes=host_bytes)
    wall, cpu = time.perf_counter(), time.process_time()
    found = plan(task.model, workload, load_hardware("h200"), limits)
    return Search(task, time.perf_counter() - wall, time.process_time() - cpu, found)


def aim_seconds(num_layers: int) -> float:
    """What a search of so many layers may take."""
    return 5.0 if num_layers <= 128 else 20.0


def label(task: Task) -> str:
    return f"{task.title:12} {task.rows:3} x {SEQUENCE_LENGTH} {format_bytes(task.device_bytes):>9} "


def line(search: Search) -> str:
    """A search in figures."""
    found = search.plan
    counts = found.solver.counts
    return (
        f"{label(search.task)}{search.wall_seconds:7.2f} s {search.cpu_seconds:7.2f} s {counts['outlines']:8} "
        f"{counts['solves']:6} {counts['replays']:7} {found.prediction.step_seconds:8.3f} s "
        f"{found.bound.step_seconds:8.3f} s {100 * found.bound.gap:6.2f} %"
    )


def searches(tasks: Iterator[Task]) -> Iterator[Search]:
    """Plan and print one task after the other; those that fit."""
    for task in tasks:
        try:
            search = timed(task)
        except InfeasiblePlan as error:
            print(
                f"{label(task)} does not fit: {error.resource} short by {format_bytes(error.short_bytes)}", flush=True
            )
            continue
        print(line(search), flush=True)
        yield search


HEADER = "model          tokens    device   search       CPU outlines solves replays       step      bound      gap"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times whole searches by depth, and their gaps by shape.")
    parser.add_argument("--layers", metavar="N", type=int, nargs="+", default=[28, 48, 80, 128, 256])
    parser.add_argument("--device-memory", metavar="SIZE", type=parse_bytes, nargs="+", default=[24 * GIB, 48 * GIB])
    parser.add_argument("--only", choices=("depth", "shapes"), help="one of the two tables; default: both")
    arguments = parser.parse_args()
    print(HEADER)
    late, loose = [], []
    if arguments.only != "shapes":
        found = searches(by_depth(arguments.layers, arguments.device_memory))
        late = [search for search in found if search.cpu_seconds > aim_seconds(search.plan.model.num_layers)]
    if arguments.only != "depth":
        found = searches(by_shape(arguments.device_memory))
        loose = [search for search in found if search.plan.bound.gap > GAP_AIM]
    print(f"searches that took more CPU than 5 s (256 layers: 20 s): {len(late)}; gaps above 1 %: {len(loose)}")


if __name__ == "__main__":
    main()
