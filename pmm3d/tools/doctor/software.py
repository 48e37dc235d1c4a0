"""Python and packages, MPI, the launcher."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from mpi4py import MPI

from ... import __version__
from ...comm import mpi_name
from ...errors import install_command
from ...model.environment import tasks_in_environment
from ...model.launch import PLUGINS
from ...text import counted, ranks_in_words
from .finding import Finding, spread, unlike_first
from .session import Session

PACKAGES = ("numpy", "scipy", "mpi4py")
SLOW_LOADING = 5.0
"""Seconds to load the packages above which the check adds a note. Loading from a local disk takes one second."""
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


class Versions(NamedTuple):
    """Versions of Python and packages, and seconds to load the packages."""

    versions: dict[str, str]
    seconds: float


def gather_versions(session: Session) -> Versions:
    ours = {"Python": platform.python_version(), "pmm3d": __version__}
    return Versions(ours | {name: _version(name) for name in PACKAGES} | {"h5py": _of_h5py()}, session.loading)


def _version(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name)
    return "none"


def _of_h5py() -> str:
    """Return the versions of h5py and HDF5, and whether they use MPI."""
    try:
        import h5py
    except ImportError:
        return "none"
    return f"{h5py.__version__} (HDF5 {h5py.version.hdf5_version}, {'' if h5py.get_config().mpi else 'not '}parallel)"


def judge_versions(finding: Finding, facts: list[Versions], hosts: list[str]) -> None:
    first, seconds = facts[0].versions, [fact.seconds for fact in facts]
    others = unlike_first([fact.versions for fact in facts])
    if others:
        which = ", ".join(
            f"{name} {text} and {first[name]}"
            for name, text in facts[others[0]].versions.items()
            if text != first[name]
        )
        finding.fail(
            f"the versions differ between {ranks_in_words(others)} and rank 0: {which}",
            "start every rank with the same Python: give its full path, and one environment on all nodes",
        )
    if first["h5py"] == "none":
        finding.note("h5py is not installed: no data sets, no checkpoints", install_command("io"))
    if max(seconds) > SLOW_LOADING:
        finding.note(
            f"the packages took {max(seconds):.0f} s to load on the slowest rank",
            "put the environment on each node's own disk (a container image, or sbcast and untar) rather than "
            "on a shared file system that every rank searches",
        )
    versions = ", ".join(f"{name} {text}" for name, text in first.items())
    finding.found = f"{versions}; loaded in {spread(seconds)} s"
    packages = {name: text for name, text in first.items() if name != "Python"}
    finding.figures = {"python": first["Python"], "packages": packages, "start_seconds": max(seconds)}


class Mpi(NamedTuple):
    """Name and version of the library, its MPI version, and the thread level."""

    library: str
    standard: tuple[int, int]
    thread_level: int


def gather_mpi(session: Session) -> Mpi:
    levels = [getattr(MPI, f"THREAD_{level}") for level in THREAD_LEVELS]
    return Mpi(mpi_name(), MPI.Get_version(), levels.index(MPI.Query_thread()))


def judge_mpi(finding: Finding, facts: list[Mpi], hosts: list[str]) -> None:
    first = facts[0]
    others = unlike_first([fact.library for fact in facts])
    if others:
        finding.fail(
            f"{facts[others[0]].library} on {ranks_in_words(others)}, but {first.library} on rank 0",
            "load the same MPI module on all nodes, and give one LD_LIBRARY_PATH to all ranks",
        )
    level = THREAD_LEVELS[min(fact.thread_level for fact in facts)]
    if level in ("SINGLE", "FUNNELED"):
        finding.warn(
            f"thread level {level}: no helper thread can drive communication while a rank computes, so "
            "nothing overlaps",
            "unset MPI4PY_RC_THREADS and MPI4PY_RC_THREAD_LEVEL (mpi4py asks for MULTIPLE); a program that "
            "calls MPI_Init itself: MPI_Init_thread with MPI_THREAD_SERIALIZED or more",
        )
    elif level == "SERIALIZED":
        finding.note(
            f"thread level {level}: if a job hangs, ranks that compute cannot report their position",
            "an MPI with MPI_THREAD_MULTIPLE, if the site has one",
        )
    finding.found = f"{first.library}, MPI {'.'.join(map(str, first.standard))}; threads {level}"
    finding.figures = first._asdict() | {"thread_level": level}


class Launcher(NamedTuple):
    """Facts about the start of the job. tasks: of the launcher, from `variable`; job_tasks: of Slurm, 0 if unknown."""

    tasks: int | None
    variable: str
    world: int
    vendor: str
    job_tasks: int


def gather_launcher(session: Session) -> Launcher:
    tasks, variable = tasks_in_environment(os.environ) or (None, "")
    announced = os.environ.get("SLURM_NTASKS", "")
    return Launcher(
        tasks, variable, MPI.COMM_WORLD.size, MPI.get_vendor()[0], int(announced) if announced.isdecimal() else 0
    )


def judge_launcher(finding: Finding, facts: list[Launcher], hosts: list[str]) -> None:
    fact = facts[0]
    ours = "python -m pmm3d.launcher -n N ..., which starts the mpiexec beside this Python"
    known = PLUGINS.get(fact.vendor.replace(" ", "").lower())
    plugin = f"srun --mpi={known}" if known else "srun --mpi=..., with the plugin of this MPI (srun --mpi=list)"
    finding.figures = fact._asdict()
    if fact.tasks is None:
        finding.found = f"none: {counted(fact.world, 'rank')}, and no launcher announced a number of tasks"
        if fact.world == 1 and fact.job_tasks > 1:
            finding.note(
                f"this job has {counted(fact.job_tasks, 'task')}, but the command runs outside of them",
                f"{plugin} -n {fact.job_tasks} pmm3d doctor",
            )
        elif fact.world == 1:
            finding.note("one rank: nothing between ranks was measured", f"{plugin} -n N pmm3d doctor; or {ours}")
    elif fact.tasks == fact.world:
        finding.found = f"{counted(fact.tasks, 'task')} ({fact.variable}), {counted(fact.world, 'rank')} in MPI's world"
    else:
        finding.found = f"{fact.tasks} tasks ({fact.variable}={fact.tasks}), but MPI's world has {fact.world}"
        text = (
            f"the launcher belongs to another MPI than mpi4py's ({fact.vendor}): each task is a world of its own"
            if fact.world == 1
            else "launcher and MPI do not agree on how many ranks there are"
        )
        finding.fail(
            text,
            f"under Slurm: {plugin}; elsewhere: {ours}; in a container: start mpiexec outside of it "
            "with the same MPI, or inside of it",
        )
