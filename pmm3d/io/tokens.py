"""Tokens, returned as batches of sequences whose targets are the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log
from typing import Any, Literal, NamedTuple

import numpy as np

from ..arrays import NumpyLibrary, library_kind
from ..comm import Grid
from ..errors import DataError
from ..layout import Layout, batch_layout, order_of
from .loader import Batched, Loader, Some, check_at_least
from .mapped import RAW_TYPES, MappedFile
from .mixture import AnySource, Joined, Piece, fingerprint_of, name_of, opened_source, place_of
from .pairs import PairSource, TokenColumn
from .reader import Rows, Source
from .source import SampleSource, SourceFile
from .text import BYTES, TOKENS, Tokenizer


class TokenDataSet(Batched):
    """A text as tokens, cut into sequences of equal length without padding.

    Parameters
    ----------
    grid : Grid
        The grid. Opening and all methods are collective over it.
    source : str, Path, object of pairs, or Mixture
        The tokens:

        - an HDF5 file with a data set of tokens, as `convert_text` writes it;
        - a `.bin` file of tokens without a header, as nanoGPT writes it. Give `vocabulary`;
        - the `.bin` or `.idx` file of an indexed data set of Megatron, which consists of both. Give `vocabulary`;
        - an object with `__len__` and `__getitem__`, whose item is a pair: `sequence` tokens, and the `sequence` tokens
          that come next. Give `vocabulary`. See `DataSet`;
        - a `Mixture` of these.

        A rank maps or reads only the tokens of its rows, unless it caches them (`cache_bytes`).
    sequence : int
        Tokens of a sequence. Sequence i of a file has the tokens from i * sequence on, and its targets are the tokens
        from i * sequence + 1 on. The last (tokens - 1) mod sequence targets of a file are left out.
    tokens : str
        Name of the data set of tokens: integers, (n,). Files other than HDF5 have the default name.
    documents : str or None
        Name of the data set with the first token of each document: integers, (d,). Batches then contain the document of
        each token, so that a token attends to no other document. An indexed data set of Megatron has the name
        "documents". A source of a mixture begins with a document.
    vocabulary : int or None
        Number of different tokens. Default: the attribute `vocabulary` of the data set, or 256 for uint8.
    token_dtype : "uint16", "uint32" or None
        Type of the tokens in a `.bin` file without a header, little-endian. Default: "uint16", or "uint32" for a
        vocabulary above 65,536.
    library : str or None
        Array library of the batches, as in `DistMatrix.empty`. Default: the library of the grid.
    cache_bytes : int
        The tokens of a loader are read into memory once if they are in HDF5 and take at most this number of bytes
        (default: 256 MiB), or at most 16 MiB for contiguous data sets.

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
        file: "bytes" for a vocabulary of 256 tokens in an HDF5 file, otherwise no fact.
    fingerprint : str
        Digest of the data set and the length of a sequence, the same on every rank and grid.

    Raises
    ------
    DataError
        On every rank: for a file or data set that is missing, of another type, too short for one sequence, or different
        on other ranks; for an unknown vocabulary; for an index that does not fit its `.bin` file; at a batch with a
        token outside the vocabulary, with its position in the file.

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
        source: AnySource,
        sequence: int,
        *,
        tokens: str = TOKENS,
        documents: str | None = None,
        vocabulary: int | None = None,
        token_dtype: Literal["uint16", "uint32"] | None = None,
        library: str | NumpyLibrary | None = None,
        cache_bytes: int = 2**28,
    ):
        super().__init__()
        self.grid, self.path, self.sequence, self.cache_bytes = grid, name_of(source), sequence, cache_bytes
        fingerprint, facts, self.features = "", dict[str, str](), 1 + (documents is not None)
        settings = sequence, tokens, documents, vocabulary, token_dtype, library_kind(library), cache_bytes
        with grid.collective_call("TokenDataSet", self.path, *settings):
            check_at_least(2, sequence=sequence)
            if vocabulary is not None:
                check_at_least(1, vocabulary=vocabulary)
            self.library = grid.library(library)
            self.file = opened_source(source, self._raw_dtype(token_dtype, vocabulary))
            parts = self.file.parts
            if token_dtype is not None and not any(isinstance(part, MappedFile) and part.raw for part in parts):
                raise DataError(
                    f"{self.path}: token_dtype (data.token_dtype) is for a .bin file without an index; here the type "
                    "of the tokens is known: leave it out"
                )
            texts = [self._text(part, tokens, documents) for part in parts]
            self.of_parts = [text.samples for text in texts]
            self.samples = sum(self.of_parts)
            self._inputs = Joined([text.inputs for text in texts])
            self._next = Joined([text.following for text in texts])
            self._starts = None if documents is None else self._first_of_documents(texts)
            self.vocabulary = self.classes = self._vocabulary(vocabulary, texts)
            nbytes = [text.stored[0].attrs.get("bytes") for text in texts]
            count = sum(len(text.stored[0]) for text in texts)
            self.bytes_per_token = None if None in nbytes else float(sum(nbytes)) / count
            if grid.rank == 0 or grid.dry_run is not None:
                self.file.verify()
                fingerprint = f"{fingerprint_of(self.file, [text.stored for text in texts])}/{sequence}"
                facts = self._tokenizer(parts)
        with grid.collective_call("TokenDataSet", self.path, self.of_parts, self.file.agreed, self.classes):
            pass
        self.fingerprint, self.facts = grid.comm.bcast((fingerprint, facts))

    def _raw_dtype(self, given: str | None, vocabulary: int | None) -> str:
        if given is None:
            return RAW_TYPES[vocabulary is not None and vocabulary > 2**16]
        if given not in RAW_TYPES:
            raise DataError(f"token_dtype is {' or '.join(map(repr, RAW_TYPES))}; got {given!r}")
        return given

    def _text(self, part: SampleSource, tokens: str, documents: str | None) -> _Text:
        """Return the sequences of a part of the source. Raises DataError for data sets that contain none."""
        sequence = self.sequence
        if isinstance(part, PairSource):
            if documents is not None:
                raise DataError(
                    f"{part.path} has no table of documents {documents!r}: leave documents= (data.documents) out"
                )
            columns = part.x, part.y
            for column in columns:
                if column.shape[1:] != (sequence,) or column.dtype.kind not in "iu":
                    raise DataError(
                        f"{part.path}: {column.name[1:]} of an item holds {column.dtype} {column.shape[1:]}; a pair of "
                        f"tokens has {sequence} integers in each element (data.sequence)"
                    )
            x, y = (Piece(part.path, TokenColumn(column), 0, part.samples * sequence) for column in columns)
            return _Text(part.samples, x, y, (part.x, part.y), None)
        stored = part.dataset(tokens)
        if stored.ndim != 1 or stored.dtype.kind not in "iu":
            raise DataError(
                f"{part.path}: data set {tokens!r} holds {stored.dtype} {stored.shape}; "
                "tokens are integers in one dim, as pmm3d convert text writes them"
            )
        samples = (len(stored) - 1) // sequence
        if not samples:
            raise DataError(
                f"{part.path}: data set {tokens!r} has {len(stored)} tokens; a sequence of "
                f"{sequence} and the token after it need {sequence + 1}: choose shorter sequences"
            )
        table = None if documents is None else part.dataset(documents)
        return _Text(
            samples,
            Piece(part.path, stored, 0, samples * sequence),
            Piece(part.path, stored, 1, samples * sequence + 1),
            (stored,) if table is None else (stored, table),
            table,
        )

    def _vocabulary(self, given: int | None, texts: Sequence[_Text]) -> int:
        if given is not None:
            return int(given)
        for text in texts:
            stored, path = text.stored[0], text.inputs.path
            default = 256 if stored.dtype == np.uint8 else None
            if stored.attrs.get("vocabulary", default) is None:
                raise DataError(
                    f"{path}: data set {stored.name[1:]!r} of {stored.dtype} has no attribute vocabulary: "
                    "write one, the number of different tokens, or give vocabulary= (data.vocabulary)"
                )
        sizes = [int(text.stored[0].attrs.get("vocabulary", 256)) for text in texts]
        for text, size in zip(texts, sizes):
            if size != sizes[0]:
                raise DataError(
                    f"{texts[0].inputs.path} has a vocabulary of {sizes[0]} tokens, {text.inputs.path} one of {size}: "
                    "convert both with the same tokenizer"
                )
        return sizes[0]

    def _tokenizer(self, parts: Sequence[SampleSource]) -> dict[str, str]:
        """Return the digest of the tokenizer in HDF5 files, for `facts`. Raises DataError if they have several."""
        known: dict[str, str] = {}
        for part in parts:
            coder = Tokenizer.of(part.path) if isinstance(part, SourceFile) else None
            if coder is not None and (coder.json or self.vocabulary == BYTES):
                known.setdefault(coder.digest, part.path)
        if len(known) > 1:
            one, two, *_ = known.values()
            raise DataError(f"{one} and {two} have different tokenizers: convert both with the same one")
        return {"tokenizer": next(iter(known))} if known else {}

    def _first_of_documents(self, texts: Sequence[_Text]) -> np.ndarray:
        """Return the first token of each document, counted over the inputs of all parts."""
        starts = [self._first_tokens(text) for text in texts]
        if len(texts) == 1:
            return starts[0]
        sizes = [text.samples * self.sequence for text in texts]
        firsts = np.cumsum([0, *sizes])
        return np.concatenate(
            [first + own[own < size].astype("int64") for first, own, size in zip(firsts, starts, sizes)]
        )

    def _first_tokens(self, text: _Text) -> np.ndarray:
        """Return the number of the first token of each document. Raises DataError for an invalid table."""
        table, count = text.table, len(text.stored[0])
        assert table is not None
        with self.file.unchanged():
            starts: np.ndarray = table[...]
        known = starts.ndim == 1 and starts.dtype.kind in "iu"
        if not known or starts[0] or (np.diff(starts.astype("int64")) <= 0).any() or starts[-1] >= count:
            raise DataError(
                f"{text.inputs.path}: data set {table.name[1:]!r} does not say where documents begin: needed is "
                "the number of the first token of each document, integers in one dim, ascending from 0 and "
                f"below {count}, as pmm3d convert text writes them"
            )
        return starts

    def renumbered(self, values: np.ndarray, rows: Rows, dataset: Any) -> np.ndarray:
        """Return tokens and numbers of documents unchanged.

        Raises DataError for a token outside the vocabulary. rows: positions of the tokens in the data set.
        """
        tokens = values[:, 0]
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            at = int(((tokens < 0) | (tokens >= self.vocabulary)).argmax())
            path, place = place_of(dataset, self.path, np.r_[rows][at])
            raise DataError(
                f"{path}: data set {dataset.name[1:]!r} has the token {tokens[at]} at position {place}; the tokens of "
                f"the vocabulary are 0 to {self.vocabulary - 1}{self._type_of(path)}"
            )
        return values

    def _type_of(self, path: str) -> str:
        """Return a text about the type of the tokens of a raw file; "" for another part of the source."""
        for part in self.file.parts:
            if part.path == path and isinstance(part, MappedFile) and part.raw:
                kind = part.dataset(TOKENS).dtype.name
                return f" (read as {kind}; token_dtype= (data.token_dtype) names the type)"
        return ""

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
        x = _TokenSource(self._inputs, self.sequence, made, self._starts)
        y = _TokenSource(self._next, self.sequence, made)
        return self._loader((x, y), batch_size, shuffle, seed, drop_last, prefetch, rows, micro_batches)


