"""Attention, one operation on the tape: each rank computes the heads and sequences that it has."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from ...arrays import Array
from ...errors import DTypeError, GridError, LayoutError, Pmm3dError, hint
from ...layout import SEQ, GridShape, Layout, RaggedRows
from ...layout.layout import Unit, unit_of
from ...product.relayout import relayout as relayout_array
from ..compute import Form, computing
from ..contract import Gradient
from ..elementwise import Elementwise, map_elementwise
from ..tensor import Tensor, as_tensor, relayout, whole
from .cache import Cache, rows_of_sequence
from .kernel import BLOCK, Dropout, Partial, Rows, Visible, attend, attend_backward
from .sequence import positions

TYPES = ("float16", "bfloat16", "float32", "float64")
"""Element types that attention takes."""
PARALLEL = ("auto", "ring", "ulysses", "gather", "2d")
"""Ways in which ranks along seq share a sequence."""
AS_IT_IS = Elementwise(lambda _, x: x)


def attention(q: Tensor, k: Tensor, v: Tensor, *, size: int, causal: bool = True, window: int | None = None,
              documents: Tensor | None = None, dropout: float = 0.0, seed: int = 0, stream: int = 0,
              scale: float | None = None, block: int = BLOCK, parallel: str = "auto", order: str = "plain") -> Tensor:
    """softmax(scale q k^T) v, of each head in each sequence. The matrix of all scores is never in memory.

    q           (m, a size)      rows in units of a sequence; columns over one axis or several, or whole
    k, v        (m, a_kv size)   a is a multiple of a_kv: consecutive heads of q share a head of k and v
    size        columns of a head
    causal      a query sees the rows up to its own; False: all rows of its sequence
    window      of these, the rows less than `window` rows away; None: all
    documents   (m, 1), integers, of packed sequences: the number of each row's document. A query sees rows of its own
                document only. None: each sequence is one document
    dropout     probability that a weight is set to 0. The mask depends on `seed`, `stream`, and the place of the weight
                in the whole batch
    scale       factor of the scores; None: 1 / sqrt(size)
    block       rows of a block of scores. The last bits of the result depend on it, but not on the grid
    parallel    how ranks along seq share a sequence: "ring", "ulysses", "gather", "2d", or "auto"
    order       in which the rows of a sequence are stored: "plain", "zigzag" or "striped" (`positions`)

    Returns (m, a size), laid out as q. The rows of a sequence are those that the axis data does not separate
    (`sequence_length`). Each rank computes the query heads that it has. If another axis than seq cuts inside a
    sequence, or any axis cuts inside a head, the tensors are relaid first. k and v are gathered over the axes of their
    columns if a rank lacks a head of k and v that its query heads share: of G ranks, each receives (G-1)/G of the k and
    v of its rows, and as much of their gradients in the backward pass. Otherwise nothing is sent.

    A rank keeps its q, k, v, the result, and a number for each row and head. Backward computes the scores again.

    Raises LayoutError for sizes that do not fit together, DTypeError for other types and libraries, GridError for
    tensors of two grids, and Pmm3dError for a window, a block or a probability out of range.

        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = DistMatrix.random(grid, (8 * grid.size, 6), layout=Layout("data", units=(8, 1)))
        ...     attention(x, x, x, size=3).shape == x.shape
        True
    """
    q, k, v = (whole(as_tensor(each)) for each in (q, k, v))
    _check(q, k, v, size, window, dropout, block, parallel)
    length = rows_of_sequence(q)
    q = relayout(q, _in_units(q, q, length, size))
    k, v = (relayout(each, _in_units(q, each, length, size)) for each in (k, v))
    drops = Dropout(dropout, seed, stream, 0, 0, q.shape[1] // size, length) if dropout else None
    sees = Visible(causal, window, drops, block)
    positions(order, length, 1)
    if cuts_sequences(q.layout, q.shape[0], length, q.grid.shape):
        raise LayoutError(f"attention: the rows of a sequence of {length} are split over seq")
    return _Local(q, k, v, size, sees, size**-0.5 if scale is None else scale, _documents(q, documents)).output(q, k, v)


def _documents(q: Tensor, documents: Tensor | None) -> np.ndarray | None:
    """The numbers of the documents of this rank's rows."""
    if documents is None:
        return None
    documents = whole(as_tensor(documents))
    if documents.shape != (q.shape[0], 1) or "int" not in documents.dtype:
        raise LayoutError(f"attention: documents are integers, {q.shape[0]} x 1, a number for each row; got "
                          f"{documents!r}")
    documents = relayout(documents, Layout(q.layout.rows, units=(_unit(q.layout.units[0]), 1)))
    return documents.library.to_numpy(documents.shard)[:, 0] if documents.library.has_data else None


@lru_cache(maxsize=1024)
def cuts_sequences(layout: Layout, rows: int, length: int, grid: GridShape) -> bool:
    """Whether some rank has a part of a sequence only."""
    for index in product(*(range(getattr(grid, axis)) for axis in layout.rows)):
        box = layout.box((rows, 0), grid, grid.position(0)._replace(**dict(zip(layout.rows, index))))
        if length and (box.r0 % length or box.r1 % length):
            return True
    return False


