"""All policies of a small problem, and the fastest of them by replay: what a plan is held against.

Nothing here reads the planner's program. A policy is left out without a replay in three cases only, all by the
simulator's own figures: its buffers, and what its layers keep of a group, take more than a limit; one of the machine's
resources works through the operations' prices for longer than a step that is known; or operations do that each of which
waits for the one before, from a layer's forward over its update on the host to its next forward.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np
from planning_cases import Case

from planner.base_policy import base_policy
from planner.coefficient_table import SPARE_BYTES
from planner.keeping import DEPTH_FIRST, ON_HOST, SAVED_ON_HOST, Keeping, allowed_levels, save_level
from planner.outlines import Outline, outlines
from planner.plan import Limits
from simulator.activations import hidden_bytes
from simulator.costs import Pricing, comparable_levels
from simulator.placement import place
from simulator.policy import MIN_STATE_SLOTS, Policy
from simulator.predict import StepFigures, device_process_bytes, host_process_bytes, predict
from simulator.program import Buffer, Kind, Operation, Resource, Role, Tier

# Where a layer is updated and lives: on the GPU; on the host, with weights that are resident or stream; on the GPU with
# state that streams, with weights that are resident or stream. The last is no choice of the planner's.
LayerHome = Literal["device", "resident", "streamed", "state", "state and weights"]
HOMES: tuple[LayerHome, ...] = ("device", "resident", "streamed", "state")
EVERY_HOME: tuple[LayerHome, ...] = (*HOMES, "state and weights")
STATES, WEIGHTS = ("state", "state and weights"), ("streamed", "state and weights")

Seconds = dict[Resource, float]


@dataclass(frozen=True)
class Layout:
    """Where everything lives, but for what layers keep for their backward."""

    homes: tuple[LayerHome, ...]
    embedding_on_host: bool
    head_on_host: bool
    prefetch_depth: int
    state_slots: int
    state_pace: int

    @property
    def of_blocks(self) -> tuple[LayerHome, ...]:
        """Homes of all blocks."""
        edges: tuple[LayerHome, LayerHome] = ("device", "resident")
        return (edges[self.embedding_on_host], *self.homes, edges[self.head_on_host])


def layouts(case: Case, layer_homes: Sequence[LayerHome] = HOMES) -> Iterator[Layout]:
    """All homes of layers and edges, all numbers of slots, and every pace that differs from none."""
    model = case.model
    for homes in product(layer_homes, repeat=model.num_layers):
        depths = range(1, max(2, sum(home in WEIGHTS for home in homes)))
        num_states = sum(home in STATES for home in homes)
        for embedding, head in product((False, True), repeat=2):
            if model.tied_embeddings and embedding != head:
                continue
            for depth in depths:
                for slots in range(MIN_STATE_SLOTS, max(MIN_STATE_SLOTS, num_states) + 1):
                    paced = num_states > slots and case.workload.clipping == "global"
                    for pace in range(1, model.num_layers + 1) if paced else (1,):
                        yield Layout(homes, embedding, head, depth, slots, pace)


@dataclass(frozen=True)
class Exhaustion:
    """One outline of a problem: all layouts, with all ways to keep."""

    case: Case
    outline: Outline
    homes: Sequence[LayerHome] = HOMES

    @cached_property
    def keepings(self) -> tuple[Keeping, ...]:
        return allowed_levels(comparable_levels(self.case.workload), self.outline)

    @cached_property
    def pricing(self) -> Pricing:
        case = self.case
        return Pricing(case.model, case.workload, self._policy_of_levels({}), case.hardware, case.costs)

    @property
    def leaving_passes(self) -> range:
        """Numbers of passes that what waits may have to leave; more than there are layers is no more."""
        return range(1, self.case.model.num_layers + 1 if ON_HOST.keys() & self.keepings else 2)

    @cached_property
    def saved_bytes(self) -> dict[Keeping, int]:
        """Room on the host for what a layer saves: of the kind that saves most."""
        found: dict[Keeping, int] = {}
        for how, level in SAVED_ON_HOST.items():
            if how in self.keepings:
                saved = (Buffer("", Tier.DEVICE, Role.SAVED, 0, n, 0, False, level) for n in self.case.model.layers)
                found[how] = SPARE_BYTES + max(map(self.pricing.size, saved))
        return found

    def _policy_of_levels(self, levels: dict[int, Keeping], **saved: Any) -> Policy:
        return base_policy(self.case.model, self.case.workload, self.outline, levels=levels, **saved)

    def copy_seconds(self, kind: Kind, block: int, keeping: Keeping, resource: Resource) -> float:
        """Of what waits on the host of one micro-batch."""
        case = self.case
        policy = self._policy_of_levels(dict.fromkeys(case.model.layers, keeping), saved_bytes=self.saved_bytes)
        pricing = Pricing(case.model, case.workload, policy, case.hardware, case.costs)
        return pricing.price(Operation(kind.value, kind, resource, block, 0, 0, save_level(keeping))).seconds

    def policy(self, layout: Layout, keepings: Sequence[Keeping], leaving_passes: int = 1) -> Policy:
        """The policy; one way to keep for each layer."""
        model = self.case.model
        placed = list(zip(model.layers, layout.homes, strict=True))
        streamed = frozenset(layer for layer, home in placed if home in WEIGHTS)
        host = {layer for layer, home in placed if home in ("resident", "streamed")}
        host |= {0} if layout.embedding_on_host else set()
        host |= {model.head} if layout.head_on_host else set()
        return base_policy(
            model,
            self.case.workload,
            self.outline,
            host=frozenset(host),
            streamed=streamed,
            by_link=frozenset(layer for layer, home in placed if home in STATES),
            levels=dict(zip(model.layers, keepings, strict=True)),
            saved_bytes=self.saved_bytes,
            leaving_passes=leaving_passes,
            prefetch_depth=layout.prefetch_depth,
            state_slots=layout.state_slots,
            state_pace=layout.state_pace,
        )

    # The least that a policy takes

    def seconds(self, kind: Kind, block: int, level: str = "", resource: Resource = Resource.COMPUTE) -> float:
        return self.pricing.price(Operation(kind.value, kind, resource, block, 0, 0, level)).seconds

    def home_seconds(self, block: int, home: LayerHome) -> Seconds:
        """Work that a block's home makes in every step. What streams comes once a step at least."""
        if home == "device":
            return {Resource.COMPUTE: self.seconds(Kind.UPDATE, block)}
        if home in STATES:
            return {
                Resource.COMPUTE: self.seconds(Kind.UPDATE, block),
                Resource.H2D: self.seconds(Kind.LOAD_STATE, block, resource=Resource.H2D),
                Resource.D2H: self.seconds(Kind.STORE_STATE, block, resource=Resource.D2H),
            }
        return {
            Resource.HOST: self.seconds(Kind.UPDATE, block, resource=Resource.HOST),
            Resource.H2D: self.seconds(Kind.LOAD_WEIGHTS, block, resource=Resource.H2D),
            Resource.D2H: self.seconds(Kind.STORE_GRADIENT, block, resource=Resource.D2H),
        }

    def keeping_seconds(self, block: int, keeping: Keeping) -> Seconds:
        """Work of a layer's passes."""
        level, number = save_level(keeping), self.outline.num_micro_batches
        passes = self.seconds(Kind.FORWARD, block, level) + self.seconds(Kind.BACKWARD, block, level)
        found = {Resource.COMPUTE: number * passes}
        if keeping in ON_HOST:
            found[Resource.H2D] = number * self.copy_seconds(Kind.LOAD_ACTIVATION, block, keeping, Resource.H2D)
            found[Resource.D2H] = number * self.copy_seconds(Kind.STORE_ACTIVATION, block, keeping, Resource.D2H)
        return found

    @cached_property
    def edge_seconds(self) -> float:
        """The embedding's and the head's passes of a step."""
        edges = self.seconds(Kind.FORWARD, 0) + self.seconds(Kind.BACKWARD, 0)
        return self.outline.num_micro_batches * (edges + self.seconds(Kind.LOSS, self.case.model.head))

    def layout_seconds(self, layout: Layout) -> Seconds:
        """Work but for the layers' passes."""
        found = {Resource.COMPUTE: self.edge_seconds}
        for block, home in enumerate(layout.of_blocks):
            for resource, seconds in self.home_seconds(block, home).items():
                found[resource] = found.get(resource, 0.0) + seconds
        return found

    def kept_bytes(self, block: int, keeping: Keeping) -> int:
        """What a layer keeps on the device for its backward of the largest group."""
        if keeping in ON_HOST:
            return 0
        group, level = 1 if keeping in DEPTH_FIRST else max(self.outline.groups), save_level(keeping)
        saved = Buffer("saved", Tier.DEVICE, Role.SAVED, 0, block, 0, False, level)
        kept = 0 if level == "input" else self.pricing.size(saved)
        return group * (kept + hidden_bytes(self.case.model, self.case.workload, self.outline.micro_batch_rows))

    def persistent_bytes(self, layout: Layout) -> dict[Tier, int]:
        """Buffers of a layout, as placed, without what waits on the host."""
        policy = self.policy(layout, ("input",) * self.case.model.num_layers)
        buffers = place(self.case.model, self.case.workload, policy).buffers.values()
        return {tier: sum(b.num_bytes for b in buffers if b.tier == tier) for tier in (Tier.DEVICE, Tier.HOST)}

    # All of them

    @cached_property
    def allowed(self) -> np.ndarray:
        """Which combinations of ways to keep there are: where checkpoints are sparse only kept inputs may wait.

        In an outline with depth-first layers the topmost are, at least one and not all; in one where saved activations
        wait, those of at least one layer do.
        """
        if self.outline.depth_first:
            shape, layers = (len(self.keepings),) * self.case.model.num_layers, self.case.model.layers
            found = np.zeros(shape, dtype=bool)
            for at in np.ndindex(shape):
                number = sum(self.keepings[index] in DEPTH_FIRST for index in at)
                topmost = at[len(layers) - number :]
                found[at] = 0 < number < len(layers) and all(self.keepings[index] in DEPTH_FIRST for index in topmost)
            return found
        if self.outline.saved_waits:
            saved = np.array([keeping in SAVED_ON_HOST for keeping in self.keepings])
            return self._of_layers([saved for _ in self.case.model.layers])
        kept = set(self.case.model.backward_layers[:: self.outline.checkpoint_interval])
        waits = np.array([keeping in ON_HOST for keeping in self.keepings])
        return ~self._of_layers([waits if layer not in kept else waits & False for layer in self.case.model.layers])

    def _of_layers(self, by_layer: list[np.ndarray]) -> np.ndarray:
        """The sum over layers for all combinations of ways to keep, one axis a layer."""
        found = np.zeros((1,) * len(by_layer), dtype=by_layer[0].dtype)
        for axis, values in enumerate(by_layer):
            found = found + values.reshape([-1 if at == axis else 1 for at in range(len(by_layer))])
        return found

    @cached_property
    def kept(self) -> np.ndarray:
        """Bytes on the device when a group's forward ends, for all combinations of ways to keep."""
        if self.outline.checkpoint_interval > 1:
            return np.zeros((len(self.keepings),) * self.case.model.num_layers)
        layers = self.case.model.layers
        return self._of_layers([np.array([self.kept_bytes(n, k) for k in self.keepings], dtype=float) for n in layers])

    @cached_property
    def busy(self) -> dict[Resource, np.ndarray]:
        """Seconds of work that ways to keep make, for all combinations."""
        work = [[self.keeping_seconds(layer, k) for k in self.keepings] for layer in self.case.model.layers]
        return {
            resource: self._of_layers([np.array([seconds.get(resource, 0.0) for seconds in ways]) for ways in work])
            for resource in Resource
        }

    def least_seconds(self, layout: Layout) -> np.ndarray:
        """What the busiest resource works in a step, for all combinations of ways to keep."""
        own = self.layout_seconds(layout)
        each = [self.busy[resource] + own.get(resource, 0.0) for resource in Resource]
        if self.case.hardware.execution == "inline":
            return sum(each[1:], each[0])
        return np.maximum.reduce([*each, *self.cycles(layout)])

    @cached_property
    def passes(self) -> dict[Kind, list[np.ndarray]]:
        """Seconds of one micro-batch's forward and backward up to each layer, for all combinations of ways to keep."""
        found: dict[Kind, list[np.ndarray]] = {}
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            of_layer = [
                np.array([self.seconds(kind, layer, save_level(keeping)) for keeping in self.keepings])
                for layer in self.case.model.layers
            ]
            below = range(len(of_layer) + 1)
            found[kind] = [
                self._of_layers([each if at < n else 0.0 * each for at, each in enumerate(of_layer)]) for n in below
            ]
        return found

    def cycles(self, layout: Layout) -> Iterator[np.ndarray]:
        """From a block's forward over its gradient, its update on the host and its load to its next forward.

        Between a step's first forward of the block and its gradient all operations follow each other on `compute`.
        With exact clipping updates wait for a step's last operation and run low blocks first, else for the gradient,
        high blocks first.
        """
        first, last = self.outline.groups[0], self.outline.groups[-1]
        forward, backward = self.passes[Kind.FORWARD], self.passes[Kind.BACKWARD]
        edges = self.edge_seconds - first * self.seconds(Kind.FORWARD, 0)
        passes = self.outline.num_micro_batches * (forward[-1] + backward[-1]) + edges
        on_host = [block for block, home in enumerate(layout.of_blocks) if home in ("resident", "streamed")]
        update = {block: self.seconds(Kind.UPDATE, block, resource=Resource.HOST) for block in on_host}
        for lowest in on_host:
            before = first * forward[max(0, lowest - 1)]
            load = self.seconds(Kind.LOAD_WEIGHTS, lowest, resource=Resource.H2D)
            if self.case.workload.clipping == "global":
                yield passes - before + sum(update[block] for block in on_host if block <= lowest) + load
                continue
            for top in (block for block in on_host if lowest <= block <= self.case.model.num_layers):
                after = last * (backward[max(0, top - 1)] + self.seconds(Kind.BACKWARD, 0))
                store = self.seconds(Kind.STORE_GRADIENT, top, resource=Resource.D2H)
                updates = sum(update[block] for block in on_host if lowest <= block <= top)
                yield passes - before - after + store + updates + load

    def candidates(self, limits: Limits) -> Iterator[tuple[float, Layout, np.ndarray, np.ndarray]]:
        """Layouts with the least seconds of every combination, and which of them may fit."""
        case = self.case
        for layout in layouts(case, self.homes):
            placed = self.persistent_bytes(layout)
            device = placed[Tier.DEVICE] + device_process_bytes(case.hardware) + self.kept
            host = placed[Tier.HOST] + host_process_bytes(case.model, case.workload, case.hardware)
            fits = self.allowed & (device <= limits.device_memory_bytes)
            if host > limits.host_memory_bytes or not fits.any():
                continue
            least = self.least_seconds(layout)
            yield float(least[fits].min()), layout, least, fits


