"""The stand-in of standin.py as MPI without device support meets it: the host may not touch what pointers point at."""

import mmap
from functools import partial

import numpy as np
import standin
from standin import add, asnumpy, conj, cuda, matmul, multiply  # noqa: F401


class FarMemory(standin.Memory):
    """Bytes whose pointer leads to pages without any access rights."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self._pages = np.frombuffer(mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE, 0), np.uint8)
        self.pointer = self._pages.ctypes.data


class ndarray(standin.ndarray):  # noqa: N801, as in cupy
    memory_kind = FarMemory


empty = partial(standin.empty, kind=ndarray)
asarray = partial(standin.asarray, kind=ndarray)
array = partial(standin.array, kind=ndarray)
