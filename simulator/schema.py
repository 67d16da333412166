"""The base of every schema: frozen, strict about unknown keys, hashed by content."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import pydantic

from simulator.errors import InputError
from simulator.files import write_whole
from simulator.json_text import RepeatedKey, parse_json
from simulator.nearest import did_you_mean, nearest_name, nearest_path

# In our words what pydantic says in its own: of what a file lacks, and of what is of another kind.
_MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": "unknown key",
    "too_short": "has too few entries, it needs {min_length}",
    "tuple_type": "is not a list",
    "list_type": "is not a list",
    "dict_type": "is not a table of keys",
    "model_type": "is not a table of keys",
    "model_attributes_type": "is not a table of keys",
}


class Schema(pydantic.BaseModel):
    """A frozen record that refuses unknown keys and non-finite numbers."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the values in `update`, which are not checked. What cached properties have found is left out."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a JSON file. Raises InputError with one sentence naming the file and the key."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError as error:
            raise InputError(f"{path}: does not exist{did_you_mean(nearest_path(path))}") from error
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: is not UTF-8 text") from error
        try:
            found = cls.model_validate_json(text)
            parse_json(text)
        except RepeatedKey as error:
            raise InputError(f"{path}: {error}; keep one of them") from error
        except pydantic.ValidationError as error:
            raise InputError(f"{path}: {describe(error, most=3)}") from error
        return found

    def save(self, path: Path | str) -> None:
        """Write indented JSON, ending in a newline: whole, or what was there stays."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


AnySchema = TypeVar("AnySchema", bound=Schema)


def validated(schema: type[AnySchema], **values: Any) -> AnySchema:
    """A schema's record from a user's values. Raises InputError naming every key that is wrong."""
    try:
        return schema(**values)
    except pydantic.ValidationError as error:
        raise InputError(describe(error)) from error


def describe(error: pydantic.ValidationError, *, most: int | None = None, keys: Collection[str] = ()) -> str:
    """One line for the mistakes of a validation error: `key: what is wrong; key: ...`; beyond `most` only counted.

    A file of another kind has dozens: a few say so, unknown keys first, since a misspelt one is missing too. Of an
    unknown key the nearest of `keys` is named, or all of them.
    """
    parts = []
    mistakes = error.errors(include_url=False)
    inside = {item["loc"][:depth] for item in mistakes for depth in range(len(item["loc"]))}
    # A list whose entries are wrong is called too short as well, since the wrong ones do not count.
    mistakes = [item for item in mistakes if item["type"] != "too_short" or item["loc"] not in inside]
    if most is not None and len(mistakes) > most:
        mistakes.sort(key=lambda item: item["type"] != "extra_forbidden")
    for item in mistakes:
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in _MESSAGES:
            message = _MESSAGES[item["type"]].format(**item.get("ctx", {}))
        if item["type"] == "extra_forbidden" and keys:
            near = did_you_mean(nearest_name(str(item["loc"][-1]), list(keys)))
            message += near or f"; there are {', '.join(keys)}"
        parts.append(f"{key}: {message}" if key else message)
    if most is not None and len(parts) > most:
        parts[most:] = [f"and {len(parts) - most} more mistakes: is this the right file?"]
    return "; ".join(parts)


def identity_hash(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a value's canonical JSON."""
    if isinstance(value, pydantic.BaseModel):
        value = value.model_dump(mode="json")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
