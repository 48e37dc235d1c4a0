"""Checkpoints: matrices on disk. All ranks write in parallel, and any grid can load. Writing is atomic."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import Grid, Pending, digest, gather_small
from ..errors import CheckpointError
from ..text import names_in_words
from . import shards as on_disk
from .disk import file_errors, verify
from .matrices import Described, Matrices, check_matrices, described_by_all, differences, form_in_words, to_write
from .step_folders import StepFolders

logger = logging.getLogger("pmm3d.io")
COMPLETING = "save: completing the checkpoint"
Check = Callable[[Any], object]
"""Function of the meta of a checkpoint. If it raises, the checkpoint is not loaded."""
Partial = bool | Callable[[str], bool]
"""Whether a checkpoint may contain further matrices that are not loaded, or a function that decides this for a name."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with verified checksums: its folder, meta and manifest."""

    path: Path
    meta: Any
    manifest: on_disk.Manifest

    @property
    def contents(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Name -> (shape, dtype) of the matrices in the checkpoint."""
        return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in self.manifest["matrices"].items()}


@dataclass
class _Saving:
    """A checkpoint that is being written.

    temporary, path   its folder during writing, and afterwards
    work              the current work of this rank: first writing its shards, then, on rank 0, completing the folder
    what              name of the current work, for messages
    """

    step: int
    described: dict[str, Described]
    meta: str
    temporary: Path
    path: Path
    work: Future[Any]
    what: str = "save: writing the shards"


class Checkpoints:
    """The checkpoints of one run in a folder. All methods are collective.

    Parameters
    ----------
    grid : Grid
        The grid. Matrices may be on it, on `grid.stage`, or on other grids over the same processes, in any layout and
        library. Each rank passes its own matrices: a checkpoint contains those of all stages. Stages may share a weight
        of one name with equal values.
    folder : str or Path
        The folder. One job at a time saves into it.
    keep : int
        Number of newest checkpoints that are kept, at least 1. Default: 3.
    background : bool
        Let `save` only copy the shards to host memory, while a thread of each rank writes them. The copies take the
        memory of this rank's shards, and are reused.

    Raises
    ------
    CheckpointError
        On every rank.

    Notes
    -----
    A checkpoint is a folder step-00000100 (step-00000100.1 if it was saved again) of HDF5 files; `pmm3d.io.shards`
    describes them. Any HDF5 reader sees each whole matrix in its checkpoint.h5. The folder can be moved.

    A checkpoint has a temporary name until all ranks have written their shards to the disk. A crash at any time leaves
    the earlier checkpoints, and the next save removes the rest.

    With `background`, call `poll` after each step, and `finish` at the end of the program. Without `poll`, the next
    `save` completes a checkpoint. No thread calls MPI.

    Examples
    --------
    >>> import tempfile
    >>> from pmm3d import DistMatrix, Grid
    >>> from pmm3d.io import Checkpoints
    >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
    ...     checkpoints = Checkpoints(grid, grid.comm.bcast(folder))
    ...     weights = {"weight": DistMatrix.random(grid, (6, 4), seed=1)}
    ...     checkpoints.save(100, weights, {"epoch": 3}).name, checkpoints.load_latest(weights)[1]
    ('step-00000100', {'epoch': 3})
    """

    def __init__(self, grid: Grid, folder: str | os.PathLike[str], keep: int = 3, background: bool = False):
        self.grid, self.folder, self.keep, self.background = grid, Path(folder), keep, background
        self._folders = StepFolders(self.folder, keep)
        self._copies, self._pool = on_disk.HostCopies(), ThreadPoolExecutor(1, "pmm3d checkpoint")
        self._saving: _Saving | None = None
        self._asked: Pending | None = None
        with grid.collective_call("Checkpoints", str(folder), keep, background, always=True):
            if not isinstance(keep, int) or keep < 1:
                raise CheckpointError(f"keep is a number of checkpoints, at least 1; got {keep!r}")

    def save(self, step: int, matrices: Matrices, meta: Any = None) -> Path:
        """Write a checkpoint. Older checkpoints beyond `keep` are removed.

        Parameters
        ----------
        step : int
            Number of the step. A second save of a step replaces it when the new checkpoint is complete. Checkpoints of
            later steps are retired.
        matrices : dict of str to DistMatrix
            The matrices by name; a / in a name makes HDF5 groups. One owner of each shard writes it. Partial sums are
            summed first.
        meta : object or None
            Data for JSON, the same on all ranks. Numbers and arrays of numpy become lists.

        Returns
        -------
        Path
            Folder of the checkpoint. It is on the disk when `save` returns; in the background, when `poll` or `finish`
            returns it.

        Raises
        ------
        CheckpointError
            On every rank. All earlier checkpoints are unchanged.

        Notes
        -----
        The checkpoint has the values that the matrices have at the call. A save waits for the end of the one before.
        """
        self.finish()
        with self.grid.collective_call("save", always=True):
            check_matrices(self.grid, matrices)
            text = _json_of(meta)
            if not isinstance(step, (int, np.integer)) or step < 0:
                raise CheckpointError(f"a step is a number of at least 0; got {step!r}")
        described = described_by_all(self.grid, "save", matrices)
        step, path, temporary = int(step), None, self.folder / f"writing-step-{step:08d}"
        try:
            with self.grid.collective_call("save", str(self.folder), step, "meta", digest(text), always=True):
                on_disk.check_names(described.keys())
                if self.grid.rank == 0:
                    path = self._folders.prepare(step, temporary)
            path = self.grid.comm.bcast(path)
            matrices = to_write(self.grid, "save", matrices, described)
            with self.grid.collective_call("save: copying the shards", always=True):
                shards = on_disk.own_shards(matrices)
                shards = self._copies.of(shards) if self.background else shards
        except Exception:
            self._remove(temporary)
            raise
        work = self._begun(on_disk.write_shards, temporary / f"rank-{self.grid.rank:05d}.h5", shards)
        self._saving = _Saving(step, described, text, temporary, path, work)
        if not self.background:
            self.finish()
        return path

    def poll(self) -> Path | None:
        """Continue a checkpoint in the background: complete it when all ranks have written their shards.

        Return the folder of a checkpoint that this call completed, or None. Raises CheckpointError, on every rank, if a
        rank could not write; earlier checkpoints are unchanged.

        Notes
        -----
        Each call sends 8 bytes of each rank to all ranks, and the next call reads the answers. No rank waits.
        """
        if self._saving is None:
            return None
        asked, self._asked = self._asked, None
        if asked is not None and asked.wait().all():
            return self._go_on(self._saving)
        done = np.array([self._saving.work.done()], np.int64)
        self._asked = self.grid.everyone.begin("agreement on the checkpoint", lambda link: gather_small(link, done))
        return None

    def finish(self) -> Path | None:
        """Wait for the checkpoint in the background, and return its folder, or None. Errors as in `poll`."""
        path, asked, self._asked = None, self._asked, None
        if asked is not None:
            asked.wait()
        while self._saving is not None:
            path = self._go_on(self._saving)
        return path

    def _begun(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start the work in the background, or do it now. The Future stores errors, so that one rank alone does not
        raise."""
        done: Future[Any] = Future()
        try:
            if self.background:
                return self._pool.submit(work, *arguments)
            done.set_result(work(*arguments))
        except RuntimeError as error:  # from submit, if the system cannot start a thread
            done.set_exception(CheckpointError(f"the checkpoint cannot be written: {error}"))
        except Exception as error:
            done.set_exception(error)
        return done

    def _go_on(self, saving: _Saving) -> Path | None:
        """Wait for the current work of all ranks, and start the next. Errors are raised on every rank. Return the
        folder if the checkpoint is complete. Collective."""
        try:
            with self.grid.collective_call(saving.what, always=True):
                written = saving.work.result()
        except Exception:
            self._saving = None
            self._remove(saving.temporary)
            raise
        if saving.what == COMPLETING:
            self._saving = None
            return saving.path
        files, saving.what = self.grid.comm.gather(written), COMPLETING
        saving.work = self._begun(partial(self._complete, saving, files) if files is not None else lambda: None)
        return None

    def _complete(self, saving: _Saving, files: list[on_disk.Written | None]) -> None:
        on_disk.write_master(saving.temporary, saving.step, saving.described, files, saving.meta)
        self._folders.complete(saving.temporary, saving.path)
        self._folders.prune(saving.step, saving.path)

    def _remove(self, temporary: Path) -> None:
        if self.grid.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)

    def retire(self, step: int, spared: str | os.PathLike[str] | None = None) -> list[Path]:
        """Rename the checkpoints of later steps to retired-step-..., for a run that continues from this step.

        Return the new names. The `keep` checkpoints that were retired last remain, and the checkpoint `spared`.
        """
        self.finish()
        spared_path = None if spared is None else Path(spared)
        agreed = self.grid.collective_call("retire", str(self.folder), step, always=True)
        with agreed, file_errors(self.folder, "tidied"):
            retired = self._folders.retire(step, spared_path) if self.grid.rank == 0 else []
        return self.grid.comm.bcast(retired)

    def candidates(self) -> list[Path]:
        """Folders of the complete checkpoints, newest step first. Only `load` finds out whether they are damaged."""
        self.finish()
        with self.grid.collective_call("candidates", str(self.folder), always=True), file_errors(self.folder, "listed"):
            paths = [path for _, _, path in self._folders.listed()] if self.grid.rank == 0 else []
        return self.grid.comm.bcast(paths)

    def latest(self) -> Path | None:
        """Folder of the complete checkpoint of the newest step; None if there is none."""
        return next(iter(self.candidates()), None)

    def meta(self, path: str | os.PathLike[str]) -> Any:
        """Return the data that was saved with a checkpoint, from JSON: tuples are lists, and keys are strings."""
        return self._read(Path(path)).meta

    def contents(self, path: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, int], str]]:
        """Return (shape, dtype) of each matrix of a checkpoint, by name."""
        return self._read(Path(path)).contents

    def load(
        self, path: str | os.PathLike[str], matrices: Matrices, *, check: Check | None = None, partial: Partial = False
    ) -> Any:
        """Fill matrices from a checkpoint, on any number of ranks and stages, in any grid and layout.

        Parameters
        ----------
        path : str or Path
            Folder of the checkpoint.
        matrices : dict of str to DistMatrix
            The matrices by name, which are overwritten.
        check : callable or None
            check(meta) is called on every rank before a matrix is changed. Its errors are raised.
        partial : bool or callable
            Whether the checkpoint may contain more matrices than those of all ranks. A function returns this for each
            name.

        Returns
        -------
        object
            The data that was saved with the checkpoint.

        Raises
        ------
        CheckpointError
            On every rank, before a matrix is changed, if checksums, names, shapes or types are wrong.

        Notes
        -----
        All checksums are verified first; each byte is read by one rank. Then each rank reads its own shards.
        """
        return self.fill(self.undamaged(path), matrices, check=check, partial=partial)

    def load_latest(
        self, matrices: Matrices, *, check: Check | None = None, partial: Partial = False
    ) -> tuple[Path, Any] | None:
        """Fill matrices from the newest undamaged checkpoint. Arguments as in `load`.

        Return its folder and data, or None if there are no checkpoints. After an error of `check`, no older checkpoint
        is tried. Raises CheckpointError, on every rank, if all checkpoints are damaged; otherwise warnings name the
        damaged ones.
        """
        checkpoint = self.newest_undamaged()
        return (
            None
            if checkpoint is None
            else (checkpoint.path, self.fill(checkpoint, matrices, check=check, partial=partial))
        )

    def undamaged(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Return a checkpoint for `fill`. Raises CheckpointError, on every rank, if its checksums are wrong."""
        checkpoint = self._read(Path(path))
        with self.grid.collective_call("load: verifying", str(path), always=True):
            verify(checkpoint.path, checkpoint.manifest["files"], self.grid.rank, self.grid.size)
        return checkpoint

    def newest_undamaged(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, for `fill`; None if there is none."""
        failed = []
        for path in self.candidates():
            try:
                return self.undamaged(path)
            except CheckpointError as error:
                failed.append(str(error))
                if self.grid.rank == 0:
                    logger.warning(f"{path} is passed over: {error}")
        with self.grid.collective_call("load_latest", always=True):
            if failed:
                raise CheckpointError(
                    f"no checkpoint in {self.folder} can be read. {names_in_words(failed)}. Restore "
                    "one from a backup, or begin a new run in another folder"
                )
        return None

    def fill(
        self, checkpoint: Checkpoint, matrices: Matrices, *, check: Check | None = None, partial: Partial = False
    ) -> Any:
        """Fill matrices from a verified checkpoint, and return its data. Arguments as in `load`."""
        path = str(checkpoint.path)
        if check is not None:
            with self.grid.collective_call("load: checking", path, always=True):
                check(checkpoint.meta)
        with self.grid.collective_call("load", path, partial, always=True):
            check_matrices(self.grid, matrices, filled=True)
        described = described_by_all(self.grid, "load", matrices)
        with self.grid.collective_call("load", path, always=True):
            self._check_fit(checkpoint, described, partial)
        with self.grid.collective_call("load: reading", path, always=True):
            on_disk.fill(checkpoint.path, checkpoint.manifest, matrices)
        return checkpoint.meta

    def _read(self, path: Path) -> Checkpoint:
        """Return the manifest and the meta of a checkpoint. Rank 0 reads them, and broadcasts. Shards are not read."""
        self.finish()
        with self.grid.collective_call("load", str(path), always=True):
            known = on_disk.read_master(path) if self.grid.rank == 0 else None
        manifest, meta = self.grid.comm.bcast(known)
        return Checkpoint(path, meta, manifest)

    def _check_fit(self, checkpoint: Checkpoint, described: dict[str, Described], partial: Partial) -> None:
        here = {name: form_in_words(one.shape, one.dtype) for name, one in described.items()}
        there = {
            name: form_in_words(*form)
            for name, form in checkpoint.contents.items()
            if name in described or not (partial(name) if callable(partial) else partial)
        }
        if text := differences(here, there):
            other, needed = "the checkpoint of another network", "the network and the optimizer"
            if all(name.startswith("optimizer/") for name, _ in here.items() ^ there.items()):
                other, needed = "of an optimizer with other states", "the groups and options of the optimizer"
            raise CheckpointError(f"{checkpoint.path} is {other}. {text}. Load it with {needed} that it was saved with")


def _json_of(meta: Any) -> str:
    try:
        return json.dumps(meta, default=plain)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta must contain only values that JSON has: {error}") from error


def plain(value: Any) -> Any:
    """Value for JSON of a number or an array of numpy."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"got an object of type {type(value).__name__}")