def every_policy(case: Case) -> Iterator[Policy]:
    """All policies that a plan may choose."""
    for outline in outlines(case.model, case.workload):
        one = Exhaustion(case, outline)
        for layout in layouts(case):
            for at in np.argwhere(one.allowed):
                for leaving_passes in one.leaving_passes:
                    yield one.policy(layout, [one.keepings[index] for index in at], leaving_passes)


def fastest_by_replay(case: Case, limits: Limits, policies: Iterable[Policy]) -> float:
    """Seconds of the fastest policy within the limits, by replaying them all; infinite where none fits."""
    replayed = (predict(case.model, case.workload, policy, case.hardware, case.costs).figures for policy in policies)
    return min((figures.step_seconds for figures in replayed if within(figures, limits)), default=math.inf)


@dataclass(frozen=True)
class Fastest:
    """The fastest policy that fits, by replay, and how many there were."""

    step_seconds: float  # infinite where none fits
    policy: Policy | None
    num_policies: int
    num_replays: int


def fastest(case: Case, limits: Limits, known_seconds: float = math.inf, homes: Sequence[LayerHome] = HOMES) -> Fastest:
    """The fastest of all policies within the limits that beat `known_seconds`, a step that a replay has shown.

    Replays begin with what could be fastest, and end where nothing left could beat the fastest so far.
    """
    best, winner, num_policies, num_replays = known_seconds, None, 0, 0
    waiting = []
    for outline in outlines(case.model, case.workload):
        one = Exhaustion(case, outline, homes)
        num_policies += int(one.allowed.sum()) * sum(1 for _ in layouts(case, homes)) * len(one.leaving_passes)
        for _, layout, least, fits in one.candidates(limits):
            for at in np.argwhere(fits & (least < best)):
                waiting.append((float(least[tuple(at)]), len(waiting), one, layout, tuple(at)))
    waiting.sort(key=lambda item: item[:2])
    for least_seconds, _, one, layout, at in waiting:
        if least_seconds >= best:
            break
        for leaving_passes in one.leaving_passes:
            policy = one.policy(layout, [one.keepings[index] for index in at], leaving_passes)
            figures = predict(case.model, case.workload, policy, case.hardware, case.costs).figures
            num_replays += 1
            if within(figures, limits) and figures.step_seconds < best:
                best, winner = figures.step_seconds, policy
    return Fastest(best if winner is not None else math.inf, winner, num_policies, num_replays)


def within(figures: StepFigures, limits: Limits) -> bool:
    """Whether a replayed policy keeps both limits."""
    return (
        figures.device_peak_bytes <= limits.device_memory_bytes and figures.host_peak_bytes <= limits.host_memory_bytes
    )
