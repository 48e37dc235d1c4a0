"""DistMatrix on every grid: construction, redistribution, conversion."""

from itertools import product
from weakref import WeakKeyDictionary

import h5py
import numpy as np
import pytest
from each_grid import each_grid
from loops import given as named
from loops import looped
from samples import HOST_DTYPES, RANKS, TESTED, UP_TO_4, integers, to_library, to_numpy

from pmm3d import DataError, DisagreementError, DistMatrix, DTypeError, Grid, Layout, LayoutError, Pmm3dError, matmul
from pmm3d.layout import EMPTY, MATRIX_DTYPES
from pmm3d.nn import Tensor
from pmm3d.product import files

pytestmark = pytest.mark.parallel([4], thorough=RANKS)
on_some_grid = pytest.mark.parallel([2], thorough=RANKS)

HERE = (TESTED, "standin")
"""Libraries that are cheap to import. torch has separate tests, on fewer ranks."""

SHAPES = [(7, 11), (1, 1), (2, 13), (0, 4), (5, 0)]
LAYOUTS = [
    Layout.A,
    Layout.B,
    Layout.C,
    Layout.A.T,
    Layout(),
    Layout(rows="x"),
    Layout(cols=("z", "y")),
    Layout(rows="z", cols="y"),
    Layout(rows=("data", "x", "y", "z")),
]


def assert_holds(matrix, whole):
    """Assert that each rank has its shard, and that all shards are the whole matrix."""
    assert matrix.shape == whole.shape
    local = to_numpy(matrix.local, matrix.library)
    assert np.array_equal(local, whole[matrix.box.within(EMPTY)])
    assert np.array_equal(to_numpy(matrix.gather(), matrix.library), whole)


def distributed(grid, shape, layout=Layout.A, dtype="float64", library=TESTED, seed=0):
    whole = integers(shape, dtype, seed) + (2**40 if dtype == "int64" else 0)  # float32 has no such numbers
    return DistMatrix.from_global(grid, to_library(whole, library, dtype), layout=layout), whole


def made_by_all(grid, shape, layout, library, order):
    """(constructor, matrix, the whole of it) for each constructor from values in memory."""
    whole, root, how = integers(shape), grid.size - 1, {"layout": layout, "order": order}
    given = to_library(whole, library)
    everywhere = DistMatrix.from_global(grid, given, **how)
    yield "from_global", everywhere, whole
    for root in {0, grid.size - 1}:
        at_root = given if grid.rank == root else None
        yield f"from_global, root={root}", DistMatrix.from_global(grid, at_root, root=root, **how), whole
    function = DistMatrix.from_function(grid, shape, lambda i, j: 10 * i - j, library=library, **how)
    yield "from_function", function, np.fromfunction(lambda i, j: 10 * i - j, shape)
    box = layout.box(shape, grid.shape, grid.coords)
    part = whole[box.within(EMPTY)]
    mine = to_library(part, library) if order == "C" else to_library(part.T, library).T
    matrix = DistMatrix.from_local(grid, mine, shape, **how)
    assert matrix.library.share_memory(matrix.local, mine) or not box.size
    yield "from_local", matrix, whole
    empty = DistMatrix.empty(grid, shape, library=library, **how)
    empty.local[...] = everywhere.local
    yield "empty", empty, whole


@each_grid
def test_constructors(grid):
    for number, (shape, layout) in enumerate(product(SHAPES, LAYOUTS)):
        library, order = HERE[number % 2], "CFF"[number % 3]
        for maker, matrix, whole in made_by_all(grid, shape, layout, library, order):
            with named(maker=maker, shape=shape, layout=layout, library=library, order=order):
                assert (matrix.order, matrix.layout, matrix.dtype) == (order, layout, "float64")
                stored = matrix.local if order == "C" else matrix.local.T
                assert matrix.library.is_contiguous(stored) and tuple(matrix.local.shape) == matrix.box.shape
                assert_holds(matrix, whole)


@pytest.mark.parallel([2], thorough=UP_TO_4)
@looped("library, dtype", [*product(HERE, (*HOST_DTYPES, "int64")), *product(["torch"], (*MATRIX_DTYPES, "int64"))])
def test_every_type_comes_back(some_grid, library, dtype):
    matrix, whole = distributed(some_grid, (7, 5), Layout.B, dtype, library)
    given = to_library(whole, library, dtype) if some_grid.rank == 0 else None
    assert matrix.dtype == dtype and type(matrix.local) is type(to_library(whole, library))
    assert_holds(matrix, whole)
    assert_holds(matrix.T, whole.T)
    assert_holds(matrix.H, whole.conj().T)
    assert_holds(matrix.redistribute(Layout.C), whole)
    assert_holds(DistMatrix.from_global(some_grid, given, root=0), whole)
    at_root = matrix.gather(some_grid.size - 1)
    assert some_grid.rank != some_grid.size - 1 or np.array_equal(to_numpy(at_root, library), whole)


