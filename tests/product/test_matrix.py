"""DistMatrix on every grid: construction, redistribution, conversion."""

from itertools import product
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from each_grid import each_grid
from grids import canonical_grids
from loops import given as named
from samples import RANKS, TESTED, UP_TO_4, integers, to_library, to_numpy

from pmm3d import DataError, DisagreementError, DistMatrix, DTypeError, Grid, Layout, LayoutError, matmul
from pmm3d.layout import EMPTY, MATRIX_DTYPES
from pmm3d.nn import Tensor
from pmm3d.product import files

pytestmark = pytest.mark.parallel([2, 4], thorough=RANKS)
up_to_4 = pytest.mark.parallel([2], thorough=UP_TO_4)

HERE = (TESTED, "standin")
"""Libraries that are cheap to import. torch has separate tests, on fewer ranks."""

SHAPES = [(7, 11), (1, 1), (2, 13), (0, 4), (5, 0), (16, 24)]
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
    whole = integers(shape, dtype, seed)
    return DistMatrix.from_global(grid, to_library(whole, library, dtype), layout=layout), whole


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_from_the_whole_on_every_rank(grid):
    for shape, layout in product(SHAPES, LAYOUTS):
        with named(shape=shape, layout=layout):
            assert_holds(*distributed(grid, shape, layout))


def assert_types_come_back(grid, library):
    for dtype in MATRIX_DTYPES:
        with named(dtype=dtype):
            if dtype == "bfloat16" and library != "torch":
                continue
            matrix, whole = distributed(grid, (7, 5), Layout.B, dtype, library)
            assert matrix.dtype == dtype and type(matrix.local) is type(to_library(whole, library))
            assert_holds(matrix, whole)
            assert_holds(matrix.T, whole.T)
            assert_holds(matrix.H, whole.conj().T)
            assert_holds(matrix.redistribute(Layout.C), whole)
            at_root = matrix.gather(grid.size - 1)
            assert grid.rank != grid.size - 1 or np.array_equal(to_numpy(at_root, library), whole)


@pytest.mark.parallel([2], thorough=RANKS)
def test_every_type_comes_back(some_grid):
    for library in HERE:
        with named(library=library):
            assert_types_come_back(some_grid, library)


@up_to_4
def test_every_type_comes_back_in_torch(some_grid):
    assert_types_come_back(some_grid, "torch")


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_from_the_whole_on_one_rank(grid):
    for root in {0, grid.size - 1}:
        with named(root=root):
            for library, layout in product(HERE, (Layout.A, Layout(), Layout(rows="x"))):
                whole = integers((6, 9), seed=root)
                given = to_library(whole, library) if grid.rank == root else None
                assert_holds(DistMatrix.from_global(grid, given, layout=layout, root=root), whole)


