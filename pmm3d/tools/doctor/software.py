"""Python and packages, MPI, the launcher, parallel HDF5."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from ...comm.words import ranks_in_words
from .finding import Finding, Problems, spread
from .session import Session

PACKAGES = ("pmm3d", "numpy", "scipy", "mpi4py", "h5py")
OLDEST_MPI4PY = (4, 0, 3)
SLOW_START = 5.0
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
PLUGINS = {"MPICH": "srun --mpi=pmi2", "Open MPI": "srun --mpi=pmix"}


@dataclass(frozen=True)
class Packages:
    """python and versions of this rank; seconds from the start of its process until it could begin."""

    python: str
    versions: dict[str, str]
    seconds: float


def gather_packages(session: Session) -> Packages:
    import platform

    return Packages(platform.python_version(), {name: _version(name) for name in PACKAGES}, session.started)


def _version(name: str) -> str:
    if name == "pmm3d":
        from ... import __version__

        return __version__
    return version(name)


def seconds_since_start(stat: str = "/proc/self/stat", uptime: str = "/proc/uptime") -> float:
    """Seconds that this process has lived; 0 where the system does not tell."""
    try:
        ticks = int(Path(stat).read_text().rpartition(")")[2].split()[19])
        return max(0.0, float(Path(uptime).read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (4, 0, 3) of 4.0.3rc1."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def judge_packages(facts: list[Packages], hosts: list[str]) -> Finding:
    problems = Problems()
    first, seconds = facts[0], [fact.seconds for fact in facts]
    others = [rank for rank, fact in enumerate(facts)
              if (fact.python, fact.versions) != (first.python, first.versions)]
    if others:
        one = facts[others[0]]
        told = ", ".join(f"{name} {one.versions[name]} and {first.versions[name]}" for name in PACKAGES
                         if one.versions[name] != first.versions[name]) or f"Python {one.python} and {first.python}"
        problems.fail(f"{ranks_in_words(others)} run other versions than rank 0: {told}",
                      "start every rank with the same Python: give its full path, and one environment on all nodes")
    if numbers(first.versions["mpi4py"]) < OLDEST_MPI4PY:
        problems.warn(f"mpi4py {first.versions['mpi4py']} frees CuPy arrays twice", 'pip install "mpi4py>=4.0.3"')
    if max(seconds) > SLOW_START:
        problems.note(f"Python and its packages took {max(seconds):.0f} s to load on the slowest rank",
                      "put the environment on each node's own disk (a container image, or sbcast and untar) rather "
                      "than on a shared file system that every rank searches")
    found = f"Python {first.python}, " + ", ".join(f"{name} {text}" for name, text in first.versions.items())
    return Finding("software", f"{found}; ready after {spread(seconds)} s", tuple(problems),
                   {"python": first.python, "packages": first.versions, "start_seconds": max(seconds)})


@dataclass(frozen=True)
class Mpi:
    """library: its own words; standard: of the running library; built: of the one mpi4py was built with."""

    library: str
    vendor: str
    standard: tuple[int, int]
    built: tuple[int, int]
    module: str
    thread_level: int

    @property
    def large_counts(self) -> bool:
        return min(self.standard, self.built) >= (4, 0)


def gather_mpi(session: Session) -> Mpi:
    from mpi4py import MPI

    from ...comm.hosts import mpi_name

    levels = [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE]
    vendor, number = MPI.get_vendor()
    name = mpi_name()
    if not re.search(r"\d", name) or name.endswith(":") or "Version:" in name:
        name = f"{vendor} {'.'.join(map(str, number))}"
    return Mpi(name, vendor, tuple(MPI.Get_version()), (MPI.VERSION, MPI.SUBVERSION), Path(MPI.__file__).name,
               levels.index(MPI.Query_thread()))


def judge_mpi(facts: list[Mpi], hosts: list[str]) -> Finding:
    problems = Problems()
    first = facts[0]
    others = [rank for rank, fact in enumerate(facts) if fact.library != first.library]
    if others:
        problems.fail(f"{ranks_in_words(others)} run {facts[others[0]].library}, rank 0 runs {first.library}",
                      "load the same MPI module on all nodes, and give one LD_LIBRARY_PATH to all ranks")
    level = min(fact.thread_level for fact in facts)
    if level < THREAD_LEVELS.index("SERIALIZED"):
        problems.warn(f"thread level {THREAD_LEVELS[level]}: no helper thread can drive communication while a rank "
                      "computes, so nothing overlaps",
                      "unset MPI4PY_RC_THREADS and MPI4PY_RC_THREAD_LEVEL (mpi4py asks for MULTIPLE); a program that "
                      "calls MPI_Init itself: MPI_Init_thread with MPI_THREAD_SERIALIZED or more")
    elif level < THREAD_LEVELS.index("MULTIPLE"):
        problems.note(f"thread level {THREAD_LEVELS[level]}: when a job hangs, ranks that compute cannot say where",
                      "an MPI with MPI_THREAD_MULTIPLE, if the site has one")
    counts = "large counts" if first.large_counts else "no large counts"
    found = (f"{first.library}, MPI {_dotted(first.standard)}; mpi4py built for MPI {_dotted(first.built)} "
             f"({first.module.partition('.cpython')[0]}); {counts} (messages go in pieces of 1 GiB); "
             f"threads {THREAD_LEVELS[level]}")
    figures = asdict(first) | {"thread_level": THREAD_LEVELS[level], "large_counts": first.large_counts}
    return Finding("MPI", found, tuple(problems), figures)


def _dotted(numbers_: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers_))


@dataclass(frozen=True)
class Launcher:
    """What the environment says of the launcher, and what MPI says."""

    tasks: int | None
    variable: str
    world: int
    vendor: str
    job_tasks: int


def gather_launcher(session: Session) -> Launcher:
    from mpi4py import MPI

    from ...model.environment import tasks_in_environment

    tasks, variable = tasks_in_environment(os.environ) or (None, "")
    announced = os.environ.get("SLURM_NTASKS", "")
    return Launcher(tasks, variable, MPI.COMM_WORLD.size, MPI.get_vendor()[0],
                    int(announced) if announced.isdecimal() else 0)


def judge_launcher(facts: list[Launcher], hosts: list[str]) -> Finding:
    problems = Problems()
    fact = facts[0]
    ours = "python -m pmm3d.launcher -n N ..., which takes the mpiexec beside this Python"
    plugin = PLUGINS.get(fact.vendor, "srun --mpi=..., with the plugin of this MPI (srun --mpi=list)")
    if fact.tasks is None:
        found = f"none: {fact.world} rank{'s' * (fact.world > 1)} without a launcher that says how many it started"
        if fact.world == 1 and fact.job_tasks > 1:
            problems.note(f"this job has {fact.job_tasks} tasks, but the command runs outside of them",
                          f"{plugin} -n {fact.job_tasks} pmm3d doctor")
        elif fact.world == 1:
            problems.note("one rank: nothing between ranks was measured", f"{plugin} -n N pmm3d doctor; or {ours}")
    elif fact.tasks == fact.world:
        found = f"{fact.tasks} tasks ({fact.variable}), {fact.world} ranks in MPI's world"
    else:
        found = f"{fact.tasks} tasks ({fact.variable}={fact.tasks}), but MPI's world has {fact.world}"
        text = (f"the launcher belongs to another MPI than mpi4py's ({fact.vendor}): each task is a world of its own"
                if fact.world == 1 else "launcher and MPI do not agree on how many ranks there are")
        problems.fail(text, f"under Slurm: {plugin}; elsewhere: {ours}; in a container: start mpiexec outside of it "
                            "with the same MPI, or inside of it")
    return Finding("launcher", found, tuple(problems), asdict(fact))


@dataclass(frozen=True)
class Hdf5:
    h5py: str
    hdf5: str
    parallel: bool


def gather_hdf5(session: Session) -> Hdf5:
    import h5py

    return Hdf5(h5py.__version__, h5py.version.hdf5_version, bool(h5py.get_config().mpi))


def judge_hdf5(facts: list[Hdf5], hosts: list[str]) -> Finding:
    problems = Problems()
    fact = facts[0]
    if not fact.parallel:
        problems.note("h5py is built without MPI: checkpoints are a file of each rank, and a master that shows them "
                      "whole",
                      "nothing to do. For one file: HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py")
    others = [rank for rank, other in enumerate(facts) if other != fact]
    if others:
        problems.fail(f"{ranks_in_words(others)} have another h5py than rank 0", "one environment on all nodes")
    parallel = "parallel" if fact.parallel else "not parallel"
    return Finding("HDF5", f"h5py {fact.h5py}, HDF5 {fact.hdf5}, {parallel}", tuple(problems), asdict(fact))
