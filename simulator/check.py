"""The checker: proves for a step program that it cannot race, deadlock, use freed memory or compute with old values.

It runs the variants in program order, as a trainer does, and keeps for every operation what is certainly finished
when it starts (a vector clock over the FIFO resources), and for every buffer which value it holds. It knows nothing
of how the order and the waits were made.
"""

from dataclasses import dataclass, field

from simulator.errors import ProgramError
from simulator.program import Kind, Operation, Program, Resource, Role, StepProgram

# Persistent buffers that hold a value before the first step: loaded weights and optimizer state.
INITIALISED = (Role.WEIGHTS, Role.STATE)
# What may be left unread: the result of the run, and the few bytes that the host looks at.
RESULTS = (Role.WEIGHTS, Role.STATE, Role.SCALARS)
# Runs that a trainer makes: one step; some steps, a save or an evaluation, and more steps.
RUNS = (("first", "drain"), ("first", "steady", "steady", "steady", "drain", "first", "steady", "drain"))
EVALUATING = ("evaluation", "first", "steady", "drain", "evaluation", "evaluation", "evaluation", "first", "drain")


def check(step_program: StepProgram, evaluation: Program | None = None) -> None:
    """Raise ProgramError, naming the operation and the buffer, unless every rule holds:

    names are unique and waits point backwards (no deadlock); in each block micro-batches ascend, and nothing is done
    twice; `steady` does all that `first` does, in the same order. Each read finds the value that it names, the latest
    one, written by a finished operation; each write waits for the last reader and writer and destroys nothing that
    is still to be read; a passing buffer is written before use and released once, after its last use, in its step.
    `evaluation`, of `build_evaluation`, is checked in a run that evaluates before, between and after steps.
    """
    variants = {"first": step_program.first, "steady": step_program.steady, "drain": step_program.drain}
    steady_names = {operation.name for operation in step_program.steady}
    for program in variants.values():
        _check_names(program, steady_names)
        _check_repetition(program)
    _check_common(step_program.first, step_program.steady)
    _check_common(step_program.drain, step_program.steady)
    runs: tuple[tuple[str, ...], ...] = RUNS
    if evaluation is not None:
        _check_names(evaluation, {operation.name for operation in evaluation})
        _check_repetition(evaluation)
        variants["evaluation"], runs = evaluation, (*RUNS, EVALUATING)
    for run in runs:
        state = _State(step_program)
        for step, variant in enumerate(run):
            if variant == "first" or (variant == "evaluation" and run[step - 1] != "evaluation"):
                state.synchronize()
            for operation in variants[variant]:
                state.run(operation, step)
            state.end_step(variant)
        state.end_run()


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
        accesses = (*operation.reads, *operation.writes)
        used = [*(access.buffer for access in accesses), *operation.releases]
        unknown = [name for name in used if name not in program.buffers]
        if unknown:
            raise ProgramError(f"{program.variant}: {operation.name} uses undeclared buffers {unknown}")


def _check_repetition(program: Program) -> None:
    """Sums of gradients depend on the order of micro-batches: they ascend, each once, in every block."""
    last: dict[tuple[Kind, int], Operation] = {}
    for operation in program:
        if operation.kind in (Kind.LOAD_WEIGHTS, Kind.LOAD_ACTIVATION):
            continue  # as often as slots and readers ask for
        before = last.get((operation.kind, operation.block))
        if before is not None and operation.micro_batch <= before.micro_batch:
            raise ProgramError(f"{program.variant}: {operation.name} follows {before.name}")
        last[(operation.kind, operation.block)] = operation


def _check_common(part: Program, steady: Program) -> None:
    """What a variant does, `steady` does in the same order: a mistake in one of them is a mistake in both."""
    names = {operation.name for operation in part}
    common = [operation for operation in steady if operation.name in names]
    for ours, theirs in zip(part, common, strict=False):
        if ours.with_waits(()) != theirs.with_waits(()):
            raise ProgramError(f"{part.variant} has {ours.name} where steady has {theirs.name}, or another form of it")
    if len(common) < len(part):
        missing = names - {operation.name for operation in common}
        raise ProgramError(f"steady lacks {', '.join(sorted(missing)[:3])}, which {part.variant} has")


@dataclass(frozen=True, slots=True)
class _Point:
    """An executed operation: its resource and its position in that resource's FIFO."""

    label: str
    resource: Resource
    position: int


@dataclass(slots=True)
class _BufferState:
    """What a buffer holds. `version` counts the values that `content` has had anywhere; copies share it."""

    content: str | None
    version: int = 0
    writer: _Point | None = None
    readers: list[_Point] = field(default_factory=list)
    live: bool = False

    @property
    def unread(self) -> bool:
        return self.content is not None and not self.readers


