"""Matrices in tiles for tests: what a rank holds of one, and random ways of lying."""

import numpy as np
from hypothesis import strategies as st

from pmm3d import BlockCyclic, Blocks
from pmm3d.layout import OnGrid, Placement


def indices(dealt, part):
    return [index for run in dealt.runs(part) for index in range(run.start, run.stop)]


def places(dealt, part):
    """Where a part stores them."""
    return [run.local + index for run in dealt.runs(part) for index in range(run.stop - run.start)]


def held(tiled, rank, whole, more=0, mark=-77):
    """A rank's arrays, with `more` rows and columns than they need; what no element is in is marked."""
    arrays = []
    for tile, (rows, cols) in zip(tiled.tiles(rank), tiled.extents(rank)):
        array = np.full((rows + more, cols + more), mark, whole.dtype, order=tiled.order)
        array[np.ix_(places(tiled.rows, tile.row), places(tiled.cols, tile.col))] = \
            whole[np.ix_(indices(tiled.rows, tile.row), indices(tiled.cols, tile.col))]
        arrays.append(array)
    return arrays


def drawn(random, ranks, shape):
    """A BlockCyclic or Blocks of that shape, the same for the same numpy.random.Generator."""
    number = lambda low, high: int(random.integers(low, high))
    if random.integers(2):
        rows = number(1, ranks + 1)
        process_grid = rows, number(1, ranks // rows + 1)
        return BlockCyclic(shape, (number(1, 7), number(1, 7)), process_grid, "RC"[number(0, 2)],
                           (number(0, process_grid[0]), number(0, process_grid[1])),
                           tuple(map(int, random.permutation(ranks)[: process_grid[0] * process_grid[1]])))
    cuts = [[0, *sorted(number(0, size + 1) for _ in range(number(0, 5))), size] for size in shape]
    owners = random.integers(0, ranks, (len(cuts[0]) - 1, len(cuts[1]) - 1)).tolist()
    return Blocks(*cuts, owners, "CF"[number(0, 2)])


@st.composite
def tilings(draw, shape, ranks, layouts, grids):
    """Any of the three kinds, of a matrix of that shape on up to so many ranks."""
    if draw(st.integers(0, 2)):
        return drawn(np.random.default_rng(draw(st.integers(0, 10**6))), ranks, shape)
    grid = draw(grids)
    ranks_of = draw(st.none() | st.permutations(range(ranks)).map(lambda order: tuple(order[: grid.size])))
    return OnGrid(Placement(shape, draw(layouts(shape, grid)), grid), draw(st.sampled_from("CF")), ranks_of)
