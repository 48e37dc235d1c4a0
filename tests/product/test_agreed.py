"""Agreement of the ranks on the kind of a library, without device numbers; on grids; with debug, on contents of
arrays."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from samples import integers, to_library

from pmm3d import DisagreementError, DistMatrix, Grid, GridError, Layout, MatmulPlan, matmul
from pmm3d.arrays import NumpyLibrary
from pmm3d.model.plan import ProductPlan
from pmm3d.product import checks, multiply

pytestmark = pytest.mark.parallel([2], thorough=[1, 4])


@dataclass(frozen=True)
class OnDevice(NumpyLibrary):
    """numpy's arrays as arrays of a device with a number. allocated: devices on which arrays were made."""

    number: int = 0
    name: ClassVar[str] = "numbered"
    allocated: ClassVar[set[int]] = set()

    def empty(self, shape, dtype):
        self.allocated.add(self.number)
        return super().empty(shape, dtype)


@pytest.fixture
def devices(comm, monkeypatch):
    """Each rank has a device of its own, whose number its libraries contain. Returns the list of devices that were
    taken."""
    here = OnDevice(comm.rank)
    for place in ("stored", "matrix", "checks", "constructors"):
        monkeypatch.setattr(f"pmm3d.product.{place}.library_of", lambda array: here, raising=False)
    monkeypatch.setattr("pmm3d.arrays.libraries.library_of", lambda array: here)
    monkeypatch.setattr("pmm3d.comm.grid.library_here", lambda name: here, raising=False)
    OnDevice.allocated.clear()
    return OnDevice.allocated


@pytest.mark.parallel([4], thorough=[1, 2])
def test_ranks_on_devices_of_different_numbers_agree(some_grid, devices):
    """Also a scattered matrix is stored on each rank's own device."""
    whole, root = integers((6, 6)), some_grid.size - 1
    scattered = DistMatrix.from_global(some_grid, whole if some_grid.rank == root else None, root=root)
    assert devices == {some_grid.rank}
    square, out = DistMatrix.from_global(some_grid, whole), DistMatrix.from_global(some_grid, whole, layout=Layout.B)
    DistMatrix.from_local(some_grid, square.local, (6, 6))
    assert scattered.library.number == square.library.number == some_grid.rank
    for found, wanted in (
        (scattered, whole),
        (square @ square, whole @ whole),
        (matmul(square, square, out=square.redistribute(Layout.C)), whole @ whole),
        (square.redistribute(Layout.B, out=out), whole),
    ):
        assert np.array_equal(found.gather(), wanted)


def test_the_device_in_a_librarys_name_is_each_ranks_own(some_grid, monkeypatch):
    monkeypatch.setattr("pmm3d.comm.grid.library_here", lambda name: NumpyLibrary())
    DistMatrix.empty(some_grid, (2, 2), library=f"torch:cuda:{some_grid.rank}")


def test_equal_arguments_of_other_types_agree(some_grid):
    first = some_grid.rank == 0
    whole = integers((6, 6))
    square = DistMatrix.from_global(some_grid, to_library(whole))
    made = DistMatrix.random(
        some_grid,
        (4, 3) if first else np.array([4, 3]),
        seed=5 if first else np.int64(5),
        dtype="float32" if first else np.float32,
    )
    assert made.shape == (4, 3) and made.dtype == "float32"
    assert np.array_equal(matmul(square, square, alpha=2 if first else np.float32(2)).gather(), 2 * whole @ whole)
    DistMatrix.empty(some_grid, (2, 2), dtype="f4" if first else "float32")


@pytest.mark.parallel([4], thorough=[1, 2])
def test_a_matrix_to_write_into_is_on_the_grid_that_is_asked_for(comm, some_grid, all_fail):
    """On a grid with another order of ranks, its shards would belong to other ranks."""
    square = DistMatrix.from_global(some_grid, to_library(integers((6, 6))))
    turned = comm.Split(0, -comm.rank)
    with Grid(turned, (1, comm.size, 1)) as other, Grid(comm, (comm.size, 1, 1)) as third:
        away, near = DistMatrix.empty(other, (6, 6), layout=Layout.B), DistMatrix.empty(third, (6, 6), layout=Layout.B)
        move = lambda out, *to: lambda: square.redistribute(Layout.B, *to, out=out)
        text = "out is on another Grid .*pass grid=out.grid"
        all_fail(
            (GridError, text, move(away)), (GridError, text, move(near)), (GridError, text[:22], move(away, third))
        )
        assert np.array_equal(move(near, third)().gather(), integers((6, 6)))
    turned.Free()


@pytest.mark.parallel([2], thorough=[4])
def test_arrays_that_differ_are_seen_with_debug(comm, fails, monkeypatch):
    """If any element differs, and not if only the bytes differ."""
    monkeypatch.setattr(checks, "DIGESTED_BYTES", 64)
    whole = integers((50, 3))
    with Grid(comm, (1, 1, comm.size), debug=True) as grid:
        for row in (0, 25, 49):
            mine = whole.copy()
            mine[row, 2] += grid.rank == 1
            fails(DisagreementError, "contents", lambda: DistMatrix.from_global(grid, mine))
        same = whole.astype(">f8") if grid.rank else np.asfortranarray(whole)
        assert np.array_equal(DistMatrix.from_global(grid, to_library(same)).gather(), whole)
        own = to_library(np.full((2, 3), grid.rank))
        given = lambda layout: DistMatrix.from_local(grid, own, (2, 3), layout=layout)
        fails(DisagreementError, "from_local: ranks 0 and 1 must hold the same data", lambda: given(Layout()))
        given(Layout(sums="z"))


@pytest.mark.parallel([2])
def test_arrays_are_not_read_without_debug(comm, monkeypatch):
    monkeypatch.setattr("pmm3d.product.checks.contents", None)
    with Grid(comm, (1, 1, comm.size), debug=False) as grid:
        DistMatrix.from_global(grid, to_library(integers((4, 4))))


def test_the_plans_of_the_last_products_are_kept(some_grid, monkeypatch):
    monkeypatch.setattr(multiply, "CACHED_PLANS", 4)
    for rows in (*range(1, 9), 1, 8):
        a, b = integers((rows, 5)), integers((5, 3))
        left = DistMatrix.from_global(some_grid, to_library(a))
        product = left @ DistMatrix.from_global(some_grid, to_library(b), layout=Layout.B)
        assert np.array_equal(product.gather(), a @ b)
    assert some_grid.attached[ProductPlan].cache_info().currsize == 4


@pytest.mark.parallel([4])
def test_an_operand_of_another_grid_on_one_rank_is_refused_on_all(comm):
    with Grid(comm, (1, 1, 4)) as grid, Grid(comm, (2, 2, 1)) as other:
        a, b = DistMatrix.random(grid, (8, 8)), DistMatrix.random(grid, (8, 8), layout=Layout.B)
        theirs = DistMatrix.random(other, (8, 8), layout=Layout.B)
        for product in (matmul, MatmulPlan):
            with pytest.raises(DisagreementError, match="different arguments"):
                product(a, theirs if comm.rank == 1 else b)
        assert matmul(a, b).shape == (8, 8)
