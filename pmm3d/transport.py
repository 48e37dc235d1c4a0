"""How bytes leave a rank: host memory as it is, device memory directly or through pinned host memory, in messages
below the 2 GiB that MPI counts and some networks take."""

from __future__ import annotations

import os
import subprocess
import sys
from math import prod

import numpy as np
from mpi4py import MPI

from .arrays import DeviceLibrary, itemsize, library_named
from .errors import Pmm3dError
from .workspace import Workspace

LARGEST_MESSAGE = 2**30
_LAUNCHER_PREFIXES = ("PMI", "OMPI_COMM_", "OMPI_UNIVERSE", "PRTE_", "SLURM_", "HYDRA", "HYDI", "MPI_LOCAL", "PALS_")


def chunks(nbytes: int, largest: int = LARGEST_MESSAGE):
    """(offset, length) of the messages that carry nbytes; none for no bytes."""
    return [(offset, min(largest, nbytes - offset)) for offset in range(0, nbytes, largest)]


class Transport:
    """What one rank knows about getting arrays to MPI. Belongs to a Grid.

    mode   for device memory: "direct" passes device pointers to MPI; "staged" goes through pinned host memory; "auto"
           sends some in a child process first, since MPI without support crashes rather than refuses
    """

    def __init__(self, mode: str, workspace: Workspace):
        if mode not in ("auto", "direct", "staged"):
            raise Pmm3dError(f"device_transport is auto, direct or staged; got {mode!r}")
        self._mode = mode
        self.workspace = workspace

    def staged(self, library) -> bool:
        """Whether arrays of this library go through host memory."""
        if library.on_host:
            return False
        if self._mode == "auto":
            self._mode = "direct" if trial(library) else "staged"
            if self._mode == "staged":
                print("pmm3d: this MPI does not take device pointers (tried in a child process): device memory goes "
                      "through pinned host memory", file=sys.stderr, flush=True)
        return self._mode == "staged"


class Link:
    """The messages of one collective: a communicator, a tag, and the ledger's record that counts the bytes.

    Ranks are those of the communicator, `rank` is this one. Arrays must be contiguous.
    """

    def __init__(self, comm, tag: int, record, transport: Transport):
        self.rank, self.size = comm.rank, comm.size
        self.transport = transport
        self.record = record
        self._comm, self._tag = comm, tag

    @property
    def workspace(self) -> Workspace:
        return self.transport.workspace

    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def exchange(self, library, sends, receives):
        """Generator: post all messages, yield their requests; afterwards the received arrays are filled.

        sends, receives   lists of (peer, array of `library`); both sides know the sizes, empty arrays send nothing
        """
        if not library.on_host:
            library.synchronize()
        staging = [] if self.transport.staged(library) else None
        requests = []
        for peer, array in receives:
            address, nbytes = self._region(library, array, staging, False)
            self.record.received += nbytes
            requests += self._post(self._comm.Irecv, peer, address, nbytes)
        for peer, array in sends:
            address, nbytes = self._region(library, array, staging, True)
            self.record.sent += nbytes
            requests += self._post(self._comm.Isend, peer, address, nbytes)
        yield requests
        for array, host, ticket, outgoing in staging or ():
            if not outgoing:
                library.from_host(array, host)
            self.workspace.give(ticket)

    def _region(self, library, array, staging: list | None, outgoing: bool) -> tuple[int, int]:
        """(address, bytes) that MPI sees: the array itself, or, with staging, a host buffer noted there."""
        nbytes = prod(array.shape) * itemsize(library.dtype(array))
        if nbytes == 0:
            return 0, 0
        if staging is None:
            return library.address(array), nbytes
        host, ticket = self.workspace.take((nbytes,), "uint8", library.pinned())
        if outgoing:
            library.to_host(array, host)
        staging.append((array, host, ticket, outgoing))
        return host.__array_interface__["data"][0], nbytes

    def _post(self, call, peer: int, address: int, nbytes: int) -> list:
        return [
            call([MPI.buffer.fromaddress(address + offset, length), length, MPI.BYTE], peer, self._tag)
            for offset, length in chunks(nbytes)
        ]


def trial(library, timeout: float = 60) -> bool:
    """Whether MPI takes this library's device pointers: a child process of one rank sends some to itself.

    In a child, because where the answer is no, MPI reads the pointer on the host and the process dies.
    """
    name = library.module if isinstance(library, DeviceLibrary) else f"{library.name}:{library.device}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_PREFIXES)}
    try:
        child = subprocess.run([sys.executable, "-m", "pmm3d.transport", name], env=environment, timeout=timeout,
                               stdin=subprocess.DEVNULL, capture_output=True)
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0


def _trial_child(name: str) -> int:
    module = name.partition(":")[0]
    __import__(module)
    library = library_named(name)
    expected = np.arange(2**18, dtype=np.float32)
    source, target = library.from_numpy(expected, "float32"), library.from_numpy(np.zeros_like(expected), "float32")
    library.synchronize()
    regions = [MPI.buffer.fromaddress(library.address(array), expected.nbytes) for array in (source, target)]
    MPI.COMM_SELF.Sendrecv([regions[0], MPI.BYTE], 0, 0, [regions[1], MPI.BYTE], 0, 0)
    return 0 if np.array_equal(library.to_numpy(target), expected) else 1


if __name__ == "__main__":
    sys.exit(_trial_child(sys.argv[1]))