class _State:
    """What is known while the programs are run in order."""

    def __init__(self, step_program: StepProgram) -> None:
        self.declared = step_program.buffers
        self.buffers = {
            name: _BufferState(
                content=_initial_content(buffer.role, buffer.block) if buffer.persistent else None,
                live=buffer.persistent,
            )
            for name, buffer in step_program.buffers.items()
        }
        self.latest: dict[str, int] = {}  # the last version of each content
        self.finished: dict[tuple[str, int], dict[Resource, int]] = {}
        self.lengths = dict.fromkeys(Resource, 0)
        self.clocks: dict[Resource, dict[Resource, int]] = {r: dict.fromkeys(Resource, -1) for r in Resource}

    def synchronize(self) -> None:
        """All that was launched has finished."""
        everything = {resource: length - 1 for resource, length in self.lengths.items()}
        self.clocks = {resource: dict(everything) for resource in Resource}

    def run(self, operation: Operation, step: int) -> None:
        label = f"{operation.name} (step {step})"
        clock = self.clocks[operation.resource]  # FIFO: all that its resource knew before
        for wait in operation.waits:
            # A first step has no updates: the variant after it has nothing to wait for there.
            known = self.finished.get((wait.operation, step + wait.step_offset))
            if known is not None:
                clock = {r: max(clock[r], known[r]) for r in Resource}
        point = _Point(label, operation.resource, self.lengths[operation.resource])

        self._read(operation, label, clock)
        copied = self._copied_versions(operation)
        for access in operation.reads:
            self.buffers[access.buffer].readers.append(point)
        for access in operation.writes:
            self._overwrite(access.buffer, label, clock, point)
            version = copied.get(access.content)
            if version is None:
                version = self.latest[access.content] = self.latest.get(access.content, 0) + 1
            self.buffers[access.buffer] = _BufferState(access.content, version, point, [], live=True)
        for name in operation.releases:
            self._release(name, label, clock, point)

        clock = {**clock, operation.resource: point.position}
        self.clocks[operation.resource] = clock
        self.lengths[operation.resource] += 1
        self.finished[(operation.name, step)] = clock

    def end_step(self, variant: str) -> None:
        left = [name for name, buffer in self.buffers.items() if buffer.live and not self.declared[name].persistent]
        if left:
            raise ProgramError(f"{variant}: never releases {', '.join(left[:3])}")

    def end_run(self) -> None:
        for name, buffer in self.buffers.items():
            if buffer.unread and self.declared[name].role not in RESULTS:
                raise ProgramError(f"drain: nothing has read {buffer.content} in {name}")

    def _read(self, operation: Operation, label: str, clock: dict[Resource, int]) -> None:
        for access in operation.reads:
            buffer = self.buffers[access.buffer]
            if not buffer.live:
                raise ProgramError(f"{label} reads {access.buffer}, which is not allocated")
            if buffer.content != access.content:
                raise ProgramError(f"{label} expects {access.content} in {access.buffer}, found {buffer.content}")
            if buffer.version != self.latest.get(access.content, 0):
                raise ProgramError(f"{label} reads {access.content} in {access.buffer}, which is not the latest one")
            self._require(buffer.writer, clock, label, access.buffer, "was written by")

    def _copied_versions(self, operation: Operation) -> dict[str, int]:
        """Versions that go from one buffer to another; what is written where it was read becomes a new one."""
        written = {access.buffer for access in operation.writes}
        copies = [access for access in operation.reads if access.buffer not in written]
        return {access.content: self.buffers[access.buffer].version for access in copies}

    def _overwrite(self, name: str, label: str, clock: dict[Resource, int], point: _Point) -> None:
        buffer = self.buffers[name]
        self._require(buffer.writer, clock, label, name, "is still being written by")
        for reader in buffer.readers:
            if reader is not point:
                self._require(reader, clock, label, name, "is still being read by")
        if buffer.unread and self.declared[name].role is not Role.SCALARS:
            raise ProgramError(f"{label} overwrites {buffer.content} in {name}, which nothing has read")

    def _release(self, name: str, label: str, clock: dict[Resource, int], point: _Point) -> None:
        buffer = self.buffers[name]
        if self.declared[name].persistent or not buffer.live:
            raise ProgramError(f"{label} releases {name}, which is not its to release")
        for user in (buffer.writer, *buffer.readers):
            if user is not point:
                self._require(user, clock, label, name, "is still in use by")
        # Whoever writes the buffer next waits for this operation too.
        self.buffers[name] = _BufferState(None, writer=point)

    @staticmethod
    def _require(user: _Point | None, clock: dict[Resource, int], label: str, buffer: str, relation: str) -> None:
        if user is not None and clock[user.resource] < user.position:
            raise ProgramError(f"{label} does not wait: {buffer} {relation} {user.label}")


def _initial_content(role: Role, block: int) -> str | None:
    if role not in INITIALISED:
        return None
    return f"{role.value}.{block}"
