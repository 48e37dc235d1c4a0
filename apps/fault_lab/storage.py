"""Faults of disks: one that is full while a checkpoint is written, and blocks that are not what was written."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import h5py

from .judgement import Expected, Outcome
from .lab import LONG, Lab, Run, wait_for_checkpoints

DISK = "2m"
FULL = (r"(?P<rank>rank \d+)[^\n]*No space left", r"pmm3d: (?P<rank>rank \d+) raised; ending the job\..*No space left")
LIMITED = (r"(?P<rank>rank \d+)[^\n]*File too large",)


@contextmanager
def small_disk(folder: Path):
    """A file system of DISK bytes in memory; needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def disks_can_be_made(lab: Lab) -> bool:
    """Tried once."""
    if "disks" not in lab.known:
        try:
            with small_disk(lab.folder / "trial"):
                lab.known["disks"] = True
        except (OSError, subprocess.CalledProcessError):
            lab.known["disks"] = False
    return lab.known["disks"]


def disk_full(lab: Lab) -> Outcome:
    """A disk that fills up while the run goes on; or, without root, or by chance, a limit of the size of files on one
    rank (ulimit -f), which is another error ("File too large") at the same places."""
    if disks_can_be_made(lab) and lab.random.random() < 0.75:
        with small_disk(lab.folder / f"disk-{lab.random.randrange(10**9)}") as disk:
            return _filled(lab, disk)
    run, step = lab.run(False), lab.random.choice((2, 5, 8, 11))
    undisturbed, _, _ = lab.reference(run)
    victim = lab.random.choice([int(path.stem[5:]) for path in undisturbed.checkpoints()[-1].glob("rank-*.h5")])
    run.spec = {"fault": "disk: limit", "victim": victim, "step": step, "place": "save"}
    ending = run.start({"PMM3D_TIMEOUT": LONG}, disturbed=True).end(run.mark)
    return lab.judge("disk full", f"ulimit -f on rank {victim} in step {step}", run, ending,
                     Expected(LIMITED, victim, (1,)))


def _filled(lab: Lab, disk: Path) -> Outcome:
    """Filled when some checkpoints are there, all of it or all but a few pages."""
    while True:
        run = lab.run(True, folder=disk / "run")
        job = run.start({"PMM3D_TIMEOUT": LONG})
        number, spare = lab.random.randrange(1, 4), lab.random.choice((0, 0, 4096, 16384, 65536))
        if wait_for_checkpoints(run, job, number):
            job.disturb()
            fill(disk, spare)
            ending = job.end()
            if ending.code != 0:
                os.remove(disk / "filler")
                return lab.judge("disk full", f"tmpfs filled after checkpoint {number} but for {spare} bytes", run,
                                 ending, Expected(FULL, None, (1, 2)))
        job.end()
        shutil.rmtree(disk / "run")
        (disk / "filler").unlink(missing_ok=True)


def fill(disk: Path, spare: int) -> None:
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            os.truncate(file.fileno(), max(0, file.tell() - spare))


def corrupt_block(lab: Lab) -> Outcome:
    """The second half of a run, with a block of its data, or of its newest checkpoint, that is not what was written."""
    where = lab.random.choice(("block of the data", "data cut short", "checkpoint"))
    run = lab.run(True)
    lab.begin_in_the_middle(run)
    return _damaged_checkpoint(lab, run) if where == "checkpoint" else _damaged_data(lab, run, where)


def _damaged_data(lab: Lab, run: Run, where: str) -> Outcome:
    """HDF5 with checksums (fletcher32), of which one byte is another; or a file that is shorter than it was."""
    good, bad = lab.folder / "chunked.h5", lab.folder / f"{run.name}.h5"
    shutil.copy(good, bad)
    if where == "data cut short":
        place = lab.random.randrange(1, good.stat().st_size)
        os.truncate(bad, place)
    else:
        with h5py.File(good) as file:
            data = file["x"]
            chunk = data.id.get_chunk_info(lab.random.randrange(_used_chunks(data)))
        place = chunk.byte_offset + lab.random.randrange(chunk.size)
        flip(bad, place, lab)
    run.file = bad
    ending = run.start({"PMM3D_TIMEOUT": LONG}).end()
    causes = (rf"DataError: [^\n]*(?P<rank>rank \d+): [^\n]*{bad.name}", rf"DataError: [^\n]*{bad.name}")
    expected = Expected(causes, None, (2,), everyone=" ranks. " not in ending.said)
    shutil.copy(good, bad)
    return lab.judge("corrupt block", f"{where} at byte {place}", run, ending, expected)


def _used_chunks(data) -> int:
    """Those that hold rows of the training set: nine tenths of the rows."""
    return data.shape[0] * 9 // 10 // data.chunks[0]


def _damaged_checkpoint(lab: Lab, run: Run) -> Outcome:
    """The newest checkpoint is passed over, and the run goes on from the one before it: this start is to succeed."""
    newest = run.checkpoints()[-1]
    file = lab.random.choice(sorted(newest.iterdir()))
    place = lab.random.randrange(file.stat().st_size)
    flip(file, place, lab)
    ending = run.start({"PMM3D_TIMEOUT": LONG}).end()
    causes = (rf"{newest.name} is passed over: [^\n]*(?P<rank>rank \d+): [^\n]*{file.name}",
              rf"{newest.name} is passed over: [^\n]*{newest.name}")
    shutil.rmtree(newest, ignore_errors=True)
    return lab.judge("corrupt block", f"{file.name} of a checkpoint at byte {place}", run, ending,
                     Expected(causes, None, (0,), everyone=" ranks. " not in ending.said))


def flip(path: Path, place: int, lab: Lab) -> None:
    """Change a byte."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 + lab.random.randrange(255))]))
