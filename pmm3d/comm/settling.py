"""How device memory is to travel, found out by the ranks together before the first of it does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary
from ..arrays.devices import Device, device_of
from ..errors import GridError, Pmm3dError
from . import device_trial
from .agreement import Terms, agree
from .nccl import ID_BYTES, Nccl, binding_for, new_identity, peers_of
from .pinning import prepare
from .sharing import shared_devices
from .transport import Collective, Link

TEXT_BYTES = 1024
"""Of what one rank tells the others about a trial."""
logger = logging.getLogger("pmm3d.comm")


def settle(link: Link, library: NumpyLibrary) -> Collective[None]:
    """Generator: the mode of the link's transport, and why. On a link of all ranks also whether they share devices.

    Raises, on every rank: Pmm3dError where "direct" was asked for and MPI takes no device pointers; GridError where
    ranks crowd on a device beside idle ones.
    """
    transport = link.transport
    transport.library, transport.device = library, _device(library)
    of_all = link.size == len(transport.processes or ())
    if of_all:
        yield from _check_devices(link, transport.device)
    asked = transport.asked
    if asked in ("auto", "direct"):
        direct, why = yield from _tried(link, library)
        if asked == "direct" and direct is False:
            raise _everywhere(Pmm3dError(f"device_transport is direct, but {why}. Load an MPI with GPU support (Cray "
                                         "MPICH: MPICH_GPU_SUPPORT_ENABLED=1), or leave it to PMM3D_TRANSPORT=auto, or "
                                         "staged"))
        mode = "direct" if direct or asked == "direct" else "staged"
        news, transport.mode = mode != transport.mode or transport.outcome is None, mode
        transport.outcome = device_trial.Outcome(direct, why)
        transport.why = f"{transport.mode}: {why}"
        if news and not direct and link.record.members[link.rank] == 0:
            then = "as asked for, it gets them" if asked == "direct" else (
                "device memory goes through pinned host memory")
            logger.warning("%s: %s", why, then)
    else:
        transport.why = f"{asked}: as asked for"
    if transport.mode == "staged" and link.size > 1:
        yield from prepare(link, library, of_all)
    transport.settled = of_all


def nccl_of(link: Link, library: NumpyLibrary) -> Collective[Nccl | None]:
    """Generator: NCCL's communicator for the ranks of the link; none for one rank.

    Raises Pmm3dError, on every rank, where one of them has no NCCL, or two of them have one device.
    """
    if link.size == 1:
        return None
    binding, identity, error = None, b"", None
    try:
        binding = binding_for(library)
        identity = new_identity(binding) if link.rank == 0 else b""
    except Exception as problem:
        error = problem
    device, members = _device(library), link.record.members
    rows = yield from agree(link, "device_transport nccl", "", Terms("", error=error), numbers=[_digest(device)])
    if rows is not None and len(np.unique(rows)) < link.size:
        raise _everywhere(Pmm3dError(f"device_transport nccl: ranks {members[0]} to {members[-1]} have several to a "
                                     "device, which NCCL does not take. One rank a device, or PMM3D_TRANSPORT=auto"))
    shared = np.frombuffer(identity.ljust(ID_BYTES, b"\0"), np.uint8).copy()
    yield [link.comm.Ibcast([shared, MPI.BYTE], 0)]
    made: list[Nccl] = []
    error = _caught(lambda: made.append(Nccl(binding, link.size, shared.tobytes(), link.rank)))
    yield from agree(link, "device_transport nccl", "", Terms("", error=error))
    stream = link.transport.communication_stream(library).own
    error = _caught(lambda: made[0].connect(library, stream, peers_of(link.rank, link.size)))
    yield from agree(link, "device_transport nccl", "", Terms("", error=error))
    return made[0]


def _tried(link: Link, library: NumpyLibrary) -> Collective[tuple[bool | None, str]]:
    """Generator: (whether device pointers reach the other ranks, None if that is not known; why), on every rank: the
    first of each host tries in a child process unless it knows, and then all exchange with their neighbours."""
    members, processes, outcome = link.record.members, link.transport.processes, link.transport.outcome
    own = members[link.rank]
    if outcome is None and (processes is None or processes.first_near(own, members) == own):
        outcome = device_trial.trial(library)
    direct, why = yield from _worst(link, outcome or device_trial.Outcome(True, ""))
    if direct and link.size > 1:
        here = yield from _neighbours(link, library)
        among, where = yield from _worst(link, device_trial.Outcome(not here, here))
        return (direct, why) if among else (False, where)
    return direct, why


def _worst(link: Link, outcome: device_trial.Outcome) -> Collective[tuple[bool | None, str]]:
    """Generator: the outcome of the first rank whose is no, else of the first that does not know, else of rank 0."""
    grade = {False: 0, None: 1, True: 2}
    mine, least = np.array([grade[outcome.direct] * link.size + link.rank], np.int64), np.empty(1, np.int64)
    yield [link.comm.Iallreduce(mine, least, MPI.MIN)]
    found, rank = divmod(int(least[0]), link.size)
    said = outcome.why.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0") if rank == link.rank else bytes(TEXT_BYTES)
    text = np.frombuffer(said, np.uint8).copy()
    yield [link.comm.Ibcast([text, MPI.BYTE], rank)]
    direct = next(known for known, number in grade.items() if number == found)
    return direct, text.tobytes().rstrip(b"\0").decode(errors="replace")


def _neighbours(link: Link, library: NumpyLibrary) -> Collective[str]:
    """Generator: what went wrong between this rank and those before and after it, in words; empty if nothing did."""
    after, before, wrong = (link.rank + 1) % link.size, (link.rank - 1) % link.size, ""
    members, made = link.record.members, list[Any]()
    error = _caught(lambda: made.extend(device_trial.messages(library)))
    yield from agree(link, "trial of device memory", "", Terms("", error=error))
    for values, source, target in made:
        requests, host = [], np.zeros_like(values)
        for call, peer, array in ((link.comm.Irecv, before, target), (link.comm.Isend, after, source)):
            try:
                requests.append(call(device_trial.region(library, array), peer, link.tag))
            except MPI.Exception:  # the other rank waits for a message
                requests.append(call([host, MPI.BYTE], peer, link.tag))
        yield requests
        if not wrong and not np.array_equal(library.to_numpy(target), values):
            wrong = (f"device memory did not come right by MPI from rank {members[before]} to {members[link.rank]} "
                     f"({values.nbytes:,} bytes)")
    return wrong


def _check_devices(link: Link, device: Device | None) -> Collective[None]:
    """Generator: raises GridError on every rank where ranks crowd on a device beside one that nobody has; that they
    share devices otherwise is said once."""
    rows = yield from agree(link, "devices", "", Terms(""),
                            numbers=[_digest(device), 0 if device is None else device.visible])
    if rows is None or link.transport.processes is None:
        return
    shared = shared_devices(rows, link.transport.processes)
    if shared.crowded:
        raise _everywhere(GridError(f"{shared.crowded}. Each rank takes its own before arrays are made: "
                                    "pmm3d.arrays.take_device(library, grid.local_rank); a device that is to stay idle "
                                    "is hidden by CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)"))
    if shared.said and link.rank == 0:
        logger.warning(shared.said)


def _device(library: NumpyLibrary) -> Device | None:
    """None also where the device does not answer: what is asked of it first fails then, and says more."""
    try:
        return device_of(library)
    except Exception:
        return None


def _digest(device: Device | None) -> int:
    """0 for none."""
    if device is None or not device.pci:
        return 0
    text = f"{MPI.Get_processor_name()} {device.pci}"
    return 1 + int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def _caught(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _everywhere(error: Pmm3dError) -> Pmm3dError:
    error.everywhere = True
    return error
