"""JSON in which a key stands once in an object: where one stands twice, Python takes the last without a word."""

import json
from typing import Any


class RepeatedKey(ValueError):
    """An object holds a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} stands twice in one object")
        self.key = key


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises RepeatedKey, and what `json.loads` raises."""
    return json.loads(text, object_pairs_hook=object_of)


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's dictionary, for decoders that take `object_pairs_hook`. Raises RepeatedKey."""
    found = dict(pairs)
    if len(found) < len(pairs):
        earlier: set[str] = set()
        for key, _ in pairs:
            if key in earlier:
                raise RepeatedKey(key)
            earlier.add(key)
    return found
