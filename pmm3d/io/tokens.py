"""Tokens in an HDF5 file, handed out as sequences whose targets are the next tokens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import NumpyLibrary, library_kind
from ..comm import Grid
from ..errors import DataError
from ..layout import Layout, batch_layout
from .batched import Batched, Some
from .loader import Loader, Side, check_at_least
from .reader import Rows
from .source import SourceFile
from .text import TOKENS

if TYPE_CHECKING:
    import h5py

SEQ = "seq"
"""The axis that splits each sequence."""


class TokenDataSet(Batched):
    """A text as tokens, one data set of an HDF5 file, cut into sequences of equal length without padding. Collective
    over the grid.

    sequence     tokens of a sequence. Sequence i has the tokens from i * sequence on; its targets are those from
                 i * sequence + 1 on. The last (tokens - 1) mod sequence targets of the file are left out
    tokens       name of the data set: integers (n,), as `convert_text` writes it
    vocabulary   number of different tokens; None: the attribute `vocabulary` of the data set, or 256 for uint8
    order        (sequence,): a permutation of the positions of each sequence, in which its rows lie, as zig-zag for an
                 axis "seq"; None: ascending
    library      of the batches' arrays, as in DistMatrix; the grid's if left out
    cache_bytes  the tokens of a loader are read into memory once if that takes no more bytes, or 16 MiB if the data set
                 is contiguous

    samples          number of sequences;   classes   the number of different tokens, as `vocabulary`
    bytes_per_token  of the text, by the attribute `bytes`; None without it
    fingerprint      of the data set and the length of a sequence; the same on every rank and grid

    Use as a context manager, or close(). Raises DataError, on every rank, for a file or data set that is missing, of
    another type, too short for a sequence, or different on other ranks; for a vocabulary that is not known; and for a
    sequence that the ranks along "seq" do not divide.

        >>> import tempfile, h5py
        >>> from pmm3d import Grid
        >>> with tempfile.TemporaryDirectory() as folder, Grid(shape="ddp") as grid:
        ...     with h5py.File(path := f"{folder}/text.h5", "w") as file:
        ...         file["tokens"] = np.arange(10, dtype="uint8")
        ...     with TokenDataSet(grid, grid.comm.bcast(path), 4) as data:
        ...         x, y = next(iter(data.loader(2, shuffle=False)))
        ...         x.gather().ravel().tolist(), y.gather().ravel().tolist(), x.dtype
        ([0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], 'int64')
    """

    def __init__(self, grid: Grid, path: str | os.PathLike[str], sequence: int, *, tokens: str = TOKENS,
                 vocabulary: int | None = None, order: np.ndarray | None = None,
                 library: str | NumpyLibrary | None = None, cache_bytes: int = 2**28):
        super().__init__()
        self.grid, self.path, self.sequence, self.cache_bytes = grid, str(path), sequence, cache_bytes
        fingerprint, pieces = "", getattr(grid.shape, SEQ, 1)
        with grid.collective_call("TokenDataSet", self.path, sequence, tokens, vocabulary, library_kind(library),
                                  cache_bytes, None if order is None else order.tolist()):
            check_at_least(1, sequence=sequence)
            if sequence % pieces:
                raise DataError(f"a sequence of {sequence} tokens cannot be split evenly over {pieces} ranks along "
                                f"{SEQ}: choose a multiple of {pieces}")
            if order is not None and not np.array_equal(np.sort(order), np.arange(sequence)):
                raise DataError(f"order is no permutation of the {sequence} positions of a sequence")
            self.library, self._order = grid.library(library), order
            self.file = SourceFile(self.path)
            self.tokens = self.file.dataset(tokens)
            if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
                raise DataError(f"{self.path}: data set {tokens!r} holds {self.tokens.dtype} {self.tokens.shape}; "
                                "tokens are integers in one dim, as pmm3d convert text writes them")
            self.samples = (len(self.tokens) - 1) // sequence
            if not self.samples:
                raise DataError(f"{self.path}: data set {tokens!r} has {len(self.tokens)} tokens; a sequence of "
                                f"{sequence} and the token after it need {sequence + 1}: choose shorter sequences")
            self.vocabulary = self.classes = self._vocabulary(vocabulary)
            nbytes = self.tokens.attrs.get("bytes")
            self.bytes_per_token = None if nbytes is None else float(nbytes) / len(self.tokens)
            if grid.rank == 0 or grid.dry_run is not None:
                fingerprint = f"{self.file.fingerprint(self.tokens)}/{sequence}"
        with grid.collective_call("TokenDataSet", self.path, self.tokens.shape, self.classes):
            pass
        self.fingerprint = grid.comm.bcast(fingerprint)

    def _vocabulary(self, given: int | None) -> int:
        if given is not None:
            check_at_least(1, vocabulary=given)
            return int(given)
        found = self.tokens.attrs.get("vocabulary", 256 if self.tokens.dtype == np.uint8 else None)
        if found is None:
            raise DataError(f"{self.path}: data set {self.tokens.name[1:]!r} of {self.tokens.dtype} has no attribute "
                            "vocabulary: write one, the number of different tokens, or give vocabulary=")
        return int(found)

    def renumbered(self, values: np.ndarray, rows: Rows) -> np.ndarray:
        """The tokens as they are. Raises DataError for one that is not in the vocabulary."""
        if values.size and not 0 <= values.min() <= values.max() < self.vocabulary:
            wrong = values[(values < 0) | (values >= self.vocabulary)][0]
            raise DataError(f"{self.path}: data set {self.tokens.name[1:]!r} has the token {wrong}; the tokens of the "
                            f"vocabulary are 0 to {self.vocabulary - 1}")
        return values

    def loader(self, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
               prefetch: int = 2, rows: Some = None, micro_batches: int = 1) -> Loader:
        """A Loader of batches (x, y): tokens and the tokens that come next, (batch_size * sequence, 1) int64 each, rows
        in `token_layout(grid, sequence)`. Along an axis "seq" each rank reads its part of each sequence. Collective.

        batch_size   sequences of a batch, over all ranks;   rows   the sequences to use

        Other arguments, and errors, as of `DataSet.loader`.
        """
        read = Layout(batch_layout(None).rows, (SEQ,) if SEQ in self.grid.shape.names else ())
        made = token_layout(self.grid, self.sequence)
        x, y = (Side(_Sequences(self.tokens, self.samples, self.sequence, shift, self._order), self.sequence, read,
                     "int64", made) for shift in (0, 1))
        return self._loader((x, y), batch_size, shuffle, seed, drop_last, prefetch, rows, micro_batches)


def token_layout(grid: Grid, sequence: int) -> Layout:
    """The layout of a matrix whose rows are the tokens of sequences: over data and z in units of a sequence, and inside
    a sequence over an axis "seq" if the grid has one.

        >>> token_layout(Grid.dry((1, 1, 2)), 8)
        Layout(rows=('data', 'z'), cols=(), units=(8, 1))
    """
    rows = batch_layout(None).rows
    if SEQ not in grid.shape.names:
        return Layout(rows, (), units=(sequence, 1))
    return Layout((*rows, SEQ), (), units=(dict.fromkeys(rows, sequence), 1))


class _Sequences:
    """Tokens of a data set as a matrix (samples, sequence), in the form in which `Columns` reads data sets. shift: 0
    for the tokens, 1 for those that come next."""

    def __init__(self, tokens: h5py.Dataset, samples: int, sequence: int, shift: int, order: np.ndarray | None):
        self._tokens, self._shift = tokens, shift
        self.shape, self.dtype, self.name, self.chunks = (samples, sequence), tokens.dtype, tokens.name, tokens.chunks
        self._order = np.arange(sequence) if order is None else order

    def read_direct(self, out: np.ndarray, selection: tuple[Any, slice]) -> None:
        """Fill out (rows, columns). Consecutive tokens are read together."""
        rows, columns = selection
        positions = self._order[columns]
        sequence = self.shape[1]
        if isinstance(rows, slice) and len(positions) == sequence and self._order[0] == 0 and _ascending(positions):
            start = rows.start * sequence + self._shift
            out[...] = self._tokens[start : start + out.size].reshape(out.shape)
            return
        edges = [0, *np.flatnonzero(np.diff(positions) != 1) + 1, len(positions)]
        for row, into in zip(np.r_[rows].tolist(), out):
            for low, high in zip(edges, edges[1:]):
                start = row * sequence + int(positions[low]) + self._shift
                into[low:high] = self._tokens[start : start + high - low]


def _ascending(positions: np.ndarray) -> bool:
    return bool((np.diff(positions) == 1).all())
