"""What a killed MPICH rank leaves in /dev/shm: 3 MB a job, of which a container may have only 64."""

from __future__ import annotations

import os
from pathlib import Path


def remove_leftovers(started: float) -> None:
    """Remove MPICH's files that are ours, made since that time, and mapped by no process."""
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
