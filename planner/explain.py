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
from simulator.predict import StepFigures, device_process_bytes, host_process_bytes
from simulator.program import Role, Tier
from simulator.units import format_bytes

WIDTH = 110
# What takes less of a tier's peak stands in the row "other".
SMALLEST_SHARE = 5e-4

# What the reader calls what a buffer of a role holds.
_HOLDS = {
    Role.WEIGHTS: "weights",
    Role.STATE: "optimizer state",
    Role.ACCUMULATOR: "sums of gradients",
    Role.GRADIENT: "completed gradients",
    Role.SLOT: "slots for streamed weights",
    Role.SLAB: "slabs for leaving gradients",
    Role.STATE_SLOT: "slots for streamed states",
    Role.UPDATE_SLOT: "slots for weights in their update",
    Role.ACTIVATION: "layer inputs that wait",
    Role.STAGE: "stages for returning layer inputs",
    Role.SAVED_PLACE: "saved activations that wait",
    Role.SAVED_STAGE: "stage for returning saved activations",
    Role.BATCH: "batches",
    Role.SCALARS: "scalars",
}
A_GUESS = 0.5  # of the busy time that nobody measured: from here on a plan says what that makes of it
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
        rendered(_decisions(plan), width),
        rendered(_memory(plan), width),
        rendered(_rivals(plan), width),
        "\n".join(_notes(plan)),
    ]
    return "\n\n".join(parts) + "\n"


def seconds_text(seconds: float) -> str:
    """Four digits, so that plans which differ by a percent look different."""
    return f"{seconds:#.4g} s" if seconds >= 1 else f"{seconds * 1e3:#.4g} ms"


def parameters_text(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _tflops(tflops: float) -> str:
    """One decimal from 10 up, below it three digits: a CPU's rates differ too."""
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.3g}"


def _device(plan: Plan) -> str:
    return "GPU" if plan.hardware.device.kind == "cuda" else "CPU"


def rendered(table: Table, width: int) -> str:
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _title(plan: Plan) -> str:
    model, workload = plan.inputs.model, plan.inputs.workload
    name = model.path or model.family
    clipping = {"global": "exact clipping", "layerwise": "layerwise clipping", "none": "no clipping"}[workload.clipping]
    trained = plan.model.num_trained_parameters
    frozen = "" if trained == model.num_parameters else f", {parameters_text(trained)} of them trained"
    return (
        f"{name}: {parameters_text(model.num_parameters)} parameters in {model.num_layers} layers{frozen}, "
        f"{workload.tokens_per_step:,} tokens a step in sequences of {workload.sequence_length:,}, {clipping},\n"
        f"{workload.gradient_format} gradients, {workload.state_format} optimizer state, "
        f"on {plan.inputs.hardware.name} with {_limits(plan)}"
    )


def _limits(plan: Plan) -> str:
    device, host = plan.inputs.limits.device_memory_bytes, plan.inputs.limits.host_memory_bytes
    if plan.hardware.shared_memory and device >= host:  # the device's bytes are among the host's
        return f"{format_bytes(host)} of memory"
    return f"{format_bytes(device)} of device memory and {format_bytes(host)} of host memory"


def _decisions(plan: Plan) -> Table:
    policy, workload = plan.policy, plan.inputs.workload
    table = Table(box=None, show_header=False, pad_edge=False)
    tokens = policy.micro_batch_rows * workload.sequence_length
    device = "on the GPU" if plan.hardware.device.kind == "cuda" else "on the device"
    on = {"device": device, "host": "on the host", "streamed": f"{device} with streamed state"}
    rows = [
        ("micro-batches", f"{policy.num_micro_batches} of {policy.micro_batch_rows} rows, {tokens:,} tokens"),
        ("groups", _runs([f"{size}" for size in policy.groups], "of {} micro-batches")),
        ("weights", _runs(_words(policy.weight_homes, {"device": "resident", "host": "streamed"}), "{}")),
        ("save levels", _runs([level_words(level) for level in policy.save_levels], "{}", first=1)),
        ("optimizer", _runs(_updated(plan, on), "{}")),
    ]
    if policy.depth_first_layers:
        lowest = plan.model.num_layers + 1 - policy.depth_first_layers
        rows.append(("depth first", f"{lowest}-{plan.model.num_layers}: each micro-batch forward and back"))
    if "host" in policy.weight_homes:
        rows.append(("prefetch", f"{policy.prefetch_depth} layers ahead"))
    if "streamed" in policy.optimizer_homes:
        rows.append(("state slots", f"{policy.state_slots} layers' state on the device at a time"))
    if waiting_layers(plan.model, policy):
        rows.append(("layer inputs wait", _runs(_waits(plan, on), "{}", first=1)))
    if policy.saved_bytes:
        words = [on["host"] if size else device for size in policy.saved_bytes]
        rows.append(("what else they save", _runs(words, "{}", first=1)))
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


def level_words(level: str) -> str:
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
    """Bytes by what they hold and where, and their shares of the limits; a column's rows add up to its peak."""
    table = Table(box=None, pad_edge=False, title="what lives where", title_justify="left", title_style="")
    table.add_column("")
    held, limits = held_bytes(plan), plan.inputs.limits
    columns = {"memory": limits.host_memory_bytes}
    if not plan.hardware.shared_memory:
        tiers = [tier.value for tier in Tier if any(tier.value in row for row in held.values())]
        columns = {tier: limits.bytes_of(tier) for tier in tiers}
    for column in columns:
        table.add_column(column, justify="right")
        table.add_column("of its limit", justify="right")
    other: dict[str, float] = dict.fromkeys(columns, 0.0)
    peak: dict[str, float] = {column: sum(row.get(column, 0.0) for row in held.values()) for column in columns}
    shown: dict[str, dict[str, float]] = {}
    for words, row in held.items():
        for column, num_bytes in row.items():
            if num_bytes >= SMALLEST_SHARE * peak[column]:
                shown.setdefault(words, {})[column] = num_bytes
            else:
                other[column] += num_bytes
    for words, row in [*shown.items(), ("other", other), ("peak", peak)]:
        cells = []
        for column, limit in columns.items():
            num_bytes = row.get(column, 0.0)
            cells += [format_bytes(num_bytes), f"{num_bytes / limit:.1%}"] if num_bytes else ["", ""]
        if any(cells):
            table.add_row(words, *cells)
    return table


