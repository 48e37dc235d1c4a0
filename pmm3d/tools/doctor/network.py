"""Latency and bandwidth of each axis of the grid."""

from __future__ import annotations

import time
from contextlib import closing
from statistics import median
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ...comm import Axis, Grid
from ...text import in_bytes, ranks_in_words
from .finding import Finding, spread
from .nodes import Node, crowded_hosts, gather_node
from .session import MESSAGE, PATIENCE, Session

LARGE = 2**23
"""Bytes of the message that measures bandwidth, as in a large product."""
SMALL_REPEATS, LARGE_REPEATS = 200, 10
SECONDS = 0.25
"""Time limit of one message size on the pairs of an axis."""
UNEVEN = 3.0
"""A pair is reported if the fastest pair of its kind is more than this factor faster."""
TCP_SECONDS, SLOW_MEMORY = 12e-6, 1e9
"""A latency above that of any RDMA network, and a bandwidth below that of any memory."""


class Pair(NamedTuple):
    """Two neighbours along an axis, measured together with other pairs. seconds: half the round trip of a byte."""

    axis: str
    ranks: tuple[int, int]
    seconds: float
    bytes_per_second: float


class Axes(NamedTuple):
    shape: tuple[int, ...]
    pairs: list[Pair]
    node: Node


def gather_axes(session: Session) -> Axes:
    with closing(Grid(session.comm, session.grid, timeout=PATIENCE)) as grid:
        axes = [grid.axis(name) for name in "xyz" if getattr(grid.shape, name) > 1]
        pairs = [pair for axis in axes for odd in (0, 1) for pair in _measured(session, axis, odd)]
        return Axes(grid.shape[:3], pairs, gather_node(session))


def _measured(session: Session, axis: Axis, odd: int) -> list[Pair]:
    """Measure pairs (0, 1), (2, 3), ... of an axis, or (1, 2), (3, 4), ... if odd is 1."""
    session.barrier()
    low = axis.index - (axis.index + odd) % 2
    if not 0 <= low < axis.size - 1:
        return []
    ranks = (axis.ranks[low], axis.ranks[low + 1])
    small = ping_pong(session, ranks, 1, SMALL_REPEATS)
    large = ping_pong(session, ranks, LARGE, LARGE_REPEATS)
    return [Pair(axis.name, ranks, median(small), LARGE / median(large))] if small else []


def ping_pong(session: Session, ranks: tuple[int, int], nbytes: int, repeats: int) -> list[float]:
    """Return the seconds of half round trips between two ranks, on the first of them, which decides when to stop."""
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
        words.append(
            f"{name} ({kind}) {spread([1e6 * value for value in latency])} us, "
            f"{spread([value / 1e9 for value in bandwidth], '{:.2f}')} GB/s"
        )
        axes[name] = {
            "pairs": len(along),
            "crossing_hosts": crossing,
            "latency_seconds": median(latency),
            "latency_seconds_max": max(latency),
            "bytes_per_second": median(bandwidth),
            "bytes_per_second_min": min(bandwidth),
        }
    grid = "x".join(map(str, facts[0].shape))
    finding.found = (
        f"grid {grid}, all pairs of an axis at once, {in_bytes(LARGE)}: {'; '.join(words)}"
        if pairs
        else f"grid {grid}: no axis with several ranks to measure"
    )
    finding.figures = {"grid": facts[0].shape, "message_bytes": LARGE, "axes": axes}
    if not crowded_hosts([fact.node.cores for fact in facts], hosts):
        _judge_speed(finding, pairs, hosts, any(fact.node.rdma for fact in facts))


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
            finding.warn(
                f"{len(slow)} of {len(alike)} pairs {where} are more than {UNEVEN:g} times slower than the "
                f"best; the slowest, {ranks_in_words(worst)} on {names}, moves {min(rates) / 1e9:.2f} GB/s, "
                f"the best {max(rates) / 1e9:.2f}",
                "try without that node (srun --exclude), or with all nodes under one switch (srun "
                "--switches=1); within a host: bind ranks to cores (srun --cpu-bind=cores)",
            )
    if inside and median(pair.bytes_per_second for pair in inside) < SLOW_MEMORY:
        finding.warn(
            "messages within a host are much slower than memory: MPI may not use shared memory",
            "Open MPI: unset OMPI_MCA_btl and OMPI_MCA_pml, or OMPI_MCA_btl=self,sm,...; MPICH: unset "
            "MPIR_CVAR_NOLOCAL; in containers: one container a node, or a shared /dev/shm (--ipc=host)",
        )
    latency = median(pair.seconds for pair in between) if between else 0.0
    if rdma and latency > TCP_SECONDS:
        finding.warn(
            f"between hosts a byte takes {1e6 * latency:.0f} us, as over TCP, though the nodes have an RDMA network",
            "use the site's MPI rather than a wheel (make MPI=site); Open MPI: OMPI_MCA_pml=ucx; MPICH: "
            "FI_PROVIDER=verbs; see ucx_info -d",
        )
