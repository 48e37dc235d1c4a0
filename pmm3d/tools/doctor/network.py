"""Latency and bandwidth of each axis, what moves while a rank computes, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
from mpi4py import MPI

from ...arrays import NumpyLibrary, Workspace
from ...comm import Grid
from ...comm.words import in_bytes, ranks_in_words
from ...model.machine import cores
from .finding import Finding, Problems, by_host, spread
from .nodes import has_rdma
from .session import PATIENCE, Session

TAG = 1
LARGE = 2**23
SMALL_REPEATS, LARGE_REPEATS = 200, 10
SECONDS = 0.25
"""Of one size between the pairs of an axis."""
UNEVEN = 3.0
"""How many times slower than the fastest pair a pair of the same axis may be."""
SLOWER_INNER = 2.0
TCP_SECONDS = 12e-6
SLOW_MEMORY = 1e9

WIRE = 2**23
WIRE_PROBE = 2**20
SLOW_PROBE_SECONDS = 0.02
COMPUTE = 256
LEAST_COMPUTE = 5e-3
TIMES = 3
MOVES_BY_ITSELF = 0.5

CLOCK_TRIPS = 12
CLOCK_SECONDS = 1.0


@dataclass(frozen=True)
class Pair:
    """Two neighbours along an axis, measured while all other pairs were too. seconds: half the round trip of a byte."""

    axis: str
    ranks: tuple[int, int]
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Axes:
    """shape: of the grid; pairs: those that this rank began; rdma: whether the node has an RDMA network; allowed: the
    cores of this rank."""

    shape: tuple[int, ...]
    pairs: tuple[Pair, ...]
    rdma: bool
    allowed: frozenset[int]


def gather_axes(session: Session) -> Axes | None:
    if session.size == 1:
        return None
    grid = Grid(session.comm, session.grid, timeout=PATIENCE)
    try:
        pairs = [pair for name in "xyz" if getattr(grid.shape, name) > 1
                 for pair in _measured_axis(session, grid.axis(name))]
        return Axes(tuple(grid.shape[:3]), tuple(pairs), has_rdma(), cores())
    finally:
        grid.close()


def _measured_axis(session: Session, axis) -> list[Pair]:
    """Each rank with the next, then with the one before, so that every link is tried."""
    found = []
    for odd in (0, 1):
        session.barrier()
        low = axis.index - (axis.index + odd) % 2
        if 0 <= low < axis.size - 1:
            ranks = (axis.ranks[low], axis.ranks[low + 1])
            small = ping_pong(session, ranks, 1, SMALL_REPEATS)
            large = ping_pong(session, ranks, LARGE, LARGE_REPEATS)
            if small:
                found.append(Pair(axis.name, ranks, median(small), LARGE / median(large)))
    return found


def ping_pong(session: Session, ranks: tuple[int, int], nbytes: int, repeats: int) -> list[float]:
    """Half round trips between two ranks; the first rank measures and decides when it is enough."""
    outgoing, incoming = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    first = session.rank == ranks[0]
    other = ranks[1] if first else ranks[0]
    begun, times = time.perf_counter(), []
    enough = False
    while not enough:
        receiving = session.comm.Irecv([incoming, MPI.BYTE], other, TAG)
        sent = time.perf_counter()
        if first:
            enough = len(times) >= repeats or (len(times) >= 2 and sent - begun > SECONDS)
            outgoing[0] = enough
        else:
            session.wait(receiving)
            enough = bool(incoming[0])
        session.wait(session.comm.Isend([outgoing, MPI.BYTE], other, TAG))
        if first:
            session.wait(receiving)
            times.append((time.perf_counter() - sent) / 2)
    return times[1:] if first else []


def judge_axes(facts: list[Axes | None], hosts: list[str]) -> Finding:
    if len(hosts) == 1:
        return Finding("axes", "one rank: no axis to measure")
    problems = Problems()
    first = facts[0]
    pairs = [pair for fact in facts for pair in fact.pairs]
    figures, words = {}, []
    for name in dict.fromkeys(pair.axis for pair in pairs):
        along = [pair for pair in pairs if pair.axis == name]
        crossing = sum(_crosses(pair, hosts) for pair in along)
        latency, bandwidth = [pair.seconds for pair in along], [pair.bytes_per_second for pair in along]
        kind = "within hosts" if not crossing else "between hosts" if crossing == len(along) else "both"
        words.append(f"{name} ({kind}) {spread([1e6 * value for value in latency])} us, "
                     f"{spread([value / 1e9 for value in bandwidth], '{:.2f}')} GB/s")
        figures[name] = {"pairs": len(along), "crossing_hosts": crossing, "latency_seconds": median(latency),
                         "latency_seconds_max": max(latency), "bytes_per_second": median(bandwidth),
                         "bytes_per_second_min": min(bandwidth)}
    if not _crowded(facts, hosts):
        _judge_speed(problems, pairs, hosts, any(fact.rdma for fact in facts))
        _judge_order(problems, figures)
    _judge_crossing(problems, figures)
    grid = "x".join(map(str, first.shape))
    return Finding("axes", f"grid {grid}, all pairs of an axis at once, {in_bytes(LARGE)}: {'; '.join(words)}",
                   tuple(problems), {"grid": first.shape, "message_bytes": LARGE, "axes": figures})


def _crosses(pair: Pair, hosts: list[str]) -> bool:
    return hosts[pair.ranks[0]] != hosts[pair.ranks[1]]


def _crowded(facts: list[Axes], hosts: list[str]) -> bool:
    """Whether ranks take turns on the cores of some host, so that times are not those of the network."""
    return any(len(frozenset().union(*(facts[rank].allowed for rank in ranks))) < len(ranks)
               for ranks in by_host(hosts).values())


def _judge_speed(problems: Problems, pairs: list[Pair], hosts: list[str], rdma: bool) -> None:
    for inside, where in ((True, "within a host"), (False, "between hosts")):
        alike = [pair for pair in pairs if _crosses(pair, hosts) != inside]
        if not alike:
            continue
        best = max(pair.bytes_per_second for pair in alike)
        slow = [pair for pair in alike if pair.bytes_per_second * UNEVEN < best]
        if slow:
            worst = min(slow, key=lambda pair: pair.bytes_per_second)
            names = " and ".join(dict.fromkeys(hosts[rank] for rank in worst.ranks))
            problems.warn(f"{len(slow)} of {len(alike)} pairs {where} are more than {UNEVEN:g} times slower than the "
                          f"best; the slowest, {ranks_in_words(worst.ranks)} on {names}, moves "
                          f"{worst.bytes_per_second / 1e9:.2f} GB/s, the best {best / 1e9:.2f}",
                          "try without that node (srun --exclude), or with all nodes under one switch (srun "
                          "--switches=1); within a host: bind ranks to cores (srun --cpu-bind=cores)")
    inner = [pair for pair in pairs if not _crosses(pair, hosts)]
    if inner and median(pair.bytes_per_second for pair in inner) < SLOW_MEMORY:
        problems.warn("messages within a host are slower than memory by far: MPI may not use shared memory",
                      "Open MPI: unset OMPI_MCA_btl and OMPI_MCA_pml, or OMPI_MCA_btl=self,sm,...; MPICH: unset "
                      "MPIR_CVAR_NOLOCAL; in containers: one container a node, or a shared /dev/shm (--ipc=host)")
    outer = [pair for pair in pairs if _crosses(pair, hosts)]
    if rdma and outer and median(pair.seconds for pair in outer) > TCP_SECONDS:
        problems.warn(f"between hosts a byte takes {1e6 * median(pair.seconds for pair in outer):.0f} us, as over TCP, "
                      "though the nodes have an RDMA network",
                      "use the site's MPI rather than a wheel (make MPI=site); Open MPI: OMPI_MCA_pml=ucx; MPICH: "
                      "FI_PROVIDER=verbs; see ucx_info -d")


def _judge_order(problems: Problems, figures: dict) -> None:
    rates = {name: told["bytes_per_second"] for name, told in figures.items()}
    if {"x", "z"} <= rates.keys() and rates["x"] * SLOWER_INNER < rates["z"]:
        problems.warn("the x axis is slower than the z axis, though its ranks are neighbours",
                      "place ranks in blocks: srun --distribution=block:block, mpiexec --map-by core")


def _judge_crossing(problems: Problems, figures: dict) -> None:
    """An inner axis between hosts while an outer one stays within."""
    names = list(figures)
    for inner, outer in zip(names, names[1:]):
        if figures[inner]["crossing_hosts"] and not figures[outer]["crossing_hosts"]:
            problems.warn(f"the {inner} axis crosses hosts and the {outer} axis does not",
                          "ranks run fastest along x: srun --distribution=block, mpiexec --map-by core")


@dataclass(frozen=True)
class Progress:
    """Seconds of a transfer alone, and of the wait for it after computing for twice as long. By kind."""

    alone: dict[str, float]
    left: dict[str, float]
    nbytes: int
    helper: bool


def gather_progress(session: Session) -> Progress | None:
    if session.size == 1:
        return None
    grid = Grid(session.comm, (session.size, 1, 1), timeout=PATIENCE)
    try:
        probe = session_max(session, _timed(session, *_ring(session, WIRE_PROBE), 0.0))
        nbytes = WIRE if probe < SLOW_PROBE_SECONDS else WIRE_PROBE
        alone, left = {}, {}
        for kind, make in (("Isend/Irecv", _ring), ("Iallgather", _native), ("pmm3d", None)):
            post, finish = make(session, nbytes) if make else _own(grid, nbytes)
            times = [_timed(session, post, finish, 0.0) for _ in range(TIMES)]
            alone[kind] = session_max(session, median(times))
            work = max(2 * alone[kind], LEAST_COMPUTE)
            around = grid.engine.background if make is None else None
            left[kind] = session_max(session, median(_timed(session, post, finish, work, around) for _ in range(TIMES)))
        return Progress(alone, left, nbytes, MPI.Query_thread() >= MPI.THREAD_SERIALIZED)
    finally:
        grid.close()


def session_max(session: Session, value: float) -> float:
    mine, largest = np.array([value]), np.empty(1)
    session.wait(session.comm.Iallreduce(mine, largest, MPI.MAX))
    return float(largest[0])


def _timed(session: Session, post: Callable, finish: Callable, work: float, around=None) -> float:
    """Seconds that finish() takes after post() and computing for that long; from post on if nothing is computed."""
    session.barrier()
    begun = time.perf_counter()
    posted = post()
    if work:
        if around is None:
            _compute(work)
        else:
            with around():
                _compute(work)
        begun = time.perf_counter()
    finish(posted)
    return time.perf_counter() - begun


def _compute(seconds: float) -> None:
    library, work = NumpyLibrary(), Workspace()
    a, b, c = (np.full((COMPUTE, COMPUTE), 0.5) for _ in range(3))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        library.gemm(a, b, c, 1, 0, work)


def _ring(session: Session, nbytes: int):
    outgoing, incoming = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    following, before = (session.rank + 1) % session.size, (session.rank - 1) % session.size

    def post():
        return (session.comm.Irecv([incoming, MPI.BYTE], before, TAG),
                session.comm.Isend([outgoing, MPI.BYTE], following, TAG))

    return post, lambda requests: [session.wait(request) for request in requests]


def _part(nbytes: int, ranks: int) -> int:
    return max(2**16, nbytes // ranks)


def _native(session: Session, nbytes: int):
    part = _part(nbytes, session.size)
    mine, whole = np.ones(part, np.uint8), np.ones(part * session.size, np.uint8)
    return lambda: session.comm.Iallgather([mine, MPI.BYTE], [whole, MPI.BYTE]), session.wait


def _own(grid: Grid, nbytes: int):
    part = _part(nbytes, grid.size)
    mine, whole = np.ones(part, np.uint8), np.ones(part * grid.size, np.uint8)
    counts = [part] * grid.size
    return (lambda: grid.everyone.all_gather(mine, out=whole, counts=counts)), lambda pending: pending.wait()


def judge_progress(facts: list[Progress | None], hosts: list[str]) -> Finding:
    if len(hosts) == 1:
        return Finding("progress", "one rank: nothing to overlap")
    problems = Problems()
    first = facts[0]
    hidden = {kind: max(0.0, 1 - first.left[kind] / first.alone[kind]) for kind in first.alone}
    alone = [kind for kind in hidden if kind != "pmm3d" and hidden[kind] < MOVES_BY_ITSELF]
    if not first.helper:
        problems.warn("the helper thread cannot run at this thread level, so little moves while a rank computes",
                      "the check MPI says how to get MPI_THREAD_SERIALIZED or more")
    elif alone:
        problems.note(f"MPI moves little of {' and '.join(alone)} while a rank computes",
                      "nothing to do: pmm3d drives its collectives from a helper thread while the GEMM runs. In code "
                      "of your own, call Test between pieces of work")
    said = ", ".join(f"{kind} {share:.0%}" for kind, share in hidden.items())
    wire = 1e3 * first.alone["Isend/Irecv"]
    return Finding("progress", f"time of a transfer ({in_bytes(first.nbytes)}, {wire:.1f} ms) that computing hid: "
                               f"{said}{' (with its helper thread)' * first.helper}", tuple(problems),
                   {"hidden_share": hidden, "transfer_seconds": first.alone, "wait_seconds": first.left,
                    "message_bytes": first.nbytes})


@dataclass(frozen=True)
class Clocks:
    """By host, on rank 0: seconds by which its clock is ahead, and how far that may be wrong."""

    ahead: dict[str, tuple[float, float]]


def gather_clocks(session: Session) -> Clocks:
    ahead = {}
    others = session.first_ranks[1:]
    for rank in others if session.rank == 0 else ():
        ahead[session.hosts[rank]] = _ask_clock(session, rank)
    if session.rank in others:
        _tell_clock(session, PATIENCE + 0.01 * len(others))
    return Clocks(ahead)


def _ask_clock(session: Session, rank: int) -> tuple[float, float]:
    """(seconds ahead, uncertainty) of that rank's clock, from the shortest of several round trips."""
    theirs, trips = np.zeros(1), []
    for _ in range(CLOCK_TRIPS):
        answer = session.comm.Irecv(theirs, rank, TAG)
        sent = time.time()
        session.wait(session.comm.Isend(theirs[:0], rank, TAG))
        session.wait(answer)
        heard = time.time()
        trips.append(((heard - sent) / 2, float(theirs[0]) - (sent + heard) / 2))
    uncertain, ahead = min(trips)
    return ahead, uncertain


