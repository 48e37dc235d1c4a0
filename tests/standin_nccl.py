"""A stand-in for cupy.cuda.nccl on arrays of standin.py. The messages of a group are added to the queue of a stream.
MPI sends them when the stream executes them."""

import threading
from functools import partial

import numpy as np
from mpi4py import MPI
from standin_streams import get_current_stream

available = True
NCCL_UINT8 = 1
TAG, CONNECTING = 77, 78
HERE = threading.local()


def get_unique_id() -> bytes:
    return bytes(range(128))


def groupStart() -> None:
    HERE.group = []


def groupEnd() -> None:
    _connect({(comm, peer) for comm, _, _, _, peer in HERE.group if peer not in comm.connected})
    sent, received = (
        [
            np.frombuffer(MPI.buffer.fromaddress(pointer, nbytes), np.uint8)
            for _, call, pointer, nbytes, _ in HERE.group
            if call.__name__ == name
        ]
        for name in ("Isend", "Irecv")
    )
    get_current_stream().queue.add(partial(_travel, HERE.group), sent, received)


def _connect(pairs) -> None:
    """Block the host before the first messages of two ranks, until both ranks have called this, as NCCL does."""
    if pairs:
        NcclCommunicator.stood_still += 1
        MPI.Request.Waitall(
            [
                call(np.empty(1, np.uint8), peer, CONNECTING)
                for comm, peer in pairs
                for call in (comm.comm.Irecv, comm.comm.Isend)
            ]
        )
        for comm, peer in pairs:
            comm.connected.add(peer)


def _travel(group) -> None:
    NcclCommunicator.travelled += len(group)
    MPI.Request.Waitall(
        [call(MPI.buffer.fromaddress(pointer, nbytes), peer, TAG) for _, call, pointer, nbytes, peer in group]
    )


class NcclCommunicator:
    """Communicator of consecutive ranks of COMM_WORLD.

    made, aborted   number of communicators of this process
    travelled       number of its messages
    stood_still     how often it waited for other ranks to connect
    """

    made = aborted = travelled = stood_still = 0

    def __init__(self, size, identity, rank):
        assert identity == get_unique_id()
        NcclCommunicator.made += 1
        self.connected = set()
        first = MPI.COMM_WORLD.rank - rank
        ranks = MPI.COMM_WORLD.group.Range_incl([(first, first + size - 1, 1)])
        self.comm = MPI.COMM_WORLD.Create_group(ranks)
        numbers = np.empty(size, np.int64)
        self.comm.Allgather(np.array([rank]), numbers)  # blocks, as in NCCL

    def send(self, pointer, count, datatype, peer, stream):
        self._join(self.comm.Isend, pointer, count, peer, stream)

    def recv(self, pointer, count, datatype, peer, stream):
        self._join(self.comm.Irecv, pointer, count, peer, stream)

    def _join(self, call, pointer, count, peer, stream):
        assert stream == get_current_stream().ptr
        HERE.group.append((self, call, pointer, count, peer))

    def abort(self):
        NcclCommunicator.aborted += 1
        NcclCommunicator.made -= 1

    def destroy(self):
        NcclCommunicator.made -= 1
        self.comm.Free()
