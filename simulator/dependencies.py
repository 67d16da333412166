"""Waits between operations, derived from what they read and write.

The order of a program is the builder's decision; which operations must therefore wait for which is not a decision but
a consequence: two operations that touch the same buffer, at least one of them writing or releasing it, run in program
order. On one resource FIFO order says so already; between resources it takes a wait. Waits that other waits imply are
left out.
"""

from collections.abc import Mapping, Sequence

from simulator.program import Operation, Resource, Wait

COLUMNS = {resource: column for column, resource in enumerate(Resource)}


def derive_waits(orders: Mapping[str, Sequence[Operation]]) -> dict[str, tuple[Operation, ...]]:
    """Add waits to the variants `first`, `steady` and `drain`, each given as a list in program order.

    `steady` and `drain` may follow `first` or `steady`: their waits hold after either.
    """
    first, steady = _Steps(), _Steps()
    waits = {"first": first.append(orders["first"])}
    steady.append(orders["steady"])
    for variant in ("steady", "drain"):
        after_each = (first.copy().append(orders[variant]), steady.copy().append(orders[variant]))
        waits[variant] = [one | other for one, other in zip(*after_each, strict=True)]
    return {
        variant: tuple(
            operation.with_waits(tuple(sorted(found)))
            for operation, found in zip(operations, waits[variant], strict=True)
        )
        for variant, operations in orders.items()
    }


def derive_repeated_waits(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Add waits to a program that nothing precedes but itself."""
    steps = _Steps()
    alone, again = steps.append(operations), steps.append(operations)
    return tuple(
        operation.with_waits(tuple(sorted(one | other)))
        for operation, one, other in zip(operations, alone, again, strict=True)
    )


class _Steps:
    """Operations of one step, and then of a second one, as positions in one list; who touched each buffer last."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.column: list[int] = []
        # clocks[i][r]: the last position on resource r that is known to be finished when operation i starts.
        self.clocks: list[list[int]] = []
        self.last_on = [-1] * len(COLUMNS)
        self.writer: dict[str, int] = {}
        self.readers: dict[str, dict[int, int]] = {}  # since the last write; the last one on each resource

    def copy(self) -> "_Steps":
        other = _Steps()
        other.names, other.column, other.clocks = self.names.copy(), self.column.copy(), self.clocks.copy()
        other.last_on, other.writer = self.last_on.copy(), self.writer.copy()
        other.readers = {buffer: readers.copy() for buffer, readers in self.readers.items()}
        return other

    def append(self, operations: Sequence[Operation]) -> list[set[Wait]]:
        """What each operation waits for; what was there before is the step before."""
        before = len(self.names)
        waits = []
        for operation in operations:
            needed = self._append_one(operation)
            waits.append({Wait(self.names[i], -1 if i < before else 0) for i in needed})
        return waits

    def _append_one(self, operation: Operation) -> list[int]:
        column, clocks, writer, readers = self.column, self.clocks, self.writer, self.readers
        position, own = len(self.names), COLUMNS[operation.resource]
        previous = self.last_on[own]
        clock = clocks[previous].copy() if previous >= 0 else [-1] * len(COLUMNS)
        clock[own] = previous
        read = [access.buffer for access in operation.reads]
        # What is released is another's memory from here on.
        written = [access.buffer for access in operation.writes] + list(operation.releases)
        conflicts = {writer.get(buffer, -1) for buffer in read}
        for buffer in written:
            conflicts.add(writer.get(buffer, -1))
            if buffer in readers:
                conflicts.update(readers[buffer].values())
        conflicts.discard(-1)

        needed = []
        for conflict in sorted(conflicts, reverse=True):  # the latest first: it may imply the others
            if clock[column[conflict]] >= conflict:
                continue
            needed.append(conflict)
            clock = list(map(max, clock, clocks[conflict]))
            clock[column[conflict]] = max(clock[column[conflict]], conflict)
        self.names.append(operation.name)
        column.append(own)
        clocks.append(clock)
        self.last_on[own] = position
        for buffer in read:
            readers.setdefault(buffer, {})[own] = position
        for buffer in written:
            writer[buffer] = position
            readers.pop(buffer, None)
        return needed
