"""Mistakes of a C caller: a code and a text on every calling rank, and the caller continues."""

import re
import shutil
import subprocess

import pytest
from callers import ENVIRONMENT, LIBRARIES, ROOT

pytestmark = pytest.mark.thorough("hostile calls from C")
TOLD = re.compile(r"^(\d+) (\d) (\d) (.*)$", re.M)
ARGUMENT, DISAGREEMENT, MPI, PYTHON, THREAD = 1, 2, 4, 5, 6
ON_ALL = [  # errors on all ranks, after a mistake on the last rank or on all
    ("alpha", DISAGREEMENT, "alpha is a NULL pointer"),
    ("beta", DISAGREEMENT, "beta is a NULL pointer"),
    ("transa", DISAGREEMENT, r"got the character '\x01' (1)"),
    ("number", DISAGREEMENT, "99 names no matrix of this process: there is no such object, or it was freed"),
    ("kind", ARGUMENT, "names no matrix of this process: it is a grid"),
    ("numbers", ARGUMENT, "97 names no matrix"),
    ("grid number", ARGUMENT, "77 names no grid of this process"),
    ("exchanged", DISAGREEMENT, "the ranks passed different arguments"),
    ("disagree", DISAGREEMENT, "the ranks passed different arguments"),
    ("alias", ARGUMENT, "out shares memory with an array that is read"),
    ("shard", ARGUMENT, "shard is a NULL pointer"),
    ("layout", DISAGREEMENT, "layout is a NULL pointer"),
    ("axes", ARGUMENT, "got 'w/x'"),
    ("twice", ARGUMENT, "names the axis x twice"),
    ("type", ARGUMENT, "as in the BLAS; got the character 'q' (113)"),
    ("order", ARGUMENT, "got the character 'X' (88)"),
    ("negative", ARGUMENT, "got -1 x 6"),
    ("out", ARGUMENT, "matrix is a NULL pointer"),
    ("grid out", ARGUMENT, "grid is a NULL pointer"),
    ("shape", ARGUMENT, "grid 7x7x7 (data 1) needs 343 ranks"),
    ("shapes", DISAGREEMENT, "the ranks passed different arguments"),
    ("freed", ARGUMENT, "or it was freed"),
    ("calls", DISAGREEMENT, "the ranks made different calls"),
    ("move", ARGUMENT, "redistribute: the target is"),
    ("cyclic right", ARGUMENT, "1 names no context of this process: it is a grid"),  # in a product, and in a move
    ("cyclic number", ARGUMENT, "names no context"),
    ("cyclic kind", ARGUMENT, "a descriptor of a dense matrix has 9 whole numbers"),
    ("cyclic block", ARGUMENT, "blocks of a block-cyclic layout: two whole numbers of at least 1; got (0, 6)"),
    ("cyclic lld", ARGUMENT, "the leading dimension is 1"),
    ("cyclic copies", ARGUMENT, "the descriptor of a has RSRC -1 and CSRC 0"),
    ("cyclic source", ARGUMENT, "the first block is on process (2, 0)"),
    ("cyclic size", ARGUMENT, "are not within a matrix of 6 x 6"),
    ("cyclic ia", ARGUMENT, "A begins at row 2 and column 1"),
    ("cyclic null", DISAGREEMENT, "the descriptor of a is a NULL pointer"),
    ("cyclic array", ARGUMENT, "a is a NULL pointer"),
    ("cyclic type", DISAGREEMENT, "as in the BLAS; got the character 'i' (105)"),
    ("huge", DISAGREEMENT, "as many as memory can have"),
    ("comm freed", ARGUMENT, "transa and transb are 'N', 'T' or 'C'"),
    ("cyclic logical", ARGUMENT, "got '\\x01'"),
    ("cyclic wide", ARGUMENT, "as of integers of 8 bytes"),
    ("several target", DISAGREEMENT, "97 names no matrix"),
    ("several context", ARGUMENT, "97 names no context"),
    ("several a matrix", DISAGREEMENT, "97 names no matrix"),
    ("planned", DISAGREEMENT, "the ranks made different calls. rank 0: pmm3d_matmul; rank 1: pmm3d_plan_matmul"),
    ("planned cyclic", DISAGREEMENT, "rank 0: pmm3d_pgemm; rank 1: pmm3d_plan_pgemm"),
    ("plan out", ARGUMENT, "plan is a NULL pointer"),
    ("limits", DISAGREEMENT, "pmm3d_matmul(..., max_workspace=1073741824)"),
    ("for type", ARGUMENT, "the type is 's', 'd', 'c' or 'z'"),
    ("request free plan", ARGUMENT, "the plan has a request that was not waited for"),
    ("request free grid", ARGUMENT, "the grid has a request that was not waited for"),
]
HERE = [  # errors on one rank: the call is not collective, or its grid is unknown
    ("two grids", ARGUMENT, "97 names no matrix"),
    ("several source", ARGUMENT, "97 names no matrix"),
    ("several matrix", ARGUMENT, "97 names no matrix"),
    ("several a", ARGUMENT, "97 names no context"),
    ("plan", ARGUMENT, "names no plan of this process: it is a matrix"),
    ("request run", ARGUMENT, "this plan has a request: call pmm3d_wait first"),
    ("request begin", ARGUMENT, "this plan has a request"),
    ("request operands", ARGUMENT, "this plan has a request"),
    ("request pgemm", ARGUMENT, "a plan of pmm3d_redistribute; this call takes a plan of pmm3d_pgemm"),
    ("request null", ARGUMENT, "request is a NULL pointer"),
    ("request matrix", ARGUMENT, "97 names no matrix of this process"),
    ("request form", ARGUMENT, "MatmulPlan"),
    ("request kind", ARGUMENT, "names no request of this process: it is a plan"),
    ("request missing", ARGUMENT, "0 names no request of this process"),
    ("library", ARGUMENT, "unknown array library 'abacus'; there are numpy, torch, torch:DEVICE and cupy"),
    ("library null", ARGUMENT, "library is a NULL pointer"),
    ("closed", ARGUMENT, "closed"),
    ("null comm", ARGUMENT, "the communicator is MPI_COMM_NULL"),
    ("intercomm", ARGUMENT, "no intracommunicator"),
    ("box", ARGUMENT, "box is a NULL pointer"),
    ("box negative", ARGUMENT, "0 rows and columns or more"),
    ("free", ARGUMENT, "object is a NULL pointer"),
    ("other thread", THREAD, "called by another thread than the one that started MPI"),
]


