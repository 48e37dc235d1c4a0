"""Ragged tensors: the number of rows differs from rank to rank."""

from __future__ import annotations

from typing import Any

from ..arrays import Array
from ..comm import Grid
from ..errors import LayoutError
from ..layout import Layout, RaggedRows
from ..product import DistMatrix
from .tensor import Tensor


def ragged(
    grid: Grid,
    local: Array,
    columns: int,
    layout: Layout,
    *,
    rows: RaggedRows | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Tensor with any number of rows on each rank, such as the tokens of an expert. Nothing is sent.

    Parameters
    ----------
    local : Array
        This rank's rows, with its part of the columns.
    columns : int
        Columns of the whole matrix.
    layout : Layout
        Its rows are over the axes along which ranks have different rows. Ranks along other axes have the same rows.
    rows : RaggedRows or None
        `x.shape[0]` of another ragged tensor with the same number of rows on each rank. Operations can then combine
        both tensors. With this argument, the call is collective. Default: no such tensor.
    requires_grad : bool
        As in `Tensor`.

    Returns
    -------
    Tensor
        Its `shape[0]` is a `pmm3d.layout.RaggedRows`.

    Raises
    ------
    LayoutError
        If the array does not fit the layout. With `rows`, on every rank, if the numbers of rows differ on any rank.

    Notes
    -----
    Operations that do not move rows accept ragged tensors: `linear`, norms, softmax over columns, sums, arithmetic,
    activations, and losses with reduction="sum". All other operations raise LayoutError on every rank:

    - Means over rows, and losses that are means, need the total number of rows.
    - Dropout needs the index of each row in the whole batch.
    - Relayouts of rows, `gather`, softmax over rows, and `linear` with "sharded" activations need all numbers of rows.

    Two ragged operands are refused unless one was computed from the other or made with its `rows`.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.ragged(grid, np.ones((3, 2)), 2, Layout("data"))
    ...     x.shape[0].here, x.box, (x * 2).local.sum()
    (3, Box(r0=0, r1=3, c0=0, c1=2), np.float64(12.0))
    """
    if rows is not None:
        with grid.collective_call("ragged", columns, str(layout), always=True):
            if not isinstance(rows, RaggedRows):
                raise LayoutError(f"ragged: rows is x.shape[0] of another ragged tensor; got {rows!r}")
            if local.shape[0] != rows.here:
                raise LayoutError(
                    f"ragged: the array has {local.shape[0]} rows on rank {grid.rank}, and the tensor of "
                    f"rows= has {rows.here}"
                )
    if grid.engine.recorder is not None:
        grid.engine.recorder.refuse("the numbers of ragged rows may change")
    number: Any = RaggedRows(local.shape[0]) if rows is None else rows
    value = DistMatrix(grid, local, (number, columns), layout)
    if tuple(local.shape) != value.box.shape:
        raise LayoutError(
            f"ragged: this rank has {value.box.shape[1]} of the {columns} columns in {layout}; got an "
            f"array of shape {tuple(local.shape)}"
        )
    return Tensor(value, requires_grad=requires_grad)


def same_rows(one: int | RaggedRows, other: int | RaggedRows) -> bool:
    """Whether two numbers of rows are equal on every rank. Ragged rows are equal if they are the same object."""
    return one is other if isinstance(one, RaggedRows) else one == other
