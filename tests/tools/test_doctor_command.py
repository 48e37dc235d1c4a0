"""pmm3d doctor as a user runs it: alone, under right and wrong launchers, and if a check hangs."""

import json
import os
import subprocess
import sys

import pytest
from loops import given

from pmm3d.tools.launcher import installed_wheel

PROGRAM = """
    import sys
    from pmm3d.tools.cli import main
    sys.argv[0] = "pmm3d"
    main()
"""
NAMES = ["software", "MPI", "launcher", "hosts", "cores", "BLAS", "memory", "GPU", "axes", "folder"]


@pytest.fixture
def doctor(job):
    """doctor(ranks, *arguments, **environment): the result of the command on this number of ranks."""
    return lambda ranks, *arguments, **env: job(
        ranks, PROGRAM, "doctor", *map(str, arguments), env={"TERM": "dumb", "COLUMNS": "120"} | env
    )


def read(path):
    told = json.loads(path.read_text())
    return told, {entry["check"]: entry for entry in told["checks"]}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough("few of the checks of 4 ranks")), 4])
def test_every_check_is_made(doctor, tmp_path, ranks):
    done = doctor(ranks, "--json", tmp_path / "a.json", "--folder", tmp_path)
    told, found = read(tmp_path / "a.json")
    assert list(found) == NAMES
    assert all("could not be examined" not in entry["found"] for entry in found.values()), done.stdout
    assert told["ranks"] == ranks == found["launcher"]["figures"]["world"] and told["seconds"] > 0
    assert done.returncode == told["exit_code"] == {"ok": 0, "note": 0, "warning": 1, "failure": 2}[told["verdict"]]
    assert "Traceback" not in done.stdout + done.stderr
    for name, entry in found.items():
        assert done.stdout.count(f"  {name}  ") == 1 and entry["verdict"] in done.stdout
        assert (entry["verdict"] == "ok") == (not entry["problems"])
    assert found["folder"]["figures"]["hdf5"] == ""
    assert 0 < min(found["BLAS"]["figures"]["core_gflops"].values()) < 1e4
    assert not list(tmp_path.glob(".pmm3d-doctor*"))
    measured = found["axes"]["figures"].get("axes", {}).values()
    assert sum(axis["pairs"] for axis in measured) == (4 if ranks > 1 else 0)
    assert all(1e-8 < axis["latency_seconds"] < 1 and 1e6 < axis["bytes_per_second"] < 1e12 for axis in measured)
    if ranks > len(os.sched_getaffinity(0)):
        assert found["cores"]["verdict"] in ("warning", "failure") and done.returncode > 0


def test_a_grid_that_does_not_fit_and_a_folder_that_is_none(doctor, tmp_path):
    done = doctor(2, "--grid", "3x3x3", "--folder", tmp_path / "none", "--json", tmp_path / "a.json")
    _, found = read(tmp_path / "a.json")
    [problem] = found["axes"]["problems"]
    assert done.returncode == 2 and list(found) == NAMES
    assert "needs 27 ranks" in problem["text"] and "--grid auto" in problem["remedy"]
    assert found["axes"]["verdict"] == found["folder"]["verdict"] == "failure"


def test_a_folder_that_cannot_be_written_and_a_grid_that_needs_more_ranks_than_one(doctor, tmp_path):
    done = doctor(1, "--folder", "/proc", "--json", tmp_path / "no" / "such.json", "--grid", "2x2x2")
    assert done.returncode == 2
    for words in ("needs 8 ranks, and there is 1", "rank 0 cannot write there", "--json", "another path"):
        assert words in done.stdout


def test_too_many_threads_and_too_low_a_thread_level(doctor, tmp_path):
    unbound = {"PRTE_MCA_hwloc_default_binding_policy": "none", "HYDRA_BINDING": "none"}
    threads = {"OPENBLAS_NUM_THREADS": len(os.sched_getaffinity(0)), "MPI4PY_RC_THREAD_LEVEL": "funneled"}
    done = doctor(2, "--json", tmp_path / "a.json", **threads, **unbound)
    _, found = read(tmp_path / "a.json")
    assert found["cores"]["verdict"] in ("warning", "failure") and done.returncode > 0
    assert found["MPI"]["verdict"] == "warning" and found["MPI"]["figures"]["thread_level"] == "FUNNELED"