@pytest.mark.parallel([2], thorough=RANKS)
def test_from_a_whole_that_is_not_contiguous(some_grid):
    grid = some_grid
    whole = integers((9, 12))
    for part in (whole.T, whole[::2, 1:7], np.asfortranarray(whole), np.broadcast_to(whole[:1], (4, 12))):
        assert_holds(DistMatrix.from_global(grid, part), part)
        assert_holds(DistMatrix.from_global(grid, part if grid.rank == 0 else None, root=0), part)


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_from_a_function_of_global_indices(grid):
    for shape, layout, library in product(SHAPES, (Layout.A, Layout.C, Layout()), HERE):
        with named(shape=shape, layout=layout, library=library):
            matrix = DistMatrix.from_function(grid, shape, lambda i, j: 10 * i - j, layout=layout, library=library)
            assert_holds(matrix, np.fromfunction(lambda i, j: 10 * i - j, shape))
    constant = DistMatrix.from_function(grid, (3, 4), lambda i, j: 1j, dtype="complex64", library="standin")
    assert_holds(constant, np.full((3, 4), 1j, "complex64"))


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_from_blocks_in_place_where_they_are_contiguous(grid):
    whole = integers((9, 10))
    for library, layout in product(HERE, LAYOUTS):
        with named(library=library, layout=layout):
            box = layout.box(whole.shape, grid.shape, grid.coords)
            mine = to_library(np.ascontiguousarray(whole[box.within(EMPTY)]), library)
            matrix = DistMatrix.from_local(grid, mine, whole.shape, layout=layout)
            assert matrix.local is mine
            assert_holds(matrix, whole)


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_from_files_each_rank_reads_its_part(grid, shared_path):
    import h5py

    wholes = {dtype: integers((7, 9), dtype) for dtype in ("float32", "complex128", "float16")}
    if grid.rank == 0:
        with h5py.File(shared_path / "some.h5", "w") as file:
            for dtype, whole in wholes.items():
                np.save(shared_path / f"{dtype}.npy", whole)
                file[f"group/{dtype}"] = whole
        np.save(shared_path / "fortran.npy", np.asfortranarray(wholes["float32"]))
        np.save(shared_path / "swapped.npy", wholes["float32"].astype(">f4"))
        np.save(shared_path / "empty.npy", np.empty((0, 3)))
    grid.comm.barrier()
    for dtype, whole in wholes.items():
        with named(dtype=dtype):
            for layout in (Layout.A, Layout(cols="x")):
                assert_holds(DistMatrix.from_file(grid, shared_path / f"{dtype}.npy", layout=layout), whole)
                dataset = f"group/{dtype}"
                assert_holds(DistMatrix.from_file(grid, str(shared_path / "some.h5"), dataset, layout=layout), whole)
    for name in ("fortran.npy", "swapped.npy"):
        with named(name=name):
            matrix = DistMatrix.from_file(grid, shared_path / name)
            assert matrix.dtype == "float32"
            assert_holds(matrix, wholes["float32"])
    assert_holds(DistMatrix.from_file(grid, shared_path / "empty.npy"), np.empty((0, 3)))
    assert_holds(DistMatrix.from_file(grid, shared_path / "swapped.npy", library="standin"), wholes["float32"])


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_random_matrices_are_the_same_on_every_grid(comm, grid):
    with Grid(comm.Split(comm.rank), (1, 1, 1)) as alone:
        for distribution, dtype in product(("uniform", "normal", "integers"), ("float64", "complex64", "float16")):
            with named(distribution=distribution, dtype=dtype):
                options = dict(seed=5, dtype=dtype, distribution=distribution)
                whole = DistMatrix.random(alone, (31, 17), **options).gather()
                for layout in (Layout.A, Layout.B, Layout()):
                    assert_holds(DistMatrix.random(grid, (31, 17), layout=layout, **options), whole)


@pytest.mark.parallel([2], thorough=RANKS)
def test_random_matrices_have_their_distribution(some_grid):
    grid = some_grid
    drawn = lambda **options: to_numpy(DistMatrix.random(grid, (400, 250), **options).gather())
    whole = {name: drawn(distribution=name) for name in ("uniform", "normal", "integers")}
    assert np.all(np.abs(whole["uniform"]) < 1) and abs(whole["uniform"].var() - 1 / 3) < 0.01
    assert abs(whole["normal"].mean()) < 0.02 and abs(whole["normal"].var() - 1) < 0.02
    assert set(np.unique(whole["integers"])) == set(range(-4, 5))
    assert not np.any(drawn(seed=1) == whole["uniform"])
    both = drawn(dtype="complex128")
    assert abs(np.corrcoef(both.real.ravel(), both.imag.ravel())[0, 1]) < 0.02


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_empty_matrices_have_the_shape_of_the_block(grid):
    for shape, layout, library in product(SHAPES, LAYOUTS, HERE):
        with named(shape=shape, layout=layout, library=library):
            matrix = DistMatrix.empty(grid, shape, layout=layout, dtype="float32", library=library)
            assert tuple(matrix.local.shape) == matrix.box.shape and matrix.dtype == "float32"


