"""Which BLAS multiplies on the host, for as long as the process lives. The first of these that applies:

1. the one that PMM3D_BLAS names; "auto" is the one that `pmm3d tune blas` chose on machines of this kind
2. if the extra `pmm3d[mkl]` is installed: the BLAS that `pmm3d tune blas` chose, or else MKL
3. the one that SciPy carries

Choices of `pmm3d tune blas` are files in the user's cache folder.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .. import cache as files
from ..errors import Pmm3dError
from ..processor import Blas, cpu, loaded_blas
from ..text import counted
from ..thread_counts import asked_threads
from .blas_library import DTYPES, MKL, SCIPY, BlasLibrary, mkl_file, named_blas, scipy_blas

VARIABLE = "PMM3D_BLAS"
FOLDER = "blas"
FORMAT = 1
AUTO = "auto"
KERNEL_VARIABLE = "OPENBLAS_CORETYPE"
SHORT_SPIN = "OPENBLAS_THREAD_TIMEOUT", "16"
"""Threads of OpenBLAS wait for the next GEMM on their cores for 2^16 cycles (20 us), unless the environment says
otherwise. With OpenBLAS's default of 20 ms no other thread of the rank has a core between GEMMs."""
logger = logging.getLogger("pmm3d.comm")
Key = dict[str, str | int]


class Choice(NamedTuple):
    """variables: of the environment, that select a BLAS and its kernel; words: the BLAS, for people."""

    variables: dict[str, str]
    words: str


def key_of(threads: int, dtype: str = "") -> Key:
    """Return what a choice holds for: this kind of CPU, the threads of a rank, and one type of elements, or all."""
    key: Key = {"format": FORMAT, "cpu": cpu().name or "unknown", "threads": threads}
    return key | {"dtype": dtype} if dtype else key


def remember(choice: Choice, threads: int, dtype: str = "") -> Path:
    """Write a choice; return its file. Raises OSError, and RuntimeError for users without a home."""
    key = key_of(threads, dtype)
    text = json.dumps({"key": key, **choice._asdict()}, indent=1)
    return files.write(files.file_of(FOLDER, key, ".json"), text)


def recalled(threads: int, dtype: str = "") -> Choice:
    """Return what was chosen for this kind of machine, for all types or for one. Raises Pmm3dError if nothing was
    chosen, or if the file cannot be read."""
    key, asked = key_of(threads, dtype), asked_of(dtype)
    tuned = f"pmm3d tune blas{dtype and f' --dtype {dtype}'}"
    try:
        found = json.loads(files.read(files.file_of(FOLDER, key, ".json")))
        variables = {str(name): str(text) for name, text in found["variables"].items()}
        if found["key"] != key or VARIABLE not in variables:
            raise ValueError("it is of another machine")
        return Choice(variables, str(found["words"]))
    except FileNotFoundError:
        raise Pmm3dError(f"PMM3D_BLAS={asked}: nothing was chosen for {key['cpu']} with {counted(threads, 'thread')} "
                         f"a rank: run {tuned} there (--ranks-per-node: cores / threads)") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Pmm3dError(f"PMM3D_BLAS={asked}: what was chosen cannot be used: {error}. Run {tuned} again") from None


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
    """Return the variables that select the BLAS, as the head of this file says. Raises Pmm3dError for an "auto" that
    cannot be had.

    "auto" selects a kernel of OpenBLAS too. Without it the kernel is that of the environment.
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
    """Return the BLAS of this process. Raises Pmm3dError, and MemoryError if a limit leaves it too little address
    space. If PMM3D_BLAS is not set and the BLAS cannot be used, return SciPy's; its `refused` says why."""
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
    """As a context: the environment of this process has these variables, which a library reads when it is loaded."""
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
    """Load the BLAS; return its name and kernel, which must be the same on all ranks. SciPy's is loaded with the first
    product. tell: log, once in a process, why MKL is not used. Raises as `chosen`."""
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
    logger.warning(f"SciPy's BLAS is used, because the one of this environment is refused: {refused}. "
                   "PMM3D_BLAS=scipy selects it without this warning")


def blas_here() -> Blas:
    """Return the BLAS that multiplies on the host, loaded now: for callers that have no Grid. Raises as `take_blas`,
    and ImportError if threadpoolctl is not installed."""
    take_blas()
    return loaded_blas(chosen().file)


def _check_kernel(variables: dict[str, str]) -> None:
    """Raises Pmm3dError if the BLAS was loaded before with another kernel than the chosen one: it cannot change."""
    wanted, kernel, file = variables.get(KERNEL_VARIABLE, ""), "", chosen().file
    with suppress(ImportError):  # without threadpoolctl nobody knows
        kernel = loaded_blas(file).kernel
    if wanted and kernel and kernel.lower() != wanted.lower():
        lines = " ".join(f"{name}={text}" for name, text in variables.items())
        raise Pmm3dError(f"PMM3D_BLAS={asked_for()}: its kernel {wanted} was chosen, and this process had loaded it "
                         f"before, with kernel {kernel}. Set before Python starts: {lines}")
