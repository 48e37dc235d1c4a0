"""DLPack: arrays of any library become matrices, and shards become arrays, without copies."""

import numpy as np
import pytest
import torch
from samples import integers

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, Layout, LayoutError

pytestmark = [pytest.mark.parallel([2], thorough=[1, 3]), pytest.mark.numpy_only("names the libraries")]

SHAPE = 5, 4
LAYOUT = Layout("z")


class Foreign:
    """An array of another library, with only the methods of DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        if self._array is None:
            raise BufferError("no memory")
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.fixture
def grid(comm):
    with Grid(comm, (1, 1, comm.size)) as grid:
        yield grid


def part(grid):
    """This rank's rows of a matrix, and the matrix."""
    whole, box = integers(SHAPE, "float64", 1), LAYOUT.box(SHAPE, grid.shape, grid.coords)
    return whole[box.r0 : box.r1].copy(), whole


def matrix_of(grid, array, shape=SHAPE):
    return DistMatrix.from_local(grid, array, shape, layout=LAYOUT)


def test_a_shard_of_another_library_is_used_in_place_if_it_can_be(grid):
    """One with gaps is copied. One that is read-only is an operand."""
    mine, whole = part(grid)
    a = matrix_of(grid, Foreign(mine))
    assert a.library.name == "numpy" and np.shares_memory(a.local, mine)
    assert np.array_equal(a.gather(), whole)
    a.scale(2)
    assert np.array_equal(mine, a.local)
    gaps = np.repeat(mine, 2, axis=1)[:, ::2]
    b = matrix_of(grid, Foreign(gaps))
    assert not np.shares_memory(b.local, gaps) and np.array_equal(b.gather(), 2 * whole)
    mine.flags.writeable = False
    c = matrix_of(grid, Foreign(mine))
    assert np.shares_memory(c.local, mine)
    assert np.array_equal((c.T @ b).gather(), 4 * whole.T @ whole)
    with pytest.raises(LayoutError, match="read-only"):
        c.scale(2)


def test_arrays_of_torch_and_whole_matrices_come_in(grid):
    mine, whole = part(grid)
    with Grid(grid.comm, (1, 1, grid.size), library="torch") as other:
        tensor = torch.from_numpy(mine)
        a = matrix_of(other, Foreign(tensor))
        assert a.library.name == "torch" and a.local.data_ptr() == tensor.data_ptr()
    for root in (None, 0):
        given = Foreign(whole) if root in (None, grid.rank) else None
        assert np.array_equal(DistMatrix.from_global(grid, given, root=root).gather(), whole)


def test_a_shard_goes_out_without_a_copy(grid):
    """That of a conjugated view as a copy."""
    mine, _ = part(grid)
    a = matrix_of(grid, mine)
    by_columns = DistMatrix.from_function(grid, SHAPE, lambda i, j: i - j, layout=LAYOUT, order="F")
    for matrix in (a, a.T, by_columns):
        for shard in (np.from_dlpack(matrix), torch.from_dlpack(matrix).numpy()):
            assert np.shares_memory(shard, matrix.local) and np.array_equal(shard, matrix.local)
    assert a.__dlpack_device__() == mine.__dlpack_device__()
    mine.flags.writeable = False
    assert not np.from_dlpack(a).flags.writeable
    view = matrix_of(grid, 1j * mine).H
    shard = np.from_dlpack(view)
    assert np.array_equal(shard, view.local) and not np.shares_memory(shard, view.memory)


def test_shards_without_elements_come_in_and_go_out(grid):
    shape = 1, 4
    mine = np.ones(LAYOUT.box(shape, grid.shape, grid.coords).shape)
    a = matrix_of(grid, Foreign(mine), shape)
    assert np.from_dlpack(a).shape == torch.from_dlpack(a).shape == mine.shape
    assert np.array_equal(a.gather(), np.ones(shape))


def test_objects_that_no_library_takes_are_refused(grid):
    """A matrix is no array: otherwise its shard would be used as the whole matrix."""
    mine, _ = part(grid)
    learned = Foreign(torch.from_numpy(mine).requires_grad_())
    matrix = DistMatrix.from_function(grid, (2 * grid.size, 2), lambda i, j: i - j, layout=LAYOUT)
    for given, shape, text in (
        (Foreign(None), SHAPE, r"numpy cannot take its memory by DLPack \(no memory\)"),
        (learned, SHAPE, r"DLPack \(.*gradient"),
        (object(), SHAPE, "object is none of"),
        (np.ma.masked_array(mine), SHAPE, "masked"),
        (matrix, matrix.shape, "a DistMatrix is spread over the ranks"),
    ):
        for call in (
            lambda: matrix_of(grid, given, shape),
            lambda: DistMatrix.from_global(grid, given),
            lambda: DistMatrix.from_global(grid, given, root=0),
        ):
            with pytest.raises(DTypeError, match=text):
                call()
    with pytest.raises(DTypeError, match="got int32"):
        matrix_of(grid, Foreign(mine.astype("int32")))


@pytest.mark.parallel([2], thorough=[3])
def test_ranks_with_objects_of_different_types_get_an_error(grid):
    given = Foreign(part(grid)[0].astype("float32" if grid.rank else "float64"))
    with pytest.raises(DisagreementError):
        matrix_of(grid, given)
