"""Choice of the transport mode of device memory, collectively and before the first message. Detection of shared
devices."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary
from ..arrays.streams import Device
from ..errors import GridError, OutOfMemoryError, Pmm3dError
from ..text import counted, ranks_in_words
from . import device_trial, staging
from .agreement import Terms, agree, digest, everywhere
from .communicator import WatchedComm
from .device_trial import Outcome
from .nccl import ID_BYTES, Nccl, binding_for, new_identity, peers_of
from .nodes import Processes
from .transport import Collective, Link

DIRECT = "direct"
TEXT_BYTES = 1024
"""Size in bytes of the text about a trial that the ranks exchange."""
logger = logging.getLogger("pmm3d.comm")


def choose_transport(link: Link, library: NumpyLibrary) -> Collective[str]:
    """Generator: choose the mode of the link's messages for arrays of this library. On a link of one rank there is no
    trial, because no message is sent. On a link of all ranks, check also which ranks share devices.

    Every rank raises
    - Pmm3dError if a device does not answer, or if "direct" was requested and the trial failed;
    - GridError if ranks share a device while another one is idle;
    - OutOfMemoryError if a rank has no pinned memory for "staged".
    """
    transport = link.transport
    asked, of_all = transport.asked, link.size == len(transport.processes or ())
    yield from _check_devices(link, library, of_all)
    if link.size == 1:
        if of_all:
            transport.why = f"{asked}: one rank sends nothing"
        return DIRECT
    mode, why = asked, "as asked for"
    if asked in ("auto", DIRECT):
        before = transport.outcomes.get(library.kind)
        outcome = transport.outcomes[library.kind] = yield from _tried(link, library, before)
        mode, why = (DIRECT if outcome.direct else "staged"), outcome.why
        if asked == DIRECT != mode:
            raise everywhere(
                Pmm3dError(
                    f"device_transport is direct, but {why}. Load an MPI with GPU support (Cray "
                    "MPICH: MPICH_GPU_SUPPORT_ENABLED=1), or leave it to PMM3D_TRANSPORT=auto, or "
                    "staged"
                )
            )
        news = before is None or before.direct != outcome.direct
        if news and not outcome.direct and link.record.members[link.rank] == 0:
            logger.warning(
                "%s: device memory goes through pinned host memory, which is slower. If this MPI should "
                "take device pointers, load its build with GPU support (Cray MPICH: "
                "MPICH_GPU_SUPPORT_ENABLED=1)",
                why,
            )
    transport.mode, transport.why = mode, f"{mode}: {why}"
    if mode == "staged":
        yield from _pinned_buffers(link, library)
    if of_all:
        transport.chosen_modes[library.kind] = mode
    return mode


def _pinned_buffers(link: Link, library: NumpyLibrary) -> Collective[None]:
    """Generator: allocate pinned buffers for one exchange of each size. If this fails on one rank, every rank raises
    OutOfMemoryError."""
    sizes = [4 * staging.PIECE_BYTES >> step for step in range(9)]  # a buffer serves requests of half its size
    with link.transport.current():
        refused = _caught(lambda: link.workspace.rehearse(sizes, library.pinned()))
    error = refused and OutOfMemoryError(
        "no pinned host memory for the messages of device memory: "
        f"{refused}. Use fewer ranks per node, or raise the limit of locked memory "
        "(ulimit -l)"
    )
    yield from agree(link, "staged transport", "", Terms("", error=error))


def nccl_of(link: Link, library: NumpyLibrary) -> Collective[Nccl | None]:
    """Generator: create NCCL's communicator for the ranks of the link. Returns None for one rank.

    Every rank raises Pmm3dError if NCCL does not work on one of them, or if two of them share a device.
    """
    if link.size == 1:
        return None
    binding, identity, error = None, b"", None
    try:
        binding = binding_for(library)
        with link.transport.current():
            identity = new_identity(binding) if link.rank == 0 else b""
    except Exception as problem:
        error = problem
    members = link.record.members
    rows = yield from agree(
        link, "device_transport nccl", "", Terms("", error=error), numbers=[_digest(link.transport.device)]
    )
    if rows is not None and len(np.unique(rows)) < link.size:
        raise everywhere(
            Pmm3dError(
                f"device_transport nccl: ranks {members[0]} to {members[-1]} have several to a "
                "device, which NCCL does not take. One rank a device, or PMM3D_TRANSPORT=auto"
            )
        )
    shared = np.frombuffer(identity.ljust(ID_BYTES, b"\0"), np.uint8).copy()
    yield [link.comm.Ibcast([shared, MPI.BYTE], 0)]
    made: list[Nccl] = []
    with link.transport.current():  # NCCL's communicator belongs to the current device
        error = _caught(lambda: made.append(Nccl(binding, link.size, shared.tobytes(), link.rank)))
    yield from agree(link, "device_transport nccl", "", Terms("", error=error))
    stream = link.transport.communication_stream(library).own
    error = _caught(lambda: made[0].connect(library, stream, peers_of(link.rank, link.size, link.node_map.per_node)))
    yield from agree(link, "device_transport nccl", "", Terms("", error=error))
    return made[0]


def _tried(link: Link, library: NumpyLibrary, known: Outcome | None) -> Collective[Outcome]:
    """Generator: return the outcome of the trial on the first rank where it failed, or else on rank 0.

    The first rank of each host runs the trial in a child process, unless `known` has its outcome. A trial takes at most
    half of the time limit, because after the limit the watchdog would log a note about the other ranks.
    """
    members, processes, timeout = link.record.members, link.transport.processes, link.transport.timeout
    own = members[link.rank]
    if known is None and (processes is None or processes.first_near(own, members) == own):
        most = device_trial.TRIAL_SECONDS
        known = device_trial.try_device(library, min(most, timeout / 2) if timeout else most)
    outcome = known or Outcome(True, "")
    mine, least = np.array([outcome.direct * link.size + link.rank], np.int64), np.empty(1, np.int64)
    yield [link.comm.Iallreduce(mine, least, MPI.MIN)]
    direct, rank = divmod(int(least[0]), link.size)
    why = outcome.why.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0") if rank == link.rank else bytes(TEXT_BYTES)
    text = np.frombuffer(why, np.uint8).copy()
    yield [link.comm.Ibcast([text, MPI.BYTE], rank)]
    return Outcome(bool(direct), text.tobytes().rstrip(b"\0").decode(errors="replace"))


def _check_devices(link: Link, library: NumpyLibrary, of_all: bool) -> Collective[None]:
    """Generator: check the device of each rank. Every rank raises if a device does not answer. On a link of all ranks,
    raise GridError if ranks share a device while another one is idle; log once if they share devices otherwise."""
    transport = link.transport
    error = _caught(lambda: transport.first_arrays(library))
    device = transport.device
    rows = yield from agree(
        link,
        "the current device of each rank",
        "",
        Terms("", error=error),
        numbers=[_digest(device), 0 if device is None else device.visible],
    )
    if rows is None or transport.processes is None or not of_all:
        return
    shared = shared_devices(rows, transport.processes)
    if shared.crowded:
        raise everywhere(
            GridError(
                f"{shared.crowded}. Each rank takes its own before arrays are made: "
                "pmm3d.arrays.take_device(library, grid.local_rank); a device that is to stay idle "
                "is hidden by CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)"
            )
        )
    if shared.warning and link.rank == 0:
        logger.warning(shared.warning)


def _digest(device: Device | None) -> int:
    """Return a number that identifies a device in the job; 0 for no device or an unknown PCI address."""
    if device is None or not device.pci:
        return 0
    return 1 + digest(f"{MPI.Get_processor_name()} {device.pci}")


def _caught(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


class Shared(NamedTuple):
    """Messages about shared devices; each is empty if there is nothing to report.

    crowded   error text about the first host on which ranks share a device while another device is idle
    warning   text about ranks that share devices because a host has fewer devices than ranks
    """

    crowded: str
    warning: str


def shared_devices(rows: np.ndarray, processes: Processes) -> Shared:
    """Return which ranks share devices.

    rows   for each rank: identifier of its device in the job (0: none), and number of devices visible to the rank

        >>> from .nodes import Process, row
        >>> two = Processes(np.concatenate([row(Process("n1", 1), False)] * 2), ["n1"])
        >>> shared_devices(np.array([[7, 1], [7, 1]]), two).warning
        'ranks 0-1 share 1 device of host n1'
    """
    with_device = np.flatnonzero(rows[:, 0])
    nodes, hosts = processes.nodes()[with_device], []
    for node in np.unique(nodes):
        here = with_device[nodes == node]
        used, counts = np.unique(rows[here, 0], return_counts=True)
        if len(used) == len(here):
            continue
        host, seen = processes.host_of(int(here[0])), int(rows[here, 1].max())
        if len(used) < min(len(here), seen):
            together = here[rows[here, 0] == used[int(np.argmax(counts))]]
            return Shared(
                f"{ranks_in_words(together.tolist())} of host {host} have their arrays on one device, and "
                f"{seen - len(used)} of the {seen} that they see has none's",
                "",
            )
        devices = counted(len(used), "device")
        hosts.append(f"{ranks_in_words(here.tolist())} share {devices} of host {host}")
    more = f", and so it is on {len(hosts) - 1} more hosts" if len(hosts) > 1 else ""
    return Shared("", hosts[0] + more if hosts else "")


def devices_of_ranks(comm: WatchedComm, processes: Processes, library: NumpyLibrary | None) -> list[dict[str, Any]]:
    """Return the result of `Grid.devices`. Every rank raises Pmm3dError if the device of one does not answer."""
    device, problem = None, ""
    try:
        device = None if library is None else library.current_device()
    except Exception as error:
        problem = f"rank {comm.rank}: the current device does not answer: {type(error).__name__}: {error}"
    gathered = comm.gather((device, problem))
    problem = comm.bcast(next(filter(None, (text for _, text in gathered)), "") if gathered is not None else "")
    if problem:
        raise everywhere(Pmm3dError(problem))
    ranks_of, rows = defaultdict[tuple[int, str], list[int]](list), list[dict[str, Any]]()
    for rank, (device, _) in enumerate(gathered or ()):
        if device is not None:
            ranks_of[processes.node_of(rank), device.pci].append(rank)
    for rank, (device, _) in enumerate(gathered or ()):
        number, name, pci = (None, "", "") if device is None else (device.number, device.name, device.pci)
        others = [other for other in ranks_of.get((processes.node_of(rank), pci), []) if other != rank]
        place = {"host": processes.host_of(rank), "rank": rank, "local_rank": processes.local_rank(rank)}
        rows.append(place | {"device": number, "name": name, "pci": pci, "shared_with": others if device else []})
    return rows