@pytest.mark.parallel([2], thorough=UP_TO_4)
def test_names_of_types(some_grid):
    import torch

    for dtype in ("complex64", np.complex64, np.dtype("complex64"), torch.complex64):
        assert DistMatrix.empty(some_grid, (3, 3), dtype=dtype).dtype == "complex64"
    assert DistMatrix.random(some_grid, (3, 3), dtype=torch.bfloat16, library="torch").dtype == "bfloat16"


@each_grid
def test_from_files_each_rank_reads_its_part(grid, shared_path):
    wholes = {dtype: integers((7, 9), dtype) for dtype in ("float32", "complex128", "float16")}
    singles = wholes["float32"]
    others = {"fortran": np.asfortranarray(singles), "swapped": singles.astype(">f4"), "empty": np.empty((0, 3))}
    if grid.rank == 0:
        with h5py.File(shared_path / "some.h5", "w") as file:
            for name, whole in (wholes | others).items():
                np.save(shared_path / f"{name}.npy", whole)
                file[f"group/{name}"] = whole
    grid.comm.barrier()
    for (name, whole), layout, order in product((wholes | others).items(), (Layout.A, Layout(cols="x")), "CF"):
        with named(name=name, layout=layout, order=order):
            for path, dataset in (
                (shared_path / f"{name}.npy", ()),
                (str(shared_path / "some.h5"), (f"group/{name}",)),
            ):
                found = DistMatrix.from_file(grid, path, *dataset, layout=layout, order=order)
                assert found.dtype == whole.dtype.name and found.order == order
                assert_holds(found, whole)
    assert_holds(DistMatrix.from_file(grid, shared_path / "swapped.npy", library="standin"), singles)


@each_grid
def test_random_matrices_are_the_same_on_every_grid(comm, grid):
    with Grid(comm.Split(comm.rank), (1, 1, 1)) as alone:
        for distribution, dtype in product(("uniform", "normal", "integers"), ("float64", "complex64", "float16")):
            with named(distribution=distribution, dtype=dtype):
                options = dict(seed=5, dtype=dtype, distribution=distribution)
                whole = DistMatrix.random(alone, (31, 17), **options).gather()
                for layout, order in ((Layout.A, "C"), (Layout.B, "F"), (Layout(), "C")):
                    assert_holds(DistMatrix.random(grid, (31, 17), layout=layout, order=order, **options), whole)


@on_some_grid
def test_random_matrices_have_their_distribution(some_grid):
    drawn = lambda **options: to_numpy(DistMatrix.random(some_grid, (400, 250), **options).gather())
    whole = {name: drawn(distribution=name) for name in ("uniform", "normal", "integers")}
    assert np.all(np.abs(whole["uniform"]) < 1) and abs(whole["uniform"].var() - 1 / 3) < 0.01
    assert abs(whole["normal"].mean()) < 0.02 and abs(whole["normal"].var() - 1) < 0.02
    assert set(np.unique(whole["integers"])) == set(range(-4, 5))
    assert not np.any(drawn(seed=1) == whole["uniform"])
    both = drawn(dtype="complex128")
    assert abs(np.corrcoef(both.real.ravel(), both.imag.ravel())[0, 1]) < 0.02


@on_some_grid
@looped("library", HERE)
def test_transposes_are_views(some_grid, all_fail, library):
    matrix, whole = distributed(some_grid, (5, 8), dtype="complex64", library=library)
    turned = matrix.H
    assert turned.conjugated and turned.layout == matrix.T.layout == matrix.layout.T and not turned.T.H.conjugated
    for view in (turned, matrix.T):
        assert view.shape == (8, 5) and (matrix.library.share_memory(view.memory, matrix.memory) or not matrix.box.size)
    for view, values in (
        (matrix.T, whole.T),
        (turned, whole.conj().T),
        (turned.H, whole),
        (turned.T, whole.conj()),
        (matrix.T.H, whole.conj()),
        (turned.T.H, whole.T),
    ):
        assert_holds(view, values)
        moved = view.redistribute(Layout.B)
        assert not moved.conjugated
        assert_holds(moved, values)
        with Grid(some_grid.comm, (1, 1, some_grid.size), device_transport="direct") as there:
            assert_holds(view.redistribute(Layout.C, there), values)
        parts = view.redistribute(Layout(sums=("x", "y", "z")))
        assert_holds(parts.H.redistribute(Layout.A), values.conj().T)
    matrix.memory[...] = 1j
    assert_holds(turned, np.full((8, 5), -1j, "complex64"))
    square = DistMatrix.empty(some_grid, (5, 5), dtype="complex64", library=library)
    all_fail(
        (LayoutError, "conjugated view .* is not written to", lambda: setattr(turned, "local", turned.memory)),
        (LayoutError, "out is a conjugated view", lambda: matrix.T.redistribute(turned.layout, out=turned)),
        (LayoutError, "out is a conjugated view", lambda: matmul(matrix, matrix.T, out=square.H)),
    )
    assert not turned.writable


