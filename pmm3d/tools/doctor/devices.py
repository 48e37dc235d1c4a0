"""GPUs: which ranks see which, the array libraries for them, and whether MPI takes their pointers.

Devices are found through the CUDA driver itself: cupy and torch take seconds to load, and are tried in child processes,
on one rank of each host, only where there is a device.
"""

from __future__ import annotations

import ctypes
import glob
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import NamedTuple

from ...arrays import library_named
from ...comm import TRIAL_SECONDS, try_device
from ...errors import Pmm3dError
from ...model.environment import TRANSPORTS, Settings
from ...text import names_in_words, ranks_in_words
from .finding import Finding, counted, ranks_by
from .session import Session, child_says

DRIVER = "libcuda.so.1"
LIBRARIES = {"cupy": "cupy", "torch": "torch:cuda:0"}
LOAD = {"cupy": "import cupy; assert float(cupy.ones(4).sum()) == 4; print(cupy.__version__)",
        "torch": "import torch; assert float(torch.ones(4, device='cuda').sum()) == 4; print(torch.__version__)"}
CHILD_SECONDS = TRIAL_SECONDS
"""For each of two children: loading cupy or torch from a parallel file system takes some."""
LATE = "did not end"
"""So begins what is said of a child that was not done in time."""
BINDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Trial(NamedTuple):
    """Of an array library on a device. text: its version, or why it does not compute; direct: whether MPI is known to
    take its pointers;   why: how it was found, where the library computes."""

    text: str
    direct: bool = False
    why: str = ""

    @property
    def computes(self) -> bool:
        return self.text[:1].isdigit()


class Devices(NamedTuple):
    """visible: the identities of the devices that this rank sees; of_host: device files of the node; bound: what limits
    what it sees; installed: array libraries; tried: on one rank of a host; asked: the transport, or what is wrong with
    PMM3D_TRANSPORT."""

    visible: tuple[str, ...]
    of_host: int
    bound: str
    amd: bool
    installed: tuple[str, ...]
    tried: dict[str, Trial]
    asked: str = "auto"


def gather(session: Session) -> Devices:
    visible = visible_devices()
    installed = tuple(name for name in LIBRARIES if find_spec(name))
    wanted = installed if visible and session.is_first_here else ()
    with ThreadPoolExecutor() as pool:
        tried = dict(zip(wanted, pool.map(try_library, wanted)))
    bound = next((f"{name}={os.environ[name]}" for name in BINDING if name in os.environ), "")
    return Devices(visible, len(glob.glob("/dev/nvidia[0-9]*")), bound, os.path.exists("/dev/kfd"), installed, tried,
                   asked_for())


