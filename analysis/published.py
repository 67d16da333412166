"""Published values: the rows of the papers' tables as printed, with what it takes to simulate them."""

from pathlib import Path
from typing import Literal, Self

import pydantic
import yaml

from simulator.errors import InputError
from simulator.schema import Schema, validated

PUBLISHED = Path(__file__).parent / "papers" / "published.yaml"

System = Literal[
    "megatrain", "single_buffer", "one_slab", "interval_1", "chunked_mlp", "zero_offload", "lazytrain", "lazytrain_lean"
]  # fmt: skip


class Values(Schema):
    """What a row prints; None: it prints no such thing. GB of memory are GiB."""

    step_seconds: float | None = None
    tflops: float | None = None  # 6 N T / s
    tflops_with_attention: float | None = None  # (6 N T + 12 L H T² a row) / s: not halved for causal attention
    tokens_per_second: float | None = None
    tokens_thousand: float | None = None  # a step
    device_gib: float | None = None  # peak allocated
    persistent_gib: float | None = None  # allocated before the first step
    host_gib: float | None = None
    parameters_billion: float | None = None
    speedup: float | None = None  # over `speedup_over`
    more_rows: int | None = None  # than `more_rows_than` at the most that fit


class PublishedRow(Schema):
    """A row of a table: which, under which conditions, with which values."""

    paper: str
    table: str
    row: str
    model: str
    machine: str
    length: int = pydantic.Field(gt=0)  # tokens of a row
    rows: int = pydantic.Field(ge=0)  # of a step; 0: the most that fit
    variant: System
    layers: int | None = None  # another depth than the model's
    width: float | None = None  # times the model's
    order: str = ""  # rows of one order are ranked by speed
    most_rows: bool = False  # the batch is published as the largest that fits
    out_of_memory_rows: int | None = None  # a batch that is published not to fit
    not_simulated: tuple[str, ...] = ()
    speedup_over: System | None = None
    more_rows_than: System | None = None
    values: Values
    assumed: str = ""  # what the paper leaves open
    miss: str = ""  # why the simulation misses the goal, where it does

    @property
    def where(self) -> str:
        """How findings and tables call it: `MegaTrain, table 4, full`."""
        table = {"text": "abstract", "reference": "reference host"}.get(self.table, f"table {self.table}")
        return f"{self.paper}, {table}, {self.row}"


class Published(Schema):
    """All rows, and the papers they are cited from."""

    papers: dict[str, str]
    rows: tuple[PublishedRow, ...]

    @pydantic.model_validator(mode="after")
    def _cited(self) -> Self:
        unknown = sorted({row.paper for row in self.rows} - set(self.papers))
        if unknown:
            raise ValueError(f"papers: no reference for {', '.join(unknown)}")
        return self

    def select(self, tables: tuple[str, ...]) -> "Published":
        """The rows of some tables; all for none. Raises InputError for a table that no paper has."""
        known = list(dict.fromkeys(row.table for row in self.rows))
        for table in tables:
            if table not in known:
                raise InputError(f"--table: there is no table {table!r}; there are {', '.join(known)}")
        return self.model_copy(update={"rows": tuple(row for row in self.rows if not tables or row.table in tables)})


def load_published(path: Path = PUBLISHED) -> Published:
    """The published values. Raises InputError naming what is wrong with the file."""
    return validated(Published, **yaml.safe_load(path.read_text(encoding="utf-8")))
