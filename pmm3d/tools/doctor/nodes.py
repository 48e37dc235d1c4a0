"""Hosts and the ranks on them, cores, BLAS, memory."""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from threadpoolctl import threadpool_limits

from ...arrays import NumpyLibrary
from ...arrays.blas_choice import blas_here, is_measured
from ...model import machine
from ...text import MOST_HOSTS, counted, in_bytes, names_in_words, ranks_in_words
from ..timing import gemm_rate
from .finding import Finding, ranks_by, spread, unlike_first
from .session import Session

GEMM = 768, 768, 768
"""Shape that reaches the full rate of a core within milliseconds."""
SLOW_RANK = 0.6
"""Share of the median rate of all ranks below which a rank is reported as slow."""
SHM_SPARE, SHM_PER_RANK = 2**26, 2**24
"""Bytes of /dev/shm that an MPI may need, in total and for each rank."""
LEAST_MEMORY = 2**30
"""Bytes per rank below which the check warns."""


def judge_hosts(finding: Finding, facts: list[None], hosts: list[str]) -> None:
    placed, counts = ranks_by(hosts), Counter(hosts)
    low, high = min(counts.values()), max(counts.values())
    if any(ranks[-1] - ranks[0] >= len(ranks) for ranks in placed.values()):
        finding.warn(
            "neighbouring ranks are on different hosts, so the x axis, with the most bytes, uses the network",
            "srun --distribution=block:block; Open MPI: mpiexec --map-by slot; MPICH: mpiexec -ppn N",
        )
    if high > low:
        sparse = names_in_words(host for host, count in counts.items() if count < high)
        finding.warn(
            f"from {low} to {high} ranks on a host (fewer on {sparse}): all ranks wait for the fullest host",
            "srun --ntasks-per-node=N; mpiexec -ppn N or --map-by ppr:N:node",
        )
    each = names_in_words((f"{host} ({count})" for host, count in counts.items()), MOST_HOSTS)
    finding.found = f"{counted(len(hosts), 'rank')} on {counted(len(placed), 'host')}: {each}"
    finding.figures = {"ranks_per_host": dict(counts)}


class Node(NamedTuple):
    """Facts of one rank about its node. Memory is in bytes.

    cores, of_host       cores that the rank may run on; number of cores of the node
    quota, threads       CPU limit of the container or job, in cores; threads of the BLAS
    available, limit     free memory, and memory limit, of the container or job, or of the node
    shm_size, shm_free   size and free space of /dev/shm
    locked, rdma         limit of locked memory, -1 for no limit; whether there is an RDMA network
    """

    cores: frozenset[int]
    of_host: int
    quota: float | None
    threads: int
    available: int
    limit: float | None
    shm_size: int
    shm_free: int
    locked: int
    rdma: bool


def gather_node(session: Session) -> Node:
    shm_size = shm_free = 0
    with suppress(OSError):
        shm_size, _, shm_free = shutil.disk_usage("/dev/shm")
    threads = blas_here().threads
    return Node(
        machine.cores(),
        os.cpu_count() or 1,
        machine.cgroup_limit("cpu.max"),
        threads,
        machine.available_memory(),
        machine.cgroup_limit("memory.max"),
        shm_size,
        shm_free,
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        any(Path("/sys/class/infiniband").glob("*")),
    )


def crowded_hosts(cores: list[frozenset[int]], hosts: list[str]) -> list[str]:
    """Return the hosts with more ranks than cores. Ranks take turns there, so times measured there are not reliable."""
    return [
        host
        for host, ranks in ranks_by(hosts).items()
        if len(frozenset[int]().union(*(cores[rank] for rank in ranks))) < len(ranks)
    ]


def judge_cores(finding: Finding, facts: list[Node], hosts: list[str]) -> None:
    """Judge each host: ranks that share cores while others are free, more ranks or threads than cores, idle cores."""
    figures: dict[str, dict[str, Any]] = {}
    for host, ranks in ranks_by(hosts).items():
        here = {rank: facts[rank] for rank in ranks}
        usable = len(frozenset[int]().union(*(fact.cores for fact in here.values())))
        _judge_binding(finding, host, here)
        _judge_load(finding, host, list(here.values()), usable)
        figures[host] = {
            "ranks": len(ranks),
            "cores": usable,
            "threads_per_rank": facts[ranks[0]].threads,
            "cores_per_rank": min(len(fact.cores) for fact in here.values()),
            "cores_of_host": facts[ranks[0]].of_host,
            "quota_cores": facts[ranks[0]].quota,
        }
    first = figures[hosts[0]]
    bound = "bound to" if first["cores_per_rank"] < first["cores"] else "free to use"
    finding.found = (
        f"{counted(first['ranks'], 'rank')} on {first['cores']} of {first['cores_of_host']} cores, each "
        f"{bound} {first['cores_per_rank']}, with {counted(first['threads_per_rank'], 'thread')}"
        + f" ({hosts[0]})"
        * (len(figures) > 1)
    )
    finding.figures = {"hosts": figures}


