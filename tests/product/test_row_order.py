"""Matrices whose layout has an order of rows or of columns: each operation is right, or is refused on every rank."""

import numpy as np
import pytest
from loops import given
from safetensors.numpy import load_file
from samples import TESTED, to_library, to_numpy

from pmm3d import CheckpointError, DistMatrix, Grid, Layout, LayoutError, MatmulPlan, herk, matmul, syrk
from pmm3d.io import Checkpoints, export_safetensors, import_safetensors
from pmm3d.layout import Blocks
from pmm3d.nn.transformer import token_layout
from pmm3d.product.verify import freivalds

SIZE = 16
RANDOM = np.random.default_rng(0)
WHOLE, OTHER = (RANDOM.integers(-9, 9, (SIZE, SIZE)).astype(float) for _ in range(2))
ORDERED = pytest.mark.parametrize(
    "layout_on",
    [lambda grid: token_layout(grid, 8, order="zigzag"), lambda grid: token_layout(grid, 8, order="striped").T],
    ids=["rows", "columns"],
)


@pytest.fixture
def grid(comm):
    with Grid(comm, (1, 1, 1), seq=2) as made:
        yield made


def ordered(grid, layout_on):
    return DistMatrix.from_global(grid, to_library(WHOLE)).redistribute(layout_on(grid))


def same(matrix, whole):
    return np.array_equal(to_numpy(matrix.gather()), whole)


@pytest.mark.parallel([2])
@ORDERED
def test_new_matrices(grid, shared_path, layout_on):
    layout, options = layout_on(grid), {"layout": layout_on(grid), "library": TESTED}
    DistMatrix.from_global(grid, WHOLE).to_file(path := shared_path / "whole.npy")
    array, own = to_library(WHOLE), to_library(np.split(WHOLE, 2)[grid.rank])
    drawn = to_numpy(DistMatrix.random(grid, WHOLE.shape, seed=1, library=TESTED).gather())
    numbers = np.arange(SIZE**2).reshape(SIZE, SIZE)
    for name, matrix, whole in (
        ("from_global", DistMatrix.from_global(grid, array, layout=layout), WHOLE),
        ("from_global(order)", DistMatrix.from_global(grid, array, layout=layout, order="F"), WHOLE),
        ("from_global(root)", DistMatrix.from_global(grid, array, layout=layout, root=1), WHOLE),
        ("from_function", DistMatrix.from_function(grid, WHOLE.shape, lambda i, j: SIZE * i + j, **options), numbers),
        ("from_file", DistMatrix.from_file(grid, path, **options), WHOLE),
        ("from_blocks", DistMatrix.from_blocks(grid, [own], Blocks.rows_of([8, 8], SIZE), layout=layout), WHOLE),
        ("random", DistMatrix.random(grid, WHOLE.shape, seed=1, **options), drawn),
        ("identity", DistMatrix.identity(grid, SIZE, **options), np.eye(SIZE)),
        ("diag", DistMatrix.diag(grid, to_library(WHOLE[0]), layout=layout), np.diag(WHOLE[0])),
    ):
        with given(name=name):
            assert same(matrix, whole) and same(matrix.redistribute(Layout()), whole)


@pytest.mark.parallel([2])
@ORDERED
def test_arithmetic(grid, layout_on):
    layouts = layout_on(grid), Layout.A, token_layout(grid, 8, order="striped")
    a = ordered(grid, layout_on)
    for layout in layouts:
        b = DistMatrix.from_global(grid, to_library(OTHER), layout=layout)
        for left, right, one, two in ((a, b, WHOLE, OTHER), (a.T, b, WHOLE.T, OTHER), (b, a.T, OTHER, WHOLE.T)):
            with given(left=left.layout, right=right.layout):
                assert same(left + right, one + two) and same(left @ right, one @ two)
                assert same(MatmulPlan(left, right)(), one @ two) and freivalds(left, right, left @ right) <= 1
                assert same(left.elementwise(lambda x, y: x * y, right), one * two)
                assert left.inner(right) == (one * two).sum()
        assert same(matmul(b, b, beta=1, out=a.redistribute(layouts[0])), OTHER @ OTHER + WHOLE)
    assert same(syrk(a), WHOLE @ WHOLE.T) and a.norm() == pytest.approx(np.linalg.norm(WHOLE))
    for dim in (0, 1):
        assert same(a.sum(dim), WHOLE.sum(dim, keepdims=True)) and a.sum(dim).box == a.norm(dim).box
        expected = np.linalg.norm(WHOLE, axis=dim, keepdims=True)
        assert np.allclose(to_numpy(a.norm(dim).gather()), expected, rtol=1e-15)
    assert a.trace() == np.trace(WHOLE) and np.array_equal(to_numpy(a.diagonal()), np.diag(WHOLE))
    assert same(a.redistribute(layouts[0]).add_identity(2), WHOLE + 2 * np.eye(SIZE))


@pytest.mark.parallel([2])
@ORDERED
def test_files(grid, shared_path, layout_on, monkeypatch):
    monkeypatch.setattr("pmm3d.product.files.WRITTEN_BYTES", 1000)  # several writes
    a = ordered(grid, layout_on)
    a.to_file(shared_path / "a.npy")
    export_safetensors(grid, tensors := shared_path / "a.safetensors", {"a": a})
    checkpoints = Checkpoints(grid, shared_path / "checkpoints")
    checkpoints.save(1, {"a": a})
    assert np.array_equal(np.load(shared_path / "a.npy"), WHOLE) and np.array_equal(load_file(tensors)["a"], WHOLE)
    for layout in (Layout.A, Layout()):
        found = DistMatrix.zeros(grid, WHOLE.shape, layout=layout, library=TESTED)
        checkpoints.load_latest({"a": found})
        assert same(found, WHOLE)
        import_safetensors(grid, tensors, {"a": found.scale(0)})
        assert same(found, WHOLE)
    assert np.array_equal(np.vstack(grid.comm.allgather(to_numpy(a.to_blocks(Blocks.rows_of([8, 8], SIZE))[0]))), WHOLE)


@pytest.mark.parallel([2])
@ORDERED
def test_what_cannot_be_done_is_refused(grid, shared_path, all_fail, layout_on):
    a = ordered(grid, layout_on)
    checkpoints = Checkpoints(grid, shared_path / "checkpoints")
    checkpoints.save(1, {"a": a})
    export_safetensors(grid, tensors := shared_path / "a.safetensors", {"a": a})
    part, plain = slice(2, 7), DistMatrix.from_global(grid, to_library(OTHER))
    all_fail(
        (CheckpointError, "redistribute it", lambda: checkpoints.load_latest({"a": a})),
        (CheckpointError, "redistribute it", lambda: import_safetensors(grid, tensors, {"a": a})),
        (LayoutError, "redistribute", lambda: a.submatrix(part, part)),
        (LayoutError, "redistribute", lambda: a.set_submatrix(part, part, plain.submatrix(part, part))),
        (LayoutError, "redistribute it", lambda: herk(plain, out=a)),
    )
    assert same(a, WHOLE)
