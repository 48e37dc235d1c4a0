"""Environment variables: what the user asks for, what the launcher and the batch system say. Loads no MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Pmm3dError

TASK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS")
"""Innermost launcher first: mpiexec inside a Slurm allocation starts its own daemons as a Slurm step, so its ranks also
carry that step's task count (the number of nodes)."""
TASK_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "SLURM_PROCID")
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")

JOB_FOLDER = "PMM3D_JOB_FOLDER"
"""Where a rank that ends the job tells pmm3d.launcher, on whose node it is, the exit code."""


def tasks_in_environment(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """How many ranks the launcher says it started, and the variable that says so.

    None outside a launcher. A number other than the size of COMM_WORLD means that launcher
    and library belong to different MPIs.

        >>> tasks_in_environment({"PMI_SIZE": "8"})
        (8, 'PMI_SIZE')
    """
    for name in TASK_COUNTS:
        value = environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value), name
    return None


def task_rank(environ: Mapping[str, str]) -> int:
    """This process's rank as the launcher says, before MPI is there to ask; 0 outside a launcher."""
    for name in TASK_RANKS:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return 0


def nodes_of_job(environ: Mapping[str, str]) -> int:
    """Nodes in the batch job, as Slurm, PBS or LSF announce them; 1 outside a batch job."""
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
    """The name of this job at the batch system, as in "SLURM_JOB_ID 4711"; None outside of one."""
    return next((f"{name} {environ[name]}" for name in JOB_IDS if environ.get(name)), None)


def job_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often Slurm has started this job again."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def _variable(name: str, default: Any, kind: Callable[[str], Any], meaning: str) -> Any:
    def read() -> Any:
        text = os.environ.get(name)
        if text is None or text == "":
            return default
        try:
            return kind(text)
        except ValueError:
            raise Pmm3dError(f"{name}={text!r} is not understood; it means {meaning}") from None

    return field(default_factory=read, metadata={"variable": name, "default": default, "meaning": meaning})


def _switch(text: str) -> bool:
    known = {"0": False, "1": True, "off": False, "on": True, "no": False, "yes": True}
    try:
        return known[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; read once, when a Grid is made."""

    timeout: float = _variable("PMM3D_TIMEOUT", 600.0, _seconds,
                               "a number: seconds after which a collective that hangs ends the job; 0: never")
    debug: bool = _variable("PMM3D_DEBUG", False, _switch,
                            "0 or 1: compare the ranks' calls before each collective; look for deadlocks")
    log: bool = _variable("PMM3D_LOG", False, _switch, "0 or 1: log each collective of each rank (logger pmm3d.comm)")
    trace: bool = _variable("PMM3D_TRACE", False, _switch, "0 or 1: keep every collective and GEMM for a Chrome trace")
    check: bool = _variable("PMM3D_CHECK", True, _switch, "0 or 1: compare the ranks' arguments before each operation")
    device_transport: str = _variable("PMM3D_DEVICE_TRANSPORT", "auto", str,
                                      "auto, direct or staged: how device memory reaches MPI")
