"""The BLASes of this machine, each with the kernels that its CPU can run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ....arrays.blas_library import KNOWN, SCIPY, VARIABLE
from ....comm.blas_choice import KERNEL_VARIABLE
from ....model.machine import Cpu

KERNELS = (("Haswell", {"avx2", "fma"}), ("SkylakeX", {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}),
           ("Cooperlake", {"avx512f", "avx512vl", "avx512_bf16"}), ("SapphireRapids", {"amx_bf16", "amx_tile"}))
"""OpenBLAS's, by OPENBLAS_CORETYPE, and what a CPU must have for each. Elsewhere than on x86 it chooses by itself."""
BUNDLED = (("numpy", "numpy.libs"), ("torch", "torch/lib"))
"""Wheels that carry a BLAS of their own, and where."""
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
    """Those that are asked for; all names and bundled ones if none is. In a fixed order, by which equals are told
    apart; some may not be here, which the processes that load them find out."""
    names = list(asked) or [SCIPY, *KNOWN, *_bundled()]
    return [Candidate(name, kernel) for name in names
            for kernel in ("", *(kernels(cpu) if name == SCIPY or OPENBLAS in name else ()))]


def _bundled() -> list[str]:
    found = []
    for package, folder in BUNDLED:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin).parents[1] / folder
            found += sorted(str(path) for path in place.glob("*openblas*.so*"))
    return found
