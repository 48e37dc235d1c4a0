"""Matrices in tiles: the arrays of a rank, and random tilings."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from samples import grids_of

from pmm3d import BlockCyclic, Blocks, GridShape, Layout
from pmm3d.layout import Placement

IDLE_TOO = 8  # ranks of the communicator; grids may use fewer
grids = st.sampled_from(
    [
        *(GridShape(*shape, data) for n in (1, 3, 6, 7, 8) for shape, data in grids_of(n, (1, 2))),
        GridShape(1, 2, 1, 2, seq=2),
        GridShape(2, 1, 1, 1, seq=3),
    ]
)
shapes = st.tuples(st.integers(0, 13), st.integers(0, 13))


def indices(dealt, part):
    return [index for run in dealt.runs(part) for index in range(run.start, run.stop)]


def places(dealt, part):
    """Positions of the indices in the storage of a part."""
    return [run.local + index for run in dealt.runs(part) for index in range(run.stop - run.start)]


def held(tiled, rank, whole, more=0, mark=-77):
    """Arrays of a rank, with `more` additional rows and columns. Places without an element contain `mark`."""
    arrays = []
    for tile, (rows, cols) in zip(tiled.tiles(rank), tiled.local_shapes(rank)):
        array = np.full((rows + more, cols + more), mark, whole.dtype, order=tiled.order)
        array[np.ix_(places(tiled.rows, tile.row), places(tiled.cols, tile.col))] = whole[
            np.ix_(indices(tiled.rows, tile.row), indices(tiled.cols, tile.col))
        ]
        arrays.append(array)
    return arrays


def drawn(random, ranks, shape):
    """A random BlockCyclic or Blocks of this shape."""
    number = lambda low, high: int(random.integers(low, high))
    if random.integers(2):
        rows = number(1, ranks + 1)
        process_grid = rows, number(1, ranks // rows + 1)
        return BlockCyclic(
            shape,
            (number(1, 7), number(1, 7)),
            process_grid,
            "RC"[number(0, 2)],
            (number(0, process_grid[0]), number(0, process_grid[1])),
            tuple(map(int, random.permutation(ranks)[: process_grid[0] * process_grid[1]])),
        )
    cuts = [[0, *sorted(number(0, size + 1) for _ in range(number(0, 5))), size] for size in shape]
    owners = random.integers(0, ranks, (len(cuts[0]) - 1, len(cuts[1]) - 1)).tolist()
    return Blocks(*cuts, owners, "CF"[number(0, 2)])


def passed(tiled, rank, arrays):
    """The arrays of a rank as a caller passes them: an array of Blocks, without additional rows and columns."""
    if not isinstance(tiled, Blocks):
        return arrays
    return [array[:rows, :cols] for array, (rows, cols) in zip(arrays, tiled.local_shapes(rank))]


@st.composite
def layouts(draw, shape, grid):
    axes = draw(st.permutations(grid.names))
    first, second = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=2, max_size=2)))
    units = [draw(st.sampled_from([unit for unit in (1, 2, 3) if size % unit == 0])) for size in shape]
    return Layout(rows=axes[:first], cols=axes[first:second], units=units)


@st.composite
def placements(draw, shape, ranks=IDLE_TOO, grids=grids):
    """Random placements of a matrix: in a layout on a grid, which may be on some of the ranks only, or as copies."""
    order = draw(st.permutations(range(ranks)))
    if draw(st.integers(0, 4)) == 0:
        return Placement.copies(shape, order[: draw(st.integers(1, ranks))])
    grid = draw(grids)
    return Placement(
        shape,
        draw(layouts(shape, grid)),
        grid,
        draw(st.sampled_from("CF")),
        draw(st.none() | st.just(tuple(order[: grid.size]))),
    )


@st.composite
def tilings(draw, shape, ranks=IDLE_TOO, grids=grids):
    """Random tilings of a matrix of this shape on up to `ranks` ranks, also as windows of larger matrices."""
    before, after = (draw(st.tuples(st.integers(0, 5), st.integers(0, 5))) for _ in range(2))
    if draw(st.booleans()):
        whole = tuple(map(sum, zip(before, shape, after)))
        return (
            draw(placements(whole, ranks, grids)).sub(*before, *shape)
            if draw(st.booleans())
            else draw(placements(shape, ranks, grids))
        )
    tiled = drawn(np.random.default_rng(draw(st.integers(0, 10**6))), ranks, shape)
    return replace(tiled, start=before) if isinstance(tiled, BlockCyclic) else tiled


def whole_of(window):
    """The elements of a window of a block-cyclic matrix, on every rank."""
    found = np.zeros(window.shape, window.dtype)
    for rows, cols, i, j in window.own():
        found[np.ix_(i, j)] = window.array[rows, cols]
    return sum(window.grid.comm.allgather(found))
