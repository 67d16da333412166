"""The papers' tables, simulated: each row's own system on its own machine, beside what was published.

Machines are those of the catalogue, known by datasheet, with one set of derating factors each
(`simulator/datasheet.py`) and one set of rates for MegaTrain's phases on the host (`simulator/megatrain_costs.py`).
Neither was taken from a table that is reproduced, and nothing is fitted to one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from analysis.paper_models import PaperModel, load_models
from analysis.published import Published, PublishedRow, System
from simulator import formulas
from simulator.hardware import HardwareProfile, load_hardware
from simulator.megatrain import InputHome, Variant, build_megatrain, issue_order
from simulator.megatrain_costs import (
    LAZYTRAIN_PHASES,
    MEGATRAIN_PHASES,
    ZERO_PHASES,
    HostPhase,
    MegaTrainPricing,
    allocated_bytes,
    host_bytes,
    persistent_device_bytes,
)
from simulator.model import ModelSpec
from simulator.predict import allocator_slack_bytes
from simulator.program import Kind, Program
from simulator.replay import replay
from simulator.timeline import Timeline
from simulator.units import GIB

TIME_GOAL = 0.15
ALLOCATION_GOAL = 0.05  # of tables 5 and 6
# "Chunked MLP execution" without a size: an eighth of the 256K row, at which the MLP is not chunked.
MLP_CHUNK_TOKENS = 32_768
# LazyTrain's schedule for its 27B model: of 64 layers 13 inputs are recomputed, 21 wait on the host and one on NVMe,
# which is counted to the host; the others wait on the GPU. Which layers they are is not said.
LAZYTRAIN_RECOMPUTED, LAZYTRAIN_HOST = 13 / 64, 22 / 64
LAZYTRAIN_MOMENT_BYTES = 2 + 2 * 4 / 256  # two codes of 8 bits, a scale in fp32 for 256 of each


def system(name: System, num_layers: int) -> tuple[Variant, Mapping[Kind, HostPhase]]:
    """What a system does, and the rates of its phases on the host."""
    match name:
        case "single_buffer":
            return Variant(double_buffering=False), MEGATRAIN_PHASES
        case "one_slab":
            return Variant(gradient_slabs=1), MEGATRAIN_PHASES
        case "interval_1":
            return Variant(checkpoint_interval=1), MEGATRAIN_PHASES
        case "zero_offload":
            variant = Variant(
                checkpoint_interval=1, recomputes_kept=False, frees_inputs=True, phases=(Kind.UPDATE, Kind.LOAD_WEIGHTS)
            )
            return variant, ZERO_PHASES
        case "lazytrain" | "lazytrain_lean":
            variant = Variant(
                input_homes=lazytrain_homes(num_layers, lean=name == "lazytrain_lean"),
                recomputes_kept=False, frees_inputs=True,
                phases=(Kind.UPDATE, Kind.LOAD_WEIGHTS, Kind.ZERO_GRADIENT), moment_bytes=LAZYTRAIN_MOMENT_BYTES,
            )  # fmt: skip
            return variant, LAZYTRAIN_PHASES
        case _:
            return Variant(), MEGATRAIN_PHASES


def lazytrain_homes(num_layers: int, *, lean: bool = False) -> tuple[InputHome, ...]:
    """LazyTrain's shares: recomputed inputs evenly spread, kept ones of the lowest layers, needed last, on the host.

    `lean`: all kept ones on the host, which its program may choose where device memory is short.
    """
    recomputed = round(LAZYTRAIN_RECOMPUTED * num_layers)
    left_out = {(index + 1) * num_layers // (recomputed + 1) for index in range(recomputed)} - {0}
    kept = [layer for layer in range(num_layers) if layer not in left_out]
    on_host = set(kept if lean else kept[: round(LAZYTRAIN_HOST * num_layers)])
    return tuple(
        "recompute" if layer in left_out else "host" if layer in on_host else "device" for layer in range(num_layers)
    )


@dataclass(frozen=True)
class Simulation:
    """A system's step on a machine."""

    model: ModelSpec
    machine: HardwareProfile
    system: System
    length: int
    rows: int

    @cached_property
    def order(self) -> Program:
        """The step without its waits: what memory is followed by."""
        variant, _ = system(self.system, self.model.num_layers)
        return issue_order(self.model, self.tokens, variant)

    @cached_property
    def pricing(self) -> MegaTrainPricing:
        _, phases = system(self.system, self.model.num_layers)
        chunk = MLP_CHUNK_TOKENS if self.system == "chunked_mlp" else 0
        return MegaTrainPricing(
            self.model, self.rows, self.length, self.machine, phases=dict(phases), mlp_chunk_tokens=chunk
        )

    @cached_property
    def timeline(self) -> Timeline:
        variant, _ = system(self.system, self.model.num_layers)
        program = build_megatrain(self.model, self.tokens, variant)
        return replay(program, self.pricing.price, self.pricing.size, self.pricing.sharing)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def tflops(self) -> float:
        return formulas.tflops(self.model, self.tokens, self.step_seconds)

    @property
    def tflops_with_attention(self) -> float:
        """By the formula under MegaTrain's table 7."""
        return tflops_of_table_7(self.model, self.rows, self.length, self.step_seconds)

    @property
    def device_bytes(self) -> int:
        return self.timeline.peak_bytes["device"]

    @property
    def fits(self) -> bool:
        """Whether the device holds it: context, and what the allocator reserves beyond what passes."""
        persistent = persistent_device_bytes(self.order)
        passing = allocated_bytes(self.order, self.pricing) - persistent
        needed = self.machine.context_bytes.value + persistent + passing + allocator_slack_bytes(passing)
        return needed <= self.machine.device.memory_bytes

    def with_rows(self, rows: int) -> "Simulation":
        return Simulation(self.model, self.machine, self.system, self.length, rows)

    @cached_property
    def most_rows(self) -> int:
        """The largest batch that the device holds; 0 where not even one row fits."""
        high = 1
        while self.with_rows(high).fits:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.with_rows(middle).fits else (low, middle)
        return low


