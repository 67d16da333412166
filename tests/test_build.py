"""Programs of the builder: any policy computes what plain training computes, in the order that the rules ask for."""

from collections import Counter
from functools import cache

import pytest
from built_cases import SEEDS, case, low_and_top
from small_models import random_case, small_model, small_workload
from symbolic_run import TORN, Variant, plain_training, run_in_order

from simulator.build import build
from simulator.check import check
from simulator.model import ModelSpec
from simulator.policy import Home, Policy, uniform_policy
from simulator.program import Kind, Operation, Program, Resource, Role, StepProgram, Tier

RUNS: tuple[tuple[Variant, ...], ...] = (
    ("first", "drain"),
    ("first", "steady", "steady", "drain"),
    ("first", "steady", "drain", "first", "steady", "drain"),  # after a save
)


def group_of(policy: Policy) -> dict[int, int]:
    """The group of each micro-batch."""
    numbered = [group for group, size in enumerate(policy.groups) for _ in range(size)]
    return dict(enumerate(numbered))


def streamed_visits(model: ModelSpec, policy: Policy) -> list[int]:
    """Streamed blocks in the order in which a step needs them: up, and down again, segment by segment.

    Each micro-batch of a group goes up and down the depth-first layers before the way down the lower ones begins.
    """
    k, sequence = policy.checkpoint_interval, []
    low, top = low_and_top(model, policy)
    for group in policy.groups:
        sequence += low + [*top, *reversed(top)] * group
        for start in reversed(range(0, len(low), k)):
            segment = low[start : start + k]
            sequence += [*segment[:-1], *reversed(segment)]
    return [block for block in sequence if policy.weight_homes[block] == "host"]


def passes(step_program: StepProgram) -> list[tuple[int, int]]:
    """Block and micro-batch of all passes of a steady step, in order."""
    kinds = (Kind.FORWARD, Kind.LOSS, Kind.BACKWARD)
    return [(operation.block, operation.micro_batch) for operation in step_program.steady if operation.kind in kinds]


def slot_of(operation: Operation) -> str:
    """The slot that an operation takes a layer's weights from, or ''."""
    return next((access.buffer for access in operation.reads if access.buffer.startswith("device.slot.")), "")


@pytest.mark.parametrize("seed", SEEDS)
def test_every_policy_passes_the_checker_and_trains_like_a_plain_loop(seed: int) -> None:
    model, policy, step_program = case(seed)
    check(step_program)
    for variants in RUNS:
        num_steps = sum(variant != "drain" for variant in variants)
        expected = plain_training(model, policy.num_micro_batches, num_steps, clipping=policy.clipping)
        machine = run_in_order(model, step_program, variants)
        assert TORN not in expected.values()
        assert machine.weights() == expected
        assert machine.resident_weights().items() <= expected.items()  # evaluation may read them


def test_the_plain_loop_tells_orders_and_clippings_apart() -> None:
    model = small_model(2)
    results = {
        tuple(plain_training(model, micro_batches, steps, clipping=clipping).values())
        for micro_batches in (1, 2)
        for steps in (1, 2)
        for clipping in ("global", "layerwise")
    }
    assert len(results) == 8


