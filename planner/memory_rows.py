"""Memory rows: what a policy takes in each tier, as limits on the decisions.

Persistent buffers are sums over blocks, as the simulator's placement lays them out. What passes through a step peaks
in its largest group, at the turn from forward to backward or in a backward soon after. Depth-first layers hold one
micro-batch's share of that; beside it the inputs of the lowest of them, or their gradients, are there for the whole
group, as the head's are where no layer is depth-first. The rows are exact for save
levels laid out by the bytes their backward takes, the largest at the bottom of the model, where fewest other layers are
still alive; any other layout takes at least as much.
"""

from dataclasses import dataclass

from planner.coefficients import Coefficients
from planner.keeping import DEPTH_FIRST, ON_HOST, SAVED_ON_HOST, Keeping
from planner.mip import Linear, MixedIntegerProgram, total
from planner.variables import Variables
from simulator.predict import ALLOCATOR_SLACK, MOST_ALLOCATOR_SLACK_BYTES

GB = 1e9
EXACT_FIT_BYTES = 64  # sums of floats may miss an exact fit by a few bytes; the replay has the last word
MEMORY_LIMITS = ("device memory", "host memory")  # titles of the rows that hold a plan to its budget


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a plan may take in each tier, and what the process takes before its first buffer."""

    device_bytes: int
    host_bytes: int
    device_process_bytes: int = 0
    host_process_bytes: int = 0
    shared_memory: bool = False  # device and host are the same RAM


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peaks as expressions, in GB."""

    device_gb: Linear
    host_gb: Linear


def add_memory(mip: MixedIntegerProgram, c: Coefficients, variables: Variables, budget: Budget) -> MemoryUse:
    """Add the peaks of both tiers and their limits."""
    memory = c.memory
    shares = memory.block_bytes
    device_share = [(shares[0].device, variables.embedding), (shares[-1].device, variables.head)]
    host_share = [(shares[0].host, variables.embedding), (shares[-1].host, variables.head)]
    for kind, layers in c.kinds.items():
        share = shares[layers[0]]
        device_share += [(share.device, variables.host_layers[kind]), (-share.weights, variables.streamed[kind])]
        host_share.append((share.host, variables.host_layers[kind]))
        state = memory.state_bytes[layers[0]]
        device_share.append((state.device, variables.link_layers[kind]))
        host_share.append((state.host, variables.link_layers[kind]))
    persistent = total(num_bytes / GB * count for num_bytes, count in device_share) + memory.device_fixed_bytes / GB
    persistent += memory.slab_bytes / GB * variables.slabs + memory.slot_bytes / GB * variables.slots
    persistent += memory.state_slot_bytes / GB * variables.state_slots
    persistent += c.hidden_bytes / GB * variables.stages
    if c.outline.saved_waits:
        persistent += _add_saved_stage(mip, c, variables)
    persistent += memory.depth_first_bytes / GB * variables.depth_first
    persistent += memory.depth_first_host_bytes / GB * variables.depth_first_host
    passing = mip.quantity("passing_gb")
    if c.outline.checkpoint_interval == 1:
        _add_passing(mip, c, variables, passing)
    else:
        _add_sparse_passing(mip, c, variables, passing)
    slack = _add_slack(mip, c, passing)
    device = persistent + passing + slack + budget.device_process_bytes / GB
    host = total(num_bytes / GB * count for num_bytes, count in host_share)
    host += (memory.host_fixed_bytes + budget.host_process_bytes) / GB
    group = max(c.outline.groups)
    host += total(
        c.passes(key, group) * c.host_bytes(key) / GB * count
        for key, count in variables.levels.items()
        if key[1] in ON_HOST
    )
    if budget.shared_memory:
        host += persistent + passing
    for title, used, limit in zip(MEMORY_LIMITS, (device, host), (budget.device_bytes, budget.host_bytes), strict=True):
        mip.at_most(title, used, (limit + EXACT_FIT_BYTES) / GB)
    return MemoryUse(device, host)


def _add_slack(mip: MixedIntegerProgram, c: Coefficients, passing: Linear) -> Linear:
    """What the allocator reserves beside what passes: a share of it, up to a limit that takes an indicator to say."""
    most, limit = _most_passing_gb(c), MOST_ALLOCATOR_SLACK_BYTES / GB
    knee = limit / ALLOCATOR_SLACK
    if most <= knee:
        return ALLOCATOR_SLACK * passing
    slack, at_limit = mip.quantity("slack_gb"), mip.indicator("slack_at_limit")
    mip.at_least("more passes than the slack grows with", at_limit, (passing - knee) * (1 / most))
    mip.at_least("slack at its limit", slack, limit * at_limit)
    mip.at_least("slack below its limit", slack, ALLOCATOR_SLACK * passing - ALLOCATOR_SLACK * (most - knee) * at_limit)
    return slack


def _most_passing_gb(c: Coefficients) -> float:
    """More than passes through a step whatever is decided."""
    group = max(c.outline.groups)
    kept = sum(
        len(layers) * max(c.passes((kind, how), group) * c.waiting_bytes((kind, how)) for how in c.levels)
        for kind, layers in c.kinds.items()
    )
    inputs = (group + 2) * (c.model.num_layers + 1) * c.hidden_bytes + group * c.micro_batch_bytes
    transients = [c.loss.transient_bytes, c.embed_backward.transient_bytes]
    for cost in c.level_costs.values():
        transients += [cost.forward_transient_bytes, cost.backward_transient_bytes]
    return (kept + inputs + max(transients)) / GB


