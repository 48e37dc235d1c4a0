"""Memory-mapped files of tokens: raw ones, as nanoGPT writes them, and indexed data sets of Megatron."""

from __future__ import annotations

import mmap
import os
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .source import SampleSource
from .text import DOCUMENTS, TOKENS

RAW_TYPES = "uint16", "uint32"
"""Types of the tokens in a raw file."""
BIN, IDX = ".bin", ".idx"
"""Endings of a file of tokens, and of its index."""
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""First bytes of an HDF5 file."""
MAGIC, HEADER = b"MMIDIDX\0\0", "<QBQQ"
"""First bytes of an index, and its version, code of the type, number of sequences, and number of entries of the table
of documents."""
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Type of the tokens by its code in an index."""
OF_LLM_C = 20240520, 20240801
"""First number of a .bin file of llm.c, which has a header of 1,024 bytes."""
LOOKED_AT = 2**12
"""Number of first tokens whose type is checked."""
AT_ONCE = 2**20
"""Number of entries of an index that are checked at a time."""


class Mapped:
    """Numbers in a file from a position on. Only the numbers that are read are mapped into memory, while they are read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.arange(10, dtype="uint16").tofile(f"{folder}/train.bin")
    ...     Mapped("tokens", f"{folder}/train.bin", "uint16", 10)[3:6].tolist()
    [3, 4, 5]
    """

    ndim = 1

    def __init__(self, name: str, path: str, dtype: str, count: int, offset: int = 0):
        self.name, self.dtype, self.shape = f"/{name}", np.dtype(dtype).newbyteorder("<"), (count,)
        self.attrs: dict[str, Any] = {}
        self._path, self._offset = path, offset
        self._file = open(path, "rb")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: slice) -> np.ndarray:
        start, stop, _ = numbers.indices(len(self))
        if stop <= start:
            return np.empty(0, self.dtype)
        first, last = (self._offset + number * self.dtype.itemsize for number in (start, stop))
        if os.fstat(self._file.fileno()).st_size < last:  # a map beyond the end of a file would end the process
            raise DataError(f"{self._path} has become shorter since it was opened")
        page = first - first % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(self._file.fileno(), last - page, access=mmap.ACCESS_READ, offset=page) as mapped:
            return np.frombuffer(mapped, self.dtype, stop - start, first - page).copy()

    def close(self) -> None:
        self._file.close()


class Table:
    """A table in memory, with the interface of a data set."""

    ndim = 1

    def __init__(self, name: str, values: np.ndarray):
        self.name, self.dtype, self.shape, self._values = f"/{name}", values.dtype, values.shape, values
        self.attrs: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: Any) -> np.ndarray:
        values: np.ndarray = self._values[rows]
        return values


