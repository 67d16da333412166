"""Tiny tokenizers of the two common builds, written as a model folder would hold them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "what is two and two? four, of course",
    "user assistant system",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WRITES_BOS = (
    "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
)
# Like templates of reasoning models: the generation prompt opens a block, earlier reasoning is dropped.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def byte_level_folder(
    folder: Path, *, eos: str = "<|im_end|>", pad: str | None = "<|pad|>", template: str | None = CHATML
):
    """Byte-level BPE without a beginning-of-sequence token, as Qwen's."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return _saved(library, folder, template, eos_token=eos, pad_token=pad)


def sentence_piece_folder(folder: Path, *, template: str | None = WRITES_BOS):
    """Metaspace BPE that begins every document with <s>, as Llama's."""
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    library.train_from_iterator([*CORPUS, "abcdefghijklmnopqrstuvwxyz []"], trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _saved(library, folder, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _saved(library: Tokenizer, folder: Path, template: str | None, **specials: str | None) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=library, **specials)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
