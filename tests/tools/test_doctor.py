"""pmm3d doctor: verdicts on given facts about software, nodes, GPUs, networks and folders; errors of checks."""

import sys
from types import SimpleNamespace

import h5py
import pytest
from doctor_verdicts import FAILURE, FOUR, GIB, NOTE, OK, ONE, TWO_HOSTS, WARNING, assert_says, judged

from pmm3d.comm.device_trial import Outcome
from pmm3d.model import machine
from pmm3d.model.machine import AVX512, Blas, Cpu
from pmm3d.tools.doctor import checks, devices, files, network, nodes, software
from pmm3d.tools.doctor.finding import Examination, Finding, Problem
from pmm3d.tools.doctor.session import Answer

# Verdicts


def test_the_worst_problem_is_the_verdict_and_gives_the_exit_code():
    problems = [Problem(NOTE, "a", "b"), Problem(FAILURE, "c", "d"), Problem(WARNING, "e", "f")]
    codes = [Examination([], [Finding("x", "y", problems[:count])]).verdict.exit_code for count in range(4)]
    assert codes == [0, 0, 2, 2]
    assert Examination([], [Finding("x", "y", [problems[2]]), Finding("z", "y")]).verdict.exit_code == 1
    assert Finding("x", "y", [problems[2]]).as_json() == {
        "check": "x",
        "verdict": "warning",
        "found": "y",
        "figures": {},
        "problems": [{"verdict": "warning", "text": "e", "remedy": "f"}],
    }


# Errors of one check


def quote(finding, facts, hosts):
    finding.found = f"{facts}"


def check(judge):
    return checks.Check("mine", lambda session: None, judge)


NO = Answer(None, "OSError: no")


@pytest.mark.parametrize(
    "answers, judge, texts",
    [
        (
            {0: Answer(1), 1: NO, 3: NO, 2: Answer(None, "NoAnswer: waited for rank 1", waited=True)},
            quote,
            ["ranks 1, 3: OSError: no"],
        ),
        (dict.fromkeys(range(4), Answer(1)), lambda finding, facts, hosts: 1 / 0, ["ZeroDivision"]),
        ({0: Answer(None, "NoAnswer: waited", waited=True)}, quote, ["rank 0: NoAnswer: waited"]),
        ({0: Answer(1), 1: Answer(1)}, quote, ["no answer from ranks 2-3 on n2", "srun --exclude"]),
    ],
)
def test_a_check_that_raises_or_has_no_answer_is_a_failure_with_its_text(answers, judge, texts):
    """The ranks that waited for the failed one are not named, unless nobody failed."""
    finding = checks.conclude(check(judge), answers, TWO_HOSTS[: 4 if len(answers) > 1 else 1])
    assert_says(finding, FAILURE, *texts)
    assert ("waited" in finding.problems[0].text) == (len(answers) == 1)


def test_of_many_problems_the_worst_are_listed():
    def judge(finding, facts, hosts):
        for _ in range(100):
            finding.warn("slow", "wait")
        finding.fail("broken", "mend it")

    many = checks.conclude(check(judge), {0: Answer()}, ONE)
    assert len(many.problems) == checks.MOST_PROBLEMS + 1
    assert_says(many, FAILURE, "broken", f"{101 - checks.MOST_PROBLEMS} more problems are not listed")


# Software


def packages(seconds=1.0, python="3.11.2", numpy="2.0", h5py="3.12 (HDF5 1.14, not parallel)"):
    versions = dict(Python=python, pmm3d="0.1.0", numpy=numpy, scipy="1.15", mpi4py="4.1.0", h5py=h5py)
    return software.Versions(versions, seconds)


def mpi(library="MPICH 5.0", level=3):
    return software.Mpi(library, (4, 1), level)


# Nodes


def node(
    cores=(0,), of_host=8, quota=None, threads=1, available=64 * GIB, limit=None, shm=8 * GIB, locked=-1, rdma=False
):
    return nodes.Node(frozenset(cores), of_host, quota, threads, available, limit, 8 * GIB, shm, locked, rdma)


def cores(*allowed, **more):
    return node(allowed, **more)


AMD = Cpu("AuthenticAMD", "EPYC", frozenset(AVX512))
INTEL = Cpu("GenuineIntel", "Xeon", frozenset(AVX512))


def blas(rank=0, alone=100.0, together=95.0, kernel="SkylakeX", processor=INTEL, name="openblas", exported=""):
    return nodes.BlasRates(Blas(name, "0.3.30", kernel, 1), processor, exported, alone, together, frozenset([rank]))


def gpu(*visible, of_host=4, bound="", text="14.0", direct=True, why="MPI takes device pointers"):
    """A rank that sees devices by cupy. The trials of a library that does not compute are in `text`."""
    trial = devices.Trial(text, visible, direct, why)
    return devices.Devices(of_host, bound, ("cupy",), {"cupy": trial})


