"""Tables of run records, as text in data frames: for the HTML report, the README and the terminal."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas

from executor.record import RunRecord
from executor.run_directory import Run
from simulator.predict import StepFigures
from simulator.timeline import BUSY, LAUNCH_GAPS, OTHER_WAIT, WAITING, largest_deviations
from simulator.units import format_bytes

NOTHING = "–"

_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_seconds": ("step time", lambda value: format_duration(value)),
    "tflops": ("TFLOPS (6 N T)", lambda value: three_digits(value)),
    "tflops_with_attention": ("TFLOPS with attention", lambda value: three_digits(value)),
    "tokens_per_second": ("tokens/s", lambda value: f"{value:,.0f}"),
    "device_peak_bytes": ("device peak", format_bytes),
    "host_peak_bytes": ("host peak", format_bytes),
    "nvme_peak_bytes": ("NVMe peak", format_bytes),
}
STATUS = {"ok": "ok", "out_of_memory": "out of memory", "refused": "refused", "failed": "failed"}

# Which of the plan's inputs a reader wants to see, and how they are called.
_INPUTS = {
    "model.family": "model family",
    "model.num_parameters": "parameters",
    "model.num_layers": "layers",
    "model.hidden_size": "hidden size",
    "workload.sequence_length": "sequence length",
    "workload.tokens_per_step": "tokens per step",
    "workload.precision": "precision",
    "workload.gradient_format": "gradient format",
    "workload.state_format": "state format",
    "workload.clipping": "clipping",
    "workload.compiled": "compiled layers",
    "hardware.name": "hardware profile",
    "limits.device_memory_bytes": "device memory limit",
    "limits.host_memory_bytes": "host memory limit",
    "limits.nvme_memory_bytes": "NVMe limit",
}


def text_share(record: RunRecord) -> float:
    """The part of a measured step's tokens that was text and not padding; a prediction counts all of them."""
    workload = record.inputs.get("workload")
    tokens = workload.get("tokens_per_step") if isinstance(workload, dict) else None
    if record.measured is None or not isinstance(tokens, int):
        return 1.0
    return record.measured.tokens_per_second * record.measured.step_seconds / tokens


def error_share(predicted: float, measured: float) -> float:
    """How far a prediction lies above (+) or below (-) what was measured, as a share of that. NaN where it is 0."""
    return predicted / measured - 1 if measured else math.nan


def format_duration(seconds: float) -> str:
    """A duration with three digits, zeros kept: `11.0 s`, `98.4 ms`."""
    unit, scale = time_unit(abs(seconds))
    return f"{three_digits(seconds * scale)} {unit}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which `seconds` read best, and how many of it a second has."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)


def three_digits(value: float) -> str:
    """Three digits or more, never an exponent: `0.000415`, `0.0123`, `2.00`, `11.0`, `649`, `1234`."""
    if abs(value) >= 100 or value == 0:
        return f"{value:.0f}" if value else "0.000"
    return f"{value:#.3g}" if abs(value) >= 1e-3 else f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def format_error(share: float) -> str:
    """A share as a signed percentage with a true minus; what rounds to nothing has no sign."""
    if math.isnan(share):
        return NOTHING
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text.replace("-", "−")


def input_value(record: RunRecord, key: str) -> Any:
    """A value of the plan's inputs by its dotted key, e.g. `model.num_parameters`; None where it has none."""
    value: Any = record.inputs
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def memory_limits(record: RunRecord) -> dict[str, int]:
    """Tier -> bytes that the plan may use, where its inputs say so."""
    found = {tier: input_value(record, f"limits.{tier}_memory_bytes") for tier in ("device", "host", "nvme")}
    return {tier: limit for tier, limit in found.items() if isinstance(limit, int) and limit > 0}


def peak_bytes(figures: StepFigures, tier: str) -> int:
    """The peak of a tier over the whole run; 0 for a tier without figures."""
    return int(getattr(figures, f"{tier}_peak_bytes", 0))


def comparison(runs: Sequence[Run]) -> pandas.DataFrame:
    """One row a run: what it is, what was predicted, what happened. Columns that no run fills are left out."""
    frame = pandas.DataFrame([_comparison_row(number, run.record) for number, run in enumerate(runs, start=1)])
    return frame[[column for column in frame.columns if (frame[column] != NOTHING).any()]]


