"""The folder that a run writes to: file system, delay until other hosts see a new file, HDF5."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...io.disk import replace_file
from ...text import in_bytes, names_in_words
from .finding import Finding
from .session import Session

SEEN_SECONDS = 4.0
"""Time limit until another host sees a new file. NFS caches attributes for three seconds."""
SLOW_SIGHT = 1.0
"""Seconds of stale contents on another host above which the check warns."""
LEAST_FREE = 2**30
"""Bytes of free space below which the check warns."""
UNSHARED = {"tmpfs", "ramfs", "overlayfs", "ext2/ext3", "xfs", "btrfs", "zfs", "squashfs"}
"""File systems that hosts do not share, as stat(1) names them."""


def file_system(path: str) -> str:
    """Return the type of the file system of a path, such as nfs; "" if it is unknown."""
    with suppress(OSError):
        return subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True).stdout.strip()
    return ""


class Folder(NamedTuple):
    """Facts of the first rank of a host.

    unwritable   error of rank 0 when it created a folder there
    hdf5         error of rank 0 when it wrote and read a file of HDF5 there
    seen         seconds until this host read the new contents of a file that rank 0 had replaced; None: never
    """

    path: str
    kind: str
    free: int
    exists: bool
    unwritable: str
    hdf5: str
    seen: float | None


def gather_folder(session: Session) -> Folder | None:
    """Return None on ranks that are not the first of their host."""
    scratch, problem, hdf5 = session.folder / f".pmm3d-doctor-{session.name}", "", ""
    try:
        if session.rank == 0:
            try:
                scratch.mkdir()
            except OSError as error:
                problem = f"{error.strerror} ({session.folder.resolve()})"
        seen = _seconds_until_seen(session, scratch / "replaced", not problem)
        session.barrier(SEEN_SECONDS + 5, doze=True)
        if session.rank == 0 and not problem:
            hdf5 = hdf5_problem(scratch / "trial.h5")
    finally:
        if session.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    if not session.is_first_here:
        return None
    path = session.folder.resolve()
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    return Folder(str(path), file_system(str(path)), free, path.is_dir(), problem, hdf5, seen)


def _seconds_until_seen(session: Session, path: Path, writable: bool) -> float | None:
    """Return the seconds for which this host reads old contents after rank 0 replaced a file, as for checkpoints."""
    for contents in (b"old", b"new"):
        session.barrier(doze=True)
        if session.rank == 0 and writable:
            replace_file(path, contents)
        session.barrier(doze=True)
        begun = time.monotonic()
        seen = session.is_first_here and _holds(path, contents)
    while session.is_first_here and writable and not seen and time.monotonic() - begun < SEEN_SECONDS:
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
    choose = "choose a folder that all nodes can write to: --folder, training.folder"
    absent = [host for host, fact in here.items() if not fact.exists]
    blind = [host for host, fact in here.items() if fact.exists and fact.seen is None]
    late = max(fact.seen or 0.0 for fact in here.values())
    if absent:
        finding.fail(f"{first.path} is not a folder on {names_in_words(absent)}", f"create it, or {choose}")
    if first.exists and first.unwritable:
        finding.fail(f"rank 0 cannot write there: {first.unwritable}", choose)
    elif first.exists and blind:
        own = " (a file system of each node's own)" if kind in UNSHARED else ""
        finding.fail(
            f"{names_in_words(blind)} did not see a new file of rank 0 within {SEEN_SECONDS:g} s: the folder "
            f"is not shared between hosts{own}, or is cached too long",
            f"{choose}; NFS: mount it with actimeo=1",
        )
    elif late > SLOW_SIGHT:
        finding.warn(
            f"it took {late:.1f} s until every host saw a file that rank 0 had replaced",
            "NFS caches attributes: mount with actimeo=1, or use the parallel file system ($SCRATCH, $WORK)",
        )
    if first.hdf5:
        finding.fail(
            f"HDF5 cannot use files in the folder: {first.hdf5}",
            "if the text is about locks: export HDF5_USE_FILE_LOCKING=FALSE (Lustre: mount it with flock). "
            "Otherwise choose another folder (--folder)",
        )
    if first.exists and not first.unwritable and first.free < LEAST_FREE:
        finding.warn(f"{in_bytes(first.free)} free", "remove old runs, or choose another folder (--folder)")
    seen = len(here) > 1 and not finding.problems
    finding.found = (
        f"{first.path}, {kind}, {in_bytes(first.free)} free"
        + f", a replaced file seen everywhere after {1e3 * late:.0f} ms" * seen
    )
    finding.figures = first._asdict() | {"seen_seconds": {host: fact.seen for host, fact in here.items()}}


def hdf5_problem(path: Path) -> str:
    """Return why HDF5 cannot write and read a new file, or "", also if h5py is not installed."""
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
