"""Keys and values of the tokens before: what a rank keeps of a sequence while it grows by a token at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ...arrays import Array, library_of
from ...comm import Grid


class Cache(AbstractContextManager["Cache"]):
    """As a context: passes through a network, on this grid, that continue the sequences of the passes before.

    A pass has as many sequences as the first one, whole ones on a rank: `token_layout` cuts between sequences only. The
    n-th `attention` of a pass continues the n-th one of the passes before. Rows have their positions after those of
    the passes before.

    total    the longest sequence there will be: memory is taken for it when the first pass is made
    length   rows of each sequence before this pass

    A rank holds 2 layers x sequences x kv_heads x total x size elements of its sequences and its heads.
    """

    def __init__(self, grid: Grid, total: int):
        self._grid, self.total, self.length = grid, total, 0
        self._held, self._next = list[tuple[Array, Array]](), 0

    @classmethod
    def of(cls, grid: Grid) -> Cache | None:
        """The one whose context this is; None outside of any."""
        return grid.attached.get(cls)

    @classmethod
    def begun(cls, grid: Grid) -> int:
        """Rows of each sequence before this pass; 0 outside of any context."""
        cache = cls.of(grid)
        return 0 if cache is None else cache.length

    def advance(self, rows: int) -> None:
        """Note that a pass with so many rows of each sequence has ended."""
        self.length, self._next = self.length + rows, 0

    def extend(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keep the keys and values (sequences, heads, rows, size) of this pass. Return those of all passes, views of
        what is kept."""
        if self._next == len(self._held):
            shape = (*k.shape[:2], self.total, k.shape[3])
            with self._grid.ledger.holding("cache"):
                self._held.append((_empty(k, shape), _empty(v, shape)))
        held = self._held[self._next]
        self._next += 1
        stop = self.length + k.shape[2]
        for old, new in zip(held, (k, v)):
            old[:, :, self.length : stop] = new
        return held[0][:, :, :stop], held[1][:, :, :stop]

    def __enter__(self) -> Cache:
        self._grid.attached[Cache] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._grid.attached[Cache]


def _empty(like: Array, shape: tuple[int, ...]) -> Array:
    library = library_of(like)
    return library.empty(shape, library.dtype(like))
