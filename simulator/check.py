"""The checker: proves for a step program that it cannot race, deadlock or use memory after it is freed.

It replays first, steady, steady, steady, drain, first, drain in program order and keeps, for every operation, what is
certainly finished when it starts (a vector clock over the FIFO resources), and for every buffer which version of which
value it holds. It knows nothing of how the waits were made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from simulator.errors import ProgramError
from simulator.program import Operation, Program, Resource, Role, StepProgram

# Persistent buffers that hold a value before the first step: loaded weights and optimizer state.
INITIALISED = (Role.WEIGHTS, Role.STATE)


def check(step_program: StepProgram) -> None:
    """Raise ProgramError, naming the operation and the buffer, unless every rule holds:

    names are unique and waits point backwards (no deadlock); each read finds the value it names, in its latest
    version, written by a finished operation; each write waits for the last reader and writer; a passing buffer is
    written before use, released exactly once, after its last use, within its step.
    """
    steady_names = {operation.name for operation in step_program.steady}
    for program in (step_program.first, step_program.steady, step_program.drain):
        _check_names(program, steady_names)
    state = _State(step_program)
    for step, program in enumerate(_unrolled(step_program)):
        for operation in program:
            state.run(operation, step)
        state.end_step(program.variant)


def _unrolled(step_program: StepProgram) -> Iterator[Program]:
    yield step_program.first
    for _ in range(3):
        yield step_program.steady
    yield step_program.drain
    yield step_program.first
    yield step_program.drain


def _check_names(program: Program, steady_names: set[str]) -> None:
    seen: set[str] = set()
    for operation in program:
        if operation.name in seen:
            raise ProgramError(f"{program.variant}: two operations are called {operation.name}")
        for wait in operation.waits:
            if wait.step_offset == 0 and wait.operation not in seen:
                raise ProgramError(
                    f"{program.variant}: {operation.name} waits for {wait.operation}, which does not come before it"
                )
            if wait.step_offset not in (0, -1) or (wait.step_offset == -1 and wait.operation not in steady_names):
                raise ProgramError(f"{program.variant}: {operation.name} waits for unknown {wait}")
        seen.add(operation.name)
        unknown = [a.buffer for a in (*operation.reads, *operation.writes) if a.buffer not in program.buffers]
        if unknown:
            raise ProgramError(f"{program.variant}: {operation.name} uses undeclared buffers {unknown}")


@dataclass(frozen=True, slots=True)
class _Point:
    """An executed operation: its resource and its position in that resource's FIFO."""

    label: str
    resource: Resource
    position: int


@dataclass(slots=True)
class _BufferState:
    content: str | None
    version: int = 0
    writer: _Point | None = None
    readers: list[_Point] = field(default_factory=list)
    live: bool = False


class _State:
    """What is known while the programs are replayed in order."""

    def __init__(self, step_program: StepProgram) -> None:
        self.declared = step_program.buffers
        self.buffers = {
            name: _BufferState(
                content=_initial_content(buffer.role, name, buffer.block) if buffer.persistent else None,
                live=buffer.persistent,
            )
            for name, buffer in step_program.buffers.items()
        }
        self.versions: dict[str, int] = {}  # the latest of each content
        self.finished: dict[tuple[str, int], tuple[_Point, dict[Resource, int]]] = {}
        self.lengths = dict.fromkeys(Resource, 0)
        self.clocks: dict[Resource, dict[Resource, int]] = {r: dict.fromkeys(Resource, -1) for r in Resource}

    def run(self, operation: Operation, step: int) -> None:
        label = f"{operation.name} (step {step})"
        clock = self.clocks[operation.resource]  # FIFO: all that its resource knew before
        for wait in operation.waits:
            # A first step has no updates: the variant after it has nothing to wait for there.
            known = self.finished.get((wait.operation, step + wait.step_offset))
            if known is not None:
                clock = {r: max(clock[r], known[1][r]) for r in Resource}
        point = _Point(label, operation.resource, self.lengths[operation.resource])

        for access in operation.reads:
            buffer = self.buffers[access.buffer]
            if not buffer.live:
                raise ProgramError(f"{label} reads {access.buffer}, which is not allocated")
            if buffer.content != access.content:
                raise ProgramError(f"{label} expects {access.content} in {access.buffer}, found {buffer.content}")
            if buffer.version != self.versions.get(access.content, 0):
                raise ProgramError(f"{label} reads an outdated {access.content} from {access.buffer}")
            self._require(buffer.writer, clock, label, access.buffer, "was written by")
        for access in operation.writes:
            buffer = self.buffers[access.buffer]
            self._require(buffer.writer, clock, label, access.buffer, "is still being written by")
            for reader in buffer.readers:
                self._require(reader, clock, label, access.buffer, "is still being read by")
        for access in operation.reads:
            self.buffers[access.buffer].readers.append(point)
        carried = {access.content for access in operation.reads}
        for access in operation.writes:
            # A value that is read in one buffer and left in another is a copy; all else is a new version.
            copied = access.content in carried and access not in operation.reads
            version = self.versions.get(access.content, 0) + (0 if copied else 1)
            self.versions[access.content] = version
            self.buffers[access.buffer] = _BufferState(access.content, version, point, [], live=True)
        for name in operation.releases:
            buffer = self.buffers[name]
            if self.declared[name].persistent or not buffer.live:
                raise ProgramError(f"{label} releases {name}, which is not its to release")
            for user in (buffer.writer, *buffer.readers):
                if user is not point:
                    self._require(user, clock, label, name, "is still in use by")
            buffer.live, buffer.content = False, None

        clock = {**clock, operation.resource: point.position}
        self.clocks[operation.resource] = clock
        self.lengths[operation.resource] += 1
        self.finished[(operation.name, step)] = (point, clock)

    def end_step(self, variant: str) -> None:
        left = [name for name, buffer in self.buffers.items() if buffer.live and not self.declared[name].persistent]
        if left:
            raise ProgramError(f"{variant}: never releases {', '.join(left[:3])}")
        if variant == "drain":
            # A drain ends when all resources have finished.
            done = {resource: length - 1 for resource, length in self.lengths.items()}
            self.clocks = dict.fromkeys(Resource, done)

    @staticmethod
    def _require(point: _Point | None, clock: dict[Resource, int], label: str, buffer: str, relation: str) -> None:
        if point is not None and clock[point.resource] < point.position:
            raise ProgramError(f"{label} does not wait: {buffer} {relation} {point.label}")


def _initial_content(role: Role, name: str, block: int) -> str | None:
    if role not in INITIALISED:
        return None
    return f"weights.{block}" if role is Role.WEIGHTS else name
