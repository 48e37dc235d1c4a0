"""A folder belongs to one job at a time: the lock that says so. No MPI in it; rank 0 takes it for its job."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from ..errors import Pmm3dError
from ..model.environment import job_id

NAME = "lock"
BEAT = 30.0
"""Seconds between signs of life in the lock file."""
STALE = 1800.0
"""Seconds without one after which a job counts as gone, where the file system has no locks."""
SETTLING = 0.5
"""Seconds after which a job looks whether another one wrote into the lock file after it; there only."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
HELD = (errno.EACCES, errno.EAGAIN)


class FolderInUseError(Pmm3dError):
    """Another job writes into the folder. The text says which one, since when, and what to do."""


class RunLock:
    """Keeps other jobs from writing into a folder, from `acquire` until `release` or the end of the process.

    The kernel's lock (POSIX) on the file `lock`, in which the owner says who it is. It is gone when the process is,
    however it ends. It belongs to the process: two trainers of one process are not told apart, and nothing else in
    the process may open and close that file. Where the file system has no locks (Lustre without -o flock) what the
    file says counts, with a sign of life from `beat`: a job that gave none for half an hour, or whose process on this
    host is gone, or that has the same job id (it was queued again), is taken for ended.

    Locks that a file system keeps on each node for itself (NFS with nolock, Lustre with -o localflock) do not tell
    jobs on different nodes apart.
    """

    def __init__(self, folder, say=lambda text: None):
        self.path = Path(folder) / NAME
        self._say, self._file, self._beaten = say, None, 0.0

    def acquire(self) -> None:
        """Raises FolderInUseError if another job has the folder, OSError where it cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take()
        except BaseException:
            self._close()
            raise

    def _take(self) -> None:
        before = _facts(self._file)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise FolderInUseError(
                    f"{self.path.parent} belongs to a job that is running: {_described(before)}. Wait for its end, end "
                    "it, or choose another folder (training.folder)"
                ) from None
            if error.errno not in NO_LOCKS:
                raise
            self._take_without_locks(before)
            return
        before = _facts(self._file)
        if before:
            self._say(f"the last job in {self.path.parent} ended without releasing it: {_described(before)}")
        self._write()

    def _take_without_locks(self, before: dict) -> None:
        if before and not self._gone(before):
            age = max(0.0, time.time() - os.fstat(self._file).st_mtime)
            raise FolderInUseError(
                f"{self.path.parent} belongs to another job: {_described(before)}; its last sign of life was {age:.0f} "
                f"s ago, and this file system has no locks to tell whether it still runs. If it does not, remove "
                f"{self.path} and start again"
            )
        if before:
            self._say(f"{self.path.parent} is taken over from a job that is gone: {_described(before)}")
        self._write()
        time.sleep(SETTLING)
        if _facts(self._file) != self._mine:
            raise FolderInUseError(
                f"{self.path.parent} was taken at the same moment by {_described(_facts(self._file))}"
            )

    def _gone(self, owner: dict) -> bool:
        if owner.get("job") is not None and owner["job"] == job_id():
            return True
        if owner.get("host") == socket.gethostname() and not _runs(owner.get("pid")):
            return True
        return time.time() - os.fstat(self._file).st_mtime > STALE

    def _write(self) -> None:
        self._mine = {"host": socket.gethostname(), "pid": os.getpid(), "job": job_id(),
                      "since": datetime.now().astimezone().isoformat(timespec="seconds")}
        text = json.dumps(self._mine).encode() + b"\n"
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)
        self._beaten = time.monotonic()

    def beat(self) -> None:
        """A sign of life, twice a minute at most."""
        if self._file is None or time.monotonic() - self._beaten < BEAT:
            return
        self._beaten = time.monotonic()
        try:
            os.utime(self._file)
        except OSError as error:
            self._say(f"{self.path} cannot be kept fresh: {error.strerror}")

    def release(self) -> None:
        """Let others in; nothing if the lock is not held."""
        if self._file is None:
            return
        try:
            if _facts(self._file) == self._mine:
                os.ftruncate(self._file, 0)
        except OSError as error:
            self._say(f"{self.path} could not be emptied: {error.strerror}")
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        self._file = None


def owner_of(folder) -> dict:
    """What the lock of a folder says of its owner; empty if nobody has it, or had it when it ended."""
    try:
        return _parsed((Path(folder) / NAME).read_bytes())
    except OSError:
        return {}


def _facts(file: int) -> dict:
    return _parsed(os.pread(file, 4096, 0))


def _parsed(text: bytes) -> dict:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _described(owner: dict) -> str:
    if not owner:
        return "it does not say which"
    job = f", {owner['job']}" if owner.get("job") else ""
    return f"host {owner.get('host')}, process {owner.get('pid')}{job}, since {owner.get('since')}"


def _runs(pid) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, TypeError):
        return False
    except PermissionError:
        pass
    return True
