"""Sequences that several ranks share: the layout of their tokens, and the order of their rows in memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ...comm import Grid
from ...errors import LayoutError, Pmm3dError, hint
from ...layout import SEQ, ULYSSES, Box, GridShape, Layout, RowOrder, natural, order_of
from ...layout.layout import unit_of
from ...model.machines import groups_of

INSIDE = (SEQ, ULYSSES)
"""Axes that split the rows of a sequence, from major to minor."""
PARALLEL = ("auto", "ring", "ulysses")
"""Methods by which ranks that share a sequence compute its attention."""


def token_layout(
    grid: Grid, length: int, cols: str | tuple[str, ...] = (), *, unit: int = 1, block: int = 1, order: str = "plain"
) -> Layout:
    """Layout of a matrix of tokens or features, (sequences x length, features).

    Parameters
    ----------
    grid : Grid
        The grid of the matrix.
    length : int
        Number of rows of a sequence, at least 2. Axes data and z cut only between sequences.
    cols : str or tuple of str
        Axes that split the features. Default: none.
    unit : int
        Number of features that stay together, such as the features of a head. Default: 1.
    block : int
        Number of rows that the axis seq does not separate, a divisor of `length`. If `block` is a multiple of the block
        size of attention, the bits do not depend on the number of ranks along seq. Default: 1.
    order : str
        Order in which the rows of each sequence are stored, as in `positions`. Default: "plain".

    Returns
    -------
    Layout
        Rows are over data and z, then over seq and ulysses if the grid has these axes. The order is a part of the
        layout. `DistMatrix.from_global`, `redistribute` and loaders bring rows into this order, networks read it, and
        `gather` returns the rows in ascending order.

    Raises
    ------
    LayoutError
        For a length below 2, for a block that does not divide the length, and for an unknown order.

    Notes
    -----
    The ranks along seq and ulysses share the sequences of a place along (data, z), and each takes consecutive rows. If
    there are several sequences, fewer ranks share each sequence, and attention sends less.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid.dry((2, 1, 1), 2, seq=4) as grid:
    ...     layout = nn.transformer.token_layout(grid, 128, "x", unit=16)
    ...     layout.rows, layout.units, layout.box((256, 64), grid.shape, grid.coords)
    (('data', 'z', 'seq'), ((('data', 128), ('z', 128)), 16), Box(r0=0, r1=32, c0=0, c1=32))
    """
    natural(length, "token_layout: the length of a sequence is a number of rows, at least 2", 2, LayoutError)
    natural(block, "token_layout: block is a number of rows, at least 1", 1, LayoutError)
    if length % block:
        raise LayoutError(
            f"token_layout: blocks of {block} rows do not divide a sequence of {length}. Choose a block "
            "that divides the length, or block=1"
        )
    return layout_of_tokens(grid, length, cols, unit, block, order)


def layout_of_tokens(
    grid: Grid, length: int, cols: str | tuple[str, ...] = (), unit: int = 1, block: int = 1, order: str = "plain"
) -> Layout:
    """`token_layout` without checks of numbers. In a `Cache`, a pass can have one row of each sequence."""
    inside = tuple(axis for axis in INSIDE if axis in grid.shape.names)
    stored = RowOrder.of(order, length, grid.shape.along(inside), block)
    if not inside:
        return Layout(("data", "z"), cols, units=(length, unit))
    units: dict[str, Any] = {"data": length, "z": length, **dict.fromkeys(inside, block)}
    units |= {"": stored} if stored else {}
    return Layout(("data", "z", *inside), cols, units=(units, unit))


def sequence_length(layout: Layout, rows: int) -> int:
    """Number of rows of each sequence of a matrix of tokens with this layout and this number of rows.

    It is the unit in which the axis data cuts the rows. If the unit is 1, it is the number of all rows.

    Examples
    --------
    >>> from pmm3d import Layout
    >>> from pmm3d.nn.transformer import sequence_length
    >>> sequence_length(Layout(("data", "z"), units=(8, 1)), 32), sequence_length(Layout("z"), 32)
    (8, 32)
    """
    length = unit_of(layout.units[0], "data")
    return rows if length == 1 else length


def ranks_per_sequence(layout: Layout, rows: int, grid: GridShape) -> int:
    """Number of ranks along seq and ulysses that share a sequence. Arguments as in `sequence_length`.

    Examples
    --------
    >>> from pmm3d import GridShape, Layout
    >>> from pmm3d.nn.transformer import ranks_per_sequence
    >>> layout, grid = Layout(("data", "seq"), units=({"data": 8}, 1)), GridShape(1, 1, 1, 2, seq=4)
    >>> [ranks_per_sequence(layout, rows, grid) for rows in (16, 32, 64)]
    [4, 2, 1]
    """
    inside = [axis for axis in layout.rows if axis in INSIDE]
    if not inside:
        return 1
    parts = grid.along(layout.rows[: layout.rows.index(inside[0])])
    together = -(-rows // sequence_length(layout, rows) // parts) if rows else 1
    return max(1, grid.along(inside) // together)


def positions(order: str, length: int, ranks: int = 1, block: int = 1) -> np.ndarray:
    """Position in its sequence of each row, in the order in which the rows are stored.

    Parameters
    ----------
    order : str
        "plain": ascending. "zigzag": first block, last block, second block, last but one, ..., so that ranks have the
        same work with a causal mask. "striped": rank r has the blocks r, r + ranks, r + 2 ranks, ... (Brandon et al.
        2023, arXiv 2311.09431).
    length : int
        Number of rows of a sequence.
    ranks : int
        Number of ranks along seq and ulysses. Default: 1.
    block : int
        Number of rows that stay together. With 1 (default), a block of "zigzag" has 1 / (2 ranks) of the sequence. With
        a larger block, "zigzag" does not depend on the number of ranks.

    Returns
    -------
    numpy.ndarray
        A permutation of 0 to length - 1.

    Raises
    ------
    LayoutError
        For an unknown order.

    Examples
    --------
    >>> from pmm3d.nn.transformer import positions
    >>> positions("zigzag", 8, 2).tolist(), positions("striped", 8, 2, 2).tolist()
    ([0, 1, 6, 7, 2, 3, 4, 5], [0, 1, 4, 5, 2, 3, 6, 7])
    """
    return _positions(RowOrder.of(order, length, ranks, block), length)


@lru_cache(maxsize=64)
def _positions(order: RowOrder | None, length: int) -> np.ndarray:
    positions = np.arange(length) if order is None else np.array(order.positions)
    positions.flags.writeable = False
    return positions


def row_positions(layout: Layout, rows: int, box: Box) -> np.ndarray:
    """Position in its sequence of each row of a box (`Tensor.box`) of a matrix of tokens.

    Layers that depend on positions call this function, so they work with any cut of rows. The layout contains the order
    of the rows (`token_layout`).

    Examples
    --------
    >>> from pmm3d import Box, Grid
    >>> from pmm3d.nn.transformer import row_positions, token_layout
    >>> with Grid.dry((1, 1, 1), seq=2) as grid:
    ...     row_positions(token_layout(grid, 8, order="zigzag"), 8, Box(4, 8, 0, 1)).tolist()
    [2, 3, 4, 5]
    """
    length = sequence_length(layout, rows)
    return _positions(order_of(layout.units[0]), length)[np.arange(box.r0, box.r1) % max(1, length)]


def chosen(
    parallel: str, layout: Layout, rows: int, grid: GridShape, heads: tuple[int, int], skewed: bool, nodes: int = 1
) -> str:
    """Method of ranks along seq for the attention of shared sequences: "ring" or "ulysses".

    heads: numbers of heads of queries and of keys on the ranks along seq, which are on `nodes` nodes. skewed: whether a
    causal mask gives the ranks of a ring unequal work.

    "auto" chooses Ulysses if the ranks divide the heads of keys, and if Ulysses sends less than a ring or the ring's
    work is skewed. With a and a_kv heads on P ranks of a node, Ulysses sends a + a_kv parts and a ring a_kv P. On N
    nodes, (a + a_kv) (N - 1) / N^2 and a_kv (P - 1) / P parts enter a node.

    Both methods give the same bits. Raises Pmm3dError for an unknown method.

        >>> grid, layout = GridShape(1, 1, 1, seq=4), Layout("seq")
        >>> [chosen("auto", layout, 64, grid, heads, False) for heads in ((8, 8), (8, 4), (8, 2))]
        ['ulysses', 'ulysses', 'ring']
        >>> grid = GridShape(1, 1, 1, seq=8)
        >>> [chosen("auto", layout, 64, grid, (32, 8), False, nodes) for nodes in (1, 2, 8)]
        ['ulysses', 'ring', 'ulysses']
    """
    if parallel not in PARALLEL:
        raise Pmm3dError(f"parallel must be one of {', '.join(PARALLEL)}; got {parallel!r}{hint(parallel, PARALLEL)}")
    ranks = ranks_per_sequence(layout, rows, grid)
    if parallel != "auto":
        return parallel if SEQ in layout.on(grid).rows else "ring"
    a, shared = heads
    if ranks < 2 or ranks != getattr(grid, SEQ) or not shared or shared % ranks:
        return "ring"
    less = (
        a + shared < shared * ranks
        if nodes == 1
        else ((a + shared) * (nodes - 1) / nodes**2 < shared * (ranks - 1) / ranks)
    )
    return "ulysses" if skewed or less else "ring"


def nodes_along_seq(grid: Grid) -> int:
    """Number of nodes of the ranks along the axis seq, if ranks fill node after node. Equal on all ranks.

    >>> with Grid.dry((2, 1, 1), axes={"seq": 4}, hosts=2) as grid:
    ...     nodes_along_seq(grid)
    2
    """
    if grid.hosts == 1 or SEQ not in grid.shape.names:
        return 1
    return groups_of(grid.shape, -(-grid.shape.size // grid.hosts))[SEQ].nodes


def by_heads(layout: Layout, size: int, axis: str) -> Layout:
    """Layout of the computation of Ulysses (Jacobs et al. 2023, arXiv 2309.14509): ranks along the axis have the same
    rows and different heads.

        >>> by_heads(Layout(("z", "seq"), "x", units=({"z": 8}, 4)), 4, "seq")
        Layout(rows=('z',), cols=('x', 'seq'), units=(8, 4))
    """
    rows = tuple(other for other in layout.rows if other != axis)
    return Layout(rows, (*layout.cols, axis), units=(layout.units[0], size))
