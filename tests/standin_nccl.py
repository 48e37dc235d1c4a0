"""A stand-in for cupy.cuda.nccl on arrays of standin.py: the messages of a group join the queue of a stream, and travel
by MPI when somebody waits for it."""

import threading
from functools import partial

import numpy as np
from mpi4py import MPI
from standin_streams import get_current_stream

available = True
NCCL_UINT8 = 1
TAG = 77
HERE = threading.local()


def get_unique_id() -> bytes:
    return bytes(range(128))


def groupStart() -> None:
    HERE.group = []


def groupEnd() -> None:
    sent, received = ([np.frombuffer(MPI.buffer.fromaddress(pointer, nbytes), np.uint8)
                       for call, pointer, nbytes, _ in HERE.group if call.__name__ == name]
                      for name in ("Isend", "Irecv"))
    get_current_stream().queue.add(partial(_travel, HERE.group), sent, received)


def _travel(group) -> None:
    MPI.Request.Waitall([call(MPI.buffer.fromaddress(pointer, nbytes), peer, TAG)
                         for call, pointer, nbytes, peer in group])


class NcclCommunicator:
    """Of ranks that are the first of COMM_WORLD; made and aborted count those of this process."""

    made = aborted = 0

    def __init__(self, size, identity, rank):
        assert identity == get_unique_id() and MPI.COMM_WORLD.rank == rank
        NcclCommunicator.made += 1
        self.comm = MPI.COMM_WORLD.Dup()
        numbers = np.empty(size, np.int64)
        self.comm.Allgather(np.array([rank]), numbers)  # as blocking as NCCL's

    def send(self, pointer, count, datatype, peer, stream):
        self._join(self.comm.Isend, pointer, count, peer, stream)

    def recv(self, pointer, count, datatype, peer, stream):
        self._join(self.comm.Irecv, pointer, count, peer, stream)

    def _join(self, call, pointer, count, peer, stream):
        assert stream == get_current_stream().ptr
        HERE.group.append((call, pointer, count, peer))

    def abort(self):
        NcclCommunicator.aborted += 1
        NcclCommunicator.made -= 1

    def destroy(self):
        NcclCommunicator.made -= 1
        self.comm.Free()
