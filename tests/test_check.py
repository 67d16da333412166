"""The checker against mutated programs, judged by explicit reachability and by running programs on symbols."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from reachability import races
from small_models import random_case, small_model, small_workload
from symbolic_run import TORN, plain_training, run_in_order, run_shuffled

from simulator.build import build
from simulator.check import check
from simulator.dependencies import derive_waits
from simulator.errors import ProgramError
from simulator.model import ModelSpec
from simulator.policy import Clipping, OptimizerHome, Policy, uniform_policy
from simulator.program import Access, Buffer, Kind, Operation, Program, Resource, Role, StepProgram, Tier, Wait

VARIANTS = ("first", "steady", "drain")
Change = Callable[[Operation], Operation]


def replaced(step_program: StepProgram, variant: str, operations: tuple[Operation, ...]) -> StepProgram:
    return replace(step_program, **{variant: replace(getattr(step_program, variant), operations=operations)})


def changed(step_program: StepProgram, name: str, change: Change, variants: tuple[str, ...] = VARIANTS) -> StepProgram:
    """The program with one operation changed, in every variant that has it."""
    for variant in variants:
        program = getattr(step_program, variant)
        operations = tuple(change(operation) if operation.name == name else operation for operation in program)
        step_program = replaced(step_program, variant, operations)
    return step_program


def streamed_program(num_layers: int = 3, groups: tuple[int, ...] = (1, 1)) -> StepProgram:
    """Everything on the host, one layer loaded ahead, exact clipping: most waits of all policies."""
    model, workload = small_model(num_layers), small_workload(sum(groups))
    return build(
        model, workload,
        uniform_policy(model, workload, micro_batch_rows=1, groups=groups, weights="host", optimizer="host"),
    )  # fmt: skip


def single_drops(step_program: StepProgram) -> Iterator[tuple[str, Operation, Wait, StepProgram]]:
    for variant in VARIANTS:
        operations = getattr(step_program, variant).operations
        for place, operation in enumerate(operations):
            for wait in operation.waits:
                kept = tuple(other for other in operation.waits if other != wait)
                mutant = (*operations[:place], operation.with_waits(kept), *operations[place + 1 :])
                yield variant, operation, wait, replaced(step_program, variant, mutant)


def passes(step_program: StepProgram) -> bool:
    try:
        check(step_program)
    except ProgramError:
        return False
    return True


def refusal(step_program: StepProgram) -> str:
    with pytest.raises(ProgramError) as error:
        check(step_program)
    return str(error.value)


@pytest.mark.parametrize("seed", range(100))
def test_built_programs_have_no_unordered_conflict(seed: int) -> None:
    step_program = build(*random_case(seed))
    assert races(step_program) == []
    check(step_program)


def test_every_wait_is_needed_and_the_checker_misses_none() -> None:
    dropped = 0
    for seed in range(24):
        step_program = build(*random_case(seed))
        if len(step_program.steady) > 90:
            continue
        for variant, operation, wait, mutant in single_drops(step_program):
            where = f"seed {seed}: {variant}: {operation.name} without {wait}"
            assert races(mutant), f"{where} is as safe as before: the wait is redundant"
            assert not passes(mutant), f"{where} passes the checker"
            dropped += 1
    assert dropped > 200


def test_a_dropped_wait_is_reported_with_operation_and_buffer() -> None:
    for _, operation, _, mutant in single_drops(streamed_program()):
        message = refusal(mutant)
        conflicts = races(mutant)
        assert any(
            later in message and earlier in message and buffer in message for earlier, later, buffer in conflicts
        )
        assert "does not wait" in message
        assert operation.name in {later for _, later, _ in conflicts}


def test_weaker_waits_fail_and_stronger_ones_pass() -> None:
    step_program = streamed_program()
    operations = step_program.steady.operations
    position = {operation.name: place for place, operation in enumerate(operations)}
    compared = Counter[bool]()
    for place, operation in enumerate(operations):
        for wait in operation.waits:
            if wait.step_offset:
                continue
            awaited = operations[position[wait.operation]]
            for other in operations[:place]:
                if other.resource is not awaited.resource or other is awaited:
                    continue
                waits = tuple(Wait(other.name, 0) if item == wait else item for item in operation.waits)
                mutant = changed(step_program, operation.name, lambda o, waits=waits: o.with_waits(waits), ("steady",))
                safe = not races(mutant)
                assert safe == (position[other.name] > position[awaited.name])
                assert passes(mutant) == safe
                compared[safe] += 1
    assert min(compared.values()) > 10


@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving_that_keeps_to_the_waits_gives_the_plain_loops_weights(seed: int) -> None:
    model, workload, policy = random_case(seed)
    step_program = build(model, workload, policy)
    expected = plain_training(model, policy.num_micro_batches, 3, clipping=policy.clipping)
    for shuffle in range(3):
        run = ("first", "steady", "steady", "drain")
        machine = run_shuffled(model, step_program, run, random.Random(shuffle))
        assert machine.weights() == expected


def test_interleavings_find_most_of_the_dropped_waits() -> None:
    # The judge judged: with a wait missing, some order of the streams tears a value.
    model = small_model(3)
    expected = plain_training(model, 2, 3, clipping="global")
    found = Counter[bool]()
    for *_, mutant in single_drops(streamed_program()):
        runs = (
            run_shuffled(model, mutant, ("first", "steady", "steady", "drain"), random.Random(seed)).weights()
            for seed in range(30)
        )
        found[any(weights != expected for weights in runs)] += 1
    assert found[True] > 3 * found[False]


def computes_the_same(model: ModelSpec, policy: Policy, step_program: StepProgram) -> bool:
    runs = (("first", "drain"), ("first", "steady", "steady", "drain"))
    try:
        return all(
            run_in_order(model, step_program, run).weights()
            == plain_training(model, policy.num_micro_batches, len(run) - 1, clipping=policy.clipping)
            for run in runs
        )
    except (KeyError, AssertionError, StopIteration):
        return False


def mutate(step_program: StepProgram, draw: random.Random) -> tuple[str, StepProgram]:
    """One mistake that a builder could make: in one variant or all, with waits derived for what came out."""
    orders = {variant: list(getattr(step_program, variant)) for variant in VARIANTS}
    mistake = draw.choice(("drop", "swap", "repeat", "wrong buffer", "late", "early"))
    variants = [variant for variant in VARIANTS if orders[variant]]
    chosen = draw.choice(variants)
    name, other = draw.choice(orders[chosen]).name, draw.choice(orders[chosen]).name
    for variant in [chosen] if draw.random() < 0.6 else variants:
        operations = orders[variant]
        places = {operation.name: place for place, operation in enumerate(operations)}
        if name not in places or other not in places:
            continue
        here, there = places[name], places[other]
        operation = operations[here]
        if mistake == "drop":
            del operations[here]
        elif mistake == "swap":
            operations[here], operations[there] = operations[there], operation
        elif mistake == "repeat":
            operations.insert(there, replace(operation, name=f"{name}.again"))
        elif mistake == "late":
            operations.append(operations.pop(here))
        elif mistake == "early":
            operations.insert(0, operations.pop(here))
        elif operation.reads:
            number = draw.randrange(len(operation.reads))
            role = step_program.buffers[operation.reads[number].buffer].role
            alike = [buffer for buffer in step_program.buffers if step_program.buffers[buffer].role is role]
            access = Access(draw.choice(alike), operation.reads[number].content)
            reads = (*operation.reads[:number], access, *operation.reads[number + 1 :])
            operations[here] = replace(operation, reads=reads)
    bare = {variant: [operation.with_waits(()) for operation in orders[variant]] for variant in VARIANTS}
    for variant, operations in derive_waits(bare).items():
        step_program = replaced(step_program, variant, operations)
    return mistake, step_program


def test_what_the_checker_passes_computes_what_plain_training_computes() -> None:
    verdicts = Counter[tuple[str, bool]]()
    for seed in range(80):
        model, workload, policy = random_case(seed)
        step_program = build(model, workload, policy)
        if len(step_program.steady) > 80:
            continue
        draw = random.Random(seed)
        for _ in range(12):
            mistake, mutant = mutate(step_program, draw)
            verdicts[(mistake, passes(mutant))] += 1
            if passes(mutant):
                assert races(mutant) == []
                assert computes_the_same(model, policy, mutant), f"seed {seed}: {mistake}"
    for mistake in ("drop", "swap", "repeat", "wrong buffer", "late", "early"):
        assert verdicts[(mistake, False)] > 40


def with_waits_derived(step_program: StepProgram, orders: dict[str, list[Operation]]) -> StepProgram:
    for variant, operations in derive_waits(orders).items():
        step_program = replaced(step_program, variant, operations)
    return step_program


def reordered(step_program: StepProgram, name: str, **before: str) -> StepProgram:
    """In each variant named, one operation moved to stand before another ('' for the end); waits derived anew."""
    orders = {variant: [o.with_waits(()) for o in getattr(step_program, variant)] for variant in VARIANTS}
    for variant, other in before.items():
        operations = orders[variant]
        moved = operations.pop([operation.name for operation in operations].index(name))
        names = [operation.name for operation in operations]
        operations.insert(names.index(other) if other else len(names), moved)
    return with_waits_derived(step_program, orders)


def without(step_program: StepProgram, name: str, variants: tuple[str, ...] = VARIANTS) -> StepProgram:
    orders = {
        variant: [
            operation.with_waits(())
            for operation in getattr(step_program, variant)
            if variant not in variants or operation.name != name
        ]
        for variant in VARIANTS
    }
    return with_waits_derived(step_program, orders)


def test_a_wait_that_points_forward_is_a_deadlock() -> None:
    program = streamed_program()
    forward = Wait("backward.0.1", 0)
    message = refusal(changed(program, "forward.1.0", lambda o: o.with_waits((*o.waits, forward))))
    assert "forward.1.0 waits for backward.0.1, which does not come before it" in message
    itself = refusal(changed(program, "forward.1.0", lambda o: o.with_waits((Wait("forward.1.0", 0),))))
    assert "forward.1.0 waits for forward.1.0" in itself


@pytest.mark.parametrize("wait", [Wait("no_such", 0), Wait("no_such", -1), Wait("clip", -2), Wait("clip", 1)])
def test_a_wait_for_what_never_runs_is_refused(wait: Wait) -> None:
    message = refusal(changed(streamed_program(), "forward.1.0", lambda o: o.with_waits((wait,))))
    assert "forward.1.0 waits for" in message
    assert wait.operation in message


def test_two_operations_of_one_name_are_refused() -> None:
    program = streamed_program()
    operations = program.steady.operations
    message = refusal(replaced(program, "steady", (*operations, operations[-1])))
    assert "two operations are called report" in message


def test_a_release_that_is_missing_is_a_leak() -> None:
    def forget(operation: Operation) -> Operation:
        return replace(operation, releases=tuple(n for n in operation.releases if n != "saved.2.1"))

    assert "never releases saved.2.1" in refusal(changed(streamed_program(), "backward.2.1", forget))


def test_a_release_that_comes_twice_is_refused() -> None:
    message = refusal(
        changed(streamed_program(), "backward.2.1", lambda o: replace(o, releases=(*o.releases, o.releases[0])))
    )
    assert "backward.2.1 (step 0) releases hidden.2.1" in message
    other = refusal(
        changed(streamed_program(), "backward.1.1", lambda o: replace(o, releases=(*o.releases, "saved.2.1")))
    )
    assert "backward.1.1 (step 0) releases saved.2.1" in other


def test_reading_after_release_is_refused() -> None:
    saved = Access("saved.2.1", "saved.2.1")
    message = refusal(changed(streamed_program(), "backward.1.1", lambda o: replace(o, reads=(*o.reads, saved))))
    assert "backward.1.1 (step 0) reads saved.2.1, which is not allocated" in message
    early = replace_release(streamed_program(), "hidden.3.0", "backward.3.0", "loss.0")
    assert "backward.3.0 (step 0) reads hidden.3.0, which is not allocated" in refusal(early)


def replace_release(step_program: StepProgram, buffer: str, owner: str, instead: str) -> StepProgram:
    step_program = changed(
        step_program, owner, lambda o: replace(o, releases=tuple(name for name in o.releases if name != buffer))
    )
    return changed(step_program, instead, lambda o: replace(o, releases=(*o.releases, buffer)))


def test_a_release_on_another_stream_counts_as_a_use() -> None:
    # The copy stream frees batch.0 in order, but then the next step's batch must wait for that.
    program = streamed_program()
    stores = [operation.name for operation in program.steady if operation.kind is Kind.STORE_GRADIENT]
    moved = replace_release(program, "batch.0", "backward.0.0", stores[-1])
    assert races(moved)
    message = refusal(moved)
    assert "load_batch.0 (step 1) does not wait: batch.0" in message
    assert stores[-1] in message


@pytest.mark.parametrize("name", ["device.weights.0", "host.weights.1", "device.loss"])
def test_persistent_buffers_are_nobodys_to_release(name: str) -> None:
    message = refusal(changed(streamed_program(), "report", lambda o: replace(o, releases=(name,))))
    assert f"report (step 0) releases {name}, which is not its to release" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda o: replace(o, reads=(*o.reads, Access("nowhere", "nowhere"))),
        lambda o: replace(o, writes=(*o.writes, Access("nowhere", "nowhere"))),
        lambda o: replace(o, releases=("nowhere",)),
    ],
)
def test_buffers_must_be_declared(change: Change) -> None:
    message = refusal(changed(streamed_program(), "forward.1.0", change))
    assert "forward.1.0 uses undeclared buffers ['nowhere']" in message


def test_the_wrong_slot_is_refused() -> None:
    def other_slot(operation: Operation) -> Operation:
        reads = [
            Access(
                {"device.slot.0": "device.slot.1", "device.slot.1": "device.slot.0"}.get(a.buffer, a.buffer), a.content
            )
            for a in operation.reads
        ]
        return replace(operation, reads=tuple(reads))

    message = refusal(changed(streamed_program(), "backward.3.0", other_slot))
    assert "backward.3.0 (step 0) expects weights.3 in device.slot" in message
    assert "found weights.2" in message


def test_a_value_before_it_is_made_is_refused() -> None:
    message = refusal(reordered(streamed_program(), "clip", first="finish_gradient.1", steady="finish_gradient.1"))
    assert "clip (step 0) expects device.norm.0 in device.norm.0, found None" in message


def test_old_weights_in_a_slot_are_refused() -> None:
    late = reordered(streamed_program(), "update.1", steady="forward.1.0", drain="load_weights.4.updated")
    message = refusal(late)
    assert "forward.1.0 (step 1) reads weights.1 in device.slot" in message
    assert "which is not the latest one" in message


@pytest.mark.parametrize("clipping", ["global", "none"])
def test_weights_that_do_not_come_back_to_the_device_are_refused(clipping: Clipping) -> None:
    model, workload = small_model(2), small_workload(1, clipping=clipping)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1,), optimizer="host")
    program = build(model, workload, policy)
    check(program)
    message = refusal(without(program, "load_weights.1.updated"))
    assert "forward.1.0 (step 1) reads weights.1 in device.weights.1, which is not the latest one" in message
    if clipping == "global":  # after a save the next step reads them too
        message = refusal(without(program, "load_weights.1.updated", ("drain",)))
        assert "forward.1.0 (step 5) reads weights.1 in device.weights.1, which is not the latest one" in message


@pytest.mark.parametrize("optimizer", ["device", "host"])
@pytest.mark.parametrize("clipping", ["global", "layerwise"])
def test_an_update_that_is_left_out_is_refused(clipping: Clipping, optimizer: OptimizerHome) -> None:
    model, workload = small_model(2), small_workload(2, clipping=clipping)
    policy = uniform_policy(model, workload, micro_batch_rows=1, groups=(1, 1), optimizer=optimizer)
    program = build(model, workload, policy)
    assert "gradient.2" in refusal(without(program, "update.2"))
    if clipping == "global":
        message = refusal(without(program, "update.2", ("drain",)))
        assert "gradient.2" in message or "not the latest" in message


def test_a_gradient_that_is_overwritten_before_its_update_is_refused() -> None:
    message = refusal(reordered(streamed_program(), "update.2", steady="report", drain=""))
    assert "overwrites gradient.2 in host.gradient.2, which nothing has read" in message


def test_micro_batches_out_of_order_are_refused() -> None:
    # In both variants, so that neither contradicts the other: sums would be rounded otherwise.
    program = streamed_program(groups=(3,))
    message = refusal(reordered(program, "backward.2.2", first="backward.2.1", steady="backward.2.1"))
    assert "backward.2.1 follows backward.2.2" in message


def test_an_operation_may_not_run_twice() -> None:
    program = streamed_program()
    update = next(operation for operation in program.drain if operation.name == "update.2")
    twice = replaced(program, "drain", (*program.drain.operations, replace(update, name="update.2.again")))
    assert "update.2.again follows update.2" in refusal(twice)


def test_variants_may_not_contradict_each_other() -> None:
    program = streamed_program()
    assert "steady lacks report, which first has" in refusal(without(program, "report", ("steady",)))
    message = refusal(changed(program, "forward.1.0", lambda o: replace(o, level="input"), ("steady",)))
    assert "first has forward.1.0 where steady has forward.1.0, or another form of it" in message


def test_torn_values_spread_to_all_that_is_computed_from_them() -> None:
    model = small_model(1)
    machine = run_in_order(model, streamed_program(1, (1,)), ("first", "drain"))
    assert TORN not in machine.weights().values()
    buffers = {"x": Buffer("x", Tier.DEVICE, Role.WEIGHTS, 8, 0), "y": Buffer("y", Tier.DEVICE, Role.SLOT, 8)}
    copy = Operation("copy", Kind.LOAD_WEIGHTS, Resource.H2D, 0, reads=(Access("z", "w"),), writes=(Access("y", "w"),))
    programs = [Program(variant, (copy,) if variant == "first" else (), buffers) for variant in VARIANTS]
    machine = run_in_order(model, StepProgram(*programs, buffers), ("first",))
    assert machine.buffers["y"] == TORN
