"""The BLASes of this machine, and their times for the local GEMMs of a job, while all cores of the node compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from ctypes.util import find_library
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from socket import gethostname
from statistics import median
from typing import Any, NamedTuple

from ....arrays.blas_choice import KERNEL_VARIABLE, VARIABLE
from ....arrays.blas_library import MKL, SCIPY, mkl_file
from ....comm import Auto, Grid, chosen_shape
from ....errors import OutOfMemoryError, Pmm3dError
from ....layout import Layout, itemsize
from ....model.machine import THREAD_COUNTS, Cpu, available_memory, cores, lack_of_memory
from ....model.machines import flop_of
from ....model.ranking import best_grid
from ....product import DistMatrix, matmul
from . import worker

KERNELS = (
    ("Haswell", {"avx2", "fma"}),
    ("SkylakeX", {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}),
    ("Cooperlake", {"avx512f", "avx512vl", "avx512_bf16"}),
    ("SapphireRapids", {"amx_bf16", "amx_tile"}),
)
"""Values of OPENBLAS_CORETYPE, and the CPU flags that each needs. On CPUs other than x86, OpenBLAS chooses."""
OF_SYSTEM = ("mkl_rt", "openblas", "blis", "flexiblas", "sci_gnu_mp", "nvpl_blas_lp64_gomp", "armpl_lp64_mp")
"""Libraries that the loader may find, from the system or, by LD_LIBRARY_PATH, from environment modules."""
OPENBLAS = "openblas"
MOST_GEMMS = 12
"""Largest number of timed GEMMs of a job: the GEMMs with the most operations."""
ROUNDS = 5
EQUAL = 0.01
"""Relative difference of times below which candidates are equal. Then the first of them is chosen."""


class Candidate(NamedTuple):
    """A BLAS. blas: value of PMM3D_BLAS; kernel: value of OPENBLAS_CORETYPE, "" for OpenBLAS's own choice."""

    blas: str
    kernel: str = ""

    @property
    def name(self) -> str:
        """The BLAS without its folder."""
        return Path(self.blas).name

    def __str__(self) -> str:
        return f"{self.name} ({self.kernel})" if self.kernel else self.name


def kernels(cpu: Cpu) -> list[str]:
    """Return the kernels of OpenBLAS that a CPU can run.

    >>> kernels(Cpu("AuthenticAMD", "a CPU", frozenset({"avx2", "fma"})))
    ['Haswell']
    """
    return [name for name, needed in KERNELS if needed <= cpu.flags]


def candidates(asked: Iterable[str], cpu: Cpu) -> list[Candidate]:
    """Return the BLASes in `asked`, or all that are found if it is empty, each OpenBLAS with its kernels. Of equally
    fast candidates the first one is chosen. Whether a BLAS can be used is found when a process loads it.

    numpy's own OpenBLAS has one kernel only, because numpy loads it before a job can choose.
    """
    numpy = find_spec("numpy")
    wheels = Path(numpy.origin).parents[1] if numpy and numpy.origin else Path()
    bundled = sorted(map(str, wheels.glob("numpy.libs/*openblas*.so*")))
    of_system = filter(None, map(find_library, OF_SYSTEM))
    names = [*asked] or [SCIPY, *[MKL] * bool(mkl_file()), *of_system, *bundled]
    of_openblas = {SCIPY, *(name for name in names if OPENBLAS in name)} - {*bundled}
    return [
        Candidate(name, kernel) for name in names for kernel in ("", *(kernels(cpu) if name in of_openblas else ()))
    ]


class Gemm(NamedTuple):
    """The GEMM C (m, n) += A (m, k) B. form: "n" or "t" for A and B, as in BLAS; times: calls in a product or step."""

    m: int
    n: int
    k: int
    dtype: str
    form: str
    times: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def flop(self) -> float:
        return flop_of(*self.shape, self.dtype)


def of_product(sizes: tuple[int, int, int], dtype: str, ranks: int) -> list[Gemm]:
    """Return the GEMMs of rank 0 in C = A B, on the grid that "auto" would choose without a measured machine."""
    with Grid.dry(best_grid(sizes, ranks)[:3]) as grid:
        m, n, k = sizes
        a = DistMatrix.random(grid, (m, k), seed=1, dtype=dtype)
        b = DistMatrix.random(grid, (k, n), seed=2, dtype=dtype, layout=Layout.B)
        matmul(a, b)
        assert grid.dry_run is not None
        return _counted(grid.dry_run.actions)


def of_training(path: Path, ranks: int) -> list[Gemm]:
    """Return the GEMMs of rank 0 in a step of a configuration, on its grid."""
    from ....nn.training import config
    from ....nn.training.dry_step import step_of

    loaded = config.load(path)
    shape = chosen_shape(loaded.grid.shape, loaded.grid.data, {}, ranks, None, "float32", None)
    if isinstance(shape, Auto):
        raise Pmm3dError('grid.shape = "auto" depends on the speed of the BLAS: name a grid (pmm3d plan ranks them)')
    return _counted(step_of(loaded, shape, ranks).actions)


def _counted(actions: list[Any]) -> list[Gemm]:
    """Return the GEMMs among the actions, counted, in descending order of their operations."""
    times_of = Counter(
        (action.m, action.n, action.k, action.dtype, action.form or "nn") for action in actions if action.what == "gemm"
    )
    gemms = [Gemm(*what, times) for what, times in times_of.items()]
    return sorted(gemms, key=lambda gemm: -gemm.flop * gemm.times)[:MOST_GEMMS]


