"""A JSONL row as text, and the parts of the text that are trained.

Three kinds of row: `text` (all of it trained), `prompt` and `completion` (the prompt masked), `messages` (every turn
but the assistant's masked; `conversations` with `from` and `value` is the same in another dialect).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from executor.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
_DIALECT = {"human": "user", "gpt": "assistant"}


class RowText(NamedTuple):
    """What a row says, or why it is skipped.

    `spans` are the trained parts as character ranges. `starts_document` asks for the tokenizer's own beginning; a
    chat template writes it itself.
    """

    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    starts_document: bool = True
    skip_reason: str = ""
    num_untrained_turns: int = 0


def row_text(row: Mapping[str, Any], tokenizer: Tokenizer) -> RowText:
    """The row's text and trained spans. Raises ValueError with a clause that names the wrong key."""
    for key in ("messages", "conversations"):
        if key in row:
            return _conversation(row[key], key, tokenizer)
    if "prompt" in row or "completion" in row:
        prompt, completion = _string(row, "prompt"), _string(row, "completion")
        if not completion.strip():
            return RowText(skip_reason="empty answer")
        return RowText(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
    if "text" in row:
        text = _string(row, "text")
        return RowText(text, ((0, len(text)),)) if text.strip() else RowText(skip_reason="empty text")
    if "instruction" in row:
        raise ValueError("rows with 'instruction' are not read yet; name the columns 'prompt' and 'completion'")
    raise ValueError(
        f"has none of 'text', 'messages', or 'prompt' and 'completion'; its keys are {sorted(row) or 'none'}"
    )


def _string(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        raise ValueError(f"has no {key!r}; its keys are {sorted(row)}")
    if not isinstance(row[key], str):
        raise ValueError(f"{key!r} is {type(row[key]).__name__}, not a string")
    return str(row[key])


def _conversation(turns: Any, key: str, tokenizer: Tokenizer) -> RowText:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key!r} is not a list of turns")
    messages = [_message(turn, f"{key}[{number}]") for number, turn in enumerate(turns)]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return RowText(skip_reason="no answer")
    if any(not messages[number]["content"].strip() for number in answers):
        return RowText(skip_reason="empty answer")
    text = tokenizer.render(messages, add_generation_prompt=False)
    spans = []
    for number in answers:
        span = _answer_span(text, messages, number, tokenizer)
        if span:
            spans.append(span)
    if not spans:
        raise ValueError("the chat template gives no place to the answers: they cannot be told from the prompt")
    untrained = len(answers) - len(spans)
    return RowText(text, tuple(spans), not tokenizer.has_chat_template, num_untrained_turns=untrained)


def _message(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is not an object with role and content")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    role = _DIALECT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        allowed = ", ".join((*ROLES, *_DIALECT))
        raise ValueError(f"{where} has the role {role!r}; allowed are {allowed}")
    if not isinstance(content, str):
        raise ValueError(f"{where} has no text: its content is {type(content).__name__}")
    return {"role": role, "content": content}


def _answer_span(
    text: str, messages: list[dict[str, str]], number: int, tokenizer: Tokenizer
) -> tuple[int, int] | None:
    """Where answer `number` stands in the rendered conversation, its end of turn included.

    None where the template writes it differently in the whole than on its own, as templates do that drop the
    reasoning of earlier turns.
    """
    through = tokenizer.render(messages[: number + 1], add_generation_prompt=False)
    if number == len(messages) - 1:
        through = text
    if not text.startswith(through):
        return None
    # What inference would be given to answer is the prompt.
    if number:
        before = tokenizer.render(messages[:number], add_generation_prompt=True)
        if through.startswith(before) and len(before) < len(through):
            return len(before), len(through)
    # Some generation prompts open a block for reasoning that the answer lacks: begin at its words.
    begin = through.rfind(messages[number]["content"].strip())
    return (begin, len(through)) if begin >= 0 else None
