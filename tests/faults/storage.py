"""Faults of disks: a full disk while a checkpoint is written, and damaged files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import h5py

from .judgement import Expected, Outcome
from .lab import LONG, Lab, Run

DISK = "2m"
FULL = (r"(?P<rank>rank \d+)[^\n]*No space left", r"pmm3d: (?P<rank>rank \d+) raised; ending the job\..*No space left")
LIMITED = (r"(?P<rank>rank \d+)[^\n]*File too large",)


@contextmanager
def small_disk() -> Iterator[Path]:
    """Mount a file system of DISK bytes in memory. Needs root."""
    with tempfile.TemporaryDirectory(prefix="faults-disk-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@cache
def disks_can_be_made() -> bool:
    with suppress(OSError, subprocess.CalledProcessError), small_disk():
        return True
    return False


def disk_full(lab: Lab) -> Outcome:
    """A disk becomes full during the run. Without root, and in a quarter of the cases, one rank's files are limited
    instead (ulimit -f): another error ("File too large") at the same places."""
    if disks_can_be_made() and lab.random.random() < 0.75:
        with small_disk() as disk:
            return _filled(lab, disk)
    return files_limited(lab)


def files_limited(lab: Lab) -> Outcome:
    """The size of a rank's files is limited when it writes a checkpoint."""
    run, step = lab.run(own_loop=True), lab.random.choice((2, 5, 8, 11))
    writers = lab.reference(run).checkpoints()[-1].glob("rank-*.h5")
    victim = lab.random.choice([int(path.stem[5:]) for path in writers])
    fault = {"name": "disk: limit", "victim": victim, "step": step, "point": "save"}
    job = run.start({"PMM3D_TIMEOUT": LONG}, fault=fault)
    return lab.judge(
        "disk full", f"ulimit -f on rank {victim} in step {step}", run, job.end(), Expected(LIMITED, victim, (1,))
    )


def _filled(lab: Lab, disk: Path) -> Outcome:
    """Fill the disk, or all but a few pages, after some checkpoints. Repeat if the run ended first."""
    while True:
        run = lab.run(folder=disk)
        job = run.start({"PMM3D_TIMEOUT": LONG})
        number, spare = lab.random.randrange(1, 4), lab.random.choice((0, 0, 4096, 16384, 65536))
        if job.until(lambda: len(run.checkpoints()) >= number):
            job.fault_at = time.time()
            with suppress(OSError):
                (disk / "filler").write_bytes(bytes(max(0, shutil.disk_usage(disk).free - spare)))
            ending = job.end()
            (disk / "filler").unlink()
            if ending.code != 0:
                return lab.judge(
                    "disk full",
                    f"tmpfs filled after checkpoint {number} but for {spare} bytes",
                    run,
                    ending,
                    Expected(FULL, None, (1, 2)),
                )
        job.end()
        shutil.rmtree(run.folder)


def corrupt_block(lab: Lab) -> Outcome:
    """A run is resumed after a byte of its data or of its newest checkpoint has changed."""
    what = lab.random.choice(("block of the data", "data cut short", "checkpoint"))
    if what == "checkpoint":
        return damaged_checkpoint(lab)
    return _damaged_data(lab, _half_done(lab), what)


def _half_done(lab: Lab) -> Run:
    """A run with the last but one and the last but two checkpoint of its reference."""
    run = lab.run()
    for path in lab.reference(run).checkpoints()[-3:-1]:
        shutil.copytree(path, run.folder / "checkpoints" / path.name)
    return run


def _damaged_data(lab: Lab, run: Run, what: str) -> Outcome:
    """Change a byte of an HDF5 file with checksums (fletcher32), or cut the file short."""
    run.file = lab.folder / f"{run.name}.h5"
    shutil.copy(lab.chunked_file, run.file)
    if what == "data cut short":
        at = lab.random.randrange(1, run.file.stat().st_size)
        os.truncate(run.file, at)
    else:
        with h5py.File(lab.chunked_file) as file:
            data = file["x"]
            used_chunks = data.shape[0] * 9 // 10 // data.chunks[0]  # the last tenth of the rows is for validation
            chunk = data.id.get_chunk_info(lab.random.randrange(used_chunks))
        at = chunk.byte_offset + lab.random.randrange(chunk.size)
        change_byte(run.file, at, lab)
    ending = run.start({"PMM3D_TIMEOUT": LONG}).end()
    causes = (rf"DataError: [^\n]*(?P<rank>rank \d+): [^\n]*{run.file.name}", rf"DataError: [^\n]*{run.file.name}")
    shutil.copy(lab.chunked_file, run.file)
    return lab.judge(
        "corrupt block",
        f"{what} at byte {at}",
        run,
        ending,
        Expected(causes, None, (2,), everyone=" ranks. " not in ending.output),
    )


def damaged_checkpoint(lab: Lab) -> Outcome:
    """A byte of the newest checkpoint has changed, or a file of it is missing; besides, there is a link to a folder of
    others. The run must resume from the checkpoint before it."""
    run = _half_done(lab)
    newest = run.checkpoints()[-1]
    file = lab.random.choice(sorted(newest.iterdir()))
    at = lab.random.randrange(file.stat().st_size)
    if missing := lab.random.random() < 0.25:
        file.unlink()
    else:
        change_byte(file, at, lab)
    (link := newest.with_name("step-99999999")).symlink_to("/tmp")
    ending = run.start({"PMM3D_TIMEOUT": LONG}).end()
    link.unlink(missing_ok=True)
    causes = (
        rf"{newest.name} is passed over: [^\n]*(?P<rank>rank \d+): [^\n]*{file.name}",
        rf"{newest.name} is passed over: [^\n]*{newest.name}",
        *([r"\A"] if missing and file.name == "checkpoint.h5" else []),  # without it, a checkpoint is not complete
    )
    shutil.rmtree(newest, ignore_errors=True)
    return lab.judge(
        "corrupt block",
        f"{file.name} of a checkpoint {'is missing' if missing else f'at byte {at}'}",
        run,
        ending,
        Expected(
            causes, None, (0,), everyone=not re.search(rf"{newest.name} is passed over: .* ranks\. ", ending.output)
        ),
    )


def change_byte(path: Path, at: int, lab: Lab) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 + lab.random.randrange(255)
    path.write_bytes(content)
