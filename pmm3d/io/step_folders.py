"""The folders of a run's checkpoints, which rank 0 creates, renames and removes. No messages.

step-00000100          a checkpoint; step-00000100.1 if the step was saved again
writing-step-...       a checkpoint that is being written, or was left by a crash; the next save removes it
removing-step-...      a checkpoint that is being removed, or was left by a crash; the next save removes it
retired-step-...       a checkpoint of a later step than the one from which a run continued; the newest `keep` remain

A folder with the name of a checkpoint but without a master file is not a checkpoint, and is not changed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from itertools import count
from pathlib import Path

from ..text import names_in_words
from .disk import file_errors, sync
from .shards import CHECKPOINT_FILE

logger = logging.getLogger("pmm3d.io")
STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
UNFINISHED = re.compile(r"(writing|removing)-step-\d{8,}(\.\d+)?")
RETIRED = re.compile(r"retired-step-\d{8,}.*")


class StepFolders:
    """A folder of checkpoints."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def listed(self) -> list[tuple[int, int, Path]]:
        """Return (step, version, folder) of the complete checkpoints, newest first."""
        return sorted((each for each in self._named() if (each[2] / CHECKPOINT_FILE).exists()), reverse=True)

    def _named(self) -> list[tuple[int, int, Path]]:
        """Return (step, version, path) of all entries with the name of a checkpoint."""
        names = os.listdir(self.folder) if self.folder.is_dir() else ()
        return [
            (int(match[1]), int(match[2] or 0), self.folder / match[0]) for match in map(STEP.fullmatch, names) if match
        ]

    def prepare(self, step: int, temporary: Path) -> Path:
        """Create a temporary folder for the files of a step, and remove leftovers of a crash. Return the final path of
        the folder."""
        with file_errors(self.folder, "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(self.folder):
                if UNFINISHED.fullmatch(entry.name):
                    _remove(Path(entry.path))
            temporary.mkdir()
            last = max((version for other, version, _ in self._named() if other == step), default=-1)
        return self.folder / (f"step-{step:08d}" + (f".{last + 1}" if last >= 0 else ""))

    def complete(self, temporary: Path, path: Path) -> None:
        """Rename the temporary folder, whose files are all written, to its final path, and fsync it."""
        with file_errors(temporary, "completed"):
            sync(temporary)
            os.rename(temporary, path)
            sync(self.folder)

    def prune(self, step: int, written: Path) -> None:
        """Remove the older versions of this step and all but the `keep` newest checkpoints. Retire those of later
        steps."""
        try:
            later = self.retire(step)
            others = [(other, path) for other, _, path in self.listed() if path != written]
            spared = [path for other, path in others if other != step][: self.keep - 1]
            for _, path in others:
                if path not in spared:
                    _remove(path.rename(path.with_name(f"removing-{path.name}")))
        except OSError as error:
            logger.warning(f"an old checkpoint could not be removed: {error}")
        else:
            if later:
                logger.warning(
                    f"{written} is of an earlier step than {names_in_words(path.name for path in later)}, "
                    "which are of a run that went on from there before, and were set aside"
                )

    def retire(self, step: int, spared: Path | None = None) -> list[Path]:
        """Rename the checkpoints of later steps to retired ones, and return their new paths. Only the `keep` newest
        retired checkpoints, and `spared`, remain."""
        later = [path for other, _, path in reversed(self.listed()) if other > step]
        retired = [_renamed(path) for path in later]
        for path in retired:
            os.utime(path)
        if retired:
            there = [Path(entry.path) for entry in os.scandir(self.folder) if RETIRED.fullmatch(entry.name)]
            there.sort(key=lambda path: (path.lstat().st_mtime_ns, path.name))
            for path in there[: -self.keep]:
                if spared is None or not path.samefile(spared):
                    _remove(path)
            sync(self.folder)
        return [path for path in retired if path.exists()]


def _renamed(path: Path) -> Path:
    """Rename to the first free name of a retired checkpoint."""
    names = (f"retired-{path.name}" + (f"-{number}" if number else "") for number in count())
    return path.rename(next(free for name in names if not os.path.lexists(free := path.with_name(name))))


def _remove(path: Path) -> None:
    """Remove a folder with its contents, or a file, or a link without its target."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
