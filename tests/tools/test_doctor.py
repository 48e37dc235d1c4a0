"""pmm3d doctor: verdicts on given facts about software, launchers, hosts, cores, BLAS and memory; errors of checks."""

import pytest
from doctor_verdicts import FAILURE, FOUR, GIB, NOTE, OK, ONE, TWO_HOSTS, WARNING, assert_says, judged

from pmm3d.model import machine
from pmm3d.model.machine import AVX512, Blas, Cpu
from pmm3d.tools.doctor import checks, nodes, software
from pmm3d.tools.doctor.finding import Examination, Finding, Problem, ranks_by, spread, unlike_first
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


def test_spreads_and_ranks_in_words():
    assert spread([1.0, 1.04]) == "1.0" and spread([1, 2, 9]) == "2.0 (from 1.0 to 9.0)"
    assert ranks_by(["b", "a", "b"]) == {"b": [0, 2], "a": [1]} and unlike_first(["b", "a", "b"]) == [1]


# Errors of one check


def quote(finding, facts, hosts):
    finding.found = f"{facts}"


def check(judge=quote):
    return checks.Check("mine", lambda session: None, judge)


def test_facts_are_judged_in_rank_order():
    assert checks.conclude(check(), {1: Answer("b"), 0: Answer("a")}, ["n1", "n1"]).found == "['a', 'b']"


def test_a_check_that_raises_is_a_failure_with_its_text():
    answers = {
        0: Answer(1),
        1: Answer(None, "OSError: no"),
        3: Answer(None, "OSError: no"),
        2: Answer(None, "NoAnswer: waited for rank 1", waited=True),
    }
    finding = checks.conclude(check(), answers, FOUR)
    assert_says(finding, FAILURE, "ranks 1, 3: OSError: no")
    assert "waited" not in finding.problems[0].text
    unjudged = checks.conclude(check(lambda finding, facts, hosts: 1 / 0), {0: Answer(1)}, ONE)
    assert_says(unjudged, FAILURE, "ZeroDivision")
    only_waiting = {0: Answer(None, "NoAnswer: waited", waited=True)}
    assert_says(checks.conclude(check(), only_waiting, ONE), FAILURE, "rank 0: NoAnswer: waited")


def test_of_many_problems_the_worst_are_listed():
    def judge(finding, facts, hosts):
        for _ in range(100):
            finding.warn("slow", "wait")
        finding.fail("broken", "mend it")

    many = checks.conclude(check(judge), {0: Answer()}, ONE)
    assert len(many.problems) == checks.MOST_PROBLEMS + 1
    assert_says(many, FAILURE, "broken", f"{101 - checks.MOST_PROBLEMS} more problems are not listed")


def test_ranks_that_do_not_answer_are_named_with_their_hosts():
    assert_says(
        checks.conclude(check(), {0: Answer(1), 1: Answer(1)}, TWO_HOSTS),
        FAILURE,
        "no answer from ranks 2-3 on n2",
        "srun --exclude",
    )


# Software


def packages(seconds=1.0, python="3.11.2", numpy="2.0", h5py="3.12 (HDF5 1.14, not parallel)"):
    versions = dict(Python=python, pmm3d="0.1.0", numpy=numpy, scipy="1.15", mpi4py="4.1.0", h5py=h5py)
    return software.Versions(versions, seconds)


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        ([packages(), packages()], OK, ["Python 3.11.2", "numpy 2.0", "HDF5 1.14, not parallel", "in 1.0 s"]),
        ([packages(seconds=1), packages(seconds=40)], NOTE, ["took 40 s", "container image"]),
        ([packages(), packages(numpy="1.26")], FAILURE, ["differ between rank 1 and rank 0: numpy 1.26 and 2.0"]),
        ([packages(), packages(python="3.10.1")], FAILURE, ["Python 3.10.1 and 3.11.2"]),
        ([packages(h5py="none")] * 2, NOTE, ["h5py none", 'pip install "pmm3d[io]"']),
    ],
)
def test_packages(facts, verdict, parts):
    assert_says(judged("software", facts, ["n1"] * 2), verdict, *parts)


def mpi(library="MPICH 5.0", level=3):
    return software.Mpi(library, (4, 1), level)


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        ([mpi()] * 2, OK, ["MPICH 5.0, MPI 4.1; threads MULTIPLE"]),
        ([mpi(level=2)] * 2, NOTE, ["SERIALIZED", "cannot report their position"]),
        ([mpi(), mpi(level=1)], WARNING, ["thread level FUNNELED", "unset MPI4PY_RC_THREADS"]),
        ([mpi(), mpi("MPICH 4.0")], FAILURE, ["MPICH 4.0 on rank 1, but MPICH 5.0 on rank 0"]),
    ],
)
def test_mpi(facts, verdict, parts):
    assert_says(judged("MPI", facts, ["n1"] * 2), verdict, *parts)


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        (software.Launcher(4, "PMI_SIZE", 4, "MPICH", 0), OK, ["4 tasks (PMI_SIZE), 4 ranks"]),
        (software.Launcher(None, "", 1, "MPICH", 0), NOTE, ["one rank", "srun --mpi=pmi2", "pmm3d.launcher"]),
        (software.Launcher(None, "", 1, "Open MPI", 64), NOTE, ["this job has 64 tasks", "srun --mpi=pmix -n 64"]),
        (
            software.Launcher(4, "SLURM_STEP_NUM_TASKS", 1, "Open MPI", 4),
            FAILURE,
            ["each task is a world of its own", "SLURM_STEP_NUM_TASKS=4", "srun --mpi=pmix"],
        ),
        (software.Launcher(8, "PMI_SIZE", 2, "Unknown", 0), FAILURE, ["do not agree", "srun --mpi=list"]),
    ],
)
def test_launcher(facts, verdict, parts):
    assert_says(judged("launcher", [facts], ONE), verdict, *parts)


