"""What each rank did when, as files that chrome://tracing and ui.perfetto.dev show: one for each node."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mpi4py import MPI

from .ledger import Ledger
from .nodes import Processes


def node_events(comm: MPI.Intracomm, processes: Processes, ledger: Ledger) -> list[str] | None:
    """What the ranks of this node kept, each in JSON, on the first of them; None on the others. Collective over comm;
    the events themselves stay in the node."""
    node = comm.Split(processes.node_of(comm.rank), comm.rank)
    try:
        return node.gather(rank_events(ledger, processes.host_of(comm.rank)))
    finally:
        node.Free()


def rank_events(ledger: Ledger, host: str) -> str:
    """The events of one rank, separated by commas: a process with its name, a track per axis, one for computing, one
    for waits."""
    left_out = f", without its first {ledger.left_out:,} events" if ledger.left_out else ""
    name = {"name": "process_name", "ph": "M", "pid": ledger.rank,
            "args": {"name": f"rank {ledger.rank} ({host}){left_out}"}}
    return ",\n".join(map(json.dumps, [name, *ledger.events]))


def file_of(path: str | os.PathLike[str], processes: Processes, rank: int) -> Path:
    """Where the events of a rank go: the path itself for the node of rank 0, with the host's name before its ending for
    each other node.

        >>> import numpy as np; from pmm3d.comm.nodes import Process, row
        >>> two = Processes(np.concatenate([row(Process(host), False) for host in ("n1", "n2")]), ["n1", "n2"])
        >>> [file_of("trace.json", two, rank).name for rank in (0, 1)]
        ['trace.json', 'trace.n2.json']
    """
    whole = Path(path)
    if processes.node_of(rank) == 0:
        return whole
    host = re.sub(r"[^\w.-]", "_", processes.host_of(rank))
    return whole.with_name(f"{whole.stem}.{host}{whole.suffix}")


def write_chrome_trace(path: str | os.PathLike[str], ranks_events: Iterable[str]) -> None:
    """One file from what `rank_events` gave."""
    with open(path, "w") as file:
        file.write('{"traceEvents": [\n' + ",\n".join(ranks_events) + "\n]}\n")