def _comparison_row(number: int, record: RunRecord) -> dict[str, str]:
    predicted, measured = record.predicted, record.measured
    parameters, tokens = input_value(record, "model.num_parameters"), input_value(record, "workload.tokens_per_step")
    error = error_share(predicted.tflops, measured.tflops) if predicted and measured else math.nan

    def shown(figures: StepFigures | None, key: str) -> str:
        return _FIGURES[key][1](getattr(figures, key)) if figures is not None else NOTHING

    outcome = shown(measured, "tflops")
    if record.status != "ok":
        outcome = STATUS[record.status] if measured is None else f"{outcome}, {STATUS[record.status]}"
    return {
        "#": str(number),
        "case": record.case,
        "predicted TFLOPS": shown(predicted, "tflops"),
        "measured TFLOPS": outcome,
        "error": format_error(error),
        "ideal TFLOPS": shown(record.ideal, "tflops"),
        "measured step": shown(measured, "step_seconds"),
        "device": record.device_name,
        "parameters": format_parameters(parameters) if isinstance(parameters, int) else NOTHING,
        "tokens a step": f"{tokens:,}" if isinstance(tokens, int) else NOTHING,
        "device peak, predicted": shown(predicted, "device_peak_bytes"),
        "device peak, measured": shown(measured, "device_peak_bytes"),
        "host peak, predicted": shown(predicted, "host_peak_bytes"),
        "host peak, measured": shown(measured, "host_peak_bytes"),
    }


def format_parameters(count: int) -> str:
    """7615616512 -> `7.62 B`."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return str(count)


def figures(record: RunRecord) -> pandas.DataFrame:
    """One row a figure: predicted, measured, the error of the prediction, and the ideal where it was measured."""
    rows = []
    for key, (title, write) in _FIGURES.items():
        predicted, measured, ideal = (
            getattr(figures, key) if figures is not None else None
            for figures in (record.predicted, record.measured, record.ideal)
        )
        if not predicted and not measured:
            continue  # a tier that the run does not use
        if key == "tokens_per_second" and predicted and measured:
            predicted *= text_share(record)
        row = {"": title, "predicted": _written(predicted, write), "measured": _written(measured, write)}
        if predicted is not None and measured is not None:
            row["error"] = format_error(error_share(predicted, measured))
        if ideal is not None:
            row["ideal"] = _written(ideal or None, write)  # its memory was not measured, and is written as 0
        rows.append(row)
    return pandas.DataFrame(rows)


def _written(value: float | None, write: Callable[[float], str]) -> str:
    return NOTHING if value is None else write(value)


def sentence(record: RunRecord) -> str:
    """What the run was and how its prediction fared, in one or two sentences."""
    family, parameters = input_value(record, "model.family"), input_value(record, "model.num_parameters")
    layers, length = input_value(record, "model.num_layers"), input_value(record, "workload.sequence_length")
    tokens = input_value(record, "workload.tokens_per_step")
    what = family if isinstance(family, str) else "A model"
    if isinstance(parameters, int):
        what += f" of {format_parameters(parameters)} parameters"
    if isinstance(layers, int):
        what += f" in {layers:,} layers"
    if isinstance(tokens, int):
        what += f", {tokens:,} tokens a step"
    if isinstance(length, int):
        what += f" in sequences of {length:,}"
    return f"{what}, on {record.device_name}. {_outcome(record)}"


def _outcome(record: RunRecord) -> str:
    predicted, measured = record.predicted, record.measured
    if predicted is None or measured is None:
        known = {"Predicted": predicted, "Measured": measured}
        steps = [f"{name} {format_duration(f.step_seconds)} a step." for name, f in known.items() if f is not None]
        return " ".join(steps) or "Nothing was predicted or measured."
    error = format_error(error_share(predicted.step_seconds, measured.step_seconds))
    verdict = f"{error[1:]} too {'high' if error.startswith('+') else 'low'}" if error[0] in "+−" else "right"
    return (
        f"Predicted {format_duration(predicted.step_seconds)} a step, measured "
        f"{format_duration(measured.step_seconds)}: the prediction is {verdict}."
    )


def lost_causes(record: RunRecord) -> list[str]:
    """Why compute was idle, where it was: causes in the order of the breakdown's colours, then others by alphabet."""
    pair = (record.predicted, record.measured)
    found = {c for f in pair if f is not None for c, seconds in f.breakdown_seconds.items() if seconds > 0}
    found -= set(BUSY.values())
    known = list(dict.fromkeys([*WAITING.values(), OTHER_WAIT, LAUNCH_GAPS]))
    return [cause for cause in known if cause in found] + sorted(found - set(known))


