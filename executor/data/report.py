"""What a run trains on, in numbers and in one decoded sample."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from executor.tokenizer import TokenArray, Tokenizer
from simulator.errors import InputError
from simulator.schema import Schema

_SHOWN_TOKENS = 400
MASKED = ("⟦", "⟧")


@dataclass
class Tally:
    """Counts while a source is read. A row of text is a document."""

    source: str
    num_files: int = 0
    num_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    num_truncated: int = 0
    longest_tokens: int = 0
    num_untrained_turns: int = 0

    def skip(self, reason: str, where: str) -> None:
        self.skipped[reason] += 1
        self.first_skipped.setdefault(reason, where)

    def refuse_if_empty(self, num_rows: int) -> None:
        """Raise InputError with the reasons when nothing is left to train on."""
        if num_rows:
            return
        reasons = "; ".join(f"{count} skipped: {reason}" for reason, count in self.skipped.items())
        what = f"{self.num_read} rows read" if self.num_read else "nothing to read"
        raise InputError(f"{self.source}: no usable rows ({what}{'; ' + reasons if reasons else ''})")


class DataReport(Schema):
    """What was read, what was left out and why, and the first sample with its masked part in ⟦ ⟧."""

    source: str
    tokenizer: str
    num_files: int
    num_read: int  # rows of JSONL, documents of text
    skipped: dict[str, int]  # reason -> count
    first_skipped: dict[str, str]  # reason -> where it happened first
    num_truncated: int
    longest_tokens: int
    num_untrained_turns: int
    num_rows: int  # rows of a sequence length, as trained
    num_tokens: int
    num_targets: int
    first_sample: str

    def lines(self) -> list[str]:
        """The report for the terminal; what deserves attention begins with `warning:`."""
        lines = [
            f"data: {self.source}: {self.num_read} read from {self.num_files} files, tokenizer {self.tokenizer}",
            f"data: {self.num_rows} rows, {self.num_tokens} tokens, {self.num_targets} of them targets",
        ]
        for reason, count in self.skipped.items():
            lines.append(f"warning: {count} skipped: {reason} (first: {self.first_skipped[reason]})")
        if self.num_truncated:
            lines.append(
                f"warning: {self.num_truncated} samples are longer than a row and were cut; "
                f"the longest has {self.longest_tokens} tokens"
            )
        if self.num_untrained_turns:
            lines.append(
                f"warning: {self.num_untrained_turns} answers are not trained: the chat template rewrites earlier turns"
            )
        lines.append(f"first sample, {MASKED[0]}masked{MASKED[1]}: {self.first_sample}")
        return lines


def shown_sample(tokenizer: Tokenizer, tokens: TokenArray, trained: npt.NDArray[np.bool_]) -> str:
    """The sample decoded, masked runs in ⟦ ⟧; long ones are cut."""
    shown, mask = tokens[:_SHOWN_TOKENS], trained[:_SHOWN_TOKENS]
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(shown)]
    parts = []
    for begin, end in pairwise(cuts):
        text = tokenizer.decode(shown[begin:end])
        parts.append(text if mask[begin] else f"{MASKED[0]}{text}{MASKED[1]}")
    return "".join(parts) + (" …" if len(tokens) > _SHOWN_TOKENS else "")
