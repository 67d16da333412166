"""The base of all schemas: what is refused, what is told, and hashes that depend on content alone."""

from pathlib import Path

import pydantic
import pytest

from simulator.errors import InputError
from simulator.policy import Workload
from simulator.schema import Schema, identity_hash, validated

WORKLOAD = Workload(sequence_length=8, tokens_per_step=64)


def test_a_schema_cannot_be_changed() -> None:
    with pytest.raises(pydantic.ValidationError):
        WORKLOAD.sequence_length = 9  # type: ignore[misc]


def test_numbers_that_are_none_are_refused() -> None:
    class Point(Schema):
        x: float

    for value in (float("nan"), float("inf")):
        with pytest.raises(pydantic.ValidationError, match="finite"):
            Point(x=value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b"[]", "is not a table of keys"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"sequence_length": 8, "tokens_per_step": 64, "tokens": 1}', "tokens: "),
        (b'{"sequence_length": 8}', "tokens_per_step: "),
        (b'{"sequence_length": 8, "tokens_per_step": 63}', "tokens_per_step 63 is not a multiple of sequence_length 8"),
        (b'{"sequence_length": 0, "tokens_per_step": "many"}', "sequence_length: "),
    ],
)
def test_a_bad_file_is_told_in_one_line_with_its_path(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "workload.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        Workload.load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert told in message
    assert "\n" not in message


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text('{"sequence_length": 0, "tokens_per_step": "many", "clipping": "x"}')
    with pytest.raises(InputError) as error:
        Workload.load(path)
    for key in ("sequence_length", "tokens_per_step", "clipping"):
        assert f"{key}: " in str(error.value)


def test_a_file_of_another_kind_is_told_by_a_few_mistakes_unknown_keys_first(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 4, "model_type": "llama"}')
    with pytest.raises(InputError) as error:
        Workload.load(path)
    message = str(error.value)
    assert message.index("hidden_size: ") < message.index("vocab_size: ") < message.index("num_hidden_layers: ")
    assert message.endswith("and 3 more mistakes: is this the right file?")  # model_type and the two required keys


def test_values_of_a_user_are_refused_as_wrong_input() -> None:
    assert validated(Workload, sequence_length=8, tokens_per_step=64) == WORKLOAD
    with pytest.raises(InputError) as error:
        validated(Workload, sequence_length=0, tokens_per_step=64, clip="none")
    message = str(error.value)
    assert "sequence_length: " in message
    assert "clip: " in message
    assert "\n" not in message


def test_a_list_with_a_wrong_entry_is_not_called_too_short() -> None:
    class Row(Schema):
        case: str

    class Rows(Schema):
        rows: tuple[Row, ...] = pydantic.Field(min_length=1)

    with pytest.raises(InputError, match=r"^rows\.0\.cse: unknown key$"):
        validated(Rows, rows=[{"case": "a", "cse": "a"}])
    with pytest.raises(InputError, match=r"^rows: has too few entries, it needs 1$"):
        validated(Rows, rows=[])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.json: does not exist"):
        Workload.load(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be read"):
        Workload.load(tmp_path)


def test_a_file_reads_back_as_it_was(tmp_path: Path) -> None:
    WORKLOAD.save(tmp_path / "workload.json")
    assert Workload.load(tmp_path / "workload.json") == WORKLOAD
    assert (tmp_path / "workload.json").read_text(encoding="utf-8").endswith("}\n")


def test_hashes_depend_on_content_alone() -> None:
    assert identity_hash({"a": 1, "b": [1, 2]}) == identity_hash({"b": [1, 2], "a": 1})
    assert identity_hash(WORKLOAD) == identity_hash(Workload.model_validate_json(WORKLOAD.model_dump_json()))
    others = [WORKLOAD.model_copy(update=change) for change in ({"sequence_length": 16}, {"clipping": "none"})]
    assert len({identity_hash(workload) for workload in (WORKLOAD, *others)}) == 3
    # Pinned: hashes stand in plans and run records that others keep.
    assert identity_hash({"a": 1}) == "015abd7f5cc57a2d"
