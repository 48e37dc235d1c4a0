"""Hosts and the ranks on them, cores, BLAS, memory."""

from __future__ import annotations

import math
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ...comm.words import in_bytes, ranks_in_words
from ...model import machine
from .finding import Finding, Problems, by_host, names_in_words, spread
from .session import Session

GEMM_SIZE = 768
GEMM_REPEATS = 5
SLOW_RANK = 0.6
"""Share of the median rate of all ranks below which a rank counts as slow."""
SHM_SPARE = 2**26
SHM_PER_RANK = 2**24
"""Bytes of /dev/shm that an MPI may want for itself, and for each rank."""
LEAST_MEMORY = 2**30


def judge_hosts(facts: list, hosts: list[str]) -> Finding:
    problems = Problems()
    placed = by_host(hosts)
    counts = [len(ranks) for ranks in placed.values()]
    if any(ranks != list(range(ranks[0], ranks[0] + len(ranks))) for ranks in placed.values()):
        problems.warn("neighbouring ranks are on different hosts, so the x axis, which talks most, crosses the network",
                      "srun --distribution=block:block; Open MPI: mpiexec --map-by slot; MPICH: mpiexec -ppn N")
    if max(counts) > min(counts):
        sparse = [host for host, ranks in placed.items() if len(ranks) < max(counts)]
        problems.warn(f"from {min(counts)} to {max(counts)} ranks on a host (fewer on {names_in_words(sparse)}): the "
                      "fullest host sets the pace", "srun --ntasks-per-node=N; mpiexec -ppn N or --map-by ppr:N:node")
    each = names_in_words([f"{host} ({len(ranks)})" for host, ranks in placed.items()], 8)
    return Finding("hosts", f"{len(hosts)} rank{'s' * (len(hosts) > 1)} on {len(placed)} "
                            f"host{'s' * (len(placed) > 1)}: {each}", tuple(problems),
                   {"ranks_per_host": {host: len(ranks) for host, ranks in placed.items()}})


@dataclass(frozen=True)
class Cores:
    """allowed: the cores this rank may run on; of_host: how many the machine has; quota: cores' worth of time that a
    container or job may use, if limited; threads: of the BLAS."""

    allowed: frozenset[int]
    of_host: int
    quota: float | None
    threads: int


def gather_cores(session: Session) -> Cores:
    return Cores(machine.cores(), os.cpu_count() or 1, cpu_quota(), machine.loaded_blas().threads)


