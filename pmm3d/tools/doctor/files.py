"""The folder that a run writes to: its file system, how soon other hosts see a file, locks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...text import in_bytes, names_in_words
from . import locks
from .finding import Finding
from .session import Session, child_says

SEEN_SECONDS, CHILD_SECONDS = 4.0, 10.0
"""For a new file to be seen on another host (NFS keeps attributes for three), and for a lock in a child process."""
SLOW_SIGHT = 1.0
"""Seconds after which other hosts still see the old contents of a file."""
LEAST_FREE = 2**30
"""Bytes: less holds no checkpoint worth the name."""
UNSHARED = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "squashfs"}


def file_system(path: str, mounts: str = "/proc/mounts") -> tuple[str, str]:
    """(type, mount point) of the file system that a path is on; empty where the system does not tell."""
    innermost = ("", "")
    with suppress(OSError):
        for line in Path(mounts).read_text().splitlines():
            _, point, kind, *_ = line.split()
            point = point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
            if Path(path).is_relative_to(point) and len(point) >= len(innermost[1]):
                innermost = (kind, point)
    return innermost


@contextmanager
def scratch(session: Session) -> Iterator[tuple[Path | None, str]]:
    """A fresh folder inside the session's one, made and removed by rank 0: (its path or None, why not). Collective."""
    path, problem = session.folder / f".pmm3d-doctor-{session.name}", ""
    if session.rank == 0:
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        except OSError as error:
            problem = f"{error.strerror} ({session.folder.resolve()})"
    try:
        missing = session.largest(bool(problem))
        yield (None if missing else path), problem
    finally:
        if session.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


class Folder(NamedTuple):
    """What the first rank of a host found. unwritable: why rank 0 could not write; seen: seconds until the new contents
    of a file that rank 0 replaced were read here, None if they were not."""

    path: str
    kind: str
    point: str
    free: int
    exists: bool
    unwritable: str
    seen: float | None


def gather_folder(session: Session) -> Folder | None:
    with scratch(session) as (folder, problem):
        seen = _seconds_until_seen(session, folder / "replaced") if folder else None
        session.barrier(SEEN_SECONDS + 5, doze=True)
    if not session.is_first_here:
        return None
    path = session.folder.resolve()
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    return Folder(str(path), *file_system(str(path)), free, path.is_dir(), problem, seen)


def _seconds_until_seen(session: Session, path: Path) -> float | None:
    """How long this host goes on seeing the old contents of a file that rank 0 has replaced as checkpoints are."""
    for contents in (b"old", b"new"):
        session.barrier(doze=True)
        if session.rank == 0:
            with open(f"{path}.tmp", "wb", buffering=0) as file:
                file.write(contents)
                os.fsync(file)
            os.replace(f"{path}.tmp", path)
        session.barrier(doze=True)
        begun = time.monotonic()
        seen = session.is_first_here and _holds(path, contents)
    while session.is_first_here and not seen and time.monotonic() - begun < SEEN_SECONDS:
        time.sleep(5e-3)
        seen = _holds(path, b"new")
    return time.monotonic() - begun if seen else None


def _holds(path: Path, contents: bytes) -> bool:
    with suppress(OSError):
        return path.read_bytes() == contents
    return False


def judge_folder(finding: Finding, facts: list[Folder | None], hosts: list[str]) -> None:
    here = {hosts[rank]: fact for rank, fact in enumerate(facts) if fact is not None}
    first = here[hosts[0]]
    kind = first.kind or "unknown file system"
    choose = "give one that all nodes can write to: --folder, training.folder"
    absent = [host for host, fact in here.items() if not fact.exists]
    blind = [host for host, fact in here.items() if fact.exists and fact.seen is None]
    late = max(fact.seen or 0.0 for fact in here.values())
    if absent:
        finding.fail(f"{first.path} is no folder on {names_in_words(absent)}", f"make it, or {choose}")
    if first.exists and first.unwritable:
        finding.fail(f"rank 0 cannot write there: {first.unwritable}", choose)
    elif first.exists and blind:
        own = " (a file system of each node's own)" if kind in UNSHARED else ""
        finding.fail(f"{names_in_words(blind)} did not see within {SEEN_SECONDS:g} s what rank 0 wrote: the folder is "
                     f"not shared between hosts{own}, or is cached for long",
                     f"{choose}; NFS: mount it with actimeo=1")
    elif late > SLOW_SIGHT:
        finding.warn(f"it took {late:.1f} s until every host saw a file that rank 0 had replaced",
                     "NFS caches attributes: mount with actimeo=1, or use the parallel file system ($SCRATCH, $WORK)")
    if first.exists and not first.unwritable and first.free < LEAST_FREE:
        finding.warn(f"{in_bytes(first.free)} free", "remove old runs, or choose another folder (--folder)")
    seen = len(here) > 1 and not finding.problems
    finding.found = (f"{first.path}, {kind}, {in_bytes(first.free)} free"
                     + f", a replaced file seen everywhere after {1e3 * late:.0f} ms" * seen)
    finding.figures = first._asdict() | {"seen_seconds": {host: fact.seen for host, fact in here.items()}}


