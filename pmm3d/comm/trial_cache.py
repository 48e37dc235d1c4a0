"""What trials of device memory have found, in a file each in the user's cache folder."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from contextlib import suppress
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ..errors import check_regular

STEERING = ("MPICH_", "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_coll", "OMPI_MCA_opal", "OMPI_MCA_mpi_",
            "OMPI_MCA_accelerator", "OMPI_MCA_rcache", "UCX_", "I_MPI_OFFLOAD", "I_MPI_FABRICS", "MV2_", "FI_", "PSM2_",
            "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES")
"""Variables with which the same MPI moves device memory in another way, or not at all, or torch takes it from where
MPI cannot open it, or the devices are others."""
TRIAL = 2
"""Of which trial the findings are: those of others are not used."""
DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
Key = dict[str, Any]


def key_of(library: str) -> Key:
    """What a finding holds for: this host and driver, this MPI, its settings, and an array library with its version."""
    return {"trial": TRIAL, "host": socket.gethostname(), "mpi": MPI.Get_library_version().strip("\0 "),
            "mpi file": mpi_file(), "library": library, "driver": _first_line(DRIVERS),
            "settings": settings()}


def settings() -> dict[str, str]:
    """Variables of the environment by which MPI moves memory in another way; folders of one job are none."""
    return {name: value for name, value in sorted(os.environ.items())
            if name.startswith(STEERING) and not name.endswith("_directory")}


def recalled(key: Key) -> tuple[bool, str] | None:
    """(what was found, on which day), of a trial with this key in all its parts; None where there is none."""
    try:
        path = _file_of(key)
        check_regular(path)
        found = json.loads(path.read_text())
        if found["key"] == key and isinstance(found["direct"], bool):
            return found["direct"], str(found["date"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        pass
    return None


def remember(key: Key, direct: bool) -> None:
    """Keep a finding. Where that cannot be done, the next job tries again."""
    with suppress(OSError, RuntimeError):
        path = _file_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"key": key, "direct": direct, "date": date.today().isoformat()}, indent=1)
        number, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(number, "w") as file:
            file.write(text)
        os.replace(name, path)


def folder() -> Path:
    """$XDG_CACHE_HOME/pmm3d, or ~/.cache/pmm3d. Raises RuntimeError for users without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "pmm3d" / "device-trials"


def _file_of(key: Key) -> Path:
    digest = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    return folder() / f"{digest}.json"


def _first_line(paths: tuple[str, ...]) -> str:
    for path in paths:
        with suppress(OSError):
            return Path(path).read_text().splitlines()[0]
    return ""


def mpi_file() -> str:
    """The library that is loaded, and when it was written: builds with and without GPUs have one version."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")
            if "libmpi" in os.path.basename(path[2]):
                name = "/" + path[2]
                return f"{name} {int(os.stat(name).st_mtime)}"
    return ""
