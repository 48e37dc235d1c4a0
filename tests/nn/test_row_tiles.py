"""Tiles of rows: each local row is in one tile, and a tile is a legal matrix on every rank."""

from itertools import pairwise, product

import pytest

from pmm3d import GridShape, LayoutError
from pmm3d.layout import Layout
from pmm3d.layout import layout as layout_module
from pmm3d.nn.tiles_of_rows import pieces_of, row_tiles

GRIDS = [GridShape(1, 1, 3, 2), GridShape(2, 1, 3, 2), GridShape(3, 2, 2, 1), GridShape(1, 1, 1, 1)]
LAYOUTS = [
    Layout(),
    Layout(("data", "z")),
    Layout(("data", "z"), units=(4, 1)),
    Layout(("data", "z", "x"), units=(4, 1)),
    Layout(("data", "z", "x")),
    Layout(("data", "z", "x"), units=({"data": 4, "z": 4}, 1)),
]
UNEQUAL = Layout(("data", "z", "x"), units=({"data": 4, "z": 4}, 1))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_local_row_is_in_one_tile_of_every_rank(grid):
    refused = 0
    for layout, rows, largest in product(LAYOUTS, (0, 4, 12, 28, 44, 60), (1, 2, 3, 5, 100)):
        try:
            tiles = row_tiles(layout, rows, grid, largest)
        except LayoutError:
            assert layout == UNEQUAL
            refused += 1
            continue
        assert sum(tile.rows for tile in tiles) == rows and tiles[0].start == 0
        assert all(one.stop == other.start for one, other in pairwise(tiles))
        found = []
        for rank in range(grid.size):
            place = grid.position(rank)
            here = layout.box((rows, 1), grid, place)
            sizes = [tile.layout.box((tile.rows, 1), grid, place).shape[0] for tile in tiles]
            own = [max(0, min(here.r1 - here.r0, tile.stop) - tile.start) for tile in tiles]
            assert sizes == own and max(sizes) <= largest, (layout, rows, largest)
            if layout.is_first(place):
                for tile in tiles:
                    box = tile.layout.box((tile.rows, 1), grid, place)
                    for start, stop, row in pieces_of(layout, rows, tile, box, grid):
                        assert (start, row) == (0, here.r0 + tile.start)
                        found += range(row, row + stop - start)
        assert sorted(found) == [*range(rows)]
    assert refused < 40


def test_rows_that_are_gathered_in_a_tile_keep_their_numbers():
    """As in a layer with sharded activations, which gathers the rows of a tile over x."""
    grid, whole = GridShape(2, 1, 2), Layout(("z", "x"))
    tile = row_tiles(whole, 16, grid, 2)[1]
    place = grid.position(2)
    held = Layout("z")
    assert pieces_of(whole, 16, tile, held.box((tile.rows, 1), grid, place), grid) == ((0, 2, 10), (2, 4, 14))


def test_a_matrix_that_fits_is_one_tile_in_its_own_layout():
    layout = Layout(("data", "z"), units=(4, 1))
    [tile] = row_tiles(layout, 20, GridShape(1, 1, 2, 1), 12)
    assert tile.layout is layout and (tile.start, tile.rows) == (0, 20)


def test_parts_that_no_layout_describes_are_refused():
    with pytest.raises(LayoutError, match="unequal parts along several axes"):
        row_tiles(UNEQUAL, 60, GridShape(3, 2, 2, 1), 5)


@pytest.mark.deadline(20)
def test_tiles_of_a_grid_of_many_ranks_need_no_pass_over_the_ranks():
    """One process finds those of any rank of 32,768, without a box for each of them."""
    grid, layout = GridShape(8, 1, 64, 64), Layout(("data", "z"), units=(2048, 1))
    rows, before = 64 * 64 * 2048, layout_module._box.cache_info().misses
    tiles = row_tiles(layout, rows, grid, 512)
    assert [(tile.start, tile.stop, tile.rows) for tile in tiles] == [
        (start, start + 512, rows // 4) for start in range(0, 2048, 512)
    ]
    place = grid.position(grid.size - 1)
    box = tiles[1].layout.box((tiles[1].rows, 1), grid, place)
    assert pieces_of(layout, rows, tiles[1], box, grid) == ((0, 512, rows - 2048 + 512),)
    assert layout_module._box.cache_info().misses - before < 10