class _Text(NamedTuple):
    """The sequences of a part of a source.

    inputs, following   the tokens, and the tokens that come next
    stored              data sets of the fingerprint, the first one with the tokens
    table               data set of the first token of each document, or None
    """

    samples: int
    inputs: Piece
    following: Piece
    stored: tuple[Any, ...]
    table: Any


class _TokenSource(Source):
    """Inputs or targets of a loader of tokens. Each token is a row. Tokens that are consecutive in the data set are
    read together.

    starts      first token of each document. The batch then has a second column: document numbers. None: no second
                column
    """

    def __init__(self, dataset: Joined, width: int, layout: Layout, starts: np.ndarray | None = None):
        super().__init__(dataset, width, layout, "int64")
        self._starts, order = starts, order_of(layout.units[0])
        self._positions = None if order is None else np.array(order.positions)

    def shape(self, samples: int) -> tuple[int, int]:
        return samples * self.width, 1 if self._starts is None else 2

    def open(self, grid: Grid, rows: Sequence[int], most: int, cache_bytes: int) -> None:
        self._grid, (self._first, self._last) = grid, (row * self.width for row in rows)
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
        tokens = sequences[own] * self.width + position
        if self._starts is not None:
            out[:, 1] = np.searchsorted(self._starts, tokens, side="right") - 1
        if self._caching:
            if self.cache is None:
                self.cache = self.dataset[self._first : self._last]
            out[:, 0] = self.cache[tokens - self._first]
            return tokens
        edges = [0, *np.flatnonzero(np.diff(tokens) != 1) + 1, len(tokens)]
        for low, high in pairwise(edges):
            if high > low:
                out[low:high, 0] = self.dataset[tokens[low] : tokens[low] + high - low]
        return tokens
