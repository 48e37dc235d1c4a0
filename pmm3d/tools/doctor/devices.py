"""GPUs: which ranks see which, the array libraries for them, and whether MPI takes their pointers.

Devices are found through the CUDA driver itself: cupy and torch take seconds to load, and are tried in child processes,
on one rank of each host, only where there is a device.
"""

from __future__ import annotations

import ctypes
import glob
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec

from ...comm.words import ranks_in_words
from .finding import Finding, Problems, by_host, names_in_words
from .session import Session

DRIVER = "libcuda.so.1"
LIBRARIES = {"cupy": "cupy", "torch": "torch:cuda:0"}
CHILD_SECONDS = 15.0
LOAD_CUPY = "import cupy; assert float(cupy.ones(4).sum()) == 4; print(cupy.__version__)"
LOAD_TORCH = "import torch; assert float(torch.ones(4, device='cuda').sum()) == 4; print(torch.__version__)"
LOAD = {"cupy": LOAD_CUPY, "torch": LOAD_TORCH}


@dataclass(frozen=True)
class Devices:
    """visible: the identities of the devices that this rank sees; of_host: device files of the node; bound: what limits
    what it sees; installed: array libraries; usable: what each said when it was tried; direct: whether MPI took the
    pointers of each (both on one rank of a host)."""

    visible: tuple[str, ...]
    of_host: int
    bound: str
    amd: bool
    installed: tuple[str, ...]
    usable: dict[str, str] = field(default_factory=dict)
    direct: dict[str, bool] = field(default_factory=dict)


def gather(session: Session) -> Devices:
    visible = visible_devices()
    installed = tuple(name for name in LIBRARIES if find_spec(name))
    usable, direct = {}, {}
    if visible and installed and session.is_first_here:
        with ThreadPoolExecutor(len(installed)) as pool:
            tried = dict(zip(installed, pool.map(_tried, installed)))
        usable = {name: text for name, (text, _) in tried.items()}
        direct = {name: takes for name, (_, takes) in tried.items() if takes is not None}
    bound = next((f"{name}={os.environ[name]}" for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
                  if name in os.environ), "")
    return Devices(visible, len(glob.glob("/dev/nvidia[0-9]*")), bound, os.path.exists("/dev/kfd"), installed, usable,
                   direct)


