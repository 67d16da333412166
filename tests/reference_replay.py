"""A second simulator, written apart from the first and slower: what replay must agree with.

It steps from event to event over explicit sets, and shares host DRAM by raising every user's bandwidth together until
the memory is full or the user has all that it asks for (max-min fairness), by bisection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simulator.program import Operation, Program
from simulator.replay import Price, Sharing


@dataclass
class Ran:
    """One operation's run in one step."""

    operation: Operation
    step: int
    start: float = -1.0
    end: float = -1.0


@dataclass
class Reference:
    ran: list[Ran]
    compute_ends: list[float] = field(default_factory=list)

    def span(self, name: str, step: int) -> Ran:
        return next(item for item in self.ran if item.operation.name == name and item.step == step)


def simulate(programs: Sequence[Program], prices: Mapping[str, Price], sharing: Sharing) -> Reference:
    """Run the programs one after another as steps; prices by operation name."""
    ran = [Ran(operation, step) for step, program in enumerate(programs) for operation in program]
    index = {(item.operation.name, item.step): number for number, item in enumerate(ran)}
    awaits: list[set[int]] = []
    last: dict[str, int] = {}
    for number, item in enumerate(ran):
        lane = "the thread" if sharing.inline else item.operation.resource
        needs = {index.get((wait.operation, item.step + wait.step_offset), -1) for wait in item.operation.waits}
        needs.add(last.get(lane, -1))
        awaits.append(needs - {-1})
        last[lane] = number
    work = [prices[item.operation.name].seconds for item in ran]
    waiting, busy, done, now = set(range(len(ran))), set(), set(), 0.0
    while waiting or busy:
        begun = {number for number in waiting if awaits[number] <= done}
        for number in begun:
            ran[number].start = now
        waiting -= begun
        busy |= begun
        speed = _speeds({number: ran[number].operation for number in busy}, prices, sharing)
        elapsed = min(work[number] / speed[number] for number in busy)
        now += elapsed
        for number in busy:
            work[number] -= elapsed * speed[number]
        over = {
            number for number in busy if work[number] <= 1e-11 * max(1.0, prices[ran[number].operation.name].seconds)
        }
        for number in over:
            ran[number].end = now
        busy -= over
        done |= over
    ends = [
        max(
            (
                item.end
                for item in ran
                if item.step == step and (sharing.inline or item.operation.resource == "compute")
            ),
            default=0.0,  # a drain may have nothing to do
        )
        for step in range(len(programs))
    ]
    return Reference(ran, ends)


def _speeds(running: Mapping[int, Operation], prices: Mapping[str, Price], sharing: Sharing) -> dict[int, float]:
    lanes = {operation.resource.value for operation in running.values()}
    speed = dict.fromkeys(running, 1.0)
    if sharing.inline:
        return speed
    for number, operation in running.items():
        if operation.resource in ("h2d", "d2h") and {"h2d", "d2h"} <= lanes:
            speed[number] = sharing.duplex
        if operation.resource == "compute" and lanes & {"h2d", "d2h"}:
            speed[number] = sharing.compute_beside_copies
    wanted, capacity = {}, sharing.dram_bytes_per_second
    for number, operation in running.items():
        price = prices[operation.name]
        if price.seconds and price.dram_bytes:
            # Nobody asks for more than there is: a user alone runs at its price.
            wanted[number] = min(speed[number] * price.dram_bytes / price.seconds, capacity)
    if sum(wanted.values()) <= capacity:
        return speed
    low, high = 0.0, max(wanted.values())
    for _ in range(200):
        level = (low + high) / 2
        if sum(min(level, asked) for asked in wanted.values()) > capacity:
            high = level
        else:
            low = level
    for number, asked in wanted.items():
        speed[number] *= min(1.0, low / asked)
    return speed
