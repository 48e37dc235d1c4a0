"""The BLASes of this machine, each with the kernels that its CPU can run."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ....arrays.blas_choice import KERNEL_VARIABLE, VARIABLE
from ....arrays.blas_library import MKL, SCIPY, mkl_file
from ....model.machine import Cpu

KERNELS = (("Haswell", {"avx2", "fma"}), ("SkylakeX", {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}),
           ("Cooperlake", {"avx512f", "avx512vl", "avx512_bf16"}), ("SapphireRapids", {"amx_bf16", "amx_tile"}))
"""OpenBLAS's, by OPENBLAS_CORETYPE, and what a CPU must have for each. Elsewhere than on x86 it chooses by itself."""
BUNDLED = (("numpy", "numpy.libs"), ("torch", "torch/lib"))
"""Wheels that carry a BLAS of their own, and where."""
OF_SYSTEM = ("mkl_rt", "openblas", "blis", "flexiblas", "sci_gnu_mp", "nvpl_blas_lp64_gomp", "armpl_lp64_mp")
"""Libraries that the loader may find: those of the system, and of environment modules by LD_LIBRARY_PATH."""
OPENBLAS = "openblas"


class Candidate(NamedTuple):
    """blas: for PMM3D_BLAS; kernel: for OPENBLAS_CORETYPE, "" for the one that it chooses."""

    blas: str
    kernel: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment, that make it so."""
        return {VARIABLE: self.blas} | ({KERNEL_VARIABLE: self.kernel} if self.kernel else {})

    def __str__(self) -> str:
        name = self.blas if len(self.blas) < 40 else f".../{Path(self.blas).name}"
        return f"{name} ({self.kernel})" if self.kernel else name


def kernels(cpu: Cpu) -> list[str]:
    """Those of OpenBLAS that a CPU can run, beside the one that it chooses.

        >>> kernels(Cpu("AuthenticAMD", "a CPU", frozenset({"avx2", "fma"})))
        ['Haswell']
    """
    return [name for name, needed in KERNELS if needed <= cpu.flags]


def candidates(asked: Iterable[str], cpu: Cpu) -> list[Candidate]:
    """Return the BLASes that are asked for, or all that are found if none is, each with its kernels. Of equally fast
    ones the first counts. The processes that load them find out which cannot be used."""
    names = list(asked) or [*installed(), *_bundled()]
    return [Candidate(name, kernel) for name in names
            for kernel in ("", *(kernels(cpu) if name == SCIPY or OPENBLAS in name else ()))]


def installed() -> list[str]:
    """Return the BLASes of this machine, for PMM3D_BLAS: SciPy's, MKL of the extra, those that the loader finds."""
    found = [SCIPY, MKL] if mkl_file() else [SCIPY]
    return found + [file for name in OF_SYSTEM if (file := find_library(name))]


def _bundled() -> list[str]:
    found = []
    for package, folder in BUNDLED:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin).parents[1] / folder
            found += sorted(str(path) for path in place.glob("*openblas*.so*"))
    return found
