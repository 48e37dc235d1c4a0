"""pmm3d doctor: verdicts on given facts about GPUs, networks, folders and HDF5."""

from types import SimpleNamespace

import h5py
import pytest
from doctor_verdicts import FAILURE, FOUR, GIB, NOTE, OK, ONE, TWO_HOSTS, WARNING, assert_says, judged

from pmm3d.comm.device_trial import Outcome
from pmm3d.tools.doctor import devices, files, network, software
from pmm3d.tools.doctor.nodes import Node

# Devices


def gpu(*visible, of_host=4, bound="", text="14.0", direct=True, why="MPI takes device pointers", asked="auto"):
    """A rank that sees devices by cupy. The trials of a library that does not compute are in `text`."""
    trial = devices.Trial(text, visible, direct, why)
    return devices.Devices(of_host, bound, ("cupy",), {"cupy": trial}, asked)


def without_gpu(text):
    return gpu(text=text, direct=False, why="")


NO_GPU = devices.Devices(0, "", ("cupy",), {})
NO_LIBRARY = devices.Devices(4, "", (), {})
REFUSED = dict(direct=False, why="this MPI does not take device pointers")


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        ([NO_GPU] * 2, OK, ["none; installed: cupy"]),
        ([without_gpu("CUDARuntimeError: no device")] * 2, WARNING,
         ["cupy computes on no GPU on ranks 0-1 (n1): CUDARuntimeError: no device", "--gpus-per-node", "cupy-cuda12x"]),
        ([gpu(*"abcd"), gpu(*"abcd", why="")], OK,
         ["4 on rank 0 of 4", "cupy 14.0", "cupy's arrays would go direct, if the ranks' own trial agrees (MPI takes"]),
        ([gpu("a"), without_gpu("RuntimeError: no GPU")], WARNING, ["cupy computes on no GPU on rank 1 (n1): Runtime"]),
        ([gpu("a", bound="CUDA_VISIBLE_DEVICES=0"), gpu("b", bound="CUDA_VISIBLE_DEVICES=1")], WARNING,
         ["each rank sees one GPU of 4 (CUDA_VISIBLE_DEVICES=0)", "--gpu-bind=none"]),
        ([gpu("a", of_host=1), gpu("a", of_host=1)], WARNING, ["2 ranks use 1 GPU", "MPS"]),
        ([NO_LIBRARY] * 2, WARNING, ["neither cupy nor torch"]),
        ([without_gpu("did not end within 60 s"), gpu(*"ab")], NOTE,
         ["cupy on rank 0: to load and compute did not end within 60 s", "once more"]),
        ([gpu(*"ab", direct=False, why="nobody knows"), gpu(*"ab", why="")], NOTE,
         ["cupy: nobody knows (on n1): messages go through pinned", "cupy's arrays would go staged (nobody knows)"]),
        ([gpu(*"ab", **REFUSED, asked="staged")] * 2, OK, ["cupy's arrays go staged (asked for)"]),
        ([gpu(*"ab", **REFUSED, asked="direct")] * 2, FAILURE, ["PMM3D_TRANSPORT=direct, and this MPI does not"]),
        ([gpu(*"ab", asked="PMM3D_TRANSPORT='fast' is not understood")] * 2, FAILURE, ["'fast'", "unset it"]),
    ],
)
def test_gpus(facts, verdict, parts):
    assert_says(judged("GPU", facts, ["n1"] * 2), verdict, *parts)


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
    ],
)
def test_axes(facts, hosts, verdict, parts):
    assert_says(judged("axes", facts, hosts), verdict, *parts)


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


def test_the_file_system_of_a_path(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("overlay / overlay rw 0 0\nhome:/x /home nfs4 rw 0 0\nscratch /home/my\\040work lustre rw 0 0\n"
                      "new / ext4 rw 0 0\n")
    assert files.file_system("/home/me", mounts) == ("nfs4", "/home")
    assert files.file_system("/home/my work/run", mounts) == ("lustre", "/home/my work")
    assert files.file_system("/homes", mounts) == ("ext4", "/")
    assert files.file_system("/home", tmp_path / "none") == ("", "")


# HDF5


def test_hdf5():
    serial, parallel = files.Hdf5("3.12", "1.14", False), files.Hdf5("3.12", "1.14", True)
    assert_says(judged("HDF5", [parallel], ONE), OK, "h5py 3.12, HDF5 1.14, parallel")
    assert_says(judged("HDF5", [serial], ONE), NOTE, "one file per rank", "HDF5_MPI=ON")
    assert_says(judged("HDF5", [serial, parallel], ["n1"] * 2), FAILURE, "rank 1 have another h5py")
    assert_says(judged("HDF5", [None, None], ["n1"] * 2), NOTE, "no h5py", 'pip install ".[io]" in the clone of pmm3d')
    assert_says(judged("HDF5", [None, parallel], ["n1"] * 2), FAILURE, "rank 1 have another h5py")
    locked = parallel._replace(problem="unable to lock file, errno = 38")
    assert_says(judged("HDF5", [locked, parallel], ["n1"] * 2), FAILURE, "errno = 38", "HDF5_USE_FILE_LOCKING=FALSE")


def test_h5py_that_is_not_installed_is_a_note_and_no_failure(monkeypatch, tmp_path):
    session = SimpleNamespace(started=1.0, rank=0, folder=tmp_path, name="test")
    assert files.gather_hdf5(session).problem == "" and software.gather_versions(session).versions["h5py"] != "none"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    monkeypatch.setattr(software, "PACKAGES", ("mpi4py", "no-such-package"))
    assert files.gather_hdf5(session) is None
    assert_says(judged("software", [software.gather_versions(session)], ONE), OK, "no-such-package none")


def test_a_folder_without_locks_is_the_problem_of_hdf5_and_an_unwritable_one_is_not(monkeypatch, tmp_path):
    def refused(*arguments):
        raise OSError("unable to lock file")

    assert files.hdf5_problem(tmp_path / "no folder" / "a.h5") == ""
    monkeypatch.setattr(h5py, "File", refused)
    assert files.hdf5_problem(tmp_path / "a.h5") == "unable to lock file"
    assert not list(tmp_path.iterdir())
