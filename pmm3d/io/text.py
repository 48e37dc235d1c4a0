"""From text to the tokens in HDF5 that `TokenDataSet` reads. Importing this loads neither numpy nor h5py, for the
command."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataError, check_regular, needs
from .conversion import check_target, completed

if TYPE_CHECKING:
    import numpy as np

TOKENS, TOKENIZER, DOCUMENTS = "tokens", "tokenizer", "documents"
"""The data sets of the tokens, of the tokenizer's JSON, and of the first token of each document."""
BYTES = 256
"""Tokens of a text without a tokenizer."""


class Tokenizer:
    """Text to tokens and back.

    json         a tokenizer of the package `tokenizers`, as in its file tokenizer.json; None: a token is a byte of the
                 text in UTF-8
    vocabulary   number of different tokens

    Raises DataError for JSON that is no tokenizer.

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
            return Made.from_str(self.json or "")
        except Exception as error:  # of no narrower class
            raise DataError(f"the tokenizer is none that the package tokenizers can read: {error}") from None

    @property
    def vocabulary(self) -> int:
        return BYTES if self.json is None else max(self._made.get_vocab().values()) + 1

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the tokens of a text. Raises UnicodeDecodeError if a tokenizer is given bytes that are not UTF-8."""
        import numpy as np

        if self.json is None:
            return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
        text = text if isinstance(text, str) else text.decode()
        return np.array(self._made.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that are no UTF-8 become U+FFFD. Raises DataError for a token that is not in
        the vocabulary."""
        numbers = list(map(int, tokens))
        if wrong := [token for token in numbers if not 0 <= token < self.vocabulary]:
            raise DataError(f"the token {wrong[0]} has no text: the tokens of this tokenizer are 0 to "
                            f"{self.vocabulary - 1}. Decode with the tokenizer that the text was converted with")
        if self.json is None:
            return bytes(numbers).decode(errors="replace")
        text: str = self._made.decode(numbers, skip_special_tokens=False)
        return text

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Return the tokenizer of an HDF5 file that `convert_text` wrote. Raises DataError if it cannot be read."""
        from .source import SourceFile

        file = SourceFile(str(path)).h5
        with file:
            return cls(file[TOKENIZER][()].decode() if TOKENIZER in file else None)


class ConvertedText(NamedTuple):
    """What `convert_text` wrote: numbers of tokens, of different tokens that there may be, and of bytes of the text."""

    tokens: int
    vocabulary: int
    bytes: int


def convert_text(sources: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], *,
                 tokenizer: str | os.PathLike[str] | None = None, between: str = "\n",
                 overwrite: bool = False) -> ConvertedText:
    """Write the tokens of text files, one file after the other, to an HDF5 file. The text must fit into memory.

    tokenizer   a file tokenizer.json of the package `tokenizers`; None: a token is a byte, and any file is a text
    between     text between two files, such as "<|endoftext|>" for a tokenizer that has this token. Empty files at the
                beginning add nothing

    The data set `tokens` (n,) is uint8, uint16 or int32, the smallest type that has all tokens of the vocabulary. Its
    attributes are `vocabulary`, the number of different tokens, and `bytes`, that of the text, for losses in bits per
    byte. The data set `documents` contains the number of the first token of each source that is not empty. The data set
    `tokenizer` contains the JSON of the tokenizer. The HDF5 file has a temporary name until it is complete.

    Raises DataError for files that cannot be read or are in the way, an empty text, and with a tokenizer for text that
    is not UTF-8.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder, "poem.txt")
        ...     size = text.write_text("so much depends\\nupon")
        ...     convert_text([text], text.with_suffix(".h5"))
        ConvertedText(tokens=20, vocabulary=256, bytes=20)
    """
    target = Path(target)
    try:
        coder = Tokenizer(None if tokenizer is None else _read(Path(tokenizer)).decode())
        coder.vocabulary  # noqa: B018 that it can be read
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
            raise DataError(f"{target}: there is no text: {done.tokens} tokens in {len(sources)} files")
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
        raise DataError(f"cannot convert {', '.join(map(str, sources))} to {target}: {error}") from None
    return done


def token_dtype(vocabulary: int) -> str:
    """The smallest type of integers that has all tokens.

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
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8, from byte {error.start} on: convert it to UTF-8, or leave the "
                        "tokenizer out, so that each byte is a token") from None
