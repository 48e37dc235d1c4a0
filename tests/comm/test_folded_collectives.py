"""Collectives along folded axes, and matrices that the ranks of one index along "expert" store."""

import numpy as np
import pytest

from pmm3d import DistMatrix, Grid, Layout
from pmm3d.errors import GridError

FOLDS = {2: [((1, 1, 1), 2, 2)], 4: [((1, 1, 2), 2, 4), ((1, 1, 1), 4, 2), ((2, 1, 2), 1, 2), ((1, 1, 4), 1, 1)]}
TARGETS = [Layout(), Layout("z", "y"), Layout.B, Layout("data", "x"), Layout("expert"), Layout((), "expert_z")]


def added_pairwise(parts):
    while len(parts) > 1:
        parts = [parts[i] if i + 1 == len(parts) else parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


@pytest.mark.parallel([2, 4])
def test_matrices_of_an_owner_and_pairwise_sums(comm):
    for shape, data, expert in FOLDS[comm.size]:
        with Grid(comm, shape, data, expert=expert) as grid:
            whole = np.fromfunction(lambda i, j: 10.0 * i + j, (7, 5))
            axis = f"expert:{3 % expert}"
            layout = Layout((axis, "x", "expert_z", "expert_data"), "y", units=({axis: 7}, 1))
            a = DistMatrix.from_global(grid, whole, layout=layout)
            assert not a.local.size or grid.coords.expert == 3 % expert
            cut = DistMatrix.from_global(grid, whole, layout=Layout(axis))  # parts not in the order of the ranks
            assert (cut.redistribute(Layout()).local == whole).all() and (cut.gather() == whole).all()
            assert (DistMatrix.from_global(grid, whole).redistribute(Layout(axis)).local == cut.local).all()
            partial = DistMatrix.from_global(grid, whole).redistribute(Layout(sums="expert"))
            assert (partial.redistribute(Layout(axis)).gather() == whole).all()
            for target in TARGETS:
                b = a.redistribute(target)
                assert (b.gather() == whole).all() and (b.redistribute(layout).local == a.local).all()
            for names in ("expert", "expert_z", "expert_data", ("expert_z", "expert_data")):
                along = grid.axis(names)
                assert along is grid.axis(names) and along.ranks[along.index] == grid.rank
                for rows in (3, 40_000):
                    given = [np.random.default_rng(rank).random((rows, 1)) for rank in along.ranks]
                    out = np.empty((rows, 1))
                    along._all_reduce_into(given[along.index], out).wait()
                    if names != "expert":
                        assert (out == added_pairwise(given)).all()
                        assert (along.all_reduce(given[along.index]).wait() == out).all()
                    else:
                        assert np.allclose(out, sum(given))
                    counts = [rows - along.size + 1] + [1] * (along.size - 1)
                    part, start = np.full((counts[along.index], 1), 2.0), sum(counts[: along.index])
                    along._reduce_scatter_into(given[along.index], part, counts, 3).wait()
                    assert np.allclose(part, 6 + sum(given)[start : start + counts[along.index]], rtol=1e-15)


@pytest.mark.parallel([2])
def test_a_number_of_expert_ranks_that_does_not_fit_is_refused_on_every_rank(comm, fails):
    fails(GridError, "3 ranks along expert do not fit grid", lambda: Grid(comm, (1, 1, 2), expert=3))
    fails(GridError, "expert is a number of ranks", lambda: Grid(comm, (1, 1, 2), expert=0))
    with Grid(comm, (1, 1, 1), 2, expert=2) as grid:
        fails(GridError, "are no group", lambda: grid.axis(("data", "expert")))
    fails(GridError, "'expert' can be the name of no further axis", lambda: Grid(comm, (1, 1, 1), axes={"expert": 2}))