@pytest.mark.parametrize("seed", SEEDS)
def test_each_block_and_micro_batch_goes_forward_and_back_once_in_ascending_order(seed: int) -> None:
    model, policy, step_program = case(seed)
    micro_batches = list(range(policy.num_micro_batches))
    k, last = policy.checkpoint_interval, model.num_layers
    for program in (step_program.first, step_program.steady):
        passed: dict[tuple[Kind, int], list[int]] = {}
        for operation in program:
            if operation.micro_batch >= 0:
                passed.setdefault((operation.kind, operation.block), []).append(operation.micro_batch)
        for block in range(model.num_blocks - 1):
            assert passed.pop((Kind.FORWARD, block)) == micro_batches
            assert passed.pop((Kind.BACKWARD, block)) == micro_batches
        for block in model.layers:
            # All but the last of each segment run forward once more.
            ends_segment = block % k == 0 or block == last
            assert passed.pop((Kind.RECOMPUTE, block), []) == ([] if ends_segment else micro_batches)
            # What waits on the host leaves once, and comes back for each operation that reads it again.
            waits = policy.activation_homes[block - 1] == "host" and (block - 1) % k == 0
            assert passed.pop((Kind.STORE_ACTIVATION, block), []) == (micro_batches if waits else [])
            loads = sorted(passed.pop((Kind.LOAD_ACTIVATION, block), []))
            assert loads == sorted(micro_batches * (waits * (1 if ends_segment else 2)))
        assert passed.pop((Kind.LOSS, model.head)) == micro_batches
        assert passed.pop((Kind.LOAD_BATCH, -1)) == micro_batches
        assert not passed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_passes_a_layer_before_the_next_layer_and_before_the_next_group(seed: int) -> None:
    """But in depth-first layers a micro-batch goes up, through the loss and down before the next one of its group."""
    model, policy, step_program = case(seed)
    groups = group_of(policy)
    low, top = low_and_top(model, policy)
    expected = []
    for group in range(len(policy.groups)):
        inside = [m for m, at in groups.items() if at == group]
        if not top:
            upward = list(range(model.num_blocks))
            expected += [(block, m) for block in [*upward, *reversed(upward[:-1])] for m in inside]
        elif not low:  # a batch comes and goes alone
            expected += [(block, m) for m in inside for block in (0, *top, model.head, *reversed(top), 0)]
        else:
            expected += [(block, m) for block in (0, *low) for m in inside]
            expected += [(block, m) for m in inside for block in (*top, model.head, *reversed(top))]
            expected += [(block, m) for block in (*reversed(low), 0) for m in inside]
    assert passes(step_program) == expected
    for operation in step_program.steady:
        if operation.micro_batch >= 0:
            assert operation.group == groups[operation.micro_batch]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_micro_batch_writes_and_later_ones_add(seed: int) -> None:
    model, _, step_program = case(seed)
    for operation in step_program.steady:
        if operation.kind not in (Kind.LOSS, Kind.BACKWARD):
            assert not operation.first
            continue
        assert operation.first == (operation.micro_batch == 0)
        sums = {a for a in operation.writes if not a.content.startswith("grad_hidden")}
        assert len(sums) == (2 + model.tied_embeddings if operation.kind is Kind.LOSS else 1)
        assert sums.isdisjoint(operation.reads) if operation.first else sums.issubset(operation.reads)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_finished_once_after_the_last_backward_and_updates_read_them(seed: int) -> None:
    model, policy, step_program = case(seed)
    names = [operation.name for operation in step_program.steady]
    by_name = {operation.name: operation for operation in step_program.steady}
    last = policy.num_micro_batches - 1
    assert Counter(operation.kind for operation in step_program.steady)[Kind.FINISH_GRADIENT] == model.num_blocks
    for block in range(model.num_blocks):
        completes = f"loss.{last}" if block == model.head else f"backward.{block}.{last}"
        assert names.index(f"finish_gradient.{block}") > names.index(completes)
        finish, update = by_name[f"finish_gradient.{block}"], by_name[f"update.{block}"]
        gradient = next(access for access in finish.writes if access.content == f"gradient.{block}")
        on_host = policy.optimizer_homes[block] == "host"
        assert update.resource is (Resource.HOST if on_host else Resource.COMPUTE)
        if on_host:
            store = by_name[f"store_gradient.{block}"]
            assert store.reads == (gradient,)
            gradient = store.writes[0]
            assert step_program.buffers[gradient.buffer].tier is Tier.HOST
        else:
            assert f"store_gradient.{block}" not in by_name
        assert gradient in update.reads
        tier = Tier.HOST if on_host else Tier.DEVICE
        assert all(step_program.buffers[access.buffer].tier is tier for access in update.writes)
    if policy.clipping == "global":
        assert names.index("clip") > max(names.index(f"finish_gradient.{b}") for b in range(model.num_blocks))
    else:
        assert "clip" not in names


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("home", ["device", "host"])
def test_a_layer_sums_its_gradient_only_where_there_is_something_to_sum(home: Home, micro_batches: int) -> None:
    """One micro-batch's bf16 gradient is written where it waits, or leaves from; embedding and head sum tokens too."""
    model, workload = small_model(3), small_workload(micro_batches, gradient_format="bf16")
    policy = uniform_policy(
        model, workload, micro_batch_rows=1, groups=(micro_batches,), weights=home, optimizer=home
    )  # fmt: skip
    program = build(model, workload, policy)
    finished = [operation for operation in program.steady if operation.kind is Kind.FINISH_GRADIENT]
    for operation in finished:
        written = operation.block in model.layers and micro_batches == 1
        assert (operation.source("gradient_sum") == operation.target("gradient.")) == written
    sums = {name: b.num_bytes for name, b in program.buffers.items() if b.role is Role.ACCUMULATOR}
    edges = [4 * model.block(block).num_elements for block in (0, model.head)]
    everything = [4 * model.block(block).num_elements for block in range(model.num_blocks)]
    assert sums == {"device.accumulator": max(edges if micro_batches == 1 else everything)}


