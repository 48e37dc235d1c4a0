"""pmm3d doctor: verdicts on made-up GPUs, networks, clocks and file systems."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from doctor_verdicts import FAILURE, FOUR, GIB, NOTE, OK, ONE, TWO_HOSTS, WARNING, assert_says, judged

from pmm3d.comm.device_trial import Outcome
from pmm3d.tools.doctor import devices, files, locks, network
from pmm3d.tools.doctor.nodes import Node

# Devices


def gpu(*visible, of_host=4, bound="", installed=("cupy",), tried=None, amd=False, asked="auto"):
    return devices.Devices(visible, of_host, bound, amd, installed, tried or {}, asked)


FINE = dict(tried={"cupy": devices.Trial("14.0", True, "MPI takes device pointers")})
REFUSED = {"cupy": devices.Trial("14.0", False, "this MPI does not take device pointers")}


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        ([gpu(of_host=0)] * 2, OK, ["none seen; installed: cupy"]),
        ([gpu(of_host=0, amd=True)] * 2, NOTE, ["/dev/kfd"]),
        ([gpu(of_host=2)] * 2, WARNING, ["the host has 2 GPUs, but no rank may use one", "--gpus-per-node"]),
        ([gpu(*"abcd", **FINE), gpu(*"abcd")], OK,
         ["4 on rank 0 of 4", "cupy 14.0", "cupy's arrays would go direct, if the ranks' own trial agrees (MPI takes"]),
        ([gpu("a", **FINE), gpu()], WARNING, ["rank 1 see no GPU"]),
        ([gpu("a", bound="CUDA_VISIBLE_DEVICES=0", **FINE), gpu("b", bound="CUDA_VISIBLE_DEVICES=1")], WARNING,
         ["each rank sees one GPU of 4 (CUDA_VISIBLE_DEVICES=0)", "--gpu-bind=none"]),
        ([gpu("a", of_host=1, **FINE), gpu("a", of_host=1)], WARNING, ["2 ranks use 1 GPU", "MPS"]),
        ([gpu(*"ab", installed=())] * 2, WARNING, ["neither cupy nor torch"]),
        ([gpu(*"ab", tried={"cupy": devices.Trial("CUDARuntimeError: x")}), gpu(*"ab")], WARNING,
         ["does not compute on the GPU of n1: CUDARuntimeError: x"]),
        ([gpu(*"ab", tried={"cupy": devices.Trial("did not end within 60 s")}), gpu(*"ab")], NOTE,
         ["cupy on n1: to load and compute did not end within 60 s", "once more"]),
        ([gpu(*"ab", tried={"cupy": devices.Trial("14.0", False, "nobody knows")}), gpu(*"ab")], NOTE,
         ["cupy: nobody knows (on n1): messages go through pinned", "cupy's arrays would go staged (nobody knows)"]),
        ([gpu(*"ab", tried=REFUSED), gpu(*"ab")], NOTE, ["does not take device pointers", "pinned host memory"]),
        ([gpu(*"ab", tried=REFUSED, asked="staged")] * 2, OK, ["cupy's arrays go staged (asked for)"]),
        ([gpu(*"ab", tried=REFUSED, asked="direct")] * 2, FAILURE, ["PMM3D_TRANSPORT=direct, and this MPI does not"]),
        ([gpu(*"ab", **FINE, asked="PMM3D_TRANSPORT='fast' is not understood")] * 2, FAILURE, ["'fast'", "unset it"]),
    ],
)
def test_gpus(facts, verdict, parts):
    assert_says(judged("GPU", facts, ["n1"] * 2), verdict, *parts)


class Driver:
    """Stands in for libcuda: two devices, of which the second has no identity."""

    def __init__(self, ready=True):
        self.cuInit = lambda flags: 0 if ready else 100

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid._obj[0] = 0xAB
        return device.value


def test_devices_are_found_through_the_driver(monkeypatch):
    assert devices.visible_devices("libno-such-driver.so") == ()
    monkeypatch.setattr(devices, "ctypes", SimpleNamespace(
        CDLL=lambda path: Driver(), c_int=ctypes.c_int, c_ubyte=ctypes.c_ubyte, byref=ctypes.byref))
    assert devices.visible_devices() == ("ab" + 30 * "0", "device 1")
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda path: Driver(ready=False))
    assert devices.visible_devices() == ()


def test_a_library_that_does_not_compute_says_why(monkeypatch):
    monkeypatch.setitem(devices.LOAD, "cupy", "raise RuntimeError('no device here')")
    assert devices.try_library("cupy") == ("RuntimeError: no device here", False, "")
    monkeypatch.setitem(devices.LOAD, "cupy", "print('14.0')")
    monkeypatch.setattr(devices, "library_named", lambda name: name)
    monkeypatch.setattr(devices, "try_device", lambda library, seconds: Outcome(library == "cupy", "tried"))
    assert devices.try_library("cupy") == ("14.0", True, "tried")


# Network


def pair(axis, low, high, seconds=2e-6, rate=10e9):
    return network.Pair(axis, (low, high), seconds, rate)


def axes(*pairs, allowed=range(4), rdma=False):
    """The facts of four ranks, all pairs told by the first."""
    here = Node(frozenset(allowed), 4, None, 1, 0, None, 0, 0, -1, rdma)
    return [network.Axes((2, 1, 2), list(pairs), here), *[network.Axes((2, 1, 2), [], here)] * 3]


X, Z = [pair("x", 0, 1), pair("x", 2, 3)], [pair("z", 0, 2), pair("z", 1, 3)]
SLOW_Z = [pair("z", 0, 2, 5e-5, 1e9), pair("z", 1, 3, 5e-5, 1e9)]


@pytest.mark.parametrize(
    "facts, hosts, verdict, parts",
    [
        (axes(*X, *Z), FOUR, OK, ["grid 2x1x2", "x (within hosts) 2.0 us, 10.00 GB/s"]),
        (axes(*X, *SLOW_Z), TWO_HOSTS, OK, ["z (between hosts) 50.0 us, 1.00 GB/s"]),
        (axes(*X, *SLOW_Z, rdma=True), TWO_HOSTS, WARNING, ["a byte takes 50 us, as over TCP", "OMPI_MCA_pml=ucx"]),
        (axes(X[0], pair("x", 2, 3, rate=3e9), *Z), FOUR, WARNING, ["1 of 4 pairs within a host", "ranks 2-3 on n1",
                                                                    "3.00 GB/s, the best 10.00"]),
        (axes(*X, SLOW_Z[0], pair("z", 1, 3, rate=1e8)), TWO_HOSTS, WARNING,
         ["pairs between hosts", "ranks 1, 3 on n1 and n2", "--switches=1"]),
        (axes(X[0], pair("x", 2, 3, rate=3e9), *Z, allowed=[0]), FOUR, OK, []),
        (axes(*(pair("x", low, low + 1, rate=5e8) for low in (0, 2))), FOUR, WARNING, ["may not use shared memory"]),
        (axes(pair("x", 0, 1, rate=4e9), pair("x", 2, 3, rate=4e9), *Z), FOUR, WARNING, ["slower than the z axis"]),
        (axes(*X, *Z), ["n1", "n2", "n1", "n2"], WARNING, ["x axis crosses hosts and the z axis does not"]),
    ],
)
def test_axes(facts, hosts, verdict, parts):
    assert_says(judged("axes", facts, hosts), verdict, *parts)


def progress(ring, native, own, helper=True):
    alone = dict.fromkeys(("Isend/Irecv", "Iallgather", "pmm3d"), 0.01)
    left = {kind: 0.01 * (1 - share) for kind, share in zip(alone, (ring, native, own))}
    return [network.Progress(alone, left, 2**23, helper)] * 2


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        (progress(0.9, 0.8, 0.9), OK, ["Isend/Irecv 90%, Iallgather 80%, pmm3d 90% (with its helper "
                                       "thread)", "10.0 ms"]),
        (progress(0.9, 0.1, 0.9), NOTE, ["MPI moves little of Iallgather while", "helper thread while the GEMM runs"]),
        (progress(-0.2, 0.1, 0.9), NOTE, ["Isend/Irecv 0%", "little of Isend/Irecv and Iallgather"]),
        (progress(0.1, 0.1, 0.1, helper=False), WARNING, ["cannot run at this thread level"]),
    ],
)
def test_progress(facts, verdict, parts):
    assert_says(judged("progress", facts, ["n1"] * 2), verdict, *parts)


@pytest.mark.parametrize(
    "ahead, uncertain, verdict, parts",
    [
        ({}, 1e-5, OK, ["one host"]),
        ({"n2": 2e-4}, 1e-5, OK, ["2 hosts within 0.20 ms", "(known to 0.01 ms)"]),
        ({"n2": -3.0, "n3": 0.1}, 1e-3, WARNING, ["1 of 3 hosts' clocks", "n2 by -3.0 s from n1", "chrony"]),
        ({"n2": 1.5}, 0.9, OK, []),
    ],
)
def test_clocks(ahead, uncertain, verdict, parts):
    """The second of two readings took less time, so it counts."""
    Reading = network.ClockReading
    facts = [[Reading(50.0, 52.0, 60.0), Reading(100 - uncertain, 100.0, 100 + uncertain)],
             *([Reading(0, 0, 0), Reading(0, 100 + seconds, 0)] for seconds in ahead.values())]
    finding = judged("clocks", facts, ["n1", *ahead])
    assert_says(finding, verdict, *parts)
    assert finding.figures.get("ahead_seconds", {}) == pytest.approx(ahead)


# Files


def folder(seen=0.0, kind="lustre", free=100 * GIB, exists=True, unwritable=""):
    return files.Folder("/scratch/me", kind, "/scratch", free, exists, unwritable, seen)


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        ([folder(), folder(0.05)], OK, ["/scratch/me, lustre, 100 GiB free, a replaced file seen everywhere after 50 "
                                        "ms"]),
        ([folder(), folder(2.5)], WARNING, ["took 2.5 s until every host saw", "actimeo=1"]),
        ([folder(kind="ext4"), folder(None)], FAILURE, ["n2 did not see", "a file system of each node's own"]),
        ([folder(), folder(None, exists=False)], FAILURE, ["/scratch/me is no folder on n2"]),
        ([folder(None, unwritable="Permission denied"), folder(None)], FAILURE, ["rank 0 cannot write there: "
                                                                                 "Permission"]),
        ([folder(free=2**20), folder()], WARNING, ["1 MiB free"]),
    ],
)
def test_folder(facts, verdict, parts):
    assert_says(judged("folder", [facts[0], None, facts[1], None], TWO_HOSTS), verdict, *parts)


def tried(flock="refused", fcntl="refused", hdf5="", possible=True):
    return files.Locks({"flock": flock, "fcntl": fcntl} if possible else {}, "rank 1 on n1", hdf5, possible)


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        (tried(), OK, ["flock and fcntl held against rank 1 on n1"]),
        (tried(flock="Function not implemented"), WARNING, ["flock: Function not implemented", "mounted with flock",
                                                            "HDF5_USE_FILE_LOCKING=FALSE"]),
        (tried("granted", "granted"), WARNING, ["none held", "locks by flock and fcntl do not exclude rank 1 on n1"]),
        (tried(hdf5="unable to lock file, errno = 38"), FAILURE, ["HDF5_USE_FILE_LOCKING=FALSE"]),
        (tried(possible=False), NOTE, ["not tried"]),
    ],
)
def test_locks(facts, verdict, parts):
    assert_says(judged("file locks", [facts], ONE), verdict, *parts)


def test_a_lock_that_another_process_holds_is_refused(tmp_path):
    """fcntl's locks belong to processes, so the holder must be another one."""
    path = tmp_path / "file"
    path.touch()
    hold = ("import sys; from pmm3d.tools.doctor.locks import LOCKS; import fcntl; file = open(sys.argv[2], 'rb+');"
            "LOCKS[sys.argv[1]](file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for kind in locks.LOCKS:
        assert locks.try_lock(kind, str(path)) == locks.GRANTED
        with subprocess.Popen([sys.executable, "-c", hold, kind, str(path)], stdin=subprocess.PIPE, env=environment,
                              stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout.readline() == "held\n"
            assert locks.try_lock(kind, str(path)) == locks.REFUSED
            holder.stdin.close()
        assert locks.try_lock(kind, str(path)) == locks.GRANTED
        assert "No such file" in locks.try_lock(kind, str(tmp_path / "none"))


def test_the_file_system_of_a_path(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("overlay / overlay rw 0 0\nhome:/x /home nfs4 rw 0 0\nscratch /home/my\\040work lustre rw 0 0\n"
                      "new / ext4 rw 0 0\n")
    assert files.file_system("/home/me", mounts) == ("nfs4", "/home")
    assert files.file_system("/home/my work/run", mounts) == ("lustre", "/home/my work")
    assert files.file_system("/homes", mounts) == ("ext4", "/")
    assert files.file_system("/home", tmp_path / "none") == ("", "")
