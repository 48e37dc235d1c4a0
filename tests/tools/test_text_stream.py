"""Text as its tokens come: complete characters, and together the text of all tokens. End tokens of a tokenizer."""

import pytest
from loops import looped

from pmm3d import DataError
from pmm3d.io import Tokenizer
from pmm3d.nn.training.continuation import TextStream

TEXT = "né 日本 🙂, and a b"
BROKEN = "\N{REPLACEMENT CHARACTER}"


def metaspace():
    """A tokenizer whose tokens begin with a blank, as of Llama 2, and with tokens of bytes."""
    from tokenizers import Tokenizer as Made
    from tokenizers import decoders, models, pre_tokenizers

    bytes_as_tokens = {f"<0x{byte:02X}>": byte for byte in range(256)}
    words = {word: 256 + number for number, word in enumerate(["▁", "n", ",", "▁and", "▁a", "▁b"])}
    made = Made(models.BPE({**bytes_as_tokens, **words}, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made.to_str()


TOKENIZERS = {"bytes": lambda: None, "byte level": lambda: Tokenizer().for_package, "metaspace": metaspace}


def streamed(coder, prompt, tokens):
    """The parts that are told, the first one with the text of the prompt, and the text after the prompt."""
    told = []
    stream = TextStream(coder, prompt, told.append)
    for token in tokens:
        stream.add(token)
    return told, stream.finish()


@looped("name, cut", [(name, cut) for name in TOKENIZERS for cut in (1, 2, 3, 7)])
def test_parts_are_complete_characters_and_the_whole_text(name, cut):
    """Also if the prompt ends inside a character: the text of the prompt is then without it."""
    coder = Tokenizer(TOKENIZERS[name]())
    tokens = coder.encode(TEXT).tolist()
    told, text = streamed(coder, tokens[:cut], tokens[cut:])
    assert "".join(told) == coder.decode(tokens) and BROKEN not in "".join(told) and told[-1] == ""
    assert text == "".join(told)[len(coder.decode(tokens[:cut]).rstrip(BROKEN)) :] and len(told) >= len(text)


@looped("name, cut", [(name, cut) for name in TOKENIZERS for cut in (1, 2, 3, 7)])
def test_a_cut_character_changes_no_text_before_it(name, cut):
    """Although the decoder of Llama 2 breaks all bytes beside it. The text is that on the terminal."""
    coder = Tokenizer(TOKENIZERS[name]())
    tokens = coder.encode("né ab日").tolist()
    for missing in (1, 2):
        told, text = streamed(coder, tokens[:cut], tokens[cut:-missing])
        shown = "".join(told)
        assert shown.rstrip(BROKEN) == "né ab" and shown.endswith(text) and text.endswith(BROKEN)


def test_bytes_that_are_no_character_come_with_the_next_one_or_at_the_end():
    told, text = streamed(Tokenizer(), [97], (0xFF, 0x62, 0xC3))
    assert told == ["a" + BROKEN + "b", BROKEN] and text == BROKEN + "b" + BROKEN
    assert streamed(Tokenizer(), [*b"caf\xc3"], [0xA9]) == (["café", ""], "é")
    assert streamed(Tokenizer(), [*b"caf"], []) == (["caf"], "")


def test_a_token_is_named_by_its_text_also_if_the_text_encodes_to_several():
    """Of two tokens with the text, the one with this name. Not a token of a byte whose name is the text."""
    coder = Tokenizer(metaspace())
    assert len(coder.encode("\n")) == 2 and coder.token("\n") == 10
    assert [coder.token(text) for text in ("n", "and", "a")] == [257, 259, 97]
    with pytest.raises(DataError, match="is 2 tokens, not one"):
        Tokenizer(Tokenizer().for_package).token("é")


def test_ends_are_special_tokens_with_a_known_name():
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Made

    made = Made.from_str(Tokenizer().for_package)
    made.add_special_tokens(["<|endoftext|>", "<|start|>", "</s>", "<end_of_turn>", "<|end|>"])
    made.add_tokens([AddedToken("<eos>")])
    coder = Tokenizer(made.to_str())
    assert coder.ends == [256, 258, 259, 260] and Tokenizer().ends == []
    assert [coder.token(text) for text in ("<|start|>", "<eos>")] == [257, 261] and Tokenizer().token("\n") == 10
    for text, count in (("ab", "2 tokens"), ("", "0 tokens")):
        with pytest.raises(DataError, match=f"is {count}, not one: name the text of a token"):
            coder.token(text)