def faults_of(program, ranks, *words, ended="lives on: right", **how):
    """(its process, (code, everywhere, text) of each of its wrong calls). It must continue to its end."""
    done = program("tests/embed/faults.c")(ranks, *words, **how)
    assert done.returncode == 0 and done.stdout.count(ended) == ranks, done.stdout + done.stderr
    return done, [(int(code), int(everywhere), text) for _, code, everywhere, text in TOLD.findall(done.stdout)]


def refused_starts(program, code, ranks=2, **how):
    """The process of a program that could not start, in both attempts of each rank."""
    done, found = faults_of(program, ranks, "start", ended="ended", **how)
    assert [fault[0] for fault in found] == [code] * 2 * ranks, done.stdout
    return done


@pytest.mark.parametrize(
    "which, code, text, everywhere", [*((*fault, 1) for fault in ON_ALL), *((*fault, 0) for fault in HERE)]
)
def test_each_caller_is_told(program, which, code, text, everywhere):
    done, found = faults_of(program, 2, which)
    assert [fault[:2] for fault in found] == [(code, everywhere)] * 2, done.stdout
    assert all(text in fault[2] for fault in found) and (not everywhere or found[0] == found[1]), done.stdout


def test_ranks_that_run_different_plans_are_told_with_debug(program):
    done, found = faults_of(program, 2, "runs", PMM3D_DEBUG="1")
    assert [fault[:2] for fault in found] == [(DISAGREEMENT, 1)] * 2, done.stdout


@pytest.mark.parametrize("which, text", [("before", "called before MPI_Init"), ("after", "called after MPI_Finalize")])
def test_a_call_at_the_wrong_time(program, which, text):
    """pmm3d_finalize does nothing then."""
    done, found = faults_of(program, 2, which, ended="lives on: right")
    assert [fault[0] for fault in found] == [MPI] * 2 and done.stdout.count(text) == 2


