"""How ranks are started and ended. A project with a launcher of its own returns it from `pytest_mpi_launcher`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

MORE_RANKS_THAN_CORES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
}
"""Variables for tests with more ranks than cores, also in a container: of Open MPI 4, of Open MPI 5, and of MPICH,
whose waiting ranks would otherwise use their core."""
TIMED_OUT = 124
"""Exit code of a job that exceeded its time limit."""


class Launcher:
    """Start ranks with mpiexec.

    mpiexec   the command and its arguments up to "-n"
    """

    def __init__(self, mpiexec: str = "mpiexec"):
        self.mpiexec = mpiexec

    def words(self) -> list[str]:
        """Return the words of the command. Raises FileNotFoundError if there is no such program."""
        name, *arguments = shlex.split(self.mpiexec)
        path = shutil.which(Path(sys.executable).parent / name) or shutil.which(name)
        if path is None:
            raise FileNotFoundError(f"there is no {name}: set the option `mpiexec` in pytest's configuration file")
        return [path, *arguments]

    def describe(self) -> str:
        """Return a line for the head of pytest's output."""
        return shlex.join(self.words())

    def command(self, ranks: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs Python with these arguments on that many ranks."""
        return [*self.words(), "-n", str(ranks), sys.executable, *argv]

    def environment(self, ranks: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` with the settings that this number of ranks needs. Variables of `base` take precedence."""
        return MORE_RANKS_THAN_CORES | dict(base)

    def job(
        self, ranks: int, argv: Sequence[str], base: Mapping[str, str], timeout: float
    ) -> tuple[list[str], dict[str, str]]:
        """Return command and environment of the fixture `job`.

        The command may end the job itself after the timeout, with status TIMED_OUT.
        """
        return self.command(ranks, argv), self.environment(ranks, base)


def end_job(process: subprocess.Popen, grace: float = 2.0) -> None:
    """End an mpiexec and every process below it. Do nothing if mpiexec has ended.

    mpiexec gets SIGTERM first, so that it removes its files. `grace` seconds later it is killed. The ranks are killed
    one by one, because MPICH and Open MPI put each rank into its own process group.
    """
    if process.poll() is not None:
        return
    below = descendants(process.pid)
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        below += descendants(process.pid)
        process.kill()
        process.wait()
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """Return the processes below this one; children precede their own children."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