def visible_devices(driver: str = DRIVER) -> tuple[str, ...]:
    """The identities (UUID, in hexadecimal) of the CUDA devices that this process sees; none without a driver."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return ()
    count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or getattr(cuda, "cuDeviceGetUuid", None)
    identities = []
    for number in range(count.value):
        unknown = (cuda.cuDeviceGet(ctypes.byref(device), number) or ask is None or ask(ctypes.byref(uuid), device))
        identities.append(f"device {number}" if unknown else bytes(uuid).hex())
    return tuple(identities)


def asked_for() -> str:
    try:
        return Settings().device_transport
    except Pmm3dError as error:
        return str(error)


def try_library(name: str) -> Trial:
    loaded = Trial(child_says(CHILD_SECONDS, "-c", LOAD[name]))
    if not loaded.computes:
        return loaded
    return Trial(loaded.text, *try_device(library_named(LIBRARIES[name]), CHILD_SECONDS))


def judge(finding: Finding, facts: list[Devices], hosts: list[str]) -> None:
    first = facts[0]
    finding.figures = {"devices_per_rank": [len(fact.visible) for fact in facts], "installed": first.installed}
    blind = [rank for rank, fact in enumerate(facts) if not fact.visible]
    if len(blind) == len(facts):
        finding.found = "none seen" + (f"; installed: {', '.join(first.installed)}" if first.installed else "")
        _judge_none(finding, first)
        return
    if blind:
        finding.warn(f"{ranks_in_words(blind)} see no GPU, others do",
                     "srun --gpus-per-node=N --gpu-bind=none on every node; see CUDA_VISIBLE_DEVICES")
    for host, ranks in ranks_by(hosts).items():
        _judge_host(finding, host, [facts[rank] for rank in ranks])
    _judge_libraries(finding, facts, hosts)
    tried = next((fact.tried for fact in facts if fact.tried), {})
    computing = {name: trial for name, trial in tried.items() if trial.computes}
    finding.figures |= {"usable": {name: trial.text for name, trial in tried.items()},
                        "transport": first.asked,
                        "direct": {name: trial.direct for name, trial in computing.items()}}
    loaded = ", ".join(f"{name} {trial.text}" for name, trial in computing.items())
    pointers = ", ".join(_way(name, trial, first.asked) for name, trial in computing.items())
    visible = f"{len(first.visible)} on rank 0 of {first.of_host or len(first.visible)} on its host"
    finding.found = "; ".join(filter(None, (visible, loaded, pointers)))


def _way(name: str, trial: Trial, asked: str) -> str:
    """How arrays of a library would travel, and why."""
    if asked != "auto":
        return f"{name}'s arrays go {asked} (asked for)"
    mode = "direct, if the ranks' own trial agrees" if trial.direct else "staged"
    return f"{name}'s arrays would go {mode} ({trial.why})"


def _judge_none(finding: Finding, first: Devices) -> None:
    if first.of_host:
        finding.warn(f"the host has {first.of_host} GPUs, but no rank may use one",
                     "ask for them: srun --gpus-per-node=N; see CUDA_VISIBLE_DEVICES; in a container: docker run "
                     "--gpus all, apptainer exec --nv")
    elif first.amd:
        finding.note("an AMD GPU (/dev/kfd); doctor examines CUDA devices only",
                     "pmm3d bench --array torch:cuda:0 or --array cupy, with their builds for ROCm, shows whether it "
                     "works")


def _judge_host(finding: Finding, host: str, here: list[Devices]) -> None:
    seen = {device for fact in here for device in fact.visible}
    of_host = max(len(seen), here[0].of_host)
    if seen and len(here) > len(seen):
        finding.warn(f"{host}: {len(here)} ranks use {counted(len(seen), 'GPU')}",
                     "one rank per GPU: srun --ntasks-per-node=GPUS; more ranks each: start NVIDIA's MPS")
    if len(here) > 1 and of_host > 1 and all(len(fact.visible) == 1 for fact in here):
        how = next((fact.bound for fact in here if fact.bound), "the launcher")
        finding.warn(f"{host}: each rank sees one GPU of {of_host} ({how}); MPI cannot open the memory of a GPU that "
                     "it does not see, and goes through the host or fails",
                     "srun --gpu-bind=none, and let each rank choose: cupy.cuda.Device(local_rank).use() or "
                     "torch:cuda:LOCAL_RANK")


def _judge_libraries(finding: Finding, facts: list[Devices], hosts: list[str]) -> None:
    if not facts[0].installed:
        finding.warn("there is a GPU, but neither cupy nor torch",
                     'pip install ".[cupy]", or ".[torch]", in the clone of pmm3d')
    for name in LIBRARIES:
        tried = {hosts[rank]: fact.tried[name] for rank, fact in enumerate(facts) if name in fact.tried}
        broken = [host for host, trial in tried.items() if not trial.computes]
        late = [host for host in broken if tried[host].text.startswith(LATE)]
        if late:
            finding.note(f"{name} on {names_in_words(late)}: to load and compute {tried[late[0]].text}; whether MPI "
                         "takes its pointers was not tried", "once more: it may be faster when the file system has "
                         "the files at hand")
            broken = [host for host in broken if host not in late]
        if broken:
            finding.warn(f"{name} is installed and does not compute on the GPU of {names_in_words(broken)}: "
                         f"{tried[broken[0]].text}",
                         "install the build for this driver's CUDA (nvidia-smi shows the version): cupy-cuda12x, "
                         "cupy-cuda13x, or torch's index of that CUDA")
        staged = [host for host, trial in tried.items() if trial.computes and not trial.direct]
        if staged and facts[0].asked == "direct":
            finding.fail(f"PMM3D_TRANSPORT=direct, and {tried[staged[0]].why}", "PMM3D_TRANSPORT=auto or staged, or an "
                         "MPI with CUDA")
        elif staged and facts[0].asked == "auto":
            finding.note(f"{name}: {tried[staged[0]].why} (on {names_in_words(staged)}): messages go through pinned "
                         "host memory",
                         "an MPI with CUDA (ask the site; Open MPI with UCX: ompi_info | grep cuda; MPICH of Cray: "
                         "MPICH_GPU_SUPPORT_ENABLED=1) moves them directly; nothing else is to be done")
    wrong = [rank for rank, fact in enumerate(facts) if fact.asked not in TRANSPORTS]
    if wrong:
        finding.fail(f"{ranks_in_words(wrong)}: {facts[wrong[0]].asked}", "unset it")
