"""Workload and Policy: what contradicts itself or is not built yet is refused by name, never ignored."""

from typing import Any

import pydantic
import pytest
from small_models import random_case, small_model, small_workload

from simulator.errors import InputError, UnsupportedChoice
from simulator.policy import EAGER_SAVE_LEVELS, SAVE_LEVELS, Policy, Workload, check_policy, uniform_policy

MODEL = small_model(3)
TIED = small_model(3, tied=True)
WORKLOAD = small_workload(4)
POLICY = uniform_policy(MODEL, WORKLOAD, micro_batch_rows=1, groups=(2, 2))


def streamed(**changes: Any) -> Policy:
    policy = uniform_policy(MODEL, WORKLOAD, micro_batch_rows=1, groups=(2, 2), weights="host", optimizer="host")
    return policy.model_copy(update=changes)


def refusal(policy: Policy, workload: Workload = WORKLOAD, model: Any = MODEL) -> tuple[type[InputError], str]:
    with pytest.raises(InputError) as error:
        check_policy(policy, model, workload)
    message = str(error.value)
    assert "\n" not in message
    return error.type, message


@pytest.mark.parametrize(("optimizer", "weights"), [("device", "device"), ("host", "device"), ("host", "host")])
@pytest.mark.parametrize("save_level", list(SAVE_LEVELS))
@pytest.mark.parametrize("groups", [(4,), (1, 1, 1, 1), (3, 1), (1, 3)])
def test_what_is_built_is_accepted(optimizer: Any, weights: Any, save_level: Any, groups: tuple[int, ...]) -> None:
    policy = uniform_policy(
        MODEL, WORKLOAD, micro_batch_rows=1, groups=groups, weights=weights, save_level=save_level, optimizer=optimizer
    )
    check_policy(policy, MODEL, WORKLOAD)


@pytest.mark.parametrize("depth_first", [1, 2, 3])
@pytest.mark.parametrize("groups", [(4,), (1, 1, 1, 1), (3, 1)])
def test_any_number_of_the_model_s_layers_may_be_depth_first(depth_first: int, groups: tuple[int, ...]) -> None:
    policy = uniform_policy(MODEL, WORKLOAD, micro_batch_rows=1, groups=groups, depth_first_layers=depth_first)
    check_policy(policy, MODEL, WORKLOAD)
    assert [block for block in range(5) if policy.depth_first(block, 3)] == list(range(4 - depth_first, 5))


def test_more_depth_first_layers_than_the_model_has_are_refused() -> None:
    kind, message = refusal(POLICY.model_copy(update={"depth_first_layers": 4}))
    assert kind is InputError
    assert message == "policy.depth_first_layers: 4, but the model has 3 layers"


def test_policies_without_depth_first_layers_are_written_as_they_ever_were() -> None:
    """Hashes of older plans hold."""
    assert "depth_first_layers" not in POLICY.model_dump()
    some = POLICY.model_copy(update={"depth_first_layers": 2})
    assert some.model_dump() == {**POLICY.model_dump(), "depth_first_layers": 2}


def test_random_policies_of_the_other_tests_have_depth_first_layers_of_every_sort() -> None:
    clippings, formats = set(), set()
    for seed in range(200):
        model, _, policy = random_case(seed)
        if policy.depth_first_layers and policy.num_micro_batches > 1:
            one_group, everything = len(policy.groups) == 1, policy.depth_first_layers == model.num_layers
            clippings.add((policy.clipping, one_group, everything))
            formats.add((policy.gradient_format, one_group, everything))
    assert (len(clippings), len(formats)) == (3 * 2 * 2, 2 * 2 * 2)  # all there are


