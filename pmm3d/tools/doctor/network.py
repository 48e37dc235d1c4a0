"""Latency and bandwidth of each axis, what moves while a rank computes, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ...arrays import NumpyLibrary, Workspace
from ...comm import Axis, Grid
from ...text import in_bytes, ranks_in_words
from .finding import Finding, ranks_by, spread
from .nodes import Node, crowded_hosts, gather_node
from .session import MESSAGE, PATIENCE, Session

LARGE = 2**23
"""Bytes of a message whose time is all bandwidth, as those of a product are."""
SMALL_REPEATS, LARGE_REPEATS = 200, 10
SECONDS = 0.25
"""Of one size between the pairs of an axis."""
UNEVEN = 3.0
"""How many times slower than the fastest pair a pair of the same axis may be."""
SLOWER_INNER = 2.0
"""How many times slower than z the x axis may be, which carries as much and has the nearer ranks."""
TCP_SECONDS, SLOW_MEMORY = 12e-6, 1e9
"""Latency that no RDMA network has, and bytes a second that any memory exceeds."""
TRANSFER, TRANSFER_PROBE = 2**23, 2**20
SLOW_PROBE_SECONDS = 0.02
"""Bytes; on a network that takes longer for the probe the transfer is as small as the probe."""
COMPUTE, LEAST_COMPUTE = 256, 5e-3
"""Size of the GEMM that computing is made of (a millisecond at most), and seconds of computing at least."""
TIMES = 3
"""Of which the median counts."""
MOVES_BY_ITSELF = 0.5
"""Share of a transfer hidden by computing from which on MPI is said to move it alone."""
CLOCK_READINGS, CLOCK_SECONDS = 12, 1.0
"""The shortest of the readings tells the most; clocks further apart mislead people and make(1)."""


class Pair(NamedTuple):
    """Two neighbours along an axis, measured while all other pairs were too. seconds: half the round trip of a byte."""

    axis: str
    ranks: tuple[int, int]
    seconds: float
    bytes_per_second: float


class Axes(NamedTuple):
    """shape: of the grid; pairs: those that this rank began."""

    shape: tuple[int, ...]
    pairs: list[Pair]
    node: Node


def gather_axes(session: Session) -> Axes:
    with closing(Grid(session.comm, session.grid, timeout=PATIENCE)) as grid:
        axes = [grid.axis(name) for name in "xyz" if getattr(grid.shape, name) > 1]
        pairs = [pair for axis in axes for odd in (0, 1) for pair in _measured(session, axis, odd)]
        return Axes(grid.shape[:3], pairs, gather_node(session))


def _measured(session: Session, axis: Axis, odd: int) -> list[Pair]:
    """Each rank with the next, or, if odd, with the one before, so that every link is tried."""
    session.barrier()
    low = axis.index - (axis.index + odd) % 2
    if not 0 <= low < axis.size - 1:
        return []
    ranks = (axis.ranks[low], axis.ranks[low + 1])
    small = ping_pong(session, ranks, 1, SMALL_REPEATS)
    large = ping_pong(session, ranks, LARGE, LARGE_REPEATS)
    return [Pair(axis.name, ranks, median(small), LARGE / median(large))] if small else []


def ping_pong(session: Session, ranks: tuple[int, int], nbytes: int, repeats: int) -> list[float]:
    """Half round trips between two ranks; the first rank measures and decides when it is enough."""
    outgoing, incoming = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    first = session.rank == ranks[0]
    other = ranks[1] if first else ranks[0]
    begun = time.perf_counter()
    times: list[float] = []
    enough = False
    while not enough:
        receiving = session.comm.Irecv([incoming, MPI.BYTE], other, MESSAGE)
        sent = time.perf_counter()
        if first:
            enough = len(times) >= repeats or (len(times) >= 2 and sent - begun > SECONDS)
            outgoing[0] = enough
        else:
            session.wait(receiving)
            enough = bool(incoming[0])
        session.wait(session.comm.Isend([outgoing, MPI.BYTE], other, MESSAGE))
        if first:
            session.wait(receiving)
            times.append((time.perf_counter() - sent) / 2)
    return times[1:]


def judge_axes(finding: Finding, facts: list[Axes], hosts: list[str]) -> None:
    pairs = [pair for fact in facts for pair in fact.pairs]
    axes, words = {}, []
    for name in dict.fromkeys(pair.axis for pair in pairs):
        along = [pair for pair in pairs if pair.axis == name]
        crossing = sum(_crosses(pair, hosts) for pair in along)
        latency, bandwidth = [pair.seconds for pair in along], [pair.bytes_per_second for pair in along]
        kind = "within hosts" if not crossing else "between hosts" if crossing == len(along) else "both"
        words.append(f"{name} ({kind}) {spread([1e6 * value for value in latency])} us, "
                     f"{spread([value / 1e9 for value in bandwidth], '{:.2f}')} GB/s")
        axes[name] = {"pairs": len(along), "crossing_hosts": crossing, "latency_seconds": median(latency),
                      "latency_seconds_max": max(latency), "bytes_per_second": median(bandwidth),
                      "bytes_per_second_min": min(bandwidth)}
    grid = "x".join(map(str, facts[0].shape))
    finding.found = f"grid {grid}, all pairs of an axis at once, {in_bytes(LARGE)}: {'; '.join(words)}"
    finding.figures = {"grid": facts[0].shape, "message_bytes": LARGE, "axes": axes}
    if not crowded_hosts([fact.node.cores for fact in facts], hosts):
        _judge_speed(finding, pairs, hosts, any(fact.node.rdma for fact in facts))
        if {"x", "z"} <= axes.keys() and axes["x"]["bytes_per_second"] * SLOWER_INNER < axes["z"]["bytes_per_second"]:
            finding.warn("the x axis is slower than the z axis, though its ranks are neighbours",
                         "place ranks in blocks: srun --distribution=block:block, mpiexec --map-by core")
    for inner, outer in zip(axes, list(axes)[1:]):
        if axes[inner]["crossing_hosts"] and not axes[outer]["crossing_hosts"]:
            finding.warn(f"the {inner} axis crosses hosts and the {outer} axis does not",
                         "ranks run fastest along x: srun --distribution=block, mpiexec --map-by core")


def _crosses(pair: Pair, hosts: list[str]) -> bool:
    return hosts[pair.ranks[0]] != hosts[pair.ranks[1]]


def _judge_speed(finding: Finding, pairs: list[Pair], hosts: list[str], rdma: bool) -> None:
    inside = [pair for pair in pairs if not _crosses(pair, hosts)]
    between = [pair for pair in pairs if _crosses(pair, hosts)]
    for alike, where in ((inside, "within a host"), (between, "between hosts")):
        rates = [pair.bytes_per_second for pair in alike]
        slow = [rate for rate in rates if rate * UNEVEN < max(rates)]
        if slow:
            worst = alike[rates.index(min(rates))].ranks
            names = " and ".join(dict.fromkeys(hosts[rank] for rank in worst))
            finding.warn(f"{len(slow)} of {len(alike)} pairs {where} are more than {UNEVEN:g} times slower than the "
                         f"best; the slowest, {ranks_in_words(worst)} on {names}, moves {min(rates) / 1e9:.2f} GB/s, "
                         f"the best {max(rates) / 1e9:.2f}",
                         "try without that node (srun --exclude), or with all nodes under one switch (srun "
                         "--switches=1); within a host: bind ranks to cores (srun --cpu-bind=cores)")
    if inside and median(pair.bytes_per_second for pair in inside) < SLOW_MEMORY:
        finding.warn("messages within a host are slower than memory by far: MPI may not use shared memory",
                     "Open MPI: unset OMPI_MCA_btl and OMPI_MCA_pml, or OMPI_MCA_btl=self,sm,...; MPICH: unset "
                     "MPIR_CVAR_NOLOCAL; in containers: one container a node, or a shared /dev/shm (--ipc=host)")
    latency = median(pair.seconds for pair in between) if between else 0.0
    if rdma and latency > TCP_SECONDS:
        finding.warn(f"between hosts a byte takes {1e6 * latency:.0f} us, as over TCP, though the nodes have an RDMA "
                     "network",
                     "use the site's MPI rather than a wheel (make MPI=site); Open MPI: OMPI_MCA_pml=ucx; MPICH: "
                     "FI_PROVIDER=verbs; see ucx_info -d")


class Progress(NamedTuple):
    """Seconds of a transfer alone, and of the wait for it after computing for twice as long. By kind."""

    alone: dict[str, float]
    left: dict[str, float]
    nbytes: int
    helper: bool


class Transfer(NamedTuple):
    """start() returns what finish takes; driven() is the context that computing meanwhile is done in."""

    start: Callable[[], Any]
    finish: Callable[[Any], object]
    driven: Callable[[], AbstractContextManager[None]] = nullcontext


def gather_progress(session: Session) -> Progress:
    with closing(Grid(session.comm, (session.size, 1, 1), timeout=PATIENCE)) as grid:
        probe = _seconds(session, _transfers(session, grid, TRANSFER_PROBE)["Isend/Irecv"], times=1)
        nbytes = TRANSFER if probe < SLOW_PROBE_SECONDS else TRANSFER_PROBE
        alone, left = {}, {}
        for kind, transfer in _transfers(session, grid, nbytes).items():
            alone[kind] = _seconds(session, transfer)
            left[kind] = _seconds(session, transfer, computing=max(2 * alone[kind], LEAST_COMPUTE))
        return Progress(alone, left, nbytes, MPI.Query_thread() >= MPI.THREAD_SERIALIZED)


def _transfers(session: Session, grid: Grid, nbytes: int) -> dict[str, Transfer]:
    """By kind; each rank receives about that many bytes."""
    comm, size = session.comm, session.size
    part = max(2**16, nbytes // size)
    outgoing, incoming = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    mine, whole = np.ones(part, np.uint8), np.ones(part * size, np.uint8)
    after, before = (session.rank + 1) % size, (session.rank - 1) % size

    def ring() -> list[MPI.Request]:
        return [comm.Irecv([incoming, MPI.BYTE], before, MESSAGE), comm.Isend([outgoing, MPI.BYTE], after, MESSAGE)]

    finish = lambda requests: list(map(session.wait, requests))
    return {"Isend/Irecv": Transfer(ring, finish),
            "Iallgather": Transfer(lambda: [comm.Iallgather([mine, MPI.BYTE], [whole, MPI.BYTE])], finish),
            "pmm3d": Transfer(lambda: grid.everyone.all_gather(mine, out=whole, counts=[part] * size),
                              lambda pending: pending.wait(), grid.engine.background)}


def _seconds(session: Session, transfer: Transfer, computing: float = 0.0, times: int = TIMES) -> float:
    """Of a transfer, or of the wait for it after computing for that long: the median of some, on the slowest rank."""
    library, work = NumpyLibrary(), Workspace()
    a, b, c = (np.full((COMPUTE, COMPUTE), 0.5) for _ in range(3))
    seconds = []
    for _ in range(times):
        session.barrier()
        begun = time.perf_counter()
        under_way = transfer.start()
        if computing:
            until = time.perf_counter() + computing
            with transfer.driven():
                while time.perf_counter() < until:
                    library.gemm(a, b, c, 1, 0, work)
            begun = time.perf_counter()
        transfer.finish(under_way)
        seconds.append(time.perf_counter() - begun)
    return session.largest(median(seconds))


def judge_progress(finding: Finding, facts: list[Progress], hosts: list[str]) -> None:
    first = facts[0]
    hidden = {kind: max(0.0, 1 - first.left[kind] / first.alone[kind]) for kind in first.alone}
    still = [kind for kind in hidden if kind != "pmm3d" and hidden[kind] < MOVES_BY_ITSELF]
    if not first.helper:
        finding.warn("the helper thread cannot run at this thread level, so little moves while a rank computes",
                     "the check MPI says how to get MPI_THREAD_SERIALIZED or more")
    elif still:
        finding.note(f"MPI moves little of {' and '.join(still)} while a rank computes",
                     "nothing to do: pmm3d drives its collectives from a helper thread while the GEMM runs. In code of "
                     "your own, call Test between pieces of work")
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in hidden.items())
    finding.found = (f"time of a transfer ({in_bytes(first.nbytes)}, {1e3 * first.alone['Isend/Irecv']:.1f} ms) that "
                     f"computing hid: {shares}{' (with its helper thread)' * first.helper}")
    finding.figures = {"hidden_share": hidden, "transfer_seconds": first.alone, "wait_seconds": first.left,
                       "message_bytes": first.nbytes}


class ClockReading(NamedTuple):
    """Of this rank's clock: before two barriers, between them, and after them."""

    before: float
    between: float
    after: float


