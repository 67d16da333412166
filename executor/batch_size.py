"""The sizes of a step: tokens, rows, micro-batches and their number, of which any may be given if they agree."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class BatchSize(NamedTuple):
    """What a user says of a step's size. `global_batch_size` and `micro_batch_size` count rows; None: not said."""

    sequence_length: int | None
    tokens_per_step: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "BatchSize":
        """From settings by key; what is no whole number above 0 counts as not said, and is refused elsewhere."""
        found = (values.get(key) for key in cls._fields)
        return cls(*(v if isinstance(v, int) and not isinstance(v, bool) and v > 0 else None for v in found))

    @property
    def rows(self) -> int | None:
        """Rows of a step, by the first of three ways to say it; None where none is complete."""
        if self.tokens_per_step is not None:
            whole = self.sequence_length is not None and self.tokens_per_step % self.sequence_length == 0
            return self.tokens_per_step // self.sequence_length if self.sequence_length and whole else None
        if self.global_batch_size is not None:
            return self.global_batch_size
        if self.micro_batch_size is not None and self.gradient_accumulation_steps is not None:
            return self.micro_batch_size * self.gradient_accumulation_steps
        return None

    def filled(self) -> dict[str, int]:
        """The two sizes that the others decide: tokens_per_step, and micro_batch_size from the accumulation."""
        found: dict[str, int] = {}
        if self.tokens_per_step is None and self.rows is not None and self.sequence_length is not None:
            found["tokens_per_step"] = self.rows * self.sequence_length
        accumulated = self.gradient_accumulation_steps
        if self.micro_batch_size is None and accumulated and self.rows is not None and self.rows % accumulated == 0:
            found["micro_batch_size"] = self.rows // accumulated
        return found

    def contradictions(self) -> list[str]:
        """What does not agree, with the arithmetic."""
        length, rows = self.sequence_length, self.rows
        found: list[str] = []
        if rows is None:
            return found
        said = f"{rows} rows a step"
        if self.tokens_per_step is not None:
            said = f"tokens_per_step {self.tokens_per_step} / sequence_length {length} = {rows} rows"
        if self.global_batch_size not in (None, rows):
            found.append(f"global_batch_size: {self.global_batch_size} rows, but {said}; leave one of the two out")
        micro, accumulated = self.micro_batch_size, self.gradient_accumulation_steps
        if accumulated is not None and micro is None and rows % accumulated:
            found.append(f"gradient_accumulation_steps: {accumulated} does not divide a step: {said}; leave it out")
        if accumulated is not None and micro is not None and micro * accumulated != rows:
            found.append(
                f"gradient_accumulation_steps: micro_batch_size {micro} x {accumulated} = {micro * accumulated} rows, "
                f"but {said}; leave it out, it follows from the others"
            )
        return found
