"""RunRecord: one run in one JSON object, and analysis/results/NAME.json, the committed lists of them.

A record embeds the inputs and the policy of its plan, what was predicted and what was measured, so that a reader
never guesses. Records outlive the schemas of their time: `inputs` and `policy` are kept as plain JSON.
"""

import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Literal, Self

import pydantic

from simulator.errors import InputError
from simulator.files import write_whole
from simulator.predict import StepFigures
from simulator.schema import Schema, describe

Status = Literal["ok", "out_of_memory", "refused", "failed"]

# Distributions whose versions change what a run does or how fast.
_DISTRIBUTIONS = ("conveyor-train", "torch", "transformers", "triton", "numpy", "safetensors", "pulp", "highspy")


class PredictedFrom(Schema):
    """What a prediction was made from: calibrated where runs were folded into the costs, held out where none."""

    hardware: str  # identity hash of the profile
    costs: str | None = None  # identity hash of the measured operation costs; None: all prices by roofline
    folded_runs: tuple[str, ...] = ()


class RunRecord(Schema):
    """One run, finished or not. `predicted`, `measured` and `ideal` have the same keys.

    `ideal` is the measured step without any optimizer, where somebody measured it. The figures of `measured` are
    those of the median of `steps_timed` steps; `clip_factors` has one entry a step (1.0: not clipped) since the run was
    started or resumed last.
    """

    case: str = pydantic.Field(min_length=1)
    inputs: dict[str, pydantic.JsonValue]
    policy: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    status: Status
    message: str = ""  # why the run did not end well
    source_tree: dict[str, str]
    versions: dict[str, str]
    device_name: str
    predicted: StepFigures | None = None
    predicted_from: PredictedFrom | None = None
    measured: StepFigures | None = None
    ideal: StepFigures | None = None
    clip_factors: tuple[float, ...] = ()
    steps_timed: int = pydantic.Field(default=0, ge=0)

    @pydantic.model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.status == "ok" and (self.predicted is None or self.measured is None or not self.steps_timed):
            raise ValueError("status 'ok' needs predicted, measured and steps_timed")
        if self.status != "ok" and not self.message:
            raise ValueError(f"status {self.status!r} needs a message")
        if self.predicted is not None and self.predicted_from is None:
            raise ValueError("predicted needs predicted_from")
        return self


_RESULTS = pydantic.TypeAdapter(list[RunRecord])


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a run uses, as installed; nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def load_results(path: Path | str) -> list[RunRecord]:
    """The records of a results file. Raises InputError naming the file, and the entry and key that are wrong."""
    path = Path(path)
    try:
        return _RESULTS.validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text") from error
    except pydantic.ValidationError as error:
        raise InputError(f"{path}: is not a list of run records ({describe(error)})") from error


def append_result(path: Path | str, record: RunRecord) -> None:
    """Add a record, without machine paths, to a results file, which is made where there is none.

    Raises InputError where the file is damaged, and leaves it as it was.
    """
    path = Path(path)
    records = load_results(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _RESULTS.dump_json([*records, without_paths(record)], indent=1).decode() + "\n")


# An absolute path inside a sentence: it starts the text or follows a blank, quote, bracket or equals sign.
_PATH = re.compile(r"""(?<![^\s'"(\[{=,])~?(?:/[^\s/'"()\[\]{},:;]+)+""")


def without_paths(record: RunRecord) -> RunRecord:
    """The record with every absolute path cut to its last part, also inside messages."""
    return RunRecord.model_validate(_cut_paths(record.model_dump(mode="json")))


def _cut_paths(value: pydantic.JsonValue) -> pydantic.JsonValue:
    if isinstance(value, dict):
        return {key: _cut_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~/")) and os.path.basename(value) and "\n" not in value and ": " not in value:
        return os.path.basename(value)  # all of it is a path, blanks included
    return _PATH.sub(lambda match: os.path.basename(match.group()), value)


def record_json(record: RunRecord) -> str:
    """The text of run.json."""
    return json.dumps(record.model_dump(mode="json"), indent=1) + "\n"
