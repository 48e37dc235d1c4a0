"""What must be the same on a device and on the host, most of it to the bit; and what is said when memory is used up."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, OutOfMemoryError, nn
from pmm3d.nn import functional, optim

from .arithmetic import wide
from .outcome import Case, Wrong

DISTRIBUTIONS = ("uniform", "normal", "integers")
ROUNDING = {"float64": 1e-12, "float32": 1e-6, "complex64": 1e-6}
"""By how much normal numbers may differ: each library has its own inverse of the distribution function."""


def random_matrices(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """Random matrices of each distribution, beside those of the host: the same bits, but for normal numbers."""
    different = []
    with Grid(comm) as grid:
        for distribution in DISTRIBUTIONS:
            for dtype, rounding in ROUNDING.items():
                device, host = (wide(DistMatrix.random(grid, (257, 129), seed=7, dtype=dtype, library=library,
                                                       distribution=distribution).gather())
                                for library in (case.library, "numpy"))
                most = rounding if distribution == "normal" else 0.0
                different += [] if np.allclose(device, host, most, most) else [f"{distribution} {dtype}"]
    return _all_equal(different, f"uniform, integers, and to rounding normal numbers, in {', '.join(ROUNDING)}"), {}


def dropout(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """Which elements dropout keeps, beside the host's."""
    different = []
    with Grid(comm, "ddp") as grid:
        for p in (0.1, 0.5, 0.9):
            device, host = (wide(functional.dropout(nn.Tensor(_ones(grid, library)), p, seed=11, stream=3).gather())
                            for library in (case.library, "numpy"))
            different += [] if np.array_equal(device != 0, host != 0) else [f"p = {p}"]
    return _all_equal(different, "masks of p = 0.1, 0.5, 0.9"), {}


def _ones(grid: Grid, library: str) -> DistMatrix:
    return DistMatrix.from_function(grid, (300, 131), lambda i, j: 1.0, dtype="float32", layout=Layout(("data", "z")),
                                    library=library)


def checkpoint(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """A network trained for a step on the device, saved, and read back on the host."""
    folder = comm.bcast(tempfile.mkdtemp(prefix="gpu-check-") if comm.rank == 0 else None)
    try:
        different = _through_a_checkpoint(comm, case, folder)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return _all_equal(different, "weights and optimizer states read back on the host"), {}


def _through_a_checkpoint(comm: MPI.Intracomm, case: Case, folder: str) -> list[str]:
    """The names of what is not the same afterwards."""
    from pmm3d.io import Checkpoints

    with Grid(comm, "fsdp") as grid:
        saved, read = ({**net.state_dict(), **opt.matrices()} for net, opt in
                       (_stepped(grid, library) for library in (case.library, "numpy")))
        for matrix in read.values():
            matrix.local[...] = -1
        kept = Checkpoints(grid, folder)
        kept.save(1, saved)
        kept.load_latest(read)
        return [name for name in saved if wide(saved[name].gather()).tobytes() != wide(read[name].gather()).tobytes()]


def _stepped(grid: Grid, library: str) -> tuple[nn.MLP, optim.Optimizer]:
    """A network and its optimizer, which has states after a step."""
    net = nn.MLP(grid, (12, 20, 6), nn.relu, seed=1, library=library)
    opt = optim.AdamW(net.parameters(), lr=1e-3)
    x = DistMatrix.random(grid, (16, 12), seed=2, dtype="float32", layout=Layout(("data", "z"), "y"), library=library)
    y = DistMatrix.random(grid, (16, 6), seed=3, dtype="float32", layout=net.output_layout, library=library)
    nn.mse(net(x), y).backward()
    opt.step()
    return net, opt


def out_of_memory(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """A matrix that the device cannot hold is refused in words that say what was asked for; the next one is made."""
    columns = case.options["nbytes"] // 2**20
    with Grid(comm) as grid:
        try:
            DistMatrix.empty(grid, (2**18, columns), dtype="float32", library=case.library)
        except OutOfMemoryError as error:
            said = str(error)
        else:
            raise Wrong(f"a matrix of 2^18 x {columns} float32 was made")
        small = DistMatrix.random(grid, (64, 64), seed=1, distribution="integers", dtype="float32",
                                  library=case.library)
        whole = wide(small.gather())
        if not np.array_equal(wide((small @ small).gather()), whole @ whole):
            raise Wrong("the product after it is wrong")
    return f"refused ({said[:300]}); the next product is right", {"message": said}


def _all_equal(different: list[str], what: str) -> str:
    if different:
        raise Wrong(f"not as on the host: {', '.join(different)}")
    return f"{what}: as on the host"
