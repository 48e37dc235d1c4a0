"""Trial whether MPI accepts device pointers. It runs in a child process, because an MPI that does not accept them reads
the pointer on the host and the process dies.

The child is one process that sends to itself. Two ranks would need a launcher, and a job may have none that it can use.
So the trial shows only that MPI recognizes device memory.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary, library_named
from ..arrays.device_library import DeviceLibrary
from .nodes import mpi_name

LAUNCHER_PREFIXES = ("PMI", "OMPI_COMM_", "OMPI_UNIVERSE", "PRTE_", "SLURM_", "HYDRA", "HYDI", "MPI_LOCAL", "PALS_")
"""Prefixes of environment variables that are removed, because with them the child would start as a rank of this job."""
SIZES = (2**9, 2**20)
"""Bytes of an eager message, and of one with a rendezvous. MPI uses different protocols for them."""
TRIAL_SECONDS = 60.0
"""Time limit of the child. To load cupy or torch from a parallel file system takes several seconds."""
UNKNOWN = "whether MPI takes device pointers could not be found out"
BEGUN, RIGHT, WRONG = "pmm3d trial: begun", "pmm3d trial: right", "pmm3d trial: wrong"
"""Lines that the child prints: before it passes pointers to MPI, and after it has compared the values. Its exit code
after that is ignored."""


class Outcome(NamedTuple):
    """Result of a trial: whether MPI accepts device pointers, and the reason as text."""

    direct: bool
    why: str


def try_device(library: NumpyLibrary, timeout: float = TRIAL_SECONDS) -> Outcome:
    """Return whether a child process can send device memory to itself. timeout: in seconds. The result is cached in
    the process, for each library and time limit."""
    name = library.module if isinstance(library, DeviceLibrary) else f"{library.name}:{getattr(library, 'device', '')}"
    outcome = _tried(name, timeout)
    return outcome._replace(why=f"{outcome.why} ({mpi_name()}, {library.name}, host {socket.gethostname()})")


@cache
def _tried(name: str, timeout: float) -> Outcome:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the child imports the same modules
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__, name],
            env=environment,
            timeout=timeout,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    except subprocess.TimeoutExpired:
        return Outcome(False, f"{UNKNOWN}: the child process did not end within {timeout:g} s")
    except OSError as error:
        return Outcome(False, f"{UNKNOWN}: the child process could not be started: {error}")
    return judged(child.returncode, child.stdout, child.stderr)


def judged(code: int, output: str, errors: str) -> Outcome:
    """Return the outcome from a child's exit code (negative: the signal), its stdout and its stderr.

    >>> judged(-11, BEGUN, "").why, judged(1, "", "no MPI").why.partition(": ")[2]
    ('this MPI does not take device pointers: the child process died of signal 11', 'no MPI')
    """
    if RIGHT in output:
        return Outcome(True, "MPI takes device pointers: a child process sent itself some")
    died = f"the child process {f'died of signal {-code}' if code < 0 else f'ended with code {code}'}"
    if BEGUN not in output:
        return Outcome(False, f"{UNKNOWN}: {(errors.strip().splitlines() or [died])[-1]}")
    how = "the child process got other values than it sent" if WRONG in output else died
    return Outcome(False, f"this MPI does not take device pointers: {how}")


def _child(name: str) -> None:
    __import__(name.partition(":")[0])
    library = library_named(name)
    print(BEGUN, flush=True)
    right = True
    for size in SIZES:
        values = np.arange(size // 4, dtype=np.float32)
        arrays = [library.from_numpy(each, "float32") for each in (values, np.zeros_like(values))]
        library.synchronize()
        source, target = ([MPI.buffer.fromaddress(library.address(each), size), MPI.BYTE] for each in arrays)
        MPI.COMM_SELF.Sendrecv(source, 0, 0, target, 0, 0)
        right &= np.array_equal(library.to_numpy(arrays[1]), values)
    print(RIGHT if right else WRONG, flush=True)


if __name__ == "__main__":
    _child(sys.argv[1])