@pytest.mark.parametrize("which, fails", [("skips", [0, 1]), ("skips silently", [0, 0])])
def test_a_rank_that_ends_while_another_multiplies(program, which, fails):
    """The product fails on all ranks. MPI_Finalize of the rank that ended frees the objects, with the other rank."""
    done, _ = faults_of(program, 2, which, ended="ended")
    found = sorted(tuple(map(int, fault[:3])) for fault in TOLD.findall(done.stdout))
    assert found == [(rank, DISAGREEMENT, 1) for rank in fails], done.stdout + done.stderr
    told = re.findall("^pmm3d: MPI_Finalize .* the ranks made different calls", done.stderr, re.M)
    assert len(told) == (fails == [0, 0]), done.stderr  # rank 1 has no code of a call


def test_components_of_a_program_are_users_that_are_counted(program):
    """pmm3d_finalize of the last one frees the matrices. Then a second start works."""
    done = program("tests/embed/faults.c")(2, "two users")
    assert done.returncode == 0 and done.stdout.count("lives on: right") == 2 * 4, done.stdout + done.stderr
    assert [(fault[1], "or it was freed" in fault[3]) for fault in TOLD.findall(done.stdout)] == [("1", True)] * 2


def test_two_threads_at_once(program):
    done, found = faults_of(program, 2, "two threads")
    assert not found and done.stdout.count("met: 1") == 2, done.stdout


def test_each_thread_has_the_error_of_its_last_call(program):
    """Also whether all ranks have it. A new thread has none."""
    done, found = faults_of(program, 2, "two errors")
    assert "thread has" not in done.stdout and sorted(fault[:2] for fault in found) == [(1, 0)] * 2 + [(1, 1)] * 2
    assert all(("names no grid" in text) != everywhere for _, everywhere, text in found), found


@pytest.mark.parametrize(
    "python, text",
    [
        ("/no/such/python", "Python cannot be started from /no/such/python: No such file or directory"),
        ("/etc/passwd", "Python cannot be started from /etc/passwd: Permission denied"),
    ],
)
def test_a_python_that_is_none(program, python, text):
    assert refused_starts(program, PYTHON, PMM3D_PYTHON=python).stdout.count(text) == 4


def test_the_drop_in_is_no_user_that_is_counted(program, tmp_path):
    """pmm3d_finalize of the program leaves the drop-in's contexts."""
    log = tmp_path / "log"
    linked = program("tests/embed/users.c", flags=("-lpmm3d_scalapack", "-lscalapack-openmpi"))
    written = linked.written(2, PMM3D_EMBED_LOG=str(log), PMM3D_SCALAPACK_BELOW="0")
    assert sorted(written.splitlines()) == [f"{rank}: code 0, C 12" for rank in range(2)]
    assert log.read_text().count(": pmm3d, ") == 4, log.read_text()


@pytest.fixture
def environment(site_packages, tmp_path):
    """environment("numpy*"): (the Python of an environment with links to these packages, its site-packages)."""

    def make(*packages):
        subprocess.run([ENVIRONMENT / "bin" / "python", "-m", "venv", "--without-pip", tmp_path], check=True)
        [site] = tmp_path.glob("lib/python*/site-packages")
        for pattern in packages:
            found = [*site_packages.glob(pattern)]
            assert found
            for path in found:
                (site / path.name).symlink_to(path)
        return str(tmp_path / "bin" / "python"), site

    return make


@pytest.mark.parametrize(
    "packages, lacks",
    [
        ((), "_cffi_backend"),
        (("_cffi_backend*",), "mpi4py"),
        (("_cffi_backend*", "mpi4py"), "pmm3d"),
        (("_cffi_backend*", "mpi4py", "__editable__*pmm3d*"), "numpy"),
    ],
)
def test_a_python_that_lacks_a_package(program, environment, packages, lacks):
    text = f"lacks a package: No module named '{lacks}'. Install the library again: make embed or make install"
    assert refused_starts(program, PYTHON, PMM3D_PYTHON=environment(*packages)[0]).stdout.count(text) == 4


def test_a_library_without_its_part_with_python(program, tmp_path):
    for path in LIBRARIES.glob("libpmm3d.so*"):
        shutil.copy(path, tmp_path)
    done = refused_starts(program, PYTHON, ranks=1, LD_LIBRARY_PATH=str(tmp_path))
    assert "the part with Python cannot be loaded: " in done.stdout and "Install it again: make embed" in done.stdout


def test_a_python_with_a_damaged_cffi(program, environment):
    python, site = environment()
    (site / "_cffi_backend.py").write_text("")
    done = refused_starts(program, PYTHON, ranks=1, PMM3D_PYTHON=python)
    assert "what Python said is on stderr" in done.stdout and "initialization code failed" in done.stderr


