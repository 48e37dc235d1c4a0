"""Environment variables of the user, the launcher and the batch system. Imports no MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any

from ..errors import GridError, Pmm3dError
from .node_map import SUMS

TASK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables of the number of ranks, innermost launcher first. An mpiexec inside a Slurm allocation starts its daemons
as a Slurm step. Its ranks then also have the task count of this step, which is the number of nodes."""
TASK_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "SLURM_PROCID")
LOCAL_TASK_COUNTS = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")
TRANSPORTS = ("auto", "direct", "staged", "nccl")
TRANSPORTS_IN_WORDS = "auto, direct, staged or nccl"
OVERLAPS_OF_ALL = ("auto", "none")
"""Overlap modes for all products of a job. Other modes are arguments of a product, because some products cannot use
them."""

OF_PROGRAMS = ("PMM3D_MPIEXEC", "PMM3D_PYTHON", "PMM3D_EMBED_LOG", "PMM3D_SCALAPACK_BELOW", "PMM3D_SCALAPACK_ROUTINES")
"""Variables that are no settings of a Grid: of the launcher, and of programs in C and Fortran."""
ALIKE = 0.75
"""Least similarity of a misspelt name and a known one, without PMM3D_. Sites may set variables such as PMM3D_ROOT."""
JOB_FOLDER = "PMM3D_JOB_FOLDER"
"""Variable that names a folder in which ranks on the node of pmm3d.launcher write files: "code" contains the exit code
if a rank ends the job, and "rank-3" the pipeline stage of rank 3."""


