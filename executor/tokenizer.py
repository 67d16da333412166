"""Tokenizers: the model folder's own, through transformers, or plain bytes."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from simulator.errors import InputError
from simulator.schema import identity_hash

TokenArray = npt.NDArray[np.unsignedinteger]  # uint32, or uint16 where it is stored
BoolArray = npt.NDArray[np.bool_]
TokenizerChoice = Literal["auto", "bytes"]

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = (*_VOCABULARY_FILES, "tokenizer_config.json")
# Every tokenizer knows some of these; one whose vocabulary is missing knows none.
_COMMON_CHARACTERS = "etaoin ETAOIN ACGT 0123456789 .,+-=()[] е 的 ا"
_BYTE_SPECIALS = ("<eos>", "<pad>")  # ids 256 and 257


class Encoded(NamedTuple):
    """Tokens and the characters that each covers: [begins, ends) in the encoded text."""

    tokens: TokenArray
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What the data needs of a tokenizer. Encoding adds no special tokens; `prefix` is what begins a document."""

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> str: ...  # equal where texts and conversations become the same tokens
    @property
    def vocab_size(self) -> int: ...  # the model's: every id is below it
    @property
    def eos_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def prefix(self) -> TokenArray: ...
    @property
    def has_chat_template(self) -> bool: ...  # without one, conversations are written as ChatML

    def encode(self, texts: Sequence[str]) -> list[TokenArray]: ...
    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]: ...
    def decode(self, tokens: Sequence[int] | TokenArray) -> str: ...
    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """A conversation as text, by the chat template. Raises ValueError where the template refuses."""
        ...


def open_tokenizer(
    folder: Path | str | None, *, vocab_size: int, choice: TokenizerChoice = "auto"
) -> "ByteTokenizer | FolderTokenizer":
    """The tokenizer of a model's folder; bytes where the folder has none, or by choice.

    `vocab_size` is the model's. Raises InputError when the tokenizer cannot be read or does not fit the model.
    """
    folder = Path(folder) if folder is not None else None
    if choice == "bytes" or folder is None or not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return ByteTokenizer(vocab_size)
    return FolderTokenizer(folder, vocab_size)


