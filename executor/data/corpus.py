"""A source, tokenized and cut to documents: what training and evaluation data are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from executor import tokenizer as tokenizers
from executor.data.documents import Documents, LongSamples, cut_samples, packing_saves
from executor.data.report import DataReport, ReadReport, Tally, shown_sample, skipped_lines
from executor.data.row_kind import check_columns
from executor.data.source import Source, find_source
from executor.data.token_cache import Samples, SampleWriter, cache_key, cached_samples, default_folder
from executor.data.tokenize import write_documents, write_rows
from executor.source_tree import package_hash
from executor.tokenizer import ByteTokenizer, FolderTokenizer, TokenizerChoice, open_tokenizer
from simulator.errors import InputError
from simulator.units import counted


@dataclass(frozen=True)
class DataChoices:
    """How a source is read. All but `cache` decide what is trained.

    columns          our column -> the rows' own name for it, as in {"prompt": "question", "completion": "answer"}
    train_on_prompt  also what the answers answer; prompts are masked otherwise
    skip_invalid     rows that cannot be read are counted, not refused
    long_samples     what becomes of samples longer than a row; auto splits text and cuts off the others
    packing          several documents in a row, which do not see each other
    cache            the folder of tokenized data; None: in the user's cache folder
    """

    tokenizer: TokenizerChoice = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on_prompt: bool = False
    skip_invalid: bool = False
    long_samples: LongSamples = "auto"
    packing: bool = False
    cache: Path | str | None = None


@dataclass(frozen=True)
class Corpus:
    """All documents of a source."""

    source: Source
    tokenizer: ByteTokenizer | FolderTokenizer
    choices: DataChoices
    sequence_length: int
    samples: Samples
    read: ReadReport
    documents: Documents

    def report(self, documents: Documents, *, num_rows: int, num_held_out: int) -> DataReport:
        """The report of those `documents` of this corpus that a data set has. The first sample is its first one."""
        counts, firsts = self._skipped()
        first = slice(documents.begins[0], documents.ends[0])
        lengths = np.diff(self.samples.bounds)
        longest = int(np.argmax(lengths))
        return DataReport(
            source=self.source.name,
            tokenizer=self.tokenizer.name,
            num_files=self.read.num_files,
            left_out=self.source.left_out,
            num_read=self.read.num_read,
            kinds=self.read.kinds,
            skipped=counts,
            first_skipped=firsts,
            num_truncated=documents.num_truncated,
            num_split=documents.num_split,
            longest_tokens=int(lengths[longest]),
            longest_at=self.place(longest),
            num_untrained_turns=self.read.num_untrained_turns,
            packed=self.choices.packing,
            packing_saves=0.0 if self.choices.packing else packing_saves(documents.sizes, self.sequence_length),
            num_held_out=num_held_out,
            num_rows=num_rows,
            num_tokens=int(documents.sizes.sum()),
            num_targets=int(documents.num_targets.sum()),
            num_places=num_rows * self.sequence_length,
            first_sample=shown_sample(self.tokenizer, self.samples.tokens[first], self.samples.trained[first]),
        )

    def require_documents(self) -> None:
        """Raise InputError with the reasons when nothing is left to train on."""
        if len(self.documents):
            return
        reasons = [f"{count} skipped: {reason}" for reason, count in self._skipped()[0].items()]
        what = f"{counted(self.read.num_read, 'row')} read" if self.read.num_read else "nothing to read"
        # A prompt without an answer, or a sample too long to be taken: both are a matter of the row's length.
        too_long = len(self.documents.prompt_only) + len(self.documents.too_long)
        remedy = "; a longer sequence_length would keep some" if too_long else ""
        raise InputError(f"{self.source.name}: no usable rows ({'; '.join([what, *reasons])}){remedy}")

    def _skipped(self) -> tuple[dict[str, int], dict[str, str]]:
        """What was left out while reading, and then for its length."""
        counts, firsts = skipped_lines(self.read, self.source.place)
        for reason, samples in (
            (f"the prompt fills the row of {self.sequence_length} tokens", self.documents.prompt_only),
            (f"longer than a row of {self.sequence_length} tokens", self.documents.too_long),
        ):
            if len(samples):
                counts[reason], firsts[reason] = len(samples), self.place(int(samples[0]))
        return counts, firsts

    def place(self, sample: int) -> str:
        """File and line of a sample, as the user finds it."""
        file, line, _ = self.samples.origins[sample]
        return self.source.place(int(file), int(line))


def read_corpus(
    name: Path | str,
    *,
    what: str = "data",
    vocab_size: int,
    sequence_length: int,
    model_folder: Path | str | None,
    choices: DataChoices,
    say: Callable[[str], None],
) -> Corpus:
    """Tokenize a source, or find it in the cache. `what` is the setting that names it.

    Raises InputError, also where nothing is left to train on.
    """
    check_columns(choices.columns)
    source = find_source(name, what=what)
    tokenizer = open_tokenizer(model_folder, vocab_size=vocab_size, choice=choices.tokenizer)
    folder = Path(choices.cache).expanduser() if choices.cache is not None else default_folder()
    if source.folder and folder.resolve().is_relative_to(source.folder.resolve()):
        raise InputError(f"cache: {folder} lies inside the data, {source.name}; set it to a folder elsewhere")
    digest = source.digest()
    key = cache_key(
        {
            "code": [package_hash(Path(__file__).parent), Path(tokenizers.__file__).read_text()],
            "source": digest,
            "is_text": source.is_text,
            "tokenizer": tokenizer.identity,
            "vocab_size": vocab_size,
            "columns": dict(choices.columns),
            "train_on_prompt": choices.train_on_prompt,
            "skip_invalid": choices.skip_invalid,
        }
    )

    def write(writer: SampleWriter, tally: Tally) -> None:
        if source.is_text:
            write_documents(source, tokenizer, writer, tally)
        else:
            write_rows(
                source, tokenizer, writer, tally, columns=choices.columns, train_on_prompt=choices.train_on_prompt,
                skip_invalid=choices.skip_invalid,
            )  # fmt: skip
        if source.digest() != digest:  # what was written is not what the key says
            raise InputError(f"{source.name}: has changed while it was read; start again when it is complete")

    samples, read = cached_samples(folder, key, write, vocab_size=vocab_size, say=say)
    documents = cut_samples(samples, sequence_length=sequence_length, long_samples=choices.long_samples)
    corpus = Corpus(source, tokenizer, choices, sequence_length, samples, read, documents)
    corpus.require_documents()
    return corpus
