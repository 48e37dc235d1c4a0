"""The BLASes of this machine, and their times for the local GEMMs of a job, on all cores of the node at once."""

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
from statistics import median
from typing import Any, NamedTuple

from ....arrays.blas_choice import KERNEL_VARIABLE, VARIABLE
from ....arrays.blas_library import MKL, SCIPY, mkl_file
from ....comm import Auto, Grid, chosen_shape
from ....errors import Pmm3dError
from ....layout import Layout
from ....model.machine import THREAD_COUNTS, Cpu, cores
from ....model.machines import flop_of
from ....model.ranking import best_grid
from ....product import DistMatrix, matmul
from . import worker

KERNELS = (("Haswell", {"avx2", "fma"}), ("SkylakeX", {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}),
           ("Cooperlake", {"avx512f", "avx512vl", "avx512_bf16"}), ("SapphireRapids", {"amx_bf16", "amx_tile"}))
"""Values of OPENBLAS_CORETYPE, and what a CPU must have for each. On other CPUs than x86 OpenBLAS chooses by itself."""
OF_SYSTEM = ("mkl_rt", "openblas", "blis", "flexiblas", "sci_gnu_mp", "nvpl_blas_lp64_gomp", "armpl_lp64_mp")
"""Libraries that the loader may find: those of the system, and of environment modules by LD_LIBRARY_PATH."""
OPENBLAS = "openblas"
MOST_GEMMS = 12
"""GEMMs of a job that are timed: those with most operations."""
ROUNDS = 5
EQUAL = 0.01
"""Candidates whose times differ by less are equal: the first in their order is chosen."""


class Candidate(NamedTuple):
    """blas: for PMM3D_BLAS; kernel: for OPENBLAS_CORETYPE, "" for the one that OpenBLAS chooses."""

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
    """Return the BLASes that are asked for, or all that are found if none is, each OpenBLAS with its kernels. The order
    decides between equally fast ones. The processes that load a BLAS find out whether it can be used.

    numpy has loaded its OpenBLAS, with a kernel, before a job can choose one: it has no further kernels.
    """
    numpy = find_spec("numpy")
    wheels = Path(numpy.origin).parents[1] if numpy and numpy.origin else Path()
    bundled = sorted(map(str, wheels.glob("numpy.libs/*openblas*.so*")))
    of_system = filter(None, map(find_library, OF_SYSTEM))
    names = [*asked] or [SCIPY, *[MKL] * bool(mkl_file()), *of_system, *bundled]
    of_openblas = {SCIPY, *(name for name in names if OPENBLAS in name)} - {*bundled}
    return [Candidate(name, kernel) for name in names
            for kernel in ("", *(kernels(cpu) if name in of_openblas else ()))]


class Gemm(NamedTuple):
    """C (m, n) += A (m, k) B, and how often in one product or step. form: "n" or "t" for A and B, as in BLAS."""

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
        raise Pmm3dError('grid.shape = "auto" depends on what the BLAS reaches: name a grid (pmm3d plan ranks them)')
    return _counted(step_of(loaded, shape, ranks).actions)


def _counted(actions: list[Any]) -> list[Gemm]:
    """Equal ones together, those with most operations first."""
    found = Counter((action.m, action.n, action.k, action.dtype, action.form or "nn")
                    for action in actions if action.what == "gemm")
    gemms = [Gemm(*what, times) for what, times in found.items()]
    return sorted(gemms, key=lambda gemm: -gemm.flop * gemm.times)[:MOST_GEMMS]


class Timed(NamedTuple):
    """A candidate that can be used: the BLAS that was loaded, and the seconds of each GEMM."""

    candidate: Candidate
    file: str
    name: str
    version: str
    kernel: str
    threads: int
    times: dict[Gemm, float]

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the environment that select it, whatever kernel is set there."""
        return {VARIABLE: self.candidate.blas} | (
            {KERNEL_VARIABLE: self.kernel} if self.name == OPENBLAS and self.kernel else {})

    def seconds(self, dtype: str = "") -> float:
        """Return the seconds of all GEMMs of the job, or of those of one type."""
        return sum(gemm.times * seconds for gemm, seconds in self.times.items() if dtype in ("", gemm.dtype))


def choice(timed: Sequence[Timed], dtype: str = "") -> Timed:
    """Return the fastest in the GEMMs of a type, or in all; the first one of equals."""
    least = min(each.seconds(dtype) for each in timed)
    return next(each for each in timed if each.seconds(dtype) <= least * (1 + EQUAL))


class WorkerPool:
    """As many processes as ranks, on cores of their own, with one candidate. They end with the stack.

    loaded    facts about the BLAS, from `worker.load`
    problem   why it cannot be used, or ""
    """

    def __init__(self, stack: ExitStack, candidate: Candidate, ranks: int, threads: int, gemms: Sequence[Gemm]):
        available = sorted(cores())
        variables = dict.fromkeys(THREAD_COUNTS, str(threads)) | {VARIABLE: candidate.blas} | (
            {KERNEL_VARIABLE: candidate.kernel} if candidate.kernel else {})
        self._workers = [stack.enter_context(ProcessPoolExecutor(
            1, get_context("spawn"), worker.start, (variables, available[rank * threads : (rank + 1) * threads])))
            for rank in range(ranks)]
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
        """Return what a function returns in each process. All call it at once."""
        calls = [process.submit(work, *arguments) for process in self._workers]
        try:
            return [call.result() for call in calls]
        except BrokenProcessPool:
            raise Pmm3dError(f"{self.candidate}: its process ended") from None


def measure(found: Sequence[Candidate], gemms: Sequence[Gemm], ranks: int, threads: int,
            tell: Callable[[str, int], None]) -> tuple[list[Timed], dict[Candidate, str]]:
    """Time each GEMM with every candidate, in turns; the medians of the rounds count. Return the candidates that can be
    used, in their order, and why the others cannot.

    tell   tell(what, points done), of ROUNDS * len(found) * len(gemms)

    Raises Pmm3dError if no candidate can be used.
    """
    tell("looking for BLASes", 0)
    with ExitStack() as stack:
        pools = [WorkerPool(stack, candidate, ranks, threads, gemms) for candidate in found]
        absent = {pool.candidate: pool.problem for pool in pools if pool.problem}
        # A kernel that is chosen anyway, or a second name, is the same again.
        here = {(pool.loaded["file"], pool.loaded["kernel"]): pool for pool in reversed(pools) if pool.loaded}
        used = [pool for pool in pools if pool in here.values()]
        if not used:
            raise Pmm3dError(f"no BLAS that was asked for is here: {'; '.join(absent.values())}")
        samples: dict[tuple[Candidate, Gemm], list[float]] = {}
        for _, gemm, pool in product(range(ROUNDS), gemms, used):
            tell(f"{pool.candidate}: {'x'.join(map(str, gemm.shape))} {gemm.dtype}", 1)
            pool.measure(gemm)  # wakes the cores, which waited for other processes
            samples.setdefault((pool.candidate, gemm), []).append(pool.measure(gemm))
        return [Timed(pool.candidate, **pool.loaded, times={
            gemm: median(samples[pool.candidate, gemm]) for gemm in gemms}) for pool in used], absent
