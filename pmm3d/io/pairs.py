"""Samples of a Python object with `__len__` and `__getitem__`, such as a Dataset of torch or a list of pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from threading import Lock, local
from traceback import extract_tb
from typing import Any, Protocol

import numpy as np

from ..errors import DataError
from .source import SampleSource

NAMES = "x", "y"
"""Names of the data sets: first and second element of a pair."""
Pair = tuple[np.ndarray, np.ndarray]


class Pairs(Protocol):
    """An object whose item i, for i below its length, is the pair (x, y) of sample i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class PairSource(SampleSource):
    """The pairs of an object as the data sets "x" and "y". An item is read by the ranks that need its row.

    items   the object;   path   its name for messages
    memo    in `both`: targets of the rows whose inputs this thread has read, so that the object is called once

    Only one thread of this source at a time calls the object. Another source of the same object has its own thread.
    Raises DataError for an object without length or items, and for a first item that is no pair of numbers, or that is
    not the same when it is read again.
    """

    def __init__(self, items: Pairs, path: str):
        super().__init__(path)
        self._items, self._lock = items, Lock()
        self.memo = local()
        if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
            raise DataError(
                f"{path} has no __len__ or no __getitem__. Samples are a file, or an object with both whose item is a "
                "pair (x, y): a Dataset of torch, not an IterableDataset or a DataLoader"
            )
        try:
            self.samples = len(items)
        except (Exception, SystemExit) as error:
            raise DataError(f"{path}: its length is unknown: {type(error).__name__}: {error}") from error
        if not self.samples:
            raise DataError(f"{path} is empty: its length is 0")
        self._first: Pair | None = None
        x, y = self.item(0)
        self._first = x.copy(), y.copy()  # an object may fill the same array again
        if any(not np.array_equal(one, two, equal_nan=True) for one, two in zip(self._first, self.item(0))):
            raise DataError(
                f"{path}: item 0 is not the same when it is read again. Several ranks read an item, and a resumed run "
                "reads it again: derive random numbers from the index, or draw them in the network"
            )
        self.x, self.y = (PairColumn(self, side, first) for side, first in enumerate(self._first))

    @property
    def agreed(self) -> str:  # type: ignore[override]
        assert self._first is not None
        return blake2b(b"".join(each.tobytes() for each in self._first), digest_size=8).hexdigest()

    @contextmanager
    def both(self) -> Iterator[None]:
        self.memo.targets = {}
        try:
            yield
        finally:
            self.memo.targets = None

    def dataset(self, name: str) -> PairColumn:
        if name not in NAMES:
            raise DataError(
                f"{self.path} has no data set {name!r}: an object of pairs has 'x' and 'y', the first and the second "
                "element of a pair"
            )
        return self.x if name == NAMES[0] else self.y

    def item(self, index: int) -> Pair:
        """Return a pair. Raises DataError, with the index, if the object raises an error or returns another item."""
        try:
            with self._lock:
                read = self._items[index]
        except (Exception, SystemExit) as error:  # sys.exit would end only the thread that reads ahead
            where = extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"{self.path}: item {index} raised {type(error).__name__}: {error} ({where.filename}, line "
                f"{where.lineno})"
            ) from error
        try:
            x, y = (_array(each) for each in read)
            known = all(each.dtype.kind in "bfiu" for each in (x, y))
        except Exception:
            known = False
        if not known or isinstance(read, dict):
            raise DataError(
                f"{self.path}: item {index} is no pair (x, y) of numbers or arrays of real numbers; it is "
                f"{_described(read)}"
            )
        for name, each, first in zip(NAMES, (x, y), self._first or (x, y)):
            if each.shape != first.shape or 0 in each.shape:
                raise DataError(
                    f"{self.path}: {name} of item {index} has the shape {each.shape}, that of item 0 {first.shape}: "
                    "all items need equal shapes that are not empty"
                )
            if (each.dtype.kind == "f") != (first.dtype.kind == "f"):
                raise DataError(
                    f"{self.path}: {name} of item {index} has the type {each.dtype}, that of item 0 {first.dtype}: "
                    "return integers in all items, or floating point numbers in all items"
                )
        return x, y


class PairColumn:
    """The first or the second elements of all pairs, with the interface of a data set: (samples, ...) of int64 or
    float64.

    side   0 for the first elements, 1 for the second ones;   first   element of item 0
    """

    def __init__(self, source: PairSource, side: int, first: np.ndarray):
        self._source, self._side = source, side
        self.name, self.shape = f"/{NAMES[side]}", (source.samples, *first.shape)
        self.dtype, self.ndim = np.dtype("float64" if first.dtype.kind == "f" else "int64"), len(self.shape)
        self.attrs: dict[str, Any] = {}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        rows = slice(*rows.indices(len(self)))
        out = np.empty((len(range(rows.start, rows.stop)), *self.shape[1:]), self.dtype)
        self.read_direct(out, (rows,))
        return out

    def read_direct(self, out: np.ndarray, selection: tuple[Any, ...]) -> None:
        """Fill `out` with the selected rows (a slice or an array) and elements of each row."""
        rows, *inner = selection
        memo: dict[int, np.ndarray] | None = getattr(self._source.memo, "targets", None)
        for at, row in enumerate(np.r_[rows].tolist()):
            element = memo.get(row) if memo and self._side else None
            if element is None:
                pair = self._source.item(row)
                element = pair[self._side]
                if memo is not None and not self._side:
                    memo[row] = pair[1].copy()
            out[at] = element[tuple(inner)]


class TokenColumn:
    """The elements of a PairColumn of sequences, one after the other, with the interface of a data set of tokens."""

    ndim = 1

    def __init__(self, column: PairColumn):
        self._column, self.sequence = column, column.shape[1]
        self.name, self.dtype, self.attrs = column.name, column.dtype, column.attrs
        self.shape = (len(column) * self.sequence,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, tokens: slice) -> np.ndarray:
        start, stop, _ = tokens.indices(len(self))
        first = start // self.sequence
        rows = self._column[first : -(-stop // self.sequence)].reshape(-1)
        return rows[start - first * self.sequence : stop - first * self.sequence]


def _array(value: Any) -> np.ndarray:
    """Return a number, an array or a tensor of torch as an array of numpy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.asarray(value)


def _described(read: Any) -> str:
    if isinstance(read, (tuple, list)):
        return f"a {type(read).__name__} of {', '.join(type(each).__name__ for each in read) or 'nothing'}"
    return f"of the type {type(read).__name__}"