def _add_saved_stage(mip: MixedIntegerProgram, c: Coefficients, variables: Variables) -> Linear:
    """Stages for what layers saved, as large as the largest: one, or two where such layers follow upon each other."""
    stage, num_layers = mip.quantity("saved_stage_gb"), c.model.num_layers
    more_than_half = mip.indicator("saved_of_more_than_half")
    saved = total(count for (_, how), count in variables.levels.items() if how in SAVED_ON_HOST)
    mip.at_least("neighbours' wait", more_than_half, (saved - (num_layers + 1) // 2) * (1 / num_layers))
    for (kind, how), count in variables.levels.items():
        if how in SAVED_ON_HOST:
            waits = mip.indicator(f"waits_{kind}_{how}")
            mip.at_least(f"{how} is used by kind {kind}", waits, count * (1 / c.model.num_layers))
            mip.at_least(f"the stage holds {how}", stage, c.saved_bytes[how] / GB * waits)
            both = c.saved_bytes[how] / GB * (waits + more_than_half - 1.0)
            mip.at_least(f"two stages hold {how}", stage, c.saved_bytes[how] / GB * waits + both)
    return stage


def _add_passing(mip: MixedIntegerProgram, c: Coefficients, variables: Variables, passing: Linear) -> None:
    group, hidden = max(c.outline.groups), c.hidden_bytes / GB
    batches = group * c.micro_batch_bytes / GB
    # The head's inputs give way to their gradients one by one, so there is one more than micro-batches.
    turn = (group + 1) * hidden + batches
    alive = {
        key: c.passes(key, group) * c.waiting_bytes(key) / GB * count
        for key, count in variables.levels.items()
        if key[0] in c.backward_kinds
    }
    at_loss = turn if alive else turn - hidden  # no gradient where the head alone is trained
    mip.at_least("memory at the loss", passing, total(alive.values()) + at_loss + c.loss.transient_bytes / GB)
    if c.edges_trained[0]:
        embedding = group * hidden + batches + c.embed_backward.transient_bytes / GB
        mip.at_least("memory in the embedding's backward", passing, embedding)
    else:  # the lowest backward leaves no gradient, and batches go with the loss
        turn = group * hidden
    # A layer that is run forward only takes its input away while it writes its output.
    for kind in c.kinds.keys() - c.backward_kinds.keys():
        transient_bytes = c.level_costs[kind, "input"].forward_transient_bytes
        mip.at_least(f"memory in the forward of kind {kind}", passing, (group + 1) * hidden + transient_bytes / GB)

    used: dict[tuple[int, Keeping], Linear] = {}
    for key in alive:
        count = variables.levels[key]
        used[key] = mip.indicator(f"used_{key[0]}_{key[1]}")
        mip.at_least(f"level {key[1]} is used by kind {key[0]}", used[key], count * (1 / c.model.num_layers))
    # Take the topmost layer whose transient is at least X: in its pass, all layers with such transients are alive.
    for name, fixed in (("backward", turn), ("forward", group * hidden + batches)):
        transient = {key: getattr(c.level_costs[key], f"{name}_transient_bytes") / GB for key in alive}
        below: list[Linear] = []
        # In the pass of a depth-first one all below these are alive, in the pass of another one no depth-first layer.
        for key in sorted(alive, key=lambda key: (key[1] in DEPTH_FIRST, -transient[key], key[1] not in ON_HOST)):
            below.append(alive[key])
            peak = total(below) + (fixed + transient[key]) * used[key]
            mip.at_least(f"memory in the {name} of kind {key[0]} at level {key[1]}", passing, peak)
            if name == "forward" and key[1] == "input_on_host":
                # Its inputs, the first outputs, and the input before, which is still leaving.
                leaving = (group + 1 + min(group - 1, 1)) * hidden + group * c.micro_batch_bytes / GB
                title = f"memory while inputs of kind {key[0]} leave"
                mip.at_least(title, passing, (leaving + transient[key]) * used[key])


def _add_sparse_passing(mip: MixedIntegerProgram, c: Coefficients, variables: Variables, passing: Linear) -> None:
    """Checkpoints every few layers: a segment's inputs come back together, but the first of one that has waited."""
    group, hidden = max(c.outline.groups), c.hidden_bytes / GB
    interval, layers = c.outline.checkpoint_interval, len(c.model.backward_layers)
    segments = [min(interval, layers - start) for start in range(0, layers, interval)]
    costs = [costs for (kind, _), costs in c.level_costs.items() if kind in c.backward_kinds]
    transient = min((cost.backward_transient_bytes for cost in costs), default=0) / GB
    turn = (group + 1) * hidden + group * c.micro_batch_bytes / GB
    if not c.edges_trained[0]:
        turn = group * hidden
    kept = group * hidden * (len(segments) - variables.num_waiting)
    mip.at_least("memory at the loss", passing, kept + (c.loss.transient_bytes / GB + turn))
    highest = max((index + length for index, length in enumerate(segments)), default=0)
    inputs = group * hidden * (highest - variables.num_waiting)
    mip.at_least("memory in a segment's backward", passing, inputs + (transient + turn))
    inside = group * hidden * (max(segments, default=1) - 1)
    mip.at_least("memory in the backward of a segment whose input waited", passing, inside + (transient + turn))
