"""Explain: a plan as tables for people. What it decides, what lives where, what it promises, what rivals would do."""

from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from itertools import groupby

from rich.console import Console
from rich.table import Table

from planner.plan import Plan
from simulator.activations import waiting_layers
from simulator.placement import place
from simulator.policy import Policy
from simulator.predict import StepFigures
from simulator.program import Role, Tier
from simulator.units import format_bytes

WIDTH = 110

# What the reader calls what a buffer of a role holds.
_HOLDS = {
    Role.WEIGHTS: "weights",
    Role.STATE: "optimizer state",
    Role.ACCUMULATOR: "sums of gradients",
    Role.GRADIENT: "completed gradients",
    Role.SLOT: "slots for streamed weights",
    Role.SLAB: "slabs for leaving gradients",
    Role.ACTIVATION: "layer inputs that wait",
    Role.STAGE: "stages for returning layer inputs",
    Role.BATCH: "batches",
    Role.SCALARS: "scalars",
}
_RESOURCES = {
    "compute": "{device} compute",
    "h2d": "host-to-device link",
    "d2h": "device-to-host link",
    "host": "host optimizer",
}


def plan_table(plan: Plan, *, width: int = WIDTH) -> str:
    """The plan in plain text, `width` characters wide; every figure has its unit."""
    parts = [
        _title(plan),
        _render(_decisions(plan), width),
        _render(_memory(plan), width),
        _render(_rivals(plan), width),
        "\n".join(_notes(plan)),
    ]
    return "\n\n".join(parts) + "\n"


def _seconds(seconds: float) -> str:
    """Four digits, so that plans which differ by a percent look different."""
    return f"{seconds:#.4g} s" if seconds >= 1 else f"{seconds * 1e3:#.4g} ms"


def _parameters(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _tflops(tflops: float) -> str:
    """One decimal from 10 up, below it three digits: a CPU's rates differ too."""
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.3g}"


def _device(plan: Plan) -> str:
    return "GPU" if plan.hardware.device.kind == "cuda" else "CPU"


