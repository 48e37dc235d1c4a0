"""Read and write a matrix: .npy files and data sets of HDF5 files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, DTypeError, Pmm3dError, check_dataset_name, check_regular, needs
from .new_hdf5 import new_hdf5
from .relayout import ascending

WRITTEN_BYTES = 2**26
"""Bytes that rank 0 gathers and writes at a time."""


@contextmanager
def opened(path: str | os.PathLike[str], dataset: str | None) -> Iterator[Any]:
    """Context that opens a .npy file or a data set of an HDF5 file: an object with .shape that can be sliced."""
    _check_path("DistMatrix.from_file", path)
    check_regular(path)
    if str(path).endswith(".npy"):
        try:
            source = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise DataError(f"{path} is no .npy file of numbers: {error}") from None
        yield source
        return
    if str(path).endswith(".npz"):
        raise DataError(
            f"{path}: an array of an .npz file cannot be read in parts. Save it as a .npy file: "
            f"numpy.save('a.npy', numpy.load({str(path)!r})['a'])"
        )
    with needs("io", "HDF5 files"):
        import h5py
    try:
        file = h5py.File(path, "r")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(
            f"{path} cannot be read as an HDF5 file: {error}. A matrix is read from a .npy file, or from "
            "a data set of an HDF5 file"
        ) from None
    with file:
        if not isinstance(dataset, str) or not isinstance(file.get(dataset), h5py.Dataset):
            raise Pmm3dError(f"{path}: name one of its data sets: {', '.join(map(repr, file))}; got {dataset!r}")
        stored = file[dataset]
        if stored.shape and stored.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
            check_all_written(path, stored)
        yield stored


def check_all_written(path: str | os.PathLike[str], dataset: Any) -> None:
    """Raise DataError if chunks or sources of a data set are missing, because HDF5 would return its fill value.

    HDF5 does not record which elements of a contiguous data set were written. For these, only the storage is checked.
    """
    declared = prod(dataset.shape) * dataset.dtype.itemsize
    unit, there = "bytes", dataset.id.get_storage_size()
    if dataset.is_virtual:
        declared = prod(dataset.shape)
        unit, there = "elements", sum(source.vspace.get_select_npoints() for source in dataset.virtual_sources())
    elif dataset.external:
        there = sum(min(size, max(0, os.path.getsize(file) - offset)) for file, offset, size in dataset.external)
    elif dataset.chunks:
        declared = prod(-(-extent // chunk) for extent, chunk in zip(dataset.shape, dataset.chunks))
        unit, there = "chunks", dataset.id.get_num_chunks()
    if there < declared:
        raise DataError(
            f"{path}: data set {dataset.name[1:]!r} declares the shape {dataset.shape}, which "
            f"takes {declared:,} {unit}, and {there:,} of them were written: write all rows, or declare "
            "only the written rows"
        )


def write_matrix(matrix: Any, path: str | os.PathLike[str], dataset: str | None, overwrite: bool) -> None:
    """Implementation of `DistMatrix.to_file`. Collective."""
    grid, write = matrix.grid, None
    with ExitStack() as new_file:
        with grid.collective_call("to_file", matrix._signature, path, dataset, overwrite, always=True):
            _check_path("to_file", path)
            target = Path(path)
            if (target.suffix == ".npy") == (dataset is not None):
                raise DataError(
                    f"to_file: {path} is a .npy file, which has no data sets, or an HDF5 file, of which "
                    f"dataset= names one; got dataset={dataset!r}"
                )
            if dataset is not None:
                check_dataset_name(dataset)
            if not matrix.library.has_data:
                raise DataError(
                    "to_file: a matrix of a dry run has no elements to write. Write it on a grid of processes"
                )
            if matrix.dtype == "bfloat16":
                raise DTypeError(
                    'to_file: numpy and HDF5 have no bfloat16. Write a.astype("float32"), which has the same elements'
                )
            if grid.rank == 0:
                with _write_errors(target):
                    if os.path.lexists(target) and not overwrite:
                        raise DataError(f"{path} exists. to_file(path, overwrite=True) replaces it")
                    check_regular(target)
                    write = new_file.enter_context(_new_file(target, dataset, matrix.shape, matrix.dtype))
        rows, cols = matrix.shape
        matrix = ascending(matrix)
        step = max(1, WRITTEN_BYTES // max(1, cols * np.dtype(matrix.dtype).itemsize))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            gathered = matrix.submatrix(part, slice(None)).gather(root=0)
            with grid.collective_call("to_file: writing", always=True), _write_errors(target):
                if write is not None:
                    write(part, matrix.library.to_numpy(gathered))
        with grid.collective_call("to_file: completing", always=True), _write_errors(target):
            new_file.close()


@contextmanager
def _new_file(
    target: Path, dataset: str | None, shape: tuple[int, int], dtype: str
) -> Iterator[Callable[[slice, np.ndarray], object]]:
    """Context that returns write(rows, values), which appends consecutive rows to a new file.

    The file has a temporary name until the end of the context. It is removed after an error.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        if dataset is None:
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:
                write_npy_header(file, shape, dtype)
                yield lambda rows, values: file.write(np.ascontiguousarray(values).data)
                file.flush()
                os.fsync(file.fileno())
        else:
            with new_hdf5(temporary) as new:
                made = new.file.create_dataset(dataset, shape, dtype)

                def write(rows: slice, values: np.ndarray) -> None:
                    made[rows] = values
                    new.check()

                yield write
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_npy_header(file: Any, shape: tuple[int, int], dtype: str) -> None:
    """Write the header of a .npy file of a matrix that is stored by rows."""
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)


def _check_path(what: str, path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise DataError(f"{what}: the path is a str or a Path; got {path!r}")


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