@up_to_4
def test_types_may_be_named_in_the_words_of_the_library(some_grid):
    import torch

    for dtype in ("complex64", np.complex64, np.dtype("complex64"), torch.complex64):
        with named(dtype=dtype):
            assert DistMatrix.empty(some_grid, (3, 3), dtype=dtype).dtype == "complex64"
    assert DistMatrix.random(some_grid, (3, 3), dtype=torch.bfloat16, library="torch").dtype == "bfloat16"


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_the_transpose_is_a_view(grid):
    matrix, whole = distributed(grid, (5, 8))
    turned = matrix.T
    assert turned.shape == (8, 5) and turned.layout == matrix.layout.T and turned.T.layout == matrix.layout
    assert np.shares_memory(turned.local, matrix.local) or not matrix.local.size
    assert np.array_equal(turned.T.gather(), whole)
    assert np.shares_memory(matrix.H.local, matrix.local) or not matrix.local.size


@pytest.mark.parallel([2], thorough=RANKS)
def test_the_conjugate_transpose_is_a_view(some_grid, fails):
    for library in HERE:
        with named(library=library):
            matrix, whole = distributed(some_grid, (5, 8), dtype="complex64", library=library)
            turned = matrix.H
            assert turned.conjugated and turned.layout == matrix.layout.T and not turned.T.H.conjugated
            assert matrix.library.share_memory(turned.memory, matrix.memory) or not matrix.box.size
            for view, values in (
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
                there = Grid(some_grid.comm, (1, 1, some_grid.size), device_transport="direct")
                assert_holds(view.redistribute(Layout.C, there), values)
                there.close()
                parts = view.redistribute(Layout(sums=("x", "y", "z")))
                assert_holds(parts.H.redistribute(Layout.A), values.conj().T)
            matrix.memory[...] = 1j
            assert_holds(turned, np.full((8, 5), -1j, "complex64"))

            def written():
                turned.local = turned.memory

            fails(LayoutError, "the shard of a conjugated view .* is not written to", written)
            fails(
                LayoutError,
                "redistribute: out is a conjugated view",
                lambda: matrix.T.redistribute(turned.layout, out=turned),
            )
            fails(
                LayoutError,
                "matmul: out is a conjugated view",
                lambda: matmul(
                    matrix, matrix.T, out=DistMatrix.empty(some_grid, (5, 5), dtype="complex64", library=library).H
                ),
            )
            assert not turned.writable


@pytest.mark.parallel([2])
def test_a_view_that_is_conjugated_on_one_rank_alone_is_refused(some_grid, fails):
    matrix, _ = distributed(some_grid, (4, 4), dtype="complex64")
    view = matrix.H if some_grid.rank else matrix.T
    fails(DisagreementError, "matmul: the ranks passed different arguments", lambda: view @ matrix)


def assert_views_move(grid, library):
    matrix, whole = distributed(grid, (7, 6), library=library)
    for target in LAYOUTS:
        with named(target=target):
            turned = matrix.T.redistribute(target)
            assert turned.order == "F"
            assert_holds(turned, whole.T)
            assert_holds(matrix.H.redistribute(target), whole.T)
            out = DistMatrix.empty(grid, (7, 6), layout=target, library=library)
            assert matrix.redistribute(target, out=out) is out
            assert_holds(out, whole)


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_redistribution_of_views_and_into_out(grid):
    assert_views_move(grid, TESTED)


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_redistribution_to_every_other_grid(comm, grid):
    matrix, whole = distributed(grid, (7, 11))
    for shape in canonical_grids(grid.size):
        with named(shape=shape):
            with Grid(comm, shape) as other:
                for source, target in ((Layout.A, Layout.B), (Layout.C, Layout()), (Layout(rows="x"), Layout.A)):
                    moved = DistMatrix.from_global(grid, to_library(whole), layout=source).redistribute(target, other)
                    assert moved.grid is other
                    assert_holds(moved, whole)
                    assert_holds(moved.redistribute(Layout.A, grid), whole)
    assert_holds(matrix, whole)


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_what_is_there_already_does_not_travel(grid):
    matrix, _ = distributed(grid, (8, 12), Layout())
    grid.ledger.reset()
    for layout in LAYOUTS:
        matrix.redistribute(layout)
    moved = grid.ledger.total(phase="redistribute")
    assert moved.calls == moved.sent == moved.received == 0


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_gathering_receives_each_element_once(grid):
    matrix, whole = distributed(grid, (8, 12))
    grid.ledger.reset()
    matrix.gather()
    assert grid.ledger.total(phase="gather").received == whole.nbytes - matrix.local.nbytes
    grid.ledger.reset()
    assert (matrix.gather(0) is None) == (grid.rank != 0)
    assert grid.ledger.total(phase="gather").sent == (matrix.local.nbytes if grid.rank else 0)


@pytest.mark.parallel([2], thorough=RANKS)
@each_grid
def test_gather_takes_a_copy(grid):
    matrix, whole = distributed(grid, (5, 5))
    matrix.gather()[...] = 99
    matrix.gather(0)
    assert_holds(matrix, whole)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "float16", "int64"])
