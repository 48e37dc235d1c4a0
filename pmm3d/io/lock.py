"""The file `lock`, with which one job at a time writes to a folder. Rank 0 acquires it for its job. No messages."""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import Pmm3dError, printable
from ..model.environment import job_id, job_restarts

logger = logging.getLogger("pmm3d.io")
NAME = "lock"

Owner = dict[str, Any]
"""Contents of a lock: "host", "namespace" (PID namespace, because a container may have its own), "pid", "started"
(start time of the process, see `_started`), "job" (id in the batch system), "restarts" (of the job, from Slurm) and
"since" (time of the lock)."""


class FolderInUseError(Pmm3dError):
    """Another job writes to the folder. The text names the job and the remedy."""


class RunLock:
    """Prevents other jobs from writing to a folder, from `acquire` until `release`.

    The lock is a file that is created only if it does not exist. It names its owner. `acquire` takes over the lock of
    an ended job: its process on this host has ended, or this job is a restart of the owner (Slurm). The end of a
    process on another host, or in another container, cannot be detected. Such a lock must be removed by hand.
    """

    def __init__(
        self, folder: str | os.PathLike[str], name: str = NAME, remedy: str = "choose another folder (training.folder)"
    ):
        """name: of the file. remedy: what to do instead, in the text of the error."""
        self.path, self._remedy = Path(folder) / name, remedy
        self._owner: Owner = {}

    def acquire(self) -> None:
        """Take the lock. Raises FolderInUseError if another job has it, and OSError if the folder cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.path):
            self._remove_left_over()
        owner = {
            "host": socket.gethostname(),
            "namespace": _namespace(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "job": job_id(),
            "restarts": job_restarts(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise self._in_use(owner_of(self.path.parent, self.path.name)) from None
        try:
            with open(file, "wb") as stream:
                stream.write(json.dumps(owner).encode() + b"\n")
        except OSError:  # otherwise a lock without an owner would remain, to be removed by hand
            self.path.unlink()
            raise
        self._owner = owner

    def _remove_left_over(self) -> None:
        """Remove the lock of a job that has ended. Raises FolderInUseError for other locks."""
        owner = owner_of(self.path.parent, self.path.name)
        if not _ended(owner):
            raise self._in_use(owner)
        aside = self.path.with_name(f"{self.path.name}-{socket.gethostname()}-{os.getpid()}")
        with suppress(FileNotFoundError):
            self.path.rename(aside)  # if several jobs read the old lock, one succeeds
            if owner_of(aside.parent, aside.name) != owner:
                aside.rename(self.path)
                raise self._in_use(owner_of(self.path.parent, self.path.name))
            aside.unlink()
            logger.warning(f"{self.path.parent} is taken over from a job that has ended: {_in_words(owner)}")

    def _in_use(self, owner: Owner) -> FolderInUseError:
        return FolderInUseError(
            f"{self.path.parent} belongs to another job: {_in_words(owner)}. Wait for its end, or "
            f"{self._remedy}. If that job has ended, remove {self.path} "
            "and start again"
        )

    def release(self) -> None:
        """Remove the lock. Does nothing if this job does not have the lock, or in a forked child."""
        if self._owner.get("pid") == os.getpid() and owner_of(self.path.parent, self.path.name) == self._owner:
            try:
                self.path.unlink()
            except OSError as error:
                logger.warning(f"{self.path} could not be removed: {error.strerror}")
        self._owner = {}


def owner_of(folder: str | os.PathLike[str], name: str = NAME) -> Owner:
    """Return the contents of the lock of a folder; empty if there is no lock, or if it cannot be read."""
    with suppress(OSError, ValueError):
        path = Path(folder) / name
        if path.is_file() and isinstance(owner := json.loads(path.read_bytes()), dict):
            return owner
    return {}


def _ended(owner: Owner) -> bool:
    """Whether the job of a lock is known to have ended."""
    if owner.get("job") is not None and owner["job"] == job_id() and owner.get("restarts") != job_restarts():
        return True
    here = (owner.get("host"), owner.get("namespace")) == (socket.gethostname(), _namespace())
    return here and isinstance(pid := owner.get("pid"), int) and owner.get("started") != _started(pid)


def _namespace() -> int | None:
    """Return the inode of this process's PID namespace; None if the system has none."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def _started(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks since the boot of the host. None if the process has ended (a
    zombie has ended too), or if the system has no /proc."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


def _in_words(owner: Owner) -> str:
    if not owner:
        return "its lock does not say which"
    job = f", {owner['job']}" if owner.get("job") else ""
    owned_by = f"host {owner.get('host')}, process {owner.get('pid')}{job}, since {owner.get('since')}"
    return printable(owned_by).replace("\n", r"\n")
