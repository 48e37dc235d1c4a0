"""`pmm3d generate` and `pmm3d export --names`: a run of tokens continues a text, and is exported as a GPT-2."""

import json

import h5py
import numpy as np
import pytest
from safetensors import safe_open

from pmm3d.io import Tokenizer
from pmm3d.nn.training.predict import text_after

TEXT = "the cat sat on the mat. the dog sat on the cat. "
RUN = """
[data]
file = "text.h5"
sequence = 12
batch_size = 8
[network]
kind = "gpt"
layers = 2
hidden = 16
heads = 2
positions = 40
[optimizer]
lr = 0.02
[training]
folder = "run"
steps = 6
"""


@pytest.fixture
def pmm3d(on_ranks):
    return lambda *arguments, ranks=1: on_ranks(ranks, *arguments)


def said(done, text):
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("pmm3d: ") == 1 and text in " ".join(done.stderr.split()), done.stderr


def words_of(*words):
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["?", *words])}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def metaspace():
    """A tokenizer whose tokens begin with a blank, as of Llama 2 and Mistral."""
    from tokenizers import decoders, pre_tokenizers

    made = words_of("▁the", "▁cat", "▁sat")
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def test_the_text_after_a_prompt_has_its_blank():
    """And a character that the prompt begins is that of the text."""
    for made in (words_of("the", "cat", "sat"), metaspace()):
        coder = Tokenizer(made.to_str())
        tokens = coder.encode("the cat sat").tolist()
        assert len(tokens) == 3 and text_after(coder, tokens[:2], tokens) == " sat"
    tokens = Tokenizer().encode("né a").tolist()
    assert [text_after(Tokenizer(), tokens[:cut], tokens) for cut in (1, 2, 3, 5)] == ["é a", "é a", " a", ""]


def test_a_run_of_tokens_continues_a_text(pmm3d, tmp_path):
    """The same text on one rank, and on two ranks with the grid of the run; greedy, and with a seed."""
    (tmp_path / "cat.txt").write_text(TEXT * 20)
    (tmp_path / "run.toml").write_text(RUN)
    for words in (("convert", "text", "cat.txt", "text.h5"), ("train", "run.toml")):
        done = pmm3d(*words, ranks=2 if words[0] == "train" else 1)
        assert done.returncode == 0, done.stderr
    found = dict[tuple, list]()
    for options in (("--temperature", "0"), ("--top-k", "5", "--seed", "3"), ("--seed", "4")):
        for ranks in (1, 2):
            done = pmm3d(
                "generate", "run", "--prompt", "the cat", "--length", "20", "--out", "out.txt", *options, ranks=ranks
            )
            assert done.returncode == 0, done.stderr
            text = (tmp_path / "out.txt").read_bytes().decode()
            assert "the cat" + text in done.stdout and "20 tokens by run/checkpoints" in done.stdout
            found.setdefault(options, []).append(text)
            (tmp_path / "out.txt").unlink()
    assert all(one == other for one, other in found.values()) and len({one for one, _ in found.values()}) == 3
    said(pmm3d("generate", "run", "--prompt", "the cat", "--length", "40"), "7 tokens and 40 more exceed the")
    said(pmm3d("generate", "run", "--prompt", ""), "the prompt has no tokens")
    said(pmm3d("generate", "run", "--prompt", "a", "--overwrite"), "--overwrite has no effect without --out")
    said(pmm3d("predict", "run", "text.h5", "--out", "o.h5"), "pmm3d generate run --prompt TEXT")
    (tmp_path / "text.h5").rename(tmp_path / "moved.h5")
    assert pmm3d("generate", "run", "--prompt", "the cat", "--length", "3").returncode == 0
    assert pmm3d("generate", "run", "--prompt", "a", "--length", "3", "--tokenizer", "moved.h5").returncode == 0
    words_of("the", "cat").save(str(tmp_path / "words.json"))
    assert pmm3d("convert", "text", "cat.txt", "words.h5", "--tokenizer", "words.json").returncode == 0
    other = ("generate", "run", "--prompt", "the cat", "--length", "0", "--tokenizer", "words.h5")
    said(pmm3d(*other), "the tokenizer of words.h5 differs, and nothing was changed: tokenizer was 'bytes', is ")
    assert pmm3d(*other, "--accept", "tokenizer").returncode == 0
    said(pmm3d("generate", "run", "--prompt", "a", "--tokenizer", "text.h5"), "text.h5")
    assert pmm3d("export", "run", "gpt.safetensors", ranks=2).returncode == 0
    with safe_open(tmp_path / "gpt.safetensors", "numpy") as file:
        assert file.get_tensor("transformer.h.1.attn.c_attn.weight").shape == (16, 48)
        assert json.loads(file.metadata()["config.json"])["n_positions"] == 40
        assert np.isfinite(file.get_tensor("transformer.wte.weight")).all()
    said(pmm3d("export", "run", "no.safetensors", "--names", "llama"), "no names 'llama'. This GPT has the names torch")
    with h5py.File(tmp_path / "moved.h5", "r+") as file:  # with tokens that the tokenizer does not have
        file["tokens"].attrs["vocabulary"] = 3000
    (tmp_path / "wide.toml").write_text(RUN.replace("text.h5", "moved.h5").replace('"run"', '"wide"'))
    assert pmm3d("train", "wide.toml", ranks=2).returncode == 0
    done = pmm3d("generate", "wide", "--prompt", "a", "--length", "30", ranks=2)
    assert done.returncode == 0, done.stderr