def test_to_files_and_back(comm, shared_path, dtype, monkeypatch, fails):
    """In slices of two rows; also views and partial sums. A file is replaced only on request, as a whole."""
    monkeypatch.setattr(files, "WRITTEN_BYTES", 2 * 9 * np.dtype(dtype).itemsize)
    whole = integers((7, 9), dtype)
    with Grid(comm, (2, 1, 1)) as grid:
        for layout in (Layout.A, Layout(cols="x"), Layout(sums="x")):
            with named(layout=layout):
                a = DistMatrix.from_global(grid, to_library(whole), layout=layout)
                a.to_file(shared_path / "a.npy", overwrite=True)
                a.H.to_file(str(shared_path / "a.h5"), "group/a", overwrite=True)
                assert_holds(DistMatrix.from_file(grid, shared_path / "a.npy"), whole)
                assert_holds(DistMatrix.from_file(grid, shared_path / "a.h5", "/group/a"), whole.conj().T)
                assert np.array_equal(np.load(shared_path / "a.npy"), whole)
                assert np.load(shared_path / "a.npy").dtype == whole.dtype
        grid.ledger.reset()
        a.to_file(shared_path / "a.npy", overwrite=True)
        assert grid.ledger.total(axis="x").received <= whole.nbytes  # summed once, not for each slice
        DistMatrix.from_global(grid, to_library(whole[:0])).to_file(shared_path / "empty.npy")
        assert np.load(shared_path / "empty.npy").shape == (0, 9)
        fails(
            DataError,
            "a.npy exists. to_file.path, overwrite=True. replaces it",
            lambda: a.to_file(shared_path / "a.npy"),
        )
        fails(
            DataError, "none/a.npy cannot be written: No such file", lambda: a.to_file(shared_path / "none" / "a.npy")
        )
        fails(DataError, "which has no data sets", lambda: a.to_file(shared_path / "b.npy", "name"))
        fails(DataError, "got dataset=None", lambda: a.to_file(shared_path / "b.h5"))
        for name in ("/", "", 5, "x//y"):
            with named(name=name):
                fails(
                    DataError,
                    f"{name!r} cannot name a data set",
                    lambda name=name: a.to_file(shared_path / "b.h5", name),
                )
        fails(Exception, "surrogates not allowed", lambda: a.to_file(shared_path / "b.h5", "\udc80"))
        with monkeypatch.context() as patched:
            patched.setattr(files.os, "replace", lambda *_: (shared_path / "none" / "a").stat())
            fails(DataError, "b.h5 cannot be written", lambda: a.to_file(shared_path / "b.h5", "a"))
        assert sorted(path.name for path in shared_path.iterdir()) == ["a.h5", "a.npy", "empty.npy"]
        with Grid.dry((2, 1, 1)) as dry, pytest.raises(DataError, match="a dry run has no elements to write"):
            DistMatrix.zeros(dry, (2, 2), dtype=dtype).to_file(shared_path / f"{comm.rank}.npy")


