"""ModelSpec against transformers' own models and published parameter counts, and what bad configs are told."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import simulator.model
from simulator.errors import InputError, UnsupportedChoice
from simulator.formats import PRECISIONS
from simulator.model import ModelSpec, load_model_spec, model_spec, read_model_config

MODELS = Path(simulator.model.__file__).parent / "catalogue" / "models"


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "vocab_size": 67,
        "tie_word_embeddings": False,
    }
    return {"model_type": family, **sizes, **changes}


def transformers_model(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def named_tensors(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (spec.block_prefix(block) + tensor.name, tensor.shape)
        for block in range(spec.num_blocks)
        for tensor in spec.block(block).tensors
    ]


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_layers"),
    # Model cards say 7.61 B, 14.7 B, 1.23 B and 7.25 B; the exact counts are those of the published weights.
    [
        ("qwen2.5-7b", 7_615_616_512, 28),
        ("qwen2.5-14b", 14_770_033_664, 48),
        ("llama-3.2-1b", 1_235_814_400, 16),
        ("mistral-7b-v0.3", 7_248_023_552, 32),
    ],
)
def test_the_catalogue_s_models_have_their_published_numbers_of_parameters(
    name: str, num_parameters: int, num_layers: int
) -> None:
    spec = load_model_spec(MODELS / f"{name}.json")
    assert spec.num_parameters == num_parameters
    assert spec.num_layers == num_layers
    assert len(spec.kinds) == 3  # embedding, one layer many times, head
    assert spec.tied_embeddings == (name == "llama-3.2-1b")


def test_a_layer_of_qwen_has_the_parameters_that_its_shapes_give() -> None:
    spec = load_model_spec(MODELS / "qwen2.5-7b.json")
    hidden, inner, kv = 3584, 18944, 4 * 128
    attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv  # q, o, k, v and biases of q, k, v
    layer = attention + 3 * hidden * inner + 2 * hidden
    assert spec.block(1).num_parameters == layer
    assert spec.block(0).num_parameters == 152064 * hidden
    assert spec.block(spec.head).num_parameters == 152064 * hidden + hidden
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (28, 4, 128)


FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": None}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 6}),  # heads x head_dim is not the hidden size
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_every_tensor_of_transformers_state_dict_stands_in_one_block(
    family: str, changes: dict[str, Any], tied: bool
) -> None:
    settings = config(family, tie_word_embeddings=tied, **changes)
    spec = model_spec(settings)
    model = transformers_model(settings)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]  # the same tensor as the embedding
    found = named_tensors(spec)
    assert len(found) == len(expected)
    assert dict(found) == expected
    assert spec.num_parameters == sum(math.prod(shape) for shape in expected.values())
    assert spec.num_parameters == sum(spec.block(block).num_parameters for block in range(spec.num_blocks))
    assert spec.tied_embeddings == tied
    assert (spec.num_blocks, spec.head, spec.layers) == (5, 4, range(1, 4))


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_tensors_lie_on_256_bytes_in_the_narrowest_plane_and_never_overlap(
    family: str, changes: dict[str, Any]
) -> None:
    spec = model_spec(config(family, **changes))
    narrowest = min(precision.weight for precision in PRECISIONS.values())
    for kind in spec.kinds:
        used = torch.zeros(kind.num_elements, dtype=torch.int8)
        for tensor in kind.tensors:
            assert tensor.offset * narrowest % 256 == 0
            assert tensor.num_elements == math.prod(tensor.shape) > 0
            used[tensor.offset : tensor.offset + tensor.num_elements] += 1
        assert used.max() == 1
        assert int(used.sum()) == kind.num_parameters
        assert kind.num_elements * narrowest % 256 == 0
        assert kind.num_elements - kind.num_parameters < 128 * len(kind.tensors)  # padding only


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_weight_decay_covers_the_matrices_and_nothing_else(family: str, changes: dict[str, Any]) -> None:
    spec = model_spec(config(family, **changes))
    for kind in spec.kinds:
        for tensor in kind.tensors:
            last = tensor.offset + tensor.num_elements
            assert (
                last <= kind.num_matrix_elements if len(tensor.shape) > 1 else tensor.offset >= kind.num_matrix_elements
            )
    assert spec.block(spec.head).num_matrix_elements == 67 * 40 + (-67 * 40) % 128
    tied = model_spec(config(family, tie_word_embeddings=True, **changes))
    assert tied.block(tied.head).num_matrix_elements == 0


def test_layers_of_equal_shape_and_different_attention_are_different_kinds() -> None:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    spec = model_spec(config("qwen2", **window))
    assert [spec.block(block).variant for block in spec.layers] == [
        "full_attention",
        "full_attention",
        "sliding_attention",
    ]
    assert spec.kind_of_block == (0, 1, 1, 2, 3)
    assert spec.kinds[1].tensors == spec.kinds[2].tensors


def test_no_kind_is_listed_twice() -> None:
    for family, changes in FAMILIES:
        kinds = model_spec(config(family, **changes)).kinds
        assert len({kind.model_dump_json() for kind in kinds}) == len(kinds)


def test_a_spec_survives_a_file(tmp_path: Path) -> None:
    spec = model_spec(config("qwen3"))
    spec.save(tmp_path / "model.json")
    assert ModelSpec.load(tmp_path / "model.json") == spec


def test_a_folder_and_its_config_file_give_the_same_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("mistral")))
    assert load_model_spec(tmp_path) == load_model_spec(tmp_path / "config.json") == model_spec(config("mistral"))


def one_sentence(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert message
    assert "\n" not in message
    assert len(message) < 320
    return message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        ("", "is not JSON"),
        ("{'model_type': 'llama'}", "is not JSON"),
        ("[1, 2]", "has no key 'model_type'"),
        ("{}", "has no key 'model_type'"),
        ('"llama"', "has no key 'model_type'"),
    ],
)
def test_an_unreadable_config_is_named_with_its_path(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    for argument in (path, tmp_path):
        with pytest.raises(InputError) as error:
            read_model_config(argument)
        message = one_sentence(error)
        assert str(path) in message
        assert told in message


def test_a_config_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(InputError) as error:
        read_model_config(tmp_path)
    assert "config.json" in one_sentence(error)


@pytest.mark.parametrize("family", ["mixtral", "made_up", "", None, 7])
def test_a_family_that_is_not_built_is_refused_by_name(family: Any) -> None:
    with pytest.raises(UnsupportedChoice) as error:
        model_spec({**config(), "model_type": family})
    message = one_sentence(error)
    assert repr(family) in message
    assert "qwen2" in message


def test_a_quantized_model_is_refused() -> None:
    with pytest.raises(UnsupportedChoice, match="quantization_config"):
        model_spec(config(quantization_config={"quant_method": "gptq", "bits": 4}))


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True, [4]])
def test_an_impossible_size_is_named_with_its_value(family: str, key: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        model_spec(config(family, **{key: value}))
    message = one_sentence(error)
    assert key in message
    assert repr(value) in message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; no model has more than 4,096"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776; no model"),
        ({"num_key_value_heads": 10**400}, "num_key_value_heads is a number of so many digits"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a finite number"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300; it must lie between"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must lie between"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; it must lie between"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
            "rope_parameters.rope_theta is inf",
        ),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"initializer_range": float("nan")}, "initializer_range is nan"),
        ({"num_local_experts": 8}, "num_local_experts is 8, and llama models have no mixtures of experts"),
        ({"vision_config": {"hidden_size": 8}}, "llama models have no vision or audio"),
        ({"mamba_d_state": 16}, "llama models have no recurrent layers"),
    ],
)
def test_numbers_that_no_model_has_and_parts_that_its_family_lacks_are_named(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError) as error:
        model_spec(config("llama", **changes))
    assert told in one_sentence(error)


@pytest.mark.parametrize("changes", [{"num_experts": 1}, {"vision_config": None}, {"num_local_experts": 0}])
def test_parts_that_are_switched_off_are_none(changes: dict[str, Any]) -> None:
    assert model_spec(config("llama", **changes)) == model_spec(config("llama"))


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("qwen2", {"num_key_value_heads": 8}, "num_key_value_heads"),
        ("llama", {"head_dim": None, "hidden_size": 42}, "42"),
        ("qwen3", {"head_dim": 7}, "head_dim"),
        ("qwen2", {"head_dim": None, "hidden_size": 28}, "head_dim"),
        ("llama", {"hidden_act": "made_up"}, "made_up"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["made_up"] * 3}, "layer_types"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_impossible_combinations_are_named(family: str, changes: dict[str, Any], told: str) -> None:
    settings = {key: value for key, value in config(family, **changes).items() if value is not None}
    with pytest.raises(InputError) as error:
        model_spec(settings)
    assert told in one_sentence(error)


def tensors_of(spec: dict[str, Any]) -> dict[str, Any]:
    """The tensors of the embedding, in a spec's JSON."""
    found: dict[str, Any] = spec["kinds"][0]
    return found


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda spec: spec.update(family="lama"), "family: 'lama' is none of"),
        (lambda spec: spec.update(hidden_size=10**60), "hidden_size"),
        (
            lambda spec: spec.update(num_layers=2),
            "kind_of_block: has 5 entries; 2 layers with embedding and head are 4",
        ),
        (lambda spec: spec["kind_of_block"].__setitem__(1, 7), "kind_of_block: names a kind that is none of the 3"),
        (lambda spec: spec["kind_of_block"].__setitem__(0, -1), "kind_of_block: names a kind"),
        (lambda spec: spec["kind_of_block"].__setitem__(0, 1), "not an embedding, layers and a head"),
        (lambda spec: spec.update(kinds=[]), "kind_of_block: names a kind"),
        (lambda spec: tensors_of(spec).update(tensors=[]), "kinds.0.tensors"),
        (lambda spec: tensors_of(spec)["tensors"][0].update(shape=[67, -40]), "kinds.0.tensors.0.shape.1"),
        (lambda spec: tensors_of(spec)["tensors"][0].update(shape=[67, 41]), "num_parameters: .* hold"),
        (
            lambda spec: [tensor.update(frozen=True) for kind in spec["kinds"] for tensor in kind["tensors"]],
            "every tensor is frozen",
        ),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(tmp_path: Path, edit: Any, reason: str) -> None:
    spec = model_spec(config()).model_dump(mode="json")
    ModelSpec.model_validate(spec)
    edit(spec)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(InputError, match=reason):
        ModelSpec.load(tmp_path / "spec.json")


def test_what_a_spec_has_computed_stays_behind_when_it_is_copied_with_other_values() -> None:
    block = model_spec(config()).block(1)
    sizes = (block.num_elements, block.num_matrix_elements, block.trained_ranges)
    assert all(tensor.stride == torch.empty(tensor.shape, device="meta").stride() for tensor in block.tensors)
    first = block.tensors[0].model_copy(update={"shape": (3, 5, 7)})
    assert (first.num_elements, first.stride) == (105, (35, 7, 1))
    cut = block.model_copy(update={"tensors": (first,)})
    assert (cut.num_elements, cut.num_matrix_elements, cut.trained_ranges) == (128, 128, ((0, 128),))
    frozen = block.model_copy(update={"tensors": (first.model_copy(update={"frozen": True}),)})
    assert not frozen.trained
    assert frozen.trained_ranges == ()
    assert (block.num_elements, block.num_matrix_elements, block.trained_ranges) == sizes
    assert block == model_spec(config()).block(1)