def _check(q: Tensor, k: Tensor, v: Tensor, size: int, window: int | None, dropout: float, block: int,
           parallel: str) -> None:
    if q.grid is not k.grid or q.grid is not v.grid:
        raise GridError(f"attention: tensors of two Grids: q is {q!r}, k and v are {[k, v]!r}")
    if q.dtype not in TYPES or {(each.dtype, each.library) for each in (k, v)} != {(q.dtype, q.library)}:
        raise DTypeError(f"attention: q, k and v are of one library and one type of {', '.join(TYPES)}; got "
                         f"{[q, k, v]!r}")
    if isinstance(q.shape[0], RaggedRows):
        q.shape[0].refuse()
    if k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise LayoutError(f"attention: q is {q.shape[0]} x {q.shape[1]}, k is {k.shape[0]} x {k.shape[1]}, v is "
                          f"{v.shape[0]} x {v.shape[1]}: the three have the same rows, and k and v the same columns")
    if size < 1 or q.shape[1] % size or k.shape[1] % size:
        raise LayoutError(f"attention: {q.shape[1]} columns of q and {k.shape[1]} of k are no whole number of heads of "
                          f"{size} columns: choose heads that divide the columns")
    if bool(q.shape[1]) != bool(k.shape[1]) or k.shape[1] and q.shape[1] % k.shape[1]:
        raise LayoutError(f"attention: {q.shape[1] // size} heads of q cannot share {k.shape[1] // size} heads of k "
                          "and v: the first number must be a multiple of the second")
    if window is not None and window < 1 or block < 1:
        raise Pmm3dError(f"attention: window and block are numbers of rows, at least 1; got {window} and {block}")
    if not 0 <= dropout < 1:
        raise Pmm3dError(f"attention: dropout is a probability below 1; got {dropout}")
    if parallel not in PARALLEL:
        raise Pmm3dError(f"attention: parallel is {', '.join(PARALLEL)}; got {parallel!r}{hint(parallel, PARALLEL)}")


def _in_units(q: Tensor, x: Tensor, length: int, size: int) -> Layout:
    """The layout of q, or of k or v beside q: no axis but seq cuts inside a sequence, and none inside a head."""
    shape, (row_unit, unit) = q.grid.shape, (q.layout.units[0], x.layout.units[1])
    rows = tuple(axis for axis in q.layout.rows
                 if axis == SEQ or getattr(shape, axis) == 1 or unit_of(row_unit, axis) % length == 0)
    whole_heads = all(unit_of(unit, axis) % size == 0 for axis in x.layout.cols if getattr(shape, axis) > 1)
    return Layout(rows, x.layout.cols, units=(_unit(row_unit), _unit(unit) if whole_heads else size))


def _unit(unit: Unit) -> int | dict[str, int]:
    return unit if isinstance(unit, int) else dict(unit)


