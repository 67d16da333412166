import numpy as np
import pytest
from tiny_tokenizer import byte_level_folder, sentence_piece_folder
from transformers import AutoTokenizer

from executor.tokenizer import ByteTokenizer, FolderTokenizer, open_tokenizer
from simulator.errors import InputError

TEXT = "naïve – 日本語 🙂\n\x00 end"


def test_bytes_are_utf8_and_come_back():
    tokenizer = ByteTokenizer(300)
    (tokens,) = tokenizer.encode([TEXT])
    assert bytes(tokens.tolist()) == TEXT.encode()
    assert tokenizer.decode(tokens) == TEXT
    assert (tokenizer.eos_id, tokenizer.pad_id) == (256, 257)
    assert tokenizer.decode([104, 105, 256, 257]) == "hi<eos><pad>"
    assert ByteTokenizer(257).pad_id == 256
    with pytest.raises(InputError, match="at least 257"):
        ByteTokenizer(256)


def test_byte_offsets_name_the_character_of_each_byte():
    encoded = ByteTokenizer(300).encode_with_offsets([TEXT, ""])
    expected = [position for position, character in enumerate(TEXT) for _ in character.encode()]
    assert encoded[0].begins.tolist() == expected
    assert encoded[0].ends.tolist() == [position + 1 for position in expected]
    assert encoded[1].tokens.size == 0


@pytest.mark.parametrize("vocab_size", [257, 258, 300])
def test_saved_byte_tokenizer_is_the_same_in_transformers(tmp_path, vocab_size):
    tokenizer = ByteTokenizer(vocab_size)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    every_byte = "".join(chr(code) for code in range(0x180)) + TEXT
    assert theirs(every_byte)["input_ids"] == tokenizer.encode([every_byte])[0].tolist()
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)


def test_the_folder_s_tokenizer_is_taken_and_bytes_where_it_has_none(tmp_path):
    empty, full = tmp_path / "empty", byte_level_folder(tmp_path / "full")
    empty.mkdir()
    assert isinstance(open_tokenizer(empty, vocab_size=320), ByteTokenizer)
    assert isinstance(open_tokenizer(None, vocab_size=320), ByteTokenizer)
    assert isinstance(open_tokenizer(full, vocab_size=320, choice="bytes"), ByteTokenizer)
    tokenizer = open_tokenizer(full, vocab_size=320)
    assert isinstance(tokenizer, FolderTokenizer)
    theirs = AutoTokenizer.from_pretrained(full)
    assert (
        tokenizer.encode(["the quick 日本"])[0].tolist()
        == theirs("the quick 日本", add_special_tokens=False)["input_ids"]
    )
    assert tokenizer.decode(tokenizer.encode([TEXT])[0]) == TEXT
    assert tokenizer.prefix.size == 0


def test_a_tokenizer_with_a_beginning_has_it_as_prefix(tmp_path):
    tokenizer = FolderTokenizer(sentence_piece_folder(tmp_path), 300)
    assert tokenizer.prefix.tolist() == [1]
    assert 1 not in tokenizer.encode(["the dog"])[0]
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 2)


def test_lone_surrogates_do_not_break_encoding(tmp_path):
    for tokenizer in (ByteTokenizer(300), FolderTokenizer(byte_level_folder(tmp_path), 320)):
        assert tokenizer.decode(tokenizer.encode(["a\ud800b"])[0]) == "a?b"
        assert np.all(tokenizer.encode_with_offsets(["a\ud800b"])[0].ends <= 3)


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    folder = byte_level_folder(tmp_path / "large")
    with pytest.raises(InputError, match=r"the model's vocabulary has 260 entries; they do not belong together"):
        FolderTokenizer(folder, 260).encode(["the quick brown fox"])
    with pytest.raises(InputError, match="no end-of-sequence token"):
        FolderTokenizer(byte_level_folder(tmp_path / "endless", eos=None), 320)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="broken: its tokenizer cannot be read"):
        open_tokenizer(broken, vocab_size=320)


def test_the_exported_byte_tokenizer_chats_as_it_was_trained(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = ByteTokenizer(300)
    tokenizer.save(tmp_path)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for count, prompts in ((2, False), (1, True)):
        text = loaded.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompts)
        assert text == tokenizer.render(messages[:count], add_generation_prompt=prompts)
