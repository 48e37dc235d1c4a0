"""What is there: the GPUs as the driver and the array libraries see them, versions, wheels that were carried here."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

VERSIONS = ("numpy", "scipy", "mpi4py", "torch", "cupy", "array-api-compat", "pydantic", "h5py", "threadpoolctl",
            "typer", "rich")
CUPYS = ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x")
QUERY = "index,name,driver_version,memory.total,pci.bus_id,clocks.max.sm,power.limit"
PATIENCE = 120.0


def of_the_driver() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU; none where there is no nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return [dict(zip(QUERY.split(","), map(str.strip, line.split(",")))) for line in lines]


def of_python() -> dict[str, Any]:
    """{"versions": ..., "libraries": those that see a GPU, "why": library -> why it sees none}, found in a child, since
    what is broken there may end it."""
    try:
        done = subprocess.run([sys.executable, "-m", f"{__package__}.found"], capture_output=True, text=True,
                              timeout=PATIENCE)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"versions": {"python": platform.python_version()}, "libraries": [],
                "why": {"both": f"looking for them failed: {error}"}}


def _looked() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in VERSIONS:
        for package in CUPYS if name == "cupy" else (name,):
            try:
                versions.setdefault(name, metadata.version(package))
            except metadata.PackageNotFoundError:
                continue
    libraries, why = [], {}
    for library, count in (("torch:cuda", _devices_of_torch), ("cupy", _devices_of_cupy)):
        try:
            devices = count(versions)
        except Exception as error:
            why[library] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        if devices:
            libraries.append(library)
        else:
            why[library] = "sees no device"
    return {"versions": versions, "libraries": libraries, "why": why}


def _devices_of_torch(versions: dict[str, str]) -> int:
    torch = import_module("torch")
    versions["CUDA of torch"] = str(torch.version.cuda)
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _devices_of_cupy(versions: dict[str, str]) -> int:
    runtime = import_module("cupy").cuda.runtime
    versions["CUDA of cupy"] = str(runtime.runtimeGetVersion())
    return runtime.getDeviceCount()


def unpack_wheels(carried: Path, into: Path) -> list[str]:
    """Unpack the wheels of a folder whose packages are missing here; their names."""
    unpacked = []
    for wheel in sorted(carried.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(into)
            unpacked.append(wheel.name)
    return unpacked


if __name__ == "__main__":
    print(json.dumps(_looked()))
