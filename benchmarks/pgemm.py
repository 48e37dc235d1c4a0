"""pgemm and redistribution of block-cyclic matrices, compared with ScaLAPACK in the same processes, in turns.

    make embed; apt-get install libscalapack-openmpi-dev libopenblas0-pthread     (as root)
    export PMM3D_BLAS=/usr/lib/x86_64-linux-gnu/libopenblas.so.0 OPENBLAS_NUM_THREADS=1
    mpirun -n 8 .venv-embed/bin/python benchmarks/pgemm.py
    mpirun -n 8 .venv-embed/bin/python benchmarks/pgemm.py --moves
    mpirun -n 4 .venv/bin/python benchmarks/pgemm.py --ways                       (without ScaLAPACK)
    mpirun -n 4 .venv/bin/python benchmarks/pgemm.py --datatypes                  (without ScaLAPACK)

Both use the BLAS in PMM3D_BLAS, which is loaded for ScaLAPACK too, one thread per rank, and the MPI of ScaLAPACK, whose
file may be in PMM3D_SCALAPACK.
Blocks are 64 x 64, on the process grid nearest to a square. Times are medians of the rounds on the slowest rank. The
order of the libraries alternates. The limit is the rate of the same GEMM on one core, times the cores of the ranks.
With --moves: an 8192 x 8192 matrix of float64 to the layout of an operand and back, and MPI_Alltoallv of the same
number of bytes. With --ways: products whose C stays where it is, and the same with A, B and C moved, as with
`max_workspace`. With --datatypes: a 4096 x 4096 matrix of float64 to the
layout of an operand and back, by packed messages, as in pmm3d, and by messages of one derived datatype each.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import in_turns, sizes_of, slowest

from pmm3d import BlacsContext, Grid, Layout, PgemmPlan, pgemr2d
from pmm3d.arrays import NumpyLibrary, Slab
from pmm3d.comm import Buffers, compute
from pmm3d.layout import BlockCyclic, Placement
from pmm3d.layout.distribution import Strided, Tiled
from pmm3d.layout.pieces import Piece, recv_blocks, send_blocks
from pmm3d.model.machine import usable_cores
from pmm3d.model.move import tile_move
from pmm3d.product.tiles import TileMove
from pmm3d.tools.bench.measure import core_rate
from pmm3d.tools.bench.result import Case
from pmm3d.tools.tune.scalapack.library import Scalapack
from pmm3d.tools.tune.scalapack.measuring import process_grid

SHAPES = ((4096, 4096, 4096), (1024, 1024, 32768), (65536, 512, 512))
WAYS = ((1024, 1024, 1024), (4096, 4096, 4096), (4096, 4096, 256), (4096, 4096, 64))
BLOCK, MOVED = 64, 8192
LIBRARY = NumpyLibrary()


def medians(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each library on the slowest rank."""
    found = in_turns(sides, lambda side: {"seconds": slowest(MPI.COMM_WORLD, sides[side])}, rounds)
    return {side: figures["seconds"] for side, figures in found.items()}


def limit(grid: Grid, case: Case) -> float:
    """Seconds of the product at the rate of a 2048 x 2048 x 2048 product on one core, times the cores."""
    return case.flop / (1e9 * core_rate(grid, case, (2048, 2048, 2048)) * min(grid.size, usable_cores()))


