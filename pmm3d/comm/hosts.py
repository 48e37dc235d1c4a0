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
    answers = comm.allgather((socket.gethostname(), sum(1 << core for core in cores())))
    ranks: dict[str, list[int]] = {}
    usable: dict[str, int] = {}
    for rank, (name, mask) in enumerate(answers):
        ranks.setdefault(name, []).append(rank)
        usable[name] = usable.get(name, 0) | mask
    return [Host(name, tuple(own), min(usable[name].bit_count(), len(own) * max(1, threads)))
            for name, own in ranks.items()]


def mpi_name() -> str:
    """Library and version of the MPI in use."""
    return MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