def _render(table: Table, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _title(plan: Plan) -> str:
    model, workload, limits = plan.inputs.model, plan.inputs.workload, plan.inputs.limits
    name = model.path or model.family
    clipping = {"global": "exact clipping", "layerwise": "layerwise clipping", "none": "no clipping"}[workload.clipping]
    trained = plan.model.num_trained_parameters
    frozen = "" if trained == model.num_parameters else f", {_parameters(trained)} of them trained"
    return (
        f"{name}: {_parameters(model.num_parameters)} parameters in {model.num_layers} layers{frozen}, "
        f"{workload.tokens_per_step:,} tokens a step in sequences of {workload.sequence_length:,}, {clipping},\n"
        f"{workload.gradient_format} gradients, {workload.state_format} optimizer state, "
        f"on {plan.inputs.hardware.name} with {format_bytes(limits.device_memory_bytes)} of device memory "
        f"and {format_bytes(limits.host_memory_bytes)} of host memory"
    )


def _decisions(plan: Plan) -> Table:
    policy, workload = plan.policy, plan.inputs.workload
    table = Table(box=None, show_header=False, pad_edge=False)
    tokens = policy.micro_batch_rows * workload.sequence_length
    on = {"device": "on the GPU" if plan.hardware.device.kind == "cuda" else "on the device", "host": "on the host"}
    rows = [
        ("micro-batches", f"{policy.num_micro_batches} of {policy.micro_batch_rows} rows, {tokens:,} tokens"),
        ("groups", _runs([f"{size}" for size in policy.groups], "of {} micro-batches")),
        ("weights", _runs(_words(policy.weight_homes, {"device": "resident", "host": "streamed"}), "{}")),
        ("save levels", _runs([_level(level) for level in policy.save_levels], "{}", first=1)),
        ("optimizer", _runs(_updated(plan, on), "{}")),
    ]
    if "host" in policy.weight_homes:
        rows.append(("prefetch", f"{policy.prefetch_depth} layers ahead"))
    if waiting_layers(plan.model, policy):
        rows.append(("layer inputs wait", _runs(_waits(plan, on), "{}", first=1)))
    if policy.checkpoint_interval > 1:
        rows.append(("layer inputs", f"every {policy.checkpoint_interval}th is kept"))
    for row in rows:
        table.add_row(*row)
    return table


def _waits(plan: Plan, on: dict[str, str]) -> list[str]:
    """Where each layer's input waits for the backward."""
    policy, lowest, waiting = plan.policy, plan.model.backward_layers[0], waiting_layers(plan.model, plan.policy)
    kept = ["recomputed" if layer >= lowest else "not kept" for layer in plan.model.layers]
    for layer in plan.model.layers:
        if policy.kept_input(layer, lowest):
            kept[layer - 1] = on["host" if layer in waiting else "device"]
    return kept


def _updated(plan: Plan, on: dict[str, str]) -> list[str]:
    """Where each block is updated: frozen ones nowhere, those that are frozen in part say so."""
    words = _words(plan.policy.optimizer_homes, on)
    for block, word in enumerate(words):
        spec = plan.model.block(block)
        if not spec.trained:
            words[block] = "frozen"
        elif spec.num_trained_parameters < spec.num_parameters:
            words[block] = f"{word}, in part"
    return words


def _words(values: Sequence[str], words: dict[str, str]) -> list[str]:
    return [words[value] for value in values]


def _level(level: str) -> str:
    share = level.removeprefix("budget_")
    return f"keep {share} %" if share != level else {"keep": "keep all", "input": "keep the input only"}[level]


def _runs(values: Sequence[str], form: str, *, first: int = 0) -> str:
    """Values with the blocks that have them: `resident: 0-17, 29; streamed: 18-28`."""
    where: dict[str, list[str]] = {}
    position = first
    for value, run in groupby(values):
        length = len(list(run))
        last = position + length - 1
        where.setdefault(value, []).append(f"{position}" if length == 1 else f"{position}-{last}")
        position += length
    if form != "{}":
        counted = ((value, sum(1 for other in values if other == value)) for value in where)
        return ", ".join(f"{number} {form.format(value)}" for value, number in counted)
    return "; ".join(f"{value}: {', '.join(spans)}" for value, spans in where.items())


def _memory(plan: Plan) -> Table:
    """Bytes by what they hold and where; their sums are the predicted peaks."""
    held: dict[str, dict[str, float]] = {}

    def add(words: str, tier: str, num_bytes: float) -> None:
        held.setdefault(words, {}).setdefault(tier, 0.0)
        held[words][tier] += num_bytes

    for buffer in place(plan.model, plan.inputs.workload, plan.policy).buffers.values():
        add(_HOLDS[buffer.role], buffer.tier, buffer.num_bytes)
    peaks = {Tier.DEVICE: plan.prediction.device_peak_bytes, Tier.HOST: plan.prediction.host_peak_bytes}
    rest = {tier: peak - sum(row.get(tier, 0.0) for row in held.values()) for tier, peak in peaks.items()}
    context = plan.hardware.context_bytes.value
    add("activations and workspace at their peak", Tier.DEVICE, rest[Tier.DEVICE] - context)
    add("context, the bare process, loading", Tier.DEVICE, context)
    add("context, the bare process, loading", Tier.HOST, rest[Tier.HOST])

    table = Table(box=None, pad_edge=False, title="what lives where", title_justify="left", title_style="")
    table.add_column("")
    for tier in ("device", "host"):
        table.add_column(tier, justify="right")
        table.add_column("of its limit", justify="right")
    limits = plan.inputs.limits
    total: dict[str, float] = {tier: float(peak) for tier, peak in peaks.items()}
    for words, row in [*held.items(), ("peak", total)]:
        cells = []
        for tier in ("device", "host"):
            num_bytes = row.get(tier, 0.0)
            share = num_bytes / limits.bytes_of(tier)
            cells += [format_bytes(num_bytes), f"{share:.1%}"] if share >= 5e-4 or words == "peak" else ["", ""]
        if any(cells):
            table.add_row(words, *cells)
    return table


def _rivals(plan: Plan) -> Table:
    """The plan and the baselines, one column each."""
    figures: dict[str, StepFigures | None] = {"this plan": plan.prediction}
    figures |= {name: baseline.prediction for name, baseline in plan.baselines.items()}
    table = Table(box=None, pad_edge=False, title="predicted", title_justify="left", title_style="")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    best = plan.prediction.step_seconds
    rows: dict[str, Callable[[StepFigures], str]] = {
        "step time": lambda f: _seconds(f.step_seconds),
        "of this plan's speed": lambda f: f"{best / f.step_seconds:.1%}",
        "TFLOPS (6 N T)": lambda f: _tflops(f.tflops),
        "TFLOPS with attention": lambda f: _tflops(f.tflops_with_attention),
        "tokens per second": lambda f: f"{f.tokens_per_second:,.0f}",
        "device peak": lambda f: format_bytes(f.device_peak_bytes),
        "host peak": lambda f: format_bytes(f.host_peak_bytes),
    }
    for words, cell in rows.items():
        table.add_row(words, *("-" if f is None else cell(f) for f in figures.values()))
    policies: list[Policy | None] = [plan.policy, *(baseline.policy for baseline in plan.baselines.values())]
    table.add_row("rows of a micro-batch", *("-" if p is None else f"{p.micro_batch_rows}" for p in policies))
    return table


def _notes(plan: Plan) -> Iterator[str]:
    for name, baseline in plan.baselines.items():
        if baseline.infeasible:
            yield f"{name} does not fit: {baseline.infeasible}"
    seconds, bound = plan.prediction.step_seconds, plan.bound
    yield (
        f"bound: no policy considered steps in less than {_seconds(bound.step_seconds)}; "
        f"this one is within {bound.gap:.2%} of it"
    )
    resource, busy = max(plan.busy_seconds.items(), key=lambda item: item[1])
    name = _RESOURCES.get(resource, resource).format(device=_device(plan))
    yield f"bottleneck: {name}, busy for {busy / seconds:.1%} of the step"
    shares = sorted(plan.prediction.breakdown_seconds.items(), key=lambda item: -item[1])
    yield "step: " + ", ".join(f"{words} {_seconds(value)}" for words, value in shares if value >= 5e-4 * seconds)
    measured, interpolated, computed = (plan.price_shares[key] for key in ("measured", "interpolated", "roofline"))
    yield (
        f"prices: {measured:.0%} of busy time measured, {interpolated:.0%} interpolated, "
        f"{computed:.0%} computed from the machine's profile"
    )
    counts = plan.solver.counts
    yield (
        f"found by {plan.solver.name} {plan.solver.version}: {counts['outlines']} outlines, {counts['solves']} solved, "
        f"{counts['replays']} replayed; {plan.solver.status}"
    )
