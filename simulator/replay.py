"""Replay: run a step program against prices instead of hardware, until the step repeats itself.

Each resource works through its FIFO; operations that run at the same time share what they both need: the two link
directions slow each other, copies and host updates share host DRAM evenly, and copies cost the compute stream a
little. Rates are constant between events (a fluid model), so a replay is a list of events, exact for its prices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from simulator.program import Buffer, Operation, Resource, StepProgram
from simulator.timeline import MemoryPoint, Span, Timeline, memory_curve

MAX_STEPS = 24
PERIOD_TOLERANCE = 1e-9
COPIES = (Resource.H2D, Resource.D2H)


@dataclass(frozen=True, slots=True)
class Price:
    """What an operation takes when it runs alone: seconds, host DRAM traffic, and memory only it uses."""

    seconds: float
    dram_bytes: float = 0.0
    transient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sharing:
    """How operations slow each other. `inline`: no streams, one operation after another in program order."""

    inline: bool = False
    duplex: float = 1.0  # rate of a copy while the other direction runs, relative to alone
    dram_bytes_per_second: float = float("inf")
    compute_beside_copies: float = 1.0  # rate of compute while copies run, relative to alone


def granted_shares(asked: Mapping[Resource, float], bytes_per_second: float) -> dict[Resource, float]:
    """The share of the host DRAM traffic it asks for that each resource gets: max-min.

    Whoever asks for less than an even share has all of it, the others share what is left evenly. An operation whose
    price asks for more than the memory carries has all of it when it is alone.
    """
    if len(asked) < 2:
        return dict.fromkeys(asked, 1.0)
    left = bytes_per_second
    demand = {resource: min(value, left) for resource, value in asked.items()}
    shares = {}
    for served, (resource, value) in enumerate(sorted(demand.items(), key=lambda item: item[1])):
        granted = min(value, left / (len(demand) - served))
        shares[resource] = granted / value
        left -= granted
    return shares


def replay(
    step_program: StepProgram,
    price: Callable[[Operation], Price],
    size: Callable[[Buffer], int],
    sharing: Sharing,
) -> Timeline:
    """Timeline of the steady step. Steps are added until two periods agree on every resource, at most MAX_STEPS.

    The last step replayed is only company for the one before it: copies and updates of the next step share links and
    host DRAM with the step that is reported.
    """
    num_steps = 4
    while True:
        run = _Run(step_program, price, sharing, num_steps)
        run.execute()
        if run.repeats or num_steps >= MAX_STEPS:
            return run.timeline(size)
        num_steps = min(2 * num_steps, MAX_STEPS)


def replay_stretch(
    step_program: StepProgram, price: Callable[[Operation], Price], sharing: Sharing, *, num_steps: int
) -> float:
    """Seconds from rest to rest: `num_steps` steps, the first of which has nothing to update, and the drain after."""
    run = _Run(step_program, price, sharing, num_steps, drained=True)
    run.execute()
    return max(task.end for task in run.tasks)


@dataclass(slots=True)
class _Task:
    operation: Operation
    price: Price
    step: int
    blockers: int = 0
    dependents: list[int] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    remaining: float = 0.0
    cause: str = ""


class _Run:
    """Several steps, executed event by event."""

    def __init__(
        self, step_program: StepProgram, price: Callable[[Operation], Price], sharing: Sharing, num_steps: int,
        *, drained: bool = False,
    ) -> None:  # fmt: skip
        self.buffers = step_program.buffers
        self.sharing = sharing
        self.tasks: list[_Task] = []
        self.queues: dict[Resource, list[int]] = {}
        prices: dict[str, Price] = {}
        positions: dict[tuple[str, int], int] = {}
        programs = [step_program.first, *[step_program.steady] * (num_steps - 1)]
        for step, program in enumerate([*programs, step_program.drain] if drained else programs):
            for operation in program:
                if operation.name not in prices:
                    prices[operation.name] = price(operation)
                task, position = _Task(operation, prices[operation.name], step), len(self.tasks)
                task.remaining = task.price.seconds
                for wait in operation.waits:
                    blocker = positions.get((wait.operation, step + wait.step_offset))
                    if blocker is not None:
                        self.tasks[blocker].dependents.append(position)
                        task.blockers += 1
                self.tasks.append(task)
                positions[(operation.name, step)] = position
                # Inline, the one thread is the one queue.
                queue = Resource.COMPUTE if sharing.inline else operation.resource
                self.queues.setdefault(queue, []).append(position)
        self.num_steps = num_steps

    def execute(self) -> None:
        now = 0.0
        next_in_queue = dict.fromkeys(self.queues, 0)
        running: dict[Resource, int] = {}
        free_since = dict.fromkeys(self.queues, 0.0)
        released_by: dict[int, str] = {}
        # Layers are alike: the same prices run beside each other again and again, at the same rates.
        known_rates: dict[tuple[int, ...], dict[Resource, float]] = {}
        left = len(self.tasks)
        while left:
            for resource, queue in self.queues.items():
                if resource in running or next_in_queue[resource] >= len(queue):
                    continue
                position = queue[next_in_queue[resource]]
                task = self.tasks[position]
                if task.blockers == 0:
                    task.start = now
                    if now > free_since[resource]:
                        task.cause = released_by.get(position, "")
                    running[resource] = position
                    next_in_queue[resource] += 1
            key = tuple(id(self.tasks[running[r]].price) if r in running else 0 for r in self.queues)
            rates = known_rates.get(key)
            if rates is None:
                rates = known_rates[key] = self._rates(running)
            elapsed = min(self.tasks[p].remaining / rates[r] for r, p in running.items())
            now += elapsed
            for resource, position in list(running.items()):
                task = self.tasks[position]
                task.remaining -= elapsed * rates[resource]
                if task.remaining > 1e-12 * max(task.price.seconds, 1e-9):
                    continue
                task.end = now
                left -= 1
                del running[resource]
                free_since[resource] = now
                for dependent in task.dependents:
                    self.tasks[dependent].blockers -= 1
                    released_by[dependent] = task.operation.name

    def _rates(self, running: dict[Resource, int]) -> dict[Resource, float]:
        rates = dict.fromkeys(running, 1.0)
        if self.sharing.inline:
            return rates
        copies = [resource for resource in COPIES if resource in running]
        if len(copies) == 2:
            rates.update(dict.fromkeys(copies, self.sharing.duplex))
        if copies and Resource.COMPUTE in running:
            rates[Resource.COMPUTE] = self.sharing.compute_beside_copies
        asked = {
            resource: rates[resource] * task.price.dram_bytes / task.price.seconds
            for resource, task in ((r, self.tasks[p]) for r, p in running.items())
            if task.price.dram_bytes and task.price.seconds
        }
        for resource, share in granted_shares(asked, self.sharing.dram_bytes_per_second).items():
            rates[resource] *= share
        return rates

    @property
    def compute_ends(self) -> list[float]:
        """When each step's last operation on the compute resource ends."""
        return self.ends[Resource.COMPUTE]

    @cached_property
    def ends(self) -> dict[Resource, list[float]]:
        """When each step's last operation has ended, on each resource; inline there is one."""
        found = {resource: [0.0] * self.num_steps for resource in self.queues}
        for task in self.tasks:
            ends = found[Resource.COMPUTE if self.sharing.inline else task.operation.resource]
            ends[task.step] = max(ends[task.step], task.end)
        return found

    @cached_property
    def repeats(self) -> bool:
        """Whether the last step but one takes as long as the one before, and every resource repeats itself in it.

        A resource that does not hold up compute may take some more steps to find its place.
        """
        ends = self.compute_ends
        period, before = ends[-2] - ends[-3], ends[-3] - ends[-4]
        nearly = PERIOD_TOLERANCE * max(period, before)
        return abs(period - before) <= nearly and all(
            abs(own[-2] - own[-3] - period) <= nearly for own in self.ends.values()
        )

    @property
    def slowest_period(self) -> float:
        """Seconds a step of the slowest resource, over the second half of the steps where they do not repeat.

        A resource that falls behind compute by a little in every step holds it up in the end, in more steps than are
        replayed.
        """
        if self.repeats:
            return 0.0
        half = self.num_steps // 2
        return max((own[-2] - own[-2 - half]) / half for own in self.ends.values())

    def timeline(self, size: Callable[[Buffer], int]) -> Timeline:
        """The last step but one. Its seconds count from the end of the step before on the compute resource."""
        reported = self.num_steps - 2
        begin, end = self.compute_ends[reported - 1 : reported + 1]
        spans = tuple(
            Span(
                task.operation.name, task.operation.kind.value, task.operation.resource.value, task.operation.block,
                task.operation.micro_batch, task.start - begin, task.end - begin, task.cause,
            )
            for task in self.tasks
            if task.step == reported
        )  # fmt: skip
        memory: dict[str, tuple[MemoryPoint, ...]] = {}
        peaks: dict[str, int] = {}
        for tier in sorted({buffer.tier.value for buffer in self.buffers.values()}):
            base = sum(size(b) for b in self.buffers.values() if b.persistent and b.tier.value == tier)
            points, peaks[tier] = memory_curve(self._changes(tier, size), base)
            before = [point.num_bytes for point in points if point.seconds <= begin]
            inside = [MemoryPoint(p.seconds - begin, p.num_bytes) for p in points if begin < p.seconds <= end]
            memory[tier] = (MemoryPoint(0.0, before[-1] if before else base), *inside)
        return Timeline(max(end - begin, self.slowest_period), spans, memory, peaks)

    def _changes(self, tier: str, size: Callable[[Buffer], int]) -> list[tuple[float, int]]:
        changes: list[tuple[float, int]] = []
        live: set[str] = set()
        for task in self.tasks:
            if tier == "device" and task.price.transient_bytes:
                changes += [(task.start, task.price.transient_bytes), (task.end, -task.price.transient_bytes)]
            for access in task.operation.writes:
                buffer = self.buffers[access.buffer]
                if not buffer.persistent and buffer.tier.value == tier and buffer.name not in live:
                    live.add(buffer.name)
                    changes.append((task.start, size(buffer)))
            for name in task.operation.releases:
                if self.buffers[name].tier.value == tier:
                    live.discard(name)
                    changes.append((task.end, -size(self.buffers[name])))
        return changes