@pytest.mark.parametrize("seed", SEEDS)
def test_host_updates_are_launched_first(seed: int) -> None:
    """Launches wait for room in the GPU's queue, and the host would wait with them."""
    _, _, step_program = case(seed)
    pending = [operation for operation in step_program.drain if operation.kind is Kind.UPDATE]
    on_host = [operation.resource is Resource.HOST for operation in pending]
    assert on_host == sorted(on_host, reverse=True)
    for resource in (Resource.HOST, Resource.COMPUTE):
        blocks = [operation.block for operation in pending if operation.resource is resource]
        assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize("seed", SEEDS)
def test_updates_wait_for_the_next_step_only_under_exact_clipping(seed: int) -> None:
    model, policy, step_program = case(seed)

    def updates(program: Program) -> list[int]:
        return [operation.block for operation in program if operation.kind is Kind.UPDATE]

    everything = list(range(model.num_blocks))
    if policy.clipping == "global":
        assert updates(step_program.first) == []
        assert updates(step_program.steady) == updates(step_program.drain)
        # Low blocks first, in a line for each home of the state.
        for home in ("host", "device", "streamed"):
            line = [block for block in updates(step_program.steady) if policy.optimizer_homes[block] == home]
            assert line == [block for block in everything if policy.optimizer_homes[block] == home]
        # What the host updated and HBM holds comes back, also before a save or an evaluation.
        others = [operation.block for operation in step_program.drain if operation.name.endswith(".updated")]
        homes = zip(policy.optimizer_homes, policy.weight_homes, strict=True)
        assert others == [block for block, pair in enumerate(homes) if pair == ("host", "device")]
        # And all states are at home again.
        stored = [operation.block for operation in step_program.drain if operation.kind is Kind.STORE_STATE]
        assert stored == [block for block in everything if policy.optimizer_homes[block] == "streamed"]
    else:
        # As gradients complete: from the head down.
        assert updates(step_program.first) == updates(step_program.steady) == everything[::-1]
        assert len(step_program.drain) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_every_streamed_passage_reads_a_slot_that_holds_its_layer(seed: int) -> None:
    model, policy, step_program = case(seed)
    for program in (step_program.first, step_program.steady):
        held: dict[str, int] = {}
        for operation in program:
            if operation.kind is Kind.LOAD_WEIGHTS:
                held[operation.writes[0].buffer] = operation.block
            if operation.block not in model.layers or operation.kind not in (
                Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD,
            ):  # fmt: skip
                continue
            if policy.weight_homes[operation.block] == "host":
                assert held[slot_of(operation)] == operation.block
            else:
                assert f"device.weights.{operation.block}" in {access.buffer for access in operation.reads}


