"""Embedding of tokens and positions. The vocabulary is split over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from ...arrays import Array, NumpyLibrary
from ...comm import Grid, call
from ...errors import DTypeError, LayoutError, Pmm3dError
from ...layout import Box, Layout, order_of
from ...layout.layout import layout_of, unit_of
from ...product import DistMatrix
from ...product.constructors import Library
from ..compute import array_namespace, computing, local_results
from ..contract import LazyMatrix
from ..dense import OTHER, cuts_inside, weight_layout
from ..layers import Dropout, check_activations, check_sizes, parameter
from ..module import Module
from ..parallel import BackwardSync
from ..parameter import Parameter
from ..precision import Precision
from ..seeds import check_grid, derived, seed_of
from ..tensor import Tensor, relayout
from .cache import Cache, rows_of_sequence
from .sequence import layout_of_tokens, row_positions
from .sequence import positions as positions_in

DEVIATION = 0.02
"""Standard deviation of the normal distribution of initial values, as in GPT-2."""


def embedding(tokens: Tensor | DistMatrix, table: Tensor) -> Tensor:
    """Column of a table for each token.

    Parameters
    ----------
    tokens : Tensor or DistMatrix
        (m, 1), integers from 0 to vocabulary - 1, in any layout of the rows.
    table : Tensor
        (features, vocabulary). Rows over y and sharded over z, columns over x; or with x and y exchanged. The table can
        be the weight of a `Linear` from features to the vocabulary.

    Returns
    -------
    Tensor
        (m, features). Rows are split like the tokens, but not over x and y. Columns are over y (or x), with partial
        sums over x (or y). A relayout completes the sums by an all-reduce, or by a reduce-scatter of rows.

    Raises
    ------
    Pmm3dError
        On every rank, for a token outside the vocabulary.
    LayoutError, DTypeError
        On every rank, if tokens are not a column of integers.

    Notes
    -----
    Each rank receives (Gz-1)/Gz of its block of the table, and of the gradient in the backward pass. Tokens in host
    memory are checked in each call; the ranks agree by an all-reduce of 24 bytes. On a device, tokens with a known
    `labels_below` are not checked.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     table = nn.Tensor(DistMatrix.from_function(grid, (2, 4), lambda i, j: 10 * i + j))
    ...     tokens = DistMatrix(grid, np.array([[3], [0]]), (2, 1), Layout())
    ...     nn.transformer.embedding(tokens, table).gather()
    array([[ 3., 13.],
           [ 0., 10.]])
    """
    matrix = tokens.value if isinstance(tokens, Tensor) else tokens
    call(matrix.grid.engine, partial(check_tokens, matrix, table.shape[1]))
    return _looked_up(matrix, table)


def _looked_up(matrix: DistMatrix, table: Tensor) -> Tensor:
    """`embedding` of tokens that were checked."""
    rows = tuple([axis for axis in matrix.layout.rows if axis not in OTHER])
    if matrix.layout.named != rows:
        matrix = _redistributed(matrix, layout_of(rows, (), (), (matrix.layout.units[0], 1)))
    k = next((axis for axis in OTHER if table.layout == weight_layout(axis, table.layout.units)), None)
    gathers = k is not None and isinstance(table, Parameter)
    k = k or "y"
    if not gathers:
        table = relayout(table, layout_of((k,), (OTHER[k],)))
    units = table.layout.units
    natural = layout_of(rows, (k,), (OTHER[k],), (matrix.layout.units[0], units[0]))
    spec = table.spec.like((matrix.shape[0], table.shape[0]), natural)
    full = BackwardSync.of(table.grid).weights.gathered(table, table.tape.phase) if gathers else table.shard
    engine, library, xp, shape, out = (
        table.grid.engine,
        spec.library,
        array_namespace(full),
        tuple(full.shape),
        spec.new(),
    )
    index, *inside = local_results(table.grid, partial(_own_tokens, matrix, library, table.box, table.shape[1]))

    def forward(full: Array, out: Array, index: Array, *inside: Array) -> None:
        with computing(spec.grid, "embedding", name="embedding"):
            if shape[1]:
                out[...] = library.columns(full, index).T
            if inside:
                out[...] = xp.where(inside[0], out, 0)

    def backward(beta: int, gradient: Array, out: Array, index: Array, *inside: Array) -> None:
        with computing(spec.grid, "embedding", name="embedding backward"):
            if not beta:
                out[...] = 0
            if shape[1]:
                own = xp.where(inside[0], gradient, 0) if inside else gradient
                library.add_columns(out, index, library.astype(own, library.dtype(out)), spec.grid.workspace)

    def rule(gradient: Array, *places: Array) -> tuple[LazyMatrix]:
        def fill(out: Array, beta: int, _: slice) -> None:
            call(engine, partial(backward, beta), gradient, out, *places)

        return (LazyMatrix(layout_of((k,), (OTHER[k],), rows, units), shape, fill, "reduce dW"),)

    call(engine, forward, full, out, index, *inside)
    saved = dict(zip(("embedding.index", "embedding.inside"), (index, *inside)))
    return table.from_op(out, (table,), rule, keep=saved, shape=spec.shape, layout=natural)


def _redistributed(tokens: DistMatrix, layout: Layout) -> DistMatrix:
    """Tokens in another layout, with the same `labels_below`."""
    local = local_results(tokens.grid, lambda: tokens.redistribute(layout).local)
    moved = DistMatrix(tokens.grid, local, tokens.shape, layout)
    moved.labels_below = tokens.labels_below
    return moved


def _own_tokens(tokens: DistMatrix, library: NumpyLibrary, box: Box, vocabulary: int) -> tuple[Array, ...]:
    """For each token of this rank, the column in the rank's block of the table, and whether the token is in the block.
    The second array is left out if the block has the whole vocabulary."""
    held = tokens.local.reshape(-1)
    if tokens.library != library:
        held = library.from_numpy(tokens.library.to_numpy(held), "int64")
    held = library.astype(held, "int64")
    if box.shape[1] == vocabulary:
        return (held,)
    inside = (held >= box.c0) & (held < box.c1)
    return (held - box.c0).clip(0, max(0, box.shape[1] - 1)), inside[:, None]


def check_tokens(tokens: DistMatrix, vocabulary: int) -> None:
    """Raises LayoutError, DTypeError or Pmm3dError, on every rank, for invalid tokens. On a device, values of tokens
    with a known `labels_below` are not checked, because the host would wait for the device."""
    known = tokens.labels_below is not None and tokens.labels_below <= vocabulary and not tokens.library.on_host
    with nullcontext() if known else tokens.grid.collective_call("embedding"):
        if tokens.shape[1] != 1:
            raise LayoutError(
                "embedding: tokens must be a matrix of one column, (batch x sequence, 1); got "
                f"{tokens.shape[0]} x {tokens.shape[1]}"
            )
        if not tokens.dtype.startswith(("int", "uint")):
            raise DTypeError(
                f"embedding: tokens must be integers; got {tokens.dtype}. Convert them, for example by "
                "DistMatrix.from_global(grid, array.astype('int64'), layout=...)"
            )
        if known or not tokens.library.has_data:
            return
        host = tokens.library.to_numpy(tokens.local).reshape(-1)
        wrong = np.flatnonzero((host < 0) | (host >= vocabulary))
        if len(wrong):
            raise Pmm3dError(
                f"embedding: row {tokens.box.r0 + wrong[0]} has the token {host[wrong[0]]}; the "
                f"vocabulary is {vocabulary}, so tokens are 0 to {vocabulary - 1}"
            )


def positions_of(x: Tensor) -> Array:
    """Position in its sequence of each row of this rank: int64, in the library of x."""
    box, cache = x.box, Cache.of(x.grid)
    if cache is not None:
        return x.library.made((box.shape[0],), "int64", lambda: cache.positions(box.shape[0]))
    return x.library.made((box.shape[0],), "int64", lambda: row_positions(x.layout, x.shape[0], box))


class Embedding(Module):
    """Embedding of tokens, with learned positions.

    Parameters
    ----------
    grid : Grid
        The grid of the parameters.
    vocabulary, features : int
        Number of different tokens, and number of columns of the result.
    positions : int or None
        Length of the longest sequence. Default: no limit, and no learned positions.
    learned : bool
        Whether a second table contains features of each position. Default: True.
    dropout : float
        Dropout probability of the result. Default: 0.
    seed : int or None
        Seed of the initial values. They are normal with a standard deviation of 0.02. Default: the next seed of the
        grid (`manual_seed`).
    cols : str
        Axis that splits the columns of the result: "y" (default) or "x". The other axis splits the vocabulary.
    activations : str
        "replicated" (default): the sum over the vocabulary's axis is an all-reduce. "sharded": a reduce-scatter of
        rows.
    order : str
        As in `GPT`.
    dtype, library, precision
        As in `Linear`.

    Notes
    -----
    Tokens are (m, 1), and the result is (m, features). Tokens (m, 2) contain document numbers in the second column. The
    result is then (x, documents), for a `TransformerBlock`. To tie a head, pass `table` as the weight of a `Linear`.
    See `transformer.embedding` for layouts and bytes.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     tokens = DistMatrix(grid, np.array([[1], [3]]), (2, 1), Layout())
    ...     nn.Embedding(grid, 5, 4, positions=8)(tokens).shape
    (2, 4)
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        vocabulary: int,
        features: int,
        *,
        positions: int | None = None,
        learned: bool = True,
        dropout: float = 0.0,
        seed: int | None = None,
        cols: str = "y",
        activations: str = "replicated",
        order: str = "plain",
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
    ):
        check_grid("Embedding", grid)
        longest = {} if positions is None else {"positions": positions}
        check_sizes("Embedding", vocabulary=vocabulary, features=features, **longest)
        check_activations("Embedding", activations)
        positions_in(order, 1)  # raises for an unknown order
        self.grid, self.activations, self.order, self.longest = grid, activations, order, positions
        self.vocabulary = vocabulary
        seed = seed_of(grid, seed)
        options: dict[str, Any] = {"deviation": DEVIATION, "dtype": dtype, "library": library, "precision": precision}
        self.table = parameter(grid, (features, vocabulary), weight_layout(cols), seed=derived(seed, 0), **options)
        self.positions = (
            None
            if positions is None or not learned
            else parameter(grid, (features, positions), weight_layout(cols), seed=derived(seed, 1), **options)
        )
        self.dropout = Dropout(grid, dropout, derived(seed, 2))

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        return Layout((), self.table.layout.rows[0])

    def forward(self, tokens: Tensor, *others: Tensor) -> Any:
        if tokens.shape[1] == 2 and not others:
            tokens, documents = _columns(tokens.value)
            others = (documents,)
        grid, sequence, longest = self.grid, rows_of_sequence(tokens), self.longest
        if longest is not None and sequence > longest:
            raise LayoutError(
                f"Embedding: a sequence has {sequence} tokens, but the network {longest} positions. Make "
                f"the network with positions={sequence}, or pass shorter sequences: Layout(('data', "
                f"'z'), units=({longest}, 1))"
            )
        if sequence and tokens.shape[0] % sequence:
            raise LayoutError(
                f"Embedding: {tokens.shape[0]} tokens are not a multiple of {sequence}, the length of a "
                "sequence (the unit of rows). Pass complete sequences"
            )
        wanted = self._layout(tokens, max(1, sequence))
        tokens, *more = (
            each if each.layout == wanted else Tensor(_redistributed(each.value, wanted)) for each in (tokens, *others)
        )
        x = embedding(tokens, self.table)
        if self.positions is not None:
            places = DistMatrix(grid, positions_of(tokens)[:, None], tokens.shape, tokens.layout)
            x = x + _looked_up(places, self.positions)
        x = self.dropout(relayout(x, residual_layout(x, self.activations)))
        return (x, *more) if more else x

    def _layout(self, tokens: Tensor, sequence: int) -> Layout:
        """Layout of the tokens: their own one, or that of `token_layout` if they lack its axes, units or order."""
        held, order, block = tokens.layout, self.order if Cache.of(self.grid) is None else "plain", 1
        unit = held.units[0]
        if held.named == layout_of_tokens(self.grid, sequence).rows and unit_of(unit, "data") == sequence:
            if order == "plain" or order_of(unit) is not None:
                return held
            block = 1 if isinstance(unit, int) else unit_of(unit, held.rows[-1])
        return layout_of_tokens(self.grid, sequence, block=block, order=order)


def _columns(tokens: DistMatrix) -> list[Tensor]:
    """Tokens and document numbers as two matrices."""
    if tokens.layout.cols or tokens.layout.sums:
        tokens = _redistributed(tokens, layout_of(tokens.layout.rows, (), (), (tokens.layout.units[0], 1)))
    made = [
        DistMatrix(tokens.grid, tokens.local[:, column : column + 1], (tokens.shape[0], 1), tokens.layout)
        for column in range(2)
    ]
    made[0].labels_below = tokens.labels_below
    return [Tensor(each) for each in made]


def residual_layout(x: Tensor, activations: str) -> Layout:
    """Layout of features between blocks, for a result of `embedding`. With sharded activations, the axis of partial
    sums also splits rows, and cuts inside sequences if there are fewer sequences than ranks."""
    rows, [other], (unit, columns) = x.layout.rows, x.layout.sums, x.layout.units
    if activations == "replicated":
        return x.layout.summed
    if cuts_inside(x, (*rows, other)):
        unit = tuple((axis, unit) for axis in rows)
    return layout_of((*rows, other), x.layout.cols, (), (unit, columns))
