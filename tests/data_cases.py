"""Data files, read as runs read them, for tests that look at single samples."""

import json
from pathlib import Path
from typing import Any

from executor.data.corpus import Corpus, DataChoices, read_corpus


def written_rows(folder: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    """A JSONL file of rows; a string is a line as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def corpus_of(
    source: Path | str,
    *,
    model_folder: Path | None = None,
    sequence_length: int = 400,
    vocab_size: int = 320,
    **choices: Any,
) -> Corpus:
    """The corpus of a source; bytes are tokens unless a folder has a tokenizer."""
    return read_corpus(
        source, vocab_size=vocab_size, sequence_length=sequence_length, model_folder=model_folder,
        choices=DataChoices(**choices), say=lambda line: None,
    )  # fmt: skip


def shown(corpus: Corpus, index: int = 0) -> tuple[str, str]:
    """A sample as (whole text, trained text)."""
    begin, end = corpus.samples.bounds[index : index + 2]
    tokens, trained = corpus.samples.tokens[begin:end], corpus.samples.trained[begin:end]
    return corpus.tokenizer.decode(tokens), corpus.tokenizer.decode(tokens[trained])


def all_shown(corpus: Corpus) -> list[tuple[str, str]]:
    return [shown(corpus, index) for index in range(corpus.samples.num_samples)]


def skipped(corpus: Corpus) -> dict[str, int]:
    return corpus.report(corpus.documents, num_rows=1, num_held_out=0).skipped


def first_skipped(corpus: Corpus) -> dict[str, str]:
    return corpus.report(corpus.documents, num_rows=1, num_held_out=0).first_skipped
