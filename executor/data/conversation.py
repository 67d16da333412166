"""A conversation as text, by the tokenizer's chat template, and the parts of the text that are trained."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from executor.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
# The names of other dialects; they work wherever a role stands.
DIALECTS = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
}


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


def read_turns(turns: Any, key: str) -> list[dict[str, str]]:
    """The turns of a row, perhaps none, as messages with `role` and `content`. Raises ValueError for a wrong one."""
    if not isinstance(turns, list):
        raise ValueError(f"{key!r} is not a list of turns")
    return [_message(turn, f"{key}[{number}]") for number, turn in enumerate(turns)]


def conversation_text(
    messages: Sequence[dict[str, str]], tokenizer: Tokenizer, *, num_given: int = 0, train_on_prompt: bool = False
) -> RowText:
    """The rendered conversation; the assistant's turns are trained, all turns with `train_on_prompt`.

    The first `num_given` messages are a prompt, whoever speaks. Raises ValueError where the template refuses, or
    leaves no place where the answers could be found.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [number for number in answers if number >= num_given]
    if not answers:
        return RowText(skip_reason="no answer")
    if any(not messages[number]["content"].strip() for number in answers):
        return RowText(skip_reason="empty answer")
    text = tokenizer.render(messages, add_generation_prompt=False)
    starts_document = not tokenizer.has_chat_template
    if train_on_prompt:
        return RowText(text, ((0, len(text)),), starts_document)
    spans = []
    for number in answers:
        span = _answer_span(text, messages, number, tokenizer)
        if span:
            spans.append(span)
    if not spans:
        raise ValueError("the chat template gives no place to the answers: they cannot be told from the prompt")
    return RowText(text, tuple(spans), starts_document, num_untrained_turns=len(answers) - len(spans))


def _message(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{where} is not an object with role and content")
    role = turn.get("role") if turn.get("role") is not None else turn.get("from")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    known = role.strip().lower() if isinstance(role, str) else ""
    known = DIALECTS.get(known, known)
    if known not in ROLES:
        allowed = ", ".join((*ROLES, *DIALECTS))
        named = "no role" if role is None else f"the role {role!r}"
        raise ValueError(f"{where} has {named}; allowed are {allowed}")
    if turn.get("tool_calls"):
        raise ValueError(f"{where} has 'tool_calls', which are not read yet; write them into its content")
    if content is None and known == "assistant":  # an empty answer, which skips the row
        content = ""
    return {"role": known, "content": _content(content, where)}


def _content(content: Any, where: str) -> str:
    """A turn's text; a list of parts, as multimodal rows have it, is joined where all of them are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        what = "null, or missing" if content is None else type(content).__name__
        raise ValueError(f"{where} has no text: its content is {what}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"{where} has a part of type {kind!r}; only text is trained")
        texts.append(part["text"])
    return "".join(texts)


def _answer_span(
    text: str, messages: Sequence[dict[str, str]], number: int, tokenizer: Tokenizer
) -> tuple[int, int] | None:
    """Where answer `number` stands in the rendered conversation, its end of turn included.

    None where the template writes it differently in the whole than on its own, as templates do that drop the
    reasoning of earlier turns.
    """
    through = text
    if number < len(messages) - 1:
        through = tokenizer.render(messages[: number + 1], add_generation_prompt=False)
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
