"""Pipelines whose passes take given times: the simulated and the measured time line of each schedule.

    python -m pmm3d.launcher -n 4 benchmarks/pipelines.py
    python -m pmm3d.launcher -n 4 benchmarks/pipelines.py --schedules 1f1b zb-h1 --times 40 40 20 --micro-batches 16
    python benchmarks/pipelines.py --arrival                                          (a simulation, in one process)

Each layer sleeps in place of its products, so ranks can share cores. Times are per rank: with two chunks on a rank,
each of its stages takes half of them. The makespan is the time from the first start to the last end on all ranks. A
pass takes longer than its sleep if other programs have the cores. Therefore, a second ratio compares the makespan with
a simulation in which each pass takes the mean of its measured times. The bubble is the fraction of a rank's time in
which it does not compute, on the rank with the most work.

With --arrival: the mean makespan, over many draws of random times, of 1F1B, and of ranks that execute first what
arrived first (AxoNN, Singh and Bhatele, arXiv 2110.13005). "Window": largest number of micro-batches that rank r of p
may hold. With a window of 2(p-r) - 1, 1F1B begins with 2(p-r) - 2 forward passes. F takes 1, B takes 2, and a message
0.05. Each pass takes longer by an exponentially distributed fraction with the given mean. A slow rank takes 1.5 times
as long.
"""

from __future__ import annotations

import argparse
import random
import time
import weakref
from collections.abc import Callable
from heapq import heappop, heappush
from statistics import fmean, median
from typing import Any

from mpi4py import MPI
from records import parser, report

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.layout import batch_layout
from pmm3d.nn.layers import parameter
from pmm3d.nn.pipeline import PipelineAction, PipelineSchedule, TimeLine, Times, schedule_of, simulate, time_lines
from pmm3d.nn.pipeline.executor import Executor
from pmm3d.nn.pipeline.schedules import BY_NAME
from pmm3d.nn.tensor import Tensor

QUICK = {"times": [0.5, 0.5, 0.5], "micro_batches": 8, "rounds": 1}
ROWS, WIDTH = 4, 3
Seconds = Callable[[str], float]
"""Function that returns the seconds of a pass: "F", "I" or "W"."""


