"""Sequences that several ranks share: the layout of their tokens, and the order in which their rows are stored."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...comm import Grid
from ...errors import LayoutError, hint
from ...layout import SEQ, Box, GridShape, Layout, natural, offsets, part_sizes
from ...layout.layout import unit_of

ORDERS = ("plain", "zigzag", "striped")
"""Orders in which the rows of a sequence are stored."""


def token_layout(grid: Grid, length: int, cols: str | tuple[str, ...] = (), *, unit: int = 1, block: int = 1
                 ) -> Layout:
    """Return the layout of tokens: a matrix (sequences x length, features).

    length   rows of a sequence. Axes data and z cut between sequences only
    cols     axes that split the features;   unit: features that stay together, such as those of a head
    block    rows that the axis seq does not separate. Attention has the same bits for each number of ranks along seq if
             `block` is a multiple of the block size of its kernel. It must divide the length

    Rows are split over data and z, then over seq if the grid has this axis. If a rank of (data, z) has one sequence,
    the ranks along seq share it. If it has several, each rank along seq takes consecutive rows of them: fewer ranks
    share a sequence then, and attention moves less. Raises LayoutError for sizes that are not positive, and for a block
    that does not divide the length.

        >>> with Grid.dry((2, 1, 1), 2, seq=4) as grid:
        ...     layout = token_layout(grid, 128, "x", unit=16)
        ...     layout.rows, layout.units, layout.box((256, 64), grid.shape, grid.coords)
        (('data', 'z', 'seq'), ((('data', 128), ('z', 128)), 16), Box(r0=0, r1=32, c0=0, c1=32))
    """
    natural(length, "token_layout: the length of a sequence is a number of rows, at least 1", 1, LayoutError)
    natural(block, "token_layout: block is a number of rows, at least 1", 1, LayoutError)
    if length % block:
        raise LayoutError(f"token_layout: blocks of {block} rows do not divide a sequence of {length}. Choose a block "
                          "that divides the length, or block=1")
    if SEQ not in grid.shape.names:
        return Layout(("data", "z"), cols, units=(length, unit))
    return Layout(("data", "z", SEQ), cols, units=({"data": length, "z": length, SEQ: block}, unit))


def sequence_length(layout: Layout, rows: int) -> int:
    """Return the number of rows of each sequence of a matrix of tokens: the unit in which the axis data cuts its rows,
    or all rows if there is none.

        >>> sequence_length(Layout(("data", "z"), units=(8, 1)), 32), sequence_length(Layout("z"), 32)
        (8, 32)
    """
    length = unit_of(layout.units[0], "data")
    return rows if length == 1 else length


def ranks_per_sequence(layout: Layout, rows: int, grid: GridShape) -> int:
    """Return the number of ranks along seq that share a sequence: their number, divided by the number of sequences that
    they have together.

        >>> grid = GridShape(1, 1, 1, 2, seq=4)
        >>> layout = Layout(("data", "seq"), units=({"data": 8}, 1))
        >>> [ranks_per_sequence(layout, rows, grid) for rows in (16, 32, 64)]
        [4, 2, 1]
    """
    if SEQ not in layout.rows:
        return 1
    parts = grid.along(layout.rows[: layout.rows.index(SEQ)])
    together = -(-rows // sequence_length(layout, rows) // parts) if rows else 1
    return max(1, getattr(grid, SEQ) // together)


def positions(order: str, length: int, ranks: int, block: int = 1) -> np.ndarray:
    """Return the position in its sequence of each row, in the order in which the rows are stored: a permutation.

    order    "plain": as they are. "zigzag": each of the ranks has a part from the begin, and the part as far from the
             end, so that a causal mask leaves all ranks the same work. "striped": rank r has the blocks r, r + ranks,
             r + 2 ranks, ... (Brandon et al. 2023, arXiv 2311.09431, with stripes of a block of rows)
    ranks    that share a sequence (`ranks_per_sequence`);   block: rows that stay together

    The parts have the sizes that a layout gives them. Raises LayoutError for another order.

        >>> positions("zigzag", 8, 2).tolist(), positions("striped", 8, 2, 2).tolist()
        ([0, 1, 6, 7, 2, 3, 4, 5], [0, 1, 4, 5, 2, 3, 6, 7])
    """
    if order not in ORDERS:
        raise LayoutError(f"the order of a sequence's rows is {', '.join(ORDERS)}; got {order!r}{hint(order, ORDERS)}")
    return _positions(order, length, ranks, block)


@lru_cache(maxsize=64)
def _positions(order: str, length: int, ranks: int, block: int) -> np.ndarray:
    blocks = np.arange(-(-length // block))
    if order == "zigzag":
        sizes = part_sizes(len(blocks), ranks)
        first = offsets([-(-size // 2) for size in sizes])
        last = offsets([size // 2 for size in sizes])
        blocks = np.concatenate([part for rank in range(ranks) for part in (
            blocks[first[rank] : first[rank + 1]],
            blocks[len(blocks) - last[rank + 1] : len(blocks) - last[rank]])])
    elif order == "striped":
        blocks = np.concatenate([blocks[rank::ranks] for rank in range(ranks)])
    found = (blocks[:, None] * block + np.arange(block)).reshape(-1)
    found = found[found < length]
    found.flags.writeable = False
    return found


def row_positions(layout: Layout, rows: int, grid: GridShape, box: Box, order: str = "plain") -> np.ndarray:
    """Return the position in its sequence of each row of a box of a matrix of tokens.

    layout, rows   of the matrix
    box            `Tensor.box`, or another one: of another rank

    Layers that depend on positions call this function, so that any cut of the rows is right.

        >>> grid = GridShape(1, 1, 1, seq=2)
        >>> row_positions(Layout("seq"), 8, grid, Box(4, 8, 0, 1), "zigzag").tolist()
        [2, 3, 4, 5]
    """
    length, block = sequence_length(layout, rows), unit_of(layout.units[0], SEQ) if SEQ in layout.rows else 1
    stored = np.arange(box.r0, box.r1) % max(1, length)
    return positions(order, length, ranks_per_sequence(layout, rows, grid), block)[stored]