class Locks(NamedTuple):
    """How another process fared that wanted a lock which rank 0 held, by kind of lock: refused, granted, or an error.
    who: the other process; hdf5: why HDF5 could not write and read a file there."""

    tried: dict[str, str]
    who: str
    hdf5: str
    possible: bool


def gather_locks(session: Session) -> Locks:
    """Each rank tells of the attempts that it made; rank 0 also of locks that it could not take itself."""
    partner = next((rank for rank in session.first_ranks if rank), 1 if session.size > 1 else 0)
    who = f"rank {partner} on {session.hosts[partner]}" if partner else "a child process"
    tried, hdf5 = {}, ""
    with scratch(session) as (folder, _), ExitStack() as held:
        if folder is None:
            return Locks({}, who, "", False)
        paths = {kind: folder / f"{kind}.lock" for kind in locks.LOCKS}
        if session.rank == 0:
            hdf5 = _hdf5_problem(folder / "probe.h5")
            for kind, path in paths.items():
                try:
                    locks.lock(kind, held.enter_context(open(path, "wb+")))
                except OSError as error:
                    tried[kind] = error.strerror or str(error)
        session.barrier(doze=True)
        if session.rank == partner:
            attempt = locks.try_lock if partner else try_lock_in_child
            tried = {kind: attempt(kind, str(path)) for kind, path in paths.items()} | tried
        session.barrier(CHILD_SECONDS, doze=True)
    return Locks(tried, who, hdf5, True)


def try_lock_in_child(kind: str, path: str) -> str:
    return child_says(CHILD_SECONDS, "-m", locks.__name__, kind, path)


def _hdf5_problem(path: Path) -> str:
    """Why HDF5 cannot write and read a file there; nothing where there is no h5py: the check HDF5 says so."""
    if find_spec("h5py") is None:
        return ""
    import h5py

    try:
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(4)
        with h5py.File(path) as file:
            return "" if np.array_equal(file["x"][...], np.arange(4)) else "it read other values than were written"
    except OSError as error:
        return str(error)


def judge_locks(finding: Finding, facts: list[Locks], hosts: list[str]) -> None:
    first = facts[0]
    if not first.possible:
        finding.found = "not tried"
        finding.note("not tried, as the folder cannot be written", "see the check of the folder")
        return
    tried = {kind: text for fact in reversed(facts) for kind, text in fact.tried.items()}
    off = "export HDF5_USE_FILE_LOCKING=FALSE"
    if first.hdf5:
        finding.fail(f"HDF5 cannot use files there: {first.hdf5}",
                     f"{off}, if the text speaks of locks; or another folder (--folder)")
    without = [f"{kind}: {text}" for kind, text in tried.items() if text not in (locks.REFUSED, locks.GRANTED)]
    if without:
        finding.warn(f"no locks here: {'; '.join(without)}",
                     f"HDF5 asks for them: {off}; Lustre: have it mounted with flock")
    void = [kind for kind, text in tried.items() if text == locks.GRANTED]
    if void:
        finding.warn(f"locks by {' and '.join(void)} do not exclude {first.who}",
                     f"HDF5 asks for them: {off} if it complains; Lustre: have it mounted with flock, not localflock")
    holding = [kind for kind, text in tried.items() if text == locks.REFUSED]
    finding.found = f"{' and '.join(holding) or 'none'} held against {first.who}"
    finding.figures = {"locks": tried, "hdf5": first.hdf5}
