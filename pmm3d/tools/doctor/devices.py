"""GPUs: the devices of each rank, the array libraries for them, and whether MPI accepts device pointers.

torch and cupy list the devices and compute on one of them, in child processes because a driver may hang. They run only
if the system has device files.
"""

from __future__ import annotations

import glob
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import NamedTuple

from ...arrays import library_named
from ...comm import TRIAL_SECONDS, try_device
from ...errors import install_command
from ...model.environment import Settings
from ...text import counted, names_in_words, ranks_in_words
from .finding import Finding, ranks_by
from .session import Session, child_output

LIBRARIES = {"cupy": "cupy", "torch": "torch:cuda:0"}
TRIALS = {
    "cupy": """
import cupy
assert float(cupy.ones(4).sum()) == 4
cuda = cupy.cuda.runtime
print(cupy.__version__, *(bytes(cuda.getDeviceProperties(i)["uuid"]).hex() for i in range(cuda.getDeviceCount())))""",
    "torch": """
import torch
assert float(torch.ones(4, device="cuda").sum()) == 4
cuda = torch.cuda
print(torch.__version__, *(cuda.get_device_properties(i).uuid for i in range(cuda.device_count())))""",
}
"""Programs that compute on a device. They print the version, and the UUIDs of the devices that the process may use."""
CHILD_SECONDS = TRIAL_SECONDS
"""Time limit of a child process. Loading cupy or torch from a parallel file system takes long."""
NO_GPU = (
    "request GPUs: srun --gpus-per-node=N --gpu-bind=none; check CUDA_VISIBLE_DEVICES; in a container: docker "
    "run --gpus all, apptainer exec --nv. If the driver is too old for the library, install the build for its "
    "CUDA (nvidia-smi shows the version): cupy-cuda12x, cupy-cuda13x, or torch's index of that CUDA. If it did "
    "not end in time, run doctor again, because the files may be cached then"
)
BINDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Trial(NamedTuple):
    """An array library on this rank's devices.

    text      version, or the error if the library does not compute
    devices   UUIDs of the devices that the rank may use
    direct    whether MPI accepts pointers to their memory; tried on the first rank of a host
    why       reason for `direct`, in words
    """

    text: str
    devices: tuple[str, ...] = ()
    direct: bool = False
    why: str = ""

    @property
    def computes(self) -> bool:
        return self.text[:1].isdigit()


class Devices(NamedTuple):
    """Facts of one rank.

    of_host     number of devices of the node, from device files
    bound       variable that limits the visible devices
    installed   array libraries
    trials      by library; empty on a node without devices
    """

    of_host: int
    bound: str
    installed: tuple[str, ...]
    trials: dict[str, Trial]

    @property
    def visible(self) -> tuple[str, ...]:
        return max((trial.devices for trial in self.trials.values()), key=len, default=())


def gather(session: Session) -> Devices:
    of_host = devices_of_host()
    installed = tuple(name for name in LIBRARIES if find_spec(name))
    wanted = installed if of_host else ()
    with ThreadPoolExecutor() as pool:
        trials = dict(zip(wanted, pool.map(lambda name: try_library(name, session.is_first_here), wanted)))
    bound = next((f"{name}={os.environ[name]}" for name in BINDING if name in os.environ), "")
    return Devices(of_host, bound, installed, trials)


def devices_of_host(dev: str = "/dev") -> int:
    """Return the number of GPUs of this node: NVIDIA GPUs, GPUs under WSL, or AMD GPUs with the compute driver."""
    nvidia, windows, amd = (len(glob.glob(f"{dev}/{name}")) for name in ("nvidia[0-9]*", "dxg", "dri/renderD*"))
    return nvidia or windows or amd * os.path.exists(f"{dev}/kfd")