class ByteTokenizer:
    """Every UTF-8 byte is a token; 256 ends a document, 257 pads (256 where the vocabulary has no 257).

    Raises InputError when the model's vocabulary has fewer than 257 entries.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 257:
            raise InputError(
                f"tokenizer: bytes need a vocabulary of at least 257 (256 bytes and the end of sequence), "
                f"the model has {vocab_size}"
            )
        self.name = self.identity = "bytes"
        self.vocab_size = vocab_size
        self.eos_id = 256
        self.pad_id = 257 if vocab_size > 257 else 256
        self.prefix: TokenArray = np.zeros(0, np.uint32)
        self.has_chat_template = False

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        encoded = []
        for text, tokens in zip(texts, self.encode(texts), strict=True):
            # A byte that does not continue a character (10xxxxxx) begins one.
            characters = np.cumsum((tokens & 0xC0) != 0x80) - 1
            assert not text or characters[-1] + 1 == len(text)
            encoded.append(Encoded(tokens, characters, characters + 1))
        return encoded

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        specials = dict(enumerate(_BYTE_SPECIALS, start=256))
        parts = [bytes([token]) if token < 256 else specials.get(int(token), "?").encode() for token in tokens]
        return b"".join(parts).decode("utf-8", "replace")

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        return _plain_layout(messages, add_generation_prompt=add_generation_prompt)

    def save(self, folder: Path) -> None:
        """Write tokenizer files with the same ids, for transformers' AutoTokenizer."""
        from tokenizers import Tokenizer as LibraryTokenizer
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # Byte-level tokenizers write a byte as a printable character: itself, or one from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
        library = LibraryTokenizer(models.BPE(vocab={text: byte for byte, text in characters.items()}, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        specials = _BYTE_SPECIALS[: self.pad_id - 255]
        library.add_special_tokens(list(specials))
        fast = PreTrainedTokenizerFast(tokenizer_object=library, eos_token=specials[0], pad_token=specials[-1])
        fast.chat_template = _PLAIN_TEMPLATE
        fast.save_pretrained(folder)


class FolderTokenizer:
    """A Hugging Face folder's tokenizer. Never runs code from the folder, never asks, never downloads.

    Where it has no padding token the end-of-sequence token pads: padding is masked by position. Raises InputError
    when transformers cannot read it, when it has no vocabulary or no end-of-sequence token, and for ids beyond the
    model's vocabulary.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises what its parsers raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"{folder}: its tokenizer cannot be read ({reason})") from error
        eos_id = self._tokenizer.eos_token_id
        if eos_id is None:
            raise InputError(f"{folder}: its tokenizer has no end-of-sequence token; set eos_token, or use bytes")
        self.name = f"{type(self._tokenizer).__name__} of {len(self._tokenizer)} tokens"
        self.vocab_size = vocab_size
        self.eos_id = int(eos_id)
        self.pad_id = int(self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else eos_id)
        self.has_chat_template = bool(self._tokenizer.chat_template)
        self._folder = folder
        known = self._tokenizer(_COMMON_CHARACTERS, add_special_tokens=False)["input_ids"]
        if all(token == self._tokenizer.unk_token_id for token in known):  # else all text would be trained as nothing
            raise InputError(
                f"{folder}: its tokenizer has no vocabulary, of the files {', '.join(_VOCABULARY_FILES)}; add the one "
                "that it was saved with, or take its files out to train on bytes"
            )
        begin = self._tokenizer("", add_special_tokens=True)["input_ids"]
        self.prefix: TokenArray = np.array([token for token in begin if token != eos_id], np.uint32)
        self._check(np.array([self.eos_id, self.pad_id], np.uint32))
        self.identity = self._identity()

    def _identity(self) -> str:
        own = self._tokenizer
        rules = own.backend_tokenizer.to_str() if own.is_fast else {**own.get_vocab(), "": repr(own.init_kwargs)}
        versions = [importlib.metadata.version(package) for package in ("transformers", "tokenizers")]
        template = own.chat_template
        return identity_hash([type(own).__name__, rules, template, self.eos_id, self.prefix.tolist(), versions])

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        encoded = self._call(texts)["input_ids"]
        return [self._check(np.array(tokens, np.uint32)) for tokens in encoded]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        if not self._tokenizer.is_fast:
            raise InputError(f"{self._folder}: masking prompts needs a fast tokenizer (tokenizer.json)")
        encoded = self._call(texts, return_offsets_mapping=True)
        results = []
        for tokens, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            begins_ends = np.array(offsets, np.int64).reshape(-1, 2)
            results.append(Encoded(self._check(np.array(tokens, np.uint32)), begins_ends[:, 0], begins_ends[:, 1]))
        return results

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        if not self.has_chat_template:
            return _plain_layout(messages, add_generation_prompt=add_generation_prompt)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # jinja raises what a template raises
            raise ValueError(f"the chat template refuses the conversation ({error})") from error
        return str(text)

    def _call(self, texts: Sequence[str], **choices: Any) -> Any:
        # A lone half of a surrogate pair is a character for JSON and none for UTF-8.
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        return self._tokenizer(clean, add_special_tokens=False, return_attention_mask=False, verbose=False, **choices)

    def _check(self, tokens: TokenArray) -> TokenArray:
        if tokens.size and tokens.max() >= self.vocab_size:
            raise InputError(
                f"{self._folder}: its tokenizer gives token {tokens.max()}, the model's vocabulary has "
                f"{self.vocab_size} entries; they do not belong together"
            )
        return tokens


# What `_plain_layout` writes, for whoever chats with the exported model.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _plain_layout(messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
    """ChatML, for models that bring no chat template."""
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")
