"""The folders of a run's checkpoints as rank 0 sees them: which are whole, and what becomes of the others. No messages.

step-00000100          a checkpoint; step-00000100.1 where the step was saved again
writing-step-...       being written, or left by a crash; the next save removes it
removing-step-...      likewise
retired-step-...       later than the checkpoint from which a run went on: set aside, as many as are kept
incomplete-step-...    a folder in which a part is missing, or something else of that name: set aside

Nothing is followed out of the folder: of a symbolic link the link itself is removed or set aside.
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
    """A folder of checkpoints. It notices when it is no longer the one that it was."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self._identity: tuple[int, int] | None = None

    def listed(self) -> list[tuple[int, int, Path]]:
        """(step, version, folder) of the complete checkpoints, newest first. Symbolic links are none."""
        return sorted(((step, version, path) for step, version, path in self._named() if _complete(path)),
                      reverse=True)

    def _named(self) -> list[tuple[int, int, Path]]:
        """All that is named like a checkpoint."""
        if not self.folder.is_dir():
            return []
        status = self.folder.stat()
        self._identity = self._identity or (status.st_dev, status.st_ino)
        return [(int(match[1]), int(match[2] or 0), self.folder / match[0])
                for match in map(STEP.fullmatch, os.listdir(self.folder)) if match]

    def prepare(self, step: int) -> Path:
        """A new folder to write a step's files in. What a crash left is removed, what is no checkpoint set aside."""
        with file_errors(self.folder, "written"):
            self._make()
            for entry in os.scandir(self.folder):
                if UNFINISHED.fullmatch(entry.name):
                    _remove(Path(entry.path))
            for _, _, path in self._named():
                if not _complete(path):
                    self._set_aside(path)
            temporary = self.folder / f"writing-step-{step:08d}"
            temporary.mkdir()
        return temporary

    def _make(self) -> None:
        """The folder, which is there from the first time on, unless somebody removed it."""
        missing = not self.folder.is_dir()
        self.folder.mkdir(parents=True, exist_ok=True)
        status = self.folder.stat()
        identity = status.st_dev, status.st_ino
        if self._identity is not None and (missing or self._identity != identity):
            logger.warning(f"{self.folder} is not the folder that it was: it has been removed, renamed or replaced. "
                           "Checkpoints go on in a new one of that name; those before are where the old one is now")
        self._identity = identity

    def _set_aside(self, path: Path) -> None:
        what = (f"a symbolic link to {os.readlink(path)}, which is not followed" if path.is_symlink() else
                f"no checkpoint: it has no {CHECKPOINT_FILE}")
        aside = _renamed(path, "incomplete")
        logger.warning(f"{path} is {what}. It is now {aside.name}; remove it if nothing in it is wanted")

    def complete(self, temporary: Path, step: int) -> Path:
        """The folder of a checkpoint whose files are all written, under its name and on the disk."""
        with file_errors(temporary, "completed"):
            sync(temporary)
            versions = [version for other, version, _ in self.listed() if other == step]
            path = self.folder / (f"step-{step:08d}" + (f".{versions[0] + 1}" if versions else ""))
            os.rename(temporary, path)
            sync(self.folder)
        return path

    def prune(self, step: int, written: Path) -> None:
        """Remove what `written` replaces, and all but the newest; set aside what is of later steps."""
        try:
            later = self.retire(step)
            others = [(other, path) for other, _, path in self.listed() if path != written]
            kept = [path for other, path in others if other != step][: self.keep - 1]
            for _, path in others:
                if path not in kept:
                    _remove(path.rename(path.with_name(f"removing-{path.name}")))
        except OSError as error:
            logger.warning(f"an old checkpoint could not be removed: {error}")
        else:
            if later:
                logger.warning(f"{written} is of an earlier step than {names_in_words(path.name for path in later)}, "
                               "which are of a run that went on from there before, and were set aside")

    def retire(self, step: int, spared: Path | None = None) -> list[Path]:
        """Set aside the checkpoints of steps later than this one; of all that are set aside the latest `keep` stay, and
        the spared one."""
        later = [path for other, _, path in reversed(self.listed()) if other > step]
        kept = None if spared is None else spared.stat()
        retired = [_renamed(path, "retired") for path in later]
        for path in retired:
            os.utime(path)
        if retired:
            there = [entry for entry in os.scandir(self.folder) if RETIRED.fullmatch(entry.name)]
            there.sort(key=lambda entry: (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
            for entry in there[: -self.keep]:
                if kept is None or not os.path.samestat(entry.stat(follow_symlinks=False), kept):
                    _remove(Path(entry.path))
            sync(self.folder)
        return [path for path in retired if path.exists()]


def _complete(path: Path) -> bool:
    return not path.is_symlink() and (path / CHECKPOINT_FILE).exists()


def _renamed(path: Path, why: str) -> Path:
    """Under a name that is free."""
    names = (f"{why}-{path.name}" + (f"-{number}" if number else "") for number in count())
    return path.rename(next(free for name in names if not os.path.lexists(free := path.with_name(name))))


def _remove(path: Path) -> None:
    """A folder with what is in it, or a file or link itself."""
    if path.is_symlink():
        logger.warning(f"{path} was a symbolic link to {os.readlink(path)}; the link is removed, what it led to stays")
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
