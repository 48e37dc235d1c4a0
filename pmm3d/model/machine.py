"""The machine of this process: CPU, BLAS and kernel, cores, memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..processor import AVX512 as AVX512
from ..processor import Blas as Blas
from ..processor import Cpu as Cpu
from ..processor import better_kernel as better_kernel
from ..processor import cpu as cpu
from ..processor import loaded_blas
from ..text import counted, in_bytes
from ..thread_counts import THREAD_COUNTS as THREAD_COUNTS
from ..thread_counts import cores as cores
from .environment import tasks_on_node


def set_blas_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Select OpenBLAS's kernel unless the user selected one. Call this before numpy is loaded, because OpenBLAS reads
    the variable once."""
    kernel = better_kernel(cpu())
    if kernel:
        environment.setdefault("OPENBLAS_CORETYPE", kernel)


def share_cores(environment: MutableMapping[str, str] = os.environ) -> str:
    """Set the number of BLAS threads to this rank's share of the node's cores, unless the environment sets a number.

    Return a description of the choice, or "" if nothing was set. Call this before numpy is loaded.
    """
    ranks, variable = tasks_on_node(environment)
    if ranks < 2 or any(map(environment.get, THREAD_COUNTS)):
        return ""
    of_job, own = cores_of_job(variable, environment.get("SLURM_CPUS_ON_NODE", "")), len(cores())
    threads = max(1, min(own, of_job // ranks))
    if threads == own:
        return ""
    environment.update(dict.fromkeys(THREAD_COUNTS, str(threads)))
    return (
        f"{counted(ranks, 'rank')} share {counted(of_job, 'core')} here, and the environment sets no number of "
        f"BLAS threads: {threads} a rank ({', '.join(THREAD_COUNTS)})"
    )


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of cores of this node that all ranks of the job may use. Outside a launcher: the number of
    cores of this process. Not collective."""
    _, variable = tasks_on_node(environment)
    return cores_of_job(variable, environment.get("SLURM_CPUS_ON_NODE", "")) if variable else len(cores())


def cores_of_job(variable: str, limit: str = "", processes: str = "/proc") -> int:
    """Return the number of cores of this node that the launcher of this process may use.

    variable   a variable of the ranks' environment. The launcher is the nearest ancestor process without this variable
    limit      the largest result, if it is a number
    """
    allowed, parent = cores(), _launcher(variable, processes, os.getppid())
    with suppress(OSError, AttributeError):
        allowed |= os.sched_getaffinity(parent)
    return min(len(allowed), int(limit)) if limit.isdecimal() else len(allowed)


@lru_cache(maxsize=4)
def _launcher(variable: str, processes: str, parent: int) -> int:
    """Return the nearest ancestor process without this variable, from the parent of this process on."""
    with suppress(OSError, ValueError, IndexError):
        while f"\0{variable}=" in "\0" + Path(f"{processes}/{parent}/environ").read_text(errors="replace"):
            parent = int(Path(f"{processes}/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    return parent


def blas_of(library: Any) -> Blas:
    """Return the BLAS that multiplies a library's arrays, and load it if necessary.

    On a device this is cuBLAS, which has no threads. On the host, torch uses its own BLAS unless PMM3D_BLAS names
    another. All other arrays are multiplied by the BLAS of `pmm3d.arrays.blas_choice`.
    """
    if not library.on_host:
        return _cublas(library)
    file = library.blas_file
    if library.name != "torch" or file:
        return loaded_blas(file)
    torch = library.xp
    name = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return Blas(
        f"{name[1] if name else 'BLAS'} of torch",
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )


def _cublas(library: Any) -> Blas:
    """Return cuBLAS with the CUDA version of torch's build, or with the version that cupy reports."""
    if library.name == "torch":
        return Blas("cuBLAS", f"of CUDA {library.xp.version.cuda}, torch {library.xp.__version__}", "", 0)
    cuda = library.xp.cuda
    number = cuda.cublas.getVersion(cuda.device.get_cublas_handle())
    return Blas("cuBLAS", f"{number // 10000}.{number // 100 % 100}.{number % 100}", "", 0)


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_share(rollup: str = "/proc/self/smaps_rollup") -> int:
    """Return `peak_memory` with this process's share of shared pages only. In the sum over the processes of a node,
    each page counts once."""
    try:
        with open(rollup) as lines:
            sizes = {
                line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("Rss:", "Pss:"))
            }
        return max(0, peak_memory() - sizes["Rss"] + sizes["Pss"])
    except (OSError, KeyError):
        return peak_memory()


def available_memory(meminfo: str = "/proc/meminfo") -> int:
    """Return the bytes that programs can still allocate on this node, at most the job's limit; 0 if unknown."""
    limit = cgroup_limit("memory.max")
    try:
        with open(meminfo) as lines:
            free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return free if limit is None else min(free, int(limit))
    except (OSError, StopIteration):
        return 0


def lack_of_memory(what: str, nbytes: int, free: int, host: str) -> str:
    """Return the beginning of a message if a rank needs more bytes than are free for it on its host, otherwise "".

    free   free bytes for each rank of the host; 0: unknown

        >>> lack_of_memory("the product", 2**31, 2**30, "n7")
        'the product is predicted to take 2 GiB on a rank; host n7 has 1 GiB free for each of its ranks'
    """
    return (
        (
            f"{what} is predicted to take {in_bytes(nbytes)} on a rank; host {host} has {in_bytes(free)} free for each "
            "of its ranks"
        )
        if 0 < free < nbytes
        else ""
    )


def cgroup_limit(file: str, own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """Return the tightest limit in a file of the control groups (version 2) of this process, or None without a limit.

    file   "cpu.max", a number of cores, or "memory.max", in bytes
    """
    limits, inner = [], "/"
    with suppress(OSError, StopIteration):
        inner = next(line.strip()[3:] for line in Path(own).read_text().splitlines() if line.startswith("0::"))
    for group in (Path(root + inner), *Path(root + inner).parents):
        with suppress(OSError, ValueError):
            amount, *period = map(int, (group / file).read_text().split())
            limits.append(amount / period[0] if period else amount)
    return min(limits, default=None)


def resident_memory() -> int:
    """Return the resident size of this process in bytes; 0 if it is unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