def least_loads(sequence: list[int], num_slots: int, depth: int) -> int:
    """By trying every choice: the fewest loads for a sequence of passages, when a load for passage i is issued before
    passage i - depth and so may only replace what no passage from there on reads.
    """

    @cache
    def least(at: int, held: frozenset[tuple[int, int]]) -> int:
        if at == len(sequence):
            return 0
        block = sequence[at]

        def then(kept: frozenset[tuple[int, int]]) -> int:
            # When a slot was read last matters only while it is too recent to replace.
            faded = {(b, last if last > at - depth else -1) for b, last in kept | {(block, at)}}
            return least(at + 1, frozenset(faded))

        present = [item for item in held if item[0] == block]
        if present:
            return then(held - set(present))
        choices = [held] if len(held) < num_slots else []
        choices += [held - {item} for item in held if item[1] < at - depth or item[1] < 0]
        return 1 + min(then(choice) for choice in choices)

    return least(0, frozenset())


def test_no_choice_of_slots_needs_fewer_loads() -> None:
    compared = 0
    for seed in range(160):
        model, policy, step_program = case(seed)
        sequence = streamed_visits(model, policy)
        if not sequence:
            continue
        num_slots = sum(buffer.role is Role.SLOT for buffer in step_program.buffers.values())
        fewest = least_loads(sequence, num_slots, policy.prefetch_depth)
        for program in (step_program.first, step_program.steady):
            loads = [o for o in program if o.kind is Kind.LOAD_WEIGHTS and ".slot." in o.writes[0].buffer]
            assert len(loads) == fewest
        compared += 1
    assert compared > 50


def test_top_layers_are_not_loaded_again_at_the_turn() -> None:
    model = small_model(6)
    for depth, loads in ((1, 6 + 4), (2, 6 + 3), (4, 6 + 1), (5, 6)):
        policy = uniform_policy(
            model, small_workload(2), micro_batch_rows=1, groups=(2,), weights="host", optimizer="host",
            prefetch_depth=depth,
        )  # fmt: skip
        program = build(model, small_workload(2), policy).first
        assert sum(operation.kind is Kind.LOAD_WEIGHTS for operation in program) == loads


@pytest.mark.parametrize("seed", SEEDS)
def test_loads_are_issued_as_many_passages_ahead_as_the_policy_says(seed: int) -> None:
    model, policy, step_program = case(seed)
    _, top = low_and_top(model, policy)
    # Position in the program of each streamed passage's first operation, and of its load.
    passages: list[int] = []
    loads: list[tuple[int, int, int]] = []
    before = None
    for position, operation in enumerate(step_program.first):
        if operation.kind is Kind.LOAD_WEIGHTS and operation.writes[0].buffer.startswith("device.slot."):
            loads.append((position, operation.block, len(passages)))
        elif operation.block in model.layers and slot_of(operation):
            alone = operation.micro_batch if operation.block in top else -1
            passage = (operation.kind, operation.block, operation.group, alone)
            if passage != before:
                passages.append(position)
            before = passage
    sequence = streamed_visits(model, policy)
    assert len(passages) == len(sequence)
    wanted = 0
    for position, block, begun in loads:
        # The load is for the first passage of its block from here on; it stands `depth` passages before it.
        wanted = next(index for index in range(max(begun, wanted), len(sequence)) if sequence[index] == block)
        ahead = min(policy.prefetch_depth, wanted)
        assert begun == wanted - ahead
        assert position < passages[wanted - ahead]


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_and_slabs_are_no_more_and_no_larger_than_what_uses_them(seed: int) -> None:
    model, policy, step_program = case(seed)
    used: dict[str, set[int]] = {}
    for operation in step_program.steady:
        for access in (*operation.reads, *operation.writes):
            used.setdefault(access.buffer, set()).add(operation.block)
    for role, count in ((Role.SLOT, policy.prefetch_depth + 1), (Role.SLAB, policy.gradient_slabs)):
        buffers = [buffer for buffer in step_program.buffers.values() if buffer.role is role]
        served = set().union(*(used.get(buffer.name, set()) for buffer in buffers))
        assert len(buffers) == min(count, len(served))
        for buffer in buffers:
            assert buffer.name in used
        if buffers:
            largest = max(model.block(block).num_elements for block in served)
            widths = {buffer.num_bytes / largest for buffer in buffers}
            assert widths <= {2, 4, 8}
            assert len(widths) == 1


