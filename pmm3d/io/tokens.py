"""Tokens in an HDF5 file, returned as batches of sequences whose targets are the next tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from math import log
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import NumpyLibrary, library_kind
from ..comm import Grid
from ..errors import DataError
from ..layout import Layout, batch_layout, order_of
from .loader import Batched, Loader, Some, check_at_least
from .reader import Rows, Source
from .source import SourceFile
from .text import BYTES, TOKENS, Tokenizer

if TYPE_CHECKING:
    import h5py


class TokenDataSet(Batched):
    """A text as tokens: one data set of an HDF5 file, cut into sequences of equal length without padding.

    Parameters
    ----------
    grid : Grid
        The grid. Opening and all methods are collective over it.
    path : str or Path
        The file, as `convert_text` writes it.
    sequence : int
        Tokens of a sequence. Sequence i has the tokens from i * sequence on, and its targets are the tokens from i *
        sequence + 1 on. The last (tokens - 1) mod sequence targets of the file are left out.
    tokens : str
        Name of the data set: integers, (n,).
    documents : str or None
        Name of the data set with the first token of each document: integers, (d,). Batches then contain the document of
        each token, so that a token attends to no other document.
    vocabulary : int or None
        Number of different tokens. Default: the attribute `vocabulary` of the data set, or 256 for uint8.
    library : str or None
        Array library of the batches, as in `DistMatrix.empty`. Default: the library of the grid.
    cache_bytes : int
        The tokens of a loader are read into memory once if that takes at most this number of bytes (default: 256 MiB),
        or at most 16 MiB for a contiguous data set.

    Attributes
    ----------
    samples : int
        Number of sequences.
    classes, vocabulary : int
        Number of different tokens.
    features : int
        Columns of a batch: 1, or 2 with `documents`.
    bytes_per_token : float or None
        Bytes of the text for each token, by the attribute `bytes`.
    facts : dict of str to str
        "tokenizer": digest of the tokenizer, which is compared with that of stored weights. Without a tokenizer in the
        file: "bytes" for a vocabulary of 256 tokens, otherwise no fact.
    fingerprint : str
        Digest of the data set and the length of a sequence, the same on every rank and grid.

    Raises
    ------
    DataError
        On every rank: for a file or data set that is missing, of another type, too short for one sequence, or different
        on other ranks, and for an unknown vocabulary.

    Notes
    -----
    Use the data set as a context manager, or call `close`.

    Examples
    --------
    >>> import tempfile, h5py, numpy as np
    >>> from pmm3d import Grid
    >>> from pmm3d.io import TokenDataSet
    >>> with tempfile.TemporaryDirectory() as folder, Grid(shape="ddp") as grid:
    ...     with h5py.File(path := f"{folder}/text.h5", "w") as file:
    ...         file["tokens"] = np.arange(10, dtype="uint8")
    ...     with TokenDataSet(grid, grid.comm.bcast(path), 4) as data:
    ...         x, y = next(iter(data.loader(2, shuffle=False)))
    ...         x.gather().ravel().tolist(), y.gather().ravel().tolist(), x.dtype
    ([0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], 'int64')
    """

    def __init__(
        self,
        grid: Grid,
        path: str | os.PathLike[str],
        sequence: int,
        *,
        tokens: str = TOKENS,
        documents: str | None = None,
        vocabulary: int | None = None,
        library: str | NumpyLibrary | None = None,
        cache_bytes: int = 2**28,
    ):
        super().__init__()
        self.grid, self.path, self.sequence, self.cache_bytes = grid, str(path), sequence, cache_bytes
        fingerprint, facts, self.features, self._starts = "", dict[str, str](), 1 + (documents is not None), None
        with grid.collective_call(
            "TokenDataSet", self.path, sequence, tokens, documents, vocabulary, library_kind(library), cache_bytes
        ):
            check_at_least(2, sequence=sequence)
            self.library = grid.library(library)
            self.file = SourceFile(self.path)
            self.tokens = self.file.dataset(tokens)
            if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
                raise DataError(
                    f"{self.path}: data set {tokens!r} holds {self.tokens.dtype} {self.tokens.shape}; "
                    "tokens are integers in one dim, as pmm3d convert text writes them"
                )
            self.samples = (len(self.tokens) - 1) // sequence
            if not self.samples:
                raise DataError(
                    f"{self.path}: data set {tokens!r} has {len(self.tokens)} tokens; a sequence of "
                    f"{sequence} and the token after it need {sequence + 1}: choose shorter sequences"
                )
            self.vocabulary = self.classes = self._vocabulary(vocabulary)
            described = [self.tokens]
            if documents is not None:
                described.append(self.file.dataset(documents))
                self._starts = self._first_tokens(described[-1])
            nbytes = self.tokens.attrs.get("bytes")
            self.bytes_per_token = None if nbytes is None else float(nbytes) / len(self.tokens)
            if grid.rank == 0 or grid.dry_run is not None:
                fingerprint = f"{self.file.fingerprint(*described)}/{sequence}"
                coder = Tokenizer.of(self.path)
                facts = {"tokenizer": coder.digest} if coder.json or self.vocabulary == BYTES else {}
        with grid.collective_call("TokenDataSet", self.path, self.tokens.shape, self.classes):
            pass
        self.fingerprint, self.facts = grid.comm.bcast((fingerprint, facts))

    def _vocabulary(self, given: int | None) -> int:
        if given is not None:
            check_at_least(1, vocabulary=given)
            return int(given)
        vocabulary = self.tokens.attrs.get("vocabulary", 256 if self.tokens.dtype == np.uint8 else None)
        if vocabulary is None:
            raise DataError(
                f"{self.path}: data set {self.tokens.name[1:]!r} of {self.tokens.dtype} has no attribute "
                "vocabulary: write one, the number of different tokens, or give vocabulary="
            )
        return int(vocabulary)

    def _first_tokens(self, table: h5py.Dataset) -> np.ndarray:
        """Return the number of the first token of each document. Raises DataError for an invalid table."""
        with self.file.unchanged():
            starts: np.ndarray = table[...]
        known = starts.ndim == 1 and starts.dtype.kind in "iu"
        if not known or starts[0] or (np.diff(starts.astype("int64")) <= 0).any() or starts[-1] >= len(self.tokens):
            raise DataError(
                f"{self.path}: data set {table.name[1:]!r} does not say where documents begin: needed is "
                "the number of the first token of each document, integers in one dim, ascending from 0 and "
                f"below {len(self.tokens)}, as pmm3d convert text writes them"
            )
        return starts

    def renumbered(self, values: np.ndarray, rows: Rows) -> np.ndarray:
        """Return tokens and numbers of documents unchanged. Raises DataError for a token outside the vocabulary."""
        tokens = values[:, 0]
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            wrong = tokens[(tokens < 0) | (tokens >= self.vocabulary)][0]
            raise DataError(
                f"{self.path}: data set {self.tokens.name[1:]!r} has the token {wrong}; the tokens of the "
                f"vocabulary are 0 to {self.vocabulary - 1}"
            )
        return values

    def of_loss(self, loss: float) -> dict[str, float]:
        """Return "perplexity" of a mean cross-entropy, and "bits_per_byte" if `bytes_per_token` is known."""
        figures = {"perplexity": float(np.exp(loss))}
        if self.bytes_per_token:
            figures["bits_per_byte"] = loss / (log(2) * self.bytes_per_token)
        return figures

    def loader(
        self,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
        rows: Some = None,
        micro_batches: int = 1,
        layout: Layout | None = None,
    ) -> Loader:
        """A Loader of batches (x, y): tokens, and the tokens that come next. Collective.

        Parameters
        ----------
        batch_size : int
            Sequences of a batch, over all ranks.
        shuffle, seed, drop_last, prefetch, rows, micro_batches
            See `DataSet.loader`. Rows are sequences.
        layout : Layout or None
            Layout of the batches. Default: rows over data and z, in units of a sequence. On a grid with an axis "seq",
            `nn.transformer.token_layout(grid, sequence)` splits sequences too, and each rank reads only its rows, in
            the order of the layout.

        Returns
        -------
        Loader
            The loader. x and y are (batch_size * sequence, 1) of int64. With `documents`, x has a second column: the
            document of each token.

        Raises
        ------
        DataError, LayoutError
            As `DataSet.loader`.
        """
        made = Layout(batch_layout(None).rows, (), units=(self.sequence, 1)) if layout is None else layout
        x = _TokenSource(self.tokens, self.sequence, made, 0, self._starts)
        y = _TokenSource(self.tokens, self.sequence, made, 1)
        return self._loader((x, y), batch_size, shuffle, seed, drop_last, prefetch, rows, micro_batches)


class _TokenSource(Source):
    """Inputs or targets of a loader of tokens. Each token is a row. Tokens that are consecutive in the file are read
    together.

    shift       0 for the tokens, 1 for the next tokens
    starts      first token of each document. The batch then has a second column: document numbers. None: no second
                column
    """

    def __init__(self, dataset: h5py.Dataset, width: int, layout: Layout, shift: int, starts: np.ndarray | None = None):
        super().__init__(dataset, width, layout, "int64")
        self._shift, self._starts, order = shift, starts, order_of(layout.units[0])
        self._positions = None if order is None else np.array(order.positions)

    def shape(self, samples: int) -> tuple[int, int]:
        return samples * self.width, 1 if self._starts is None else 2

    def open(self, grid: Grid, rows: Sequence[int], most: int, cache_bytes: int) -> None:
        self._grid, (self._first, self._last) = grid, (row * self.width + self._shift for row in rows)
        r0, r1, self.low, self._high = self.box(most)
        self._most, self._caching = r1 - r0, self._is_cached(1, cache_bytes)

    def read(self, samples: Rows, out: np.ndarray) -> Rows:
        sequences = np.r_[samples]
        box = self.box(len(sequences))
        rows = np.arange(box.r0, box.r1)
        if self._positions is not None:
            sequence, stored = np.divmod(rows, len(self._positions))
            rows = sequence * len(self._positions) + self._positions[stored]
        own, position = np.divmod(rows, self.width)
        tokens = sequences[own] * self.width + position + self._shift
        if self._starts is not None:
            out[:, 1] = np.searchsorted(self._starts, tokens, side="right") - 1
        if self._caching:
            if self.cache is None:
                self.cache = self.dataset[self._first : self._last]
            out[:, 0] = self.cache[tokens - self._first]
            return samples
        edges = [0, *np.flatnonzero(np.diff(tokens) != 1) + 1, len(tokens)]
        for low, high in pairwise(edges):
            if high > low:
                out[low:high, 0] = self.dataset[tokens[low] : tokens[low] + high - low]
        return samples