def product_row(scalapack: Scalapack, shape: tuple[int, int, int], dtype: str, rounds: int) -> list[str]:
    (m, n, k), comm = shape, MPI.COMM_WORLD
    grid = process_grid(comm.size)
    theirs = scalapack.context(comm, grid)
    with BlacsContext(comm, grid) as ours:
        sizes = (m, k), (k, n), (m, n)
        descriptors = [ours.descriptor(*size, BLOCK, BLOCK) for size in sizes]
        arrays = [descriptor.empty(dtype) for descriptor in descriptors]
        for number, array in enumerate(arrays):
            array[...] = np.arange(array.shape[1]) % (5 + number) + comm.rank % 3
        others = [theirs.descriptor(*size, BLOCK, BLOCK, 0, 0, array.shape[0]) for size, array in zip(sizes, arrays)]
        a, b, c = arrays
        d = c.copy(order="F")
        plan = PgemmPlan(
            "N", "N", m, n, k, 1, 1, descriptors[0], 1, 1, descriptors[1], 1, 1, descriptors[2], dtype=dtype
        )
        sides = {
            "pmm3d": lambda: plan(a, b, c),
            "scalapack": lambda: scalapack.run(
                "gemm",
                dtype,
                "N",
                "N",
                m,
                n,
                k,
                1.0,
                *((each, 1, 1, other) for each, other in zip((a, b), others)),
                0.0,
                (d, 1, 1, others[2]),
            ),
        }
        seconds = medians(sides, rounds)
        right = comm.allreduce(int(np.allclose(c, d, rtol=1e-3 if dtype == "float32" else 1e-10)), MPI.MIN)
        ideal = limit(ours.grid, Case(m, n, k, dtype))
        cells = [
            f"{m} x {n} x {k}",
            dtype,
            *(f"{1e3 * seconds[side]:.0f} ({ideal / seconds[side]:.2f})" for side in sides),
            f"{seconds['scalapack'] / seconds['pmm3d']:.2f}",
            str(plan.grid.shape),
            "yes" if right else "NO",
        ]
    theirs.close()
    return cells


def ways_row(shape: tuple[int, int, int], dtype: str, rounds: int) -> list[str]:
    (m, n, k), comm = shape, MPI.COMM_WORLD
    with BlacsContext(comm, process_grid(comm.size)) as context:
        descriptors = [context.descriptor(*size, BLOCK, BLOCK) for size in ((m, k), (k, n), (m, n))]
        a, b, c = arrays = [descriptor.empty(dtype) for descriptor in descriptors]
        for number, array in enumerate(arrays):
            array[...] = number
        of_a, of_b, of_c = ((1, 1, descriptor) for descriptor in descriptors)
        stays, moved = (
            PgemmPlan("N", "N", m, n, k, *of_a, *of_b, *of_c, dtype=dtype, max_workspace=limit)
            for limit in (None, 2**60)
        )
        seconds = medians({"stays": lambda: stays(a, b, c), "moves": lambda: moved(a, b, c)}, rounds)
        return [
            f"{m} x {n} x {k}",
            dtype,
            *(f"{1e3 * time:.0f}" for time in seconds.values()),
            f"{seconds['moves'] / seconds['stays']:.2f}",
            str(moved.grid.shape),
            "stays" if stays.grid is context.grid else "moves",
        ]


