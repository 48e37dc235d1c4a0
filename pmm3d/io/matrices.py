"""Matrices in files: their elements, in slices of rows, and their descriptions, which are compared with a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..comm import Grid, digest
from ..errors import CheckpointError
from ..layout import FIRST, without_order
from ..product import DistMatrix
from ..product.relayout import ascending
from ..text import names_in_words

SLICE = 2**23
"""Bytes that are copied and written at a time. A device copies them at full speed, and a shard is much larger."""

Matrices = Mapping[str, DistMatrix]


def stored_dtype(dtype: str) -> np.dtype:
    """Return the type in a file: the type of the matrix, or uint16 for the bits of bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def to_stored(library: NumpyLibrary, array: Array) -> np.ndarray:
    """Return a numpy array in the stored type: a view of host memory, or a copy of device memory."""
    if library.dtype(array) == "bfloat16":
        return array.detach().cpu().view(library.xp.int16).numpy().view(np.uint16)
    return library.to_numpy(array)


def from_stored(library: NumpyLibrary, host: np.ndarray, dtype: str) -> Array:
    """Return an array of the library from a numpy array in the stored type; the inverse of `to_stored`."""
    if dtype == "bfloat16":
        return library.xp.from_numpy(host.view(np.int16)).view(library.xp.bfloat16)
    return library.from_numpy(host, dtype)


