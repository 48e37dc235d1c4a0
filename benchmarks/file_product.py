"""A product of matrices in files beside its two limits: the rate of the files, and the rate of the product.

    python -m pmm3d.launcher -n 2 benchmarks/file_product.py --folder /scratch

read       time to read the same panels, without products
multiply   time of the same products of panels, without files
files      time of `matmul_files`. Its limit is the longer of the two, and the time to write C
of limit   limit / time of `matmul_files`

All in turns. Before each of them, the operating system drops the files from its page cache, if it can; with --cached it
keeps them.
"""

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds, slowest

from pmm3d import DistMatrix, Grid, Layout, matmul
from pmm3d.io import matmul_files
from pmm3d.io.matrix_file import MatrixSource
from pmm3d.model.file_product import FileProduct

WAYS = "read", "multiply", "files"
MEBIBYTE = 2**20


def write_random(path: Path, size: int) -> None:
    """Write a square float64 matrix, in pieces."""
    matrix, rng = np.lib.format.open_memmap(path, "w+", "float64", (size, size)), np.random.default_rng(0)
    for row in range(0, size, 512):
        matrix[row : row + 512] = rng.random((len(matrix[row : row + 512]), size))
    matrix.flush()


def drop(*paths: Path) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(grid: Grid, paths: list[Path], product: FileProduct) -> None:
    """Read the panels of a product."""
    with ExitStack() as held:
        a, b = (MatrixSource(grid, held, name, path, "N") for name, path in zip("ab", paths))
        of_a, of_b = np.empty(product.rows * product.depth), np.empty(product.depth * product.cols)
        for step in product.steps():
            a.panel(grid, of_a, step.rows, step.depth, Layout.A)
            b.panel(grid, of_b, step.depth, step.cols, Layout.B)


def multiply(grid: Grid, product: FileProduct) -> None:
    """Multiply panels of the sizes of a product."""
    a = DistMatrix.empty(grid, (product.rows, product.depth), layout=Layout.A)
    b = DistMatrix.empty(grid, (product.depth, product.cols), layout=Layout.B)
    c = DistMatrix.empty(grid, (product.rows, product.cols), layout=Layout.C)
    for each in (a, b, c):
        each.local[...] = 1
    for _ in product.steps():
        matmul(a, b, out=c, beta=1)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", default=None, help="folder of the files (that of temporary files)")
    made.add_argument("--size", type=int, default=6144, help="rows and columns of A and B (6144)")
    made.add_argument("--memory", type=int, nargs="+", default=[160], help="MiB that a rank may hold (160)")
    made.add_argument("--rounds", type=int, default=5, help="(5)")
    made.add_argument("--cached", action="store_true", help="read files from the page cache")
    options: argparse.Namespace = made.parse_args()
    if options.quick:
        options.size, options.memory, options.rounds = 512, [2], 1
    comm = MPI.COMM_WORLD
    rows: list[list[str]] = [
        [
            "ranks",
            "size",
            "MiB of a rank",
            "tiles",
            "read MiB",
            "of least",
            "read s",
            "multiply s",
            "files s",
            "of limit",
        ]
    ]
    edge = next(x for x in range(int(comm.size**0.5), 0, -1) if comm.size % x == 0)
    with Grid(comm, (edge, 1, comm.size // edge)) as grid, tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder = Path(comm.bcast(own))
        a, b, c = (folder / f"{name}.npy" for name in "abc")
        if comm.rank == 0:
            for path in (a, b):
                write_random(path, options.size)
        for mebibytes in options.memory:
            memory = mebibytes * MEBIBYTE
            product = FileProduct.within(*[options.size] * 3, "float64", grid.shape, memory)

            def seconds(way: str) -> float:
                if not options.cached and comm.rank == 0:
                    drop(a, b)
                work = {
                    "read": lambda: read(grid, [a, b], product),
                    "multiply": lambda: multiply(grid, product),
                    "files": lambda: matmul_files(grid, a, b, c, memory=memory, overwrite=True),
                }[way]
                return slowest(comm, work)

            found = all_rounds(WAYS, seconds, options.rounds)
            times = {way: median(found[way]) for way in WAYS}
            limit = median(max(r, m) / f for r, m, f in zip(*(found[way] for way in WAYS)))
            rows.append(
                [
                    str(comm.size), str(options.size), str(mebibytes), str(product.tiles),
                    f"{product.read / MEBIBYTE:,.0f}", f"{product.read / product.bound(memory):.2f}",
                    *(f"{times[way]:.2f}" for way in WAYS), f"{limit:.2f}",
                ]
            )  # fmt: skip
        if comm.rank == 0:
            report(options, ("Product of files", rows))
        comm.Barrier()


if __name__ == "__main__":
    main()
