"""The transport of device memory, and the product on device arrays, compared with NumPy in float64."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest
from loops import given
from mpi4py import MPI

from gpu.cases import (
    DEVICES,
    PRECISIONS,
    SIZES,
    TRANSPORTS,
    cases,
    check_error,
    common,
    gpu,
    on_device,
    ranks,
    relative_error,
    wide,
)
from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, matmul
from pmm3d.layout import WIDER

pytestmark = gpu
GRIDS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (2, 1, 2)], 8: [(2, 2, 2)] * 2}
"""Number of ranks -> grid of each product. Every second product has panels."""
STORED = ("nn", "tn", "nt", "tt")
"""Which operands are stored transposed, as in the BLAS."""
REFUSALS: dict[tuple[str, str, int], str] = {}
"""(library, transport, ranks) -> why the transport is refused on this machine, or ""."""


@cases("library")
@ranks(1, 2, 4, 8)
def test_surroundings(comm, library, result):
    """The MPI, the transport of device memory, and the device of each rank."""
    from pmm3d.comm.nodes import mpi_name

    with Grid(comm) as grid:
        matrix = DistMatrix.random(grid, (8, 8), library=library, dtype="float32")
        (matrix @ matrix).gather()
        why, devices = grid.transport.why, grid.devices(matrix.library)
    seen = [
        f"rank {row['rank']} {row['name']} {row['device']} ({row['pci']})"
        for row in devices
        if row["device"] is not None
    ]
    assert comm.rank > 0 or bool(seen) == on_device(library)  # rank 0 has the list
    result("; ".join([mpi_name(), why, *seen]), MPI=mpi_name(), transport=why, devices=devices)


@cases("library,transport", ("auto",))
@ranks(2, 4, 8)
def test_transport(comm, library, transport, result):
    result(messages(comm, library, transport))


@cases("library,transport", TRANSPORTS, of=DEVICES)
@ranks(2, 4, 8)
def test_named_transport(comm, library, transport, result):
    needs_transport(comm, library, transport)
    result(messages(comm, library, transport))


def needs_transport(comm: MPI.Intracomm, library: str, transport: str) -> None:
    """Skip the test if this transport is refused on this machine."""
    key = library, transport, comm.size
    if transport in ("direct", "nccl") and not comm.allreduce(key in REFUSALS, MPI.LAND):
        try:
            messages(comm, library, transport)
            REFUSALS[key] = ""
        except Pmm3dError as error:
            REFUSALS[key] = str(error)
    if REFUSALS.get(key):
        pytest.skip(f"{transport} is refused: {REFUSALS[key]}")


def messages(comm: MPI.Intracomm, library: str, transport: str) -> str:
    """Sum, shift and gather integers, which must be exact. Return their transport."""
    with Grid(comm, (comm.size, 1, 1), device_transport=transport) as grid:
        rows = DistMatrix.from_function(
            grid, (4 * comm.size, 1000), lambda i, j: 1000 * i + j, dtype="float32", layout=Layout("x"), library=library
        )
        sums = wide(grid.x.all_reduce(rows.local).wait())
        moved = wide(grid.x.shift(rows.local).wait())
        whole = wide(grid.x.all_gather(rows.local).wait())
        why = grid.transport.why
    expected = 1000.0 * np.arange(4 * comm.size)[:, None] + np.arange(1000)
    blocks = expected.reshape(comm.size, 4, 1000)
    right = {
        "all_gather": np.array_equal(whole, expected),
        "all_reduce": np.array_equal(sums, blocks.sum(0)),
        "shift": np.array_equal(moved, blocks[comm.rank - 1]),
    }
    assert all(right.values()), f"{why}: {right}"
    return why


@cases("library,precision", PRECISIONS)
@ranks(1, 2, 8)
def test_product(comm, library, precision, result):
    stored = STORED if comm.size == 1 else (STORED[PRECISIONS.index(precision) % 4], "nt", "tt")
    grids = GRIDS[comm.size] * (len(STORED) if comm.size == 1 else 1)
    check_products(comm, library, precision, "auto", [*zip(grids, cycle(stored))], result)


@cases("library,precision,transport", common, TRANSPORTS, of=DEVICES)
@ranks(2, 4, 8)
def test_product_over(comm, library, precision, transport, result):
    needs_transport(comm, library, transport)
    check_products(comm, library, precision, transport, [*zip(GRIDS[comm.size], ("tn", "nn", "tt"))], result)


def check_products(comm, library, precision, transport, ways, result):
    """Compare products on these grids, with operands stored in these ways, with and without panels."""
    errors = []
    for (shape, stored), panels in zip(ways, cycle((1, 4))):
        with given(grid=shape, stored=stored, panels=panels):
            errors.append(product_error(comm, library, precision, transport, shape, stored, panels))
            check_error(errors[-1], precision, "product")
    result(f"relative error {max(errors):.1e} in {len(errors)} products", error=max(errors))


def product_error(
    comm: MPI.Intracomm, library: str, precision: str, transport: str, shape: Any, stored: str, panels: int
) -> float:
    """C = A B, then C = A B / 2 + C / 2: relative error compared with NumPy. A C of the wider type is checked here."""
    m, n, k = SIZES.product
    with Grid(comm, shape, device_transport=transport) as grid:
        a, b = (
            _operand(grid, library, precision, *each)
            for each in (((m, k), 1, Layout.A, stored[0] == "t"), ((k, n), 2, Layout.B, stored[1] == "t"))
        )
        how = {"panels": panels} | ({"tf32": True} if precision == "tf32" else {})
        c = matmul(a, b, **how)
        matmul(a, b, out=c, alpha=0.5, beta=0.5, **how)
        found, left, right = (wide(matrix.gather()) for matrix in (c, a, b))
        if precision in WIDER:
            wider = matmul(a, b, panels=panels, out_dtype=WIDER[precision])
            error = relative_error(wide(wider.gather()), left @ right)
            assert error <= 100 * np.finfo(WIDER[precision]).eps, f"in {WIDER[precision]}: {error:.1e}"
    return relative_error(found, left @ right)


def _operand(
    grid: Grid, library: str, precision: str, shape: tuple[int, int], seed: int, layout: Layout, turned: bool
) -> DistMatrix:
    """A random operand. turned: the conjugate transpose of the stored matrix."""
    dtype = "float32" if precision == "tf32" else precision
    stored = DistMatrix.random(
        grid,
        shape[::-1] if turned else shape,
        seed=seed,
        dtype=dtype,
        layout=layout.T if turned else layout,
        library=library,
    )
    return stored.H if turned else stored
