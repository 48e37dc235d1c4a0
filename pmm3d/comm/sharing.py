"""Which ranks of a host have the same device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import NumpyLibrary
from ..errors import Pmm3dError
from ..text import ranks_in_words
from .agreement import everywhere
from .communicator import WatchedComm
from .processes import Processes


class Shared(NamedTuple):
    """crowded: of the first host where ranks share a device and another is idle;   said: that devices are shared, where
    they have to be. Both in words, empty where it is not so."""

    crowded: str
    said: str


def shared_devices(rows: np.ndarray, processes: Processes) -> Shared:
    """rows: of each rank, a number that only its device has (0: none), and how many devices it sees.

        >>> from .processes import Process, row
        >>> two = Processes(np.concatenate([row(Process("n1", 1), False)] * 2), ["n1"])
        >>> shared_devices(np.array([[7, 1], [7, 1]]), two).said
        'ranks 0-1 share 1 device of host n1'
    """
    with_device = np.flatnonzero(rows[:, 0])
    nodes, said = processes.nodes()[with_device], []
    for node in np.unique(nodes):
        here = with_device[nodes == node]
        used, counts = np.unique(rows[here, 0], return_counts=True)
        if len(used) == len(here):
            continue
        host, seen = processes.host_of(int(here[0])), int(rows[here, 1].max())
        if len(used) < min(len(here), seen):
            together = here[rows[here, 0] == used[int(np.argmax(counts))]]
            return Shared(f"{ranks_in_words(together.tolist())} of host {host} have their arrays on one device, and "
                          f"{seen - len(used)} of the {seen} that they see has none's", "")
        devices = f"{len(used)} device{'s' * (len(used) > 1)}"
        said.append(f"{ranks_in_words(here.tolist())} share {devices} of host {host}")
    more = f", and so it is on {len(said) - 1} more hosts" if len(said) > 1 else ""
    return Shared("", said[0] + more if said else "")


def devices_of_ranks(comm: WatchedComm, processes: Processes, library: NumpyLibrary | None) -> list[dict[str, Any]]:
    """`Grid.devices`. Raises Pmm3dError, on every rank, where the device of one does not answer."""
    device, problem = None, ""
    try:
        device = None if library is None else library.current_device()
    except Exception as error:
        problem = f"rank {comm.rank}: the current device does not say what it is: {type(error).__name__}: {error}"
    found = comm.gather((device, problem))
    problem = comm.bcast(next(filter(None, (text for _, text in found)), "") if found is not None else "")
    if problem:
        raise everywhere(Pmm3dError(problem))
    ranks_of: dict[tuple[int, str], list[int]] = {}
    rows: list[dict[str, Any]] = []
    on_host: dict[int, int] = {}
    for rank, (device, _) in enumerate(found or ()):
        node = processes.node_of(rank)
        on_host[node] = on_host.get(node, -1) + 1
        row = {"host": processes.host_of(rank), "rank": rank, "local_rank": on_host[node], "device": None, "name": "",
               "pci": ""}
        if device is not None:
            row |= {"device": device.number, "name": device.name, "pci": device.pci}
            ranks_of.setdefault((node, device.pci), []).append(rank)
        rows.append(row)
    for ranks in ranks_of.values():
        for rank in ranks:
            rows[rank]["shared_with"] = [other for other in ranks if other != rank]
    return [{"shared_with": [], **row} for row in rows]