def _tell_clock(session: Session, seconds: float) -> None:
    nothing = np.zeros(0)
    for _ in range(CLOCK_TRIPS):
        session.wait(session.comm.Irecv(nothing, 0, TAG), seconds)
        session.wait(session.comm.Isend(np.array([time.time()]), 0, TAG))


def judge_clocks(facts: list[Clocks], hosts: list[str]) -> Finding:
    ahead = facts[0].ahead
    if not ahead:
        return Finding("clocks", "one host, one clock")
    problems = Problems()
    far = {host: offset for host, (offset, uncertain) in ahead.items() if abs(offset) - uncertain > CLOCK_SECONDS}
    if far:
        worst = max(far, key=lambda host: abs(far[host]))
        problems.warn(f"{len(far)} of {len(ahead) + 1} hosts' clocks are off by more than {CLOCK_SECONDS:g} s; "
                      f"{worst} by {far[worst]:+.1f} s from {hosts[0]}",
                      "have the site run chrony or ntpd on them: times in logs and of checkpoints mislead (the newest "
                      "checkpoint may not look it), make and rsync rebuild or skip")
    worst = max(ahead.values(), key=lambda told: abs(told[0]))
    return Finding("clocks", f"{len(ahead) + 1} hosts within {1e3 * abs(worst[0]):.2f} ms of rank 0's "
                             f"(known to {1e3 * worst[1]:.2f} ms)", tuple(problems),
                   {"ahead_seconds": {host: offset for host, (offset, _) in ahead.items()}})
