"""Attention as one operation on the tape. Each rank computes its own heads of its own sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise, product
from math import isfinite, prod
from typing import NamedTuple

import numpy as np

from ...arrays import Array
from ...comm import assign, call
from ...errors import DTypeError, GridError, LayoutError, Pmm3dError
from ...layout import SEQ, ULYSSES, GridShape, Layout, RaggedRows, natural, order_of
from ...layout.layout import layout_of, unit_of
from ...product.relayout import relayout as relayout_array
from ..compute import TensorSpec, computing
from ..contract import EVERYTHING, Gradient
from ..elementwise import Elementwise, map_elementwise
from ..functional import check_probability
from ..parts import check_unit, split
from ..tensor import Tensor, as_tensor, relayout, summed
from .cache import Cache, rows_of_sequence
from .kernel import Partial, attend, attend_backward
from .ring import Ring, Segment, in_turn, shares, uncut_sequences
from .sequence import INSIDE, by_heads, chosen, nodes_along_seq
from .visible import BLOCK, Dropout, Pairs, Rows, Visible, block_pairs

TYPES = ("float16", "bfloat16", "float32", "float64")
"""Element types of attention."""
AS_IT_IS = Elementwise(lambda _, x: x)


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    size: int,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    stream: int | Callable[[], int] = 0,
    scale: float | None = None,
    block: int = BLOCK,
    parallel: str = "auto",
) -> Tensor:
    """softmax(scale q k^T) v for each head of each sequence. The full matrix of scores is never stored.

    Parameters
    ----------
    q : Tensor
        (m, a size), with rows in units of a sequence. Columns may be split over one or several axes.
    k, v : Tensor or None
        (m, a_kv size). a is a multiple of a_kv: consecutive heads of q share a head of k and v. Default: q is
        (m, 3 a size), and contains query, key and value of the first head, then of the next head.
    size : int
        Number of columns of a head.
    causal : bool
        If True (default), a row attends to itself and to earlier rows. If False, to all rows of its sequence.
    window : int or None
        A row attends only to rows less than `window` rows away. Default: no limit.
    documents : Tensor or None
        (m, 1), integers: the document number of each row of packed sequences. A row attends only to rows of the same
        document. Default: each sequence is one document.
    dropout : float
        Dropout probability of the softmax weights. Default: 0.
    seed : int
        Seed of the dropout mask, which also depends on a weight's place in the whole batch. Default: 0.
    stream : int or callable
        Second seed. A function is called in each forward pass, also in those that are replayed. Default: 0.
    scale : float or None
        Factor of the scores. Default: 1 / sqrt(size).
    block : int
        Number of rows of a block of scores. The last bits of the result depend on it. Default: 512.
    parallel : str
        Method by which ranks along seq share a sequence: "ring", "ulysses" or "auto" (default).

    Returns
    -------
    Tensor
        (m, a size), in the layout of q.

    Raises
    ------
    LayoutError, DTypeError, GridError
        For sizes that do not fit together, for unsupported or different types or libraries, and for different grids.
    Pmm3dError
        For a window, a block, a probability or a scale out of range.

    Notes
    -----
    Each rank computes its query heads of its sequences (see `sequence_length`). Tensors are first relaid out if an axis
    cuts inside a head, or if an axis other than seq and ulysses cuts inside a sequence. If a rank lacks heads of k and
    v for its query heads, k and v are gathered over the G ranks that split their columns. Each rank then receives
    (G-1)/G of k and v, and the same share of their gradients.

    If P ranks along seq share sequences that have K elements of k and Q elements of q, each rank receives at most:

        ring      2 (P-1)/P K forward; 4 (P-1)/P K + 2/P K backward, the gradients as float32 or wider
        ulysses   (2 Q + 2 K) (P-1)/P^2 in each pass

    With a causal mask or a window, a ring sends only the keys that other ranks need. The axis ulysses exchanges heads
    first. Together with seq, this is USP (Fang, Zhao 2024, arXiv 2405.07719). In all other cases nothing is sent.

    A rank keeps q, k, v, the result, and a number for each row and head. The backward pass computes the scores again.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.random(grid, (8 * grid.size, 6), layout=Layout("data", units=(8, 1)))
    ...     attention = nn.transformer.attention
    ...     attention(x, x, x, size=3).shape == x.shape, attention(x, size=2).shape[1]
    (True, 2)
    """
    if (k is None) != (v is None):
        raise LayoutError("attention: k or v is missing. Pass both, or pass one tensor with queries, keys and values")
    operands = [summed(as_tensor(each)) for each in (q, k, v) if each is not None]
    _check((3 * operands)[:3], size, window, dropout, block, scale)
    first, length, shape = operands[0], rows_of_sequence(operands[0]), operands[0].grid.shape
    if len(operands) == 1:
        operands = _fused(first, length, size)
    if len(operands) == 3:
        operands = [relayout(each, _in_units(first, each, length, size)) for each in operands]
    stored, method = _specs(operands)[0].layout, "ring"
    if Cache.of(first.grid) is None:  # with a cache, each rank has whole sequences
        if ULYSSES in stored.on(shape).rows:
            operands = _spread_heads(operands, size, ULYSSES)
        method = chosen(
            parallel,
            operands[0].layout,
            first.shape[0],
            shape,
            _heads_on_ranks(operands[0], operands[-1], size),
            causal and order_of(stored.units[0]) is None,
            nodes_along_seq(first.grid),
        )
    if method == "ulysses":
        operands = _spread_heads(operands, size, SEQ)
    drops = Dropout(dropout, seed, 0, 0, 0, _specs(operands)[0].shape[1] // size, length) if dropout else None
    local = _Local(
        operands,
        size,
        Visible(causal, window, drops, block),
        size**-0.5 if scale is None else scale,
        _documents(operands[0], documents),
        stream,
    )
    return relayout(local.output(operands), stored)


def _fused(x: Tensor, length: int, size: int) -> list[Tensor]:
    """[x] in units of whole heads, or [q, k, v] if ranks share a sequence. x: query, key and value of each head."""
    check_unit("attention", x, 3 * size)
    layout = _in_units(x, x, length, 3 * size)
    rows, unit = layout.units
    unit = unit if isinstance(unit, int) and unit % (3 * size) == 0 else 3 * size
    x = relayout(x, layout_of(layout.rows, layout.cols, (), (rows, unit)))
    return split(x, 3 * [size]) if {*INSIDE} & {*x.layout.on(x.grid.shape).rows} else [x]


def _specs(operands: Sequence[Tensor]) -> list[TensorSpec]:
    """Forms of q, k and v, which may be stored in one tensor."""
    if len(operands) == 3:
        return [each.spec for each in operands]
    (rows, columns), layout, (of_rows, unit) = operands[0].shape, operands[0].layout, operands[0].layout.units
    assert isinstance(unit, int)  # of `_fused`
    third = Layout(layout.rows, layout.cols, units=(of_rows, unit // 3))
    return 3 * [operands[0].spec.like((rows, columns // 3), third)]


def _documents(q: Tensor, documents: Tensor | None) -> np.ndarray | None:
    """Document numbers of the rows on all ranks along seq."""
    if documents is None:
        return None
    documents = summed(as_tensor(documents))
    if documents.shape != (q.shape[0], 1) or "int" not in documents.dtype:
        raise LayoutError(
            f"attention: documents must be integers, {q.shape[0]} x 1, a number for each row; got {documents!r}"
        )
    rows = tuple(axis for axis in q.layout.rows if axis not in INSIDE)
    documents = relayout(documents, layout_of(rows, (), (), (q.layout.units[0], 1)))
    library, shard = documents.library, documents.shard
    if not library.has_data:
        return None
    numbers = np.empty(shard.shape, library.dtype(shard))
    call(q.grid.engine, lambda shard, out: np.copyto(out, library.to_numpy(shard)), shard, numbers, writes=[numbers])
    return numbers[:, 0]


def _check(
    operands: Sequence[Tensor], size: int, window: int | None, dropout: float, block: int, scale: float | None
) -> None:
    q, k, v = operands
    if q.grid is not k.grid or q.grid is not v.grid:
        raise GridError(f"attention: q, k and v must be on the same Grid; got q {q!r}, k and v {[k, v]!r}")
    if q.dtype not in TYPES or {(each.dtype, each.library) for each in (k, v)} != {(q.dtype, q.library)}:
        raise DTypeError(
            f"attention: q, k and v must have the same library and the same type, one of "
            f"{', '.join(TYPES)}; got {[q, k, v]!r}"
        )
    if isinstance(q.shape[0], RaggedRows):
        q.shape[0].refuse()
    if q.tape.tile is not None:
        q.tape.tile.refuse("attention")
    if k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise LayoutError(
            f"attention: q is {q.shape[0]} x {q.shape[1]}, k is {k.shape[0]} x {k.shape[1]}, v is "
            f"{v.shape[0]} x {v.shape[1]}. All need the same rows, and k and v the same columns"
        )
    if size < 1 or q.shape[1] % size or k.shape[1] % size:
        raise LayoutError(
            f"attention: {q.shape[1]} columns of q and {k.shape[1]} columns of k are not a multiple of "
            f"{size} columns, the size of a head. Choose a size that divides the columns"
        )
    if bool(q.shape[1]) != bool(k.shape[1]) or (k.shape[1] and q.shape[1] % k.shape[1]):
        raise LayoutError(
            f"attention: {q.shape[1] // size} heads of q cannot share {k.shape[1] // size} heads of k "
            "and v: the first number must be a multiple of the second"
        )
    for name, number in ("block", block), ("window", block if window is None else window):
        natural(number, f"attention: {name} is a number of rows, at least 1", 1, Pmm3dError)
    check_probability("attention: dropout", dropout)
    if scale is not None and not isfinite(scale):
        raise Pmm3dError(f"attention: scale must be a finite number, or None for 1 / sqrt(size), got {scale}")


def _in_units(q: Tensor, x: Tensor, length: int, size: int) -> Layout:
    """Layout of q, k or v in which only seq and ulysses cut inside a sequence, and no axis cuts inside a head."""
    shape, (row_unit, unit) = q.grid.shape, (q.layout.units[0], x.layout.units[1])
    rows = tuple(
        axis
        for axis in q.layout.rows
        if axis in INSIDE or getattr(shape, axis) == 1 or unit_of(row_unit, axis) % length == 0
    )
    uncut_heads = all(unit_of(unit, axis) % size == 0 for axis in x.layout.cols if getattr(shape, axis) > 1)
    return layout_of(rows, x.layout.cols, (), (row_unit, unit if uncut_heads else size))


def _heads_on_ranks(q: Tensor, k: Tensor, size: int) -> tuple[int, int]:
    """Numbers of heads of q and of k on each rank, or (0, 0) if the ranks differ."""
    numbers = []
    for each in (q, k):
        heads, over = divmod(each.shape[1], size * each.grid.shape.along(each.layout.cols))
        numbers.append(0 if over else heads)
    return (numbers[0], numbers[1]) if all(numbers) else (0, 0)


def _spread_heads(operands: Sequence[Tensor], size: int, axis: str) -> list[Tensor]:
    """q, k and v with heads instead of rows split over an axis. The heads of k and v are not split over the axis if a
    rank would lack a head."""
    q, k, v = operands
    of_q, of_k = by_heads(q.layout, size, axis), by_heads(k.layout, size, axis)
    if _lacks(of_q, of_k, q.shape[1], k.shape[1], size, q.grid.shape):
        of_k = layout_of(of_k.rows, k.layout.cols, (), of_k.units)
    return [relayout(q, of_q), relayout(k, of_k), relayout(v, of_k)]


@lru_cache(maxsize=1024)
def _lacks(q: Layout, k: Layout, columns: int, columns_of_k: int, size: int, grid: GridShape) -> bool:
    """Whether any rank lacks a head of k that its heads of q need."""
    axes = tuple(dict.fromkeys((*q.cols, *k.cols)))
    for index in product(*(range(getattr(grid, axis)) for axis in axes)) if columns else ():
        coords = grid.position(0)._replace(**dict(zip(axes, index)))
        own, held = q.box((0, columns), grid, coords), k.box((0, columns_of_k), grid, coords)
        first, stop = _shared(own.c0 // size, own.c1 // size, columns // columns_of_k)
        if own.c0 < own.c1 and not held.c0 <= size * first <= size * stop <= held.c1:
            return True
    return False


def _shared(first: int, stop: int, group: int) -> tuple[int, int]:
    """(first, stop) of the heads of k for the heads first to stop of q. A group of heads of q shares a head of k."""
    return first // group, -(-stop // group)


class Run(NamedTuple):
    """Heads of one kernel call, in the local arrays of q and of k and v. first: number among all heads of q."""

    of_q: slice
    of_k: slice
    first: int


def runs(heads: tuple[int, int], held: int, group: int) -> list[Run]:
    """Cut the local heads of q into runs with equally many heads of q for each head of k. held: first local head of k.

    >>> [(run.of_q.start, run.of_q.stop, run.of_k.start, run.of_k.stop) for run in runs((3, 9), 0, 4)]
    [(0, 1, 0, 1), (1, 5, 1, 2), (5, 6, 2, 3)]
    """
    first, stop = heads
    edges = sorted(
        {first, stop, *(edge for edge in (-(-first // group) * group, stop // group * group) if first < edge < stop)}
    )
    all_runs = list[Run]()
    for start, end in pairwise(edges):
        low, high = _shared(start, end, group)
        all_runs.append(Run(slice(start - first, end - first), slice(low - held, high - held), start))
    return all_runs


class _Local:
    """One rank's part of an attention.

    `specs` describe q, k and v, or the single tensor with all three. `shares` contains the segments
    of this rank's rows, each with the ranks that hold the other rows of its sequences. `fresh`: gradients are
    written once, so they need not start at zero. `documents` begins at the row `first` of the whole batch. `drawn` is
    the stream of the last forward pass.
    """

    def __init__(
        self,
        operands: Sequence[Tensor],
        size: int,
        visible: Visible,
        scale: float,
        documents: np.ndarray | None,
        stream: int | Callable[[], int],
    ):
        self.size, self.visible, self.scale, self.documents = size, visible, scale, documents
        self.stream, self.drawn = stream, 0
        q, k, v = _specs(operands)
        grid = q.grid
        lacks = any(_lacks(q.layout, each.layout, q.shape[1], k.shape[1], size, grid.shape) for each in (k, v))
        self.q, (self.k, self.v) = (
            q,
            (
                each.like(each.shape, Layout(each.layout.rows, (), units=each.layout.units)) if lacks else each
                for each in (k, v)
            ),
        )
        self.specs = [q, self.k, self.v] if len(operands) == 3 else [operands[0].spec]
        box, held = (each.layout.box(each.shape, grid.shape, grid.coords) for each in (q, self.k))
        self.runs = runs((box.c0 // size, box.c1 // size), held.c0 // size, max(1, q.shape[1] // max(1, k.shape[1])))
        rows = tuple(axis for axis in q.layout.rows if axis != SEQ)
        self.first = Layout(rows, units=q.layout.units).box((q.shape[0], 0), grid.shape, grid.coords).r0
        self.cache, length = Cache.of(grid), rows_of_sequence(operands[0])
        if self.cache is None:
            self.shares = shares(q.layout, q.shape[0], grid.shape, grid.coords, visible.causal, visible.window)
        else:
            self.shares = uncut_sequences(box, np.arange(length))
        self.fresh = all(len(each.members) == 1 for each in self.shares) and [run.of_k for run in self.runs] == [
            slice(0, (held.c1 - held.c0) // size)
        ]

    def parts(self, arrays: Sequence[Array]) -> list[Array]:
        """Arrays of q, k and v: (rows, heads x size), or views (rows, heads, size) of the one array."""
        if len(self.specs) == 3:
            return [*arrays]
        (rows, cols), size = self.q.local_shape, self.size
        return [arrays[0].reshape(rows, cols // size, 3, size)[:, :, part] for part in range(3)]

    def heads(self, array: Array, number: int) -> Array:
        """View (sequences, heads, rows of a sequence, size) of rows of q, k or v. number: of sequences."""
        library, rows, heads = self.q.library, array.shape[0], prod(array.shape[1:]) // self.size
        stride, of_head, length = *library.strides(array)[:2], rows // number
        return library.as_strided(
            array,
            (number, heads, length, self.size),
            (length * stride, of_head if array.ndim == 3 else self.size, stride, 1),
        )

    def lse(self, array: Array, own: Segment) -> Array:
        """View (sequences, heads, rows of a sequence) of a segment's part of the array (rows x heads)."""
        heads = self.q.local_shape[1] // self.size
        return array[own.rows.start * heads : own.rows.stop * heads].reshape(own.number, heads, len(own.position))

    def rows(self, segment: Segment, piece: slice = EVERYTHING) -> Rows:
        """Positions and documents of rows of a segment."""
        if self.documents is None:
            return Rows(segment.position[piece])
        start, size = segment.first - self.first, segment.number * len(segment.position)
        documents = self.documents[start : start + size].reshape(segment.number, -1)
        return Rows(segment.position[piece], documents[:, piece])

    def pairs(self, queries: Rows, keys: Rows) -> Pairs | None:
        """Pairs of blocks (`block_pairs`), or None if they may differ in each call: with documents, or in a Cache."""
        if self.documents is not None or self.cache is not None:
            return None
        return block_pairs(queries, keys, self.visible)

    def sees(self, run: Run, own: Segment) -> Visible:
        dropout = self.visible.dropout
        if dropout is None:
            return self.visible
        return self.visible._replace(dropout=dropout._replace(stream=self.drawn, sequence=own.sequence, head=run.first))

    def gathered(self, x: Tensor, spec: TensorSpec) -> Array:
        """k or v, with all heads that this rank needs."""
        if spec == x.spec:
            return x.shard
        with x.grid.ledger.phase("gather heads"):
            return relayout_array(x.grid, x.shard, x.shape, x.layout, spec.layout).wait()

    def _draw(self) -> None:
        """Take the number of the mask of dropout of this forward pass."""
        self.drawn = self.stream() if callable(self.stream) else self.stream

    def output(self, operands: Sequence[Tensor]) -> Tensor:
        """Result, recorded on the tape."""
        spec, grid, held = self.q, self.q.grid, [each.shard for each in operands]
        held[1:] = [self.gathered(*each) for each in zip(operands[1:], (self.k, self.v))]
        q, *keys_and_values = self.parts(held)
        wide, ring = spec.accumulation.new(), Ring(grid, keys_and_values, self.visible.block)
        rows, cols = spec.local_shape
        call(grid.engine, self._draw)
        lse = grid.workspace.array((rows * cols // self.size,), spec.accumulation.dtype, spec.library)
        for share in self.shares:
            own, fresh = share.own, True
            here, number = self.rows(own), own.number
            arrays = self.heads(q[own.rows], number), self.heads(wide[own.rows], number), self.lse(lse, own)
            for visit, part in in_turn(share, keys_and_values, (), ring.forward(share)):
                keys = self.rows(visit.keys, visit.piece)
                step = partial(self.visit, own, here, keys, self.pairs(here, keys), fresh, part)
                of_keys = [self.heads(each, number) for each in visit.arrays]
                call(grid.engine, step, *arrays, *of_keys, **{"writes" if fresh else "updates": arrays[1:]})
                fresh = False
        local = self.rounded(spec, wide)
        saved = {
            f"attention.{name}": each if array is each.shard else array
            for name, each, array in zip("qkv" if len(held) == 3 else ["qkv"], operands, held)
        }
        return operands[0].from_op(
            local,
            operands,
            self.gradients,
            shape=spec.shape,
            layout=spec.layout,
            keep={**saved, "attention.output": local, "attention.lse": lse},
        )

    def visit(
        self,
        own: Segment,
        here: Rows,
        keys: Rows,
        pairs: Pairs | None,
        fresh: bool,
        part: str,
        queries: Array,
        out: Array,
        lse: Array,
        key: Array,
        value: Array,
    ) -> None:
        """Attention of a segment of queries to the keys of a visit. See `kernel.attend`. Arrays are those of `heads`
        and `lse`."""
        grid = self.q.grid
        if self.cache is not None:
            key, value = self.cache.extend(key, value)
            here, keys, pairs = self.cache.visible(slice(own.sequence, own.sequence + own.number), self.visible)
        with computing(grid, "attention", self.work(2, own, keys), "attention"):
            for run in self.runs:
                attend(
                    self.q.library,
                    grid.workspace,
                    queries[:, run.of_q],
                    key[:, run.of_k],
                    value[:, run.of_k],
                    here,
                    keys,
                    self.sees(run, own),
                    self.scale,
                    Partial(out[:, run.of_q], lse[:, run.of_q]),
                    fresh,
                    part,
                    pairs,
                )

    def gradients(self, gradient: Array, *saved: Array) -> list[Gradient]:
        *held, out, lse = saved
        (q, k, v), grid = self.parts(held), self.q.grid
        ring, of_operands = Ring(grid, (k, v), self.visible.block), [spec.accumulation.new() for spec in self.specs]
        for each in () if self.fresh else of_operands:
            assign(grid.engine, each, 0)
        dq, *totals = self.parts(of_operands)
        for share in self.shares:
            here, own = self.rows(share.own), share.own
            arrays = *(self.heads(each[own.rows], own.number) for each in (q, out, gradient, dq)), self.lse(lse, own)
            for visit, part in in_turn(share, (k, v), totals, ring.backward(share, totals)):
                keys = self.rows(visit.keys, visit.piece)
                step = partial(self.visit_backward, own, here, keys, self.pairs(here, keys), part)
                of_keys, grown = (
                    [self.heads(each, own.number) for each in group] for group in (visit.arrays, visit.gradients)
                )
                written = {"writes" if self.fresh else "updates": [arrays[3], *grown]}
                call(grid.engine, step, *arrays, *of_keys, *grown, **written)
        return [
            Gradient(self.rounded(spec, each), self.of_gradient(spec)) for spec, each in zip(self.specs, of_operands)
        ]

    def visit_backward(
        self,
        own: Segment,
        here: Rows,
        keys: Rows,
        pairs: Pairs | None,
        part: str,
        queries: Array,
        result: Array,
        dout: Array,
        slope: Array,
        lse: Array,
        key: Array,
        value: Array,
        dk: Array,
        dv: Array,
    ) -> None:
        """Add the gradients of `visit`. See `kernel.attend_backward`. Arrays are those of `heads` and `lse`."""
        grid = self.q.grid
        with computing(grid, "attention", self.work(5, own, keys), "attention backward"):
            for run in self.runs:
                attend_backward(
                    self.q.library,
                    grid.workspace,
                    queries[:, run.of_q],
                    key[:, run.of_k],
                    value[:, run.of_k],
                    result[:, run.of_q],
                    lse[:, run.of_q],
                    dout[:, run.of_q],
                    here,
                    keys,
                    self.sees(run, own),
                    self.scale,
                    slope[:, run.of_q],
                    dk[:, run.of_k],
                    dv[:, run.of_k],
                    self.fresh,
                    part,
                    pairs,
                )

    def of_gradient(self, spec: TensorSpec) -> Layout:
        """Layout of a gradient, with partial sums over the axes that split only the heads of q."""
        layout, shape = spec.layout, spec.grid.shape
        sums = [axis for axis in self.q.layout.cols if axis not in layout.splitting and getattr(shape, axis) > 1]
        return Layout(layout.rows, layout.cols, sums, layout.units)

    def rounded(self, spec: TensorSpec, wide: Array) -> Array:
        """The array, rounded to the type of the spec."""
        if spec == spec.accumulation:
            return wide
        out = spec.new()
        cast = lambda wide, out: map_elementwise(spec, None, AS_IT_IS, wide, out=out)
        call(spec.grid.engine, cast, wide, out, writes=[out])
        return out

    def work(self, gemms: int, own: Segment, keys: Rows) -> int:
        """Number of operations for keys, by this number of GEMMs."""
        pairs = own.number * len(own.position) * len(keys.position)
        return 2 * gemms * pairs * self.q.local_shape[1]
