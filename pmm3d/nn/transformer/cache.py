"""Cache of keys and values of earlier tokens, for generation."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from ...arrays import Array, library_of
from ...comm import Grid
from ...layout import Box
from ...product import DistMatrix
from ..tensor import Tensor
from .sequence import sequence_length
from .visible import Pairs, Rows, Visible, block_pairs


class Cache(AbstractContextManager["Cache"]):
    """Context of forward passes, each of which continues the sequences of the earlier passes.

    Each pass begins with `begin`. In all passes, a rank has the same whole sequences. The n-th `attention` of a pass
    continues the n-th `attention` of earlier passes. total: length of the sequences, for which the first pass allocates
    memory. length, rows: rows of each sequence before this pass, and in this pass. padding: number of rows before the
    first token of each sequence of all ranks, or None. Tokens do not attend to padding, and their positions are counted
    after it. Instructions of a recorded pass read these attributes when they run.
    """

    def __init__(self, grid: Grid, total: int):
        self._grid, self.total, self.length, self.rows = grid, total, 0, 0
        self.padding: np.ndarray | None = None
        self._held, self._next = list[tuple[Array, Array]](), 0
        self._visible = dict[tuple[int, int, Visible], tuple[Rows, Rows, Pairs]]()

    @classmethod
    def of(cls, grid: Grid) -> Cache | None:
        """Cache of the current context, or None."""
        return grid.attached.get(cls)

    def begin(self, rows: int, padding: np.ndarray | None = None) -> None:
        """Begin a pass with this number of rows of each sequence."""
        self.length, self.rows, self._next = self.length + self.rows, rows, 0
        self.padding = padding
        self._visible.clear()

    def restart(self) -> None:
        """Begin the same pass again, which then stores the same keys and values again."""
        self._next = 0

    def clear(self) -> None:
        """Forget the rows of all passes. The next pass begins the sequences, in the memory of the earlier passes."""
        self.length = self.rows = 0

    def positions(self, box: Box) -> np.ndarray:
        """Positions of the rows of a box of whole sequences."""
        sequence, row = np.divmod(np.arange(box.r0, box.r1), max(1, self.rows))
        position = self.length + row
        return position if self.padding is None else np.maximum(position - self.padding[sequence], 0)

    def visible(self, sequences: slice, visible: Visible) -> tuple[Rows, Rows, Pairs]:
        """Rows of some sequences in this pass, rows in all passes, and pairs of their blocks, which all layers share.
        For the mask, padding is another document."""
        key = sequences.start, sequences.stop, visible
        if key not in self._visible:
            position = np.arange(self.length + self.rows)
            queries, keys = Rows(position[self.length :]), Rows(position)
            if self.padding is not None:
                document = position >= self.padding[sequences, None]
                queries, keys = queries._replace(document=document[:, self.length :]), Rows(position, document)
            self._visible[key] = queries, keys, block_pairs(queries, keys, visible)
        return self._visible[key]

    def extend(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Store keys and values (sequences, heads, rows, size) of this pass. Return views with all passes."""
        if self._next == len(self._held):
            library, shape = library_of(k), (*k.shape[:2], self.total, k.shape[3])
            with self._grid.ledger.holding("cache"):
                self._held.append((library.empty(shape, library.dtype(k)), library.empty(shape, library.dtype(v))))
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


def rows_of_sequence(x: Tensor | DistMatrix) -> int:
    """Number of rows of each sequence of a matrix of tokens. In a `Cache`, the number of rows of the pass."""
    cache = Cache.of(x.grid)
    return sequence_length(x.layout, x.shape[0]) if cache is None else cache.rows