def visible_devices(driver: str = DRIVER) -> tuple[str, ...]:
    """The identities (UUID, in hexadecimal) of the CUDA devices that this process sees; none without a driver."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_identity(cuda, number) for number in range(count.value))


def _identity(cuda, number: int) -> str:
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or getattr(cuda, "cuDeviceGetUuid", None)
    if cuda.cuDeviceGet(ctypes.byref(device), number) or ask is None or ask(ctypes.byref(uuid), device):
        return f"device {number}"
    return bytes(uuid).hex()


def _loaded(name: str) -> str:
    """The version of an array library that computes on a device, or the last line of why it does not."""
    try:
        child = subprocess.run([sys.executable, "-c", LOAD[name]], capture_output=True, text=True,
                               timeout=CHILD_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"did not load within {CHILD_SECONDS:g} s"
    said = (child.stdout if child.returncode == 0 else child.stderr).strip().splitlines()
    return said[-1] if said else f"ended with code {child.returncode}"


def _tried(name: str) -> tuple[str, bool | None]:
    """(what `_loaded` says, whether MPI takes the library's pointers, or None if it does not compute)."""
    text = _loaded(name)
    return text, _takes_pointers(name) if text[:1].isdigit() else None


def _takes_pointers(name: str) -> bool:
    from ...arrays import library_named
    from ...comm.device_trial import takes_device_pointers

    return takes_device_pointers(library_named(LIBRARIES[name]), CHILD_SECONDS)


def judge(facts: list[Devices], hosts: list[str]) -> Finding:
    problems = Problems()
    first = facts[0]
    figures = {"devices_per_rank": [len(fact.visible) for fact in facts], "installed": first.installed}
    if not any(fact.visible for fact in facts):
        _judge_none(problems, first)
        return Finding("GPU", "none seen" + (f"; installed: {', '.join(first.installed)}" if first.installed else ""),
                       tuple(problems), figures)
    blind = [rank for rank, fact in enumerate(facts) if not fact.visible]
    if blind:
        problems.warn(f"{ranks_in_words(blind)} see no GPU, others do",
                      "srun --gpus-per-node=N --gpu-bind=none on every node; see CUDA_VISIBLE_DEVICES")
    for host, ranks in by_host(hosts).items():
        _judge_host(problems, host, {rank: facts[rank] for rank in ranks})
    _judge_libraries(problems, facts, hosts)
    examined = [fact for fact in facts if fact.usable or fact.direct]
    figures |= {"usable": examined[0].usable if examined else {}, "direct": examined[0].direct if examined else {}}
    direct = ", ".join(f"MPI {'takes' if yes else 'does not take'} {name}'s pointers"
                       for name, yes in figures["direct"].items())
    loaded = ", ".join(f"{name} {text}" for name, text in figures["usable"].items() if text[:1].isdigit())
    parts = [f"{len(first.visible)} on rank 0 of {first.of_host or len(first.visible)} on its host", loaded, direct]
    return Finding("GPU", "; ".join(filter(None, parts)), tuple(problems[:6]), figures)


def _judge_none(problems: Problems, first: Devices) -> None:
    if first.of_host:
        problems.warn(f"the host has {first.of_host} GPUs, but no rank may use one",
                      "ask for them: srun --gpus-per-node=N; see CUDA_VISIBLE_DEVICES; in a container: docker run "
                      "--gpus all, apptainer exec --nv")
    elif first.amd:
        problems.note("an AMD GPU (/dev/kfd); doctor examines CUDA devices only", "pmm3d bench --array torch:cuda:0 "
                      "or --array cupy, with their builds for ROCm, shows whether it works")


def _judge_host(problems: Problems, host: str, here: dict[int, Devices]) -> None:
    seen = {device for fact in here.values() for device in fact.visible}
    of_host = max(len(seen), max(fact.of_host for fact in here.values()))
    if seen and len(here) > len(seen):
        problems.warn(f"{host}: {len(here)} ranks use {len(seen)} GPU{'s' * (len(seen) > 1)}",
                      "one rank per GPU: srun --ntasks-per-node=GPUS; more ranks each: start NVIDIA's MPS")
    alone = len(here) > 1 and of_host > 1 and all(len(fact.visible) == 1 for fact in here.values())
    if alone:
        how = next((fact.bound for fact in here.values() if fact.bound), "the launcher")
        problems.warn(f"{host}: each rank sees one GPU of {of_host} ({how}); MPI cannot open the memory of a GPU that "
                      "it does not see, and goes through the host or fails",
                      "srun --gpu-bind=none, and let each rank choose: cupy.cuda.Device(local_rank).use() or "
                      "torch:cuda:LOCAL_RANK")


def _judge_libraries(problems: Problems, facts: list[Devices], hosts: list[str]) -> None:
    tried = {rank: fact for rank, fact in enumerate(facts) if fact.visible and (fact.usable or not fact.installed)}
    if not facts[0].installed:
        problems.warn("there is a GPU, but neither cupy nor torch", 'pip install "pmm3d[cupy]" or "pmm3d[torch]"')
    for name in LIBRARIES:
        broken = {rank: fact.usable[name] for rank, fact in tried.items()
                  if name in fact.usable and not fact.usable[name][:1].isdigit()}
        if broken:
            where = names_in_words(hosts[rank] for rank in broken)
            problems.warn(f"{name} is installed and does not compute on the GPU of {where}: "
                          f"{next(iter(broken.values()))}",
                          "install the build for this driver's CUDA (nvidia-smi shows the version): cupy-cuda12x, "
                          "cupy-cuda13x, or torch's index of that CUDA")
        staged = [hosts[rank] for rank, fact in tried.items() if fact.direct.get(name) is False]
        if staged:
            problems.note(f"MPI does not take {name}'s device pointers (tried in a child on {names_in_words(staged)}): "
                          "messages go through pinned host memory",
                          "an MPI with CUDA (ask the site; Open MPI with UCX: ompi_info | grep cuda; MPICH of Cray: "
                          "MPICH_GPU_SUPPORT_ENABLED=1) moves them directly; nothing else is to be done")