def _judge_binding(finding: Finding, host: str, here: dict[int, Node]) -> None:
    of_host = max(fact.of_host for fact in here.values())
    fair = math.ceil(len(here) / of_host)
    for allowed in sorted({fact.cores for fact in here.values()}, key=sorted):
        inside = [rank for rank, fact in here.items() if fact.cores <= allowed]
        if len(inside) > fair * len(allowed):
            cores = f"core{'s' * (len(allowed) > 1)} {', '.join(map(str, sorted(allowed)[:8]))}"
            finding.fail(
                f"{host}: {ranks_in_words(inside)} share {cores}, of {of_host} on that host",
                "bind each rank to cores of its own: srun --cpu-bind=cores -c CORES_PER_RANK; Open MPI: "
                "mpiexec --bind-to core; MPICH: mpiexec -bind-to core; and ask the batch system for as many "
                "cores as ranks. In two jobs on one node: --bind-to none",
            )
            return


def _judge_load(finding: Finding, host: str, here: list[Node], usable: int) -> None:
    ranks, threads, quota = len(here), sum(fact.threads for fact in here), here[0].quota
    fit = f"set OPENBLAS_NUM_THREADS, OMP_NUM_THREADS and MKL_NUM_THREADS to {max(1, usable // ranks)}"
    if ranks > usable:
        finding.warn(
            f"{host}: {counted(ranks, 'rank')} on {counted(usable, 'core')}; they take turns",
            "fewer ranks (-n), or more cores from the batch system",
        )
    elif threads > usable:
        threads_of_ranks = f"{counted(threads, 'BLAS thread')} of {counted(ranks, 'rank')}"
        finding.warn(f"{host}: {threads_of_ranks} on {counted(usable, 'core')}", fit)
    elif 2 * threads <= usable and ranks > 1:
        finding.note(
            f"{host}: {threads} BLAS threads leave {usable - threads} of {usable} cores idle", f"more ranks, or {fit}"
        )
    if quota is not None and quota < min(threads, usable) - 0.5:
        finding.warn(
            f"{host}: the container or job may use {quota:g} cores' worth of time, for {counted(threads, 'thread')}",
            f"raise the limit (docker run --cpus, Slurm -c), or start {int(quota) or 1}",
        )


class BlasRates(NamedTuple):
    """Facts of one rank. Rates are in GFLOP/s.

    exported    OPENBLAS_CORETYPE when the process started, or ""; the command pmm3d sets it later
    alone       rate of one core while the other ranks of the host sleep; None except on the first rank of a host
    together    rate of one core while all ranks multiply
    """

    blas: machine.Blas
    processor: machine.Cpu
    exported: str
    alone: float | None
    together: float
    cores: frozenset[int]


def gather_blas(session: Session) -> BlasRates:
    blas = blas_here()
    alone = core_rate() if session.is_first_here else None
    session.barrier(doze=True)
    return BlasRates(blas, machine.cpu(), at_start("OPENBLAS_CORETYPE"), alone, core_rate(), machine.cores())


def at_start(name: str) -> str:
    """Return the value of a variable when this process started, or ""."""
    with suppress(OSError):
        for each in Path("/proc/self/environ").read_bytes().split(b"\0"):
            if each.startswith(f"{name}=".encode()):
                return os.fsdecode(each).partition("=")[2]
        return ""
    return os.environ.get(name, "")


def core_rate() -> float:
    """Return the GFLOP/s of a float64 GEMM on one thread."""
    with threadpool_limits(1):
        return gemm_rate(NumpyLibrary(), "float64", GEMM) / 1e9