@pytest.mark.parallel([2])
def test_a_view_that_is_conjugated_on_one_rank_alone_is_refused(some_grid, fails):
    matrix, _ = distributed(some_grid, (4, 4), dtype="complex64")
    view = matrix.H if some_grid.rank else matrix.T
    fails(DisagreementError, "matmul: the ranks passed different arguments", lambda: view @ matrix)


@each_grid
def test_only_what_a_rank_lacks_is_received(grid):
    matrix, _ = distributed(grid, (8, 12), Layout())
    grid.ledger.reset()
    for layout in LAYOUTS:
        matrix.redistribute(layout)
    moved = grid.ledger.total(phase="redistribute")
    assert moved.calls == moved.sent == moved.received == 0
    matrix, whole = distributed(grid, (8, 12))
    grid.ledger.reset()
    matrix.gather()[...] = 99  # a copy
    assert grid.ledger.total(phase="gather").received == whole.nbytes - matrix.local.nbytes
    grid.ledger.reset()
    assert (matrix.gather(0) is None) == (grid.rank != 0)
    assert grid.ledger.total(phase="gather").sent == (matrix.local.nbytes if grid.rank else 0)
    assert_holds(matrix, whole)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "float16", "int64"])
def test_to_files_and_back(comm, shared_path, dtype, monkeypatch):
    """In slices of two rows; also views and partial sums."""
    monkeypatch.setattr(files, "WRITTEN_BYTES", 2 * 9 * np.dtype(dtype).itemsize)
    whole = integers((7, 9), dtype)
    with Grid(comm, (2, 1, 1)) as grid:
        for layout in (Layout.A, Layout(cols="x"), Layout(sums="x")):
            with named(layout=layout):
                a = DistMatrix.from_global(grid, to_library(whole), layout=layout)
                grid.ledger.reset()
                a.to_file(shared_path / "a.npy", overwrite=True)
                assert grid.ledger.total(axis="x").received <= whole.nbytes  # summed once, not for each slice
                a.H.to_file(str(shared_path / "a.h5"), "group/a", overwrite=True)
                assert_holds(DistMatrix.from_file(grid, shared_path / "a.npy"), whole)
                assert_holds(DistMatrix.from_file(grid, shared_path / "a.h5", "/group/a"), whole.conj().T)
                written = np.load(shared_path / "a.npy")
                assert np.array_equal(written, whole) and written.dtype == whole.dtype
        DistMatrix.from_global(grid, to_library(whole[:0])).to_file(shared_path / "empty.npy")
        assert np.load(shared_path / "empty.npy").shape == (0, 9)


@pytest.mark.parallel([2])
def test_files_that_cannot_be_written(comm, shared_path, monkeypatch, fails, all_fail):
    """A file is replaced only on request, as a whole."""
    with Grid(comm, (2, 1, 1)) as grid:
        a = DistMatrix.zeros(grid, (7, 9))
        a.to_file(shared_path / "a.npy")
        to_file = lambda name, *dataset: lambda: a.to_file(shared_path / name, *dataset)
        all_fail(
            (DataError, "a.npy exists. .*overwrite=True", to_file("a.npy")),
            (DataError, "none/a.npy cannot be written: No such file", to_file("none/a.npy")),
            (DataError, "which has no data sets", to_file("b.npy", "name")),
            (DataError, "got dataset=None", to_file("b.h5")),
            *((DataError, f"{name!r} cannot name a data set", to_file("b.h5", name)) for name in ("/", "", 5, "x//y")),
            (Exception, "surrogates not allowed", to_file("b.h5", "\udc80")),
        )
        monkeypatch.setattr(files.os, "replace", lambda *_: (shared_path / "none" / "a").stat())
        fails(DataError, "b.h5 cannot be written", to_file("b.h5", "a"))
        assert [path.name for path in shared_path.iterdir()] == ["a.npy"]
        with Grid.dry((2, 1, 1)) as dry, pytest.raises(DataError, match="a dry run has no elements to write"):
            DistMatrix.zeros(dry, (2, 2)).to_file(shared_path / f"{comm.rank}.npy")


