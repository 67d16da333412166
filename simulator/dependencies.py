"""Waits between operations, derived from what they read and write.

The order of a program is the builder's decision; which operations must therefore wait for which is not a decision but
a consequence: two operations that touch the same buffer, at least one of them writing, run in program order. On one
resource FIFO order says so already; between resources it takes a wait. Waits that other waits imply are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simulator.program import Operation, Resource, Wait

RESOURCES = tuple(Resource)


def derive_waits(orders: Mapping[str, Sequence[Operation]]) -> dict[str, tuple[Operation, ...]]:
    """Add waits to the variants `first`, `steady` and `drain`, each given as a list in program order.

    `steady` and `drain` may follow `first` or `steady`: their waits hold after either.
    """
    found: dict[str, tuple[Operation, ...]] = {}
    for variant, operations in orders.items():
        befores = [[]] if variant == "first" else [orders["first"], orders["steady"]]
        waits: list[set[Wait]] = [set() for _ in operations]
        for before in befores:
            for index, extra in enumerate(_waits_after(before, operations)):
                waits[index] |= extra
        found[variant] = tuple(
            operation.with_waits(tuple(sorted(extra))) for operation, extra in zip(operations, waits, strict=True)
        )
    return found


@dataclass(slots=True)
class _History:
    """Who wrote a buffer last, and who has read it since: positions in the joined list of two steps."""

    writer: int = -1
    readers: list[int] = field(default_factory=list)


def _waits_after(before: Sequence[Operation], operations: Sequence[Operation]) -> list[set[Wait]]:
    joined = [*before, *operations]
    column = [RESOURCES.index(operation.resource) for operation in joined]
    # clocks[i][r]: the last position on resource r that is known to be finished when operation i starts.
    clocks: list[list[int]] = []
    last_on: list[int] = [-1] * len(RESOURCES)
    histories: dict[str, _History] = {}
    waits: list[set[Wait]] = []
    for position, operation in enumerate(joined):
        conflicts = set()
        for access in operation.reads:
            conflicts.add(histories.setdefault(access.buffer, _History()).writer)
        for access in operation.writes:
            history = histories.setdefault(access.buffer, _History())
            conflicts |= {history.writer, *history.readers}
        conflicts.discard(-1)

        own = column[position]
        previous = last_on[own]
        clock = list(clocks[previous]) if previous >= 0 else [-1] * len(RESOURCES)
        clock[own] = previous
        needed = []
        for conflict in sorted(conflicts, reverse=True):  # the latest first: it may imply the others
            if clock[column[conflict]] >= conflict:
                continue
            needed.append(conflict)
            clock = [max(pair) for pair in zip(clock, clocks[conflict], strict=True)]
            clock[column[conflict]] = max(clock[column[conflict]], conflict)
        clocks.append(clock)
        last_on[own] = position
        for access in operation.reads:
            histories[access.buffer].readers.append(position)
        for access in operation.writes:
            histories[access.buffer] = _History(position)
        if position >= len(before):
            waits.append({Wait(joined[i].name, -1 if i < len(before) else 0) for i in needed})
    return waits
