"""The BLASes of this machine, and their times for the local GEMMs of a job, on all cores of the node at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from ctypes.util import find_library
from importlib.util import find_spec
from itertools import product
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

KERNELS = (("Haswell", {"avx2", "fma"}), ("SkylakeX", {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}),
           ("Cooperlake", {"avx512f", "avx512vl", "avx512_bf16"}), ("SapphireRapids", {"amx_bf16", "amx_tile"}))
"""Values of OPENBLAS_CORETYPE, and what a CPU must have for each. On other CPUs than x86 OpenBLAS chooses by itself."""
BUNDLED = (("numpy", "numpy.libs"), ("torch", "torch/lib"))
"""Wheels that contain a BLAS, and where."""
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
    def variables(self) -> dict[str, str]:
        """Variables of the environment that select it."""
        return {VARIABLE: self.blas} | ({KERNEL_VARIABLE: self.kernel} if self.kernel else {})

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
    """Return the BLASes that are asked for, or all that are found if none is, each OpenBLAS with its kernels. Of
    equally fast ones the first counts. The processes that load them find out which cannot be used.

    numpy has loaded its OpenBLAS, with a kernel, before a job can choose one: it has no further kernels.
    """
    bundled = _bundled()
    return [Candidate(name, kernel) for name in [*asked] or [*installed(), *bundled] for kernel in (
        "", *(kernels(cpu) if name == SCIPY or OPENBLAS in name and name not in bundled else ()))]


def installed() -> list[str]:
    """Return the BLASes of this machine, for PMM3D_BLAS: SciPy's, MKL of the extra, those that the loader finds."""
    found = [SCIPY, MKL] if mkl_file() else [SCIPY]
    return found + [file for name in OF_SYSTEM if (file := find_library(name))]


def _bundled() -> list[str]:
    places = ((find_spec(package), folder) for package, folder in BUNDLED)
    return [str(path) for spec, folder in places if spec and spec.origin
            for path in sorted((Path(spec.origin).parents[1] / folder).glob("*openblas*.so*"))]


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


class Loaded(NamedTuple):
    """What a candidate turned out to be."""

    candidate: Candidate
    file: str
    name: str
    version: str
    kernel: str
    threads: int

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the environment that select it, whatever kernel is set there."""
        return self.candidate.variables | ({KERNEL_VARIABLE: self.kernel} if self.name == OPENBLAS and self.kernel
                                           else {})


class Findings(NamedTuple):
    """candidates   that can be used, in their order
    absent       the others, with the reason
    times        by candidate and GEMM: seconds
    ranks        processes that multiplied at once
    """

    candidates: list[Loaded]
    absent: dict[Candidate, str]
    times: dict[Candidate, dict[Gemm, float]]
    ranks: int

    def seconds(self, candidate: Candidate, dtype: str = "") -> float:
        """Return the seconds of all GEMMs of the job, or of those of one type."""
        return sum(gemm.times * seconds for gemm, seconds in self.times[candidate].items()
                   if dtype in ("", gemm.dtype))

    @property
    def dtypes(self) -> list[str]:
        """Types of the GEMMs."""
        return list(dict.fromkeys(gemm.dtype for times in self.times.values() for gemm in times))

    def choice(self, dtype: str = "") -> Loaded:
        """Return the fastest in the GEMMs of a type, or in all; the first one of equals."""
        least = min(self.seconds(loaded.candidate, dtype) for loaded in self.candidates)
        return next(loaded for loaded in self.candidates
                    if self.seconds(loaded.candidate, dtype) <= least * (1 + EQUAL))


class WorkerPool:
    """As many processes as ranks, on cores of their own, with one candidate. They end with the stack.

    loaded    what the candidate turned out to be
    problem   why it cannot be used, or ""
    """

    def __init__(self, stack: ExitStack, candidate: Candidate, ranks: int, threads: int, gemms: list[Gemm]):
        available, shapes = sorted(cores()), dict[str, list[tuple[int, int, int]]]()
        for gemm in gemms:
            shapes.setdefault(gemm.dtype, []).append(gemm.shape)
        environ = os.environ | dict.fromkeys(THREAD_COUNTS, str(threads)) | candidate.variables
        self._workers = [stack.enter_context(subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", str(available[rank * threads]), json.dumps(shapes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=environ))
            for rank in range(ranks)]
        self.candidate, self.loaded = candidate, Loaded(candidate, "", "", "", "", 0)
        try:
            found = [self._read(worker) for worker in self._workers]
        except Pmm3dError as error:
            found = [{"error": str(error)}]
        self.problem = found[0].get("error", "")
        if not self.problem:
            self.loaded = Loaded(candidate, **found[0])

    def measure(self, gemm: Gemm) -> float:
        """Return the seconds of a GEMM on the slowest rank."""
        request = json.dumps((gemm.dtype, gemm.shape, gemm.form)) + "\n"
        for worker in self._workers:
            with suppress(BrokenPipeError):  # of a process that ended, as `_read` then says
                worker.stdin.write(request.encode())  # type: ignore[union-attr]
        return max(self._read(worker) for worker in self._workers)

    def _read(self, worker: subprocess.Popen[bytes]) -> Any:
        if not (line := worker.stdout.readline()):  # type: ignore[union-attr]
            said = worker.stderr.read().decode(errors="replace").strip().split("\n")  # type: ignore[union-attr]
            raise Pmm3dError(f"{self.candidate}: its process ended: {said[-1] or 'without a message'}")
        return json.loads(line)


def measure(found: list[Candidate], gemms: list[Gemm], ranks: int, threads: int,
            tell: Callable[[str, int], None]) -> Findings:
    """Time each GEMM with every candidate, in turns; the medians of the rounds count.

    tell   tell(what, points done), of ROUNDS * len(found) * len(gemms)

    Raises Pmm3dError if no candidate can be used.
    """
    tell("looking for BLASes", 0)
    with ExitStack() as stack:
        pools = [WorkerPool(stack, candidate, ranks, threads, gemms) for candidate in found]
        absent = {pool.candidate: pool.problem for pool in pools if pool.problem}
        # A kernel that is chosen anyway, or a second name, is the same again.
        here = {(pool.loaded.file, pool.loaded.kernel): pool for pool in reversed(pools) if not pool.problem}
        used = [pool for pool in pools if pool in here.values()]
        if not used:
            raise Pmm3dError(f"no BLAS that was asked for is here: {'; '.join(absent.values())}")
        samples: dict[tuple[Candidate, Gemm], list[float]] = {}
        for _, gemm, pool in product(range(ROUNDS), gemms, used):
            tell(f"{pool.candidate}: {'x'.join(map(str, gemm.shape))} {gemm.dtype}", 1)
            pool.measure(gemm)  # wakes the cores, which waited for other processes
            samples.setdefault((pool.candidate, gemm), []).append(pool.measure(gemm))
        times = {pool.candidate: {gemm: median(samples[pool.candidate, gemm]) for gemm in gemms} for pool in used}
        return Findings([pool.loaded for pool in used], absent, times, ranks)