def breakdown(record: RunRecord) -> pandas.DataFrame:
    """One row a cause: what compute did or waited for, predicted and measured, and its share of the measured step."""
    pair = {"predicted": record.predicted, "measured": record.measured}
    present = {title: f for title, f in pair.items() if f is not None and f.breakdown_seconds}
    if not present:
        return pandas.DataFrame()
    found = {cause for figures in present.values() for cause in figures.breakdown_seconds}
    causes = [cause for cause in dict.fromkeys(BUSY.values()) if cause in found]
    last = list(present.values())[-1]  # the measured one, where there is one
    rows = []
    for cause in [*causes, *lost_causes(record)]:
        row = {"compute": cause}
        row |= {title: _written(f.breakdown_seconds.get(cause), format_duration) for title, f in present.items()}
        rows.append({**row, "of step": share_text(last.breakdown_seconds.get(cause, 0.0) / last.step_seconds)})
    return pandas.DataFrame(rows)


def share_text(share: float) -> str:
    """A share of a step as a percentage without a sign."""
    return f"{100 * share:.1f} %"


def deviations(run: Run, count: int = 6) -> pandas.DataFrame:
    """Kinds of operations whose time differs most from its prediction, summed over a step. Needs both timelines."""
    if run.predicted is None or run.measured is None:
        return pandas.DataFrame()
    rows = []
    for kind, predicted, measured in largest_deviations(run.predicted, run.measured, count):
        difference = None if predicted is None or measured is None else measured - predicted
        rows.append(
            {
                "operations": kind.replace("_", " "),
                "predicted": "not predicted" if predicted is None else format_duration(predicted),
                "measured": "not measured" if measured is None else format_duration(measured),
                "difference": NOTHING if difference is None else _signed_seconds(difference),
                "of step": NOTHING if difference is None else format_error(difference / run.measured.step_seconds),
            }
        )
    return pandas.DataFrame(rows)


def _signed_seconds(seconds: float) -> str:
    return ("−" if seconds < 0 else "+") + format_duration(abs(seconds))


def policy(record: RunRecord) -> pandas.DataFrame:
    """Every decision of the plan; entries of one choice a block or micro-batch are counted in runs of equal ones."""
    rows = [{"decision": key.replace("_", " "), "choice": summary(value)} for key, value in record.policy.items()]
    return pandas.DataFrame(rows)


def summary(value: Any) -> str:
    """A decision in few words: `["host", "host", "device"]` -> `2 × host, device`."""
    if isinstance(value, list | tuple):
        counted = [(len(list(group)), item) for item, group in groupby(value)]
        return ", ".join(summary(item) if count == 1 else f"{count} × {summary(item)}" for count, item in counted)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def origins(record: RunRecord) -> pandas.DataFrame:
    """What the run and its prediction came from: inputs, device, versions, source trees."""
    return pandas.DataFrame({"what": what, "value": value} for what, value in _origins(record))


def _origins(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "device", record.device_name
    for key, title in _INPUTS.items():
        value = input_value(record, key)
        if value is not None and not (key.endswith("_bytes") and value == 0):  # a tier that may not be used
            yield title, format_bytes(value) if key.endswith("_bytes") else summary(value)
    if record.predicted_from is not None:
        yield "predicted from profile", record.predicted_from.hardware
        yield "predicted from costs", record.predicted_from.costs or "none: all prices by roofline"
        yield "runs folded into costs", ", ".join(record.predicted_from.folded_runs) or "none: held out"
    if record.steps_timed:
        yield "steps timed", f"{record.steps_timed:,}"
    if record.clip_factors:
        clipped = sum(factor < 1 for factor in record.clip_factors)
        yield "steps clipped", f"{clipped:,} of {len(record.clip_factors):,}"
    yield from record.versions.items()
    for package, tree in record.source_tree.items():
        yield f"source tree of {package}", tree[:12]


def markdown(frame: pandas.DataFrame) -> str:
    """A GitHub table of text cells."""
    header = [str(name) for name in frame.columns]
    rows = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in frame.itertuples(index=False)]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def aligned(frame: pandas.DataFrame) -> str:
    """A table of text cells for a terminal: columns as wide as their widest cell. Empty for an empty frame."""
    if frame.empty:
        return ""
    lines = [
        [str(name) for name in frame.columns],
        *([str(cell) for cell in row] for row in frame.itertuples(index=False)),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
