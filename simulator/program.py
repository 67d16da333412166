"""The step program: one training step as typed operations on named resources and buffers.

A program is a list in an order that is right when run one operation after another. Every resource works through its
own operations in list order (FIFO); between resources an operation waits for the operations named in `waits`, of the
same step (offset 0) or of the step before (offset -1). A wait always points to an earlier operation, so a program
cannot deadlock. Programs are data: they print, diff, serialise and replay.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Resource(StrEnum):
    """What an operation occupies while it runs: streams of the GPU, the host's optimizer threads, the disk."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"


class Kind(StrEnum):
    LOAD_BATCH = "load_batch"
    LOAD_WEIGHTS = "load_weights"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    LOSS = "loss"
    EVALUATE = "evaluate"
    BACKWARD = "backward"
    FINISH_GRADIENT = "finish_gradient"
    STORE_GRADIENT = "store_gradient"
    STORE_ACTIVATION = "store_activation"
    LOAD_ACTIVATION = "load_activation"
    LOAD_STATE = "load_state"
    STORE_STATE = "store_state"
    STORE_WEIGHTS = "store_weights"
    CLIP = "clip"
    UPDATE = "update"
    REPORT = "report"
    ZERO_GRADIENT = "zero_gradient"


class Role(StrEnum):
    """What a buffer is for; the executor allocates persistent buffers by role."""

    WEIGHTS = "weights"
    SLOT = "slot"
    STATE = "state"
    STATE_SLOT = "state_slot"
    UPDATE_SLOT = "update_slot"
    ACCUMULATOR = "accumulator"
    GRADIENT = "gradient"
    SLAB = "slab"
    ACTIVATION = "activation"
    STAGE = "stage"
    SAVED_PLACE = "saved_place"
    SAVED_STAGE = "saved_stage"
    SCALARS = "scalars"
    BATCH = "batch"
    HIDDEN = "hidden"
    SAVED = "saved"
    GRAD_HIDDEN = "grad_hidden"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of memory. Persistent buffers live as long as the run; the others from write to release.

    `num_bytes` is exact except for role `saved`, whose size the costs know (it depends on the compiler).
    """

    name: str
    tier: Tier
    role: Role
    num_bytes: int
    block: int = -1
    micro_batch: int = -1
    persistent: bool = True
    level: str = ""


class Access(NamedTuple):
    """An operation's use of a buffer: `content` names the value that it reads there or leaves there."""

    buffer: str
    content: str

    @classmethod
    def own(cls, buffer: str) -> "Access":
        """A buffer that holds the value that is called like it."""
        return cls(buffer, buffer)


class Wait(NamedTuple):
    operation: str
    step_offset: int  # 0: this step; -1: the step before


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of a program. `block` counts embedding 0, layers 1..L, head L+1; -1 where it does not apply."""

    name: str
    kind: Kind
    resource: Resource
    block: int = -1
    micro_batch: int = -1
    group: int = -1
    level: str = ""  # save level of forward and backward
    first: bool = False  # writes its accumulator instead of adding to it
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    releases: tuple[str, ...] = ()
    waits: tuple[Wait, ...] = ()

    def with_waits(self, waits: tuple[Wait, ...]) -> "Operation":
        # Not dataclasses.replace, which takes ten times as long: planning builds hundreds of programs.
        return Operation(
            self.name, self.kind, self.resource, self.block, self.micro_batch, self.group, self.level, self.first,
            self.reads, self.writes, self.releases, waits,
        )  # fmt: skip

    def source(self, content_prefix: str) -> str:
        """The buffer from which this operation reads the content that starts with `content_prefix`."""
        return next(access.buffer for access in self.reads if access.content.startswith(content_prefix))

    def writes_to(self, buffer: str) -> bool:
        return any(access.buffer == buffer for access in self.writes)

    def target(self, content_prefix: str) -> str:
        """The buffer in which this operation leaves the content that starts with `content_prefix`."""
        return next(access.buffer for access in self.writes if access.content.startswith(content_prefix))


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in issue order, for one variant of the step.

    `first` has no update pending from a step before; `steady` follows another step; `drain` holds only what is
    pending, before saving, evaluating or the end. `evaluation` is a batch's forward and its loss.
    """

    variant: str
    operations: tuple[Operation, ...]
    buffers: Mapping[str, Buffer] = field(repr=False)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def to_json(self) -> str:
        return json.dumps(
            {
                "variant": self.variant,
                "buffers": [asdict(buffer) for buffer in self.buffers.values()],
                "operations": [asdict(operation) for operation in self.operations],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Program":
        data = json.loads(text)
        buffers = [Buffer(**{**row, "tier": Tier(row["tier"]), "role": Role(row["role"])}) for row in data["buffers"]]
        return cls(
            variant=data["variant"],
            operations=tuple(_operation(row) for row in data["operations"]),
            buffers={buffer.name: buffer for buffer in buffers},
        )

    def describe(self) -> str:
        """One line an operation: name, resource, what it waits for, what it reads, writes and releases."""
        return "\n".join(_line(operation) for operation in self.operations)


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The three variants of a step and the table of buffers they share.

    A run is `first`, any number of `steady`, and `drain`; then, for more steps, `first` again once all has finished:
    `first` waits for nothing that was launched before it. After a drain that has finished there may come evaluations
    (`simulator.build.build_evaluation`), each of which may follow another; what is next waits for their end.
    """

    first: Program
    steady: Program
    drain: Program
    buffers: Mapping[str, Buffer] = field(repr=False)


def _operation(row: dict[str, Any]) -> Operation:
    return Operation(
        **{
            **row,
            "kind": Kind(row["kind"]),
            "resource": Resource(row["resource"]),
            "reads": tuple(Access(*access) for access in row["reads"]),
            "writes": tuple(Access(*access) for access in row["writes"]),
            "releases": tuple(row["releases"]),
            "waits": tuple(Wait(*wait) for wait in row["waits"]),
        }
    )


def _line(operation: Operation) -> str:
    def show(accesses: tuple[Access, ...]) -> str:
        return " ".join(a.buffer if a.buffer == a.content else f"{a.buffer}={a.content}" for a in accesses)

    waits = " ".join(w.operation + ("" if w.step_offset == 0 else "@-1") for w in operation.waits)
    parts = [f"{operation.name:24} {operation.resource:8}"]
    for title, text in (
        ("waits", waits),
        ("reads", show(operation.reads)),
        ("writes", show(operation.writes)),
        ("releases", " ".join(operation.releases)),
    ):
        if text:
            parts.append(f"{title}: {text}")
    return "  ".join(parts)
