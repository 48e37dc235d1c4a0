"""The product and training steps on device arrays, each held against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, matmul, nn
from pmm3d.arrays import library_of
from pmm3d.nn import optim

from .outcome import Absent, Case, Wrong

TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-2, "tf32": 2e-3, "float32": 1e-5, "complex64": 1e-5, "float64": 1e-12,
             "complex128": 1e-12}
"""Of the relative error in the Frobenius norm."""
STEPS = 5
INPUT = Layout(("data", "z"), "y")
BATCH = 96
WIDTHS = (37, 64, 51, 12)


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
    return _within(error, options["precision"]), {"error": error, "transport": why}


def _operand(grid: Grid, case: Case, shape: tuple[int, int], seed: int, name: str, turned: bool) -> DistMatrix:
    """A or B; turned: the transpose of a matrix that is stored, of complex numbers its conjugate transpose."""
    layout = Layout.A if name == "A" else Layout.B
    precision = case.options["precision"]
    dtype = "float32" if precision == "tf32" else precision
    stored = DistMatrix.random(grid, shape[::-1] if turned else shape, seed=seed, dtype=dtype,
                               layout=layout.T if turned else layout, library=case.library)
    return stored.H if turned else stored


def training(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """Losses of five steps, and all weights after them as one vector, beside those of a network of numpy in float64."""
    options = case.options
    found = _trained(comm, options, case.library, options["precision"])
    expected = _trained(comm, options, "numpy", "float64")
    losses, weights = (relative_error(*pair) for pair in zip(found, expected))
    return _within(max(losses, weights), options["precision"]), {
        "error": max(losses, weights), "error of the losses": losses}


def _trained(comm: MPI.Intracomm, options: dict[str, Any], library: str, precision: str) -> list[np.ndarray]:
    """The losses, and the weights."""
    dtype = precision if precision in ("float32", "float64") else "float32"
    chosen = {"dtype": dtype} if precision == dtype else {"precision": precision}
    with Grid(comm, options["grid"], options["data"], device_transport=options["transport"]) as grid:
        net = nn.MLP(grid, WIDTHS, nn.gelu, norm=True, seed=3, library=library, **chosen)
        opt = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        x = DistMatrix.random(grid, (BATCH, WIDTHS[0]), seed=4, dtype=dtype, layout=INPUT, library=library)
        y = DistMatrix.random(grid, (BATCH, WIDTHS[-1]), seed=5, dtype=dtype, layout=net.output_layout, library=library)
        losses = [_step(net, opt, x, y) for _ in range(STEPS)]
        weights = np.concatenate([wide(weight.gather()).reshape(-1) for weight in net.state_dict().values()])
    return [np.array(losses), weights]


def _step(net: nn.Module, opt: optim.Optimizer, x: DistMatrix, y: DistMatrix) -> float:
    loss = nn.mse(net(x), y)
    loss.backward()
    opt.clip(1.0)
    opt.step()
    return loss.item()


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


def _within(error: float, precision: str) -> str:
    said = f"relative error {error:.1e}"
    if not error < TOLERANCE[precision]:
        raise Wrong(f"{said}; allowed for {precision}: {TOLERANCE[precision]:g}")
    return said
