"""The BLAS that `pmm3d tune blas` chose on machines of this kind, in the user's cache folder, for PMM3D_BLAS=auto."""

from __future__ import annotations

import json
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from ..arrays.blas_library import SCIPY, VARIABLE, chosen
from ..errors import Pmm3dError, check_regular
from ..model.machine import THREAD_COUNTS, cpu
from . import trial_cache

FORMAT = 1
AUTO = "auto"
Key = dict[str, str | int]


class Choice(NamedTuple):
    """variables: of the environment, that make it so; words: what it is."""

    variables: dict[str, str]
    words: str


def key_of(threads: int) -> Key:
    """What a choice holds for: this kind of CPU, and so many threads a rank."""
    return {"format": FORMAT, "cpu": cpu().name or "unknown", "threads": threads}


def remember(choice: Choice, threads: int) -> Path:
    """Keep it; where. Raises OSError, and RuntimeError for users without a home."""
    key = key_of(threads)
    path = _file_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(number, "w") as file:
        json.dump({"key": key, **choice._asdict()}, file, indent=1)
    os.replace(name, path)
    return path


def recalled(threads: int) -> Choice:
    """What was chosen for this kind of machine. Raises Pmm3dError where nothing was, or it cannot be read."""
    key = key_of(threads)
    try:
        path = _file_of(key)
        check_regular(path)
        found = json.loads(path.read_text())
        variables = {str(name): str(text) for name, text in found["variables"].items()}
        if found["key"] != key or VARIABLE not in variables:
            raise ValueError("it is of another machine")
        return Choice(variables, str(found["words"]))
    except FileNotFoundError:
        raise Pmm3dError(f"PMM3D_BLAS=auto: nothing was chosen for {key['cpu']} with {threads} thread(s) a rank: run "
                         "pmm3d tune blas there") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Pmm3dError(f"PMM3D_BLAS=auto: what was chosen cannot be used: {error}. Run pmm3d tune blas "
                         "again") from None


def take_blas(asked: str) -> str:
    """Load the BLAS that PMM3D_BLAS names; its name, as all ranks must have it. That of SciPy is loaded when it is
    wanted. Raises Pmm3dError.

    "auto" becomes in this process's environment what was chosen, which the BLAS reads when it is loaded.
    """
    if asked == SCIPY:
        return SCIPY
    if asked == AUTO:
        threads = next((int(text) for text in map(os.environ.get, THREAD_COUNTS) if text and text.isdecimal()), 1)
        os.environ.update(recalled(threads).variables)
    return " ".join([chosen().name, *filter(None, [os.environ.get("OPENBLAS_CORETYPE")])])


def _file_of(key: Key) -> Path:
    digest = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    return trial_cache.folder().parent / "blas" / f"{digest}.json"
