"""Programs in C and Fortran, compiled with Debian's Open MPI and run under its mpirun."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-embed"
LIBRARIES = ROOT / "build" / "embed"
FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "OPAL_", "MPI4PY_", "PYTHONPATH", "PMM3D_")
"""Prefixes of environment variables of the tests' own MPI and settings. They are not passed to the programs."""
AS_ROOT_ON_FEW_CORES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def lacks() -> str:
    """Return why this machine cannot compile and run callers, with the remedy; empty if it can."""
    missing = [tool for tool in ("mpicc.openmpi", "mpifort.openmpi", "mpirun.openmpi") if not shutil.which(tool)]
    if missing or not list(Path("/usr/lib").glob("*/libscalapack-openmpi.so")):
        return f"{', '.join(missing) or 'libscalapack-openmpi.so'} not found: make system-packages, as root"
    return ""


class Caller:
    """A compiled program that calls the library."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(
        self, ranks: int, *words: object, seconds: int = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return subprocess.run(
            ["mpirun.openmpi", "-n", str(ranks), self.path, *map(str, words)],
            text=True,
            env=inherited | AS_ROOT_ON_FEW_CORES | environment,
            capture_output=True,
            timeout=seconds,
            cwd=self.path.parent,
        )

    def written(self, ranks: int, *words: object, **how: Any) -> str:
        """Standard output of a run that must succeed."""
        done = self(ranks, *words, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def compiled(into: Path, *sources: str, flags: tuple[str, ...] = (), libraries: Path = LIBRARIES) -> Caller:
    fortran = any(source.endswith((".f90", ".f")) for source in sources)
    program = into / Path(sources[-1]).stem
    compiler = ["mpifort.openmpi", "-J", str(into)] if fortran else ["mpicc.openmpi", "-Wextra"]
    command = [
        *compiler,
        "-Wall",
        *(str(ROOT / source) for source in sources),
        "-I",
        str(ROOT / "embed"),
        "-L",
        str(libraries),
        *flags,
        "-lpmm3d",
        f"-Wl,-rpath,{libraries}",
        "-lm",
        "-ldl",
        "-pthread",
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return Caller(program)