# Nodes


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


def node(
    cores=(0,), of_host=8, quota=None, threads=1, available=64 * GIB, limit=None, shm=8 * GIB, locked=-1, rdma=False
):
    return nodes.Node(frozenset(cores), of_host, quota, threads, available, limit, 8 * GIB, shm, locked, rdma)


def cores(*allowed, **more):
    return node(allowed, **more)


@pytest.mark.parametrize(
    "facts, verdict, parts",
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
)
def test_cores(facts, verdict, parts):
    assert_says(judged("cores", facts, FOUR), verdict, *parts)


def test_cores_of_each_host_are_their_own():
    assert_says(judged("cores", [cores(0), cores(1), cores(0), cores(1)], TWO_HOSTS), OK)
    assert_says(judged("cores", [cores(0), cores(1), cores(0), cores(0)], TWO_HOSTS), FAILURE, "n2: ranks 2-3 share")


def test_limits_of_control_groups(tmp_path):
    inner = tmp_path / "groups" / "job" / "step"
    inner.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("1:name=x:/old\n0::/job/step\n")
    (inner / "cpu.max").write_text("max 100000")
    (inner.parent / "cpu.max").write_text("250000 100000")
    (inner / "memory.max").write_text("max")
    (inner.parent / "memory.max").write_text("1048576")
    (inner.parent.parent / "cpu.max").write_text("300000 100000")
    root = str(tmp_path / "groups")
    assert machine.cgroup_limit("cpu.max", str(own), root) == 2.5
    assert machine.cgroup_limit("memory.max", str(own), root) == 2**20
    assert machine.cgroup_limit("cpu.max", str(tmp_path / "none"), root) == 3.0
    assert machine.cgroup_limit("memory.max", str(tmp_path / "none"), root) is None
    assert machine.cgroup_limit("cpu.max", str(own), str(tmp_path / "nowhere")) is None


AMD = Cpu("AuthenticAMD", "EPYC", frozenset(AVX512))
INTEL = Cpu("GenuineIntel", "Xeon", frozenset(AVX512))


def blas(rank=0, alone=100.0, together=95.0, kernel="SkylakeX", processor=INTEL, name="openblas", exported=False):
    return nodes.BlasRates(Blas(name, "0.3.30", kernel, 1), processor, exported, alone, together, frozenset([rank]))


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        ([blas(rank) for rank in range(4)], OK, ["openblas 0.3.30, kernel SkylakeX, on Xeon", "alone 100.0", "95.0"]),
        (
            [blas(rank, processor=AMD, kernel="Haswell") for rank in range(4)],
            WARNING,
            ["its Haswell kernel", "set OPENBLAS_CORETYPE=SkylakeX"],
        ),
        ([blas(rank, processor=AMD) for rank in range(4)], NOTE, ["export OPENBLAS_CORETYPE=SkylakeX"]),
        ([blas(rank, processor=AMD, exported=True) for rank in range(4)], OK, ["kernel SkylakeX"]),
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
)
def test_blas(facts, verdict, parts):
    assert_says(judged("BLAS", facts, FOUR), verdict, *parts)


def test_a_variable_that_was_set_later_was_not_there_at_the_start(monkeypatch):
    monkeypatch.setenv("PMM3D_SET_LATER", "1")
    assert nodes.at_start("PATH") and not nodes.at_start("PMM3D_SET_LATER") and not nodes.at_start("PAT")


@pytest.mark.parametrize(
    "facts, verdict, parts",
    [
        (node(), OK, ["16 GiB a rank", "8 GiB free of 8 GiB"]),
        (node(available=GIB), WARNING, ["256 MiB of memory a rank", "--mem=0"]),
        (node(available=2 * GIB, limit=2 * GIB), WARNING, ["512 MiB of memory a rank", "limited to 2 GiB a node"]),
        (node(available=0), OK, []),
        (node(shm=2**26), WARNING, ["/dev/shm has 64 MiB free for 4 ranks", "--shm-size=1g"]),
        (node(locked=2**16, rdma=True), WARNING, ["64 KiB of memory may be locked", "ulimit -l unlimited"]),
        (node(locked=2**16), OK, []),
        (node(rdma=True), OK, []),
    ],
)
def test_memory(facts, verdict, parts):
    assert_says(judged("memory", [facts] * 4, FOUR), verdict, *parts)


def test_one_rank_needs_no_shared_memory():
    assert_says(judged("memory", [node(shm=0)], ONE), OK)
