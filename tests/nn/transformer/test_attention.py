"""Attention on every grid, compared with torch in one process: masks, packed sequences, grouped heads, blocks,
types."""

from itertools import count, cycle, islice, product
from math import prod

import numpy as np
import pytest
from differences import assert_gradients_are_differences
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import MANY_GRIDS, on_each_grid, over_grids, spread
from samples import TESTED, to_numpy
from torch_reference import by_rank_0, torch_attention

from pmm3d import DTypeError, Grid, LayoutError, Pmm3dError, nn
from pmm3d.layout import SEQ, ULYSSES, Layout
from pmm3d.nn.transformer import attention

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

SEQUENCES, LENGTH, SIZE = 4, 10, 3
DOCUMENTS = np.searchsorted([0, 3, 10, 14, 15, 31], np.arange(SEQUENCES * LENGTH), "right")
CASES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 4},
    "wide window": {"window": 99},
    "full window": {"causal": False, "window": 3},
    "packed": {"documents": DOCUMENTS},
    "packed, full": {"documents": DOCUMENTS, "causal": False},
    "packed, window": {"documents": DOCUMENTS, "window": 2},
    "scale": {"scale": 0.3},
}
HEADS = [(4, 4), (6, 2), (5, 1), (3, 3), (1, 1)]
"""Numbers of heads of q, and of k and v: even and uneven over 2, 4 and 8 ranks, grouped, and one for all."""
BLOCKS = 512, 4
WHOLE = {"data": LENGTH, "z": LENGTH}
LAYOUTS = [("x", "x"), ("y", "y"), ((), ()), ("x", "y"), (("x", "y"), "x"), ((), ("y", "x"))]
"""Axes of the columns of q, and of k and v."""


def drawn(heads, seed):
    return np.random.default_rng(seed).standard_normal((SEQUENCES * LENGTH, heads * SIZE))


def given_arrays(heads, shared):
    return [drawn(each, seed) for seed, each in enumerate((heads, shared, shared, heads))]


def of_torch():
    """(case, heads) -> result, gradients of q, k and v."""
    return {
        (title, heads): torch_attention(*given_arrays(*heads), LENGTH, SIZE, **options)
        for (title, options), heads in product(CASES.items(), HEADS)
    }


def of_grid(
    grid,
    heads,
    shared,
    layouts=("x", "x"),
    library=TESTED,
    rows=WHOLE,
    unit=SIZE,
    dtype="float64",
    documents=None,
    **options,
):
    """The result and the gradients, gathered."""
    of_q, of_k = (Layout(("data", "z"), cols, units=(rows, unit)) for cols in layouts)
    *operands, slope = given_arrays(heads, shared)
    leaves = [
        nn.Tensor(spread(grid, each, layout, library, dtype), requires_grad=True)
        for each, layout in zip(operands, (of_q, of_k, of_k))
    ]
    if documents is not None:
        options["documents"] = spread(grid, documents[:, None], Layout("z", units=(LENGTH, 1)), library)
    out = attention(*leaves, size=SIZE, **options)
    assert out.layout.cols == of_q.cols
    out.backward(spread(grid, slope, out.layout, library, dtype))
    return [np.asarray(to_numpy(each.gather(), library), "float64") for each in (out, *(leaf.grad for leaf in leaves))]


def largest_error(found, wanted):
    return max(np.abs(one - other).max() for one, other in zip(found, wanted, strict=True))


def in_turn(cases):
    """The cases in steps of 7, for ever: a few in a row differ in everything."""
    every = list(cases)
    return (every[7 * number % len(every)] for number in count())


