"""The config reference, docs/config.md: every key of a run config, read from the schema and the comments beside it.

    python -m executor.config_reference

A key's words are its description in the schema, or the comment at the end of its line, which stays the one place where
a key is explained; comment lines between keys are titles. What a line cannot say stands in docs/training.md.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from executor.config import TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

_HEAD = """\
# The run config

Generated from the schema (`python -m executor.config_reference`); a test keeps it so.

`conveyor train run.yaml key=value` reads a YAML file, then `key=value` overrides, which win. All keys stand at the top
level. Mistakes are told all at once, with file, line and key, the nearest known key, and the names that other tools
use. `--dry-run` checks all inputs as a run would, prints the resolved config and the plan, and stops; a run keeps its
resolved config as `config.yaml`. Sizes are bytes, or written as `24GiB` or `64GB`; a path may begin with `~`. What the
keys do in training: [training.md](training.md).
"""


class Key(NamedTuple):
    """A key of the config as the page shows it."""

    name: str
    section: str
    takes: str
    default: str
    words: str


def config_page() -> str:
    """The text of docs/config.md."""
    parts = [_HEAD]
    section = None
    for key in keys():
        if key.section != section:
            section = key.section
            parts.append(f"\n## {section}\n\n| key | takes | default | |\n| --- | --- | --- | --- |\n")
        parts.append(f"| `{key.name}` | {key.takes} | {key.default} | {key.words} |\n")
    return "".join(parts)


def keys() -> Iterator[Key]:
    """Every key, in the order of the schema."""
    comments, sections = _comments()
    for name, field in TrainConfig.model_fields.items():
        words = field.description or comments.get(name, "")
        takes = " or ".join(dict.fromkeys(_takes(field.annotation, field.metadata)))
        default = "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        yield Key(name, _in_yaml(sections[name]), takes, default, _in_yaml(words))


def _in_yaml(words: str) -> str:
    """A comment's words as they read in a table, with YAML's name for None."""
    return re.sub(r"\bNone\b", "null", words).replace("|", "\\|")


def _comments() -> tuple[dict[str, str], dict[str, str]]:
    """By key: the comment at the end of its lines, and the title above it."""
    source = inspect.getsource(TrainConfig)
    lines = source.splitlines()
    (schema,) = ast.parse(source).body
    assert isinstance(schema, ast.ClassDef)
    comments: dict[str, str] = {}
    sections: dict[str, str] = {}
    title, seen = "", 0
    for node in schema.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        for line in lines[seen : node.lineno - 1]:
            if found := re.match(r"    # (.+)", line):
                title = found[1].rstrip(".")
        end = node.end_lineno or node.lineno
        trailing = [found[1] for line in lines[node.lineno - 1 : end] if (found := re.search(r"  # (.+)", line))]
        comments[node.target.id], sections[node.target.id] = " ".join(trailing), title
        seen = end
    return comments, sections


_TYPES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _takes(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    """What may be written, in words."""
    if annotation in (NoneType, None):
        return
    if get_origin(annotation) is Literal:
        yield ", ".join(f"`{value}`" for value in get_args(annotation))
    elif get_origin(annotation) is tuple:
        inner = [part for part in get_args(annotation) if part is not Ellipsis]
        listed = " or ".join(dict.fromkeys(text for part in inner for text in _takes(part, [])))
        yield f"a list: {listed}"
    elif get_origin(annotation) is dict:
        yield "a mapping"
    elif hasattr(annotation, "__metadata__"):
        yield from _takes(get_args(annotation)[0], list(annotation.__metadata__))
    elif get_args(annotation):
        for part in get_args(annotation):
            yield from _takes(part, metadata)
    else:
        size = any(getattr(getattr(item, "func", None), "__name__", "") == "_bytes" for item in metadata)
        yield "a size" if size else _TYPES[annotation] + _limits(metadata)


def _limits(metadata: list[Any]) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = []
    for item in metadata:
        for constraint in getattr(item, "metadata", [item]):
            for name, word in words.items():
                value = getattr(constraint, name, None)
                if value is not None:
                    found.append(f"{word} {'2^63' if value == 2**63 else f'{value:g}'}")
    return f" {' and '.join(found)}" if found else ""


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(config_page(), encoding="utf-8")
    print(f"written: {PAGE}")
