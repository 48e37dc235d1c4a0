"""The command `pmm3d plan product`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from ...layout import MATRIX_DTYPES
from ..output import bar
from ..ranks import one_process, size
from . import options

DTypes = Enum("DTypes", {name: name for name in MATRIX_DTYPES})  # type: ignore[misc]
"""Values of --dtype."""


@one_process
def product_command(
    m: Annotated[int, size(1, "Rows of A and C.")],
    n: Annotated[int, size(1, "Columns of B and C.")],
    k: Annotated[int, size(1, "Columns of A and rows of B.")],
    ranks: options.Ranks,
    dtype: Annotated[DTypes, typer.Option(help="Type of the elements.")] = DTypes("float64"),
    machine: options.MachineName = None,
    ranks_per_node: options.RanksPerNode = None,
    memory: options.Memory = None,
    top: options.Top = 10,
    wide: options.Wide = False,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Rank the grids for a product C (m, n) = A (m, k) B by time, before a job is submitted.

    The tables show the time with its largest terms, the share of peak, and the memory of the fullest rank and of a
    node, for the best grids and for fsdp and megatron. Grids that are not shown are counted by reason. No MPI is used.

    [bold]Examples[/]

    pmm3d plan product --m 65536 --n 65536 --k 65536 --ranks 512

    pmm3d plan product --m 8192 --n 8192 --k 512 --ranks 64 --machine frontier
    """
    from ...model.ranking import rank_products
    from .ranking import check_outputs, print_plan, write_plan

    check_outputs(json, plot)
    chosen = options.chosen_machine(machine, ranks, ranks_per_node)
    with bar("plan product"):
        ranking = rank_products((m, n, k), ranks, dtype.value, chosen.machine, limit=memory, top=top)
    print_plan(chosen, ranking, top, "a product", memory=memory, wide=wide, product=(m, n, k))
    write_plan(chosen, ranking, top, json, plot)
