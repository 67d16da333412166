"""docs/config.md is what the schema says."""

from executor.config import TrainConfig
from executor.config_reference import PAGE, config_page, keys


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == config_page(), "run python -m executor.config_reference"


def test_every_key_is_explained_with_what_it_takes_and_its_default() -> None:
    found = {key.name: key for key in keys()}
    assert list(found) == list(TrainConfig.model_fields)
    assert [key.name for key in found.values() if not (key.words and key.takes and key.section)] == []
    assert found["data"].default == "required"
    assert (found["learning_rate"].takes, found["learning_rate"].default) == (
        "a number above 0 and at most 10",
        "`2e-05`",
    )
    assert found["device_memory"].takes == "a size"
    assert found["lr_schedule"].takes == "`constant`, `linear`, `cosine`, `wsd`"
    assert found["micro_batch_size"].takes == "a whole number above 0 or `auto`"
    assert found["eval_every"].words.endswith("null: one at the end")


def test_a_page_of_another_default_differs() -> None:
    field = TrainConfig.model_fields["log_every"]
    before, page = field.default, config_page()
    field.default = 7
    try:
        assert config_page() != page
    finally:
        field.default = before
