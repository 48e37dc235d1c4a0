"""pmm3d doctor: verdicts on given facts about GPUs, networks, folders and HDF5."""

import sys
from types import SimpleNamespace

import h5py
import pytest
from doctor_verdicts import FAILURE, FOUR, GIB, NOTE, OK, ONE, TWO_HOSTS, WARNING, assert_says, judged

from pmm3d.comm.device_trial import Outcome
from pmm3d.tools.doctor import devices, files, network, software
from pmm3d.tools.doctor.nodes import Node

# Devices


def gpu(*visible, of_host=4, bound="", text="14.0", direct=True, why="MPI takes device pointers"):
    """A rank that sees devices by cupy. The trials of a library that does not compute are in `text`."""
    trial = devices.Trial(text, visible, direct, why)
    return devices.Devices(of_host, bound, ("cupy",), {"cupy": trial})


def without_gpu(text):
    return gpu(text=text, direct=False, why="")


NO_GPU = devices.Devices(0, "", ("cupy",), {})
NO_LIBRARY = devices.Devices(4, "", (), {})


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        ([NO_GPU] * 2, OK, ["none; installed: cupy"]),
        (
            [without_gpu("CUDARuntimeError: no device")] * 2,
            WARNING,
            [
                "cupy did not compute on a GPU on ranks 0-1 (n1): CUDARuntimeError: no device",
                "--gpus-per-node",
                "cupy-cuda12x",
            ],
        ),
        (
            [gpu(*"abcd"), gpu(*"abcd", why="")],
            OK,
            ["4 on rank 0 of 4", "cupy 14.0", "transport of cupy arrays: direct (MPI takes device pointers)"],
        ),
        (
            [gpu("a"), without_gpu("RuntimeError: no GPU")],
            WARNING,
            ["cupy did not compute on a GPU on rank 1 (n1): Runtime"],
        ),
        (
            [gpu("a", bound="CUDA_VISIBLE_DEVICES=0"), gpu("b", bound="CUDA_VISIBLE_DEVICES=1")],
            WARNING,
            ["each rank sees one GPU of 4 (CUDA_VISIBLE_DEVICES=0)", "--gpu-bind=none"],
        ),
        ([gpu("a", of_host=1), gpu("a", of_host=1)], WARNING, ["2 ranks use 1 GPU", "MPS"]),
        ([NO_LIBRARY] * 2, WARNING, ["neither cupy nor torch"]),
        (
            [without_gpu("did not end within 60 s"), gpu(*"ab")],
            WARNING,
            ["cupy did not compute on a GPU on rank 0 (n1): did not end within 60 s", "run doctor again"],
        ),
        (
            [gpu(*"ab", direct=False, why="nobody knows"), gpu(*"ab", why="")],
            NOTE,
            [
                "cupy: nobody knows (on n1): messages go through pinned",
                "transport of cupy arrays: staged (nobody knows)",
            ],
        ),
    ],
)
def test_gpus(facts, verdict, parts):
    assert_says(judged("GPU", facts, ["n1"] * 2), verdict, *parts)


@pytest.mark.parametrize(
    "asked, verdict, text",
    [("direct", FAILURE, "PMM3D_TRANSPORT=direct, and nobody knows"), ("staged", OK, "staged (nobody knows)")],
)
def test_a_transport_that_is_asked_for(monkeypatch, asked, verdict, text):
    monkeypatch.setenv("PMM3D_TRANSPORT", asked)
    assert_says(judged("GPU", [gpu(*"ab", direct=False, why="nobody knows")] * 2, ["n1"] * 2), verdict, text)


