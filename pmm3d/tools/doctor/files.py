"""The folder that a run writes to: its file system, how soon other hosts see a file, locks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ...comm.words import in_bytes
from . import locks
from .finding import Finding, Problems, by_host, names_in_words
from .session import Session

NAME_BYTES = 200
SEEN_SECONDS = 4.0
CHILD_SECONDS = 10.0
SLOW_SIGHT = 1.0
LEAST_FREE = 2**30
UNSHARED = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "squashfs"}
OCTAL = {"\\040": " ", "\\011": "\t", "\\134": "\\"}


def file_system(path: str, mounts: str = "/proc/mounts") -> tuple[str, str]:
    """(type, mount point) of the file system that a path is on; empty where the system does not tell."""
    best = ("", "")
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return best
    for line in lines:
        _, point, kind, *_ = line.split()
        for code, character in OCTAL.items():
            point = point.replace(code, character)
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[1]):
            best = (kind, point)
    return best


@contextmanager
def probe(session: Session):
    """A fresh folder inside the session's one, made and removed by rank 0: (its path or None, why not). Collective."""
    name, problem = "", ""
    if session.rank == 0:
        name = f".pmm3d-doctor-{socket.gethostname()}-{os.getpid()}"
        try:
            shutil.rmtree(session.folder / name, ignore_errors=True)
            (session.folder / name).mkdir()
        except OSError as error:
            name, problem = "", f"{error.strerror} ({session.folder.resolve()})"
    told = np.zeros(NAME_BYTES, np.uint8)
    told[: len(name.encode())] = np.frombuffer(name.encode(), np.uint8)
    session.wait(session.comm.Ibcast([told, MPI.BYTE]), doze=True)
    name = bytes(told).rstrip(b"\0").decode()
    try:
        yield (session.folder / name if name else None), problem
    finally:
        if session.rank == 0 and name:
            shutil.rmtree(session.folder / name, ignore_errors=True)


@dataclass(frozen=True)
class Folder:
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
    with probe(session) as (folder, problem):
        seen = _sight(session, folder) if folder else None
        session.barrier(SEEN_SECONDS + 5, doze=True)
    if not session.is_first_here:
        return None
    path = session.folder.resolve()
    exists = path.is_dir()
    kind, point = file_system(str(path))
    return Folder(str(path), kind, point, shutil.disk_usage(path).free if exists else 0, exists, problem, seen)


def _sight(session: Session, folder: Path) -> float | None:
    """How long this host goes on seeing the old contents of a file that rank 0 has replaced as checkpoints are."""
    path = folder / "replaced"
    if session.rank == 0:
        _write(path, b"old")
    session.barrier(doze=True)
    if session.is_first_here:
        _read(path)
    session.barrier(doze=True)
    if session.rank == 0:
        _write(folder / "new", b"new")
        os.replace(folder / "new", path)
    session.barrier(doze=True)
    begun = time.monotonic()
    while session.is_first_here and time.monotonic() - begun < SEEN_SECONDS:
        if _read(path) == b"new":
            return time.monotonic() - begun
        time.sleep(5e-3)
    return None


