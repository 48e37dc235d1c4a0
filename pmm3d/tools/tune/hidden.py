"""Which share of a collective passes under a GEMM, as the engine's helper thread moves it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ...comm import Axis, Grid
from .collectives import Buffers, collective, groups
from .gemms import Operands
from .sampling import Sampler

NBYTES = 2**22
"""Of the all-reduce that is to be hidden."""
SHAPE = 256, 256, 256
LONGER = 1.3
"""Times as long as the collective the GEMMs last: there is enough to hide it under."""
REPEATS = 5
SECONDS = 6.0
PLACES = "inside", "across"


def measured_hidden(sampler: Sampler, dtype: str, tell: Callable[[str, int], None]) -> dict[str, float]:
    """The share by where the ranks of a group are: inside a node, across nodes; of the largest group of each."""
    found = dict[str, float]()
    if sampler.comm.size == 1:
        return found
    buffers, operands = Buffers(NBYTES, sampler.comm.size), Operands(dtype, SHAPE[0] * SHAPE[1])
    for group, grid, axis in groups(sampler.comm):
        place = PLACES[group.nodes > 1]
        if place not in found and (group.nodes == 1 or group.inside == 1):
            with sampler.section(f"hidden {place}", SECONDS):
                share = _share(sampler, grid, axis, buffers, operands)
            tell("hidden", 1)
            if share is not None:
                found[place] = share
    return found


def _share(sampler: Sampler, grid: Grid, axis: Axis, buffers: Buffers, operands: Operands) -> float | None:
    call = collective(axis, "all_reduce", NBYTES, buffers)
    gemm = operands.gemm(SHAPE, "nn")
    alone, one = sampler.measure(call), sampler.measure(gemm)
    if alone is None or one is None:
        return None
    times = max(1, round(LONGER * alone / one))

    def gemms() -> None:
        for _ in range(times):
            with grid.engine.background():
                gemm()

    def both() -> None:
        pending = call.begin()
        gemms()
        pending.wait()

    shares = list[float]()
    for _ in range(REPEATS):
        turn = [sampler.measure(work, samples=1) for work in (call, gemms, both)]
        known = [seconds for seconds in turn if seconds is not None]
        if len(known) == len(turn):
            shares.append(share_hidden(*known))
    return round(median(shares), 4) if shares else None


def share_hidden(collective_alone: float, gemm_alone: float, together: float) -> float:
    """Of the collective's seconds, those that are saved.

        >>> share_hidden(1.0, 2.0, 2.25), share_hidden(1.0, 2.0, 3.5), share_hidden(1.0, 2.0, 1.9)
        (0.75, 0.0, 1.0)
    """
    return min(1.0, max(0.0, (collective_alone + gemm_alone - together) / collective_alone))
