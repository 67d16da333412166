"""A YAML file's top-level mapping, with the line of every key, and its mistakes as one sentence each."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from simulator.errors import InputError
from simulator.nearest import did_you_mean, nearest_path


class YamlMapping(NamedTuple):
    """Values by key, and the 1-based line where each key stands."""

    values: dict[str, Any]
    lines: dict[str, int]


def no_truth_value(value: Any) -> Any:
    """`value`, unless it is a truth value: pydantic would take it for the number 1 or 0. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError("takes no truth value, as which YAML reads true, false, yes, no, on and off")
    return value


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but `2e-5` is a number, as in YAML 1.2, and a key may stand only once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
            if key_node.value in first_lines:
                problem = f"the key '{key_node.value}' stands here and on line {first_lines[key_node.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            first_lines[key_node.value] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:  # of PyYAML's own converters: a month 13, !!int x
            kind = str(node.tag).rpartition(":")[2]
            reason = f"cannot be read as {kind}, which it looks like; write it in quotes if it is text"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from error


# PyYAML wants a dot and a signed exponent in every float; people write 2e-5 and 1e9.
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_yaml_mapping(path: Path | str) -> YamlMapping:
    """Read a YAML file whose top level is a mapping. Raises InputError naming file, line and column."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path}: does not exist{did_you_mean(nearest_path(path))}") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder; name a file of YAML in it") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text") from error

    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise InputError(f"{path}:1:1: is empty; it has to have lines `key: value`")
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            where = f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
            raise InputError(f"{where}: is {kind}; it has to have lines `key: value`")
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"  # a key is a name: `on` would be read as true
        values = _Loader("").construct_document(node)
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
    except yaml.YAMLError as error:
        raise InputError(f"{path}{_where(error, text)}") from error
    except RecursionError as error:
        raise InputError(f"{path}: is nested too deeply; it has to have lines `key: value`") from error
    return YamlMapping(values, lines)


def parse_yaml_value(text: str) -> Any:
    """The value of a command-line override, typed as in a file: `2e-5` a number, `true` a truth value, `a` a string.

    Raises InputError.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError(f"is not a YAML value ({getattr(error, 'problem', None) or error})") from error
    except RecursionError as error:
        raise InputError("is nested too deeply") from error


def _where(error: yaml.YAMLError, text: str) -> str:
    """`:line:column: what is wrong`."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a ReaderError: a character that YAML does not allow
        position = getattr(error, "position", 0)
        line, column = text.count("\n", 0, position), position - text.rfind("\n", 0, position) - 1
        return f":{line + 1}:{column + 1}: holds a character that YAML does not allow"
    problem = getattr(error, "problem", None) or "is not YAML"
    if problem == "but found another document":
        problem = "another document begins; a run config is one"
    if text[mark.index : mark.index + 1] == "\t":
        problem = "a tab; YAML is indented with spaces"
    return f":{mark.line + 1}:{mark.column + 1}: {problem}"
