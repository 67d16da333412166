"""The search: outlines outside, the mixed-integer program inside, replays on top.

Branch and bound over outlines. A closed-form bound orders them; the program gives each a tighter bound and the
decisions that reach it, with a row that asks for better than the best replay so far, so that most end at once. The
decisions are laid out and replayed, and so are their neighbours while their own bound says that they could win. The
best replay wins. The search's bound is the least bound of all outlines, so it holds for every policy of every outline.

Policies whose states stream come last. Their relaxation is the least tight: of two policies that it takes for equals
the other one mostly wins, and must have been replayed.

Nothing depends on the clock unless a solve runs into its time limit, which the plan then says: replays are limited by
the operations that they contain.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from planner.collector import collector_off
from planner.formulation import Formulation
from planner.greedy import greedy, promise
from planner.layout import Way, policies, swaps, ways
from planner.least_memory import TIERS, least_memory
from planner.memory_rows import Budget
from planner.neighbours import gathered, neighbours
from planner.outlines import Outline
from planner.problem import Problem
from planner.solve import solve
from planner.variables import Decisions, policy_decisions
from simulator.policy import Policy
from simulator.predict import StepFigures

# Operations of all replays that only improve on what was found, in each stage: about half a second on one core.
IMPROVEMENT_OPERATIONS = 4_000
# Without a solver every outline costs a walk, so only the likeliest are tried.
GREEDY_OUTLINES = 16
LIKELY_OUTLINES = 32
MAX_TIGHTENINGS = 3
# Paces of streamed states that are tried beside the even one, relative to it.
OTHER_PACES = (0.6, 0.9, 1.3)
SMALL_MODEL_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Found:
    """The winner of a search, and a bound on all others."""

    policy: Policy
    figures: StepFigures
    bound_seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """An outline to solve, or decisions to replay. `bound` is below all that may come of it."""

    outline: Outline
    bound: float
    decisions: Decisions | None = None
    way: Way | None = None  # how to lay them out; None: in all ways


@dataclass(slots=True)
class Search:
    """One search over `outlines`. `solver` False lets the greedy planner answer in the program's place.

    `gap` is the solver's relative gap; what cannot beat the best replay by more than `tolerance` is left alone.
    `restrict` adds rows to every program, and their limits to `Formulation.limits`: the search of a baseline or of an
    alternative. `best` may be given: then only what is faster is found.
    """

    problem: Problem
    outlines: list[Outline]
    gap: float
    tolerance: float
    solver: bool
    restrict: Callable[[Formulation], None] | None = None
    improvement_operations: int = IMPROVEMENT_OPERATIONS
    best: tuple[Policy, StepFigures] | None = None
    bounds: dict[Outline, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    # By what each is expected to come to.
    queue: list[tuple[float, int, Entry]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    formulations: dict[Outline, Formulation] = field(default_factory=dict)
    seen: set[tuple[Outline, tuple[object, ...]]] = field(default_factory=set)
    queued: set[tuple[Outline, tuple[object, ...]]] = field(default_factory=set)
    tightened: dict[Outline, int] = field(default_factory=dict)
    short: dict[Outline, dict[str, int]] = field(default_factory=dict)  # bytes by which memory was tightened, by tier
    # The best way to lay out decisions that stream weights or not, and states or not.
    ways: dict[tuple[bool, bool], Way] = field(default_factory=dict)
    spent: int = 0
    states: bool = False  # they may stream
    inputs: bool = False  # layer inputs may wait on the host

    @collector_off()
    def run(self) -> Found | None:
        """The best replayed policy, or None where none fits."""
        self.counts = dict.fromkeys(("outlines", "solves", "time limits", "tightened", "replays"), 0)
        self.counts["outlines"] = len(self.outlines)
        before = self.problem.num_replays
        # First without states that stream and inputs that wait on the host, then without such inputs, and last with
        # depth-first layers and saved activations that wait: their many near ties would use up the replays that
        # improve, and what is found without them is a step to beat.
        plain = [outline for outline in self.outlines if outline.plain]
        depth_first = [outline for outline in self.outlines if outline.depth_first and not outline.saved_waits]
        saved_waits = [outline for outline in self.outlines if outline.saved_waits]
        self._open(plain)
        self._branch()
        self._swap()
        if self.restrict is not Formulation.keep_on_device:  # which allows neither
            # What states alone may gain is found in likely outlines; the bound is that of all choices together.
            self.states = True
            self._reopen(plain, self._by_bound(plain)[:LIKELY_OUTLINES])
            self._branch()
            self.inputs = True
            self._reopen(plain, plain)
            self._branch()
            for last in (depth_first, saved_waits):
                for self.states in (False, True):
                    self._reopen(last, last)
                    self._branch()
            if self.best is None and self.restrict is None:
                self._rescue()
            self._swap()
        self.counts["replays"] = self.problem.num_replays - before
        if self.best is None:
            return None
        policy, figures = self.best
        return Found(policy, figures, min([figures.step_seconds, *self.bounds.values()]))

    @property
    def best_seconds(self) -> float:
        return math.inf if self.best is None else self.best[1].step_seconds

    def _push(self, entry: Entry, expected: float | None = None) -> None:
        heapq.heappush(self.queue, (entry.bound if expected is None else expected, next(self.numbers), entry))

    def _by_bound(self, outlines: list[Outline]) -> list[Outline]:
        """Lowest bound first; of equals what takes least memory."""
        return sorted(outlines, key=lambda o: (self.bounds[o], max(o.groups) * o.micro_batch_rows, o))

    def _open(self, outlines: list[Outline]) -> None:
        """A good replay to begin with: of each micro-batch size the outline that takes least memory is solved first."""
        for outline in outlines:
            self.bounds[outline] = self.problem.coefficients(outline).quick_bound_seconds()
        if not self.solver:
            for outline in self._promising(outlines):
                self._push(Entry(outline, self.bounds[outline]))
            return
        order = self._by_bound(outlines)
        opened: dict[int, Outline] = {}
        for outline in order:
            if outline.checkpoint_interval == 1 and max(outline.groups) == 1:
                opened.setdefault(outline.micro_batch_rows, outline)
        for outline in opened.values():
            self._solve(outline)
        while self.queue and self.best is None:
            _, _, entry = heapq.heappop(self.queue)
            if entry.decisions is not None:
                self._replay(entry, entry.decisions)
        for outline in order:
            if outline not in opened.values():
                self._push(Entry(outline, self.bounds[outline]))

    def _reopen(self, outlines: list[Outline], candidates: list[Outline]) -> None:
        """`candidates` among outlines, with more choices; and the neighbours of what was best without, if it is one."""
        self.spent, self.queue = 0, []
        self.queued.clear()
        self.tightened.clear()
        self.short.clear()
        for outline in outlines:
            self.bounds[outline] = self.problem.coefficients(outline).quick_bound_seconds()
        if not self.solver:  # every outline costs a walk: the neighbours have to do
            candidates = self._promising(outlines) if self.best is None else []
        for outline in self._by_bound(candidates):
            self._push(Entry(outline, self.bounds[outline]))
        if self.best is not None and (outline := Outline.of(policy := self.best[0])) in outlines:
            self._queue_neighbours(outline, policy_decisions(self.problem.coefficients(outline), policy))

    def _promising(self, outlines: list[Outline]) -> list[Outline]:
        """The outlines that a search without a solver walks through."""
        by_promise = sorted(outlines, key=lambda o: (promise(self._formulation(o)), o))
        return by_promise[:GREEDY_OUTLINES]

    def _branch(self) -> None:
        """Solve outlines and replay decisions until no bound is below the best replay."""
        while self.queue:
            _, _, entry = heapq.heappop(self.queue)
            if entry.bound >= self.best_seconds * (1 - self.tolerance):
                continue
            if entry.decisions is None:
                self._solve(entry.outline)
            elif self.best is None or self.spent < self.improvement_operations:
                self._replay(entry, entry.decisions)

    def _solve(self, outline: Outline, over: Mapping[str, int] | None = None) -> None:
        """Queue the program's decisions for an outline; `over` is what its last replay took beyond the limits."""
        short = dict(self.short.get(outline, {})) if over else {}
        for tier, num_bytes in (over or {}).items():
            short[tier] = short.get(tier, 0) + round(1.02 * num_bytes)
        if short:
            self.short[outline] = short
        budget = self.problem.budget
        budget = replace(
            budget,
            device_bytes=budget.device_bytes - short.get("device", 0),
            host_bytes=budget.host_bytes - short.get("host", 0),
        )
        formulation = self._formulation(outline, budget if short else None)
        decisions = self._decide(outline, formulation, keep_bound=not short)
        if decisions is not None:
            bound = max(formulation.mip.objective.value(formulation.evaluate(decisions)), self.bounds[outline])
            # Until something fits, what was solved with less memory comes before neighbours of what did not fit; and
            # with saved activations on their way out, whose memory the program does not count, always.
            first = short and (self.best is None or outline.saved_waits)
            self._push(Entry(outline, bound, decisions), -math.inf if first else None)
            if outline.saved_waits:
                self._push_gathered(outline, formulation, decisions)

    def _push_gathered(self, outline: Outline, formulation: Formulation, decisions: Decisions) -> None:
        """Queue, before all else, the tie of a solution that replays best."""
        for other in gathered(formulation.coefficients, decisions):
            values = formulation.evaluate(other)
            if formulation.fits(values):
                self._push(Entry(outline, formulation.mip.objective.value(values), other), -math.inf)
                return

    def _formulation(self, outline: Outline, budget: Budget | None = None) -> Formulation:
        """An outline's program with what the search is held to; within `budget`, or else all of the limits."""
        if budget is None:
            if outline not in self.formulations:
                self.formulations[outline] = self.problem.formulation(outline)
            formulation = self.formulations[outline].copy()
        else:
            formulation = self.problem.formulation(outline, budget)
        if self.restrict is not None:
            self.restrict(formulation)
        if not self.states:
            formulation.keep_states()
        if not self.inputs:
            formulation.keep_inputs()
        return formulation

    def _decide(self, outline: Outline, formulation: Formulation, *, keep_bound: bool) -> Decisions | None:
        self.counts["solves"] += 1
        if not self.solver:
            return greedy(formulation)
        cutoff = self.best_seconds
        if self.best is not None:
            formulation.mip.at_most("faster than the best replay", formulation.step, cutoff)
        solution = solve(formulation.mip, gap=self.gap)
        self.counts["time limits"] += solution.timed_out
        if keep_bound:
            # Nothing below the cutoff, or nothing within the limits at all.
            bound = cutoff if solution.status == "infeasible" else solution.bound - formulation.tie_break_seconds
            self.bounds[outline] = max(self.bounds[outline], bound)
        if solution.status == "solved":
            return formulation.variables.decisions(solution.values)
        return greedy(formulation) if solution.status == "no solution" else None

    def _replay(self, entry: Entry, decisions: Decisions) -> None:
        """Replay the layouts of decisions, then queue their neighbours that could win."""
        outline = entry.outline
        if (outline, decisions.key()) in self.seen:
            return
        self.seen.add((outline, decisions.key()))
        way, over, seconds = self._lay_out(outline, decisions, entry.way)
        if over and self.tightened.get(outline, 0) < MAX_TIGHTENINGS:
            self.tightened[outline] = self.tightened.get(outline, 0) + 1
            self.counts["tightened"] += 1
            self._solve(outline, over)
        self._queue_neighbours(outline, decisions, way, seconds)

    def _lay_out(self, outline: Outline, decisions: Decisions, way: Way | None) -> tuple[Way, dict[str, int], float]:
        """Replay decisions in one way or, with none given, in all; the best, what it takes beyond the limits, seconds.

        Where alike decisions of another outline have been replayed in all ways, their best way comes first, and the
        others only where that one is the best so far.
        """
        coefficients = self.problem.coefficients(outline)
        small = self.problem.model.num_layers <= SMALL_MODEL_LAYERS
        tried: list[tuple[int, float, Way, dict[str, int], Policy]] = []

        def replay(among: Sequence[Way]) -> None:
            for policy, how in policies(coefficients, decisions, among).items():
                if tried and self.best is not None and self.spent >= self.improvement_operations:
                    return
                over = self._try(policy)
                # What leaves holds less if passes wait for it: an input not for long, saved activations for too long.
                while over.get("device") and policy.leaving_passes > 1 and (small or not outline.saved_waits):
                    fewer = policy.leaving_passes - 1 if small else 1
                    policy = policy.model_copy(update={"leaving_passes": fewer})
                    over = self._try(policy)
                tried.append((sum(over.values()), self.problem.figures(policy).step_seconds, how, over, policy))

        def best() -> tuple[int, float, Way, dict[str, int], Policy]:
            return min(tried, key=lambda one: one[:3])

        links = sum(decisions.link_layers.values())
        alike = (any(decisions.streamed.values()), links > 0)
        first = way or self.ways.get(alike)
        before = self.best_seconds
        if first is not None:
            replay([first])
        if way is None and (first is None or self.best_seconds < before):
            replay(ways(decisions))
            if links > decisions.state_slots:
                _, _, so_far, _, policy = best()
                paces = [round(policy.state_pace * factor, 2) for factor in OTHER_PACES]
                replay([so_far._replace(pace=pace) for pace in paces if pace >= 1])
            if not small:
                self.ways[alike] = best()[2]._replace(pace=0.0)
        _, seconds, found, over, _ = best()
        return found, over, seconds

    def _queue_neighbours(
        self, outline: Outline, decisions: Decisions, way: Way | None = None, seconds: float = -math.inf
    ) -> None:
        """Queue neighbours that could win. Each is expected to lie as far above its bound as the decisions, laid out
        in that way, lie above theirs."""
        formulation = self._formulation(outline)
        slack = max(0.0, seconds - formulation.step.value(formulation.evaluate(decisions)))
        small = self.problem.model.num_layers <= SMALL_MODEL_LAYERS
        strides = (1,) if small else (1, max(2, self.problem.model.num_layers // 8))
        moves = list(neighbours(formulation.coefficients, decisions, strides=strides))
        if small:
            # Few enough for two moves at once: one often has to make room for the other.
            moves += [second for first in moves for second in neighbours(formulation.coefficients, first)]
        for other in moves:
            key = (outline, other.key())
            if key in self.seen or key in self.queued:
                continue
            self.queued.add(key)
            values = formulation.evaluate(other)
            if formulation.step.value(values) < self.best_seconds and formulation.fits(values):
                # With its tie-breaks: of equals those that do least on the host come first.
                bound = formulation.mip.objective.value(values)
                self._push(Entry(outline, bound, other, None if small else way), bound + slack)

    def _try(self, policy: Policy) -> dict[str, int]:
        """Replay a policy and keep it if it is the best; returns what it takes beyond the limits."""
        before = self.problem.replayed_operations
        figures = self.problem.figures(policy)
        if self.best is not None:
            self.spent += self.problem.replayed_operations - before
        over = self.problem.excess_bytes(figures)
        if not over and figures.step_seconds < self.best_seconds:
            self.best = (policy, figures)
        return over

    def _rescue(self) -> None:
        """Where memory is so tight that no solution's replay fits, the policy that takes least may."""
        for outline in self.outlines:  # no program had a solution, so none of them gave a bound
            self.bounds[outline] = self.problem.coefficients(outline).quick_bound_seconds()
        for tier in TIERS:
            least = least_memory(self.problem, tier, solver=self.solver)
            if least is not None and least.peak_bytes <= 1.01 * self.problem.limits.bytes_of(tier):
                self._try(least.policy)

    def _swap(self) -> None:
        """Exchange what two layers do while that helps: layouts are good guesses, not proven ones."""
        improved = True
        while improved and self.best is not None:
            seconds = self.best_seconds
            for policy in swaps(self.problem.model, self.best[0]):
                if self.spent >= self.improvement_operations or self._lowest_bound() >= seconds * (1 - self.tolerance):
                    return
                self._try(policy)
            improved = self.best_seconds < seconds

    def _lowest_bound(self) -> float:
        return min(self.bounds.values())