def gather_clocks(session: Session) -> list[ClockReading]:
    readings = []
    for _ in range(CLOCK_READINGS if len(session.first_ranks) > 1 else 0):
        before = time.time()
        session.barrier()
        between = time.time()
        session.barrier()
        readings.append(ClockReading(before, between, time.time()))
    return readings


def judge_clocks(finding: Finding, facts: list[list[ClockReading]], hosts: list[str]) -> None:
    """Every rank reads its clock after rank 0's `before` and before rank 0's `after`: the shortest such time tells the
    most."""
    placed = ranks_by(hosts)
    if len(placed) == 1:
        finding.found = "one host, one clock"
        return
    span, shortest = min((reading.after - reading.before, number) for number, reading in enumerate(facts[0]))
    middle, uncertain = facts[0][shortest].before + span / 2, span / 2
    ahead = {host: facts[ranks[0]][shortest].between - middle for host, ranks in placed.items() if host != hosts[0]}
    worst = max(ahead, key=lambda host: abs(ahead[host]))
    far = [host for host, seconds in ahead.items() if abs(seconds) - uncertain > CLOCK_SECONDS]
    if far:
        finding.warn(f"{len(far)} of {len(placed)} hosts' clocks are off by more than {CLOCK_SECONDS:g} s; {worst} by "
                     f"{ahead[worst]:+.1f} s from {hosts[0]}",
                     "have the site run chrony or ntpd on them: times in logs and of checkpoints mislead (the newest "
                     "checkpoint may not look it), make and rsync rebuild or skip")
    finding.found = (f"{len(placed)} hosts within {1e3 * abs(ahead[worst]):.2f} ms of rank 0's (known to "
                     f"{1e3 * uncertain:.2f} ms)")
    finding.figures = {"ahead_seconds": ahead}
