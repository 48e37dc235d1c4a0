"""Matrices from and to block-cyclic layouts and blocks between any cuts, and moves between these."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import given, looped
from samples import LIBRARIES, integers, to_library, to_numpy
from tiles import drawn, held, passed

from pmm3d import (
    BlacsContext,
    BlockCyclic,
    Blocks,
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    Redistribution,
    pgemr2d,
)
from pmm3d.arrays import library_named
from pmm3d.layout import Placement
from pmm3d.product import redistribution, tiles

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 6, 8])
LAYOUTS = (Layout.A, Layout.C, Layout(), Layout("z"), Layout("x", "y"), Layout("z", "x", sums="y"))


def made(grid, tiled, arrays, layout=Layout.A, order="F", dtype="float64"):
    if isinstance(tiled, BlockCyclic):
        [array] = arrays or [np.empty((0, 0), dtype)]
        return DistMatrix.from_block_cyclic(grid, array, tiled, layout=layout, order=order)
    arrays = passed(tiled, grid.rank, arrays)
    return DistMatrix.from_blocks(grid, arrays, tiled, layout=layout, order=order, dtype=dtype)


def back(matrix, tiled, arrays=None):
    if isinstance(tiled, BlockCyclic):
        array = matrix.to_block_cyclic(tiled, *(arrays or []))
        return [array][: len(tiled.tiles(matrix.grid.rank))]
    return matrix.to_blocks(tiled, arrays and passed(tiled, matrix.grid.rank, arrays))


def check_same(arrays, wanted):
    assert len(arrays) == len(wanted) and all(np.array_equal(*both) for both in zip(arrays, wanted))


@pytest.mark.parallel([1, 4], thorough=[2, 6])
@looped("dtype", ["float64", "complex64"])
@each_grid
def test_from_any_layout_to_a_grid_and_back(grid, dtype):
    random = np.random.default_rng(sum(map(ord, str(grid.shape))))
    for case, layout in enumerate(LAYOUTS):
        whole = integers(tuple(map(int, random.integers(0, 25, 2))), dtype, seed=case)
        tiled, other = (drawn(random, grid.size, whole.shape) for _ in range(2))
        order = "CF"[int(random.integers(2))]
        matrix = made(grid, tiled, held(tiled, grid.rank, whole, more=case % 3), layout, order, dtype)
        assert matrix.order == order and matrix.layout == layout and (matrix.gather() == whole).all()
        check_same(back(matrix, tiled), held(tiled, grid.rank, whole))
        arrays = held(other, grid.rank, np.zeros_like(whole), more=2)
        back(matrix, other, arrays)
        check_same(arrays, held(other, grid.rank, whole, more=2))


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_views_and_partial_sums_go_to_blocks_as_they_are_meant(some_grid, comm):
    whole = integers((9, 7), "complex128")
    slabs = Blocks.rows_of([7 - min(comm.size - 1, 6)] + [1] * min(comm.size - 1, 6) + [0] * (comm.size - 7), 9)
    matrix = DistMatrix.from_global(some_grid, whole, layout=Layout("y"))
    check_same(matrix.H.to_blocks(slabs), held(slabs, comm.rank, whole.conj().T))
    check_same(matrix.T.to_blocks(slabs), held(slabs, comm.rank, whole.T))
    sums = Layout(sums=("x", "y", "z"))
    part = DistMatrix.from_local(some_grid, np.ones((9, 7)), (9, 7), layout=sums)
    owned = Blocks((0, 9), (0, 7), [[comm.size - 1]])
    check_same(part.to_blocks(owned), held(owned, comm.rank, np.full((9, 7), float(comm.size))))


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_what_lies_so_already_is_used_in_place(comm):
    size = comm.size
    with Grid(comm, (1, 1, size)) as grid:
        columns = BlockCyclic((6, 4 * size), (6, 4), (1, size))
        held = np.asfortranarray(np.full((6, 4), float(grid.rank)))
        matrix = DistMatrix.from_block_cyclic(grid, held, columns, layout=Layout((), "z"))
        assert np.shares_memory(matrix.local, held) and matrix.order == "F"
        with_gaps = np.asfortranarray(np.ones((8, 4)))[: 6 if grid.rank == size - 1 else 8]
        copied = DistMatrix.from_block_cyclic(grid, with_gaps, columns, layout=Layout((), "z"))
        assert not np.shares_memory(copied.local, with_gaps)
        slabs = Blocks.rows_of([3] * size, 5)
        slab = np.ones((3, 5))
        assert np.shares_memory(DistMatrix.from_blocks(grid, slab, slabs, layout=Layout("z")).local, slab)
        assert grid.ledger.total(phase="redistribute").received == 0


@pytest.mark.parallel([2], thorough=[4])
def test_a_rank_without_blocks_takes_type_and_library_from_the_owners(some_grid, all_fail):
    whole, last = integers((5, 3), "float32"), some_grid.size - 1
    owned = Blocks((0, 2, 5), (0, 3), [[last], [last]])
    for library in LIBRARIES:
        with given(library=library):
            arrays = [to_library(array, library) for array in held(owned, some_grid.rank, whole)]
            matrix = DistMatrix.from_blocks(some_grid, arrays, owned)
            assert (matrix.library.kind, matrix.dtype) == (library_named(library).kind, "float32")
            assert (to_numpy(matrix.gather(), library) == whole).all()
    arrays = held(owned, some_grid.rank, whole)
    other = arrays or np.empty((0, 0))
    blocks = lambda arrays, **options: lambda: DistMatrix.from_blocks(some_grid, arrays, owned, **options)
    all_fail(
        (DTypeError, "the arrays are float32; dtype='float64' must be their type", blocks(arrays, dtype="float64")),
        (DisagreementError, "rank.*'float64', ...", blocks(other)),
    )


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_each_element_travels_once(comm):
    whole, size = integers((24, 24)), comm.size
    with Grid(comm, (1, 1, size)) as grid:
        cyclic = BlockCyclic((24, 24), (1, 1), (size, 1))
        made(grid, cyclic, held(cyclic, grid.rank, whole), Layout("z"))
        entry = grid.ledger.total(phase="redistribute")
        box = Layout("z").box((24, 24), grid.shape, grid.coords)
        own = sum(row % size == grid.rank for row in range(box.r0, box.r1))
        assert entry.received == 24 * 8 * (box.r1 - box.r0 - own)


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_many_rounds_take_little_work_memory(comm, monkeypatch):
    whole, random = integers((40, 37)), np.random.default_rng(7)
    with Grid(comm, (1, comm.size, 1)) as grid:
        for _ in range(4):
            tiled, other = (drawn(random, grid.size, whole.shape) for _ in range(2))
            monkeypatch.setattr(redistribution, "PACKED_BYTES", 500)
            move = Redistribution(grid, tiled, other)
            arrays = held(other, grid.rank, whole * 0)
            move(held(tiled, grid.rank, whole), arrays)
            check_same(arrays, held(other, grid.rank, whole))
            assert comm.size == 1 or max(comm.allgather(move.work)) < 4000


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
@looped("round_bytes", [redistribution.PACKED_BYTES, 500])
def test_a_plan_is_used_again_and_adds(some_grid, monkeypatch, round_bytes):
    """Many rounds have the results of one."""
    monkeypatch.setattr(redistribution, "PACKED_BYTES", round_bytes)
    rank, whole, random = some_grid.rank, integers((40, 37)), np.random.default_rng(7)
    for _ in range(4):
        source, target = (drawn(random, some_grid.size, whole.shape) for _ in range(2))
        move, arrays, given = (
            Redistribution(some_grid, source, target),
            held(target, rank, whole, 1),
            held(source, rank, whole),
        )
        for beta, factor in ((0, 1), (1, 2), (2, 5)):
            pending = move.start(given, passed(target, rank, arrays), beta=beta)
            pending.test()
            pending.wait()
            check_same(arrays, held(target, rank, factor * whole, more=1))
        for layout, order in ((Layout.A, "C"), (Layout("x", "z"), "F")):
            there, home = (Redistribution(some_grid, *way, order=order) for way in ((source, layout), (layout, source)))
            shard = DistMatrix.empty(some_grid, whole.shape, layout=layout, library="numpy", order=order)
            there(given, shard.local)
            out = held(source, rank, whole * 0)
            home(shard.local, out)
            assert (shard.gather() == whole).all()
            check_same(out, given)


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_pgemr2d_between_contexts(comm):
    size, whole, kept = comm.size, integers((12, 14)), integers((9, 20), seed=5)
    with BlacsContext(comm, (1, size)) as one, BlacsContext(one.grid, (size, 1), "C") as other:
        source, target = one.descriptor(12, 14, 2, 3), other.descriptor(9, 20, 1, 4, rsrc=size - 1)
        [a], [b] = held(source.cyclic, comm.rank, whole), held(target.cyclic, comm.rank, kept)
        pgemr2d(5, 6, a, 3, 2, source, b, 4, 10, target)
        kept[3:8, 9:15] = whole[2:7, 1:7]
        check_same([b], held(target.cyclic, comm.rank, kept))


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_bad_input_is_refused_on_every_rank(comm, all_fail):
    size = comm.size
    with Grid(comm, (1, 1, size)) as grid:
        cyclic, slabs = BlockCyclic((10, 6), (2, 3), (size, 1)), Blocks.rows_of([3] * size, 6)
        [array] = held(cyclic, grid.rank, np.zeros((10, 6)))
        read_only = array.copy(order="F")
        read_only.flags.writeable = False
        from_cyclic = lambda array, cyclic=cyclic: lambda: DistMatrix.from_block_cyclic(grid, array, cyclic)
        blocks = lambda array, **options: lambda: DistMatrix.from_blocks(grid, array, slabs, **options)
        planned = lambda *layouts, **options: lambda: Redistribution(grid, *layouts, **options)
        matrix, ones = from_cyclic(array)(), DistMatrix.ones(grid, slabs.shape, library="numpy")
        large, move, labels = BlockCyclic((10, 6), (2, 3), (size + 1, 1)), planned(cyclic, cyclic)(), array.astype(int)
        short = array[:-1] if grid.rank == 0 else array
        of_labels = planned(cyclic, cyclic, dtype="int64")()
        of_labels(labels, labels.copy(), beta=1)
        all_fail(
            (LayoutError, f"process grid of {size + 1} x 1 on ranks up to {size}", from_cyclic(array, large)),
            (LayoutError, "described by a pmm3d.BlockCyclic; got Layout", from_cyclic(array, Layout.A)),
            (LayoutError, "described by a pmm3d.Blocks; got BlockCyclic", lambda: matrix.to_blocks(cyclic)),
            (LayoutError, "rows and", from_cyclic(short)),
            (LayoutError, "the array has the shape", from_cyclic(array.reshape(-1))),
            (DTypeError, "", from_cyclic([[1.0]])),
            (
                LayoutError,
                "one layout is of a matrix of 10 x 6, the other of 6 x 10",
                lambda: matrix.to_block_cyclic(BlockCyclic((6, 10), (2, 3), (1, 1))),
            ),
            (
                DTypeError,
                "an array is float32 of numpy; it must be float64 of numpy",
                lambda: matrix.to_block_cyclic(cyclic, array.astype("float32")),
            ),
            (LayoutError, "the array is read-only", lambda: matrix.to_block_cyclic(cyclic, read_only)),
            (LayoutError, "from Layout to Layout: DistMatrix.redistribute", planned(Layout.A, Layout.B)),
            (LayoutError, 'the order of shards is "C" or "F"', planned(cyclic, Layout.A, order="A")),
            (LayoutError, "order is for the shards of a Layout", planned(cyclic, cyclic, order="C")),
            (DTypeError, "beta of labels, int64, is 0 or 1; got 2", lambda: of_labels(labels, labels.copy(), beta=2)),
            (
                DTypeError,
                "the arrays are float64; dtype='float32' must be their type",
                blocks(np.ones((3, 6)), dtype="float32"),
            ),
            # rows or columns that the Blocks do not count must not be lost in silence
            (LayoutError, "the Blocks say 3 rows and 6 columns on rank", blocks(np.ones((4, 6)))),
            (LayoutError, "the Blocks say 3 rows and 6 columns on rank", blocks(np.ones((3, 7)))),
            (LayoutError, "the Blocks say", lambda: ones.to_blocks(slabs, np.ones((4, 6)))),
            (LayoutError, "the Blocks say", lambda: ones.to_blocks(slabs, np.ones((3, 7)))),
            (LayoutError, "target: the array shares memory", lambda: move(array, array)),
            (LayoutError, "stores 1 blocks|has 2 arrays; it stores 1", lambda: move([array, array], array)),
        )
        if size > 1:
            with pytest.raises(Exception, match="different arguments") as caught:
                from_cyclic(array, BlockCyclic((10, 6), (2 + grid.rank % 2, 3), (size, 1)))()
            assert caught.value.everywhere


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_what_pgemr2d_refuses(comm, all_fail):
    size = comm.size
    with BlacsContext(comm, (size, 1)) as one, BlacsContext(comm.Split(0, -comm.rank), (size, 1)) as turned:
        desc, other = one.descriptor(8, 8, 2, 2, lld=9), turned.descriptor(8, 8, 2, 2)
        a, b = desc.empty(), desc.empty()

        def moves(m=8, a=a, ia=1, desca=desc, b=b, ib=1, descb=desc):
            return lambda: pgemr2d(m, m, a, ia, 1, desca, b, ib, 1, descb)

        all_fail(
            (LayoutError, "A begins at row 3 and column 1: rows 3 to 10 .* counted from 1, .* 8 x 8$", moves(ia=3)),
            (LayoutError, "begins at row 0", moves(2, ib=0)),
            (LayoutError, "10 rows here; .* leading dimension .* is 9", moves(a=np.zeros((10, 8), order="F"))),
            (LayoutError, "the result of BlacsContext.descriptor", moves(desca=(1, 0, 8, 8, 2, 2, 0, 0, 8))),
        )
        if size > 1:
            all_fail((GridError, "over different ranks", moves(b=other.empty(), descb=other)))


@pytest.mark.parallel([2])
def test_rounds_of_a_repeated_move_are_planned_for_what_travels(comm, monkeypatch):
    """Elements that stay on a rank need no round. A bound from the shapes alone would plan twice as many rounds."""
    monkeypatch.setattr(tiles, "ROUND_BYTES", 4096)
    with Grid(comm, (1, 1, comm.size)) as grid:
        cyclic, rows = BlockCyclic((64, 64), (8, 8), (1, comm.size)), Placement((64, 64), Layout("z"), grid.shape)
        move = tiles.TileMove(grid, cyclic, rows, "float64", rounds=1)
        move.agree()
        assert move.work == 4096 and not move.in_place