def _write(path: Path, contents: bytes) -> None:
    with open(path, "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def judge_folder(facts: list[Folder | None], hosts: list[str]) -> Finding:
    problems = Problems()
    first = facts[0]
    here = {host: facts[ranks[0]] for host, ranks in by_host(hosts).items()}
    kind = first.kind or "unknown file system"
    choose = "give one that all nodes can write to: --folder, training.folder"
    absent = [host for host, fact in here.items() if not fact.exists]
    blind = [host for host, fact in here.items() if fact.exists and fact.seen is None]
    late = max((fact.seen or 0.0 for fact in here.values()), default=0.0)
    if absent:
        problems.fail(f"{first.path} is no folder on {names_in_words(absent)}", f"make it, or {choose}")
    if first.unwritable and first.exists:
        problems.fail(f"rank 0 cannot write there: {first.unwritable}", choose)
    elif blind and first.exists:
        own = " (a file system of each node's own)" if kind in UNSHARED else ""
        problems.fail(f"{names_in_words(blind)} did not see within {SEEN_SECONDS:g} s what rank 0 wrote: the folder is "
                      f"not shared between hosts{own}, or is cached for long",
                      choose + "; NFS: mount it with actimeo=1")
    elif late > SLOW_SIGHT:
        problems.warn(f"it took {late:.1f} s until every host saw a file that rank 0 had replaced",
                      "NFS caches attributes: mount with actimeo=1, or use the parallel file system ($SCRATCH, $WORK)")
    if first.exists and not first.unwritable and first.free < LEAST_FREE:
        problems.warn(f"{in_bytes(first.free)} free", "remove old runs, or choose another folder (--folder)")
    sight = f", a replaced file seen everywhere after {1e3 * late:.0f} ms" if len(here) > 1 and not problems else ""
    return Finding("folder", f"{first.path}, {kind}, {in_bytes(first.free)} free{sight}", tuple(problems),
                   asdict(first) | {"seen_seconds": {host: fact.seen for host, fact in here.items()}})


@dataclass(frozen=True)
class Locks:
    """How another process fared that wanted a lock which rank 0 held, by kind of lock: refused, granted, or an error.
    who: the other process; hdf5: why HDF5 could not write and read a file there."""

    tried: dict[str, str]
    who: str
    hdf5: str
    possible: bool


def gather_locks(session: Session) -> Locks:
    partner = next((rank for rank in session.first_ranks if rank), 1 if session.size > 1 else 0)
    with probe(session) as (folder, _):
        if folder is None:
            return Locks({}, "", "", False)
        found = {kind: _tried(session, partner, kind, folder / f"{kind}.lock") for kind in locks.LOCKS}
        hdf5 = _hdf5_problem(folder) if session.rank == 0 else ""
        session.barrier(doze=True)
    who = f"rank {partner} on {session.hosts[partner]}" if partner else "a child process"
    return Locks({kind: text for kind, text in found.items() if text}, who, hdf5, True)


def _tried(session: Session, partner: int, kind: str, path: Path) -> str:
    """The fate of the partner's attempt, known to the rank that made it; of rank 0's own, if that failed."""
    file, own = None, ""
    if session.rank == 0:
        try:
            file = open(path, "wb+")
            locks.lock(kind, file)
        except OSError as error:
            own = error.strerror or str(error)
    try:
        session.barrier(doze=True)
        if session.rank == partner and not own:
            own = locks.try_lock(kind, str(path)) if partner else _child_tries(kind, path)
        session.barrier(doze=True)
        return own
    finally:
        if file is not None:
            file.close()


def _child_tries(kind: str, path: Path) -> str:
    child = subprocess.run([sys.executable, "-m", "pmm3d.tools.doctor.locks", kind, str(path)], capture_output=True,
                           text=True, timeout=CHILD_SECONDS, stdin=subprocess.DEVNULL)
    return child.stdout.strip() or child.stderr.strip()[-200:]


def _hdf5_problem(folder: Path) -> str:
    import h5py

    try:
        with h5py.File(folder / "probe.h5", "w") as file:
            file["x"] = np.arange(4)
        with h5py.File(folder / "probe.h5") as file:
            return "" if np.array_equal(file["x"][...], np.arange(4)) else "it read other values than were written"
    except OSError as error:
        return str(error)


def judge_locks(facts: list[Locks], hosts: list[str]) -> Finding:
    problems = Problems()
    if not facts[0].possible:
        problems.note("not tried, as the folder cannot be written", "see the check of the folder")
        return Finding("file locks", "not tried", tuple(problems))
    tried = {}
    for fact in facts:
        for kind, text in fact.tried.items():
            if tried.get(kind, locks.REFUSED) == locks.REFUSED or text not in (locks.REFUSED, locks.GRANTED):
                tried[kind] = text
    off = "export HDF5_USE_FILE_LOCKING=FALSE"
    if facts[0].hdf5:
        problems.fail(f"HDF5 cannot use files there: {facts[0].hdf5}",
                      f"{off}, if the text speaks of locks; or another folder (--folder)")
    without = {kind: text for kind, text in tried.items() if text not in (locks.REFUSED, locks.GRANTED)}
    if without:
        problems.warn("no locks here: " + "; ".join(f"{kind}: {text}" for kind, text in without.items()),
                      f"{off}; Lustre: have it mounted with flock; and never two runs in one folder at once")
    void = [kind for kind, text in tried.items() if text == locks.GRANTED]
    if void:
        problems.warn(f"locks by {' and '.join(void)} do not exclude {facts[0].who}",
                      f"never two runs in one folder at once; {off} where HDF5 complains; Lustre: mounted with flock "
                      "rather than localflock")
    holding = [kind for kind, text in tried.items() if text == locks.REFUSED]
    said = f"{' and '.join(holding) or 'none'} held against {facts[0].who}"
    return Finding("file locks", said, tuple(problems), {"locks": tried, "hdf5": facts[0].hdf5})
