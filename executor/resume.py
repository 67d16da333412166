"""Resuming: what a run shares with the checkpoint that it goes on from, and what follows where it does not.

Three kinds of differences. Another model or precision cannot be loaded. Other settings (data and its order, schedule,
optimizer) change the run's meaning: refused, unless the user accepts them. Another plan, machine or version changes
how sums are cut or rounded: the run goes on, equal to rounding instead of bit for bit, and says so.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from simulator.errors import InputError
from simulator.formats import Precision
from simulator.model import ModelSpec

ResumeChanges = Literal["refuse", "accept"]

# What a number stands for that no user has set.
_MEANS = {"data.fingerprint": " (rows were added, taken out or changed, or become other tokens)"}
_FIXED = ("model.", "precision")  # what the stored tensors themselves depend on


def flat_settings(model: ModelSpec, precision: Precision, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that a resumed run must share, as JSON knows it, under dotted keys."""
    sizes = {key: value for key, value in model.model_dump(mode="json").items() if not isinstance(value, list)}
    nested: dict[str, Any] = {"model": sizes, "precision": precision, **settings}
    flat: dict[str, Any] = {}

    def descend(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, child in value.items():
                descend(child, f"{key}.{name}" if key else str(name))
        else:
            flat[key] = value

    descend(json.loads(json.dumps(nested)), "")
    return flat


def changed_settings(
    path: Path, saved: Mapping[str, Any], current: Mapping[str, Any], *, changes: ResumeChanges = "refuse"
) -> list[str]:
    """A clause for each setting that differs from the checkpoint's; empty where none does.

    Raises InputError that names them all, with values and what to set, unless `changes` is "accept" and the tensors
    of the checkpoint are those of the run.
    """
    differences = dict(_differences(saved, current))
    if not differences or (changes == "accept" and not any(map(_is_fixed, differences))):
        return list(differences.values())
    fixed = any(map(_is_fixed, differences))
    way_out = (
        "start a new run in another output directory"
        if fixed
        else "set resume_changes=accept to go on with the new ones, or start a new run in another output directory"
    )
    raise InputError(
        f"{path}: the run cannot go on with other settings: {'; '.join(differences.values())}; set them back, or "
        + way_out
    )


def require_same_settings(
    path: Path, saved: Mapping[str, Any], current: Mapping[str, Any], accept: Collection[str]
) -> None:
    """Raise InputError where a setting differs whose key is not in `accept`."""
    kept = [{key: value for key, value in settings.items() if key not in accept} for settings in (saved, current)]
    changed_settings(path, *kept)


def rounding_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A clause for each thing that differs and changes no more than the last bits of results."""
    current = json.loads(json.dumps(current))
    return [
        f"{key} is {current[key]!r}, was {value!r}"
        for key, value in saved.items()
        if key in current and current[key] != value
    ]


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys((*saved, *current)):
        if (key in saved, saved.get(key)) != (key in current, current.get(key)):
            now, before = (settings.get(key, "not set") for settings in (current, saved))
            name = key.removeprefix("optimizer.")  # in a run config these stand at the top level
            yield key, f"{name} is {now!r}, the checkpoint was made with {before!r}{_MEANS.get(key, '')}"


def _is_fixed(key: str) -> bool:
    return key.startswith(_FIXED)
