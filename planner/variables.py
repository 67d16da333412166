"""The decisions of one outline, as counts of layers where layers are alike, and as variables of its program."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.base_policy import GRADIENT_SLABS
from planner.coefficients import Coefficients
from planner.keeping import DEPTH_FIRST, ON_HOST, SAVED_ON_HOST, Keeping, depth_first, on_host
from planner.mip import Linear, MixedIntegerProgram, total
from simulator.activations import NUM_STAGES, waiting_layers
from simulator.placement import place
from simulator.policy import Policy

MAX_SLOTS = 6
MAX_STATE_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Decisions:
    """How many layers of a kind take each level, update on the host and stream; the edges one by one.

    `link_layers` are updated on the GPU with state that streams through `state_slots`; their weights are resident.
    """

    levels: Mapping[tuple[int, Keeping], int]  # by (layer kind, level)
    host_layers: Mapping[int, int]  # by layer kind
    host_embedding: bool
    host_head: bool
    streamed: Mapping[int, int]  # by layer kind
    slots: int  # 0: nothing streams
    depth_first_host: int = 0  # of the host's layers those that are depth-first
    link_layers: Mapping[int, int] = field(default_factory=dict)  # by layer kind
    state_slots: int = 0  # 0: no state streams

    @property
    def num_depth_first(self) -> int:
        return sum(count for (_, how), count in self.levels.items() if how in DEPTH_FIRST)

    @property
    def num_saved_on_host(self) -> int:
        return sum(count for (_, how), count in self.levels.items() if how in SAVED_ON_HOST)

    def key(self) -> tuple[object, ...]:
        """Equal for equal decisions, whether zeros are spelt out or not."""
        counts = (self.levels, self.host_layers, self.streamed, self.link_layers)
        spelt = (tuple(sorted((key, n) for key, n in numbers.items() if n)) for numbers in counts)
        others = (self.host_embedding, self.host_head, self.slots, self.depth_first_host, self.state_slots)
        return (*spelt, *others)


@dataclass(frozen=True, slots=True)
class Variables:
    """Decisions as expressions, and the quantities that follow from them in all rows."""

    levels: dict[tuple[int, Keeping], Linear]
    host_layers: dict[int, Linear]
    num_host: Linear  # layers that are updated there: frozen ones are not
    any_host: dict[int, Linear]  # 1: a layer of the kind is updated on the host
    any_layer: Linear  # 1: a layer of any kind is
    slabs: Linear  # gradient slabs in use
    embedding: Linear  # 1: updated on the host
    head: Linear
    streamed: dict[int, Linear]
    num_streamed: Linear
    slots: Linear
    reloads: Linear  # streamed layers beyond the slots
    any_reloads: Linear
    returns: Linear  # of these, the ones that a backward passes through
    link_layers: dict[int, Linear]
    num_link: Linear
    any_link: Linear  # 1: a layer's state streams
    state_slots: Linear
    later_states: Linear  # those that no slot holds when updates begin
    any_later_state: Linear
    num_waiting: Linear  # layers whose kept input waits on the host
    any_waiting: Linear  # 1: there is one
    stages: Linear  # buffers that such inputs come back into
    depth_first: Linear  # layers
    depth_first_host: Linear  # of these are updated on the host
    any_depth_first_host: Linear

    def chosen(self, decisions: Decisions) -> dict[str, float]:
        """The decision variables' values."""
        values: dict[str, float] = {
            self.embedding.name: int(decisions.host_embedding),
            self.head.name: int(decisions.host_head),
            self.slots.name: decisions.slots,
            self.state_slots.name: decisions.state_slots,
        }
        if self.depth_first_host.terms:
            values[self.depth_first_host.name] = decisions.depth_first_host
        values |= {variable.name: decisions.levels.get(key, 0) for key, variable in self.levels.items()}
        values |= {variable.name: decisions.host_layers.get(kind, 0) for kind, variable in self.host_layers.items()}
        values |= {variable.name: decisions.streamed.get(kind, 0) for kind, variable in self.streamed.items()}
        values |= {variable.name: decisions.link_layers.get(kind, 0) for kind, variable in self.link_layers.items()}
        return values

    def decisions(self, values: Mapping[str, float]) -> Decisions:
        """The decisions in a solver's values, where 1 may come back as 0.9999999."""

        def count(variable: Linear) -> int:
            return round(values[variable.name])

        streamed = {kind: count(variable) for kind, variable in self.streamed.items()}
        link_layers = {kind: count(variable) for kind, variable in self.link_layers.items()}
        return Decisions(
            levels={key: count(variable) for key, variable in self.levels.items()},
            host_layers={kind: count(variable) for kind, variable in self.host_layers.items()},
            host_embedding=bool(count(self.embedding)),
            host_head=bool(count(self.head)),
            streamed=streamed,
            slots=count(self.slots) if any(streamed.values()) else 0,
            depth_first_host=count(self.depth_first_host) if self.depth_first_host.terms else 0,
            link_layers=link_layers,
            state_slots=count(self.state_slots) if any(link_layers.values()) else 0,
        )