def tflops_of_table_7(model: ModelSpec, rows: int, length: int, seconds: float) -> float:
    """(6 N T + 12 L H s² a row) / seconds / 10¹²: the caption of MegaTrain's table 7, s its context."""
    attention = 12 * model.num_layers * model.hidden_size * length**2 * rows
    return (6 * model.num_parameters * rows * length + attention) / seconds / 1e12


@dataclass(frozen=True, slots=True)
class Comparison:
    """One published value beside the simulated one. `goal`: how far off it may be, as a share; None: no goal is set."""

    quantity: str
    unit: str
    published: float
    simulated: float
    goal: float | None = None

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1

    @property
    def inside(self) -> bool | None:
        return None if self.goal is None else abs(self.error) <= self.goal


@dataclass(frozen=True)
class Reproduced:
    """A published row with its simulation."""

    row: PublishedRow
    simulation: Simulation
    comparisons: tuple[Comparison, ...] = field(default=())

    @property
    def misses(self) -> bool:
        return any(comparison.inside is False for comparison in self.comparisons)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Systems of one order, fastest first, as published and as simulated."""

    order: str
    published: tuple[str, ...]
    simulated: tuple[str, ...]

    @property
    def same(self) -> bool:
        return self.published == self.simulated


def reproduce(published: Published, models: Mapping[str, PaperModel] | None = None) -> list[Reproduced]:
    """Simulate every row. Raises InputError for a machine that the catalogue lacks."""
    models = load_models() if models is None else models
    machines = {name: load_hardware(name) for name in dict.fromkeys(row.machine for row in published.rows)}
    return [_reproduced(row, models[row.model], machines[row.machine]) for row in published.rows]


def _reproduced(row: PublishedRow, model: PaperModel, machine: HardwareProfile) -> Reproduced:
    spec = model.scaled(num_layers=row.layers, width=row.width).spec()
    simulation = Simulation(spec, machine, row.variant, row.length, max(1, row.rows))
    if not row.rows:
        simulation = simulation.with_rows(max(1, simulation.most_rows))
    return Reproduced(row, simulation, tuple(_compare(row, simulation)))


def published_seconds(row: PublishedRow, model: ModelSpec) -> float | None:
    """A row's step: as printed, else from its tokens a second, else from its TFLOPS."""
    values, tokens = row.values, row.rows * row.length
    if values.step_seconds is not None:
        return values.step_seconds
    if values.tokens_per_second is not None:
        return tokens / values.tokens_per_second
    if values.tflops is not None:
        return formulas.tflops(model, tokens, 1.0) / values.tflops
    return None