def row_slices(shape: tuple[int, int], itemsize: int) -> list[tuple[int, int]]:
    """Return (start, stop) of slices of consecutive rows. A slice has about SLICE bytes, and at least one row."""
    rows, cols = shape
    step = max(1, SLICE // max(1, cols * itemsize))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def stored_rows(matrix: DistMatrix) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row within the shard, C-contiguous rows in the stored type) of each slice."""
    for start, stop in row_slices(matrix.box.shape, stored_dtype(matrix.dtype).itemsize):
        yield start, np.ascontiguousarray(to_stored(matrix.library, matrix._part((slice(start, stop), slice(None)))))


class Described(NamedTuple):
    """Description of a matrix, the same on all ranks.

    shape, dtype   those of the matrix, or of its tensor in a file
    vector         whether the matrix is one row for all rows of a batch, such as a bias
    owner          first rank of the matrix's grid or stage. For a shared weight: the lowest of these ranks
    shared         whether several stages have the matrix
    """

    shape: tuple[int, ...]
    dtype: str
    vector: bool
    owner: int
    shared: bool = False

    @classmethod
    def of(cls, matrix: DistMatrix) -> Described:
        vector = matrix.shape[0] == 1 and not matrix.layout.rows
        return cls(matrix.shape, matrix.dtype, vector, owner(matrix))


def owner(matrix: DistMatrix) -> int:
    """Return the first rank of the matrix's grid or stage, as a rank of the whole grid."""
    return matrix.grid.everyone.ranks[0]


def described_by_all(
    grid: Grid, what: str, matrices: Matrices, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Described]:
    """Return name -> description of the matrices of all ranks, in sorted order. Collective.

    matrices   the matrices of this rank, after `check_matrices`. All ranks pass the same matrices on the whole grid,
               and all ranks of a stage pass the same matrices on the stage. A name in several stages is a shared weight
    shapes     name -> shape in the file. None: the shapes of the matrices

    Raises, on every rank, DisagreementError if ranks of a grid pass different matrices, and CheckpointError if matrices
    with one name differ in shape or type.
    """
    described = {name: Described.of(matrix) for name, matrix in matrices.items()}
    if shapes is not None:
        described = {name: one._replace(shape=shapes[name]) for name, one in described.items()}
    with ExitStack() as agreements:
        for members in (grid, grid.stage) if grid._has_stages else (grid,):
            here = {name: matrix for name, matrix in sorted(matrices.items()) if matrix.grid.same_processes(members)}
            details = digest(repr([(*matrix._signature[:4], described[name]) for name, matrix in here.items()]))
            agreements.enter_context(members.collective_call(what, *here, details, always=True))
    if grid._has_stages:
        own, described = described, {}
        passed = grid.comm.allgather({name: one for name, one in own.items() if matrices[name].grid.rank == 0})
        with grid.collective_call(what, always=True):
            for name, one in chain.from_iterable(each.items() for each in passed):
                first = described.get(name)
                if first is not None and first[:2] != one[:2]:
                    forms = [form_in_words(*each[:2]) for each in (first, one)]
                    raise CheckpointError(
                        f"{what}: {name!r} is {forms[0]} in one stage and {forms[1]} in another. A "
                        "name in two stages is that of a weight that they share: rename one"
                    )
                described[name] = one if first is None else first._replace(shared=True)
    return dict(sorted(described.items()))


def to_write(grid: Grid, what: str, matrices: Matrices, described: Mapping[str, Described]) -> dict[str, DistMatrix]:
    """Return the matrices whose shards this rank writes, with partial sums added up. Collective. The first stage writes
    a weight that stages share.

    described   `described_by_all` of the matrices of this rank

    Raises CheckpointError, on every rank, if the bits of a shared weight differ between stages.
    """
    matrices = {name: ascending(matrices[name]) for name in described if name in matrices}
    if any(one.shared for one in described.values()):
        own = [name for name in matrices if described[name].shared]
        with grid.collective_call(what, always=True):
            sums = np.array([_sum_of_bits(matrices[name]) for name in own], np.int64)
        sums = grid.stage.everyone.all_reduce(sums, agreed=True).wait()
        passed = grid.comm.allgather([*zip(own, sums.tolist())] if grid.stage.rank == 0 else [])
        with grid.collective_call(what, always=True):
            bits_of = dict[str, int]()
            if other := {name for name, bits in chain(*passed) if bits_of.setdefault(name, bits) != bits}:
                raise CheckpointError(
                    f"{what}: two stages have other values under one name: "
                    f"{names_in_words(map(repr, sorted(other)))}. If that is one weight, add the "
                    "gradients of its copies before each step; if not, rename one"
                )
    return {name: matrix for name, matrix in matrices.items() if described[name].owner == owner(matrix)}


def _sum_of_bits(matrix: DistMatrix) -> int:
    """Return a checksum of this rank's elements; 0 for a replica. Each 16-bit word is multiplied by an odd number that
    depends on its place in the matrix, and summed modulo 2^64. The sum over the ranks is the same in all layouts."""
    total, (r0, _, c0, _) = 0, matrix.box
    for start, rows in stored_rows(matrix) if matrix.layout.is_first(matrix.grid.coords or FIRST) else ():
        words = rows.view("uint16")
        across = words.shape[1] // max(1, rows.shape[1])
        places = np.arange(words.shape[1], dtype=np.uint64) * 2 + (2 * c0 * across + 1)
        above = (np.arange(len(rows), dtype=np.uint64) + (r0 + start)) * (2 * matrix.shape[1] * across)
        sums = np.einsum("ij,j->i", words, places, dtype=np.uint64, casting="unsafe")
        total += int((sums + above * words.sum(axis=1, dtype=np.uint64)).sum(dtype=np.uint64))
    return int(np.array(total % 2**64, np.uint64).astype(np.int64))


def check_matrices(grid: Grid, matrices: Matrices, filled: bool = False) -> None:
    """Raise CheckpointError unless these are named DistMatrix over the processes of the grid or of its stage. Matrices
    that are filled must also be writable."""
    for name, matrix in matrices.items():
        if not isinstance(name, str) or not isinstance(matrix, DistMatrix):
            raise CheckpointError(f"{name!r}: matrices are DistMatrix by name; got a {type(matrix).__name__}")
        if not (matrix.grid.same_processes(grid) or (grid._has_stages and matrix.grid.same_processes(grid.stage))):
            raise CheckpointError(f"{name!r} lives on a grid over other processes, or in another order")
        if filled and not matrix.writable:
            raise CheckpointError(
                f"{name!r} cannot be filled: its shard is read-only, a conjugated view, or a tensor with a gradient"
            )
        if filled and (layout := without_order(matrix.layout)) != matrix.layout:
            raise CheckpointError(
                f"{name!r} cannot be filled: its layout has an order of rows. Fill a matrix in "
                f"{layout}, and redistribute it"
            )


def form_in_words(shape: tuple[int, ...], dtype: str) -> str:
    """Return shape and type in words: "7 x 11 float64"."""
    return f"{' x '.join(map(str, shape))} {dtype}"


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> str:
    """Return the differences between matrices (`here`) and a file (`there`) in words; "" if there are none."""
    lists = {
        "It lacks": sorted(map(repr, here.keys() - there.keys())),
        "It also has": sorted(map(repr, there.keys() - here.keys())),
        "It differs in": [
            f"{name!r} ({there[name]} there, {here[name]} here)"
            for name in sorted(here.keys() & there.keys())
            if here[name] != there[name]
        ],
    }
    return ". ".join(f"{what} {names_in_words(names)}" for what, names in lists.items() if names)
