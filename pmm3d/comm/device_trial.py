"""Whether MPI takes device pointers, found out in a child process: where the answer is no, MPI reads the pointer on the
host and the process dies."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary, library_named
from ..arrays.device_library import DeviceLibrary

LAUNCHER_PREFIXES = ("PMI", "OMPI_COMM_", "OMPI_UNIVERSE", "PRTE_", "SLURM_", "HYDRA", "HYDI", "MPI_LOCAL", "PALS_")
"""Variables with which the child would take itself for a rank of this job."""


def takes_device_pointers(library: NumpyLibrary, timeout: float = 60) -> bool:
    """Whether a child process of one rank can send itself some memory of this library's device."""
    name = library.module if isinstance(library, DeviceLibrary) else f"{library.name}:{getattr(library, 'device', '')}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    try:
        child = subprocess.run([sys.executable, "-m", __name__, name], env=environment, timeout=timeout,
                               stdin=subprocess.DEVNULL, capture_output=True)
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0


def _child(name: str) -> int:
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
    sys.exit(_child(sys.argv[1]))