@pytest.mark.parallel([2])
def test_files_of_which_elements_would_be_made_up_or_that_hold_no_matrix(comm, shared_path, all_fail):
    if comm.rank == 0:
        np.savez(shared_path / "some.npz", a=np.ones((2, 2)))
        for name in ("text.txt", "text.npy"):
            (shared_path / name).write_text("no array")
        np.save(shared_path / "integers.npy", np.ones((2, 2), "int32"))
        with h5py.File(shared_path / "some.h5", "w") as file:
            file.create_dataset("never", (4, 4))
            file.create_dataset("partly", (4, 4), chunks=(2, 4))[:2] = 1
            file.create_dataset("filled", (4, 4), chunks=(2, 4), fillvalue=7)[:2] = 1
            file.create_dataset("empty", (0, 4))
            file["folder/matrix"], file["vector"] = np.ones((2, 2)), np.ones(3)
    with Grid(comm) as grid:
        read = lambda name, *dataset: lambda: DistMatrix.from_file(grid, shared_path / name, *dataset)
        all_fail(
            (DataError, "'never' declares .* 64 bytes, and 0 of them were written", read("some.h5", "never")),
            (DataError, "'partly' declares .* 2 chunks, and 1 of them", read("some.h5", "partly")),
            (DataError, r"some.npz: .* numpy.save\('a.npy', ", read("some.npz", "a")),
            (DataError, "text.txt cannot be read as an HDF5 file", read("text.txt", "a")),
            (FileNotFoundError, "none.npy", read("none.npy")),
            (LayoutError, "two dims", read("some.h5", "vector")),
            (DTypeError, "got int32", read("integers.npy")),
            (Pmm3dError, "name one of its data sets: .*'folder', .*'vector'", read("some.h5")),
            (Pmm3dError, "text.npy is no .npy file of numbers", read("text.npy")),
            *((Pmm3dError, "name one of its data sets", read("some.h5", name)) for name in ("folder", 5)),
        )
        assert_holds(read("some.h5", "filled")(), np.repeat([[1], [7]], 2, axis=0) * np.ones(4))
        assert_holds(read("some.h5", "empty")(), np.empty((0, 4)))


@pytest.mark.parallel([2])
def test_constants_and_types(comm, all_fail):
    with Grid(comm, (2, 1, 1)) as grid:
        for layout, order in ((Layout.A, "C"), (Layout(sums="x"), "C"), (Layout.B, "F")):
            with named(layout=layout, order=order):
                for make, value in ((DistMatrix.zeros, 0), (DistMatrix.ones, 1)):
                    constant = make(grid, (3, 5), layout=layout, order=order)
                    assert np.array_equal(constant.gather(), np.full((3, 5), value))
                made = DistMatrix.full(grid, (3, 5), 2.5 + 1j, dtype="complex64", layout=layout, order=order)
                assert made.order == order
                assert np.array_equal(made.gather(), np.full((3, 5), 2.5 + 1j))
                wide = made.H.astype("complex128")
                assert wide.dtype == "complex128" and wide.layout == layout.T
                assert np.array_equal(wide.gather(), np.full((5, 3), 2.5 - 1j))
        assert_holds(DistMatrix.full(grid, (3, 5), 2, dtype="int64"), np.full((3, 5), 2))
        grid.ledger.reset()
        DistMatrix.zeros(grid, (3, 5))
        numbers = DistMatrix.from_function(grid, (3, 5), lambda i, j: i + 0.7 * j)
        assert grid.ledger.total().calls == 2  # one agreement each
        for dtype in ("float16", "int64"):
            assert_holds(numbers.astype(dtype), to_numpy(numbers.gather()).astype(dtype))
        all_fail(
            (DTypeError, "float32 cannot hold the imaginary parts", lambda: made.astype("float32")),
            (DTypeError, "the value is a number; got 'x'", lambda: DistMatrix.full(grid, (2, 2), "x")),
            (DTypeError, "which no float64 can hold", lambda: DistMatrix.full(grid, (2, 2), 1j)),
        )


@pytest.mark.parallel([2])
def test_operators_of_python_without_a_meaning_are_refused(some_grid):
    a, same = (DistMatrix.full(some_grid, (3, 5), 1) for _ in range(2))
    array, equality = np.ones((3, 5)), r"\(a - b\).norm\(\) == 0.*a is b"
    for text, wrong in (
        (r"not indexed. a.submatrix\(", lambda: a[0:2, :]),
        (r"not indexed. a.submatrix\(", lambda: a[0]),
        ("not indexed. a.set_submatrix", lambda: a.__setitem__(0, 1)),
        ("not iterable", lambda: list(a)),
        (equality, lambda: a == same),
        (equality, lambda: a != same),
        (equality, lambda: bool(a)),
        (equality, lambda: a == array),
        (equality, lambda: array == a),
        (equality, lambda: a == None),  # noqa: E711
        (equality, lambda: same in [a]),
        (equality, lambda: bool(Tensor(same))),
        (equality, lambda: Tensor(same) == Tensor(same)),
    ):
        with pytest.raises(TypeError, match=text):
            wrong()
    assert {a: 1, same: 2}[same] == WeakKeyDictionary({a: 1, same: 2})[same] == 2 and a in [a, same]
