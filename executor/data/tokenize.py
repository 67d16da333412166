"""Rows and documents as tokens, written as a stream: what is in memory at a time is one batch."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from executor.data.conversation import RowText
from executor.data.report import Tally
from executor.data.row_kind import KINDS, TEXT, RowTokens, recognise, row_content
from executor.data.source import Source
from executor.data.text import Document, documents
from executor.data.token_cache import SampleWriter
from executor.tokenizer import BoolArray, Encoded, TokenArray, Tokenizer
from simulator.errors import InputError

_BATCH_ROWS = 512
_BATCH_CHARACTERS = 2**22
_SHOWN_CHARACTERS = 80  # of a skipped row


class _Row(NamedTuple):
    file: int
    line: int
    kind: int
    content: RowText | RowTokens


def write_rows(
    source: Source,
    tokenizer: Tokenizer,
    writer: SampleWriter,
    tally: Tally,
    *,
    columns: Mapping[str, str],
    train_on_prompt: bool,
    skip_invalid: bool,
) -> None:
    """One sample for each row. Rows without anything to train are skipped and counted.

    Raises InputError with file, line and column for a row that cannot be read; `skip_invalid` counts those too.
    """
    rows = _rows(source, tokenizer, tally, columns, train_on_prompt=train_on_prompt, skip_invalid=skip_invalid)
    while batch := list(islice(rows, _BATCH_ROWS)):
        texts = [row.content.text for row in batch if isinstance(row.content, RowText)]
        encoded = iter(tokenizer.encode_with_offsets(texts) if texts else [])
        for row in batch:
            if isinstance(row.content, RowText):
                tokens, trained = _sample(row.content, next(encoded), tokenizer)
                tally.num_untrained_turns += row.content.num_untrained_turns
            else:
                tokens, trained = row.content.tokens, row.content.trained
            writer.add(tokens, trained)
            writer.end(file=row.file, line=row.line, kind=row.kind)


def write_documents(source: Source, tokenizer: Tokenizer, writer: SampleWriter, tally: Tally) -> None:
    """One sample for each text file: all of it is trained, and the end-of-sequence token closes it once.

    Files that are empty, not UTF-8 text, or JSON by content are skipped and counted; when there is one file only,
    InputError says what is wrong with it.
    """
    eos, prefix = np.array([tokenizer.eos_id], np.uint32), tokenizer.prefix
    for batch in _batches(documents(source, tally)):
        for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            if piece.is_first and not np.array_equal(tokens[: len(prefix)], prefix):
                writer.add(prefix, np.zeros(len(prefix), np.bool_))
            writer.add(tokens, np.ones(len(tokens), np.bool_))
            if piece.is_last:
                if not (tokens.size and tokens[-1] == tokenizer.eos_id):
                    writer.add(eos, np.ones(1, np.bool_))
                writer.end(file=piece.file, line=0, kind=KINDS.index(TEXT))


def _sample(row: RowText, encoding: Encoded, tokenizer: Tokenizer) -> tuple[TokenArray, BoolArray]:
    """Tokens and trained marks of a row; the end of sequence closes it once, and is trained."""
    tokens, eos = encoding.tokens, tokenizer.eos_id
    trained = np.zeros(len(tokens), np.bool_)
    for begin, end in row.spans:
        # A token that straddles the border holds the answer's first characters: it is trained.
        inside = np.flatnonzero((encoding.ends > begin) & (encoding.begins < end))
        ends_of_turn = inside[tokens[inside] == eos]
        if row.starts_document or not ends_of_turn.size:
            trained[inside] = True
        else:  # what a template writes after the end of turn is nobody's to say
            trained[inside[inside <= ends_of_turn[-1]]] = True
    # Nothing after the last trained token is ever a target, or seen by one.
    last = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else 0
    tokens, trained = tokens[:last], trained[:last]
    if not (tokens.size and tokens[-1] == eos):
        tokens = np.append(tokens, np.uint32(eos))
        trained = np.append(trained, True)
    prefix = tokenizer.prefix
    if row.starts_document and not np.array_equal(tokens[: len(prefix)], prefix):
        tokens = np.concatenate([prefix, tokens])
        trained = np.concatenate([np.zeros(len(prefix), np.bool_), trained])
    return tokens, trained


def _rows(
    source: Source,
    tokenizer: Tokenizer,
    tally: Tally,
    columns: Mapping[str, str],
    *,
    train_on_prompt: bool,
    skip_invalid: bool,
) -> Iterator[_Row]:
    tally.num_files = len(source.files)
    for file, records in source.records():
        for record in records:
            tally.num_read += 1
            mistake = record.mistake
            if not mistake and not isinstance(record.value, dict):
                hint = ", one row a line; an array of rows belongs in .json" if isinstance(record.value, list) else ""
                mistake = f": is a JSON {type(record.value).__name__}; a row is an object{hint}"
            try:
                if mistake:
                    raise ValueError(mistake)
                kind, named = recognise(record.value, columns)
                content = row_content(kind, named, tokenizer, train_on_prompt=train_on_prompt)
            except ValueError as error:
                mistake = mistake or f": {error}"
                if not skip_invalid:
                    raise InputError(f"{source.place(file, record.line)}{mistake}") from error
                tally.skip("invalid row", file, record.line, mistake)
                continue
            if content.skip_reason:
                tally.skip(content.skip_reason, file, record.line, f": {_shown(record.value)}")
                continue
            tally.kinds[kind.name] += 1
            yield _Row(file, record.line, KINDS.index(kind), content)


def _shown(value: Any) -> str:
    """The beginning of a row; lone halves of surrogate pairs, which no terminal takes, are question marks."""
    text = json.dumps(value, ensure_ascii=False, default=str)[:_SHOWN_CHARACTERS]
    return text.encode("utf-8", "replace").decode()


def _batches(pieces: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
