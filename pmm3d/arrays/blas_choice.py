"""Selection of the BLAS for products on the host. It is made once in a process, by the first rule that applies:

1. PMM3D_BLAS names the BLAS. "auto" selects the choice of `pmm3d tune blas` for machines of this kind.
2. If the extra `pmm3d[mkl]` is installed: the choice of `pmm3d tune blas`, or MKL if there is none.
3. SciPy's own BLAS.

`pmm3d tune blas` stores its choices in files in the user's cache folder.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .. import cache as files
from ..errors import Pmm3dError
from ..processor import Blas, blas_controller, cpu, described, loaded_blas
from ..text import counted
from ..thread_counts import asked_threads
from .blas_library import DTYPES, MKL, SCIPY, BlasLibrary, mkl_file, named_blas, scipy_blas

VARIABLE = "PMM3D_BLAS"
FOLDER = "blas"
FORMAT = 1
AUTO = "auto"
KERNEL_VARIABLE = "OPENBLAS_CORETYPE"
SHORT_SPIN = "OPENBLAS_THREAD_TIMEOUT", "16"
"""Threads of OpenBLAS spin for 2^16 cycles (20 us) after a GEMM, unless the environment sets the variable. During
OpenBLAS's default of 20 ms, no other thread of the rank would get a core between GEMMs."""
logger = logging.getLogger("pmm3d.comm")
Key = dict[str, str | int]


class Choice(NamedTuple):
    """variables: environment variables that select a BLAS and its kernel;   words: name of the BLAS for messages."""

    variables: dict[str, str]
    words: str


def key_of(threads: int, dtype: str = "") -> Key:
    """Return the key of a choice: kind of CPU, threads of a rank, and element type ("": all types)."""
    key: Key = {"format": FORMAT, "cpu": cpu().name or "unknown", "threads": threads}
    return key | {"dtype": dtype} if dtype else key


def remember(choice: Choice, threads: int, dtype: str = "") -> Path:
    """Write a choice to a file, and return its path. Raises OSError, and RuntimeError for users without a home."""
    key = key_of(threads, dtype)
    text = json.dumps({"key": key, **choice._asdict()}, indent=1)
    return files.write(files.file_of(FOLDER, key, ".json"), text)


def recalled(threads: int, dtype: str = "") -> Choice:
    """Return the choice for this kind of machine, for all types or for one. Raises Pmm3dError if there is no choice, or
    if its file cannot be read."""
    key, asked = key_of(threads, dtype), asked_of(dtype)
    tuned = f"pmm3d tune blas{dtype and f' --dtype {dtype}'}"
    try:
        stored = json.loads(files.read(files.file_of(FOLDER, key, ".json")))
        variables = {str(name): str(text) for name, text in stored["variables"].items()}
        if stored["key"] != key or VARIABLE not in variables:
            raise ValueError("it is of another machine")
        return Choice(variables, str(stored["words"]))
    except FileNotFoundError:
        raise Pmm3dError(
            f"PMM3D_BLAS={asked}: nothing was chosen for {key['cpu']} with {counted(threads, 'thread')} "
            f"a rank: run {tuned} there (--ranks-per-node: cores / threads)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Pmm3dError(f"PMM3D_BLAS={asked}: the chosen BLAS cannot be used: {error}. Run {tuned} again") from None


def asked_for() -> str:
    """Return the text of PMM3D_BLAS; "" if it is not set."""
    return os.environ.get(VARIABLE, "")


def is_measured() -> bool:
    """Whether PMM3D_BLAS leaves the BLAS and its kernel to the choice of `pmm3d tune blas`."""
    return asked_for().partition(":")[0] == AUTO


def asked_of(dtype: str) -> str:
    """Return the text of PMM3D_BLAS that selects the choice for a type."""
    return f"{AUTO}:{dtype}" if dtype else AUTO


def _variables() -> dict[str, str]:
    """Return the variables that select the BLAS, by the rules above. Raises Pmm3dError for "auto" without a choice.

    "auto" also selects a kernel of OpenBLAS. Otherwise the environment selects the kernel.
    """
    asked = asked_for()
    if is_measured():
        dtype = asked.partition(":")[2]
        if dtype not in ("", *DTYPES.values()):
            raise Pmm3dError(f"PMM3D_BLAS={asked}: behind the colon is one of {', '.join(DTYPES.values())}")
        return recalled(asked_threads(), dtype).variables
    if asked or not mkl_file():
        return {VARIABLE: asked or SCIPY}
    with suppress(Pmm3dError):
        return {VARIABLE: recalled(asked_threads()).variables[VARIABLE]}
    return {VARIABLE: MKL}


@cache
def chosen() -> BlasLibrary:
    """Return the BLAS of this process. Raises Pmm3dError, and MemoryError if a limit leaves too little address space.

    If PMM3D_BLAS is not set and the BLAS cannot be used, return SciPy's. Its `refused` contains the reason.
    """
    name, value = SHORT_SPIN
    asked, variables = asked_for(), _variables()
    with _environment({name: os.environ.get(name, value), **variables}):
        if variables[VARIABLE] == SCIPY:
            return scipy_blas()
        try:
            return named_blas(variables[VARIABLE])
        except Pmm3dError as error:
            if asked:
                raise
            return scipy_blas()._replace(refused=str(error))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """As a context: set environment variables of this process. A library reads them when it is loaded."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name, None) if text is None else os.environ.update({name: text})


def blas_file() -> str:
    """Return the file of the BLAS that PMM3D_BLAS names; "" if it names SciPy's, or none."""
    return "" if asked_for() in ("", SCIPY) else chosen().file


def take_blas(tell: bool = False) -> str:
    """Load the BLAS, and return its name and kernel, which must be the same on all ranks. SciPy's BLAS is loaded by the
    first product. tell: log, once in a process, why MKL is not used. Raises as `chosen`."""
    if is_measured():
        variables = _variables()
        _check_kernel(variables)
        return " ".join(variables.values())
    if _variables() == {VARIABLE: SCIPY}:
        return SCIPY
    refused = chosen().refused
    if tell and refused:
        _tell(refused)
    return " ".join(filter(None, [chosen().name, os.environ.get(KERNEL_VARIABLE), refused]))


@cache
def _tell(refused: str) -> None:
    logger.warning(
        f"SciPy's BLAS is used, because the one of this environment is refused: {refused}. "
        "PMM3D_BLAS=scipy selects it without this warning"
    )


def blas_here() -> Blas:
    """Load the BLAS for products on the host, and return it; for callers without a Grid. Raises as `take_blas`, and
    ImportError if threadpoolctl is not installed."""
    take_blas()
    return described(_controller(chosen().file), chosen().file)


@cache
def _controller(file: str) -> Any:
    """Return the controller of the BLAS of this process, after it was loaded."""
    return blas_controller(file)


def _check_kernel(variables: dict[str, str]) -> None:
    """Raise Pmm3dError if the BLAS was already loaded with another kernel than the chosen one. It cannot change."""
    wanted, kernel, file = variables.get(KERNEL_VARIABLE, ""), "", chosen().file
    with suppress(ImportError):  # without threadpoolctl the kernel is unknown
        kernel = loaded_blas(file).kernel
    if wanted and kernel and kernel.lower() != wanted.lower():
        lines = " ".join(f"{name}={text}" for name, text in variables.items())
        raise Pmm3dError(
            f"PMM3D_BLAS={asked_for()}: its kernel {wanted} was chosen, and this process had loaded it "
            f"before, with kernel {kernel}. Set before Python starts: {lines}"
        )