def moves(scalapack: Scalapack, rounds: int, size: int) -> list[list[str]]:
    comm = MPI.COMM_WORLD
    shape = process_grid(comm.size)
    theirs = scalapack.context(comm, shape)
    column = scalapack.context(comm, (1, comm.size))
    with BlacsContext(comm, shape) as ours, BlacsContext(ours.grid, (1, comm.size)) as slabs:
        descriptor = ours.descriptor(size, size, BLOCK, BLOCK)
        whole = slabs.descriptor(size, size, size, size // comm.size)
        a, back, slab, other = descriptor.empty(), descriptor.empty(), whole.empty(), whole.empty()
        for array in (a, back, slab, other):
            array[...] = comm.rank
        there = theirs.descriptor(size, size, BLOCK, BLOCK, 0, 0, a.shape[0])
        in_slabs = column.descriptor(size, size, size, size // comm.size, 0, 0, slab.shape[0])
        grid_shape = ours.grid.shape_for((size, size, size), "float64")
        layout = Layout("z", ("y", "x"))
        on_grid = Placement((size, size), layout, grid_shape, "F")
        local_shapes = on_grid.local_shapes(comm.rank)  # empty on a rank outside the grid
        shard = np.empty(local_shapes[0] if local_shapes else (0, 0), order="F")
        shard[...] = 0
        forth, home = (
            TileMove(ours.grid, *way, "float64") for way in ((descriptor.cyclic, on_grid), (on_grid, descriptor.cyclic))
        )
        counts = [a.size // comm.size] * comm.size
        sides = {
            "to an operand's layout": lambda: forth.start(LIBRARY, [a], [shard]).wait(),
            "and back": lambda: home.start(LIBRARY, [shard], [back]).wait(),
            "MPI_Alltoallv": lambda: comm.Alltoallv([a.ravel("F"), counts], [back.ravel("F"), counts]),
            "pgemr2d to block columns": lambda: pgemr2d(size, size, a, 1, 1, descriptor, slab, 1, 1, whole),
            "pgemr2d back": lambda: pgemr2d(size, size, slab, 1, 1, whole, back, 1, 1, descriptor),
            "pdgemr2d to block columns": lambda: scalapack.pgemr2d(
                size, size, a, 1, 1, there, other, 1, 1, in_slabs, theirs
            ),
            "pdgemr2d back": lambda: scalapack.pgemr2d(size, size, other, 1, 1, in_slabs, back, 1, 1, there, theirs),
        }
        seconds = medians(sides, rounds)
        rows = [[name, f"{1e3 * time:.0f}", f"{seconds['MPI_Alltoallv'] / time:.2f}"] for name, time in seconds.items()]
    theirs.close()
    column.close()
    return rows


def repeated(kind: MPI.Datatype, runs: Sequence[Strided], stride: int) -> MPI.Datatype:
    """The datatype of `kind` at each index of the runs, with stride `stride` in bytes."""
    each = [
        kind.Create_hvector(run.length, 1, stride).Create_hvector(run.times, 1, run.step_here * stride) for run in runs
    ]
    return MPI.Datatype.Create_struct([1] * len(runs), [run.here * stride for run in runs], each)


def datatype(pieces: Sequence[Piece], array: np.ndarray) -> MPI.Datatype:
    """The datatype of the elements of a message, in order, relative to MPI.BOTTOM."""
    kinds = [
        repeated(repeated(MPI.DOUBLE, piece.cols, array.strides[1]), piece.rows, array.strides[0]) for piece in pieces
    ]
    places = [MPI.Get_address(array)] * len(kinds)
    return MPI.Datatype.Create_struct([1] * len(kinds), places, kinds).Commit()


class DatatypeMove:
    """A move with messages that are not packed: MPI reads and writes the arrays by derived datatypes."""

    def __init__(self, comm: MPI.Intracomm, source: Tiled, target: Tiled, arrays: Sequence[np.ndarray]):
        self._comm = comm
        schedule = tile_move(source, target, comm.rank, comm.size)
        stored = [array.T if source.order == "F" else array for array in arrays]
        buffers = Buffers(schedule, LIBRARY, stored, (0, 0), Slab(np.empty(8 * schedule.work_rows, np.uint8), LIBRARY))
        stays = [each.copies for each in schedule.rounds if each.sends or each.receives or len(schedule.rounds) == 1]
        self._copies = [one for copies in stays for one in buffers.arithmetic(copies)]
        self._sends, self._receives = (
            [(ranks[0], datatype(pieces, array)) for ranks, pieces in blocks.items() if ranks != (comm.rank,)]
            for blocks, array in (
                (send_blocks(source, target, comm.rank), arrays[0]),
                (recv_blocks(source, target, comm.rank), arrays[1]),
            )
        )

    def __call__(self) -> None:
        requests = [self._comm.Irecv([MPI.BOTTOM, 1, kind], rank) for rank, kind in self._receives]
        requests += [self._comm.Isend([MPI.BOTTOM, 1, kind], rank) for rank, kind in self._sends]
        compute(LIBRARY, self._copies)
        MPI.Request.Waitall(requests)


def datatypes(rounds: int, size: int) -> list[list[str]]:
    comm, rows = MPI.COMM_WORLD, []
    with Grid(comm) as grid:
        for block in (64, 256):
            cyclic = BlockCyclic((size, size), (block, block), process_grid(comm.size))
            for layout, order in ((Layout.A, "C"), (Layout.A, "F")):
                on_grid = Placement((size, size), layout, grid.shape, order)
                held, shard = (
                    np.full(tiled.local_shapes(comm.rank)[0], comm.rank, "float64", order=tiled.order)
                    for tiled in (cyclic, on_grid)
                )
                sides: dict[str, Callable[[], object]] = {}
                for way, source, target in (("forth", cyclic, on_grid), ("back", on_grid, cyclic)):
                    arrays = (held, shard) if source is cyclic else (shard, held)
                    move = TileMove(grid, source, target, "float64")
                    sides[f"{way}, packed"] = partial(packed, move, *arrays)
                    sides[f"{way}, datatypes"] = DatatypeMove(comm, source, target, arrays)
                seconds = medians(sides, rounds)
                rows.append([str(block), order, *(f"{1e3 * seconds[side]:.0f}" for side in sides)])
    return [["block", "order of the shard", *sides], *rows]


def packed(move: TileMove, source: np.ndarray, target: np.ndarray) -> None:
    move.start(LIBRARY, [source], [target]).wait()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--moves", action="store_true", help="only redistribution")
    made.add_argument("--ways", action="store_true", help="products whose C stays, and with C moved")
    made.add_argument("--datatypes", action="store_true", help="packed messages and MPI's derived datatypes")
    made.add_argument("--rounds", type=int, default=5, help="number of rounds; figures are medians (5)")
    made.add_argument("--shape", help="one product, such as 4096x4096x4096 (three products)")
    made.add_argument("--dtype", help="float32 or float64 (both)")
    asked, comm = made.parse_args(), MPI.COMM_WORLD
    if asked.ways:
        made.refuse(asked, "--moves --datatypes", "--ways")
    if asked.moves or asked.datatypes:
        made.refuse(asked, "--shape --dtype", "--moves" if asked.moves else "--datatypes")
    size = MOVED
    if asked.quick:
        asked.rounds, asked.shape, size = 1, "128x130x140", BLOCK * comm.size
    if asked.datatypes:
        rows = datatypes(asked.rounds, 4096 if not asked.quick else size)
        if comm.rank == 0:
            report(asked, (f"4096 x 4096 float64, {comm.size} ranks, ms", rows))
        return
    shapes = [sizes_of(asked.shape)[:3]] if asked.shape else WAYS if asked.ways else SHAPES
    dtypes = [asked.dtype] if asked.dtype else ["float64", "float32"]
    title = f"{comm.size} ranks, process grid {process_grid(comm.size)}, blocks of {BLOCK}"
    if asked.ways:
        rows = [["m x n x k", "type", "C stays ms", "C moves ms", "faster", "grid", "pgemm's choice"]]
        rows += [ways_row(shape, dtype, asked.rounds) for shape in shapes for dtype in dtypes]
        if comm.rank == 0:
            report(asked, (title, rows))
        return
    if file := os.environ.get("PMM3D_BLAS"):
        try:
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            made.error(
                f"PMM3D_BLAS={file} is not the file of a library. ScaLAPACK needs one: name the file, such as "
                "/usr/lib/x86_64-linux-gnu/libopenblas.so.0"
            )
    scalapack = Scalapack(os.environ.get("PMM3D_SCALAPACK", ""))
    if asked.moves:
        rows = [
            [f"{size} x {size} float64", "ms", "of the bandwidth of MPI_Alltoallv"],
            *moves(scalapack, asked.rounds, size),
        ]
    else:
        rows = [["m x n x k", "type", "pgemm ms (of the limit)", "p?gemm ms (of the limit)", "faster", "grid", "right"]]
        rows += [product_row(scalapack, shape, dtype, asked.rounds) for shape in shapes for dtype in dtypes]
    if comm.rank == 0:
        report(asked, (title, rows))


if __name__ == "__main__":
    main()