def judge_blas(finding: Finding, facts: list[BlasRates], hosts: list[str]) -> None:
    first = facts[0]
    blas, processor = first.blas, first.processor
    advised = {
        advice for fact in facts if (advice := fact.blas.advice(fact.processor, fact.exported)) and not is_measured()
    }
    for advice in sorted(advised):
        text, _, remedy = advice.partition(": ")
        finding.warn(text, remedy)
    kernel = machine.better_kernel(processor)
    if kernel and not (advised or first.exported or is_measured()) and blas.name == "openblas":
        finding.note(
            f"OpenBLAS itself would choose a slower kernel for this CPU; the command pmm3d selects {kernel}",
            f"for programs of your own: export OPENBLAS_CORETYPE={kernel}",
        )
    if blas.name == "unknown":
        finding.warn("no known BLAS is loaded", "install scipy from PyPI or conda-forge, which carry OpenBLAS or MKL")
    elif unlike_first([fact.blas for fact in facts]):
        finding.warn(
            "the ranks' BLAS, kernels or threads differ",
            "one environment, and the same variables, on all nodes; nodes of one kind (srun --constraint)",
        )
    alone, together = [fact.alone for fact in facts if fact.alone], [fact.together for fact in facts]
    _judge_rates(finding, facts, hosts, max(alone))
    finding.found = (
        f"{blas.name} {blas.version}, kernel {blas.kernel or 'unknown'}, on {processor.name}; one core "
        f"alone {spread(alone)} GFLOP/s, all ranks at once {spread(together)}"
    )
    finding.figures = asdict(blas) | {
        "cpu": processor.name,
        "core_gflops": dict(zip(ranks_by(hosts), alone)),
        "together_gflops": together,
    }


def _judge_rates(finding: Finding, facts: list[BlasRates], hosts: list[str], alone: float) -> None:
    """Report slow ranks on hosts with a core for each rank."""
    crowded = crowded_hosts([fact.cores for fact in facts], hosts)
    roomy = {rank: fact.together for rank, fact in enumerate(facts) if hosts[rank] not in crowded}
    if not roomy:
        return
    middle = sorted(roomy.values())[len(roomy) // 2]
    slow = [rank for rank, rate in roomy.items() if rate < SLOW_RANK * middle]
    if slow:
        where = names_in_words(hosts[rank] for rank in slow)
        finding.warn(
            f"{ranks_in_words(slow)} on {where}: less than {SLOW_RANK:.0%} of the median rate of a GEMM",
            f"check whether other programs run there (top); else leave the node out (srun --exclude={where})",
        )
    if len(hosts) > 1 and middle < SLOW_RANK * alone:
        finding.warn(
            f"with all ranks at once, a rank reaches {middle / alone:.0%} of the rate of one core alone",
            "ranks share physical cores (srun --hint=nomultithread), or other programs run here",
        )


def judge_memory(finding: Finding, facts: list[Node], hosts: list[str]) -> None:
    shares = {}
    for host, ranks in ranks_by(hosts).items():
        fact = facts[ranks[0]]
        shares[host] = fact.available // len(ranks)
        if 0 < shares[host] < LEAST_MEMORY:
            finding.warn(
                f"{host}: {in_bytes(shares[host])} of memory a rank",
                "fewer ranks on a node, or more memory from the batch system (sbatch --mem=0: all of the "
                "node's); max_workspace= in products",
            )
        wanted = SHM_SPARE + len(ranks) * SHM_PER_RANK
        if len(ranks) > 1 and fact.shm_free < wanted:
            finding.warn(
                f"{host}: /dev/shm has {in_bytes(fact.shm_free)} free for {len(ranks)} ranks; MPI keeps its "
                f"shared memory there and may want {in_bytes(wanted)}",
                "docker run --shm-size=1g; remove what dead jobs left there (ls /dev/shm); Open MPI "
                "elsewhere: OMPI_MCA_btl_sm_backing_directory=/tmp",
            )
        if fact.rdma and 0 <= fact.locked < LEAST_MEMORY:
            finding.warn(
                f"{host}: only {in_bytes(fact.locked)} of memory may be locked, which RDMA networks need",
                "ulimit -l unlimited, or the site's limits.conf; in slurmd's unit LimitMEMLOCK=infinity",
            )
    first = facts[0]
    limited = f" (limited to {in_bytes(first.limit)} a node)" if first.limit else ""
    finding.found = (
        f"{in_bytes(min(shares.values()))} a rank{limited} on the fullest host; /dev/shm "
        f"{in_bytes(first.shm_free)} free of {in_bytes(first.shm_size)}"
    )
    finding.figures = {
        "available_bytes_per_rank": shares,
        "shm_free_bytes": first.shm_free,
        "shm_bytes": first.shm_size,
        "limit_bytes": first.limit,
        "locked_bytes": first.locked,
    }