def test_random_policies_of_the_other_tests_are_accepted() -> None:
    for seed in range(200):
        model, workload, policy = random_case(seed)
        check_policy(policy, model, workload)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"state_format": "8bit"}, ("state_format", "8bit")),
        ({"mlp_chunk_tokens": 64}, ("mlp_chunk_tokens",)),
        ({"weight_homes": ("device", "nvme", "device", "device", "device")}, ("weight_homes", "nvme")),
        ({"activation_homes": ("device", "nvme", "device")}, ("activation_homes", "nvme")),
        ({"gradient_homes": ("nvme",) * 5}, ("gradient_homes", "nvme")),
        ({"optimizer_homes": ("device",) * 4 + ("nvme",)}, ("optimizer_homes", "nvme")),
        ({"optimizer_homes": ("device", "device", "device", "device", "streamed")}, ("optimizer_homes", "head")),
        ({"optimizer_homes": ("streamed", "device", "device", "device", "device")}, ("optimizer_homes", "embedding")),
        ({"gradient_homes": ("device", "host", "device", "device", "device")}, ("gradient_homes", "block 1")),
        ({"checkpoint_interval": 2}, ("checkpoint_interval", "input")),
        ({"checkpoint_interval": 2, "save_levels": ("input", "keep", "input")}, ("checkpoint_interval", "input")),
        (
            {"checkpoint_interval": 2, "save_levels": ("input",) * 3, "depth_first_layers": 1},
            ("depth_first_layers", "checkpoint_interval 1"),
        ),
    ],
)
def test_a_choice_that_is_not_built_is_refused_by_name(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    workload = WORKLOAD.model_copy(update={key: changes[key] for key in ("state_format",) if key in changes})
    kind, message = refusal(POLICY.model_copy(update=changes), workload)
    assert kind is UnsupportedChoice
    for name in names:
        assert name in message


@pytest.mark.parametrize("place", [0, -1])
def test_streaming_the_edges_is_refused_by_name(place: int) -> None:
    homes = ["device"] * 5
    homes[place] = "host"
    policy = streamed(weight_homes=tuple(homes))
    kind, message = refusal(policy)
    assert kind is UnsupportedChoice
    assert "weight_homes" in message
    assert "embedding" in message


@pytest.mark.parametrize("level", [level for level in SAVE_LEVELS if level not in EAGER_SAVE_LEVELS])
def test_an_eager_run_knows_no_levels_between_the_ends(level: Any) -> None:
    workload = small_workload(4, compiled=False)
    kind, message = refusal(POLICY.model_copy(update={"save_levels": ("keep", level, "input")}), workload)
    assert kind is UnsupportedChoice
    assert level in message
    for known in EAGER_SAVE_LEVELS:
        check_policy(POLICY.model_copy(update={"save_levels": (known,) * 3}), MODEL, workload)


@pytest.mark.parametrize(
    "field", ["weight_homes", "gradient_homes", "optimizer_homes", "save_levels", "activation_homes"]
)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_tuple_of_the_wrong_length_names_the_field_and_both_lengths(field: str, change: int) -> None:
    entries = getattr(POLICY, field)
    wrong = entries[:change] if change < 0 else (*entries, entries[0])
    kind, message = refusal(POLICY.model_copy(update={field: wrong}))
    assert kind is InputError
    assert f"policy.{field}" in message
    assert str(len(entries)) in message
    assert str(len(wrong)) in message


@pytest.mark.parametrize(("sizes", "named"), [((), "layer 2"), ((4096, 0, 4096), "layer 2"), ((4096,), "needs 3")])
def test_what_a_layer_saves_on_the_host_needs_room_there(sizes: tuple[int, ...], named: str) -> None:
    waiting = POLICY.model_copy(update={"activation_homes": ("device", "host", "device"), "saved_bytes": sizes})
    kind, message = refusal(waiting)
    assert kind is InputError
    assert "policy.saved_bytes" in message
    assert named in message
    check_policy(waiting.model_copy(update={"saved_bytes": (0, 1, 0)}), MODEL, WORKLOAD)
    check_policy(waiting.model_copy(update={"saved_bytes": (), "save_levels": ("input",) * 3}), MODEL, WORKLOAD)


def test_micro_batches_must_make_up_the_step() -> None:
    for groups, rows in (((2, 1), 1), ((2, 3), 1), ((2, 2), 2)):
        kind, message = refusal(POLICY.model_copy(update={"groups": groups, "micro_batch_rows": rows}))
        assert kind is InputError
        assert "4 rows of a step" in message


@pytest.mark.parametrize("groups", [(4, 0), (0, 4), (5, -1)])
def test_a_group_without_micro_batches_is_refused(groups: tuple[int, ...]) -> None:
    kind, message = refusal(POLICY.model_copy(update={"groups": groups}))
    assert kind is InputError
    assert "policy.groups" in message


def test_the_users_micro_batch_pins_the_policy() -> None:
    workload = small_workload(4, micro_batch_rows=2)
    kind, message = refusal(POLICY, workload)
    assert kind is InputError
    assert "micro_batch_rows: 1" in message
    assert "pins 2" in message
    check_policy(POLICY, MODEL, small_workload(4, micro_batch_rows=1))


@pytest.mark.parametrize(
    ("field", "chosen"), [("clipping", "none"), ("gradient_format", "bf16"), ("state_format", "8bit")]
)
def test_a_policy_may_not_change_the_users_numbers(field: str, chosen: str) -> None:
    kind, message = refusal(POLICY, small_workload(4, **{field: chosen}))
    assert kind is InputError
    assert f"policy.{field}" in message
    assert chosen in message


def test_state_in_hbm_beside_streamed_weights_contradicts_itself() -> None:
    optimizers = ("host", "host", "device", "host", "host")
    kind, message = refusal(streamed(optimizer_homes=optimizers, gradient_homes=optimizers))
    assert kind is InputError
    assert "block 2" in message
    assert "resident" in message


def test_a_host_update_needs_its_gradient_on_the_host() -> None:
    kind, message = refusal(streamed(gradient_homes=("host", "host", "host", "device", "host")))
    assert kind is InputError
    assert "block 3" in message
    assert "gradient" in message


@pytest.mark.parametrize("homes", [("host", "device"), ("device", "host")])
def test_tied_embeddings_have_one_optimizer_home(homes: tuple[Any, Any]) -> None:
    first, last = homes
    optimizers = (first, "device", "device", "device", last)
    policy = POLICY.model_copy(update={"optimizer_homes": optimizers, "gradient_homes": optimizers})
    check_policy(policy, MODEL, WORKLOAD)
    kind, message = refusal(policy, model=TIED)
    assert kind is InputError
    assert "tied" in message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens_per_step": 17}, "tokens_per_step 17 is not a multiple of sequence_length 4"),
        ({"micro_batch_rows": 3}, "micro_batch_size 3 does not divide the 4 rows of a step"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"tokens_per_step": -4}, "tokens_per_step"),
        ({"precision": "fp16"}, "precision"),
        ({"clipping": "sometimes"}, "clipping"),
        ({"sequence_lenght": 4}, "sequence_lenght"),
    ],
)
def test_an_impossible_workload_names_the_key(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=told):
        small_workload(4, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_rows": 0},
        {"groups": ()},
        {"prefetch_depth": 0},
        {"checkpoint_interval": 0},
        {"depth_first_layers": -1},
        {"gradient_slabs": 1},
        {"head_chunk_tokens": 0},
        {"mlp_chunk_tokens": -1},
        {"save_levels": ("keep", "keep", "budget_60")},
        {"weight_homes": ("device", "disk", "device", "device", "device")},
        {"prefetch": 2},
    ],
)
def test_an_impossible_policy_names_the_key(changes: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError, match=next(iter(changes))):
        Policy(**{**POLICY.model_dump(), **changes})


def test_a_policy_survives_json() -> None:
    for seed in range(20):
        _, workload, policy = random_case(seed)
        assert Policy.model_validate_json(policy.model_dump_json()) == policy
        assert Workload.model_validate_json(workload.model_dump_json()) == workload


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_checkpoints_are_every_kth_layer_input_from_the_first(interval: int) -> None:
    policy = POLICY.model_copy(update={"checkpoint_interval": interval})
    assert [layer for layer in range(1, 8) if policy.kept_input(layer)] == list(range(1, 8, interval))
