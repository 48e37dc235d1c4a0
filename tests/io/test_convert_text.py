"""Text to tokens in HDF5: bytes, tokens of a tokenizer, errors."""

import json

import h5py
import numpy as np
import pytest
from loops import given, looped
from typer.testing import CliRunner

from pmm3d import DataError
from pmm3d.io import Tokenizer, convert_text
from pmm3d.tools.commands import app

END = "<|endoftext|>"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "text.h5"


@pytest.fixture
def tokenizer(tmp_path):
    """The file of a tokenizer with three words, which are merged from letters, and a token between texts."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Made

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "abc")]
    words = [*letters, *("".join(pair) for pair in merges)]
    made = Made(models.BPE({word: number for number, word in enumerate(words)}, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END)])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def written(target):
    with h5py.File(target) as file:
        return file["tokens"][()], dict(file["tokens"].attrs)


def test_bytes_of_several_files(tmp_path, target):
    texts = [b"one \xff\x00", "zwölf".encode()]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    for between in ("\n", "", "\N{SNOWMAN}"):
        with given(between=between):
            sources = [tmp_path / "0.txt", tmp_path / "1.txt"]
            done = convert_text(sources, target, between=between, overwrite=True)
            whole = between.encode().join(texts)
            found, about = written(target)
            assert found.dtype == "uint8" and found.tobytes() == whole
            assert done == (len(whole), 256, len(whole)) and about == {"vocabulary": 256, "bytes": len(whole)}
            with h5py.File(target) as file:
                assert file["documents"][()].tolist() == [0, len(texts[0]) + len(between.encode())]
    (tmp_path / "none.txt").touch()
    assert convert_text([tmp_path / "none.txt", *sources], target, between=between, overwrite=True) == done
    with h5py.File(target) as file:
        assert file["documents"][0] == 0
    assert Tokenizer.of(target).decode(Tokenizer.of(target).encode("zwölf\n")) == "zwölf\n"


def test_the_tokens_of_a_tokenizer(tmp_path, target, tokenizer):
    (tmp_path / "a.txt").write_text("abc abc")
    (tmp_path / "b.txt").write_text("ä")
    done = convert_text([tmp_path / "a.txt", tmp_path / "b.txt"], target, tokenizer=tokenizer, between=END)
    made = Tokenizer.of(target)
    found, about = written(target)
    assert found.dtype == "uint16" and len(found) == 5 and made.decode(found) == f"abc abc{END}ä"
    assert found[:3].tolist() == [257, 258, 259] and made.vocabulary == 260
    assert np.array_equal(made.encode(f"abc abc{END}ä"), found)
    with pytest.raises(DataError, match="the token 260 has no text: the tokens of this tokenizer are 0 to 259"):
        made.decode([257, 260])
    with pytest.raises(DataError, match="the token 256 has no text: .* 0 to 255. Decode with the tokenizer"):
        Tokenizer().decode([97, 256])
    assert done == (5, 260, 7 + len(END) + 2) and about == {"vocabulary": 260, "bytes": done.bytes}


def test_bytes_are_the_tokens_of_a_tokenizer_of_the_package(tokenizer):
    text = "".join(map(chr, range(128))) + " 's  \n\n zwölf \N{SNOWMAN} \U0001f600"
    made = Tokenizer(Tokenizer().for_package)
    assert made.vocabulary == 256 and made.encode(text).tolist() == [*text.encode()]
    assert made.decode(made.encode(text)) == text
    assert Tokenizer.of(tokenizer).for_package == tokenizer.read_text()


def test_tokenizers_differ_by_what_changes_tokens(tokenizer):
    known = json.loads(tokenizer.read_text())
    same = {**known, "truncation": {"max_length": 128}, "padding": {}, "decoder": None, "post_processor": None}
    model, merges = known["model"], known["model"]["merges"]
    other = {**known, "model": {**model, "merges": merges[::-1]}}
    older = {
        **known,
        "model": {
            **{key: value for key, value in model.items() if value is not None},
            "dropout": 0.1,
            "merges": [" ".join(each) for each in merges],
        },
    }
    forms = known, dict(reversed(known.items())), same, older, other
    digests = [Tokenizer(json.dumps(each)).digest for each in forms]
    assert len(set(digests[:4])) == 1 and digests[4] not in digests[:4]
    assert Tokenizer().digest == "bytes" and Tokenizer("of another program").digest not in digests


def test_what_is_refused(tmp_path, target, tokenizer):
    text, latin, empty, old = (tmp_path / name for name in ("a.txt", "latin.txt", "empty.txt", "old.h5"))
    text.write_text("abc")
    latin.write_bytes("abcö".encode("latin-1"))
    for path in (empty, old):
        path.touch()
    for said, sources, to, options in (
        ("cannot convert .*none.txt", [tmp_path / "none.txt"], target, {}),
        ("there is no text: 0 tokens in 1 file", [empty], target, {}),
        ("latin.txt: the text is not UTF-8, from byte 3 on", [text, latin], target, {"tokenizer": tokenizer}),
        ("let it end in .h5", [text], tmp_path / "text.npz", {}),
        ("exists; overwrite=True", [text], old, {}),
    ):
        with given(said=said), pytest.raises(DataError, match=said):
            convert_text(sources, to, **options)
        assert not target.exists()


def test_the_command(tmp_path, target, tokenizer):
    """`pmm3d convert text`, and tables, for which the word "table" is optional."""
    run = lambda *arguments: CliRunner(env={"COLUMNS": "140"}).invoke(app, ["convert", *map(str, arguments)])
    text, table = tmp_path / "a.txt", tmp_path / "table.csv"
    text.write_text("abc")
    table.write_text("a,b\n1,2\n3,4\n")
    for words, code, said in (
        (("text", text, text, target), 0, f"wrote {target}: 7 tokens of a vocabulary of 256, 7 bytes of text"),
        (("text", text, target), 2, "exists"),
        (
            ("text", text, text, target, "--tokenizer", tokenizer, "--between", END, "--overwrite"),
            0,
            "3 tokens of a vocabulary of 260, 19 bytes of text",
        ),
        ((table, tmp_path / "table.h5"), 0, "the first line is a header"),
        (("table", table, tmp_path / "table.h5", "--overwrite"), 0, "the first line is a header"),
    ):
        with given(words=words):
            done = run(*words)
            assert done.exit_code == code and said in done.output, done.output


def words(number=4):
    from tokenizers import Tokenizer as Made
    from tokenizers import models, pre_tokenizers

    made = Made(models.WordLevel({f"w{index}": index for index in range(number)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def test_settings_of_a_tokenizer_for_a_training_change_no_token(tmp_path, target):
    """Truncation, padding, and the dropout of merges. Each word is a token, once."""
    from tokenizers import Tokenizer as Made
    from tokenizers import models

    merges = [("a", "b"), ("ab", "c")]
    dropping = Made(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, merges, dropout=0.9))
    short, long = words(), words()
    short.enable_truncation(8)
    long.enable_padding(length=64, pad_id=1, pad_token="w1")
    for made, text, expected in (
        (short, "w2 w3 " * 10, [2, 3] * 10),
        (long, "w2 w3", [2, 3]),
        (dropping, "abc" * 10, [4] * 10),
    ):
        with given(text=text):
            made.save(str(tmp_path / "tokenizer.json"))
            (tmp_path / "a.txt").write_text(text)
            done = convert_text([tmp_path / "a.txt"], target, tokenizer=tmp_path / "tokenizer.json", overwrite=True)
            assert written(target)[0].tolist() == expected and done.tokens == len(expected)
            assert Tokenizer.of(target).encode(text).tolist() == expected


def test_a_tokenizer_is_a_json_file_or_a_converted_file(tmp_path, target, tokenizer):
    text = tmp_path / "a.txt"
    text.write_text("abc abc")
    convert_text([text], target, tokenizer=tokenizer)
    again = tmp_path / "again.h5"
    convert_text([text], again, tokenizer=target)
    assert np.array_equal(written(again)[0], written(target)[0])
    assert Tokenizer.of(again).json == Tokenizer.of(tokenizer).json == tokenizer.read_text()
    other = tmp_path / "other"
    for contents in (None, b"\n\x0e\n\x05<unk>\x15\x00\x00\xff\xfe", b"[]", b"{}", b"", b"\x89HDF\r\n\x1a\n"):
        with given(contents=contents), pytest.raises(DataError, match="other"):
            if contents is not None:
                other.write_bytes(contents)
            convert_text([text], again, tokenizer=other, overwrite=True)


@looped("text", ("ab\udcff", b"ab\xff", "\ud800"))
def test_a_text_that_is_not_utf_8_is_refused(tokenizer, text):
    """Such as the argument of a command, in which Python replaces bytes by surrogates. Without a tokenizer, these bytes
    are tokens."""
    assert Tokenizer().encode("ab\udcff").tolist() == [97, 98, 255]
    with given(text=text), pytest.raises(DataError, match="not UTF-8, from byte"):
        Tokenizer.of(tokenizer).encode(text)


@looped("between, count", ((END, 0), ("\n\n", 0), ("<s>", 1)))
def test_a_token_between_texts_that_the_tokenizer_lacks_is_warned_of(
    tmp_path, target, tokenizer, caplog, between, count
):
    (tmp_path / "a.txt").write_text("abc")
    convert_text(2 * [tmp_path / "a.txt"], target, tokenizer=tokenizer, between=between, overwrite=True)
    assert len(caplog.records) == count and all(between in each.getMessage() for each in caplog.records)