@pytest.fixture
def expected(comm):
    return by_rank_0(comm, of_torch)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_attention_is_torchs_on_every_grid(comm, expected, library):
    cases, layouts_of = in_turn(product(CASES, HEADS, BLOCKS)), cycle(LAYOUTS)

    def check(grid):
        for title, heads, block in islice(cases, len(HEADS) * len(CASES) if all_tests else 7):
            layouts = next(layouts_of)
            with given(case=title, heads=heads, block=block, layouts=layouts):
                found = of_grid(grid, *heads, layouts, library, block=block, **CASES[title])
                assert largest_error(found, expected[title, heads]) < 1e-12

    on_each_grid(comm, check, MANY_GRIDS[comm.size])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_one_tensor_of_queries_keys_and_values_gives_the_same(comm, expected, library):
    """Columns are stored head by head. Heads are split over ranks, cut by them, or replicated, and ranks may share
    sequences."""
    cases, layouts_of = (
        in_turn(product(CASES, [heads for heads in HEADS if heads[0] == heads[1]], BLOCKS)),
        cycle(product(("x", ("x", "y"), (), "y"), (3 * SIZE, 1))),
    )

    def together(*parts):
        return np.stack([each.reshape(SEQUENCES * LENGTH, -1, SIZE) for each in parts], 2).reshape(len(parts[0]), -1)

    def check(grid):
        for title, heads, block in islice(cases, 7):
            cols, unit = next(layouts_of)
            with given(case=title, heads=heads, block=block, cols=cols, unit=unit):
                *operands, slope = given_arrays(*heads)
                inside = [axis for axis in (SEQ, ULYSSES) if axis in grid.shape.names]
                layout = Layout(("data", "z", *inside), cols, units=(WHOLE, unit))
                fused = nn.Tensor(spread(grid, together(*operands), layout, library), requires_grad=True)
                options = dict(CASES[title])
                if "documents" in options:
                    options["documents"] = spread(grid, DOCUMENTS[:, None], Layout("z", units=(LENGTH, 1)), library)
                out = attention(fused, size=SIZE, block=block, **options)
                out.backward(spread(grid, slope, out.layout, library))
                found = [np.asarray(to_numpy(each.gather(), library), "float64") for each in (out, fused.grad)]
                result, *slopes = expected[title, heads]
                assert largest_error(found, [result, together(*slopes)]) < 1e-12

    on_each_grid(comm, check, MANY_GRIDS[comm.size])
    for axes in ({"seq": 2}, {"ulysses": 2}, {"seq": 2, "ulysses": 2}):
        if comm.size % prod(axes.values()) == 0:
            with given(axes=axes), Grid(comm, (comm.size // prod(axes.values()), 1, 1), axes=axes) as grid:
                check(grid)


@pytest.mark.parametrize(
    "options",
    [{"rows": {"data": LENGTH}}, {"unit": 1}, {"rows": {"data": LENGTH}, "unit": 1, "layouts": (("y", "x"), "x")}],
)
@over_grids(MANY_GRIDS)
def test_sequences_and_heads_that_are_cut_are_brought_together(grid, expected, options):
    assert largest_error(of_grid(grid, 6, 2, **options, **CASES["packed"]), expected["packed", (6, 2)]) < 1e-12


ROWS = 2 * LENGTH
SAME = 3 * [(ROWS, 6)]
REFUSED = [
    (LayoutError, "not a multiple of 5 columns", 3 * [(ROWS, 12)], {"size": 5}),
    (LayoutError, "cannot share", [(ROWS, 9), (ROWS, 6), (ROWS, 6)], {}),
    (LayoutError, "need the same rows", [(ROWS, 6), (ROWS, 6), (ROWS, 3)], {}),
    (LayoutError, "need the same rows", [(ROWS, 6), (LENGTH, 6), (LENGTH, 6)], {}),
    (LayoutError, "6 columns are no whole number of units of 9", SAME[:1], {}),
    (LayoutError, "k or v is missing", SAME[:2], {}),
    (LayoutError, "documents must be integers", SAME, {"documents": np.ones((ROWS, 2))}),
    (Pmm3dError, "window is a number of rows", SAME, {"window": 0}),
    (Pmm3dError, "window is a number of rows, at least 1; got 2.5", SAME, {"window": 2.5}),
    (Pmm3dError, "block is a number of rows", SAME, {"block": 0}),
    (Pmm3dError, "dropout must be at least 0 and below 1", SAME, {"dropout": 1.0}),
    (Pmm3dError, "scale must be a finite number, .* got nan", SAME, {"scale": float("nan")}),
    (Pmm3dError, "scale must be a finite number, .* got inf", SAME, {"scale": float("inf")}),
    (Pmm3dError, "parallel must be one of auto, ring, ulysses; got 'rings'", SAME, {"parallel": "rings"}),
    (DTypeError, "the same type, one of float16", SAME, {"dtype": "complex64"}),
]


@pytest.mark.parallel([2], thorough=[1, 4, 8])
@looped("kind, text, shapes, options", REFUSED)
def test_operands_that_do_not_fit_together_are_refused(some_grid, fails, kind, text, shapes, options):
    layout, options = Layout(units=(LENGTH, 1)), {"size": SIZE, **options}
    dtype = options.pop("dtype", "float64")
    tensors = [spread(some_grid, np.ones(shape), layout, "numpy", dtype) for shape in shapes]
    if "documents" in options:
        options["documents"] = spread(some_grid, options["documents"], Layout(), "numpy")
    fails(kind, text, lambda: attention(*tensors, **options))


@over_grids()
@looped("rows, columns", [(0, 6), (2 * LENGTH, 0), (2 * LENGTH, SIZE), (LENGTH, SIZE)])
def test_no_sequences_no_heads_and_fewer_heads_than_ranks(grid, rows, columns):
    layout = Layout(("data", "z"), ("x", "y"), units=(LENGTH, SIZE))
    x = nn.Tensor(spread(grid, np.ones((rows, columns)), layout), requires_grad=True)
    out = attention(x, x, x, size=SIZE)
    out.backward(out)
    assert np.allclose(to_numpy(out.gather()), 1, atol=1e-12)
    assert x.grad.shape == (rows, columns)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_gradients_are_differences(some_grid):
    layout = Layout(("data", "z"), "x", units=(4, 2))
    inputs = {"x": ((8, 8), layout), "w": ((8, 4), layout), "v": ((8, 4), layout)}
    assert_gradients_are_differences(
        some_grid,
        {
            title: (inputs, lambda t, options=options: attention(t["x"], t["w"], t["v"], size=2, block=2, **options))
            for title, options in {"dropout": {"dropout": 0.3, "seed": 4}, "window": {"window": 2}}.items()
        },
    )
