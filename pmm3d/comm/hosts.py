"""The nodes of a communicator, and its MPI."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from mpi4py import MPI

from ..model.machine import cores


@dataclass(frozen=True)
class Host:
    """One node of the job: its name, the ranks on it, and how many cores they have between them."""

    name: str
    ranks: tuple[int, ...]
    cores: int


def hosts(comm: MPI.Intracomm, threads: int) -> list[Host]:
    """The nodes of a communicator (collective). Cores: those that the ranks are bound to, at most their threads."""
    answers = comm.allgather((socket.gethostname(), cores()))
    found = []
    for name in dict.fromkeys(name for name, _ in answers):
        ranks = tuple(rank for rank, (host, _) in enumerate(answers) if host == name)
        usable = frozenset[int]().union(*(answers[rank][1] for rank in ranks))
        found.append(Host(name, ranks, min(len(usable), len(ranks) * max(1, threads))))
    return found


def mpi_name() -> str:
    """Library and version of the MPI in use."""
    return MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