def policy_decisions(coefficients: Coefficients, policy: Policy) -> Decisions:
    """A policy as counts."""
    model = coefficients.model
    levels: dict[tuple[int, Keeping], int] = {}
    waiting = set(waiting_layers(model, policy))
    host_layers: dict[int, int] = {}
    streamed: dict[int, int] = {}
    link_layers: dict[int, int] = {}
    for layer in model.layers:
        kind = model.kind_of_block[layer]
        level: Keeping = policy.save_levels[layer - 1] if kind in coefficients.backward_kinds else "input"
        if policy.depth_first(layer, model.num_layers):
            level = depth_first(policy.save_levels[layer - 1])
        if layer in waiting:
            level = "input_on_host" if policy.save_levels[layer - 1] == "input" else on_host(level)
        key = (kind, level)
        levels[key] = levels.get(key, 0) + 1
        host_layers[kind] = host_layers.get(kind, 0) + (policy.optimizer_homes[layer] == "host")
        streamed[kind] = streamed.get(kind, 0) + (policy.weight_homes[layer] == "host")
        link_layers[kind] = link_layers.get(kind, 0) + (policy.optimizer_homes[layer] == "streamed")
    placement = place(model, coefficients.workload, policy)
    return Decisions(
        levels=levels,
        host_layers=host_layers,
        host_embedding=policy.optimizer_homes[0] == "host",
        host_head=policy.optimizer_homes[model.head] == "host",
        streamed=streamed,
        slots=len(placement.slots),
        depth_first_host=sum(
            policy.optimizer_homes[layer] == "host" and policy.depth_first(layer, model.num_layers)
            for layer in model.layers
        ),
        link_layers=link_layers,
        state_slots=len(set(placement.state_slots.values())),
    )


def admissible(c: Coefficients, decisions: Decisions) -> Decisions:
    """The decisions without what no layer has: a frozen block an optimizer, or a level below the lowest gradient.

    Where checkpoints are sparse, no more inputs wait than are kept. No depth-first layer streams.
    """
    if c.outline.depth_first:
        updated_there, upper = sum(decisions.host_layers.values()), decisions.num_depth_first
        least = max(0, upper + updated_there - c.model.num_layers)
        upper_host = max(least, min(decisions.depth_first_host, upper, updated_there))
        streamed = {kind: min(count, updated_there - upper_host) for kind, count in decisions.streamed.items()}
        slots = decisions.slots if any(streamed.values()) else 0
        decisions = replace(decisions, streamed=streamed, slots=slots, depth_first_host=upper_host)
    for kind, kept in c.checkpoints.items():
        too_many = decisions.levels.get((kind, "input_on_host"), 0) - len(kept)
        if too_many > 0:
            inputs = decisions.levels.get((kind, "input"), 0) + too_many
            changed: dict[tuple[int, Keeping], int] = {(kind, "input_on_host"): len(kept), (kind, "input"): inputs}
            decisions = replace(decisions, levels={**decisions.levels, **changed})
    if all(c.edges_trained) and c.trained_kinds == c.kinds:
        return decisions
    levels = {key: count for key, count in decisions.levels.items() if key[0] in c.backward_kinds}
    levels |= {(kind, "input"): len(layers) for kind, layers in c.kinds.items() if kind not in c.backward_kinds}
    counts = {kind: (decisions.host_layers if kind in c.trained_kinds else decisions.streamed) for kind in c.kinds}
    return replace(
        decisions,
        levels=levels,
        host_layers={kind: count.get(kind, 0) for kind, count in counts.items()},
        host_embedding=decisions.host_embedding and c.edges_trained[0],
        host_head=decisions.host_head and c.edges_trained[1],
        link_layers={kind: count for kind, count in decisions.link_layers.items() if kind in c.trained_kinds},
    )


