"""The product on device arrays, held against numpy in float64, and what device memory becomes on its way."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, matmul
from pmm3d.arrays import library_of

from .outcome import Absent, Case, Wrong

TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-2, "tf32": 2e-3, "float32": 1e-5, "complex64": 1e-5, "float64": 1e-12,
             "complex128": 1e-12}
"""Of the relative error in the Frobenius norm."""


def product(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """C = A B, then C = A B / 2 + C / 2, operands stored as BLAS's "nn", "tn", "nt" or "tt"."""
    options = case.options
    m, n, k = options["shape"]
    with Grid(comm, options["grid"], device_transport=options["transport"]) as grid:
        a, b = (_operand(grid, case, shape, seed, name, turned == "t") for shape, seed, name, turned in
                (((m, k), 1, "A", options["stored"][0]), ((k, n), 2, "B", options["stored"][1])))
        how = {"panels": options["panels"]} | ({"tf32": True} if options["precision"] == "tf32" else {})
        c = matmul(a, b, **how)
        matmul(a, b, out=c, alpha=0.5, beta=0.5, **how)
        found, left, right = (wide(matrix.gather()) for matrix in (c, a, b))
        why = grid.transport.why
    error = relative_error(found, left @ right)
    return within(error, options["precision"]), {"error": error, "transport": why}


def _operand(grid: Grid, case: Case, shape: tuple[int, int], seed: int, name: str, turned: bool) -> DistMatrix:
    """A or B; turned: the transpose of a matrix that is stored, of complex numbers its conjugate transpose."""
    layout = Layout.A if name == "A" else Layout.B
    precision = case.options["precision"]
    dtype = "float32" if precision == "tf32" else precision
    stored = DistMatrix.random(grid, shape[::-1] if turned else shape, seed=seed, dtype=dtype,
                               layout=layout.T if turned else layout, library=case.library)
    return stored.H if turned else stored


def transport(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """Integers summed, shifted and gathered by a transport, or by that which "auto" finds. Absent if it is refused."""
    try:
        return _messages(comm, case)
    except Pmm3dError as refused:
        if case.options["transport"] in ("auto", "staged"):
            raise
        raise Absent(f"refused: {refused}") from None


def _messages(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    with Grid(comm, (comm.size, 1, 1), device_transport=case.options["transport"]) as grid:
        rows = DistMatrix.from_function(grid, (4 * comm.size, 1000), lambda i, j: 1000 * i + j, dtype="float32",
                                        layout=Layout("x"), library=case.library)
        sums = wide(grid.x.all_reduce(rows.local).wait())
        moved = wide(grid.x.shift(rows.local).wait())
        whole = wide(grid.x.all_gather(rows.local).wait())
        why = grid.transport.why
    expected = 1000.0 * np.arange(4 * comm.size)[:, None] + np.arange(1000)
    blocks = expected.reshape(comm.size, 4, 1000)
    right = [np.array_equal(whole, expected), np.array_equal(sums, blocks.sum(0)),
             np.array_equal(moved, blocks[comm.rank - 1])]
    if not all(right):
        raise Wrong(f"{why}: " + ", ".join(f"{name} {'right' if good else 'WRONG'}" for name, good in
                                           zip(("all_gather", "all_reduce", "shift"), right)))
    return f"{why}; all_reduce, shift and all_gather are right", {"transport": why}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """|found - expected| / |expected| in the Frobenius norm; infinite where something is not finite."""
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def wide(array: Any) -> np.ndarray:
    """An array of any library on the host, in double precision."""
    host = library_of(array).to_numpy(array)
    return host.astype(np.complex128 if host.dtype.kind == "c" else np.float64)


def within(error: float, precision: str, times: float = 1.0, what: str = "") -> str:
    """The error in words. Raises Wrong where it is more than so many times what the precision is allowed."""
    said = f"relative error {error:.1e}"
    if not error < times * TOLERANCE[precision]:
        raise Wrong(f"{what}{': ' * bool(what)}{said}; allowed for {precision}: {times * TOLERANCE[precision]:g}")
    return said
