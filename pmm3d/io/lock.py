"""A folder belongs to one job at a time: the lock that says so. No MPI in it; rank 0 takes it for its job."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import Pmm3dError, printable
from ..model.environment import job_id

logger = logging.getLogger("pmm3d.io")
NAME = "lock"
BEAT = 30.0
"""Seconds between signs of life in the lock file."""
STALE = 1800.0
"""Seconds without one after which a job counts as gone, where the file system has no locks."""
SETTLING = 0.5
"""Seconds after which a job looks whether another one wrote into the lock file after it; there only."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
HELD = (errno.EACCES, errno.EAGAIN)

Owner = dict[str, Any]
"""What the lock file says of a job: its "host", "pid", "job" (at the batch system) and "since"; empty if nothing."""


class FolderInUseError(Pmm3dError):
    """Another job writes into the folder. The text says which one, since when, and what to do."""


class RunLock:
    """Keeps other jobs from writing into a folder, from `acquire` until `release` or the end of the process.

    The kernel's lock (POSIX) on the file `lock`, in which the owner says who it is. It is gone when the process is,
    however it ends. It belongs to the process: two trainers of one process are not told apart, and nothing else in
    the process may open and close that file. Locks that a file system keeps on each node for itself (NFS with nolock,
    Lustre with -o localflock) do not tell jobs on different nodes apart. Where it has none (Lustre without -o flock)
    what the file says counts, with a sign of life from `beat`: a job that gave none for half an hour, or whose process
    on this host is gone, or that has the same job id (it was queued again), is taken for ended.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = Path(folder) / NAME
        self._file: int | None = None
        self._beaten = 0.0
        self._written: Owner = {}

    def acquire(self) -> None:
        """Raises FolderInUseError if another job has the folder, OSError where it cannot be written, Pmm3dError where
        the file is not a plain one: it would be emptied, wherever a link leads to."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink():
            raise _no_lock(self.path, f"a symbolic link to {os.readlink(self.path)}, which is not followed")
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise _no_lock(self.path, "no regular file")
            if status.st_nlink > 1:
                raise _no_lock(self.path, "a file that also has another name (a hard link)")
            self._take(file)
            self._file = file
        finally:
            if self._file is None:
                os.close(file)

    def _take(self, file: int) -> None:
        owner = _owner_in(file)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise FolderInUseError(f"{self.path.parent} belongs to a job that is running: {_in_words(owner)}. Wait "
                                       "for its end, end it, or choose another folder (training.folder)") from None
            if error.errno not in NO_LOCKS:
                raise
            return self._take_without_locks(file, owner)
        if owner := _owner_in(file):
            logger.warning(f"the last job in {self.path.parent} ended without releasing it: {_in_words(owner)}")
        self._write(file)

    def _take_without_locks(self, file: int, owner: Owner) -> None:
        age = time.time() - os.fstat(file).st_mtime
        if owner and not _gone(owner, age):
            raise FolderInUseError(f"{self.path.parent} belongs to another job: {_in_words(owner)}; its last sign of "
                                   f"life was {max(0.0, age):.0f} s ago, and this file system has no locks to tell "
                                   f"whether it still runs. If it does not, remove {self.path} and start again")
        if owner:
            logger.warning(f"{self.path.parent} is taken over from a job that is gone: {_in_words(owner)}")
        self._write(file)
        time.sleep(SETTLING)
        if (owner := _owner_in(file)) != self._written:
            raise FolderInUseError(f"{self.path.parent} was taken at the same moment by {_in_words(owner)}")

    def _write(self, file: int) -> None:
        self._written = {"host": socket.gethostname(), "pid": os.getpid(), "job": job_id(),
                      "since": datetime.now().astimezone().isoformat(timespec="seconds")}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(self._written).encode() + b"\n", 0)
        self._beaten = time.monotonic()

    def beat(self) -> None:
        """A sign of life, twice a minute at most."""
        if self._file is None or time.monotonic() - self._beaten < BEAT:
            return
        self._beaten = time.monotonic()
        try:
            os.utime(self._file)
        except OSError as error:
            logger.warning(f"{self.path} cannot be kept fresh: {error.strerror}")

    @property
    def held(self) -> bool:
        return self._file is not None

    def renew(self) -> None:
        """Take it anew, with a warning, if its file is no longer at its path: others would not see it. Raises as
        `acquire` does; it is not held then."""
        if self._file is not None:
            if self._is_there(self._file):
                return
            logger.warning(f"{self.path} has been removed, renamed or replaced while this job has the folder: it is "
                           "taken anew")
            os.close(self._file)
            self._file = None
        self.acquire()

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let others in; nothing if the lock is not held."""
        if self._file is None:
            return
        try:
            if _owner_in(self._file) == self._written:
                os.ftruncate(self._file, 0)
        except OSError as error:
            logger.warning(f"{self.path} could not be emptied: {error.strerror}")
        os.close(self._file)
        self._file = None


def owner_of(folder: str | os.PathLike[str]) -> Owner:
    """What the lock of a folder says of its owner; empty if nobody has it, or had it when it ended."""
    with suppress(OSError):
        file = os.open(Path(folder) / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return _owner_in(file)
        finally:
            os.close(file)
    return {}


def _no_lock(path: Path, what: str) -> Pmm3dError:
    return Pmm3dError(f"{path} is {what}. The lock of a run's folder has that name: remove it, or choose another "
                      "folder (training.folder)")


def _owner_in(file: int) -> Owner:
    with suppress(ValueError):
        if isinstance(owner := json.loads(os.pread(file, 4096, 0)), dict):
            return owner
    return {}


def _in_words(owner: Owner) -> str:
    if not owner:
        return "it does not say which"
    job = f", {owner['job']}" if owner.get("job") else ""
    said = f"host {owner.get('host')}, process {owner.get('pid')}{job}, since {owner.get('since')}"
    return printable(said).replace("\n", r"\n")


def _gone(owner: Owner, age: float) -> bool:
    """Whether a job that gave its last sign of life `age` seconds ago is taken for ended."""
    if age > STALE or owner.get("job") is not None and owner["job"] == job_id():
        return True
    try:
        with suppress(PermissionError):
            if owner.get("host") == socket.gethostname():
                os.kill(owner["pid"], 0)
    except (ProcessLookupError, KeyError, TypeError):
        return True
    return False
