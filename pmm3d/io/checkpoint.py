"""Checkpoints: matrices on disk, written by all ranks at once, loaded on any grid, never half there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np

from ..errors import CheckpointError
from . import shards as on_disk
from .files import agreed, check_matrices, check_writable, checksums, described, naming, share, some, sync, verify

STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
UNFINISHED = re.compile(r"(writing|removing)-step-\d{8,}(\.\d+)?")


class Checkpoints:
    """The checkpoints of one run in a folder, of which the newest `keep` are kept. All methods are collective.

    A checkpoint is a folder step-00000100 (step-00000100.1 where it was saved again) of HDF5 files; `pmm3d.io.shards`
    says which. Its checkpoint.h5 shows each matrix whole to any HDF5 reader; the folder can be moved.

    It is written under another name, brought to the disk, and renamed once all ranks have written theirs: a crash at
    any moment leaves the checkpoints before it, and what it left behind is removed at the next save. One job at a time
    may save into a folder.

    grid      the matrices may live on it or on other grids over the same processes, in any layout, in any library
    keep      at least 1

    Raises CheckpointError, the same on every rank.
    """

    def __init__(self, grid, folder, keep: int = 3):
        self.grid, self.folder, self.keep = grid, Path(folder), keep
        with agreed(grid, "Checkpoints", str(folder), keep):
            if not isinstance(keep, int) or keep < 1:
                raise CheckpointError(f"keep is a number of checkpoints, at least 1; got {keep!r}")

    def save(self, step: int, matrices, meta=None) -> Path:
        """Write a checkpoint and return its folder, which is then on the disk; older ones beyond `keep` are removed.

        matrices   DistMatrix by name; a / in a name makes HDF5 groups. Each block is written by one of its holders
        meta       what JSON can hold, numpy's numbers and arrays as lists; the same on all ranks

        Saving a step again replaces it, once the new one is complete. After an error the folder is as it was.
        """
        text, told = "", ()
        with agreed(self.grid, "save"):
            check_matrices(self.grid, matrices)
            on_disk.check_names(matrices)
            text = _json_of(meta)
            told = _digest(text), _digest(*((name, *matrices[name].signature()[:4]) for name in sorted(matrices)))
            if not isinstance(step, (int, np.integer)) or step < 0:
                raise CheckpointError(f"a step is a number of at least 0; got {step!r}")
        temporary = self.folder / f"writing-step-{step:08d}"
        try:
            with agreed(self.grid, "save", str(self.folder), int(step), "meta and matrices", told):
                if self.grid.rank == 0:
                    self._prepare(temporary)
            path = self._write(temporary, int(step), matrices, text)
        except Exception:
            if self.grid.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self.grid.rank == 0:
            self._prune(path)
        return path

    def _prepare(self, temporary: Path) -> None:
        with naming(self.folder, "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(self.folder):
                if UNFINISHED.fullmatch(entry.name):
                    shutil.rmtree(entry.path)
            temporary.mkdir()

    def _write(self, temporary: Path, step: int, matrices, meta: str) -> Path:
        shards, files, path = [], {}, None
        with agreed(self.grid, "save: writing the blocks"):
            if h5py.get_config().mpi:
                shards = on_disk.write_together(temporary, self.grid.comm, matrices)
            else:
                shards = on_disk.write_shards(temporary, self.grid.rank, matrices)
        with agreed(self.grid, "save: reading the checksums"), naming(temporary, "read"):
            mine = {shard.file for shard in shards if self.grid.rank == 0 or shard.file != on_disk.TOGETHER}
            files = {name: checksums(temporary / name) for name in mine}
        gathered = self.grid.comm.gather((shards, files))
        with agreed(self.grid, "save: completing the checkpoint"):
            if self.grid.rank == 0:
                shards = [shard for told, _ in gathered for shard in told]
                files = {name: told for _, more in gathered for name, told in more.items()}
                on_disk.write_master(temporary, on_disk.manifest_of(step, matrices, shards, files), meta)
                path = self._put_in_place(temporary, step)
        return self.grid.comm.bcast(path)

    def _put_in_place(self, temporary: Path, step: int) -> Path:
        with naming(temporary, "completed"):
            sync(temporary)
            versions = [version for other, version, _ in self._listed() if other == step]
            path = self.folder / (f"step-{step:08d}" + (f".{versions[0] + 1}" if versions else ""))
            os.rename(temporary, path)
            sync(self.folder)
            return path

    def _prune(self, written: Path) -> None:
        """Remove what `written` replaces, and all but the newest; it itself stays, wherever it stands among them."""
        step = int(STEP.fullmatch(written.name)[1])
        try:
            others = [(other, path) for other, _, path in self._listed() if path != written]
            replaced = [path for other, path in others if other == step]
            older = [path for other, path in others if other != step][self.keep - 1 :]
            for path in replaced + older:
                removing = path.with_name(f"removing-{path.name}")
                os.rename(path, removing)
                shutil.rmtree(removing)
        except OSError as error:
            _warn(f"an old checkpoint could not be removed: {error}")

    def _listed(self) -> list[tuple[int, int, Path]]:
        """(step, version, folder) of the complete checkpoints, newest first; rank 0 alone looks."""
        if not self.folder.is_dir():
            return []
        matches = [(STEP.fullmatch(name), name) for name in os.listdir(self.folder)]
        found = [(int(match[1]), int(match[2] or 0), self.folder / name) for match, name in matches if match]
        return sorted((entry for entry in found if (entry[2] / on_disk.MASTER).exists()), reverse=True)

    def candidates(self) -> list[Path]:
        """The complete checkpoints, newest step first; whether they are still undamaged shows when they are loaded."""
        found = None
        with agreed(self.grid, "candidates", str(self.folder)):
            if self.grid.rank == 0:
                with naming(self.folder, "listed"):
                    found = [path for _, _, path in self._listed()]
        return self.grid.comm.bcast(found)

    def latest(self) -> Path | None:
        """The complete checkpoint of the newest step; None if there is none."""
        return next(iter(self.candidates()), None)

    def meta(self, path):
        """What was saved with a checkpoint. JSON makes lists of tuples and strings of keys."""
        return json.loads(self._read(Path(path))[1])

    def contents(self, path) -> dict[str, tuple[tuple[int, int], str]]:
        """Name -> (shape, dtype) of the matrices of a checkpoint."""
        manifest, _ = self._read(Path(path))
        return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in manifest["matrices"].items()}

    def load(self, path, matrices):
        """Fill the matrices, on this or any other number of ranks, grid and layout, from a checkpoint; its meta.

        All checksums are verified first, each byte being read by one rank; then each rank reads its own blocks. If
        that fails, or the names, shapes or types are not those of the checkpoint, nothing was changed.
        """
        path = Path(path)
        manifest, meta = self._read(path)
        self._check_fit(path, manifest, matrices)
        self._verify(path, manifest)
        return self._fill(path, manifest, meta, matrices)

    def load_latest(self, matrices):
        """(folder, meta) of the newest checkpoint that is undamaged, which now fills the matrices; None if there are no
        checkpoints. Those that are damaged are named on stderr, and, if none is left, in a CheckpointError."""
        failed = []
        for path in self.candidates():
            try:
                manifest, meta = self._read(path)
                self._verify(path, manifest)
            except CheckpointError as error:
                failed.append(str(error))
                if self.grid.rank == 0:
                    _warn(f"{path} is passed over: {error}")
                continue
            self._check_fit(path, manifest, matrices)
            return path, self._fill(path, manifest, meta, matrices)
        with agreed(self.grid, "load_latest"):
            if failed:
                raise CheckpointError(f"no checkpoint in {self.folder} can be read. " + some(failed))
        return None

    def _read(self, path: Path) -> tuple[dict, str]:
        """The manifest and the text of the meta, read by rank 0."""
        texts = None
        with agreed(self.grid, "load", str(path)):
            if self.grid.rank == 0:
                texts = on_disk.read_master(path)
        manifest, meta = self.grid.comm.bcast(texts)
        return json.loads(manifest), meta

    def _check_fit(self, path: Path, manifest: dict, matrices) -> None:
        with agreed(self.grid, "load", str(path), *sorted(map(str, matrices))):
            check_matrices(self.grid, matrices)
            check_writable(matrices)
            _check_same_network(path, manifest["matrices"], matrices)

    def _verify(self, path: Path, manifest: dict) -> None:
        with agreed(self.grid, "load: verifying", str(path)):
            verify(path, share(on_disk.chunks_of(manifest["files"]), self.grid.rank, self.grid.size))

    def _fill(self, path: Path, manifest: dict, meta: str, matrices):
        with agreed(self.grid, "load: reading", str(path)):
            on_disk.fill(path, on_disk.shards_of(manifest), matrices)
        return json.loads(meta)


def _check_same_network(path: Path, entries: dict, matrices) -> None:
    there = {name: "{} x {} {}".format(*entry["shape"], entry["dtype"]) for name, entry in entries.items()}
    here = {name: described(matrix) for name, matrix in matrices.items()}
    lists = {
        "It lacks": sorted(map(repr, here.keys() - there.keys())),
        "It also has": sorted(map(repr, there.keys() - here.keys())),
        "It differs in": [f"{name!r} ({there[name]} there, {here[name]} here)"
                          for name in sorted(here.keys() & there.keys()) if here[name] != there[name]],
    }
    if any(lists.values()):
        told = ". ".join(f"{what} {some(names)}" for what, names in lists.items() if names)
        raise CheckpointError(f"{path} is the checkpoint of another network. {told}")


def _json_of(meta) -> str:
    try:
        return json.dumps(meta, default=_plain)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta must be what JSON can hold: {error}") from error


def _plain(value):
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not")


def _digest(*values) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def _warn(text: str) -> None:
    print(f"pmm3d: warning: {text}", file=sys.stderr, flush=True)