def tasks_in_environment(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return (number of ranks that the launcher started, name of the variable), or None outside a launcher.

    If this number differs from the size of COMM_WORLD, the launcher and the library belong to different MPIs.

        >>> tasks_in_environment({"PMI_SIZE": "8"})
        (8, 'PMI_SIZE')
    """
    for name in TASK_COUNTS:
        value = environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value), name
    return None


def task_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this process from the launcher's variables, before MPI starts; 0 outside a launcher."""
    for name in TASK_RANKS:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return 0


def tasks_on_node(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return (number of ranks on this node, name of the variable); (1, "") outside a launcher.

    >>> tasks_on_node({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    (3, 'SLURM_STEP_TASKS_PER_NODE')
    """
    for name in LOCAL_TASK_COUNTS:
        if environ.get(name, "").isdecimal():
            return int(environ[name]), name
    slurm, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), environ.get("SLURM_NODEID", "0")
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", slurm) if node.isdecimal() else ():
        if int(node) < int(nodes or 1):
            return int(tasks), "SLURM_STEP_TASKS_PER_NODE"
        node = str(int(node) - int(nodes or 1))
    return 1, ""


def nodes_of_job(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of the batch job, from variables of Slurm, PBS or LSF; 1 outside a batch job."""
    slurm = environ.get("SLURM_JOB_NUM_NODES", "")
    if slurm.isdecimal():
        return max(1, int(slurm))
    if "LSB_MCPU_HOSTS" in environ:  # "host1 16 host2 16"
        return max(1, len(environ["LSB_MCPU_HOSTS"].split()) // 2)
    try:
        hosts = Path(environ["PBS_NODEFILE"]).read_text().split()
    except (KeyError, OSError):
        return 1
    return max(1, len(set(hosts)))


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return variable and identifier of the batch job, such as "SLURM_JOB_ID 4711"; None outside a batch job."""
    return next((f"{name} {environ[name]}" for name in JOB_IDS if environ.get(name)), None)


def job_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many times Slurm has requeued and restarted this job."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def misspelt(environ: Mapping[str, str] = os.environ) -> str:
    """Return a note about variables whose names resemble those of pmm3d's variables; "" if there are none.

    >>> misspelt({"PMM3D_TIMOUT": "5", "PMM3D_ROOT": "/opt"})
    'PMM3D_TIMOUT has no effect (did you mean PMM3D_TIMEOUT?)'
    """
    known = {
        name.removeprefix("PMM3D_"): name
        for name in (*(setting.metadata["variable"] for setting in fields(Settings)), *OF_PROGRAMS, JOB_FOLDER)
    }
    near = {
        name: get_close_matches(name.removeprefix("PMM3D_"), known, 1, ALIKE)
        for name in sorted(environ)
        if name.startswith("PMM3D_") and name not in known.values()
    }
    return "; ".join(
        f"{name} has no effect (did you mean {known[matches[0]]}?)" for name, matches in near.items() if matches
    )


def _variable(
    name: str, default: Any, kind: Callable[[str], Any], meaning: str, argument: str = "True or False"
) -> Any:
    def read() -> Any:
        text = os.environ.get(name)
        if text is None or text == "":
            return default
        try:
            return kind(text)
        except ValueError:
            raise Pmm3dError(f"{name}={text!r} is invalid. It must be {meaning}") from None

    metadata = {
        "variable": name,
        "default": default,
        "meaning": meaning,
        "read": read,
        "kind": kind,
        "argument": argument,
    }
    return field(default_factory=read, metadata=metadata)


def _switch(text: str) -> bool:
    known = {"0": False, "1": True, "off": False, "on": True, "no": False, "yes": True}
    try:
        return known[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _seconds(given: Any) -> float:
    value = float(given)
    if not 0 <= value < float("inf"):
        raise ValueError(given)
    return value


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def kind(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return kind


def _argument(setting: Field, value: Any) -> Any:
    """Check an argument of Grid and return its value. Raises GridError."""
    default = setting.metadata["default"]
    try:
        if isinstance(default, bool) and value in (False, True):
            return bool(value)
        if isinstance(default, float) and isinstance(value, Real):
            return _seconds(value)
        if isinstance(default, str) and isinstance(value, str):
            return str(setting.metadata["kind"](value))
    except ValueError:
        pass
    raise GridError(f"{setting.name} must be {setting.metadata['argument']}; got {value!r}")


@dataclass(frozen=True)
class Settings:
    """Settings of a Grid. The defaults are read from the environment when the object is created."""

    timeout: float = _variable(
        "PMM3D_TIMEOUT",
        600.0,
        _seconds,
        "a number: time limit of a collective in seconds; 0: no limit",
        "a number of seconds, 0 for no limit",
    )
    debug: bool = _variable(
        "PMM3D_DEBUG",
        False,
        _switch,
        "0 or 1: compare the ranks' calls before each collective, and search for deadlocks",
    )
    log: bool = _variable(
        "PMM3D_LOG", False, _switch, "0 or 1: log each collective of the first 64 ranks (logger pmm3d.comm)"
    )
    trace: bool = _variable("PMM3D_TRACE", False, _switch, "0 or 1: record collectives and GEMMs for a Chrome trace")
    check: bool = _variable("PMM3D_CHECK", True, _switch, "0 or 1: compare the ranks' arguments before each operation")
    device_transport: str = _variable(
        "PMM3D_TRANSPORT",
        "auto",
        _one_of(TRANSPORTS),
        f"{TRANSPORTS_IN_WORDS}: how messages of device memory are sent",
        TRANSPORTS_IN_WORDS,
    )
    blas: str = _variable(
        "PMM3D_BLAS",
        "",
        str,
        "the BLAS that multiplies on the host: scipy, mkl (the extra pmm3d[mkl]), auto (the choice "
        "of pmm3d tune blas; for a type: auto:float32), or the path of a shared library. Default: "
        "SciPy's; with the extra pmm3d[mkl] the choice of pmm3d tune blas, or else MKL",
        "scipy, mkl, auto, or the path of a shared library",
    )
    sums: str = _variable(
        "PMM3D_SUMS",
        "nodes",
        _one_of(SUMS),
        "nodes or ranks: whether sums along an axis with equally many ranks on several nodes are "
        "formed in each node first, or in an order that depends on the number of ranks only",
        "nodes or ranks",
    )
    overlap: str = _variable(
        "PMM3D_OVERLAP",
        "auto",
        _one_of(OVERLAPS_OF_ALL),
        "auto or none: the overlap mode of products with overlap auto, the default; auto: across "
        "nodes products are decomposed if possible. Panels are an argument: panels=4",
        "auto or none",
    )
    machine: str = _variable(
        "PMM3D_MACHINE",
        "auto",
        str,
        "the machine for which grids are chosen: auto (measured here by pmm3d tune machine, or "
        "else nominal), the name of an assumed machine, or the path of a TOML file",
        "auto, the name of an assumed machine, or the path of a TOML file",
    )

    @classmethod
    def chosen(cls, **arguments: Any) -> tuple[Settings, Pmm3dError | None]:
        """Return the settings from the arguments of Grid, and the first error or None.

        An argument that is None, or equal to the default, is read from the environment. An invalid setting gets its
        default, and its error is returned instead of raised, because it may be invalid on one rank only.
        """
        values: dict[str, Any] = {}
        problem: Pmm3dError | None = None
        for setting in fields(cls):
            given = arguments.get(setting.name)
            try:
                unsaid = given is None or (isinstance(given, str) and given == setting.metadata["default"])
                values[setting.name] = setting.metadata["read"]() if unsaid else _argument(setting, given)
            except Pmm3dError as error:
                values[setting.name], problem = setting.metadata["default"], problem or error
        return cls(**values), problem