def is_mapped(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a file of tokens. An HDF5 file with the ending of one is none."""
    if not os.fspath(path).endswith((BIN, IDX)):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(HDF5_SIGNATURE)) != HDF5_SIGNATURE
    except OSError:
        return True


def is_raw(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a file of tokens without an index."""
    path = Path(path)
    return path.suffix == BIN and is_mapped(path) and not path.with_suffix(IDX).exists()


class MappedFile(SampleSource):
    """A .bin file of tokens. With an .idx file of the same name, it is an indexed data set of Megatron, which has the
    data sets "tokens" and "documents"; otherwise its bytes are tokens of the type `dtype`.

    raw   whether it has no index

    Raises DataError for a file that is missing, empty or of another format, and for an index that does not fit.
    """

    def __init__(self, path: str, dtype: str):
        stem = Path(path).with_suffix("")
        super().__init__(str(stem) + BIN)
        index = str(stem) + IDX
        self.raw = not (path.endswith(IDX) or os.path.exists(index))
        try:
            self._watch(self.path)
            nbytes = os.stat(self.path).st_size
            if self.raw:
                self._tokens = self._raw(dtype, nbytes)
            else:
                self._watch(index)
                self._index = _Index(index)
                self._tokens = Mapped(TOKENS, self.path, self._index.dtype, self._index.tokens)
                self._index.check_size(self.path, nbytes)
        except OSError as error:
            raise DataError(f"cannot open {error.filename or self.path}: {error.strerror or error}") from None

    def _raw(self, dtype: str, nbytes: int) -> Mapped:
        size = np.dtype(dtype).itemsize
        if not nbytes or nbytes % size:
            raise DataError(
                f"{self.path} has {nbytes} bytes, which are no tokens of {dtype} ({size} bytes each): name the type "
                f"with token_dtype= (data.token_dtype): {' or '.join(RAW_TYPES)}"
            )
        tokens = Mapped(TOKENS, self.path, dtype, nbytes // size)
        first = tokens[:LOOKED_AT]
        if int.from_bytes(first.tobytes()[:4], "little") in OF_LLM_C:
            raise DataError(
                f"{self.path} begins with the header of llm.c, not with tokens: write the bytes after the first 1,024 "
                "to another file"
            )
        if dtype == "uint16" and len(first) > 3 and not len(first) % 2 and not first[1::2].any() and first.any():
            raise DataError(
                f"{self.path}: every second of the first {len(first)} tokens is 0, as if the tokens were uint32, not "
                'uint16: set token_dtype="uint32" (data.token_dtype)'
            )
        return tokens

    def dataset(self, name: str) -> Mapped | Table:
        if name == TOKENS:
            return self._tokens
        if name == DOCUMENTS and not self.raw:
            return Table(DOCUMENTS, self._index.first_tokens)
        if name == DOCUMENTS:
            remedy = (
                f" without a table of documents. Leave documents= (data.documents) out, or name a file with an {IDX} "
                "file of Megatron"
            )
        else:
            remedy = ("" if self.raw else f" and {DOCUMENTS!r}") + ". Other names are for HDF5 files"
        raise DataError(f"{self.path} has no data set {name!r}; it contains {TOKENS!r}{remedy}")

    def verify(self) -> None:
        if not self.raw:
            self._index.verify()

    def close(self) -> None:
        self._tokens.close()
        if not self.raw:
            self._index.close()


class _Index:
    """An .idx file of Megatron: the length of each sequence (int32), its first byte in the .bin file (int64), and the
    first sequence of each document and the number of all sequences (int64).

    dtype    type of the tokens;   tokens   number of tokens
    """

    def __init__(self, path: str):
        self.path = path
        fixed = len(MAGIC) + struct.calcsize(HEADER)
        with open(path, "rb") as file:
            start, nbytes = file.read(fixed), os.fstat(file.fileno()).st_size
        if len(start) < fixed or not start.startswith(MAGIC):
            raise DataError(
                f"{path} is no index of Megatron: it does not begin with MMIDIDX. Give a .bin file of tokens without "
                "an index another name"
            )
        version, code, sequences, entries = struct.unpack(HEADER, start[len(MAGIC) :])
        if version != 1:
            raise DataError(f"{path} is an index of version {version}; this version of pmm3d reads version 1")
        self.dtype = CODES.get(code, f"code {code}")
        if np.dtype(CODES.get(code, "float32")).kind == "f":
            raise DataError(f"{path}: the numbers have the type {self.dtype}; tokens are integers")
        needed = fixed + 12 * sequences + 8 * entries
        if nbytes == needed + sequences:
            raise DataError(f"{path} is a multimodal index, with a mode of each sequence; needed are tokens of text")
        if nbytes != needed or not sequences or entries < 2:
            raise DataError(
                f"{path} has {nbytes:,} bytes; an index of {sequences:,} sequences and {entries:,} entries for "
                f"documents has {needed:,}, and is not empty: write it again"
            )
        self._lengths = Mapped("lengths", path, "int32", sequences, fixed)
        self._firsts = Mapped("pointers", path, "int64", sequences, fixed + 4 * sequences)
        self._documents = Mapped("documents", path, "int64", entries, fixed + 12 * sequences)
        last = slice(sequences - 1, sequences)
        self._itemsize = np.dtype(self.dtype).itemsize
        self.nbytes = int(self._firsts[last][0]) + int(self._lengths[last][0]) * self._itemsize
        self.tokens = self.nbytes // self._itemsize

    def check_size(self, path: str, nbytes: int) -> None:
        """Raise DataError if the .bin file does not have the tokens of the index."""
        if nbytes != self.nbytes:
            raise DataError(
                f"{path} has {nbytes:,} bytes, and its index {self.path} describes {self.nbytes:,}: both files must "
                "be of one data set"
            )

    def verify(self) -> None:
        """Raise DataError unless sequences follow each other without gaps, and documents begin in ascending order."""
        expected = 0
        for start in range(0, len(self._lengths), AT_ONCE):
            block = slice(start, start + AT_ONCE)
            lengths, firsts = self._lengths[block].astype(np.int64), self._firsts[block]
            if (lengths < 0).any():
                raise DataError(f"{self.path}: sequence {start + int((lengths < 0).argmax())} has a negative length")
            right = expected + np.cumsum(lengths * self._itemsize) - lengths * self._itemsize
            if (wrong := right != firsts).any():
                at = int(wrong.argmax())
                raise DataError(
                    f"{self.path}: sequence {start + at} begins at byte {firsts[at]:,} of the .bin file; the sequences "
                    f"before it end at byte {right[at]:,}. Write the data set again, with its sequences in order and "
                    "without gaps"
                )
            expected = int(right[-1] + lengths[-1] * self._itemsize)
        self._first_sequences()

    def _first_sequences(self) -> np.ndarray:
        """Return the table of documents. Raises DataError for an invalid one."""
        documents = self._documents[:]
        if documents[0] or documents[-1] != len(self._lengths) or (np.diff(documents) < 0).any():
            raise DataError(
                f"{self.path}: the table of documents does not ascend from 0 to the number of sequences, "
                f"{len(self._lengths):,}: write the data set again"
            )
        return documents

    @cached_property
    def first_tokens(self) -> np.ndarray:
        """Number of the first token of each document that has tokens."""
        documents = self._first_sequences()
        with_sequences = documents[:-1][np.diff(documents) > 0]
        firsts = np.unique(self._firsts[:][with_sequences] // self._itemsize)
        return firsts[firsts < self.tokens]

    def close(self) -> None:
        for each in (self._lengths, self._firsts, self._documents):
            each.close()
