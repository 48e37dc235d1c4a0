"""Files in /dev/shm of killed MPICH ranks: 3 MB per job. A container may have only 64 MB there."""

from __future__ import annotations

import os
from pathlib import Path


def remove_leftovers(started: float) -> None:
    """Remove the MPICH files of this user that were made since `started` and are mapped by no process."""
    ours = {
        str(path)
        for path in Path("/dev/shm").glob("mpich_shm_*")
        if path.stat().st_uid == os.getuid() and path.stat().st_mtime >= started
    }
    if not ours:
        return
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
        except OSError:
            continue
        ours -= {path for path in ours if path in maps}
    for path in ours:
        Path(path).unlink(missing_ok=True)
