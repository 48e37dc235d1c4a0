"""Ranks get the pinned memory for staged messages together, and let those of their host see it."""

from __future__ import annotations

import numpy as np

from ..arrays import NumpyLibrary
from ..errors import OutOfMemoryError
from .agreement import Terms, agree
from .pinned import Pinned
from .processes import Processes
from .transport import Collective, Link
from .words import in_bytes


def prepare(link: Link, library: NumpyLibrary, of_all: bool) -> Collective[None]:
    """Generator: the transport has its pinned memory; on a link of all ranks they also see that of the others on their
    host, if all of these can. Raises OutOfMemoryError, on every rank, where one of them has none."""
    transport, processes = link.transport, link.transport.processes or Processes.unknown(link.size)
    own, error = link.record.members[link.rank], None
    if transport.pinned is None:
        try:
            with transport.current():
                transport.pinned = Pinned(library, processes.beside(own))
            link.workspace.allocated += transport.pinned.nbytes
        except Exception as refused:
            error = OutOfMemoryError(f"no pinned host memory for the messages of device memory: {refused}. Fewer ranks "
                                     "a node, or what else has pinned memory there (ulimit -l, --mem)")
    yield from agree(link, "staged transport", "", Terms("", error=error))
    assert transport.pinned is not None
    transport.why += f"; in pieces through {in_bytes(transport.pinned.nbytes)} of pinned memory a rank"
    if of_all:
        yield from _share(link, transport.pinned, processes.neighbours(own))
        problem = transport.pinned.problem
        transport.why += f", not shared between processes ({problem})" if problem else ", which those of a host share"


def _share(link: Link, pinned: Pinned, near: dict[int, int]) -> Collective[None]:
    """Generator: ranks see the memory of the others on their host. near: rank -> pid of those that may."""
    rows = yield from agree(link, "staged transport", "", Terms(""), numbers=pinned.place())
    assert rows is not None
    others = [rank for rank in near if rank != link.rank]
    with link.transport.current():
        error = _see_all(pinned, {rank: near[rank] for rank in others}, rows)
    seen = yield from agree(link, "staged transport", "", Terms(""), numbers=[error is None])
    assert seen is not None
    pinned.hide()
    if error is None and seen[others].all():
        pinned.readers = frozenset(others)
    else:
        with link.transport.current():
            pinned.forget_peers()
        pinned.problem = pinned.problem or str(error or f"rank {others[int(np.argmin(seen[others]))]} could not")


def _see_all(pinned: Pinned, near: dict[int, int], rows: np.ndarray) -> Exception | None:
    """What is in the way, if anything is. rows: of each rank, the place of its memory."""
    try:
        for rank, pid in near.items():
            pinned.see(rank, pid, rows[rank].tolist())
    except Exception as error:
        return error
    return None