def alone(task, cwd, *arguments, path=(), **variables):
    """doctor as one of several tasks, each of which has an MPI world of one rank."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_COMM"))}
    environ |= variables | {"SLURM_PROCID": str(task), "PYTHONPATH": os.pathsep.join(filter(None, (*path, *sys.path)))}
    return subprocess.run(
        [sys.executable, "-m", "pmm3d", "doctor", *arguments],
        env=environ | {"COLUMNS": "120"},
        text=True,
        capture_output=True,
        timeout=60,
        cwd=cwd,
    )


@pytest.mark.nightly
def test_the_launcher_of_another_mpi_is_named_once(tmp_path):
    """The first task reports it."""
    silent, done = (alone(task, tmp_path, "--json", f"{task}.json", SLURM_STEP_NUM_TASKS="4") for task in (2, 0))
    assert (silent.returncode, silent.stdout) == (0, "") and not (tmp_path / "2.json").exists()
    _, found = read(tmp_path / "0.json")
    assert done.returncode == 2 and found["launcher"]["verdict"] == "failure"
    assert "SLURM_STEP_NUM_TASKS=4" in done.stdout and "srun --mpi=" in done.stdout


@pytest.mark.nightly
def test_an_mpi_that_cannot_start_is_reported_by_the_first_task(tmp_path):
    """With a launcher of another MPI than the installed wheel, MPI_Init would end the process. An mpi4py without a
    library raises an error."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    foreign = {"PMIX_RANK": "0"} if installed_wheel() == "mpich" else {"PMI_FD": "9", "PMI_SIZE": "4"}
    for path, variables, parts in (
        ([], foreign, ["is the wheel", "started it", "srun --mpi="]),
        ([str(tmp_path)], {}, ["mpi4py cannot load an MPI library: cannot load MPI library", "Load the site's"]),
    ):
        for task in (0, 2):
            with given(variables=variables, task=task):
                done = alone(task, None, path=path, **variables)
                assert (done.returncode, done.stdout) == (2, ""), done.stderr
                assert all((part in done.stderr) == (task == 0) for part in parts), done.stderr
                assert "Traceback" not in done.stderr


@pytest.mark.nightly("a job of its own")
def test_what_does_not_return_is_given_up(job):
    """A check that blocks forever, in a call that no time limit can interrupt."""
    done = job(
        1,
        """
        import sys, time
        from pmm3d.tools.doctor import checks, command
        checks.CHECKS = (*checks.CHECKS[:2], checks.Check("block", lambda session: time.sleep(600), None))
        sys.argv = ["pmm3d", "doctor", "--timeout", "4"]
        from pmm3d.tools.cli import main
        main()
    """,
    )
    assert done.returncode == 2
    assert "rank 0 is stuck here; given up after 4 s" in done.stdout
    assert "software" in done.stdout and "block" in done.stdout and "3 checks in" in done.stdout


@pytest.mark.nightly("a job of its own")
def test_a_rank_that_gives_no_answer_ends_the_examination(job):
    done = job(
        3,
        """
        import sys, time
        from pmm3d.tools.doctor import checks
        slow = lambda session: time.sleep(600 if session.rank == 1 else 0)
        stuck = checks.Check("slow", slow, checks.CHECKS[3].judge, seconds=2.0)
        checks.CHECKS = (*checks.CHECKS[:2], stuck, *checks.CHECKS[3:])
        sys.argv = ["pmm3d", "doctor"]
        from pmm3d.tools.cli import main
        main()
    """,
    )
    assert done.returncode != 0
    assert "no answer from rank 1 on" in done.stdout and "3 checks in" in done.stdout