def cgroups(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> list[Path]:
    """The control groups (version 2) of this process, innermost first; where there are none, the root."""
    try:
        inner = next(line.strip()[3:] for line in Path(own).read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        inner = "/"
    here = Path(root + inner)
    return [path for path in (here, *here.parents) if path.is_relative_to(root) and path.is_dir()]


def _tightest(file: str, read, groups: list[Path] | None = None) -> float | None:
    """The least of the limits that the control groups set in a file of that name; None if it is "max" everywhere."""
    limits = []
    for group in cgroups() if groups is None else groups:
        try:
            limits.append(read((group / file).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits, default=None)


def cpu_quota(groups: list[Path] | None = None) -> float | None:
    """Cores' worth of time that the tightest control group allows."""

    def cores(text: str) -> float:
        quota, period = text.split()
        return int(quota) / int(period)

    return _tightest("cpu.max", cores, groups)


def judge_cores(facts: list[Cores], hosts: list[str]) -> Finding:
    """Per host: ranks that share cores though others are free, more ranks or threads than cores, cores left idle."""
    problems = Problems()
    told = {}
    for host, ranks in by_host(hosts).items():
        here = {rank: facts[rank] for rank in ranks}
        usable = frozenset().union(*(fact.allowed for fact in here.values()))
        _judge_binding(problems, host, here)
        _judge_load(problems, host, here, usable)
        told[host] = {"ranks": len(ranks), "cores": len(usable), "threads_per_rank": facts[ranks[0]].threads,
                      "cores_per_rank": min(len(fact.allowed) for fact in here.values()),
                      "cores_of_host": facts[ranks[0]].of_host, "quota_cores": facts[ranks[0]].quota}
    host, first = next(iter(told.items()))
    bound = "bound to" if first["cores_per_rank"] < first["cores"] else "free to use"
    found = (f"{first['ranks']} rank{'s' * (first['ranks'] > 1)} on {first['cores']} of {first['cores_of_host']} "
             f"cores, each {bound} {first['cores_per_rank']}, with {first['threads_per_rank']} "
             f"thread{'s' * (first['threads_per_rank'] != 1)}")
    return Finding("cores", found + (f" ({host})" if len(told) > 1 else ""), tuple(problems[:6]), {"hosts": told})


def _judge_binding(problems: Problems, host: str, here: dict[int, Cores]) -> None:
    of_host = max(fact.of_host for fact in here.values())
    fair = math.ceil(len(here) / of_host)
    for allowed in sorted({fact.allowed for fact in here.values()}, key=sorted):
        inside = [rank for rank, fact in here.items() if fact.allowed <= allowed]
        if len(inside) > fair * len(allowed):
            cores = f"core{'s' * (len(allowed) > 1)} {', '.join(map(str, sorted(allowed)[:8]))}"
            problems.fail(f"{host}: {ranks_in_words(inside)} share {cores}, of {of_host} on that host",
                          "bind each rank to cores of its own: srun --cpu-bind=cores -c CORES_PER_RANK; Open MPI: "
                          "mpiexec --bind-to core; MPICH: mpiexec -bind-to core; and ask the batch system for as many "
                          "cores as ranks. In two jobs on one node: --bind-to none")
            return


def _judge_load(problems: Problems, host: str, here: dict[int, Cores], usable: frozenset[int]) -> None:
    first = next(iter(here.values()))
    ranks, threads = len(here), sum(fact.threads for fact in here.values())
    fitting = max(1, len(usable) // ranks)
    variables = "OPENBLAS_NUM_THREADS, OMP_NUM_THREADS and MKL_NUM_THREADS"
    if ranks > len(usable):
        problems.warn(f"{host}: {ranks} ranks on {len(usable)} core{'s' * (len(usable) > 1)}; they take turns",
                      "fewer ranks (-n), or more cores from the batch system")
    elif threads > len(usable):
        problems.warn(f"{host}: {threads} BLAS threads of {ranks} ranks on {len(usable)} cores",
                      f"set {variables} to {fitting}")
    elif 2 * threads <= len(usable) and ranks > 1:
        problems.note(f"{host}: {threads} BLAS threads leave {len(usable) - threads} of {len(usable)} cores idle",
                      f"more ranks, or set {variables} to {fitting}")
    if first.quota is not None and first.quota < min(threads, len(usable)) - 0.5:
        problems.warn(f"{host}: the container or job may use {first.quota:g} cores' worth of time, for {threads} "
                      "threads", f"raise the limit (docker run --cpus, Slurm -c), or start {int(first.quota) or 1}")


@dataclass(frozen=True)
class BlasFacts:
    """alone: GFLOP/s of one core while the other ranks of the host sleep (first rank of each host); together: while all
    ranks multiply. chosen: OPENBLAS_CORETYPE as the process was started with."""

    blas: machine.Blas
    processor: machine.Cpu
    chosen: str
    alone: float | None
    together: float
    allowed: frozenset[int]


def gather_blas(session: Session) -> BlasFacts:
    alone = gemm_rate() if session.is_first_here else None
    session.barrier(doze=True)
    together = gemm_rate()
    return BlasFacts(machine.loaded_blas(), machine.cpu(), at_start("OPENBLAS_CORETYPE"), alone, together,
                     machine.cores())


def at_start(name: str, environ: str = "/proc/self/environ") -> str:
    """A variable as this process was started with: the command pmm3d itself chooses a kernel for OpenBLAS."""
    try:
        variables = Path(environ).read_bytes().split(b"\0")
    except OSError:
        return os.environ.get(name, "")
    return next((text.partition(b"=")[2].decode() for text in variables if text.startswith(f"{name}=".encode())), "")


def gemm_rate(size: int = GEMM_SIZE) -> float:
    """GFLOP/s of a product of float64 on one thread: the best of a few."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    from ...arrays import NumpyLibrary, Workspace

    a, b, c = (np.full((size, size), value) for value in (0.5, 0.25, 0.0))
    times = []
    with threadpool_limits(1):
        for _ in range(GEMM_REPEATS):
            begun = time.perf_counter()
            NumpyLibrary().gemm(a, b, c, 1, 0, Workspace())
            times.append(time.perf_counter() - begun)
    return 2 * size**3 / min(times) / 1e9


def judge_blas(facts: list[BlasFacts], hosts: list[str]) -> Finding:
    problems = Problems()
    first = facts[0]
    advised = {advice for fact in facts if (advice := fact.blas.advice(fact.processor))}
    for advice in sorted(advised):
        problems.warn(advice.partition(":")[0], advice.partition(": ")[2])
    kernel = machine.better_kernel(first.processor)
    if kernel and not advised and first.blas.name == "openblas" and not first.chosen:
        problems.note(f"OpenBLAS takes this CPU for a lesser one; the pmm3d command told it better ({kernel})",
                      f"for programs of your own: export OPENBLAS_CORETYPE={kernel}")
    if first.blas.name == "unknown":
        problems.warn("no known BLAS is loaded", "install scipy from PyPI or conda-forge, which carry OpenBLAS or MKL")
    elif len({fact.blas for fact in facts}) > 1:
        problems.warn("the ranks' BLAS, kernels or threads differ",
                      "one environment, and the same variables, on all nodes; nodes of one kind (srun --constraint)")
    _judge_rates(problems, facts, hosts)
    alone = [fact.alone for fact in facts if fact.alone]
    together = [fact.together for fact in facts]
    found = (f"{first.blas.name} {first.blas.version}, kernel {first.blas.kernel or 'unknown'}, on "
             f"{first.processor.name}; one core alone {spread(alone)} GFLOP/s, all ranks at once {spread(together)}")
    return Finding("BLAS", found, tuple(problems), asdict(first.blas) | {
        "cpu": first.processor.name, "core_gflops": dict(zip(by_host(hosts), alone)), "together_gflops": together})


def _judge_rates(problems: Problems, facts: list[BlasFacts], hosts: list[str]) -> None:
    """Ranks that are slow though they have a core to themselves."""
    placed = by_host(hosts)
    roomy = [rank for ranks in placed.values() for rank in ranks
             if len(frozenset().union(*(facts[one].allowed for one in ranks))) >= len(ranks)]
    rates = sorted(facts[rank].together for rank in roomy)
    if not rates:
        return
    middle = rates[len(rates) // 2]
    slow = [rank for rank in roomy if facts[rank].together < SLOW_RANK * middle]
    if slow:
        where = names_in_words(dict.fromkeys(hosts[rank] for rank in slow))
        problems.warn(f"{ranks_in_words(slow)} on {where} multiply at less than {SLOW_RANK:.0%} of the median rate",
                      f"see whether other programs run there (top); else leave the node out (srun --exclude={where})")
    alone = max(fact.alone for fact in facts if fact.alone)
    if len(hosts) > 1 and middle < SLOW_RANK * alone:
        problems.warn(f"all at once a rank reaches {middle / alone:.0%} of what one core does alone",
                      "ranks share physical cores (srun --hint=nomultithread), or other programs run here")


@dataclass(frozen=True)
class Memory:
    """Bytes. available: of the node; limit: of the container or job; locked: that may be pinned, -1 for any number."""

    available: int
    limit: int | None
    shm_size: int
    shm_free: int
    locked: int
    rdma: bool


def gather_memory(session: Session) -> Memory:
    try:
        shm = os.statvfs("/dev/shm")
        size, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    except OSError:
        size = free = 0
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Memory(machine.available_memory(), memory_limit(), size, free, locked, has_rdma())


def has_rdma(folder: str = "/sys/class/infiniband") -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def memory_limit(groups: list[Path] | None = None) -> int | None:
    """Bytes that the tightest control group allows."""
    return _tightest("memory.max", int, groups)


def judge_memory(facts: list[Memory], hosts: list[str]) -> Finding:
    problems = Problems()
    shares = {}
    for host, ranks in by_host(hosts).items():
        fact = facts[ranks[0]]
        whole = min(filter(None, (fact.available, fact.limit)), default=0)
        shares[host] = whole // len(ranks)
        if 0 < shares[host] < LEAST_MEMORY:
            problems.warn(f"{host}: {in_bytes(shares[host])} of memory a rank",
                          "fewer ranks on a node, or more memory from the batch system (sbatch --mem=0: all of the "
                          "node's); max_workspace= in products")
        wanted = SHM_SPARE + len(ranks) * SHM_PER_RANK
        if len(ranks) > 1 and fact.shm_free < wanted:
            problems.warn(f"{host}: /dev/shm has {in_bytes(fact.shm_free)} free for {len(ranks)} ranks; MPI keeps its "
                          f"shared memory there and may want {in_bytes(wanted)}",
                          "docker run --shm-size=1g; remove what dead jobs left there (ls /dev/shm); Open MPI "
                          "elsewhere: OMPI_MCA_btl_sm_backing_directory=/tmp")
        if fact.rdma and 0 <= fact.locked < LEAST_MEMORY:
            problems.warn(f"{host}: only {in_bytes(fact.locked)} of memory may be locked, which RDMA networks need",
                          "ulimit -l unlimited, or the site's limits.conf; in slurmd's unit LimitMEMLOCK=infinity")
    low, first = min(shares.values()), facts[0]
    limited = f" (limited to {in_bytes(first.limit)} a node)" if first.limit else ""
    found = (f"{in_bytes(low)} a rank{limited} on the fullest host; /dev/shm {in_bytes(first.shm_free)} "
             f"free of {in_bytes(first.shm_size)}")
    return Finding("memory", found, tuple(problems[:6]), {
        "available_bytes_per_rank": shares, "shm_free_bytes": first.shm_free, "shm_bytes": first.shm_size,
        "limit_bytes": first.limit, "locked_bytes": first.locked})
