"""Embedding of tokens and positions. The vocabulary is split over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...arrays import Array
from ...comm import Grid
from ...errors import LayoutError
from ...layout import Layout, order_of
from ...layout.layout import layout_of, unit_of
from ...product import DistMatrix
from ...product.constructors import Library
from ..compute import local_results
from ..dense import cuts_inside, weight_layout
from ..layers import Dropout, check_activations, check_sizes, parameter
from ..lookup import Indices, checked, looked_up, redistributed
from ..module import Module
from ..precision import Precision
from ..seeds import check_grid, derived, seed_of
from ..tensor import Tensor, relayout
from .cache import Cache, rows_of_sequence
from .sequence import layout_of_tokens, row_positions
from .sequence import positions as positions_in

TOKENS = Indices("embedding", "tokens", "(batch x sequence, 1)", "the token", "the vocabulary is {count}")
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
    GridError
        On every rank, if the tokens are on another Grid.

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
    return looked_up("embedding", checked(TOKENS, tokens, table.shape[1], table.grid), table)


def positions_of(x: Tensor) -> Array:
    """Position in its sequence of each row of this rank: int64, in the library of x."""
    box, cache = x.box, Cache.of(x.grid)
    if x.tape.tile is not None:
        x.tape.tile.refuse("a position in a sequence")
    if cache is not None:  # a recorded pass reads the length of the cache in each replay
        made = partial(x.library.made, (box.shape[0],), "int64", partial(cache.positions, box))
        return local_results(x.grid, made)
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
            each if each.layout == wanted else Tensor(redistributed(each.value, wanted)) for each in (tokens, *others)
        )
        x = embedding(tokens, self.table)
        if self.positions is not None:
            places = DistMatrix(grid, positions_of(tokens)[:, None], tokens.shape, tokens.layout)
            x = x + looked_up("embedding", places, self.positions)
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
        tokens = redistributed(tokens, layout_of(tokens.layout.rows, (), (), (tokens.layout.units[0], 1)))
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
