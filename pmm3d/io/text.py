"""Conversion of text to tokens in HDF5 files for `TokenDataSet`. numpy and h5py are imported late, for a fast
command."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataError, check_regular, needs, reason
from ..text import counted
from .conversion import check_target, completed

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger("pmm3d.io")
TOKENS, TOKENIZER, DOCUMENTS = "tokens", "tokenizer", "documents"
"""Names of the data sets of tokens, of the tokenizer's JSON, and of the first token of each document."""
HDF5 = b"\x89HDF"
"""First bytes of an HDF5 file."""
BYTES = 256
"""Size of the vocabulary without a tokenizer."""
ENDS = "<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<eos>"
"""Names of tokens that end a text."""
OF_TOKENS = ("added_tokens", "normalizer", "pre_tokenizer", "model")
"""Keys of a tokenizer's JSON that determine the tokens of a text; the others only cut, pad or decode."""


class Tokenizer:
    """Text to tokens, and back.

    Parameters
    ----------
    json : str or None
        A tokenizer of the package `tokenizers`, as in its file tokenizer.json. Its settings for batches of a training
        (truncation, padding, dropout of merges) are not used. Default: a token is a byte of the text in UTF-8.

    Attributes
    ----------
    vocabulary : int
        Number of different tokens.

    Raises
    ------
    DataError
        For JSON that is no tokenizer.

    Examples
    --------
    >>> from pmm3d.io import Tokenizer
    >>> Tokenizer().encode("déjà").tolist(), Tokenizer().decode([100, 195, 169])
    ([100, 195, 169, 106, 195, 160], 'dé')
    """

    def __init__(self, json: str | None = None):
        self.json = json

    @cached_property
    def _made(self) -> Any:
        with needs("text", "a tokenizer"):
            from tokenizers import Tokenizer as Made
        try:
            made = Made.from_str(self.json or "")
        except Exception as error:  # tokenizers raises no narrower class
            raise DataError(f"the tokenizer is none that the package tokenizers can read: {error}") from None
        made.no_truncation()
        made.no_padding()
        if getattr(made.model, "dropout", None):
            made.model.dropout = None
        return made

    @cached_property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return BYTES if self.json is None else max(self._made.get_vocab().values()) + 1

    @property
    def for_package(self) -> str:
        """JSON of the package tokenizers. Without a tokenizer, that of a tokenizer whose tokens are bytes."""
        if self.json is not None:
            return self.json
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that ByteLevel does not replace
        others = (byte for byte in range(BYTES) if byte not in shown)
        vocabulary = {chr(byte): byte for byte in shown} | {chr(BYTES + at): byte for at, byte in enumerate(others)}
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": level,
                "decoder": level,
                "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            }
        )

    @property
    def digest(self) -> str:
        """Digest of all settings that change tokens; "bytes" without a tokenizer.

        It is the same for the files of all versions of the package, which write merges in two forms, and defaults or
        nothing.
        """
        known: Any = self.json
        if self.json is None:
            return "bytes"
        with suppress(ValueError, AttributeError):
            description = json.loads(self.json)
            known = {key: description.get(key) for key in OF_TOKENS}
            model = {
                key: value
                for key, value in known["model"].items()
                if key != "dropout" and value is not False and value not in (None, "")
            }
            merges = [each if isinstance(each, str) else " ".join(each) for each in model.get("merges", ())]
            known["model"] = model | {"merges": merges}
        return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the tokens of a text, int64. Raises DataError if a tokenizer gets bytes that are not UTF-8."""
        import numpy as np

        try:
            text = text.encode(errors="surrogateescape") if isinstance(text, str) else text
            if self.json is None:
                return np.frombuffer(text, np.uint8)
            return np.array(self._made.encode(text.decode(), add_special_tokens=False).ids, np.int64)
        except UnicodeError as error:
            raise DataError(
                f"the text is not UTF-8, from byte {getattr(error, 'start', 0)} on: convert it to UTF-8"
            ) from None

    @cached_property
    def ends(self) -> list[int]:
        """Special tokens that end a text, with a name in `ENDS`."""
        known = {} if self.json is None else self._made.get_added_tokens_decoder()
        return [number for number, token in known.items() if token.special and token.content in ENDS]

    def token(self, text: str) -> int:
        """Return the token of a text. Raises DataError if there is none.

        It is the token that decodes to the text. If there are several, it is the one with this name, or the first one.
        Otherwise it is the only token that the text encodes to.
        """
        tokens = self.encode(text).tolist()
        if self.json is not None and text:  # if each word begins with a blank, "\n" encodes to two tokens
            for token in (self._made.token_to_id(text) or 0, *range(self.vocabulary)):
                if self.decode([token]) == text:
                    return token
        if len(tokens) != 1:
            raise DataError(
                f"{text!r} is {counted(len(tokens), 'token')}, not one: name the text of a token of the tokenizer"
            )
        return tokens[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises DataError for a token outside the vocabulary.
        """
        numbers = list(map(int, tokens))
        if wrong := [token for token in numbers if not 0 <= token < self.vocabulary]:
            raise DataError(
                f"the token {wrong[0]} has no text: the tokens of this tokenizer are 0 to "
                f"{self.vocabulary - 1}. Decode with the tokenizer that the text was converted with"
            )
        if self.json is None:
            return bytes(numbers).decode(errors="replace")
        text: str = self._made.decode(numbers, skip_special_tokens=False)
        return text

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Tokenizer in a tokenizer.json of the package `tokenizers`, or in an HDF5 file of `convert_text`.

        Raises DataError if the file or its tokenizer cannot be read.
        """
        from .source import SourceFile

        try:
            check_regular(path)
            with open(path, "rb") as opened:
                made = None if opened.peek(len(HDF5)).startswith(HDF5) else cls(opened.read().decode())
            if made is not None:
                made._made
                return made
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror or error}") from None
        except (UnicodeDecodeError, DataError) as error:
            raise DataError(
                f"{path} is no tokenizer.json of the package tokenizers: {error}. For a tokenizer.model of "
                "sentencepiece, the transformers package writes a tokenizer.json: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
            ) from None
        with SourceFile(str(path)).h5 as file:
            return cls(file[TOKENIZER][()].decode() if TOKENIZER in file else None)


class ConvertedText(NamedTuple):
    """Result of `convert_text`: number of tokens, size of the vocabulary, and bytes of the text."""

    tokens: int
    vocabulary: int
    bytes: int


def convert_text(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    between: str = "\n",
    overwrite: bool = False,
) -> ConvertedText:
    r"""Write the tokens of text files to an HDF5 file, one file after the other. The text must fit into memory.

    Parameters
    ----------
    sources : sequence of str or Path
        The text files.
    target : str or Path
        The HDF5 file.
    tokenizer : str or Path or None
        A file for `Tokenizer.of`. Default: a token is a byte, and any file is a text.
    between : str
        Text between two files, such as "<|endoftext|>" for a tokenizer with this token. Empty files at the beginning
        add nothing.
    overwrite : bool
        Replace a file that exists.

    Returns
    -------
    ConvertedText
        Number of tokens, number of different tokens of the vocabulary, and bytes of the text.

    Raises
    ------
    DataError
        For files that cannot be read or that exist, for an empty text, and, with a tokenizer, for text that is not
        UTF-8.

    Notes
    -----
    The data set `tokens`, (n,), has the smallest of the types uint8, uint16 and int32 that contains the vocabulary. Its
    attributes are `vocabulary` and `bytes`, the bytes of the text, for losses in bits per byte. The data set
    `documents` contains the number of the first token of each source that is not empty. The data set `tokenizer`
    contains the JSON of the tokenizer. The file has a temporary name until it is complete.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pmm3d.io import convert_text
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = Path(folder, "poem.txt")
    ...     size = text.write_text("so much depends\nupon")
    ...     convert_text([text], text.with_suffix(".h5"))
    ConvertedText(tokens=20, vocabulary=256, bytes=20)
    """
    target = Path(target)
    try:
        coder = Tokenizer() if tokenizer is None else Tokenizer.of(tokenizer)
        if between.startswith("<") and between.endswith(">") and len(coder.encode(between)) > 1:
            logger.warning(
                f"the tokenizer has no token {between}, so several tokens are written between two files. "
                "Name one of its tokens"
            )
        parts: list[np.ndarray] = []
        starts, nbytes, count = list[int](), 0, 0
        for source in map(Path, sources):
            check_target(source, target, overwrite)
            for text in (between.encode(), _read(source))[not count :]:
                nbytes += len(text)
                parts.append(_encoded(coder, source, text))
                count += len(parts[-1])
            starts += [count - len(parts[-1])] if len(parts[-1]) else []
        done = ConvertedText(count, coder.vocabulary, nbytes)
        if done.tokens < 2:
            raise DataError(
                f"{target}: there is no text: {counted(done.tokens, 'token')} in {counted(len(sources), 'file')}"
            )
        with completed(target) as file:
            tokens = file.create_dataset(TOKENS, (done.tokens,), token_dtype(done.vocabulary))
            tokens.attrs.update(vocabulary=done.vocabulary, bytes=done.bytes)
            file[DOCUMENTS] = starts
            start = 0
            for part in parts:
                tokens[start : start + len(part)] = part
                start += len(part)
            if coder.json is not None:
                file[TOKENIZER] = coder.json
    except OSError as error:
        raise DataError(f"cannot convert {', '.join(map(str, sources))} to {target}: {reason(error)}") from None
    return done


def token_dtype(vocabulary: int) -> str:
    """Return the smallest integer type for all tokens of a vocabulary.

    >>> token_dtype(256), token_dtype(50257), token_dtype(128256)
    ('uint8', 'uint16', 'int32')
    """
    return next(dtype for dtype, most in (("uint8", 2**8), ("uint16", 2**16), ("int32", 2**31)) if vocabulary <= most)


def _read(path: Path) -> bytes:
    check_regular(path)
    return path.read_bytes()


def _encoded(tokenizer: Tokenizer, source: Path, text: bytes) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"{source}: {error}, or leave the tokenizer out, so that each byte is a token") from None
