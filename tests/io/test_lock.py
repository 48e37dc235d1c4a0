"""The lock of a run's folder: the job that gets it, refused jobs, and their messages."""

import json
import os
import signal
import subprocess
import sys

import pytest
from forked import exit_code
from on_disk import full_disk

from pmm3d.io import lock
from pmm3d.io.lock import FolderInUseError, RunLock, owner_of
from pmm3d.model import environment
from pmm3d.model.environment import job_id

OTHER = """
import sys
from pmm3d.io.lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
print("has it", flush=True)
sys.stdin.readline()
lock.release()
"""


@pytest.fixture(autouse=True)
def no_batch_system(monkeypatch):
    for name in (*environment.JOB_IDS, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock, until it is told to end."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SLURM_JOB_ID": "4711"},
    ) as process:
        assert process.stdout.readline() == "has it\n"
        yield process
        if process.poll() is None:
            process.communicate("\n", timeout=30)


def left_by(folder, **facts) -> None:
    """Write the lock of a job that did not release it."""
    facts = {"host": "elsewhere", "pid": 1, "job": None, "restarts": 0, "since": "2026-11-20T10:00:00"} | facts
    (folder / "lock").write_text(json.dumps(facts))


def refused(folder, text):
    """Assert that the lock of a folder is refused with this text, and not changed. Return the error."""
    before = (folder / "lock").read_bytes()
    with pytest.raises(FolderInUseError, match=text) as error:
        RunLock(folder).acquire()
    assert (folder / "lock").read_bytes() == before
    return str(error.value)


@pytest.fixture
def taken(tmp_path, caplog):
    """taken() takes and releases the folder, and returns the warnings."""

    def take() -> list[str]:
        caplog.clear()
        mine = RunLock(tmp_path)
        mine.acquire()
        assert owner_of(tmp_path)["pid"] == os.getpid()
        refused(tmp_path, f"process {os.getpid()}")
        mine.release()
        mine.release()
        assert not list(tmp_path.glob("lock*")) and owner_of(tmp_path) == {}
        assert {(record.name, record.levelname) for record in caplog.records} <= {("pmm3d.io", "WARNING")}
        return [record.getMessage() for record in caplog.records]

    return take


def test_the_second_is_refused_until_the_first_is_done(tmp_path, other, taken):
    for _ in range(2):
        said = refused(tmp_path, f"If that job has ended, remove {tmp_path}/lock and start again")
        for part in (f"process {other.pid}", "SLURM_JOB_ID 4711", "since 20", "choose another folder"):
            assert part in said
    assert os.listdir(tmp_path) == ["lock"]
    other.communicate("\n", timeout=30)
    assert taken() == []


@pytest.mark.parametrize("reaped", [True, False])
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, other, taken, reaped):
    other.send_signal(signal.SIGKILL)
    other.wait() if reaped else os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    said = taken()
    assert len(said) == 1 and "taken over from a job that has ended" in said[0] and "4711" in said[0]


def test_a_process_with_the_number_of_one_that_has_ended(tmp_path, other, taken):
    """Process ids are reused. The start time distinguishes the processes."""
    left_by(tmp_path, **owner_of(tmp_path) | {"started": "1"})
    assert "taken over" in taken()[0]


def test_a_process_of_another_container_is_taken_for_alive(tmp_path, other):
    """It has the name of this host, and separate process ids."""
    left_by(tmp_path, **owner_of(tmp_path) | {"namespace": 1, "pid": 2**22 + 1})
    refused(tmp_path, f"process {2**22 + 1}")


def test_a_job_on_another_host_is_taken_for_alive(tmp_path, taken):
    left_by(tmp_path)
    refused(tmp_path, "host elsewhere, process 1, since 2026")
    (tmp_path / "lock").unlink()
    assert taken() == []


def test_a_job_that_was_queued_again_takes_over_its_own_lock(tmp_path, monkeypatch, taken):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    left_by(tmp_path, job="SLURM_JOB_ID 7")
    refused(tmp_path, "SLURM_JOB_ID 7")  # another step of the same job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "taken over" in taken()[0]
    left_by(tmp_path, job="SLURM_JOB_ID 8")
    refused(tmp_path, "SLURM_JOB_ID 8")


def test_of_two_that_take_over_at_the_same_moment_one_has_it(tmp_path, monkeypatch, other):
    """The other process took it after the old lock was read and before it was removed."""
    alive = (tmp_path / "lock").read_text()
    left_by(tmp_path, host=lock.socket.gethostname(), namespace=lock._namespace(), pid=2**22 + 1, started="5")
    ended = lock._ended

    def slow(owner):
        (tmp_path / "lock").write_text(alive)
        return ended(owner)

    monkeypatch.setattr(lock, "_ended", slow)
    with pytest.raises(FolderInUseError, match=f"process {other.pid}"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "lock").read_text() == alive


@pytest.mark.parametrize("text", ["", "[1]", "{", "\udc80"])
def test_a_lock_that_cannot_be_read_is_refused(tmp_path, text):
    (tmp_path / "lock").write_bytes(text.encode(errors="surrogateescape"))
    refused(tmp_path, "its lock does not say which.*remove .*/lock and start again")


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    """The file that it leads to stays as it was."""
    (tmp_path / "notes").write_text("a note")
    (tmp_path / "lock").symlink_to(tmp_path / "notes")
    refused(tmp_path, "its lock does not say which.*remove .*/lock and start again")
    assert (tmp_path / "lock").is_symlink() and (tmp_path / "notes").read_text() == "a note"


def test_a_lock_that_was_removed_and_taken_by_another_job_is_not_released(tmp_path):
    mine = RunLock(tmp_path)
    mine.acquire()
    left_by(tmp_path)
    mine.release()
    assert owner_of(tmp_path)["host"] == "elsewhere"


def test_a_full_disk_leaves_no_lock(tmp_path, taken):
    """A lock without an owner would have to be removed by hand."""
    with full_disk(True, limit=0), pytest.raises(OSError, match="File too large"):
        RunLock(tmp_path).acquire()
    assert taken() == []


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        RunLock(tmp_path / "file").acquire()


def test_the_names_of_jobs():
    assert job_id({}) is None and job_id({"SLURM_JOB_ID": "", "PBS_JOBID": "3.site"}) == "PBS_JOBID 3.site"


def test_what_a_lock_says_is_shown_escaped(tmp_path):
    left_by(tmp_path, host="n1\x1b[2J\nfree", job="\x9b31m")
    assert r"host n1\x1b[2J\nfree, process 1, \x9b31m, since" in refused(tmp_path, "")


def test_a_forked_child_leaves_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    assert exit_code(lock.release) == 0
    assert owner_of(tmp_path)["pid"] == os.getpid()
    lock.release()
    assert owner_of(tmp_path) == {}