class Live:
    """Counter of arrays that exist. most: largest number at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, array: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._freed)

    def _freed(self) -> None:
        self.now -= 1


class Sleeping(nn.Module):
    """y = w x, with one weight. `seconds` returns the seconds of each pass.

    live   counts the arrays that passes keep for the gradient of the weight
    """

    def __init__(self, grid: Grid, seconds: Seconds, live: Live):
        self.grid, self.seconds, self.live = grid, seconds, live
        self.weight = parameter(grid, (1, 1), Layout(), value=1.0, dtype="float64")

    def _sleep(self, kind: str) -> None:
        if self.grid.dry_run is None:
            time.sleep(self.seconds(kind))

    def forward(self, x: Tensor) -> Tensor:
        library, kept = x.library, x.library.copy(x.shard)
        self._sleep("F")
        if self.grid.dry_run is None:
            self.live.add(kept)

        def rule(gradient: Any, kept: Any) -> tuple[Any, nn.LazyMatrix]:
            self._sleep("I")

            def fill(out: Any, beta: float, rows: slice) -> None:
                self._sleep("W")
                out[...] = beta * out + (kept * gradient).sum()

            return gradient, nn.LazyMatrix(Layout(), (1, 1), fill, "reduce dW")

        return x.from_op(library.copy(x.shard), (x, self.weight), rule, keep={"sleeping.x": kept})


def network(grid: Grid, table: PipelineSchedule, seconds: Seconds, live: Live) -> nn.Pipeline:
    """A pipeline with one Sleeping layer per stage."""
    layers = range(len(table.chains[0]))
    return nn.Pipeline(
        grid, lambda stage: nn.Sequential(stage, *(Sleeping(stage, seconds, live) for _ in layers)), schedule=table
    )


def measured(net: nn.Pipeline, micro_batches: int) -> tuple[TimeLine, TimeLine]:
    """The time line of a step, and the simulated one with the measured times of its passes. Collective."""
    x, y = (
        DistMatrix.random(net.grid, (ROWS, WIDTH), seed=seed, dtype="float64", layout=batch_layout(None))
        for seed in (1, 2)
    )
    executor = Executor(net, [x] * micro_batches)
    net.parent_grid.comm.Barrier()
    executor.run(lambda micro, output: nn.mse(output, y))
    return time_lines(net.parent_grid.comm.allgather(net.grid.ledger.actions))


def row_of(schedule: str, options: argparse.Namespace) -> list[str]:
    """The row of a schedule in the table. Collective."""
    ranks, live = MPI.COMM_WORLD.size, Live()
    table = schedule_of(schedule, ranks, options.micro_batches, times=Times(*options.times))
    times = Times(*(milliseconds / 1e3 * ranks / len(table.chains[0]) for milliseconds in options.times))
    with Grid(MPI.COMM_WORLD, (1, 1, 1), axes={"pipe": ranks}) as grid:
        net = network(grid, table, dict(zip("FIW", times)).__getitem__, live)
        found = [measured(net, options.micro_batches) for _ in range(options.rounds + 1)][1:]
        most = grid.comm.allgather(live.most)
    expected = simulate(table, times)
    assert tuple(most) == expected.peak_live, (most, expected.peak_live)
    makespan, bubble = (median(getattr(line, name) for line, _ in found) for name in ("makespan", "bubble"))
    own = median(line.makespan / simulated.makespan for line, simulated in found)
    figures = (
        f"{1e3 * expected.makespan:.1f}",
        f"{1e3 * makespan:.1f}",
        f"{makespan / expected.makespan:.3f}",
        f"{own:.3f}",
        f"{100 * expected.bubble:.1f}",
        f"{100 * bubble:.1f}",
    )
    return [table.name, *figures, ", ".join(map(str, most))]


class Drawn(Times):
    """Random times of passes. seconds: (kind, rank, micro-batch) -> time."""

    seconds: dict[tuple[str, int, int], float]

    @classmethod
    def of_passes(cls, ranks: int, micro_batches: int, longer: float, slow: int | None, draw: random.Random) -> Drawn:
        made = cls(communication=0.05)
        made.seconds = {
            (kind, rank, micro): time
            * (1.5 if rank == slow else 1)
            * (1 + (draw.expovariate(1 / longer) if longer else 0))
            for kind, time in (("F", 1.0), ("B", 2.0))
            for rank in range(ranks)
            for micro in range(micro_batches)
        }
        return made

    def of(self, action: PipelineAction) -> float:
        return self.seconds[action[:3]]


def in_turns(windows: list[int], micro_batches: int) -> PipelineSchedule:
    """1F1B in which each rank holds the number of micro-batches of its window."""
    lines = []
    for rank, window in enumerate(windows):
        forward, backward = ([PipelineAction(kind, rank, micro) for micro in range(micro_batches)] for kind in "FB")
        both = [
            pair
            for number, each in enumerate(backward)
            for pair in (*forward[window - 1 + number : window + number], each)
        ]
        lines.append([*forward[: window - 1], *both])
    return PipelineSchedule.of("1f1b", lines)


def makespan_by_arrival(windows: list[int], micro_batches: int, times: Drawn) -> float:
    """Makespan if each rank executes first what arrived first, and forward passes only within its window."""
    ranks, end = len(windows), 0.0
    arrived: list[dict[str, list[float]]] = [
        {"F": [0.0] * micro_batches * (rank == 0), "B": []} for rank in range(ranks)
    ]
    done = [{"F": 0, "B": 0} for _ in windows]
    events, busy = [(0.0, rank, "", rank) for rank in range(ranks)], [False] * ranks
    while events:  # (time, rank, what arrives there, where it comes from)
        now, rank, kind, source = heappop(events)
        end = max(end, now)
        if kind:
            arrived[rank][kind].append(now)
        busy[rank] = busy[rank] and source != rank
        counts = done[rank]
        ready = [
            (arrived[rank][each][counts[each]], each)
            for each in "BF"
            if counts[each] < len(arrived[rank][each]) and (each == "B" or counts["F"] - counts["B"] < windows[rank])
        ]
        if ready and not busy[rank]:
            _, each = min(ready)
            ends = now + times.seconds[each, rank, counts[each]]
            counts[each], busy[rank] = counts[each] + 1, True
            target = rank + (1 if each == "F" else -1)
            turns = each == "F" and rank == ranks - 1
            heappush(events, (ends, rank, "B" if turns else "", rank))
            if 0 <= target < ranks:
                heappush(events, (ends + times.communication, target, each, rank))
    assert all(counts == {"F": micro_batches, "B": micro_batches} for counts in done)
    return end


def rows_by_arrival(draws: int) -> list[list[str]]:
    """Makespan of 1F1B, and those of the other orders as fractions of it."""
    rows = [
        [
            "ranks",
            "micro-batches",
            "passes longer by",
            "slow rank",
            "1F1B",
            "by arrival",
            "1F1B, larger window",
            "by arrival, larger window",
        ]
    ]
    for ranks, micro_batches in ((4, 16), (8, 32)):
        small, large = ([factor * (ranks - rank) - (factor - 1) for rank in range(ranks)] for factor in (1, 2))
        for longer in (0.0, 0.2, 1.0):
            for slow in (None, 1):
                draw, found = random.Random(1), [list[float]() for _ in range(4)]
                for _ in range(draws if longer else 1):
                    times = Drawn.of_passes(ranks, micro_batches, longer, slow, draw)
                    for number, windows in enumerate((small, large)):
                        found[2 * number].append(simulate(in_turns(windows, micro_batches), times).makespan)
                        found[2 * number + 1].append(makespan_by_arrival(windows, micro_batches, times))
                first, *others = map(fmean, found)
                rows.append(
                    [
                        str(ranks),
                        str(micro_batches),
                        f"{100 * longer:.0f}%",
                        "none" if slow is None else str(slow),
                        f"{first:.1f}",
                        *(f"{other / first:.3f}" for other in others),
                    ]
                )
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--schedules", nargs="+", default=[*BY_NAME], metavar="NAME", help="names, or CSV files")
    options.add_argument("--micro-batches", type=int, default=8, metavar="M")
    options.add_argument(
        "--times",
        type=float,
        nargs=3,
        default=[200.0, 200.0, 200.0],
        metavar=("F", "I", "W"),
        help="milliseconds of a rank's passes",
    )
    options.add_argument("--rounds", type=int, default=3, help="steps, after a first one that is not counted")
    options.add_argument("--arrival", action="store_true", help="simulate 1F1B and the order of arrival")
    options.add_argument("--draws", type=int, default=100, help="draws of random times, with --arrival (100)")
    chosen = options.parse_args()
    if chosen.arrival:
        draws = 2 if chosen.quick else chosen.draws
        report(chosen, (f"makespan, mean of {draws} draws; as part of that of 1F1B", rows_by_arrival(draws)))
        return
    if chosen.quick:
        vars(chosen).update(QUICK)
    heading = [
        "schedule",
        "simulated, ms",
        "measured, ms",
        "ratio",
        "ratio by measured passes",
        "simulated bubble, %",
        "measured bubble, %",
        "micro-batches that ranks hold",
    ]
    rows = [heading, *(row_of(name, chosen) for name in chosen.schedules)]
    if MPI.COMM_WORLD.rank == 0:
        title = (
            f"{MPI.COMM_WORLD.size} ranks, {chosen.micro_batches} micro-batches, F, I and W of "
            f"{', '.join(f'{one:g}' for one in chosen.times)} ms; medians of {chosen.rounds}"
        )
        report(chosen, (title, rows))


if __name__ == "__main__":
    main()
