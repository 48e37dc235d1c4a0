"""A run's folder belongs to one job: who gets it, who is refused, and what the refusal says."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pmm3d import Pmm3dError
from pmm3d.io import lock
from pmm3d.io.lock import FolderInUseError, RunLock, owner_of
from pmm3d.model import environment
from pmm3d.model.environment import job_id

OTHER = """
import sys, time
from pmm3d.io.lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
print("has it", flush=True)
sys.stdin.readline()
lock.release()
"""


@pytest.fixture(autouse=True)
def no_batch_system(monkeypatch):
    for name in environment.JOB_IDS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def other(tmp_path):
    """Another process that has the folder; ends when it is told to."""
    with subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env={**os.environ, "SLURM_JOB_ID": "4711"}) as process:
        assert process.stdout.readline() == "has it\n"
        yield process
        if process.poll() is None:
            process.communicate("\n", timeout=30)


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks."""
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    monkeypatch.setattr(lock, "SETTLING", 0.0)


def left_by(folder, age=0.0, **facts) -> None:
    """The file of a job that did not release it."""
    path = folder / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "job": None, "since": "2026-11-20T10:00:00", **facts}))
    os.utime(path, (time.time() - age, time.time() - age))


@pytest.fixture
def taken(tmp_path, caplog):
    """taken(): the folder is taken and released; what is warned of meanwhile."""

    def take() -> list[str]:
        caplog.clear()
        mine = RunLock(tmp_path)
        mine.acquire()
        assert owner_of(tmp_path)["pid"] == os.getpid()
        mine.release()
        assert owner_of(tmp_path) == {}
        assert {(record.name, record.levelname) for record in caplog.records} <= {("pmm3d.io", "WARNING")}
        return [record.getMessage() for record in caplog.records]

    return take


def test_the_second_is_refused_until_the_first_is_done(tmp_path, other, taken):
    (tmp_path / "metrics.jsonl").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for _ in range(2):
        with pytest.raises(FolderInUseError) as refused:
            RunLock(tmp_path).acquire()
    for part in (str(tmp_path), f"process {other.pid}", "SLURM_JOB_ID 4711", "since 20", "choose another folder"):
        assert part in str(refused.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    other.communicate("\n", timeout=30)
    assert taken() == []


def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path, other, taken):
    other.send_signal(signal.SIGKILL)
    other.wait()
    said = taken()
    assert len(said) == 1 and "ended without releasing it" in said[0] and "4711" in said[0]


def test_where_there_are_no_locks_a_sign_of_life_counts(tmp_path, no_locks, taken):
    assert taken() == []
    left_by(tmp_path, age=60)
    before = (tmp_path / "lock").read_bytes()
    with pytest.raises(FolderInUseError, match=r"host elsewhere.*60 s ago.*remove .*/lock and start again"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "lock").read_bytes() == before
    left_by(tmp_path, age=lock.STALE + 60)
    assert "taken over from a job that is gone" in taken()[0]


def test_where_there_are_no_locks_a_job_that_was_queued_again_goes_on(tmp_path, no_locks, monkeypatch, taken):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    left_by(tmp_path, job="SLURM_JOB_ID 7")
    assert "taken over" in taken()[0]
    left_by(tmp_path, job="SLURM_JOB_ID 8")
    with pytest.raises(FolderInUseError, match="SLURM_JOB_ID 8"):
        RunLock(tmp_path).acquire()


def test_where_there_are_no_locks_a_process_of_this_host_that_is_gone_is_gone(tmp_path, no_locks, taken):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left_by(tmp_path, host=lock.socket.gethostname(), pid=gone.pid)
    assert "taken over" in taken()[0]
    left_by(tmp_path, host=lock.socket.gethostname(), pid=os.getppid())
    with pytest.raises(FolderInUseError):
        RunLock(tmp_path).acquire()


def test_two_at_the_same_moment_where_there_are_no_locks(tmp_path, no_locks, monkeypatch):
    """The one that wrote last has it."""
    monkeypatch.setattr(lock.time, "sleep", lambda _: left_by(tmp_path, pid=5))
    with pytest.raises(FolderInUseError, match="at the same moment by host elsewhere, process 5"):
        RunLock(tmp_path).acquire()


def test_signs_of_life_are_given_now_and_then(tmp_path, monkeypatch):
    mine = RunLock(tmp_path)
    mine.acquire()
    os.utime(tmp_path / "lock", (1, 1))
    mine.beat()
    assert (tmp_path / "lock").stat().st_mtime == 1
    monkeypatch.setattr(lock, "BEAT", 0.0)
    mine.beat()
    assert (tmp_path / "lock").stat().st_mtime > time.time() - 60
    mine.release()
    mine.beat()
    mine.release()


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        RunLock(tmp_path / "file").acquire()


@pytest.mark.parametrize("make, what", [
    (lambda lock, other: lock.symlink_to(other), "a symbolic link to .*other, which is not followed"),
    (lambda lock, other: os.link(other, lock), "a file that also has another name"),
    (lambda lock, other: os.mkfifo(lock), "no regular file"),
    (lambda lock, other: lock.symlink_to(lock.with_name("nowhere")), "a symbolic link to .*nowhere"),
])
def test_what_is_no_lock_is_refused_and_what_it_leads_to_stays(tmp_path, make, what):
    (folder := tmp_path / "run").mkdir()
    (other := tmp_path / "other").write_text("the only copy")
    make(folder / "lock", other)
    for _ in range(2):
        with pytest.raises(Pmm3dError, match=f"run/lock is {what}.*remove it, or choose another folder"):
            RunLock(folder).acquire()
        assert owner_of(folder) == {}
    assert other.read_text() == "the only copy" and not (folder / "nowhere").exists()


def test_the_names_of_jobs():
    assert job_id({}) is None and job_id({"SLURM_JOB_ID": "", "PBS_JOBID": "3.site"}) == "PBS_JOBID 3.site"


def test_what_a_lock_says_is_shown_escaped(tmp_path, no_locks):
    left_by(tmp_path, host="n1\x1b[2J\nfree", job="\x9b31m")
    with pytest.raises(FolderInUseError) as refused:
        RunLock(tmp_path).acquire()
    assert r"host n1\x1b[2J\nfree, process 1, \x9b31m, since" in str(refused.value)
