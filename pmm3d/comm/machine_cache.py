"""Measured machines: one file for each in the user's cache folder. `pmm3d tune machine` writes them, and jobs load
them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
from mpi4py import MPI

from .. import cache as files
from ..arrays.blas_choice import blas_here
from ..errors import Pmm3dError
from ..model.environment import Settings
from ..model.machine import cpu, usable_cores
from ..model.machines import Machine, load, machine_from

FOLDER = "machines"
FORMAT = "4"
"""Version of the measurements. Files of other versions are not used."""
ONE, SEVERAL = "1", "several"
"""Number of nodes of a measurement, as stored in a key."""
STEERING = (
    "MPICH_",
    "OMPI_MCA_pml",
    "OMPI_MCA_btl",
    "OMPI_MCA_mtl",
    "OMPI_MCA_coll",
    "OMPI_MCA_opal",
    "OMPI_MCA_mpi_",
    "OMPI_MCA_accelerator",
    "OMPI_MCA_rcache",
    "UCX_",
    "I_MPI_OFFLOAD",
    "I_MPI_FABRICS",
    "MV2_",
    "FI_",
    "PSM2_",
)
"""Prefixes of the environment variables that configure how MPI moves messages."""
OF_RANKS = {"threads", "settings", "cores"}
"""Parts of a key that may differ between a rank and a process outside the job."""
AUTO_MACHINE = "auto"
logger = logging.getLogger("pmm3d.comm")
Key = dict[str, str]


def key_of(ranks_per_node: int, nodes: int) -> Key:
    """Return the conditions for which a measured machine is valid.

    The key contains the CPU, the number of usable cores, MPI and its settings, and the BLAS and its threads. It also
    contains the versions of numpy and pmm3d, the ranks per node, and whether there are several nodes. Raises
    ImportError if threadpoolctl, which identifies the BLAS, is not installed.
    """
    blas = blas_here()
    settings = " ".join(
        f"{name}={os.environ[name]}"
        for name in sorted(os.environ)
        if name.startswith(STEERING) and not name.endswith("_directory")
    )  # each job has its own folder
    pmm3d = import_module(__package__.partition(".")[0])
    return {
        "format": FORMAT,
        "cpu": cpu().name or "unknown",
        "cores": str(usable_cores()),
        "mpi": MPI.Get_library_version().strip("\0 \n"),
        "mpi file": mpi_file() or "unknown",
        "settings": settings or "none",
        "blas": f"{blas.name} {blas.version} {blas.kernel}".strip(),
        "threads": str(blas.threads),
        "library": "numpy",
        "numpy": np.__version__,
        "pmm3d": pmm3d.__version__,
        "ranks per node": str(ranks_per_node),
        "nodes": ONE if nodes == 1 else SEVERAL,
    }


def machine_here(
    comm: MPI.Intracomm, ranks_per_node: int, nodes: int, asked: str | None = None, *, on_host: bool = True
) -> Machine | None:
    """Return the machine model of a job, the same on all ranks, or None if there is no measurement. Collective.

    asked     name of a machine, or "auto". Default: PMM3D_MACHINE. "auto" selects the measurement with the same number
              of ranks per node, on one node or on several. A job on one node can also use a measurement on several
    on_host   whether the job computes on the host. Devices are not measured

    Rank 0 reads the file and broadcasts the machine. It ignores a file that is damaged or from another machine, and
    logs a warning. Every rank raises Pmm3dError if the named machine is unknown or cannot be read.
    """
    machine: Machine | None = None
    error: Pmm3dError | None = None
    if comm.rank == 0:
        try:
            asked = asked or Settings().machine
            if asked != AUTO_MACHINE:
                machine = load(asked)
            elif on_host:
                machine = _of_job(ranks_per_node, nodes)
        except Pmm3dError as raised:
            error = raised
    machine, error = comm.bcast((machine, error))
    if error is not None:
        error.everywhere = True
        raise error
    return machine


def measured_here(ranks_per_node: int | None = None, nodes: int = 1) -> Machine | None:
    """Return the newest measured machine for a process outside a job, for example to plan one; None if there is none.

    CPU, MPI, BLAS and versions must be those of this process. MPI settings, threads and cores may differ. The number
    of ranks per node may differ if `ranks_per_node` is None. Sends no messages.
    """
    with suppress(ImportError, OSError, RuntimeError):
        key = key_of(ranks_per_node or 0, nodes)
        for measured_on in (ONE, SEVERAL) if nodes == 1 else (SEVERAL,):
            wanted = key | {"nodes": measured_on}
            free = OF_RANKS | ({"ranks per node"} if ranks_per_node is None else set())
            for path in sorted(folder().glob("*.toml"), key=_written, reverse=True):
                try:
                    machine = machine_from(files.read(path), str(path))
                except (OSError, ValueError, Pmm3dError) as error:
                    _tell(str(error))
                    continue
                if all(machine.key.get(part) == value for part, value in wanted.items() if part not in free):
                    return machine
    return None


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@cache
def _tell(error: str) -> None:
    """Log that a file is not used; the same text once in a process."""
    logger.warning(f"the stored machine is not used: {error}. pmm3d tune machine measures it again")


def _of_job(ranks_per_node: int, nodes: int) -> Machine | None:
    with suppress(ImportError, RuntimeError):
        key = key_of(ranks_per_node, nodes)
        for measured_on in (ONE, SEVERAL) if nodes == 1 else (SEVERAL,):
            if (text := recalled(key | {"nodes": measured_on})) is not None:
                return machine_from(text, "the machine that was measured here")
    return None


def recalled(key: Mapping[str, str]) -> str | None:
    """Return the text of the file whose key equals `key`, or None. An unusable file is logged. Raises RuntimeError if
    the user has no home folder."""
    path = file_of(key)
    try:
        text = files.read(path)
        if dict(machine_from(text, str(path)).key) != dict(key):
            raise Pmm3dError(f"{path} was measured on another machine")
        return text
    except FileNotFoundError:
        return None
    except (OSError, ValueError, Pmm3dError) as error:
        _tell(str(error))
    return None


def remember_machine(key: Mapping[str, str], text: str) -> Path:
    """Write the file of a key atomically, and return its path. Raises OSError if the file cannot be written, and
    RuntimeError if the user has no home folder."""
    return files.write(file_of(key), text)


def file_of(key: Mapping[str, str]) -> Path:
    """Return the path of the file of a key. Raises RuntimeError if the user has no home folder."""
    return files.file_of(FOLDER, key, ".toml")


def folder() -> Path:
    """Return $XDG_CACHE_HOME/pmm3d/machines, or ~/.cache/pmm3d/machines. Raises RuntimeError if the user has no home
    folder."""
    return files.folder(FOLDER)


@cache
def mpi_file() -> str:
    """Return the path of the MPI library that is loaded, and its modification time, because builds with different
    options have one version. Empty if it is not found."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            _, slash, path = line.partition("/")
            if "libmpi" in os.path.basename(path):
                return f"{slash}{path} {int(os.stat(slash + path).st_mtime)}"
    return ""
