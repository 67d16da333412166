"""Hugging Face datasets: downloaded where the user asks for one by name, or saved in a folder. Needs the extra `hub`.

hub:owner/name                  the split `train`
hub:owner/name:test[:1000]      another split, or part of one, as `datasets` writes it
hub:owner/name/config:split     one of several configurations
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.data.row_files import PARQUET_BATCH_ROWS, Record, arrow_rows, require_package
from simulator.errors import InputError
from simulator.nearest import did_you_mean, nearest_name

PREFIX = "hub:"
_NAME = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]:%+-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """One split. `files` hold its rows; `identity` says which of them, and in which order."""

    rows: Any  # datasets.Dataset
    files: tuple[Path, ...]
    identity: str

    def records(self) -> Iterator[Record]:
        """Rows by number, columns as they are stored: nothing is decoded that is not trained."""
        number = 0
        for table in self.rows.with_format("arrow").iter(batch_size=PARQUET_BATCH_ROWS):
            for value in arrow_rows(table):
                number += 1
                yield Record(number, value)


def download(name: str, *, what: str = "data") -> HubDataset:
    """The dataset that `hub:...` names, through the cache of `datasets`. Raises InputError."""
    found = _NAME.fullmatch(name)
    if not found:
        raise InputError(f"{what}: {name!r} is not hub:owner/name, hub:owner/name:split or hub:owner/name/config:split")
    datasets = require_package("datasets", what=f"{what}: {name}", extra="hub")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(found["name"], found["config"], split=found["split"] or "train")
    except Exception as error:  # the library raises what its parsers and the network raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        offline = isinstance(error, ConnectionError)
        hint = "; without a network only what was downloaded before is found, or files by their path" if offline else ""
        raise InputError(f"{what}: {name} cannot be opened ({reason}){hint}") from error
    return _dataset(rows, name)


def is_saved(path: Path) -> bool:
    """Whether a folder is what `save_to_disk` of `datasets` writes."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def load_saved(path: Path) -> HubDataset:
    """A dataset that `save_to_disk` wrote; its split `train` where it has several. Raises InputError."""
    datasets = require_package("datasets", what=f"{path}: a dataset saved by Hugging Face's library", extra="hub")
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}: cannot be read as a saved dataset ({reason})") from error
    if isinstance(rows, datasets.DatasetDict):
        if "train" not in rows and len(rows) != 1:
            hint = did_you_mean(path / nearest) if (nearest := nearest_name("train", rows)) else ""
            raise InputError(f"{path}: has the splits {', '.join(rows)}; name the folder of one{hint}")
        rows = rows["train"] if "train" in rows else next(iter(rows.values()))
    return _dataset(rows, "saved")


def _dataset(rows: Any, name: str) -> HubDataset:
    files = tuple(Path(entry["filename"]) for entry in rows.cache_files)
    # Files may hold more rows than the split: how many and which is in the library's own fingerprint.
    return HubDataset(rows, files, f"{name} {len(rows)} {getattr(rows, '_fingerprint', '')}")
