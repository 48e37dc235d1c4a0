"""Cost of many ranks: the choice of a grid, the setup of one rank, and real ranks that share cores.

    python benchmarks/scale.py                 (--ranks 64 128: ranks of the real runs; --ranks alone: no real run)

The first three tables are from one process, which simulates one rank of a job. Times are CPU times of this rank,
without MPI. Memory is the memory that Python and numpy allocate. The last table is from real ranks, many on each core:
CPU seconds of the mean rank, with waits, and wall-clock time of the slowest.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any

from mpi4py import MPI
from one_of_many import NODE, all_reduce, reduce_scatter, setup
from records import parser, report
from timing import on_ranks

from pmm3d import DistMatrix, Grid, Layout
from pmm3d.arrays import Workspace
from pmm3d.model.ranking import best_grid, nominal

CUBE, SIZE = 4096, 256
COUNTS = (8, 64, 128, 1024, 4096, 32768)
SHAPES = {2048: "8x16x16", 8192: "16x16x32", 32768: "32x32x32"}
REPEAT = 5
PARTS = ("Grid", "plan", "watch", "ledger")
STEPS = ("Grid", "product", "agreement", "close")


def of_auto() -> list[list[str]]:
    rows = [["ranks", "grid", "CPU ms"]]
    for ranks in (8192, 32749, 32768):
        begun = time.thread_time()
        grid = best_grid((CUBE,) * 3, ranks, machine=nominal(NODE))
        rows.append([str(ranks), str(grid), f"{1e3 * (time.thread_time() - begun):.0f}"])
    return rows


def of_setup() -> list[list[str]]:
    rows = [
        [
            "ranks",
            "grid",
            *(f"{part}, ms" for part in PARTS),
            *(f"{part}, MB" for part in PARTS),
            "calls of MPI",
            "bytes received",
        ]
    ]
    for ranks, shape in SHAPES.items():
        seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        held: dict[str, int] = {}

        def timed(part: str, make: Callable[[], Any]) -> Any:
            begun = time.thread_time()
            made = make()
            seconds[part].append(time.thread_time() - begun)
            return made

        def weighed(part: str, make: Callable[[], Any]) -> Any:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            made = make()
            held[part] = tracemalloc.get_traced_memory()[1] - before
            return made

        for _ in range(REPEAT):
            setup(ranks, shape, timed)
        tracemalloc.start()
        comm = setup(ranks, shape, weighed)
        tracemalloc.stop()
        rows.append(
            [
                str(ranks),
                shape,
                *(f"{1e3 * median(seconds[part]):.1f}" for part in PARTS),
                *(f"{held[part] / 1e6:.2f}" for part in PARTS),
                str(comm.messages),
                f"{comm.received:,}",
            ]
        )
    return rows


def of_collectives(counts: tuple[int, ...]) -> list[list[str]]:
    rows = [
        [
            "ranks",
            *(
                f"{what}, {figure}"
                for what in ("reduce-scatter", "sum of a number")
                for figure in ("rounds", "messages", "most at once", "CPU ms")
            ),
        ]
    ]
    for ranks in counts:
        row = [str(ranks)]
        for collective in (reduce_scatter, all_reduce):
            workspace, seconds = Workspace(), list[float]()
            for _ in range(REPEAT):
                begun = time.thread_time()
                link = collective(ranks, workspace)
                seconds.append(time.thread_time() - begun)
            row += [str(link.rounds), str(link.messages), str(link.most), f"{1e3 * median(seconds):.2f}"]
        rows.append(row)
    return rows


def on_this_rank() -> None:
    """The real run, on each rank. Rank 0 prints the mean CPU seconds and the longest wall-clock time of each step."""
    comm, clocks = MPI.COMM_WORLD, [(time.process_time(), time.perf_counter())]

    def step() -> None:
        clocks.append((time.process_time(), time.perf_counter()))

    grid = Grid(comm)
    step()
    a, b = (DistMatrix.random(grid, (SIZE, SIZE), seed=1, layout=layout) for layout in (Layout.A, Layout.B))
    a @ b
    step()
    with grid.collective_call("agreement", SIZE, always=True):
        pass
    step()
    grid.close()
    step()
    spent = [[after - before for before, after in zip(*pair)] for pair in itertools.pairwise(clocks)]
    everyones = comm.gather(spent)
    if everyones:
        print(
            json.dumps(
                {
                    name: [sum(cpu) / comm.size, max(wall)]
                    for name, (cpu, wall) in zip(STEPS, (zip(*step) for step in zip(*everyones)))
                }
            )
        )


def of_real_ranks(counts: list[int]) -> list[list[str]]:
    rows = [["ranks", *(f"{step}, CPU s a rank" for step in STEPS), *(f"{step}, wall s" for step in STEPS)]]
    for ranks in counts:
        found = json.loads(on_ranks(ranks, [sys.executable, __file__, "--as-ranks"]))
        rows.append(
            [str(ranks), *(f"{found[step][0]:.3f}" for step in STEPS), *(f"{found[step][1]:.2f}" for step in STEPS)]
        )
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="*", default=[64, 128], help="ranks of the real runs (64 128)")
    made.add_argument("--as-ranks", action="store_true", help="internal, on every rank: the real run")
    options = made.parse_args()
    if options.as_ranks:
        on_this_rank()
        return
    if options.quick:
        options.ranks = [2]
        SHAPES.pop(32768), SHAPES.pop(8192)
    tables = [
        ("Set-up of one rank, without messages", of_setup()),
        ("A collective for one rank, without MPI's part", of_collectives((8, 64) if options.quick else COUNTS)),
    ]
    if not options.quick:
        tables.insert(0, (f'Grid("auto") for {CUBE} cubed', of_auto()))
    if options.ranks:
        tables.append((f"Real ranks, a product of {SIZE} cubed", of_real_ranks(options.ranks)))
    report(options, *tables)


if __name__ == "__main__":
    main()