class Timed(NamedTuple):
    """A candidate that can be used: facts about the loaded BLAS, and the seconds of each GEMM."""

    candidate: Candidate
    file: str
    name: str
    version: str
    kernel: str
    threads: int
    times: dict[Gemm, float]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that select this BLAS and kernel."""
        return {VARIABLE: self.candidate.blas} | (
            {KERNEL_VARIABLE: self.kernel} if self.name == OPENBLAS and self.kernel else {}
        )

    def seconds(self, dtype: str = "") -> float:
        """Return the seconds of all GEMMs of the job, or of the GEMMs of one type."""
        return sum(gemm.times * seconds for gemm, seconds in self.times.items() if dtype in ("", gemm.dtype))


def choice(timed: Sequence[Timed], dtype: str = "") -> Timed:
    """Return the candidate that is fastest for the GEMMs of a type, or for all GEMMs; the first of equal ones."""
    least = min(each.seconds(dtype) for each in timed)
    return next(each for each in timed if each.seconds(dtype) <= least * (1 + EQUAL))


class WorkerPool:
    """A process for each rank, on its own cores, with one candidate. The processes end with `stack`.

    loaded    facts about the BLAS, from `worker.load`
    problem   reason why the BLAS cannot be used, or ""
    """

    def __init__(self, stack: ExitStack, candidate: Candidate, ranks: int, threads: int, gemms: Sequence[Gemm]):
        available = sorted(cores())
        variables = (
            dict.fromkeys(THREAD_COUNTS, str(threads))
            | {VARIABLE: candidate.blas}
            | ({KERNEL_VARIABLE: candidate.kernel} if candidate.kernel else {})
        )
        self._workers = [
            stack.enter_context(
                ProcessPoolExecutor(
                    1, get_context("spawn"), worker.start, (variables, available[rank * threads : (rank + 1) * threads])
                )
            )
            for rank in range(ranks)
        ]
        self.candidate, self.problem = candidate, ""
        self.loaded: dict[str, Any] = {}
        shapes = {gemm.dtype: [each.shape for each in gemms if each.dtype == gemm.dtype] for gemm in gemms}
        try:
            self.loaded = self._all(worker.load, shapes)[0]
        except (Pmm3dError, MemoryError) as error:
            self.problem = str(error)

    def measure(self, gemm: Gemm) -> float:
        """Return the seconds of a GEMM on the slowest rank."""
        return max(self._all(worker.seconds, gemm.dtype, gemm.shape, gemm.form))

    def _all(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in all processes at once. Return the results."""
        calls = [process.submit(work, *arguments) for process in self._workers]
        try:
            return [call.result() for call in calls]
        except BrokenProcessPool:
            raise Pmm3dError(f"{self.candidate}: its process ended") from None


def measure(
    tried: Sequence[Candidate], gemms: Sequence[Gemm], ranks: int, threads: int, tell: Callable[[str, int], None]
) -> tuple[list[Timed], dict[Candidate, str]]:
    """Time each GEMM with every candidate in turn, and take the medians of the rounds. Return the candidates that can
    be used, in their order, and the reasons why the others cannot.

    tell   tell(what, points done), of ROUNDS * len(found) * len(gemms)

    Raises Pmm3dError if no candidate can be used, or if the memory of this node cannot hold the operands of all
    processes.
    """
    operands: dict[str, int] = {}  # of the largest GEMM of each type; smaller ones use parts of its operands
    for m, n, k, dtype, *_ in gemms:
        operands[dtype] = max(operands.get(dtype, 0), itemsize(dtype) * (m * k + k * n + m * n))
    free = available_memory() // (ranks * len(tried))
    if lack := lack_of_memory("a BLAS with its operands", sum(operands.values()), free, gethostname()):
        raise OutOfMemoryError(
            f"{lack} and {len(tried)} BLASes. Name fewer with --blas, or give smaller sizes or more --ranks"
        )
    tell("looking for BLASes", 0)
    with ExitStack() as stack:
        pools = [WorkerPool(stack, candidate, ranks, threads, gemms) for candidate in tried]
        absent = {pool.candidate: pool.problem for pool in pools if pool.problem}
        # If several candidates have the same file and kernel, only the first one is timed.
        here = {(pool.loaded["file"], pool.loaded["kernel"]): pool for pool in reversed(pools) if pool.loaded}
        used = [pool for pool in pools if pool in here.values()]
        if not used:
            raise Pmm3dError(f"no BLAS can be used: {'; '.join(absent.values())}")
        samples: dict[tuple[Candidate, Gemm], list[float]] = {}
        for _, gemm, pool in product(range(ROUNDS), gemms, used):
            tell(f"{pool.candidate}: {'x'.join(map(str, gemm.shape))} {gemm.dtype}", 1)
            pool.measure(gemm)  # wakes the cores, which waited for other processes
            samples.setdefault((pool.candidate, gemm), []).append(pool.measure(gemm))
        return [
            Timed(pool.candidate, **pool.loaded, times={gemm: median(samples[pool.candidate, gemm]) for gemm in gemms})
            for pool in used
        ], absent