def held_bytes(plan: Plan) -> dict[str, dict[str, float]]:
    """Bytes at the predicted peaks by what they hold and by tier; the one tier of shared memory is `memory`."""
    held: dict[str, dict[str, float]] = {}

    def add(words: str, tier: str, num_bytes: float) -> None:
        column = "memory" if plan.hardware.shared_memory else tier
        row = held.setdefault(words, {})
        row[column] = row.get(column, 0.0) + num_bytes

    for buffer in place(plan.model, plan.inputs.workload, plan.policy).buffers.values():
        add(_HOLDS[buffer.role], buffer.tier.value, buffer.num_bytes)
    figures = plan.prediction
    process = float(host_process_bytes(plan.model, plan.inputs.workload, plan.hardware))
    # What passes through a step is the rest of a peak: the predicted one holds it at its largest.
    peaks: dict[str, float] = {"host": figures.host_peak_bytes, "nvme": figures.nvme_peak_bytes}
    if plan.hardware.shared_memory:
        peaks, context = {"memory": figures.host_peak_bytes}, 0.0
    else:
        peaks, context = {"device": figures.device_peak_bytes, **peaks}, float(device_process_bytes(plan.hardware))
    for tier, own in (("memory", process), ("device", context), ("host", process), ("nvme", 0.0)):
        if tier in peaks:
            persistent = sum(row.get(tier, 0.0) for row in held.values())
            if passing := peaks[tier] - own - persistent:
                add("activations and workspace at their peak", tier, passing)
            if own:
                add(
                    "the bare process, loading" if tier == "memory" else "context, the bare process, loading", tier, own
                )
    return held


def _rivals(plan: Plan) -> Table:
    """The plan and the baselines, one column each."""
    figures: dict[str, StepFigures | None] = {"this plan": plan.prediction}
    figures |= {name: baseline.prediction for name, baseline in plan.baselines.items()}
    table = Table(box=None, pad_edge=False, title="predicted", title_justify="left", title_style="")
    table.add_column("")
    shared = plan.hardware.shared_memory
    for name in figures:
        table.add_column(_rival(plan, name), justify="right")
    best = plan.prediction.step_seconds
    rows: dict[str, Callable[[StepFigures], str]] = {
        "step time": lambda f: seconds_text(f.step_seconds),
        "of this plan's speed": lambda f: f"{best / f.step_seconds:.1%}",
        "TFLOPS (6 N T)": lambda f: _tflops(f.tflops),
        "TFLOPS with attention": lambda f: _tflops(f.tflops_with_attention),
        "tokens per second": lambda f: f"{f.tokens_per_second:,.0f}",
        "device peak": lambda f: format_bytes(f.device_peak_bytes),
        "memory peak" if shared else "host peak": lambda f: format_bytes(f.host_peak_bytes),
    }
    if shared:
        del rows["device peak"]  # the other one holds it
    for words, cell in rows.items():
        table.add_row(words, *("-" if f is None else cell(f) for f in figures.values()))
    policies: list[Policy | None] = [plan.policy, *(baseline.policy for baseline in plan.baselines.values())]
    table.add_row("rows of a micro-batch", *("-" if p is None else f"{p.micro_batch_rows}" for p in policies))
    return table


def _rival(plan: Plan, name: str) -> str:
    """A CPU has no HBM."""
    return "all resident" if plan.hardware.shared_memory and name == "all in HBM" else name


def _notes(plan: Plan) -> Iterator[str]:
    for name, baseline in plan.baselines.items():
        if baseline.infeasible:
            yield f"{_rival(plan, name)} does not fit: {baseline.infeasible}"
    seconds, bound = plan.prediction.step_seconds, plan.bound
    yield (
        f"bound: no policy considered steps in less than {seconds_text(bound.step_seconds)}; "
        f"this one is within {bound.gap:.2%} of it"
    )
    resource, busy = max(plan.busy_seconds.items(), key=lambda item: item[1])
    name = _RESOURCES.get(resource, resource).format(device=_device(plan))
    yield f"bottleneck: {name}, busy for {busy / seconds:.1%} of the step"
    shares = sorted(plan.prediction.breakdown_seconds.items(), key=lambda item: -item[1])
    yield "step: " + ", ".join(f"{words} {seconds_text(value)}" for words, value in shares if value >= 5e-4 * seconds)
    measured, interpolated, computed = (plan.price_shares[key] for key in ("measured", "interpolated", "roofline"))
    yield (
        f"prices: {measured:.0%} of busy time measured, {interpolated:.0%} interpolated, "
        f"{computed:.0%} computed from the machine's profile"
        + (
            "; `conveyor measure` times this model's operations, where these are a rough guess"
            if computed >= A_GUESS
            else ""
        )
        + (f"; runs folded in: {', '.join(plan.costs.folded_runs)}" if plan.costs and plan.costs.folded_runs else "")
    )
    counts = plan.solver.counts
    by = f"{plan.solver.name} {plan.solver.version}".strip()
    yield (
        f"found by {by}: {counts['outlines']} outlines, {counts['solves']} solved, "
        f"{counts['replays']} replayed; {plan.solver.status}"
    )
