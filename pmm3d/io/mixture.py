"""Mixtures: rows of several sources, which are drawn by weights. Opening of any source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from .conversion import TABLE
from .mapped import MappedFile, is_mapped
from .pairs import Pairs, PairSource
from .source import SampleSource, SourceFile

NAMED = "columns", "class_names", TABLE
"""Attributes of a data set that must be equal in all sources of a mixture."""


@dataclass(frozen=True)
class Mixture:
    """Sources of samples with weights, for `DataSet` and `TokenDataSet`.

    A shuffled epoch of a mixture has as many rows as all sources together. Source i has its weight's share of them,
    rounded to whole rows. Draws from a source go through all its rows, in a random order, before a row comes again, and
    an epoch continues where the previous one ended. So the rows of a source with a large weight come more often than
    once in an epoch, and those of a source with a small weight less often. Which row is sample number n of a training
    depends only on the seed, the numbers of rows and the weights.

    Without `shuffle`, and for held-out rows, each row comes once, one source after the other.

    Parameters
    ----------
    parts : sequence of (source, float)
        Sources, as `DataSet` takes them, and their weights: numbers above 0. Only their ratios count.

    Raises
    ------
    DataError
        For weights that are not finite numbers above 0, for a mixture in a mixture, and without a source.

    Examples
    --------
    >>> from pmm3d import Grid
    >>> from pmm3d.io import DataSet, Mixture
    >>> few, many = [(0.0, 1.0)], [(float(number), -1.0) for number in range(1, 8)]
    >>> with Grid() as grid, DataSet(grid, Mixture([(few, 3), (many, 1)])) as data:
    ...     loader = data.loader(8, seed=1)
    ...     [sorted(x.gather().ravel().tolist()) for _ in range(2) for x, y in loader]
    [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 6.0]]
    """

    parts: Sequence[tuple[str | os.PathLike[str] | Pairs, float]]

    def __post_init__(self) -> None:
        try:
            parts = [(source, _number(weight)) for source, weight in self.parts]
        except (TypeError, ValueError, OverflowError):
            raise DataError("the parts of a mixture are pairs (source, weight), each weight a number") from None
        if not parts:
            raise DataError("a mixture needs at least one source")
        for source, weight in parts:
            if not (weight > 0 and isfinite(weight)):
                raise DataError(f"the weight of {name_of(source)} is {weight}; needed is a number above 0")
            if isinstance(source, Mixture):
                raise DataError("a mixture is no source of a mixture: name its sources, with products of the weights")
        object.__setattr__(self, "parts", tuple(parts))

    def __str__(self) -> str:
        return f"the mixture of {', '.join(f'{name_of(source)} ({weight:g})' for source, weight in self.parts)}"


AnySource = str | os.PathLike[str] | Pairs | Mixture | SampleSource
"""Source of samples: a file, an object of pairs, a mixture, or one of these that was opened."""


def name_of(source: AnySource) -> str:
    """Return the name of a source for messages."""
    if isinstance(source, (str, os.PathLike, Mixture)):
        return str(source)
    if isinstance(source, SampleSource):
        return source.path
    return f"the {type(source).__name__}"


def _number(weight: Any) -> float:
    """Return a weight as a float. Raises TypeError for a text, a boolean, and any other object that is no number."""
    if not isinstance(weight, Real) or isinstance(weight, bool):
        raise TypeError
    return float(weight)


def opened_source(source: AnySource, raw_dtype: str | None = None) -> SampleSource:
    """Return an open source. Raises DataError if it cannot be opened.

    raw_dtype   type of tokens in raw files; None: files of tokens are refused
    """
    if isinstance(source, SampleSource):
        return source
    if isinstance(source, Mixture):
        parts = [opened_source(each, raw_dtype) for each, _ in source.parts]
        return MixedSource(str(source), parts, tuple(weight for _, weight in source.parts))
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if not is_mapped(path):
            return SourceFile(path)
        if raw_dtype is None:
            raise DataError(
                f"{path} is a file of tokens, not of samples and targets: read it with TokenDataSet (data.sequence), "
                "or name an HDF5 file"
            )
        return MappedFile(path, raw_dtype)
    return PairSource(source, name_of(source))


class MixedSource(SampleSource):
    """The sources of a mixture. Its data sets are those of its parts, one after the other."""

    def __init__(self, path: str, parts: list[SampleSource], weights: tuple[float, ...]):
        super().__init__(path)
        self._parts, self.weights = parts, weights

    @property
    def parts(self) -> list[SampleSource]:
        return self._parts

    @property
    def agreed(self) -> str:  # type: ignore[override]
        return " ".join(part.agreed for part in self._parts)

    def dataset(self, name: str) -> Joined:
        pieces = []
        for part in self._parts:
            stored = part.dataset(name)
            pieces.append(Piece(part.path, stored, 0, len(stored)))
        return Joined(pieces)

    def verify(self) -> None:
        for part in self._parts:
            part.verify()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def check_unchanged(self) -> None:
        for part in self._parts:
            part.check_unchanged()

    @contextmanager
    def both(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.both())
            yield


class Piece(NamedTuple):
    """Rows start:stop of a data set. path: name of its source."""

    path: str
    stored: Any
    start: int
    stop: int


class Joined:
    """Rows of one or several data sets, one after the other, with the interface of a data set.

    Raises DataError for data sets that do not fit together: other dims, integers and floating point numbers, or other
    names of columns and classes.
    """

    def __init__(self, pieces: Sequence[Piece]):
        self.pieces = list(pieces)
        first = self.pieces[0].stored
        self.edges = np.cumsum([0, *(piece.stop - piece.start for piece in pieces)])
        self.name, self.attrs = first.name, first.attrs
        self.shape, self.ndim = (int(self.edges[-1]), *first.shape[1:]), first.ndim
        self.dtype = np.result_type(*(piece.stored.dtype for piece in pieces))
        if first.dtype.kind in "iu" and self.dtype.kind == "f":  # of int64 and uint64
            self.dtype = np.dtype("int64")
        for piece in self.pieces[1:]:
            self._check(self.pieces[0], piece)

    def _check(self, one: Piece, two: Piece) -> None:
        name, other = one.stored.name[1:], two.stored
        if other.shape[1:] != one.stored.shape[1:]:
            raise DataError(
                f"data set {name!r} has rows of the shape {one.stored.shape[1:]} in {one.path} and {other.shape[1:]} "
                f"in {two.path}: sources of a mixture need equal rows"
            )
        if (other.dtype.kind == "f") != (one.stored.dtype.kind == "f"):
            raise DataError(
                f"data set {name!r} holds {one.stored.dtype} in {one.path} and {other.dtype} in {two.path}: sources of "
                "a mixture need integers in all, or floating point numbers in all"
            )
        for attribute in NAMED:
            values = [np.asarray(each.attrs.get(attribute, ())).tolist() for each in (one.stored, other)]
            if values[0] != values[1]:
                raise DataError(
                    f"the attribute {attribute} of data set {name!r} differs between {one.path} and {two.path}: "
                    "convert the sources of a mixture with the same options and class names"
                )

    def __len__(self) -> int:
        return self.shape[0]

    def place(self, row: int) -> tuple[str, int]:
        """Return the name of the source of a row, and the number of the row in its data set."""
        at = int(np.searchsorted(self.edges, row, side="right")) - 1
        return self.pieces[at].path, int(row - self.edges[at] + self.pieces[at].start)

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        out = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        for piece, own, to in self._by_piece(slice(start, stop)):
            with _reading(piece):
                out[to] = piece.stored[own]
        return out

    def read_direct(self, out: np.ndarray, selection: tuple[Any, ...]) -> None:
        """Fill `out` with the selected rows (a slice, or an ascending array that may repeat rows) and elements of each
        row."""
        rows, *inner = selection
        for piece, own, to in self._by_piece(rows):
            with _reading(piece):
                if isinstance(own, slice) or (np.diff(own) > 0).all():
                    piece.stored.read_direct(out[to], (own, *inner))
                else:  # HDF5 reads no row twice
                    distinct, which = np.unique(own, return_inverse=True)
                    once = np.empty((len(distinct), *out.shape[1:]), out.dtype)
                    piece.stored.read_direct(once, (distinct, *inner))
                    out[to] = once[which]

    def _by_piece(self, rows: slice | np.ndarray) -> Iterator[tuple[Piece, slice | np.ndarray, slice]]:
        """Yield pieces, the rows of their data sets, and the range of the rows among all `rows`."""
        for piece, (low, high) in zip(self.pieces, pairwise(self.edges.tolist())):
            if isinstance(rows, slice):
                start, stop = max(rows.start, low), min(rows.stop, high)
                if start < stop:
                    shift = piece.start - low
                    yield piece, slice(start + shift, stop + shift), slice(start - rows.start, stop - rows.start)
                continue
            start, stop = np.searchsorted(rows, (low, high)).tolist()
            if start < stop:
                yield piece, rows[start:stop] + (piece.start - low), slice(start, stop)


@contextmanager
def _reading(piece: Piece) -> Iterator[None]:
    """Context that names the source in errors of reading."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot read {piece.path}: {error}") from error


def pieces_of(stored: Any) -> list[Any]:
    """Return the data sets of which a data set consists."""
    return [piece.stored for piece in stored.pieces] if isinstance(stored, Joined) else [stored]


def place_of(stored: Any, path: str, row: int) -> tuple[str, int]:
    """Return the name of the source of a row of a data set, and the number of the row there. path: name of the source
    of a data set that is not joined."""
    return stored.place(row) if isinstance(stored, Joined) else (path, int(row))


def fingerprint_of(source: SampleSource, datasets: Sequence[Sequence[Any]]) -> str:
    """Return the digest of the data sets of each part of a source."""
    prints = [part.fingerprint(*stored) for part, stored in zip(source.parts, datasets)]
    return prints[0] if len(prints) == 1 else blake2b("/".join(prints).encode(), digest_size=8).hexdigest()
