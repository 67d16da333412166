"""The kinds of rows: which columns make a row of which kind, and what such a row has to say.

Kinds are recognised in the order of `KINDS`: a row that has a column of a kind's `required` is of that kind, or it is
refused with the column that is missing. `columns` gives columns of other names ours.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from executor.data.conversation import RowText, conversation_text, read_turns
from executor.data.row_files import Unreadable
from executor.tokenizer import BoolArray, TokenArray, Tokenizer
from simulator.errors import InputError
from simulator.json_text import RepeatedKey, parse_json
from simulator.nearest import did_you_mean, nearest_name


class RowKind(NamedTuple):
    """A kind of row by name, and the columns that it is made of."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


PRE_TOKENISED = RowKind("pre-tokenised", ("input_ids",), ("labels", "loss_mask", "attention_mask"))
MESSAGES = RowKind("messages", ("messages",))
SHAREGPT = RowKind("sharegpt", ("conversations",), ("system",))
ALPACA = RowKind("alpaca", ("instruction", "output"), ("input", "system", "history"))
PROMPT_COMPLETION = RowKind("prompt-completion", ("prompt", "completion"))
TEXT = RowKind("text", ("text",))
KINDS = (PRE_TOKENISED, MESSAGES, SHAREGPT, ALPACA, PROMPT_COMPLETION, TEXT)
# What others call the columns of two kinds, for a hint.
_KNOWN_AS = {
    "prompt": ("question", "query", "problem", "source", "input", "user"),
    "completion": ("answer", "response", "solution", "target", "reply", "output", "assistant"),
    "text": ("content", "body", "document", "passage", "sentence", "code"),
}
_EMPTY_ANSWERS = ("output", "completion")
_EMPTY: dict[RowKind, Any] = {PRE_TOKENISED: [], MESSAGES: [], SHAREGPT: []}  # what null stands for; else empty text
COLUMNS = tuple(dict.fromkeys(column for kind in KINDS for column in (*kind.required, *kind.optional)))


