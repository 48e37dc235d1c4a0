"""How fast device memory travels between ranks, beside the copies and the messages that it is made of.

    python -m pmm3d.launcher -n 2 python apps/gpu_check/transport_rate.py cupy            # or torch:cuda

A staged message can be no faster than the slower of two things measured here in the same run: copies between the device
and pinned host memory, and messages of host memory by this MPI, each way at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from pmm3d import Grid
from pmm3d.arrays import library_named, take_device


def transport_rates(comm: MPI.Intracomm, name: str, nbytes: int = 2**28, repeats: int = 5) -> dict[str, Any]:
    """GB/s of each rank's way out and in at once, for so many bytes: the pinned copies; host memory by MPI; device
    memory staged, and as "auto" finds. Collective; every rank gets the slowest rank's figures.

    of_pinned, of_limit   the staged rate beside the pinned copies', and beside the slower of these and host memory's.
    Not there on one rank, which sends nothing.
    """
    found: dict[str, Any] = {"library": name, "bytes": nbytes, "ranks": comm.size}
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        take_device(name, grid.local_rank)
        library = grid.library(name)
        found["pinned"] = _rate(comm, nbytes, repeats, _pinned_copies(library, nbytes))
        if comm.size == 1:
            return found
        found["host"] = _rate(comm, nbytes, repeats, _shift(grid, library_named("numpy"), nbytes))
        found["staged"] = _rate(comm, nbytes, repeats, _shift(grid, library, nbytes))
    with Grid(comm, (comm.size, 1, 1)) as grid:
        found["auto"] = _rate(comm, nbytes, repeats, _shift(grid, library, nbytes))
        found["why"] = grid.transport.why
    found["of_pinned"] = found["staged"] / found["pinned"]
    found["of_limit"] = found["staged"] / min(found["pinned"], found["host"])
    return found


def _pinned_copies(library: Any, nbytes: int) -> Callable[[], None]:
    """Down and up at once, each in a stream of its own."""
    memory = library.pinned()
    down, up = library.new_stream(), library.new_stream()
    arrays = [library.from_numpy(np.zeros(nbytes, np.uint8), "uint8") for _ in range(2)]
    hosts = [memory.empty((nbytes,), "uint8") for _ in range(2)]
    library.synchronize()

    def copies() -> None:
        with down.current():
            library.to_host(arrays[0], hosts[0])
        with up.current():
            library.from_host(arrays[1], hosts[1])
        events = [down.record(), up.record()]
        while not all(event.done for event in events):
            pass

    return copies


def _shift(grid: Grid, library: Any, nbytes: int) -> Callable[[], None]:
    """Each rank's bytes to the next one."""
    here, there = (library.from_numpy(np.full(nbytes // 4, value, np.float32), "float32") for value in (grid.rank, -1))

    def shift() -> None:
        grid.everyone.shift(here, out=there, agreed=True).wait()
        library.synchronize()

    shift()
    if not np.all(library.to_numpy(there) == (grid.rank - 1) % grid.size):
        raise SystemExit(f"rank {grid.rank}: what arrived is not what was sent ({grid.transport.why})")
    return shift


def _rate(comm: MPI.Intracomm, nbytes: int, repeats: int, run: Callable[[], None]) -> float:
    """GB/s of the slowest rank."""
    run()
    times = []
    for _ in range(repeats):
        comm.Barrier()
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    slowest = np.empty(1)
    comm.Allreduce(np.array([median(times)]), slowest, MPI.MAX)
    return nbytes / float(slowest[0]) / 1e9


if __name__ == "__main__":
    rates = transport_rates(MPI.COMM_WORLD, sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2**28)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(rates))
