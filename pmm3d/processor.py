"""The CPU of this process, and the BLAS libraries that it has loaded. Imports no array library."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

AVX512 = {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}
WIDE_KERNELS = {"skylakex", "cooperlake", "sapphirerapids", "zen5"}


@dataclass(frozen=True)
class Cpu:
    """A CPU: its vendor (such as "AuthenticAMD"), name, and the instruction sets in /proc/cpuinfo."""

    vendor: str
    name: str
    flags: frozenset[str]

    @property
    def has_avx512(self) -> bool:
        return self.flags >= AVX512


@lru_cache(maxsize=4)
def cpu(cpuinfo: str = "/proc/cpuinfo") -> Cpu:
    """Return the first processor of the machine. Fields that the system does not provide are empty."""
    fields = {}
    try:
        for line in Path(cpuinfo).read_text().splitlines():
            key, _, value = line.partition(":")
            if not line.strip():
                break
            fields[key.strip()] = value.strip()
    except OSError:
        pass
    return Cpu(
        fields.get("vendor_id", ""),
        fields.get("model name", platform.processor()),
        frozenset(fields.get("flags", "").split()),
    )


def better_kernel(processor: Cpu) -> str | None:
    """Return the right OPENBLAS_CORETYPE for a CPU that OpenBLAS misjudges, or None: AMD with AVX-512, used as AVX2."""
    return "SkylakeX" if processor.vendor == "AuthenticAMD" and processor.has_avx512 else None


@dataclass(frozen=True)
class Blas:
    """A loaded BLAS: on the host as reported by threadpoolctl. That of a device has no kernel, and 0 threads."""

    name: str
    version: str
    kernel: str
    threads: int

    def advice(self, processor: Cpu, exported: str) -> str | None:
        """Return a remedy if the CPU supports a better kernel than the loaded one; else None.

        exported   value of OPENBLAS_CORETYPE in the environment, or ""
        """
        kernel = better_kernel(processor)
        if self.name != "openblas" or kernel is None or self.kernel.lower() in WIDE_KERNELS:
            return None
        if exported.lower() == self.kernel.lower():
            why, where = f", because the environment sets OPENBLAS_CORETYPE={exported}", "in its place"
        else:
            why, where = "", "before Python starts (the pmm3d command does so if the environment does not set it)"
        return (
            f"OpenBLAS uses its {self.kernel} kernel on a CPU with AVX-512{why}: set OPENBLAS_CORETYPE={kernel} "
            f"{where}, or have pmm3d tune blas measure which is faster"
        )


def loaded_blas(file: str = "") -> Blas:
    """Return the loaded BLAS of that file, or SciPy's if no file is named.

    numpy and SciPy each contain a BLAS. The first product loads SciPy's; before that, this returns numpy's. Call
    `model.machine.blas_of` or `arrays.blas_choice.blas_here` to load the BLAS first. Raises ImportError if
    threadpoolctl is not installed.
    """
    return described(blas_controller(file), file)


def blas_controller(file: str = "") -> Any:
    """Return threadpoolctl's controller of `loaded_blas`, or None. Reads the list of loaded libraries."""
    from threadpoolctl import ThreadpoolController

    libraries = [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]
    if file:
        libraries = [library for library in libraries if os.path.realpath(library.filepath) == file]
    return min(
        libraries, key=lambda one: ("scipy_openblas-" not in one.filepath, "openblas64_" in one.filepath), default=None
    )


def described(controller: Any, file: str = "") -> Blas:
    """Return the BLAS of a controller, with its present number of threads."""
    if controller is None:
        return Blas(Path(file).name or "unknown", "", "", 0)
    library = controller.info()
    return Blas(
        library["internal_api"], library["version"] or "", library.get("architecture") or "", library["num_threads"]
    )
