"""Sources of samples: the base class, and an HDF5 file. Checks of data sets, detection of changes, fingerprints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from ..errors import DataError, check_regular, needs
from ..product.files import check_all_written

with needs("io", "data sets"):
    import h5py

UNSAMPLED_BYTES = 2**20
"""Bytes of a data set up to which its fingerprint contains all values. Larger ones: values of some rows."""
SPREAD_ROWS, SPREAD_BYTES = 64, 2**22
"""Limits for the fingerprint of a larger data set: rows, and bytes that are read, including the chunks of these
rows."""
Identity = tuple[int, int, int, int]
"""Device, inode, bytes and time of the last write (st_mtime_ns) of a file."""


class SampleSource:
    """Named data sets of samples, which must not change while they are in use. A data set is an `h5py.Dataset`, or has
    its name, shape, ndim, dtype, attrs, len, slices and read_direct.

    path      name for messages
    parts     the sources that a mixture contains; otherwise this one
    weights   weights of the parts of a mixture; otherwise None
    agreed    facts that must be equal on all ranks, besides the shapes of data sets
    """

    weights: tuple[float, ...] | None = None
    agreed = ""

    def __init__(self, path: str):
        self.path = path
        self._identities: dict[str, Identity] = {}

    @property
    def parts(self) -> list[SampleSource]:
        return [self]

    def dataset(self, name: str) -> Any:
        """Return a data set. Raises DataError unless it exists and contains rows of real numbers that were all
        written."""
        raise NotImplementedError

    def verify(self) -> None:
        """Read and check what takes too long for every rank. Raises DataError."""

    def close(self) -> None:
        """Close the files."""

    def _watch(self, path: str) -> None:
        """Detect changes of this file from now on. Raises OSError, or DataError for a file that is not regular."""
        check_regular(path)
        self._identities[path] = _identity(path)

    def both(self) -> AbstractContextManager[None]:
        """Context in which a thread reads the inputs and then the targets of the same rows."""
        return nullcontext()

    def check_unchanged(self) -> None:
        """Raise DataError if a file has changed since it was opened."""
        for path, identity in self._identities.items():
            try:
                changed = _identity(path) != identity
            except OSError as error:
                raise DataError(
                    f"lost {path} while reading: {error.strerror}. Check the file system, and resume "
                    "from the last checkpoint"
                ) from None
            if changed:
                raise DataError(
                    f"{path} has been replaced or has changed since it was opened, so that samples of two "
                    "files would be mixed: write new data to another file, and start again with that"
                )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """As a context, for reading. Raises DataError if the body fails, or if a file has changed since it was
        opened."""
        problem = None
        try:
            yield
        except Exception as error:
            problem = error
        self.check_unchanged()
        if isinstance(problem, DataError):
            raise problem
        if problem is not None:
            raise DataError(f"cannot read {self.path}: {problem}") from problem

    def fingerprint(self, *datasets: Any) -> str:
        """Return the digest of names, shapes, types, class names and values of all rows, or of evenly spaced rows."""
        digest = blake2b(digest_size=8)
        for dataset in datasets:
            classes = np.asarray(dataset.attrs.get("class_names", ())).tolist()
            facts = dataset.name, dataset.shape, dataset.dtype.name, classes
            digest.update(json.dumps(facts, default=str).encode())
            for rows in _sampled_rows(dataset):
                with self.unchanged():
                    values = dataset[rows]
                digest.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)
        return digest.hexdigest()


class SourceFile(SampleSource):
    """An HDF5 file, open for reading. HDF5 does not detect changes: it reads zeros if a file became shorter, and mixes
    old and new contents.

    This holds also for the other files of its data sets (links, external storage, virtual data sets).
    """

    def __init__(self, path: str):
        super().__init__(path)
        try:
            self._watch(path)
            self.h5 = h5py.File(path, "r", locking="best-effort")
        except OSError as error:
            no_hdf5 = "signature not found" in str(error)
            said = (
                "it is no HDF5 file; pmm3d convert makes one from CSV, Parquet or .npz" if no_hdf5 else error.strerror
            )
            raise DataError(f"cannot open {path}: {said or error}") from None

    def close(self) -> None:
        self.h5.close()

    def dataset(self, name: str) -> h5py.Dataset:
        dataset = self._opened(name) if isinstance(name, str) else None
        if not isinstance(dataset, h5py.Dataset):
            there: list[str] = []
            self.h5.visititems(lambda name, item: there.append(name) if isinstance(item, h5py.Dataset) else None)
            raise DataError(
                f"{self.path} has no data set {name!r}; it has {', '.join(map(repr, there))}. Name one: "
                "inputs= and targets= (data.inputs, data.targets; --inputs)"
            )
        if not dataset.shape:
            raise DataError(f"{self.path}: data set {name!r} has no dims; its first dim must be that of the samples")
        if 0 in dataset.shape:
            raise DataError(f"{self.path}: data set {name!r} is empty: its shape is {dataset.shape}")
        if dataset.dtype.kind not in "fiu":
            kind = "strings" if h5py.check_string_dtype(dataset.dtype) else dataset.dtype
            remedy = ": write it as uint8" * (kind == "bool")
            raise DataError(f"{self.path}: data set {name!r} holds {kind}; needed are real numbers{remedy}")
        return dataset

    def _opened(self, name: str) -> h5py.Dataset | None:
        """Return a data set, and watch its files from now on; None if there is none. Raises DataError for missing
        files."""
        try:
            dataset, link = self.h5.get(name), self.h5.get(name, getlink=True)
            if dataset is None and isinstance(link, h5py.ExternalLink):
                raise FileNotFoundError(f"it is {link.path} of {link.filename}, which cannot be opened")
            if isinstance(dataset, h5py.Dataset):
                for file in _files_of(dataset):
                    self._watch(file)
                if dataset.shape:
                    check_all_written(self.path, dataset)
            return dataset
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise DataError(f"{self.path}: cannot open data set {name!r}: {error}") from None


def _files_of(dataset: h5py.Dataset) -> Iterator[str]:
    """Yield the files that HDF5 reads for a data set: its own file, external storage, sources of a virtual data set.

    HDF5 searches for names in the working directory, and for sources of a virtual data set also in the file's folder.

    Raises FileNotFoundError for a missing file, and ValueError for a missing source, because HDF5 would read fill
    values. Raises DataError for a source with rows that were never written.
    """
    yield dataset.file.filename
    for name, _, _ in dataset.external or ():
        yield from _existing_paths(dataset, name)
    sources: dict[str, dict[str, None]] = {}
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if "%" not in source.file_name + source.dset_name:  # % in a series of unlimited length
            sources.setdefault(source.file_name, {})[source.dset_name] = None
    for name, datasets in sources.items():
        if name == ".":
            yield from _files_of_sources(dataset.file, datasets)
            continue
        first, *others = _existing_paths(dataset, name)
        yield from (first, *others)
        with h5py.File(first, "r", locking="best-effort") as file:
            yield from _files_of_sources(file, datasets)


def _files_of_sources(file: h5py.File, datasets: Iterable[str]) -> Iterator[str]:
    for name in datasets:
        if not isinstance(source := file.get(name), h5py.Dataset):
            raise ValueError(f"its data are in data set {name!r} of {file.filename}, which is not there")
        check_all_written(file.filename, source)
        yield from _files_of(source)


def _existing_paths(dataset: h5py.Dataset, name: str) -> list[str]:
    """Return the existing paths for a file name in a data set, in the search order of HDF5."""
    places = (os.path.join(os.path.dirname(dataset.file.filename), name), name)
    if not (there := list(filter(os.path.exists, dict.fromkeys(places)))):
        raise FileNotFoundError(f"its data are in {name}, which is not there")
    return there


def _identity(path: str) -> Identity:
    """Return the identity of a file, without st_ctime: a new hard link, new permissions, or a backup that restores the
    access time would stop a training. A write to the file sets st_mtime."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _sampled_rows(dataset: Any) -> Iterator[slice]:
    """Yield the rows whose values are in the fingerprint."""
    rows, size = dataset.shape[0], dataset.dtype.itemsize
    if prod(dataset.shape) * size <= UNSAMPLED_BYTES:
        yield slice(None)
        return
    chunk = getattr(dataset, "chunks", None) or (1, *dataset.shape[1:])
    read = chunk[0] * prod(-(-extent // part) * part for extent, part in zip(dataset.shape[1:], chunk[1:])) * size
    for at in np.linspace(0, rows - 1, min(rows, max(2, min(SPREAD_ROWS, SPREAD_BYTES // read))), dtype=np.int64):
        yield slice(int(at), int(at) + 1)