def test_device_files_are_counted(tmp_path):
    def made(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return devices.devices_of_host(str(tmp_path))

    assert made("null") == 0
    assert made("dri/renderD128", "dri/renderD129") == 0  # of a display
    assert made("kfd") == 2
    assert made("nvidia0", "nvidia1", "nvidia2", "nvidiactl") == 3


TORCH = """
class cuda:
    device_count = lambda: 2
    get_device_properties = lambda index: type("Properties", (), {"uuid": f"ab-{index}"})
__version__ = "2.9"
ones = lambda size, device: type("Array", (), {"sum": lambda self: size})()
"""
CUPY = """
class cuda:
    class runtime:
        getDeviceCount = lambda: 1
        getDeviceProperties = lambda index: {"uuid": b"\\xab\\xcd"}
__version__ = "14.0"
ones = lambda size: type("Array", (), {"sum": lambda self: size})()
"""


def test_libraries_list_the_devices_in_a_child(monkeypatch, tmp_path):
    for name, module in (("torch", TORCH), ("cupy", CUPY)):
        (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(devices, "library_named", lambda name: name)
    monkeypatch.setattr(devices, "try_device", lambda library, seconds: Outcome(library == "cupy", "tried"))
    assert devices.try_library("torch", False) == ("2.9", ("ab0", "ab1"), False, "")
    assert devices.try_library("cupy", True) == ("14.0", ("abcd",), True, "tried")
    monkeypatch.setattr(devices, "devices_of_host", lambda: 2)
    facts = devices.gather(SimpleNamespace(is_first_here=True))
    assert facts.visible == ("ab0", "ab1") and facts.trials["torch"].why == "tried"
    (tmp_path / "cupy.py").write_text("raise RuntimeError('no device here')")
    assert devices.try_library("cupy", True) == ("RuntimeError: no device here", (), False, "")


# Network


def pair(axis, low, high, seconds=2e-6, rate=10e9):
    return network.Pair(axis, (low, high), seconds, rate)


def axes(*pairs, allowed=range(4), rdma=False):
    """The facts of four ranks, with all pairs on the first."""
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
        (
            axes(X[0], pair("x", 2, 3, rate=3e9), *Z),
            FOUR,
            WARNING,
            ["1 of 4 pairs within a host", "ranks 2-3 on n1", "3.00 GB/s, the best 10.00"],
        ),
        (
            axes(*X, SLOW_Z[0], pair("z", 1, 3, rate=1e8)),
            TWO_HOSTS,
            WARNING,
            ["pairs between hosts", "ranks 1, 3 on n1 and n2", "--switches=1"],
        ),
        (axes(X[0], pair("x", 2, 3, rate=3e9), *Z, allowed=[0]), FOUR, OK, []),
        (axes(*(pair("x", low, low + 1, rate=5e8) for low in (0, 2))), FOUR, WARNING, ["may not use shared memory"]),
        (axes(), FOUR, OK, ["grid 2x1x2: no axis with several ranks to measure"]),
    ],
)
def test_axes(facts, hosts, verdict, parts):
    assert_says(judged("axes", facts, hosts), verdict, *parts)


# Files


def folder(seen=0.0, kind="lustre", free=100 * GIB, exists=True, unwritable="", hdf5=""):
    return files.Folder("/scratch/me", kind, free, exists, unwritable, hdf5, seen)


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        (
            [folder(), folder(0.05)],
            OK,
            ["/scratch/me, lustre, 100 GiB free, a replaced file seen everywhere after 50 ms"],
        ),
        ([folder(), folder(2.5)], WARNING, ["took 2.5 s until every host saw", "actimeo=1"]),
        ([folder(kind="ext2/ext3"), folder(None)], FAILURE, ["n2 did not see", "a file system of each node's own"]),
        ([folder(), folder(None, exists=False)], FAILURE, ["/scratch/me is not a folder on n2"]),
        (
            [folder(None, unwritable="Permission denied"), folder(None)],
            FAILURE,
            ["rank 0 cannot write there: Permission"],
        ),
        ([folder(free=2**20), folder()], WARNING, ["1 MiB free"]),
        ([folder(hdf5="unable to lock file, errno = 38"), folder()], FAILURE, ["38", "HDF5_USE_FILE_LOCKING=FALSE"]),
    ],
)
def test_folder(facts, verdict, parts):
    assert_says(judged("folder", [facts[0], None, facts[1], None], TWO_HOSTS), verdict, *parts)


def test_the_file_system_of_a_path(tmp_path):
    assert files.file_system("/proc") == "proc" and files.file_system(str(tmp_path / "none")) == ""


# HDF5


def test_h5py_that_is_not_installed_is_a_note_and_no_failure(monkeypatch, tmp_path):
    session = SimpleNamespace(loading=1.0)
    assert "parallel)" in software.gather_versions(session).versions["h5py"]
    assert files.hdf5_problem(tmp_path / "a.h5") == ""
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    monkeypatch.setattr(software, "PACKAGES", ("mpi4py", "no-such-package"))
    assert files.hdf5_problem(tmp_path / "a.h5") == ""
    facts = [software.gather_versions(session)]
    assert_says(judged("software", facts, ONE), NOTE, "no-such-package none", "h5py none")


def test_a_folder_without_locks_is_the_problem_of_hdf5(monkeypatch, tmp_path):
    def refused(*arguments):
        raise OSError("unable to lock file")

    monkeypatch.setattr(h5py, "File", refused)
    assert files.hdf5_problem(tmp_path / "a.h5") == "unable to lock file"