def _compare(row: PublishedRow, simulation: Simulation) -> Iterator[Comparison]:
    values, model = row.values, simulation.model
    seconds = published_seconds(row, model)
    if seconds is not None:
        yield Comparison("step", "s", seconds, simulation.step_seconds, TIME_GOAL)
    if values.tflops is not None:
        yield Comparison("TFLOPS", "", values.tflops, simulation.tflops)
    if values.tflops_with_attention is not None:
        yield Comparison("TFLOPS, formula", "", values.tflops_with_attention, simulation.tflops_with_attention)
    if values.tokens_per_second is not None:
        yield Comparison("tokens/s", "", values.tokens_per_second, simulation.tokens / simulation.step_seconds)
    if values.tokens_thousand is not None:
        yield Comparison("tokens", "K", values.tokens_thousand, simulation.tokens / 1e3)
    if values.persistent_gib is not None:
        allocated = persistent_device_bytes(simulation.order) / GIB
        yield Comparison("device alloc", "GiB", values.persistent_gib, allocated, ALLOCATION_GOAL)
    if values.device_gib is not None and "device_gib" not in row.not_simulated:
        yield Comparison("device peak", "GiB", values.device_gib, simulation.device_bytes / GIB)
    if values.host_gib is not None:
        host = host_bytes(simulation.order) + simulation.machine.host_base_bytes.value
        yield Comparison("host", "GiB", values.host_gib, host / GIB)
    if values.parameters_billion is not None:
        yield Comparison("parameters", "B", values.parameters_billion, model.num_parameters / 1e9)
    if row.most_rows and row.rows:
        yield Comparison("most rows", "", row.rows, simulation.most_rows)
    if values.speedup is not None and row.speedup_over is not None:
        rival = Simulation(model, simulation.machine, row.speedup_over, row.length, simulation.rows)
        yield Comparison("speedup", "", values.speedup, rival.step_seconds / simulation.step_seconds, TIME_GOAL)
    if values.more_rows is not None and row.more_rows_than is not None:
        rival = Simulation(model, simulation.machine, row.more_rows_than, row.length, 1)
        yield Comparison("more rows", "", values.more_rows, simulation.most_rows - rival.most_rows)


def rankings(reproduced: Sequence[Reproduced]) -> list[Ranking]:
    """The systems of each order by TFLOPS, as published and as simulated."""
    found = []
    for order in dict.fromkeys(item.row.order for item in reproduced if item.row.order):
        members = [item for item in reproduced if item.row.order == order and item.row.values.tflops is not None]
        speeds = {item.row.row: (float(item.row.values.tflops or 0), item.simulation.tflops) for item in members}
        for item in members:
            over, speedup = item.row.speedup_over, item.row.values.speedup
            if over is not None and speedup is not None:
                rival = Simulation(
                    item.simulation.model, item.simulation.machine, over, item.row.length, item.simulation.rows
                )
                speeds[f"{item.row.row}'s baseline"] = (speeds[item.row.row][0] / speedup, rival.tflops)
        if len(speeds) > 1:
            published, simulated = (tuple(sorted(speeds, key=lambda name: -speeds[name][i])) for i in (0, 1))
            found.append(Ranking(order, published, simulated))
    return found