def try_library(name: str, pointers: bool) -> Trial:
    """Compute with an array library in a child process. pointers: also try to send device memory by MPI."""
    trial = Trial(child_output(CHILD_SECONDS, "-c", TRIALS[name]))
    if not trial.computes:
        return trial
    version, *devices = trial.text.replace("-", "").split()
    outcome = try_device(library_named(LIBRARIES[name]), CHILD_SECONDS) if pointers else (False, "")
    return Trial(version, tuple(devices), *outcome)


def judge(finding: Finding, facts: list[Devices], hosts: list[str]) -> None:
    first = facts[0]
    finding.figures = {"devices_per_rank": [len(fact.visible) for fact in facts], "installed": first.installed}
    if not any(fact.of_host for fact in facts):
        finding.found = "none" + (f"; installed: {', '.join(first.installed)}" if first.installed else "")
        return
    for host, ranks in ranks_by(hosts).items():
        _judge_host(finding, host, [facts[rank] for rank in ranks])
    if not first.installed:
        finding.warn(
            "there is a GPU, but neither cupy nor torch", f"{install_command('cupy')}, or {install_command('torch')}"
        )
    for name in LIBRARIES:
        _judge_library(
            finding, name, {rank: fact.trials[name] for rank, fact in enumerate(facts) if name in fact.trials}, hosts
        )
    computing = {name: trial for name, trial in first.trials.items() if trial.computes}
    finding.figures |= {
        "usable": {name: trial.text for name, trial in first.trials.items()},
        "direct": {name: trial.direct for name, trial in computing.items()},
    }
    loaded = ", ".join(f"{name} {trial.text}" for name, trial in computing.items())
    pointers = ", ".join(
        f"transport of {name} arrays: {'direct' if trial.direct else 'staged'} ({trial.why})"
        for name, trial in computing.items()
    )
    visible = f"{len(first.visible)} on rank 0 of {first.of_host} on its host"
    finding.found = "; ".join(filter(None, (visible, loaded, pointers)))


def _judge_host(finding: Finding, host: str, here: list[Devices]) -> None:
    seen = {device for fact in here for device in fact.visible}
    if seen and len(here) > len(seen):
        finding.warn(
            f"{host}: {len(here)} ranks use {counted(len(seen), 'GPU')}",
            "one rank per GPU: srun --ntasks-per-node=GPUS; more ranks each: start NVIDIA's MPS",
        )
    of_host = max(len(seen), here[0].of_host)
    if len(here) > 1 and of_host > 1 and all(len(fact.visible) == 1 for fact in here):
        how = next((fact.bound for fact in here if fact.bound), "the launcher")
        finding.warn(
            f"{host}: each rank sees one GPU of {of_host} ({how}); MPI cannot open the memory of GPUs that "
            "are not visible, so messages go through the host, or fail",
            "srun --gpu-bind=none, and let each rank choose: cupy.cuda.Device(local_rank).use() or "
            "torch:cuda:LOCAL_RANK",
        )


def _judge_library(finding: Finding, name: str, trials: dict[int, Trial], hosts: list[str]) -> None:
    broken = [rank for rank, trial in trials.items() if not trial.computes]
    if broken:
        finding.warn(
            f"{name} did not compute on a GPU on {ranks_in_words(broken)} "
            f"({names_in_words(hosts[rank] for rank in broken)}): {trials[broken[0]].text}",
            NO_GPU,
        )
    staged = [rank for rank, trial in trials.items() if trial.why and not trial.direct]
    asked = Settings().device_transport
    if staged and asked == "direct":
        finding.fail(
            f"PMM3D_TRANSPORT=direct, and {trials[staged[0]].why}",
            "PMM3D_TRANSPORT=auto or staged, or an MPI with CUDA",
        )
    elif staged and asked == "auto":
        finding.note(
            f"{name}: {trials[staged[0]].why} (on {names_in_words(hosts[rank] for rank in staged)}): messages "
            "go through pinned host memory",
            "an MPI with CUDA (ask the site; Open MPI with UCX: ompi_info | grep cuda; MPICH of Cray: "
            "MPICH_GPU_SUPPORT_ENABLED=1) moves them directly; no other change is needed",
        )