def test_a_python_without_a_standard_library(program, site_packages, tmp_path):
    for file in (tmp_path / "bin" / "python", tmp_path / "lib" / site_packages.parent.name / "os.py"):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    done = refused_starts(program, PYTHON, ranks=1, PMM3D_PYTHON=str(tmp_path / "bin" / "python"))
    assert "failed to get the Python codec" in done.stdout and "an earlier attempt failed" in done.stdout


def test_a_package_that_an_mpi4py_lacks_is_not_another_mpi(program, environment):
    python, site = environment("_cffi_backend*")
    (site / "mpi4py").mkdir()
    (site / "mpi4py" / "__init__.py").write_text("rc = type('rc', (), {})\n")
    (site / "mpi4py" / "MPI.py").write_text("import no_such_package\n")
    assert "lacks a package: " in refused_starts(program, PYTHON, ranks=1, PMM3D_PYTHON=python).stdout


def test_variables_of_python_are_ignored(program, tmp_path):
    """They belong to the Python programs of the job."""
    (tmp_path / "numpy.py").write_text("raise RuntimeError('numpy of the job')\n")
    done, found = faults_of(program, 2, "not finalized", PYTHONPATH=str(tmp_path), PYTHONHOME="/no/such/folder")
    assert not found, done.stdout


def test_integers_of_another_size_are_refused_by_the_compiler(tmp_path):
    """The Fortran module has the size of the program's default integers. Those of MPI have 4 bytes here."""
    compiler = ["mpifort.openmpi", "-fdefault-integer-8", "-c"]
    subprocess.run([*compiler, ROOT / "embed/pmm3d.f90"], cwd=tmp_path, check=True)
    (tmp_path / "a.f90").write_text(
        "use pmm3d\nuse, intrinsic :: iso_c_binding\ninteger(c_int) :: desc(9), plan\n"
        "plan = pmm3d_run(plan)\nend program\n"
    )
    refused = subprocess.run([*compiler, "a.f90"], cwd=tmp_path, text=True, capture_output=True)
    assert refused.returncode != 0 and "passed INTEGER(4) to INTEGER(8)" in refused.stderr


def test_one_rank_that_cannot_start_is_not_waited_for(program):
    """All ranks get its error, with its number and its host."""
    done, found = faults_of(program, 3, "start on one", ended="ended")
    [text] = {fault[2] for fault in found}
    assert [fault[:2] for fault in found] == [(PYTHON, 1)] * 3, done.stdout
    assert re.match(r"rank 2 on \S+: Python cannot be started from /no/such/python: No such file", text)


@pytest.mark.parametrize("imitated", [False, True])
def test_an_mpi4py_with_another_mpi(program, environment, imitated):
    """One that cannot be loaded here, and an imitated one with its own MPI: two libraries in one process."""
    how = {"MPI4PY_MPIABI": "mpich"}
    if imitated:
        python, site = environment("_cffi_backend*")
        (site / "mpi4py").mkdir()
        (site / "mpi4py" / "__init__.py").write_text("rc = type('rc', (), {})\n")
        (site / "mpi4py" / "MPI.py").write_text(
            "Get_library_version = lambda: 'MPICH Version: 9, of a wheel'\nIs_initialized = lambda: False\n"
        )
        how = {"PMM3D_PYTHON": python}
    done = refused_starts(program, MPI, **how)
    assert done.stdout.count("Python has another MPI than this process, Open MPI v4") == 4, done.stdout
    assert done.stdout.count("MPICH Version: 9") == 4 * imitated


def test_a_rank_that_comes_late_does_not_end_the_job(program):
    done, _ = faults_of(program, 2, "one comes late", PMM3D_TIMEOUT="1", seconds=60)
    assert done.stderr.count("pmm3d: rank 0 has waited") >= 2, done.stderr  # after 1, 2 and 4 s
    assert "for all ranks of the communicator to come to this call. The job goes on." in done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_long_wait_below_thread_multiple_is_logged_and_goes_on(program, ranks):
    """For rank 0, and for the watchdog's leader and its deputy: ranks that do not wait cannot answer."""
    done, _ = faults_of(program, ranks, "long wait", PMM3D_TIMEOUT="1", seconds=60)
    assert f"rank {ranks - 1} has waited for more than 1 s. The job goes on." in done.stderr, done.stderr
    assert "below MPI_THREAD_MULTIPLE" in done.stderr