@pytest.mark.parallel([2])
def test_files_of_which_elements_would_be_made_up_or_that_hold_no_matrix(comm, shared_path, fails):
    import h5py

    if comm.rank == 0:
        np.savez(shared_path / "some.npz", a=np.ones((2, 2)))
        (shared_path / "text.txt").write_text("no HDF5")
        with h5py.File(shared_path / "some.h5", "w") as file:
            file.create_dataset("never", (4, 4))
            file.create_dataset("partly", (4, 4), chunks=(2, 4))[:2] = 1
            file.create_dataset("filled", (4, 4), chunks=(2, 4), fillvalue=7)[:2] = 1
            file.create_dataset("empty", (0, 4))
    with Grid(comm) as grid:
        read = lambda name, *dataset: lambda: DistMatrix.from_file(grid, shared_path / name, *dataset)
        fails(DataError, "'never' declares .* takes 64 bytes, and 0 of them were written: ", read("some.h5", "never"))
        fails(DataError, "'partly' declares .* takes 2 chunks, and 1 of them", read("some.h5", "partly"))
        assert_holds(read("some.h5", "filled")(), np.repeat([[1], [7]], 2, axis=0) * np.ones(4))
        assert_holds(read("some.h5", "empty")(), np.empty((0, 4)))
        fails(DataError, r"some.npz: .* Save it as a .npy file: numpy.save\('a.npy', ", read("some.npz", "a"))
        fails(DataError, "text.txt cannot be read as an HDF5 file", read("text.txt", "a"))


@pytest.mark.parallel([2])
def test_constants_and_types(comm, fails):
    with Grid(comm, (2, 1, 1)) as grid:
        for layout, order in ((Layout.A, "C"), (Layout(sums="x"), "C"), (Layout.B, "F")):
            with named(layout=layout, order=order):
                zeros, ones = (
                    make(grid, (3, 5), layout=layout, order=order) for make in (DistMatrix.zeros, DistMatrix.ones)
                )
                assert np.array_equal(zeros.gather(), np.zeros((3, 5)))
                assert np.array_equal(ones.gather(), np.ones((3, 5)))
                made = DistMatrix.full(grid, (3, 5), 2.5 + 1j, dtype="complex64", layout=layout, order=order)
                assert made.order == order
                assert np.array_equal(made.gather(), np.full((3, 5), 2.5 + 1j))
                wide = made.H.astype("complex128")
                assert wide.dtype == "complex128" and wide.layout == layout.T
                assert np.array_equal(wide.gather(), np.full((5, 3), 2.5 - 1j))
        assert_holds(DistMatrix.full(grid, (3, 5), 2, dtype="int64"), np.full((3, 5), 2))
        grid.ledger.reset()
        DistMatrix.zeros(grid, (3, 5))
        once = grid.ledger.total().calls
        DistMatrix.from_function(grid, (3, 5), lambda i, j: 0)
        assert grid.ledger.total().calls == 2 * once  # one agreement each
        numbers = DistMatrix.from_function(grid, (3, 5), lambda i, j: i + 0.7 * j)
        for dtype in ("float16", "int64"):
            assert_holds(numbers.astype(dtype), to_numpy(numbers.gather()).astype(dtype))
        fails(DTypeError, "astype: float32 cannot hold the imaginary parts", lambda: made.astype("float32"))
        fails(DTypeError, "the value is a number; got 'x'", lambda: DistMatrix.full(grid, (2, 2), "x"))
        fails(DTypeError, "which no float64 can hold", lambda: DistMatrix.full(grid, (2, 2), 1j))
        for wrong in (lambda: made[0:2, :], lambda: made[0]):
            with pytest.raises(TypeError, match=r"not indexed. a.submatrix\(slice\(0, 3\), slice\(None\)\)"):
                wrong()
        with pytest.raises(TypeError, match="not indexed. a.set_submatrix"):
            made[0] = 1
        with pytest.raises(TypeError, match="not iterable"):
            list(made)
        same = DistMatrix.full(grid, (2, 2), 1)
        for wrong in (
            lambda: made == same,
            lambda: made != same,
            lambda: bool(made),
            lambda: made == np.ones((3, 5)),
            lambda: np.ones((3, 5)) == made,
            lambda: made == None,  # noqa: E711
            lambda: same in [made],
            lambda: made and same,
            lambda: bool(Tensor(same)),
            lambda: Tensor(same) == Tensor(same),
        ):
            with pytest.raises(TypeError, match=r"\(a - b\).norm\(\) == 0.*a is b"):
                wrong()
        assert {made: 1, same: 2}[same] == WeakKeyDictionary({made: 1, same: 2})[same] == 2 and made in [made, same]