def without_gpu(text):
    return gpu(text=text, direct=False, why="")


NO_GPU = devices.Devices(0, "", ("cupy",), {})
NO_LIBRARY = devices.Devices(4, "", (), {})


VERDICTS = [  # check, hosts of the ranks, cases: (facts, verdict, parts of the text)
    (
        "software",
        ["n1"] * 2,
        [
            ([packages(), packages()], OK, ["Python 3.11.2", "numpy 2.0", "HDF5 1.14, not parallel", "in 1.0 s"]),
            ([packages(seconds=1), packages(seconds=40)], NOTE, ["took 40 s", "container image"]),
            ([packages(), packages(numpy="1.26")], FAILURE, ["differ between rank 1 and rank 0: numpy 1.26 and 2.0"]),
            ([packages(), packages(python="3.10.1")], FAILURE, ["Python 3.10.1 and 3.11.2"]),
            ([packages(h5py="none")] * 2, NOTE, ["h5py none", 'pip install "pmm3d[io]"']),
        ],
    ),
    (
        "MPI",
        ["n1"] * 2,
        [
            ([mpi()] * 2, OK, ["MPICH 5.0, MPI 4.1; threads MULTIPLE"]),
            ([mpi(level=2)] * 2, NOTE, ["SERIALIZED", "cannot report their position"]),
            ([mpi(), mpi(level=1)], WARNING, ["thread level FUNNELED", "unset MPI4PY_RC_THREADS"]),
            ([mpi(), mpi("MPICH 4.0")], FAILURE, ["MPICH 4.0 on rank 1, but MPICH 5.0 on rank 0"]),
        ],
    ),
    (
        "launcher",
        ONE,
        [
            ([software.Launcher(4, "PMI_SIZE", 4, "MPICH", 0)], OK, ["4 tasks (PMI_SIZE), 4 ranks"]),
            ([software.Launcher(None, "", 1, "MPICH", 0)], NOTE, ["one rank", "srun --mpi=pmi2", "pmm3d.launcher"]),
            (
                [software.Launcher(None, "", 1, "Open MPI", 64)],
                NOTE,
                ["this job has 64 tasks", "srun --mpi=pmix -n 64"],
            ),
            (
                [software.Launcher(4, "SLURM_STEP_NUM_TASKS", 1, "Open MPI", 4)],
                FAILURE,
                ["each task is a world of its own", "SLURM_STEP_NUM_TASKS=4", "srun --mpi=pmix"],
            ),
            ([software.Launcher(8, "PMI_SIZE", 2, "Unknown", 0)], FAILURE, ["do not agree", "srun --mpi=list"]),
        ],
    ),
    (
        "cores",
        FOUR,
        [
            ([cores(rank) for rank in range(4)], OK, ["4 ranks on 4 of 8 cores, each bound to 1, with 1 thread"]),
            ([cores(*range(4))] * 4, OK, ["each free to use 4"]),
            ([cores(0)] * 4, FAILURE, ["n1: ranks 0-3 share core 0, of 8", "--cpu-bind=cores"]),
            ([cores(0), cores(1), cores(1), cores(2)], FAILURE, ["ranks 1-2 share core 1"]),
            ([cores(0, 1), cores(0, 1), cores(0), cores(5)], FAILURE, ["ranks 0-2 share cores 0, 1"]),
            ([cores(rank // 2, of_host=2) for rank in range(4)], WARNING, ["4 ranks on 2 cores; they take turns"]),
            ([cores(0, 1, of_host=2)] * 4, WARNING, ["fewer ranks"]),
            ([cores(min(rank, 1), of_host=2) for rank in range(4)], FAILURE, ["ranks 1-3 share core 1"]),
            (
                [cores(*range(8), threads=4)] * 4,
                WARNING,
                ["16 BLAS threads of 4 ranks on 8 cores", "OPENBLAS_NUM_THREADS", "to 2"],
            ),
            ([cores(*range(8))] * 4, NOTE, ["leave 4 of 8 cores idle", "to 2"]),
            ([cores(*range(4), quota=2.0)] * 4, WARNING, ["may use 2 cores' worth of time", "docker run --cpus"]),
            ([cores(*range(4), quota=4.0)] * 4, OK, []),
        ],
    ),
    (
        "BLAS",
        FOUR,
        [
            (
                [blas(rank) for rank in range(4)],
                OK,
                ["openblas 0.3.30, kernel SkylakeX, on Xeon", "alone 100.0", "95.0"],
            ),
            (
                [blas(rank, processor=AMD, kernel="Haswell") for rank in range(4)],
                WARNING,
                ["its Haswell kernel", "set OPENBLAS_CORETYPE=SkylakeX before Python starts"],
            ),
            (
                [blas(rank, processor=AMD, kernel="Haswell", exported="Haswell") for rank in range(4)],
                WARNING,
                [
                    "because the environment sets OPENBLAS_CORETYPE=Haswell",
                    "set OPENBLAS_CORETYPE=SkylakeX in its place",
                ],
            ),
            ([blas(rank, processor=AMD) for rank in range(4)], NOTE, ["export OPENBLAS_CORETYPE=SkylakeX"]),
            ([blas(rank, processor=AMD, exported="SkylakeX") for rank in range(4)], OK, ["kernel SkylakeX"]),
            ([blas(rank, name="unknown", kernel="") for rank in range(4)], WARNING, ["no known BLAS"]),
            ([blas(rank, kernel="Zen" if rank else "Haswell") for rank in range(4)], WARNING, ["differ"]),
            (
                [blas(rank, together=30.0 if rank == 2 else 95.0) for rank in range(4)],
                WARNING,
                ["rank 2 on n1: less than 60% of the median", "srun --exclude=n1"],
            ),
            ([blas(rank, together=50.0) for rank in range(4)], WARNING, ["reaches 50% of the rate", "nomultithread"]),
            ([blas(0, together=20.0) for _ in range(4)], OK, []),
        ],
    ),
    (
        "memory",
        FOUR,
        [
            ([node()] * 4, OK, ["16 GiB a rank", "8 GiB free of 8 GiB"]),
            ([node(available=GIB)] * 4, WARNING, ["256 MiB of memory a rank", "--mem=0"]),
            (
                [node(available=2 * GIB, limit=2 * GIB)] * 4,
                WARNING,
                ["512 MiB of memory a rank", "limited to 2 GiB a node"],
            ),
            ([node(available=0)] * 4, OK, []),
            ([node(shm=2**26)] * 4, WARNING, ["/dev/shm has 64 MiB free for 4 ranks", "--shm-size=1g"]),
            ([node(locked=2**16, rdma=True)] * 4, WARNING, ["64 KiB of memory may be locked", "ulimit -l unlimited"]),
            ([node(locked=2**16)] * 4, OK, []),
            ([node(rdma=True)] * 4, OK, []),
        ],
    ),
    (
        "GPU",
        ["n1"] * 2,
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
    ),
    ("memory", ONE, [([node(shm=0)], OK, [])]),
    (
        "cores",
        TWO_HOSTS,
        [
            ([cores(0), cores(1), cores(0), cores(1)], OK, []),
            ([cores(0), cores(1), cores(0), cores(0)], FAILURE, ["n2: ranks 2-3 share"]),
        ],
    ),
]


@pytest.mark.parametrize(
    "check, hosts, facts, verdict, parts", [(check, hosts, *case) for check, hosts, cases in VERDICTS for case in cases]
)
def test_verdicts_on_software_launchers_and_nodes(check, hosts, facts, verdict, parts):
    assert_says(judged(check, facts, hosts), verdict, *parts)


@pytest.mark.parametrize(
    "hosts, verdict, parts",
    [
        (["n1"], OK, ["1 rank on 1 host: n1 (1)"]),
        (TWO_HOSTS, OK, ["4 ranks on 2 hosts: n1 (2), n2 (2)"]),
        (["n1", "n2", "n1", "n2"], WARNING, ["x axis", "srun --distribution=block"]),
        (["n1", "n1", "n1", "n2"], WARNING, ["from 1 to 3 ranks on a host (fewer on n2)", "--ntasks-per-node"]),
    ],
)
def test_hosts(hosts, verdict, parts):
    assert_says(judged("hosts", [None] * len(hosts), hosts), verdict, *parts)


def test_limits_of_control_groups(tmp_path):
    for path, text in {
        "groups/cpu.max": "300000 100000",
        "groups/job/cpu.max": "250000 100000",
        "groups/job/memory.max": "1048576",
        "groups/job/step/cpu.max": "max 100000",
        "groups/job/step/memory.max": "max",
        "cgroup": "1:name=x:/old\n0::/job/step\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for name, own, root, limit in (
        ("cpu.max", "cgroup", "groups", 2.5),
        ("memory.max", "cgroup", "groups", 2**20),
        ("cpu.max", "none", "groups", 3.0),
        ("memory.max", "none", "groups", None),
        ("cpu.max", "cgroup", "nowhere", None),
    ):
        assert machine.cgroup_limit(name, str(tmp_path / own), str(tmp_path / root)) == limit


def test_a_variable_that_was_set_later_was_not_there_at_the_start(monkeypatch):
    monkeypatch.setenv("PMM3D_SET_LATER", "1")
    assert nodes.at_start("PATH") and not nodes.at_start("PMM3D_SET_LATER") and not nodes.at_start("PAT")


# Devices


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
    here = nodes.Node(frozenset(allowed), 4, None, 1, 0, None, 0, 0, -1, rdma)
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