def add_variables(mip: MixedIntegerProgram, c: Coefficients) -> Variables:
    """Add the decisions, what ties them together, and the quantities that all rows share."""
    model, kinds = c.model, c.kinds
    share = 1 / model.num_layers
    levels = {
        (kind, a): mip.decide(f"level_{kind}_{a}", 0, len(layers)) for kind, layers in kinds.items() for a in c.levels
    }
    for kind, layers in kinds.items():
        mip.equal(f"every layer of kind {kind} has a level", total(levels[kind, a] for a in c.levels), len(layers))

    host_layers = {kind: mip.decide(f"host_layers_{kind}", 0, len(layers)) for kind, layers in kinds.items()}
    num_host = total(host_layers[kind] for kind in c.trained_kinds)
    any_host = {kind: mip.indicator(f"any_host_layer_{kind}") for kind in c.trained_kinds}
    for kind, indicator in any_host.items():
        mip.at_least(f"a layer of kind {kind} is updated on the host", indicator, host_layers[kind] * share)
    any_layer = mip.indicator("any_host_layer")
    mip.at_least("a layer is updated on the host", any_layer, num_host * share)
    # One layer needs one slab or slot, more share them. Slabs are two: a third would only hide a slower link.
    more_host = mip.indicator("two_host_layers")
    mip.at_least("two layers are updated on the host", more_host, (num_host - 1) * share)
    slabs = any_layer + (GRADIENT_SLABS - 1) * more_host
    num_depth_first = total(count for (_, a), count in levels.items() if a in DEPTH_FIRST)
    depth_first_host, any_depth_first_host = Linear(), Linear()
    if c.outline.depth_first:
        mip.at_most("a layer is depth-first", 1.0 - num_depth_first, 0.0)
        mip.at_most("a layer is not depth-first", num_depth_first, model.num_layers - 1)
        depth_first_host = mip.decide("depth_first_host_layers", 0, model.num_layers)
        mip.at_most("depth-first layers on the host are depth-first", depth_first_host, num_depth_first)
        mip.at_most("depth-first layers on the host are on the host", depth_first_host, num_host)
        lower = model.num_layers - num_depth_first
        mip.at_most("other layers on the host are not depth-first", num_host - depth_first_host, lower)
        any_depth_first_host = mip.indicator("any_depth_first_host_layer")
        mip.at_least("a depth-first layer is updated on the host", any_depth_first_host, depth_first_host * share)
        # It loosens a row, and would else be 1 for nothing.
        mip.at_most("no depth-first layer is updated on the host", any_depth_first_host, depth_first_host)
    if c.leaves_from_sums:
        through = num_host - depth_first_host
        first, second = mip.indicator("a_slab"), mip.indicator("two_slabs")
        mip.at_least("a gradient leaves through a slab", first, through * share)
        mip.at_least("two gradients leave through slabs", second, (through - 1) * share)
        slabs = first + (GRADIENT_SLABS - 1) * second
    embedding, head = mip.decide("host_embedding", 0, 1), mip.decide("host_head", 0, 1)
    if model.tied_embeddings and all(c.edges_trained):
        mip.equal("tied embeddings have one optimizer", embedding, head)
    for name, edge, trained in zip(("embedding", "head"), (embedding, head), c.edges_trained, strict=True):
        if not trained:
            mip.equal(f"the {name} is frozen and stays", edge, 0.0)

    streamed = {kind: mip.decide(f"streamed_{kind}", 0, len(layers)) for kind, layers in kinds.items()}
    for kind in kinds:
        if kind in c.trained_kinds:
            mip.at_most(f"streamed layers of kind {kind} are updated on the host", streamed[kind], host_layers[kind])
        else:
            mip.equal(
                f"frozen layers of kind {kind} live on the host if they stream", streamed[kind], host_layers[kind]
            )
        if kind not in c.backward_kinds:
            mip.equal(f"layers of kind {kind} keep nothing", levels[kind, "input"], len(kinds[kind]))
    num_streamed = total(streamed.values())
    if c.outline.depth_first:
        mip.at_most("no depth-first layer streams", num_streamed, num_host - depth_first_host)
    any_streams = mip.indicator("any_streams")
    mip.at_least("a layer streams", any_streams, num_streamed * share)
    more_stream = mip.indicator("two_stream")
    mip.at_least("two layers stream", more_stream, (num_streamed - 1) * share)
    slots = mip.decide("slots", 0, min(MAX_SLOTS, model.num_layers))
    mip.at_most("streaming takes two slots", any_streams + more_stream, slots)
    reloads = mip.quantity("reloads")
    mip.at_least("layers that no slot holds at a turn", reloads, num_streamed - slots)
    any_reloads = mip.indicator("any_reloads")
    mip.at_least("a layer is loaded again", any_reloads, reloads * share)
    returns = reloads
    if c.backward_kinds != kinds:
        returns = mip.quantity("returns")
        mip.at_least(
            "layers that the turn to the backward loads", returns, total(streamed[k] for k in c.backward_kinds) - slots
        )
    link_layers = {kind: mip.decide(f"link_layers_{kind}", 0, len(layers)) for kind, layers in kinds.items()}
    for kind, layers in kinds.items():
        others = len(layers) - host_layers[kind] if kind in c.trained_kinds else 0.0
        mip.at_most(f"layers of kind {kind} have one optimizer at most", link_layers[kind], others)
    num_link = total(link_layers.values())
    any_link, more_link = mip.indicator("any_link_layer"), mip.indicator("two_link_layers")
    mip.at_least("a layer's state streams", any_link, num_link * share)
    mip.at_least("two layers' states stream", more_link, (num_link - 1) * share)
    state_slots = mip.decide("state_slots", 0, min(MAX_STATE_SLOTS, model.num_layers))
    mip.at_most("streaming states takes two slots", any_link + more_link, state_slots)
    later_states, any_later = mip.quantity("later_states"), mip.indicator("any_later_state")
    mip.at_least("states that come after others", later_states, num_link - state_slots)
    mip.at_least("a state comes after others", any_later, later_states * share)
    num_waiting = total(count for (_, a), count in levels.items() if a in ON_HOST)
    for kind, kept in c.checkpoints.items():
        away = total(levels[kind, a] for a in c.levels if a in ON_HOST)
        mip.at_most(f"layers of kind {kind} that keep an input may have it wait", away, len(kept))
    if c.outline.saved_waits:
        saved = total(count for (_, a), count in levels.items() if a in SAVED_ON_HOST)
        mip.at_most("what a layer saves waits", 1.0 - saved, 0.0)
    any_waiting = mip.indicator("any_waiting")
    mip.at_least("an input waits on the host", any_waiting, num_waiting * share)
    if c.outline.num_micro_batches > 1:
        stages = NUM_STAGES * any_waiting
    else:
        more_waiting = mip.indicator("two_waiting")
        mip.at_least("two inputs wait on the host", more_waiting, (num_waiting - 1) * share)
        stages = any_waiting + (NUM_STAGES - 1) * more_waiting
    return Variables(
        levels,
        host_layers,
        num_host,
        any_host,
        any_layer,
        slabs,
        embedding,
        head,
        streamed,
        num_streamed,
        slots,
        reloads,
        any_reloads,
        returns,
        link_layers,
        num_link,
        any_link,
        state_slots,
        later_states,
        any_later,
        num_waiting,
        any_waiting,
        stages,
        num_depth_first,
        depth_first_host,
        any_depth_first_host,
    )