def test_neighbouring_host_layers_never_share_a_slab() -> None:
    model, workload = small_model(7), small_workload(1)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,))
    homes = ("device", "host", "device", "host", "device", "host", "device", "host", "device")
    policy = policy.model_copy(update={"optimizer_homes": homes, "gradient_homes": homes})
    stores = [o for o in build(model, workload, policy).first if o.kind is Kind.STORE_GRADIENT]
    assert [store.block for store in stores] == [7, 5, 3, 1]
    slabs = [store.reads[0].buffer for store in stores]
    assert slabs[0] == slabs[2] != slabs[1] == slabs[3]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_declared_buffer_is_used_and_every_passing_one_is_released(seed: int) -> None:
    _, policy, step_program = case(seed)
    touched: set[str] = set()
    released: Counter[str] = Counter()
    for operation in step_program.steady:
        touched |= {access.buffer for access in (*operation.reads, *operation.writes)}
        released.update(operation.releases)
    # The staging of batches is the data loader's; no operation names it.
    assert touched == set(step_program.buffers) - {"host.batches"}
    passing = {name for name, buffer in step_program.buffers.items() if not buffer.persistent}
    assert set(released) == passing
    # With checkpoints k > 1 apart an input is freed in the forward and again when it was formed anew.
    assert set(released.values()) <= ({1} if policy.checkpoint_interval == 1 else {1, 2})


@pytest.mark.parametrize("seed", range(20))
def test_programs_survive_json_and_are_made_the_same_every_time(seed: int) -> None:
    model, workload, policy = random_case(seed)
    once, again = build(model, workload, policy), build(model, workload, policy)
    assert once == again
    for program in (once.first, once.steady, once.drain):
        back = Program.from_json(program.to_json())
        assert back == program
        assert back.buffers == program.buffers
        assert back.to_json() == program.to_json()
        assert all(isinstance(o.kind, Kind) and isinstance(o.resource, Resource) for o in back)


def test_a_printed_program_reads_as_the_step_goes() -> None:
    model, workload = small_model(2), small_workload(1)
    policy = uniform_policy(
        model, workload, micro_batch_rows=1, groups=(1,), weights="host", optimizer="host", save_level="input"
    )
    lines = build(model, workload, policy).steady.describe().splitlines()
    # Name, resource, waits. Written by hand: updates and loads of low layers first; the head's gradient and each
    # layer's leave as they complete; both layers stay in the two slots over the turn. loss.0 need not wait for
    # store_gradient.3@-1: it waits for the load of what update.3 wrote, and update.3 follows that store.
    expected = """
        update.0 host <- clip@-1 store_gradient.0@-1
        update.1 host
        update.2 host
        update.3 host
        load_batch.0 h2d <- backward.0.0@-1
        load_weights.0.updated h2d <- update.0
        forward.0.0 compute <- load_weights.0.updated
        load_weights.1.forward.0 h2d <- update.1
        load_weights.2.forward.0 h2d <- update.2
        forward.1.0 compute <- load_weights.1.forward.0
        load_weights.3.updated h2d <- update.3
        forward.2.0 compute <- load_weights.2.forward.0
        loss.0 compute <- load_weights.3.updated
        finish_gradient.3 compute
        store_gradient.3 d2h <- finish_gradient.3
        backward.2.0 compute
        finish_gradient.2 compute
        store_gradient.2 d2h <- finish_gradient.2
        backward.1.0 compute
        finish_gradient.1 compute
        store_gradient.1 d2h <- finish_gradient.1
        backward.0.0 compute
        finish_gradient.0 compute
        store_gradient.0 d2h <- finish_gradient.0
        clip compute
        report compute
    """
    found = []
    for line in lines:
        name, resource, *rest = line.split()
        waits = []
        if rest and rest[0] == "waits:":
            waits = rest[1 : next((i for i, word in enumerate(rest) if i and word.endswith(":")), len(rest))]
        found.append(" ".join([name, resource, *(["<-", *waits] if waits else [])]))
    assert found == [line.strip() for line in expected.strip().splitlines()]
    assert "reads: device.slot.1=weights.2 hidden.2.0" in lines[11]
    assert "releases: hidden.3.0" in lines[12]