class RowTokens(NamedTuple):
    """A row that brings its tokens."""

    tokens: TokenArray
    trained: BoolArray
    skip_reason: str = ""


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise InputError for a map `{our column: column of the rows}` with a name that is none of ours."""
    for ours in columns:
        if ours not in COLUMNS:
            hint = did_you_mean(nearest_name(ours, COLUMNS))
            raise InputError(
                f"columns: unknown column '{ours}'{hint}; it is written as 'column here: column of the rows', "
                f"and columns here are {', '.join(COLUMNS)}"
            )


def recognise(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[RowKind, dict[str, Any]]:
    """A row's kind, and the row under our names; a column that is null counts as absent.

    An answer that is null is an empty one, and so is a row in which all that its kind asks for is null. Raises
    ValueError with a clause that names the missing column.
    """
    named = {name: value for name, value in row.items() if value is not None and name not in columns.values()}
    for ours, theirs in columns.items():
        if row.get(theirs) is not None:
            named[ours] = row[theirs]
    # A kind that the user's map speaks of comes first.
    kinds = sorted(KINDS, key=lambda kind: not set(columns) & {*kind.required, *kind.optional})
    for kind in kinds:
        if not any(column in named for column in kind.required):
            continue
        for column in kind.required:
            if column in _EMPTY_ANSWERS and columns.get(column, column) in row:
                named.setdefault(column, "")
            if column not in named:
                raise ValueError(_missing(column, row, columns))
        return kind, named
    for kind in kinds:
        if all(columns.get(column, column) in row for column in kind.required):
            return kind, named | {column: _EMPTY.get(kind, "") for column in kind.required}
    for ours in columns:
        if ours not in named:
            raise ValueError(_missing(ours, row, columns))
    raise ValueError(
        "has none of 'text', 'messages', 'conversations', 'input_ids', 'instruction' and 'output', or 'prompt' and "
        f"'completion'; {_keys(row)}{_columns_hint(row)}"
    )


def row_content(
    kind: RowKind, row: Mapping[str, Any], tokenizer: Tokenizer, *, train_on_prompt: bool
) -> RowText | RowTokens:
    """What a recognised row says. Raises ValueError with a clause that names the wrong column."""
    for column in (*kind.required, *kind.optional):
        if isinstance(value := row.get(column), Unreadable):
            raise ValueError(f"{column!r} cannot be read ({value.reason})")
    if kind is PRE_TOKENISED:
        return _pre_tokenised(row, tokenizer)
    if kind is TEXT:
        text = _string(row, "text")
        return RowText(text, ((0, len(text)),)) if text.strip() else RowText(skip_reason="empty text")
    if kind is PROMPT_COMPLETION and not isinstance(row["prompt"], list):
        prompt, completion = _string(row, "prompt"), _string(row, "completion")
        if not completion.strip():
            return RowText(skip_reason="empty answer")
        text = prompt + completion
        return RowText(text, ((0 if train_on_prompt else len(prompt), len(text)),))
    num_given = 0
    if kind is PROMPT_COMPLETION:
        given = read_turns(row["prompt"], "prompt")
        messages, num_given = given + read_turns(_nested(row["completion"]), "completion"), len(given)
    elif kind is ALPACA:
        messages = _alpaca(row)
    else:
        if row.get("tools"):
            raise ValueError("has 'tools', which are not read yet; write them into the system's turn")
        key = kind.required[0]
        messages = read_turns(_nested(row[key]), key)
        if row.get("system") and kind is SHAREGPT:
            messages.insert(0, {"role": "system", "content": _string(row, "system")})
    return conversation_text(messages, tokenizer, num_given=num_given, train_on_prompt=train_on_prompt)


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Instruction and input as one user's turn, the output as the answer, after the turns of `history`."""
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": _string(row, "system")})
    history = _nested(row.get("history") or [])
    if not isinstance(history, list):
        raise ValueError(f"'history' is {type(history).__name__}, not a list of questions with their answers")
    for number, pair in enumerate(history):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(turn, str) for turn in pair)):
            raise ValueError(f"history[{number}] is not a list of two strings, a question and its answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = _string(row, "instruction")
    if row.get("input"):
        question = "\n".join(part for part in (question, _string(row, "input")) if part)
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": _string(row, "output")}]


def _pre_tokenised(row: Mapping[str, Any], tokenizer: Tokenizer) -> RowTokens:
    """Tokens as they are: nothing is added. `labels` are the same tokens, unshifted, or -100 where masked."""
    tokens = _integers(row, "input_ids")
    wrong = np.flatnonzero((tokens < 0) | (tokens >= tokenizer.vocab_size))
    if wrong.size:
        raise ValueError(
            f"input_ids[{wrong[0]}] is {tokens[wrong[0]]}, and the model's vocabulary has {tokenizer.vocab_size} tokens"
        )
    trained = np.ones(len(tokens), np.bool_)
    for column in ("labels", "loss_mask", "attention_mask"):
        if column not in row:
            continue
        values = _integers(row, column)
        if len(values) != len(tokens):
            raise ValueError(f"{column!r} has {len(values)} entries, 'input_ids' has {len(tokens)}")
        if column == "labels":
            differing = np.flatnonzero((values != -100) & (values != tokens))
            if differing.size:
                at = int(differing[0])
                raise ValueError(
                    f"labels[{at}] is {values[at]}, where input_ids has {tokens[at]}; labels are the same tokens, "
                    "not shifted, or -100 where nothing is learnt"
                )
            trained &= values != -100
        elif not np.isin(values, (0, 1)).all():
            raise ValueError(f"{column!r} holds other numbers than 0 and 1")
        elif column == "loss_mask":
            trained &= values == 1
        else:  # padding that the row brings along
            tokens, trained = tokens[values == 1], trained[values == 1]
    # The first token is nobody's next token.
    reason = "" if trained[1:].any() else "no trained token"
    return RowTokens(tokens.astype(np.uint32), trained, reason)


def _integers(row: Mapping[str, Any], column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    values = _nested(row[column])
    if isinstance(values, list):
        if not values:
            return np.zeros(0, np.int64)
        with suppress(ValueError, OverflowError):  # lists inside, of several lengths
            array = np.asarray(values)
            # A mask may hold true and false; among tokens they are a mistake that would be trained as 1 and 0.
            if (
                array.ndim == 1
                and array.dtype.kind in "iub"
                and (column.endswith("mask") or bool not in map(type, values))
            ):
                return array.astype(np.int64)
    raise ValueError(f"{column!r} is not a list of whole numbers")


def _string(row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(f"{column!r} is {type(row[column]).__name__}, not a string")
    return str(row[column])


def _nested(value: Any) -> Any:
    """A list; CSV can only hold it as JSON in a cell."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return parse_json(value)
        except RepeatedKey:
            raise
        except (ValueError, RecursionError):
            return value
    return value


def _missing(column: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    if column in columns:
        return f"has no {columns[column]!r}, which columns: names for '{column}'; {_keys(row)}"
    return f"has no {column!r}; {_keys(row)}; a column of another name is given with columns: {{{column}: its name}}"


def _columns_hint(row: Mapping[str, Any]) -> str:
    """How `columns` would name what a row has, by names that are in use elsewhere, else by the order of its strings."""
    strings = [name for name, value in row.items() if isinstance(value, str)]
    known = {
        ours: next((name for name in strings if name.lower() in theirs), None) for ours, theirs in _KNOWN_AS.items()
    }
    if known["prompt"] and known["completion"]:
        meant = {"prompt": known["prompt"], "completion": known["completion"]}
    elif known["text"] or len(strings) == 1:
        meant = {"text": known["text"] or strings[0]}
    elif len(strings) > 1:
        meant = {"prompt": strings[0], "completion": strings[1]}
    else:
        return ""
    named = ", ".join(f"{ours}: {theirs}" for ours, theirs in meant.items())
    return f"; say which is which, as with columns: {{{named}}}"


def _keys(row: Mapping[str, Any]) -> str:
    return f"its keys are {sorted(map(str, row)) or 'none'}"
