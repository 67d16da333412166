"""What a run trains on, in numbers and in one decoded sample."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from executor.tokenizer import BoolArray, TokenArray, Tokenizer
from simulator.schema import Schema
from simulator.units import counted

_SHOWN_TOKENS = 400
_MUCH_SAVED = 0.1  # of all rows: from here on packing is proposed
MASKED = ("⟦", "⟧")


class Skipped(Schema):
    """Rows left out for one reason, and the first of them: its place, and what follows the place in a sentence."""

    count: int
    file: int
    line: int
    detail: str


class ReadReport(Schema):
    """What was read of a source. Places are relative to it, so that this holds wherever the source lies."""

    num_files: int
    num_read: int  # rows, or text files
    kinds: dict[str, int]  # of rows that were tokenized
    skipped: dict[str, Skipped]  # by reason
    num_untrained_turns: int


@dataclass
class Tally:
    """Counts while a source is read."""

    num_files: int = 0
    num_read: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    num_untrained_turns: int = 0

    def skip(self, reason: str, file: int, line: int, detail: str = "") -> None:
        first = self.skipped.get(reason) or Skipped(count=0, file=file, line=line, detail=detail)
        self.skipped[reason] = first.model_copy(update={"count": first.count + 1})

    def read_report(self) -> ReadReport:
        return ReadReport(
            num_files=self.num_files,
            num_read=self.num_read,
            kinds=dict(self.kinds),
            skipped=self.skipped,
            num_untrained_turns=self.num_untrained_turns,
        )


class DataReport(Schema):
    """What was read, what was left out and why, and the first sample with its masked part in ⟦ ⟧."""

    source: str
    tokenizer: str
    num_files: int
    left_out: tuple[str, ...] = ()  # what lies in the folder and is not read
    num_read: int  # rows, or text files
    kinds: dict[str, int]  # kind of row -> count
    skipped: dict[str, int]  # reason -> count
    first_skipped: dict[str, str]  # reason -> where it happened first
    num_truncated: int
    num_split: int
    longest_tokens: int
    longest_at: str
    num_untrained_turns: int
    packed: bool
    packing_saves: float = 0.0  # about which part of the rows packing would save, where it was not asked for
    num_held_out: int = 0  # samples, or parts of them, that the other data set has
    num_also_trained: int = 0  # of the other data set's, token for token
    first_also_trained: str = ""
    num_rows: int  # rows of a sequence length, as trained
    num_tokens: int  # without padding
    num_targets: int
    num_places: int  # of all rows: tokens and padding
    first_sample: str

    def lines(self) -> list[str]:
        """The report for the terminal; what deserves attention begins with `warning:`."""
        if not self.num_rows:  # data of rows have some, or are refused
            return [f"data: {self.source}: {self.first_sample}, without end"]
        kinds = " and ".join(f"{count:,} as {kind}" for kind, count in self.kinds.items())
        read = f"{self.num_read:,} read from {counted(self.num_files, 'file')}"
        lines = [
            f"data: {self.source}: {read}{', ' * bool(kinds)}{kinds}, tokenizer {self.tokenizer}",
            f"data: {self.num_rows:,} rows, {self.num_tokens:,} tokens, {self.num_targets:,} of them targets"
            + self._filling(),
        ]
        if self.num_held_out:
            lines.append(f"data: {self.num_held_out:,} samples are held out")
        if self.num_also_trained:
            lines.append(
                f"warning: {self.num_also_trained:,} of the documents to evaluate on are trained on too, "
                f"token for token (first: {self.first_also_trained}); they make the evaluation's loss too good"
            )
        lines += [f"warning: left out: {what}" for what in self.left_out]
        for reason, count in self.skipped.items():
            lines.append(f"warning: {count:,} skipped: {reason} (first: {self.first_skipped[reason]})")
        long = [f"{self.num_truncated:,} cut off"] * bool(self.num_truncated)
        long += [f"{self.num_split:,} split"] * bool(self.num_split)
        if long:
            begin = "warning" if self.num_truncated else "data"
            lines.append(
                f"{begin}: samples longer than a row: {' and '.join(long)}; "
                f"the longest has {self.longest_tokens:,} tokens ({self.longest_at})"
            )
        if self.num_untrained_turns:
            untrained = f"{self.num_untrained_turns:,} answers are not trained"
            lines.append(f"warning: {untrained}: the chat template rewrites earlier turns")
        lines.append(f"first sample, {MASKED[0]}masked{MASKED[1]}: {self.first_sample}")
        return lines

    def _filling(self) -> str:
        padding = 1 - self.num_tokens / max(1, self.num_places)
        if self.packed:
            return f"; packed, {padding:.1%} padding"
        if self.packing_saves < _MUCH_SAVED:
            return ""
        saved = f"packing: true would save {self.packing_saves:.0%} of the rows"
        return f"; {padding:.0%} of all places are padding, {saved}"


def skipped_lines(read: ReadReport, place: Callable[[int, int], str]) -> tuple[dict[str, int], dict[str, str]]:
    """Counts by reason, and where each happened first, as the user finds it."""
    counts = {reason: skipped.count for reason, skipped in read.skipped.items()}
    return counts, {reason: f"{place(s.file, s.line)}{s.detail}" for reason, s in read.skipped.items()}


def shown_sample(tokenizer: Tokenizer, tokens: TokenArray, trained: BoolArray) -> str:
    """The sample decoded, masked runs in ⟦ ⟧; long ones are cut."""
    shown, mask = tokens[:_SHOWN_TOKENS], trained[:_SHOWN_TOKENS]
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(shown)]
    parts = []
    for begin, end in pairwise(cuts):
        text = tokenizer.decode(shown[begin:end])
        parts.append(text if mask[begin] else f"{MASKED[0]}{text}{MASKED[1]}")
    return "".join(parts) + (" …" if len(tokens) > _SHOWN_TOKENS else "")
