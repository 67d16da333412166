"""Which operations certainly finish before which, by reachability over explicit edges of an unrolled program.

Another way to the checker's question: it keeps no clocks, but the set of all predecessors of every operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.program import Operation, Program, StepProgram

SEQUENCES = (
    ("first", "steady", "steady", "steady", "drain"),
    ("first", "drain"),
    ("first", "steady", "drain"),
)


@dataclass(frozen=True)
class Use:
    node: int
    changes: bool  # writes or frees


def predecessors(programs: Sequence[Program]) -> tuple[list[Operation], list[int]]:
    """All operations in order, and for each the set of those that must have finished, as bits."""
    nodes: list[Operation] = []
    number: dict[tuple[str, int], int] = {}
    last_on: dict[str, int] = {}
    before: list[int] = []
    for step, program in enumerate(programs):
        for operation in program:
            node = len(nodes)
            edges = [last_on[operation.resource]] if operation.resource in last_on else []
            for wait in operation.waits:
                awaited = number.get((wait.operation, step + wait.step_offset))
                if awaited is not None:
                    edges.append(awaited)
            bits = 0
            for edge in edges:
                bits |= before[edge] | 1 << edge
            nodes.append(operation)
            before.append(bits)
            number[(operation.name, step)] = node
            last_on[operation.resource] = node
    return nodes, before


def races(step_program: StepProgram) -> list[tuple[str, str, str]]:
    """(earlier operation, later operation, buffer) for neighbouring conflicting uses that are not ordered."""
    found = []
    for names in SEQUENCES:
        nodes, before = predecessors([getattr(step_program, name) for name in names])
        uses: dict[str, list[Use]] = {}
        for node, operation in enumerate(nodes):
            changed = {access.buffer for access in operation.writes} | set(operation.releases)
            for buffer in changed | {access.buffer for access in operation.reads}:
                uses.setdefault(buffer, []).append(Use(node, buffer in changed))
        for buffer, history in uses.items():
            for place, later in enumerate(history):
                for earlier in history[:place]:
                    if (earlier.changes or later.changes) and not before[later.node] >> earlier.node & 1:
                        found.append((nodes[earlier.node].name, nodes[later.node].name, buffer))
    return found