@lru_cache(maxsize=1024)
def _lacks(q: Layout, k: Layout, columns: int, columns_of_k: int, size: int, grid: GridShape) -> bool:
    """Whether some rank lacks a head of k that its heads of q share."""
    axes = tuple(dict.fromkeys((*q.cols, *k.cols)))
    for index in product(*(range(getattr(grid, axis)) for axis in axes)):
        coords = grid.position(0)._replace(**dict(zip(axes, index)))
        own, held = q.box((0, columns), grid, coords), k.box((0, columns_of_k), grid, coords)
        first, stop = _shared(own.c0 // size, own.c1 // size, columns // columns_of_k)
        if own.c0 < own.c1 and not held.c0 <= size * first <= size * stop <= held.c1:
            return True
    return False


def _shared(first: int, stop: int, group: int) -> tuple[int, int]:
    """(first, stop) of the heads of k that heads first to stop of q use, if a group of heads shares one."""
    return first // group, -(-stop // group)


class Run(NamedTuple):
    """Heads that go into one call of the kernel.

    of_q, of_k   their numbers in the local arrays of q, and of k and v
    first        number of the first head of q in all
    """

    of_q: slice
    of_k: slice
    first: int


def runs(heads: tuple[int, int], held: int, group: int) -> list[Run]:
    """Cut the local heads of q where a call needs as many of them for each head of k.

    heads   (first, stop) of the local heads of q;   held: the first local head of k;   group: heads that share one

        >>> [(run.of_q.start, run.of_q.stop, run.of_k.start, run.of_k.stop) for run in runs((3, 9), 0, 4)]
        [(0, 1, 0, 1), (1, 5, 1, 2), (5, 6, 2, 3)]
    """
    first, stop = heads
    edges = sorted({first, stop, *(edge for edge in (-(-first // group) * group, stop // group * group)
                                   if first < edge < stop)})
    found = list[Run]()
    for start, end in pairwise(edges):
        low, high = _shared(start, end, group)
        found.append(Run(slice(start - first, end - first), slice(low - held, high - held), start))
    return found


class _Local:
    """One rank's part of an attention.

    q, k, v   forms of the arrays that the kernel takes
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, size: int, visible: Visible, scale: float,
                 documents: np.ndarray | None):
        self.size, self.visible, self.scale, self.length = size, visible, scale, rows_of_sequence(q)
        self.q = q.form
        lacks = bool(q.shape[1]) and any(_lacks(q.layout, each.layout, q.shape[1], k.shape[1], size, q.grid.shape)
                                         for each in (k, v))
        self.k, self.v = (each.form.like(each.shape, Layout(each.layout.rows, (), units=each.layout.units))
                          if lacks else each.form for each in (k, v))
        box, held = q.box, self.k.layout.box(k.shape, q.grid.shape, q.grid.coords)
        self.runs = runs((box.c0 // size, box.c1 // size), held.c0 // size, max(1, q.shape[1] // max(1, k.shape[1])))
        self.sequence = box.r0 // max(1, self.length)
        cache, place = Cache.of(q.grid), np.arange(self.length)
        self.rows = Rows(place if cache is None else cache.positions(self.length),
                         None if documents is None else documents.reshape(-1, self.length))

    def heads(self, array: Array) -> Array:
        """The array (rows, heads x size) as (sequences, heads, rows of a sequence, size)."""
        (rows, cols), library, length = array.shape, self.q.library, self.length
        stride = library.strides(array)[0]
        shape = rows // max(1, length), cols // self.size, length, self.size
        return library.as_strided(array, shape, (length * stride, self.size, stride, 1))

    def sees(self, run: Run) -> Visible:
        dropout = self.visible.dropout
        if dropout is None:
            return self.visible
        return self.visible._replace(dropout=dropout._replace(sequence=self.sequence, head=run.first))

    def gathered(self, x: Tensor, form: Form) -> Array:
        """k or v, with the heads that this rank needs."""
        if form == x.form:
            return x.shard
        with x.grid.ledger.phase("gather heads"):
            return relayout_array(x.grid, x.shard, x.shape, x.layout, form.layout).wait()

    def output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The result, on the tape."""
        form, library, of_k, of_v = self.q, self.q.library, self.gathered(k, self.k), self.gathered(v, self.v)
        (query, key, value), keys = map(self.heads, (q.shard, of_k, of_v)), self.rows
        if (cache := Cache.of(form.grid)) is not None:
            key, value = cache.extend(key, value)
            keys = Rows(np.arange(key.shape[2]))
        wide = form.wide.new()
        out, lse = self.heads(wide), form.grid.workspace.array(tuple(query.shape[:3]), form.wide.dtype, library)
        with computing(form.grid, "attention", self.work(2), "attention"):
            for run in self.runs:
                attend(library, form.grid.workspace, query[:, run.of_q], key[:, run.of_k], value[:, run.of_k],
                       self.rows, keys, self.sees(run), self.scale,
                       Partial(out[:, run.of_q], lse[:, run.of_q]))
            local = self.rounded(form, wide)
        keep = {"attention.q": q, "attention.k": k if of_k is k.shard else of_k,
                "attention.v": v if of_v is v.shard else of_v, "attention.output": local, "attention.lse": lse}
        return q.made(local, (q, k, v), self.gradients, keep=keep)

    def gradients(self, gradient: Array, q: Array, k: Array, v: Array, out: Array, lse: Array) -> list[Gradient]:
        forms, given = (self.q, self.k, self.v), (q, k, v)
        with computing(self.q.grid, "attention", self.work(5), "attention backward"):
            wide = [form.wide.new() for form in forms]
            for each in wide:
                each[...] = 0
            (query, key, value), (dq, dk, dv) = map(self.heads, given), map(self.heads, wide)
            out, dout = self.heads(out), self.heads(gradient)
            for run in self.runs:
                of_q, of_k = run.of_q, run.of_k
                attend_backward(self.q.library, self.q.grid.workspace, query[:, of_q], key[:, of_k], value[:, of_k],
                                out[:, of_q], lse[:, of_q], dout[:, of_q], self.rows, self.rows, self.sees(run),
                                self.scale, dq[:, of_q], dk[:, of_k], dv[:, of_k])
            return [Gradient(self.rounded(form, each), self.of_gradient(form)) for form, each in zip(forms, wide)]

    def of_gradient(self, form: Form) -> Layout:
        """The layout of a gradient: a partial sum over the axes that split the heads of q, and not those of k."""
        layout, shape = form.layout, form.grid.shape
        sums = [axis for axis in self.q.layout.cols if axis not in layout.cols and getattr(shape, axis) > 1]
        return Layout(layout.rows, layout.cols, sums, layout.units)

    def rounded(self, form: Form, wide: Array) -> Array:
        """The array in the type of the form."""
        return wide if form == form.wide else map_elementwise(form, None, AS_IT_IS, wide)

    def work(self, gemms: int) -> int:
        return 2 * gemms * self.q.local_shape[0] * self.q.local_shape[1] * self.length
