"""Where the ranks of a job are: the MPI, how device memory travels in it, and which device each rank has."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pmm3d import DistMatrix, Grid
from pmm3d.comm.hosts import mpi_name

from .outcome import Case


def surroundings(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """The MPI, and the devices of the ranks once they hold a matrix."""
    with Grid(comm) as grid:
        matrix = DistMatrix.random(grid, (8, 8), library=case.library, dtype="float32")
        (matrix @ matrix).gather()
        why, ranks = grid.transport.why, grid.devices(matrix.library)
    seen = [f"rank {row['rank']} {row['name']} {row['device']} ({row['pci']})" for row in ranks
            if row["device"] is not None]
    return "; ".join([mpi_name(), why, *filter(None, [", ".join(seen)])]), {
        "MPI": mpi_name(), "transport": why, "devices": ranks}
