"""Samples cut to documents that fit a row, and documents packed into rows."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from executor.data.row_kind import KINDS, TEXT
from executor.data.token_cache import IntArray, Samples
from executor.tokenizer import BoolArray

LongSamples = Literal["auto", "truncate", "split", "drop"]

_COUNTED_TOKENS = 2**24  # at once
_SURVEYED_DOCUMENTS = 50_000


@dataclass(frozen=True)
class Documents:
    """Parts of samples, in order, each at most a row and its last target long: `tokens[begins[i]:ends[i]]`.

    Parts of one sample overlap by a token, which is the last target of one and the first input of the next: every
    token of a sample but its first is a target once, if it is trained.
    """

    begins: IntArray
    ends: IntArray
    samples: IntArray  # which sample each is of
    num_targets: IntArray
    num_truncated: int  # samples of which a part is lost
    num_split: int
    too_long: IntArray  # samples that are left out for their length
    prompt_only: IntArray  # samples that have no target within the row

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def sizes(self) -> IntArray:
        """Places that each takes in a row: its last token is only a target."""
        return self.ends - self.begins - 1

    def chosen(self, mask: BoolArray) -> "Documents":
        """Those that the mask, one entry a document, marks."""
        parts = (self.begins[mask], self.ends[mask], self.samples[mask], self.num_targets[mask])
        return Documents(*parts, self.num_truncated, self.num_split, self.too_long, self.prompt_only)


def cut_samples(samples: Samples, *, sequence_length: int, long_samples: LongSamples) -> Documents:
    """Samples as documents. Longer ones are cut off, split or left out; `auto` splits text and cuts off the others.

    Documents without a target are left out: they would train nothing.
    """
    bounds = np.asarray(samples.bounds)
    lengths = np.diff(bounds)
    is_long = lengths > sequence_length + 1
    is_split, is_dropped = np.zeros_like(is_long), np.zeros_like(is_long)
    if long_samples == "split":
        is_split = is_long
    elif long_samples == "auto":
        is_split = is_long & (samples.origins[:, 2] == KINDS.index(TEXT))
    elif long_samples == "drop":
        is_dropped = is_long
    parts = np.where(is_dropped, 0, np.where(is_split, -(-(lengths - 1) // sequence_length), 1))
    sample = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(sample)) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = bounds[sample] + part * sequence_length
    ends = np.minimum(begins + sequence_length + 1, bounds[sample + 1])
    num_targets = _count_targets(samples.trained, begins, ends)
    kept = num_targets > 0
    prompt_only = sample[~kept & ~is_split[sample]]
    num_truncated = int((is_long & ~is_split & ~is_dropped).sum()) - len(prompt_only)
    return Documents(
        begins[kept], ends[kept], sample[kept], num_targets[kept],
        num_truncated, int(is_split.sum()), np.flatnonzero(is_dropped), prompt_only,
    )  # fmt: skip


def best_fit(sizes: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Documents in rows, by best-fit decreasing: the longest first, each into the fullest row that has room for it.

    Returns members and bounds: row r holds the documents `members[bounds[r]:bounds[r + 1]]`, ascending; rows are in
    the order of their first document. At most 11/9 of the fewest rows possible, and 4 more (Johnson 1973). Depends
    on the sizes alone.
    """
    row_of = np.empty(len(sizes), np.int64)
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0  # bit n is set where a row has room for n
    num_rows = 0
    lengths = sizes.tolist()
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = lengths[document]
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            rows = rows_with_room[room]
            row = rows.pop()
            if not rows:
                rooms &= ~(1 << room)
        else:
            row, room = num_rows, capacity
            num_rows += 1
        row_of[document] = row
        if left := room - size:
            rows_with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    firsts = np.full(num_rows, len(sizes))
    np.minimum.at(firsts, row_of, np.arange(len(sizes)))
    renumbered = np.empty(num_rows, np.int64)
    renumbered[np.argsort(firsts)] = np.arange(num_rows)
    members = np.argsort(renumbered[row_of], kind="stable")
    return members, np.cumsum([0, *np.bincount(renumbered[row_of], minlength=num_rows)], dtype=np.int64)


def packing_saves(sizes: IntArray, capacity: int) -> float:
    """About which part of the rows best fit saves beside a row for each document, from the first of them."""
    some = sizes[:_SURVEYED_DOCUMENTS]
    return 1 - (len(best_fit(some, capacity)[1]) - 1) / max(1, len(some))


def _count_targets(trained: BoolArray, begins: IntArray, ends: IntArray) -> IntArray:
    """Trained tokens of each range but its first, which is nobody's next token; some ranges at a time."""
    counts = np.empty(len(begins), np.int64)
    done = 0
    while done < len(begins):
        base = begins[done]
        upto = max(done + 1, int(np.searchsorted(ends, base + _COUNTED_TOKENS, side="right")))
        sums = np.concatenate([[0], np.cumsum(trained[base : ends[upto - 1]], dtype=np.int64)])
        counts[done:upto] = sums[ends[done:upto] - base] - sums[begins[done:upto] + 1 - base]
        done = upto
    return counts
