"""Time public collectives of small arrays, with the data in the message of the agreement and without.

    python -m pmm3d.launcher -n 4 benchmarks/small_collectives.py

The ranks compare their calls before a collective of users' arrays. Arrays of up to 1 KiB are sent in the same message
(`pmm3d.comm.first_round`), so the call takes one round instead of two. Both forms are timed in turns.

us, together   microseconds of the slowest rank: median of the rounds, with the data in the agreement
us, apart      the same with separate messages
ratio          apart / together: median of the ratios within a round. There are two passes
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from unittest.mock import patch

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import slowest

from pmm3d import Grid
from pmm3d.comm import first_round

SIZES, CALLS = (32, 256, 1024), 60
OPERATIONS = ("all_reduce", "all_gather")


def rows(comm: MPI.Intracomm, rounds: int, sizes: tuple[int, ...]) -> Iterator[list[str]]:
    for operation in OPERATIONS:
        for nbytes in sizes:
            seconds: dict[bool, list[float]] = {True: [], False: []}
            with Grid(comm) as grid:
                collective, array = getattr(grid.everyone, operation), np.ones(nbytes // 8)
                work = lambda collective=collective, array=array: collective(array).wait()
                for turn in range(2 * rounds):
                    for together in (True, False) if turn % 2 else (False, True):
                        with patch.object(first_round, "room", first_round.room if together else lambda ranks: 16):
                            slowest(comm, work, 3)
                            seconds[together].append(slowest(comm, work, CALLS))
            ratios = [apart / joint for joint, apart in zip(seconds[True], seconds[False])]
            yield [
                operation,
                str(nbytes),
                str(comm.size),
                *(f"{1e6 * median(seconds[together]):.0f}" for together in (True, False)),
                ", ".join(f"{median(part):.2f}" for part in (ratios[:rounds], ratios[rounds:])),
            ]


def main() -> None:
    made, comm = parser(__doc__), MPI.COMM_WORLD
    made.add_argument("--rounds", type=int, default=7, help="number of rounds of each pass; figures are medians (7)")
    options = made.parse_args()
    sizes = SIZES[:1] if options.quick else SIZES
    table = [
        ["collective", "bytes", "ranks", "us, together", "us, apart", "apart / together"],
        *rows(comm, 1 if options.quick else options.rounds, sizes),
    ]
    if comm.rank == 0:
        report(options, ("Small collectives", table))


if __name__ == "__main__":
    main()
