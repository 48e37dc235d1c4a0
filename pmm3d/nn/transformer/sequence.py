"""Sequences that several ranks share: the layout of their tokens, and the order of their rows in memory."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...comm import Grid
from ...errors import LayoutError, Pmm3dError, hint
from ...layout import SEQ, ULYSSES, Box, GridShape, Layout, natural
from ...layout.layout import unit_of
from ...model.machines import groups_of

INSIDE = (SEQ, ULYSSES)
"""Axes that split the rows of a sequence, major to minor."""
ORDERS = ("plain", "zigzag", "striped")
"""Orders in which the rows of a sequence are stored."""
PARALLEL = ("auto", "ring", "ulysses", "gather", "2d")
"""How ranks that share a sequence compute its attention."""


def token_layout(grid: Grid, length: int, cols: str | tuple[str, ...] = (), *, unit: int = 1, block: int = 1
                 ) -> Layout:
    """Layout of tokens: of a matrix (sequences x length, features).

    Parameters
    ----------
    grid : Grid
        The grid of the matrix.
    length : int
        Rows of a sequence, at least 2. Axes data and z cut only between sequences.
    cols : str or tuple of str
        Axes that split the features. Default: none.
    unit : int
        Features that stay together, such as those of a head. Default: 1.
    block : int
        Rows that the axis seq does not separate; a divisor of `length`. If it is a multiple of the block size of
        attention, attention has the same bits for each number of ranks along seq. Default: 1.

    Returns
    -------
    Layout
        Rows are over data and z, then over seq and ulysses if the grid has these axes.

    Raises
    ------
    LayoutError
        For a length below 2, and for a block that does not divide the length.

    Notes
    -----
    If a rank of (data, z) has one sequence, the ranks along seq and ulysses share it. If it has several, each of these
    ranks takes consecutive rows. Then fewer ranks share a sequence, and attention sends less.

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
        raise LayoutError(f"token_layout: blocks of {block} rows do not divide a sequence of {length}. Choose a block "
                          "that divides the length, or block=1")
    return layout_of_tokens(grid, length, cols, unit, block)


def layout_of_tokens(grid: Grid, length: int, cols: str | tuple[str, ...] = (), unit: int = 1, block: int = 1
                     ) -> Layout:
    """`token_layout` without checks, also for one row of each sequence, in a `Cache`."""
    inside = tuple(axis for axis in INSIDE if axis in grid.shape.names)
    if not inside:
        return Layout(("data", "z"), cols, units=(length, unit))
    return Layout(("data", "z", *inside), cols,
                  units=({"data": length, "z": length, **dict.fromkeys(inside, block)}, unit))


