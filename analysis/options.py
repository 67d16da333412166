"""The options of each command. Scripts call these: names and meanings stay stable."""

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# simulator.policy has them too, and imports what `--help` need not wait for.
SAVE_LEVELS = ("keep", "budget_70", "budget_50", "budget_30", "budget_10", "input")
WHAT_IF_FOLDER = "what-if"  # where figures go that nobody has named a place for


class Command(NamedTuple):
    """A command of the front door: its function in analysis/commands.py has the same name."""

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]


def size(text: str) -> int:
    """Bytes of `24GiB`, `64 GB` or `0`, for argparse."""
    from simulator.errors import InputError
    from simulator.units import parse_bytes

    try:
        return parse_bytes(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size: ")) from error


def positive_size(text: str) -> int:
    """A size of at least one byte, for argparse."""
    if not (num_bytes := size(text)):
        raise argparse.ArgumentTypeError(f"{text!r} leaves nothing to plan with; leave the option out for all there is")
    return num_bytes


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if len(text) > 30:
        raise argparse.ArgumentTypeError(f"{text[:30]!r}... is no number of anything")
    if not re.fullmatch(r"[0-9]+", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A number of seconds, 0 or more and no more than a day, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and a day, 86400")
    return found


def price(text: str) -> float:
    """A number, for argparse: what prices may be, planner.price knows."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, as 2.5; currencies are left out") from error


def output_file(text: str) -> str:
    """The path of a file that can be written, for argparse: known before minutes of work, not after them."""
    from simulator.files import may_write_whole

    path = Path(text)
    if path.is_dir() or text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}; make it first")
    if not may_write_whole(path):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return text


def _probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", metavar="FILE", type=output_file, default="hardware.json", help="profile to write [%(default)s]"
    )


def _measure(parser: argparse.ArgumentParser) -> None:
    _model_and_hardware(parser)
    parser.add_argument("--sequence-length", metavar="N", type=count, required=True, help="tokens in a row")
    parser.add_argument(
        "--micro-batch-size", metavar="N", type=count, nargs="+", required=True, help="micro-batch sizes to time"
    )
    _numbers(parser)
    parser.add_argument("--gradient-format", choices=("bf16", "fp32"), default="fp32", help="[%(default)s]")
    parser.add_argument(
        "--levels", metavar="LEVEL", nargs="+", choices=SAVE_LEVELS, default=[],
        help=f"save levels to time, of {', '.join(SAVE_LEVELS)}; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE", type=output_file, default="costs.json", help="costs to write [%(default)s]"
    )


def _plan(parser: argparse.ArgumentParser) -> None:
    _model_and_hardware(parser)
    parser.add_argument("--costs", metavar="FILE", help="measured operation costs; modelled where there are none")
    parser.add_argument("--calibrate", metavar="RUN", nargs="+", default=[], help="fold what these runs measured in")

    workload = parser.add_argument_group("what to train")
    workload.add_argument("--sequence-length", metavar="N", type=count, required=True, help="tokens in a row")
    workload.add_argument("--tokens-per-step", metavar="N", type=count, required=True, help="tokens in a training step")
    workload.add_argument("--micro-batch-size", metavar="N", type=count, help="rows in a micro-batch; default: planned")
    workload.add_argument("--packed", action="store_true", help="rows hold several documents (packing in a run config)")
    _numbers(workload)
    workload.add_argument("--state-format", choices=("fp32", "8bit", "auto"), default="fp32", help="[%(default)s]")
    workload.add_argument("--gradient-format", choices=("bf16", "fp32"), default="fp32", help="[%(default)s]")
    workload.add_argument("--clipping", choices=("global", "layerwise", "none"), default="global", help="[%(default)s]")

    workload.add_argument(
        "--freeze", metavar="PATTERN", nargs="+", default=[], help="parameters that are not trained: 'model.layers.0.*'"
    )

    limits = parser.add_argument_group("limits (24GiB, 64GB); default: what the hardware has")
    limits.add_argument("--device-memory", metavar="SIZE", type=positive_size, help="GPU memory that the plan may use")
    limits.add_argument("--host-memory", metavar="SIZE", type=positive_size, help="host memory that the plan may use")
    limits.add_argument("--nvme-memory", metavar="SIZE", type=size, default=0, help="disk for state [%(default)s]")

    questions = parser.add_argument_group("questions; each answer is planned, so it takes some seconds")
    questions.add_argument("--explain", action="store_true", help="what binds, what more would buy, what else there is")
    questions.add_argument(
        "--what-if", metavar="KEY=VALUES", action="append", default=[],
        help="plan with other values, as device-memory=24GiB,48GiB or tokens-per-step=8192..131072 (doubled) or "
        "link-bandwidth=16GB/s..64GB/s:4 (evenly spaced); more keys: sequence-length, host-memory, host-bandwidth; may "
        "be given again",
    )  # fmt: skip
    questions.add_argument("--figures", metavar="DIR", help=f"where figures and CSV of --what-if go [{WHAT_IF_FOLDER}]")
    questions.add_argument("--largest", action="store_true", help="the deepest model of this width that fits")
    questions.add_argument("--longest-sequence", action="store_true", help="the longest sequence that fits")
    questions.add_argument("--price-per-hour", metavar="PRICE", type=price, help="of the machine; adds cost per token")

    parser.add_argument("--output", metavar="FILE", type=output_file, help="write the plan as JSON")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead of a table")


def _simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="plan.json", help="a plan that `conveyor plan --output` wrote")
    parser.add_argument("--hardware", metavar="NAME|FILE", help="replay on other hardware than the plan's")
    parser.add_argument("--trace", metavar="FILE", type=output_file, help="write the timeline as a Chrome trace")


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="run.yaml", nargs="?", help="run config")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that win over the file's")
    parser.add_argument("--plan", metavar="FILE", help="train by this plan")
    parser.add_argument("--data", metavar="PATH|hub:NAME|synthetic", help="training data; synthetic: random tokens")
    parser.add_argument("--output", metavar="DIR", help="run directory")
    parser.add_argument("--steps", metavar="N", type=count, help="number of steps: max_steps")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("matrix", metavar="matrix.yaml", help="workloads: docs/benchmark.md has the keys of a row")
    parser.add_argument(
        "--hardware", metavar="NAME|FILE", required=True, help="a catalogue name or a profile of `conveyor probe`"
    )
    parser.add_argument("--costs", metavar="FILE", help="measured operation costs; modelled where there are none")
    parser.add_argument("--case", metavar="NAME", action="append", help="only this row; may be given again")
    parser.add_argument("--output", metavar="DIR", default="bench", help="where run directories go [%(default)s]")
    parser.add_argument("--results", metavar="FILE", type=output_file, help="add the run records to this file")
    parser.add_argument("--clip", choices=("both", "clipped", "unclipped"), default="both", help="[%(default)s]")
    parser.add_argument("--no-ideal", action="store_true", help="leave out the ideal")
    parser.add_argument("--no-plain", action="store_true", help="leave out plain PyTorch")
    parser.add_argument(
        "--ablate", metavar="NAME", nargs="+", default=[],
        help="also run without one means each: prefetch-depth-1, two-slabs, no-resident-weights, one-save-level, "
        "host-optimizer, checkpoint-interval-1, no-depth-first, no-waiting-activations, or all",
    )  # fmt: skip
    parser.add_argument(
        "--warm-seconds", metavar="S", type=seconds, default=30.0, help="load before timing starts [%(default)s]"
    )


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="directories of runs")
    parser.add_argument("--output", metavar="DIR", default="report", help="where figures and report go [%(default)s]")
    parser.add_argument(
        "--fidelity", action="store_true", help="how well all these runs were predicted, instead of a report on each"
    )


def _reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table", metavar="NAME", action="append", default=[],
        help="only this one: 4, 5, 6, 7, 9, text or reference; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="DIR", default="reproduction", help="where text, CSV and figure go [%(default)s]"
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exits with 1 if something that Conveyor cannot do without is missing."


def _model_and_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", required=True, help="a Hugging Face folder or its config.json")
    parser.add_argument(
        "--hardware", metavar="NAME|FILE", required=True, help="a catalogue name or a profile of `conveyor probe`"
    )


def _numbers(parser: argparse._ActionsContainer) -> None:
    """Options that say in which numbers the layers compute."""
    parser.add_argument(
        "--precision", choices=("bf16", "fp32", "fp64"), default="bf16",
        help="fp64 is for comparisons, on machines whose profile has its rates [%(default)s]",
    )  # fmt: skip
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--compiled", dest="compiled", action="store_const", const=True, help="layers by torch.compile")
    mode.add_argument("--eager", dest="compiled", action="store_const", const=False, help="default: compiled on a GPU")


COMMANDS = (
    Command("probe", "measure this machine: links, memory, matrix products, attention, disk", _probe),
    Command("measure", "time Conveyor's own operations for a model on this machine", _measure),
    Command("plan", "find the fastest way to train a model on given hardware", _plan),
    Command("simulate", "replay a plan, operation by operation", _simulate),
    Command("train", "train by a plan", _train),
    Command("bench", "train a matrix of workloads beside their ideal and plain PyTorch", _bench),
    Command("plot", "draw runs: predicted against measured", _plot),
    Command("reproduce", "simulate MegaTrain's and LazyTrain's published tables beside what they print", _reproduce),
    Command("doctor", "say what this machine has and what is missing", _doctor),
)


def take_overrides(arguments: argparse.Namespace, left: list[str]) -> list[str]:
    """Sort `train`'s free arguments into `config` and `overrides`. Returns those that are neither.

    `key=value` may stand first, in place of run.yaml, and after options, where argparse leaves it over (`left`).
    """
    is_override = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=").match
    if arguments.config is not None and is_override(arguments.config):
        arguments.overrides.insert(0, arguments.config)
        arguments.config = None
    arguments.overrides += [text for text in left if is_override(text)]
    return [text for text in left if not is_override(text)]
