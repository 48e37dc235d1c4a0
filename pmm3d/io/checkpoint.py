"""Checkpoints: matrices on disk, written by all ranks at once, loaded on any grid, never half there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import Grid
from ..comm.words import names_in_words
from ..errors import CheckpointError
from ..product.relayout import summed
from . import shards as on_disk
from .disk import checksums, file_errors, sync, verify
from .matrices import Matrices, check_matrices, differences

logger = logging.getLogger("pmm3d.io")
STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
UNFINISHED = re.compile(r"(writing|removing)-step-\d{8,}(\.\d+)?")


class Checkpoints:
    """The checkpoints of one run in a folder, of which the newest `keep` are kept. All methods are collective.

    A checkpoint is a folder step-00000100 (step-00000100.1 where it was saved again) of HDF5 files; `pmm3d.io.shards`
    says which. Its checkpoint.h5 shows each matrix whole to any HDF5 reader; the folder can be moved.

    It is written under another name, brought to the disk, and renamed once all ranks have written theirs: a crash at
    any moment leaves those before it, and the next save removes the rest. One job at a time saves into a folder.

    grid      the matrices may live on it or on other grids over the same processes, in any layout, in any library
    keep      at least 1

    Raises CheckpointError, the same on every rank.

        >>> import tempfile
        >>> from pmm3d import DistMatrix, Grid
        >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
        ...     checkpoints = Checkpoints(grid, grid.comm.bcast(folder))
        ...     weights = {"weight": DistMatrix.random(grid, (6, 4), seed=1)}
        ...     checkpoints.save(100, weights, {"epoch": 3}).name, checkpoints.load_latest(weights)[1]
        ('step-00000100', {'epoch': 3})
    """

    def __init__(self, grid: Grid, folder: str | os.PathLike[str], keep: int = 3):
        self.grid, self.folder, self.keep = grid, Path(folder), keep
        with grid.together("Checkpoints", str(folder), keep, always=True):
            if not isinstance(keep, int) or keep < 1:
                raise CheckpointError(f"keep is a number of checkpoints, at least 1; got {keep!r}")

    def save(self, step: int, matrices: Matrices, meta: Any = None) -> Path:
        """Write a checkpoint and return its folder, which is then on the disk; older ones beyond `keep` are removed.

        matrices   DistMatrix by name; a / in a name makes HDF5 groups. Each shard is written by one of its holders;
                   partial sums are summed first
        meta       what JSON can hold, numpy's numbers and arrays as lists; the same on all ranks

        Saving a step again replaces it, once the new one is complete. After an error the folder is as it was.
        """
        with self.grid.together("save", always=True):
            check_matrices(self.grid, matrices)
            on_disk.check_names(matrices.keys())
            text = _json_of(meta)
            described = [text, *((name, *matrices[name].signature[:4]) for name in sorted(matrices))]
            digest = hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
            if not isinstance(step, (int, np.integer)) or step < 0:
                raise CheckpointError(f"a step is a number of at least 0; got {step!r}")
        step, temporary = int(step), self.folder / f"writing-step-{step:08d}"
        try:
            with self.grid.together("save", str(self.folder), step, "meta and matrices", digest, always=True):
                if self.grid.rank == 0:
                    self._prepare(temporary)
            matrices = {name: summed(matrices[name]) for name in sorted(matrices)}
            path = self._write(temporary, step, matrices, text)
        except Exception:
            if self.grid.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self.grid.rank == 0:
            self._prune(step, path)
        return path

    def _prepare(self, temporary: Path) -> None:
        with file_errors(self.folder, "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(self.folder):
                if UNFINISHED.fullmatch(entry.name):
                    shutil.rmtree(entry.path)
            temporary.mkdir()

    def _write(self, temporary: Path, step: int, matrices: Matrices, meta: str) -> Path:
        path = None
        with self.grid.together("save: writing the shards", always=True):
            shards = on_disk.write_shards(temporary, self.grid.comm, matrices)
        with self.grid.together("save: reading the checksums", always=True), file_errors(temporary, "read"):
            mine = {shard.file for shard in shards if self.grid.rank == 0 or shard.file != on_disk.TOGETHER}
            files = {name: checksums(temporary / name) for name in mine}
        gathered = self.grid.comm.gather((shards, files))
        with self.grid.together("save: completing the checkpoint", always=True):
            if gathered is not None:
                shards = [shard for written, _ in gathered for shard in written]
                files = {name: known for _, hashed in gathered for name, known in hashed.items()}
                on_disk.write_master(temporary, on_disk.manifest_of(step, matrices, shards, files), meta)
                with file_errors(temporary, "completed"):
                    sync(temporary)
                    versions = [version for other, version, _ in self._listed() if other == step]
                    path = self.folder / (f"step-{step:08d}" + (f".{versions[0] + 1}" if versions else ""))
                    os.rename(temporary, path)
                    sync(self.folder)
        return self.grid.comm.bcast(path)

    def _prune(self, step: int, written: Path) -> None:
        """Remove what `written` replaces, and all but the newest; it itself stays, wherever it stands among them."""
        try:
            others = [(other, path) for other, _, path in self._listed() if path != written]
            kept = [path for other, path in others if other != step][: self.keep - 1]
            for _, path in others:
                if path not in kept:
                    shutil.rmtree(path.rename(path.with_name(f"removing-{path.name}")))
        except OSError as error:
            logger.warning(f"an old checkpoint could not be removed: {error}")

    def _listed(self) -> list[tuple[int, int, Path]]:
        """(step, version, folder) of the complete checkpoints, newest first; rank 0 alone looks."""
        if not self.folder.is_dir():
            return []
        listed = [(int(match[1]), int(match[2] or 0), self.folder / match[0])
                  for match in map(STEP.fullmatch, os.listdir(self.folder)) if match]
        return sorted((entry for entry in listed if (entry[2] / on_disk.MASTER).exists()), reverse=True)

    def candidates(self) -> list[Path]:
        """The complete checkpoints, newest step first; whether they are still undamaged shows when they are loaded."""
        with self.grid.together("candidates", str(self.folder), always=True), file_errors(self.folder, "listed"):
            paths = [path for _, _, path in self._listed()] if self.grid.rank == 0 else []
        return self.grid.comm.bcast(paths)

    def latest(self) -> Path | None:
        """The complete checkpoint of the newest step; None if there is none."""
        return next(iter(self.candidates()), None)

    def meta(self, path: str | os.PathLike[str]) -> Any:
        """What was saved with a checkpoint. JSON makes lists of tuples and strings of keys."""
        return self._read(Path(path))[1]

    def contents(self, path: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, int], str]]:
        """Name -> (shape, dtype) of the matrices of a checkpoint."""
        entries = self._read(Path(path))[0]["matrices"].items()
        return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in entries}

    def retire(self, step: int) -> list[Path]:
        """Set aside the checkpoints of later steps; where they are now."""
        with self.grid.together("retire", str(self.folder), step, always=True), file_errors(self.folder, "tidied"):
            later = [path for other, _, path in self._listed() if other > step] if self.grid.rank == 0 else []
            retired = [path.rename(path.with_name(f"retired-{path.name}")) for path in later]
        return self.grid.comm.bcast(retired)

    def load(self, path: str | os.PathLike[str], matrices: Matrices, *,
             check: Callable[[Any], object] | None = None) -> Any:
        """Fill the matrices, on this or any other number of ranks, grid and layout, from a checkpoint; its meta.

        All checksums are verified first, each byte being read by one rank; then each rank reads its own shards. If
        that fails, or the names, shapes or types are not those of the checkpoint, nothing was changed.
        """
        path = Path(path)
        manifest, meta = self._read(path)
        self._verify(path, manifest)
        if check is not None:
            check(meta)
        self._check_fit(path, manifest, matrices)
        self._fill(path, manifest, matrices)
        return meta

    def load_latest(self, matrices: Matrices, *,
                    check: Callable[[Any], object] | None = None) -> tuple[Path, Any] | None:
        """(folder, meta) of the newest checkpoint that is undamaged, which now fills the matrices; None if there are no
        checkpoints. Damaged ones are named in warnings, and, if none is left, in a CheckpointError."""
        failed = []
        for path in self.candidates():
            try:
                manifest, meta = self._read(path)
                self._verify(path, manifest)
            except CheckpointError as error:
                failed.append(str(error))
                if self.grid.rank == 0:
                    logger.warning(f"{path} is passed over: {error}")
                continue
            if check is not None:
                check(meta)
            self._check_fit(path, manifest, matrices)
            self._fill(path, manifest, matrices)
            return path, meta
        with self.grid.together("load_latest", always=True):
            if failed:
                raise CheckpointError(f"no checkpoint in {self.folder} can be read. " + names_in_words(failed))
        return None

    def _read(self, path: Path) -> tuple[on_disk.Manifest, Any]:
        """The manifest and the meta, read by rank 0."""
        with self.grid.together("load", str(path), always=True):
            texts = on_disk.read_master(path) if self.grid.rank == 0 else None
        manifest, meta = map(json.loads, self.grid.comm.bcast(texts))
        return manifest, meta

    def _check_fit(self, path: Path, manifest: on_disk.Manifest, matrices: Matrices) -> None:
        in_words = "{} x {} {}".format
        with self.grid.together("load", str(path), *sorted(map(str, matrices)), always=True):
            check_matrices(self.grid, matrices, filled=True)
            here = {name: in_words(*matrix.shape, matrix.dtype) for name, matrix in matrices.items()}
            there = {name: in_words(*entry["shape"], entry["dtype"]) for name, entry in manifest["matrices"].items()}
            if text := differences(here, there):
                raise CheckpointError(f"{path} is the checkpoint of another network. {text}")

    def _verify(self, path: Path, manifest: on_disk.Manifest) -> None:
        with self.grid.together("load: verifying", str(path), always=True):
            verify(path, manifest["files"], self.grid.rank, self.grid.size)

    def _fill(self, path: Path, manifest: on_disk.Manifest, matrices: Matrices) -> None:
        with self.grid.together("load: reading", str(path), always=True):
            on_disk.fill(path, manifest, matrices)


def _json_of(meta: Any) -> str:
    try:
        return json.dumps(meta, default=_plain)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta must be what JSON can hold: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not")