def sequence_length(layout: Layout, rows: int) -> int:
    """Number of rows of each sequence of a matrix of tokens.

    Parameters
    ----------
    layout : Layout
        Layout of the matrix.
    rows : int
        Its number of rows.

    Returns
    -------
    int
        The unit in which the axis data cuts the rows; all rows if the unit is 1.

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
    """Number of ranks along seq and ulysses that share a sequence.

    Parameters
    ----------
    layout, rows
        As in `sequence_length`.
    grid : GridShape
        Shape of the grid.

    Returns
    -------
    int
        Number of ranks along these axes, divided by the number of sequences that they have together.

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
        "plain": ascending. "zigzag": first block, last block, second block, last but one, ..., so that a causal mask
        gives equal parts the same work. "striped": rank r has the blocks r, r + ranks, r + 2 ranks, ... (Brandon et al.
        2023, arXiv 2311.09431).
    length : int
        Rows of a sequence.
    ranks : int
        Ranks that share a sequence (`ranks_per_sequence`). Default: 1.
    block : int
        Rows that stay together. If it is 1 (default), a block of "zigzag" has 1 / (2 ranks) of the sequence. With a
        larger block, "zigzag" does not depend on the number of ranks.

    Returns
    -------
    numpy.ndarray
        A permutation of 0 to length - 1.

    Raises
    ------
    LayoutError
        For another order.

    Examples
    --------
    >>> from pmm3d.nn.transformer import positions
    >>> positions("zigzag", 8, 2).tolist(), positions("striped", 8, 2, 2).tolist()
    ([0, 1, 6, 7, 2, 3, 4, 5], [0, 1, 4, 5, 2, 3, 6, 7])
    """
    if order not in ORDERS:
        raise LayoutError(f"the order of a sequence's rows is {', '.join(ORDERS)}; got {order!r}{hint(order, ORDERS)}")
    return _positions(order, length, ranks, block)


@lru_cache(maxsize=64)
def _positions(order: str, length: int, ranks: int, block: int) -> np.ndarray:
    if order == "zigzag" and block == 1:
        block = max(1, -(-length // (2 * ranks)))
    blocks = np.arange(-(-length // block))
    if order == "zigzag":
        blocks = np.stack([blocks, blocks[::-1]], 1).reshape(-1)[: len(blocks)]
    elif order == "striped":
        blocks = np.concatenate([blocks[rank::ranks] for rank in range(ranks)])
    found = (blocks[:, None] * block + np.arange(block)).reshape(-1)
    found = found[found < length]
    found.flags.writeable = False
    return found


def row_positions(layout: Layout, rows: int, grid: GridShape, box: Box, order: str = "plain") -> np.ndarray:
    """Position in its sequence of each row of a box of a matrix of tokens.

    Parameters
    ----------
    layout, rows
        As in `sequence_length`.
    grid : GridShape
        Shape of the grid.
    box : Box
        `Tensor.box`, or the box of another rank.
    order : str
        As in `positions`. Default: "plain".

    Returns
    -------
    numpy.ndarray
        A position for each row. Layers that depend on positions call this function, so that any cut of rows is right.

    Examples
    --------
    >>> from pmm3d import Box, GridShape, Layout
    >>> from pmm3d.nn.transformer import row_positions
    >>> row_positions(Layout("seq"), 8, GridShape(1, 1, 1, seq=2), Box(4, 8, 0, 1), "zigzag").tolist()
    [2, 3, 4, 5]
    """
    length, inside = sequence_length(layout, rows), [axis for axis in layout.rows if axis in INSIDE]
    block = unit_of(layout.units[0], inside[-1]) if inside else 1
    stored = np.arange(box.r0, box.r1) % max(1, length)
    return positions(order, length, ranks_per_sequence(layout, rows, grid), block)[stored]


def chosen(parallel: str, layout: Layout, rows: int, grid: GridShape, heads: tuple[int, int], skewed: bool,
           nodes: int = 1) -> str:
    """The way in which ranks along seq compute the attention of a shared sequence: "ring", "ulysses" or "gather".

    "2d" is a ring, and needs the axis ulysses too. "auto" chooses Ulysses if the ranks divide the heads of keys, and if
    it sends less than a ring or a causal mask leaves a ring uneven work (`skewed`). `heads`: of queries and of keys, on
    the ranks along seq; `nodes`: that these ranks are on. With a and a_kv heads on P ranks of one node, Ulysses sends
    a + a_kv parts and a ring a_kv P. On N nodes (a + a_kv) (N - 1) / N^2 and a_kv (P - 1) / P parts enter a node. Both
    have the same bits. Raises Pmm3dError for another choice.

        >>> grid, layout = GridShape(1, 1, 1, seq=4), Layout("seq")
        >>> [chosen("auto", layout, 64, grid, heads, False) for heads in ((8, 8), (8, 4), (8, 2))]
        ['ulysses', 'ulysses', 'ring']
        >>> grid = GridShape(1, 1, 1, seq=8)
        >>> [chosen("auto", layout, 64, grid, (32, 8), False, nodes) for nodes in (1, 2, 8)]
        ['ulysses', 'ring', 'ulysses']
    """
    if parallel not in PARALLEL:
        raise Pmm3dError(f"attention: parallel is {', '.join(PARALLEL)}; got {parallel!r}{hint(parallel, PARALLEL)}")
    if parallel == "2d":
        if not {SEQ, ULYSSES} <= {*grid.names}:
            raise Pmm3dError(f'attention: parallel="2d" needs a grid with the axes ulysses and seq; got {grid}. Make '
                             'it with axes={"ulysses": 4, "seq": 2}, for example, where 4 ranks are on a node')
        return "ring"
    ranks = ranks_per_sequence(layout, rows, grid)
    if parallel != "auto":
        return parallel if SEQ in layout.on(grid).rows else "ring"
    a, shared = heads
    if ranks < 2 or ranks != getattr(grid, SEQ) or not shared or shared % ranks:
        return "ring"
    less = a + shared < shared * ranks if nodes == 1 else (
        (a + shared) * (nodes - 1) / nodes**2 < shared * (ranks - 1) / ranks)
    return "ulysses" if skewed or less else "ring"


def nodes_along_seq(grid: Grid) -> int:
    """Number of nodes that the ranks along the axis seq are on, if ranks fill node after node; the same on every rank.

        >>> with Grid.dry((2, 1, 1), axes={"seq": 4}, hosts=2) as grid:
        ...     nodes_along_seq(grid)
        2
    """
    if grid.hosts == 1 or SEQ not in grid.shape.names:
        return 1
    return groups_of(grid.shape, -(-grid.shape.size // grid.hosts))[SEQ].nodes


def by_heads(layout: Layout, size: int, axis: str) -> Layout:
    """Layout in which Ulysses (Jacobs et al. 2023, arXiv 2309.14509) computes: the ranks along an axis have the same
    rows and parts of the heads.

        >>> by_heads(Layout(("z", "seq"), "x", units=({"z": 8}, 4)), 4, "seq")
        Layout(rows=('z',), cols=('x', 'seq'), units=(8, 4))
    """
    rows = tuple(other for other in layout.rows if other != axis)
    return Layout(rows, (*layout.cols, axis), units=(layout.units[0], size))
