"""The BLAS that `pmm3d tune blas` chose on machines of this kind, for PMM3D_BLAS=auto; in the user's cache folder."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..arrays.blas_library import DTYPES, SCIPY, VARIABLE, asked_for, blas_file, chosen, environment
from ..errors import Pmm3dError
from ..model.machine import Blas, cpu, loaded_blas
from ..thread_counts import asked_threads
from . import cache

FOLDER = "blas"
FORMAT = 1
AUTO = "auto"
KERNEL_VARIABLE = "OPENBLAS_CORETYPE"
Key = dict[str, str | int]


class Choice(NamedTuple):
    """variables: of the environment, that make it so; words: what it is."""

    variables: dict[str, str]
    words: str


def key_of(threads: int, dtype: str = "") -> Key:
    """What a choice holds for: this kind of CPU, so many threads a rank, and one type of elements, or all."""
    key: Key = {"format": FORMAT, "cpu": cpu().name or "unknown", "threads": threads}
    return key | {"dtype": dtype} if dtype else key


def remember(choice: Choice, threads: int, dtype: str = "") -> Path:
    """Keep it; where. Raises OSError, and RuntimeError for users without a home."""
    key = key_of(threads, dtype)
    text = json.dumps({"key": key, **choice._asdict()}, indent=1)
    return cache.write(cache.file_of(FOLDER, key, ".json"), text)


def recalled(threads: int, dtype: str = "") -> Choice:
    """What was chosen for this kind of machine, for all types or for one. Raises Pmm3dError where nothing was, or it
    cannot be read."""
    key, asked = key_of(threads, dtype), asked_of(dtype)
    tuned = f"pmm3d tune blas{dtype and f' --dtype {dtype}'}"
    try:
        found = json.loads(cache.read(cache.file_of(FOLDER, key, ".json")))
        variables = {str(name): str(text) for name, text in found["variables"].items()}
        if found["key"] != key or VARIABLE not in variables:
            raise ValueError("it is of another machine")
        return Choice(variables, str(found["words"]))
    except FileNotFoundError:
        raise Pmm3dError(f"PMM3D_BLAS={asked}: nothing was chosen for {key['cpu']} with {threads} thread(s) a rank: "
                         f"run {tuned} there (--ranks-per-node: cores / threads)") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Pmm3dError(f"PMM3D_BLAS={asked}: what was chosen cannot be used: {error}. Run {tuned} again") from None


def is_measured() -> bool:
    """Whether PMM3D_BLAS leaves the BLAS and its kernel to what `pmm3d tune blas` chose."""
    return asked_for().partition(":")[0] == AUTO


def asked_of(dtype: str) -> str:
    """What PMM3D_BLAS is to have for the choice for that type."""
    return f"{AUTO}:{dtype}" if dtype else AUTO


def take_blas(asked: str) -> str:
    """Load the BLAS that PMM3D_BLAS names; its name, as all ranks must have it. That of SciPy is loaded when it is
    wanted. Raises Pmm3dError.

    "auto", and "auto:float32" for what is fastest for that type, stands for what was chosen, which is in this process's
    environment while the BLAS reads it.
    """
    if asked == SCIPY:
        return SCIPY
    auto, _, dtype = asked.partition(":")
    if auto != AUTO:
        return " ".join([chosen().name, *filter(None, [os.environ.get(KERNEL_VARIABLE)])])
    if dtype not in ("", *DTYPES.values()):
        raise Pmm3dError(f"PMM3D_BLAS={asked}: behind the colon is one of {', '.join(DTYPES.values())}")
    choice = recalled(asked_threads(), dtype)
    with environment(choice.variables):
        chosen()
    _check_kernel(asked, choice)
    return " ".join(choice.variables.values())


def blas_here() -> Blas:
    """The BLAS that multiplies on the host, loaded now: for who asks before there is a Grid. Raises Pmm3dError as
    `take_blas` does, ImportError where threadpoolctl is not installed, which tells what it is."""
    take_blas(asked_for())
    chosen()
    return loaded_blas(blas_file())


def _check_kernel(asked: str, choice: Choice) -> None:
    """Raises Pmm3dError where the BLAS was loaded before with another kernel than was chosen, which it keeps."""
    wanted, kernel = choice.variables.get(KERNEL_VARIABLE, ""), ""
    with suppress(ImportError):  # without threadpoolctl nobody knows
        kernel = loaded_blas(chosen().file).kernel
    if wanted and kernel and kernel.lower() != wanted.lower():
        lines = " ".join(f"{name}={text}" for name, text in choice.variables.items())
        raise Pmm3dError(f"PMM3D_BLAS={asked}: its kernel {wanted} was chosen, and this process had loaded it before, "
                         f"with kernel {kernel}. Set before Python starts: {lines}")
