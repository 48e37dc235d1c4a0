"""The exchange of tokens with the owners of experts: which rows arrive in which order, bytes, sums, and refusals."""

import numpy as np
import pytest
from networks import on_grid, over_grids, spread
from samples import bits_of, to_numpy

from pmm3d import DistMatrix, DTypeError, Grid, GridError, Layout, LayoutError, nn
from pmm3d.nn.experts import Exchange, combine, dispatch, send_back

pytestmark = pytest.mark.deadline(240)

LAYOUT = Layout(("data", "z", "x"), "y")
PHASES = ("dispatch", "combine", "combine backward", "dispatch backward")
experts_on = lambda shape, data, expert: on_grid(shape, data, expert=expert)


def tokens(grid, whole, dtype="float64"):
    return nn.Tensor(spread(grid, whole, LAYOUT, dtype=dtype), requires_grad=True)


def weights(grid, whole, dtype="float64"):
    return nn.Tensor(spread(grid, whole, Layout(LAYOUT.rows), dtype=dtype), requires_grad=True)


def exchange_of(grid, x, chosen):
    return Exchange.of(grid, x, chosen[x.box.r0 : x.box.r1].copy(), chosen.shape[1])


def even(tokens, experts, top_k):
    """Token i takes the experts i top_k + j, modulo their number."""
    chosen = np.zeros((tokens, experts), bool)
    for j in range(top_k):
        chosen[np.arange(tokens), (np.arange(tokens) * top_k + j) % experts] = True
    return chosen


def bytes_of(grid):
    return [grid.ledger.total(axis="expert", phase=phase).received for phase in PHASES]


@pytest.mark.parallel([2, 4])
@over_grids({2: [("1x1x1", 2)], 4: [("2x1x1", 2)]}, expert=2)
def test_rows_arrive_by_source_expert_and_token(grid):
    """Each rank receives the tokens of its own experts, and the ledger counts exactly their bytes."""
    chosen = np.random.default_rng(1).random((13, 4)) < 0.4
    chosen[:, 2] = False
    ids = np.arange(13.0)[:, None] * [1, 10]
    x = tokens(grid, ids)
    exchange = exchange_of(grid, x, chosen)
    owner, sources = grid.axis("expert").index, grid.axis("expert").size
    box = lambda source: LAYOUT.box((13, 2), grid.shape, grid.coords.at("expert", source))
    expected = [
        [e, token]
        for source in range(sources)
        for e in range(owner, 4, sources)
        for token in range(box(source).r0, box(source).r1)
        if chosen[token, e]
    ]
    grid.ledger.reset()
    rows = dispatch(x, exchange)
    assert to_numpy(rows.local).tolist() == [[token, 10 * token] for _, token in expected]
    bounds = [bound for number in range(2) for source in exchange.chunks(number) for bound in source]
    assert len(bounds) == 2 * sources * grid.x.size and exchange.rows.here == sum(b - a for a, b in bounds)
    gates = np.random.default_rng(2).standard_normal((13, 4))
    out = combine(rows, weights(grid, gates), exchange)
    assert np.allclose(to_numpy(out.gather()), ids * (gates * chosen).sum(1, keepdims=True), atol=1e-12)
    out.backward(spread(grid, np.ones((13, 2)), LAYOUT))
    foreign = [e % sources != owner for r, e in np.argwhere(chosen[x.box.r0 : x.box.r1])]
    there = len(expected) - chosen[x.box.r0 : x.box.r1, owner::sources].sum()
    width = 8 * x.box.shape[1]
    assert bytes_of(grid) == [there * width, sum(foreign) * width, there * width, sum(foreign) * width]


@pytest.mark.parallel([4])
@experts_on("1x1x2", 2, 4)
def test_bytes_of_even_routing_are_those_of_the_formula(grid):
    """4 k T h (P-1)/P elements in a step, for T tokens on a rank; a dry run counts the same."""
    chosen, hidden, top_k = even(32, 8, 2), 6, 2

    def moved(grid, x, gates):
        exchange = exchange_of(grid, x, chosen)
        counts = grid.ledger.total(phase="expert counts").received
        out = combine(dispatch(x, exchange), gates, exchange)
        out.backward(out)
        return [counts, *bytes_of(grid)]

    expected = [8 * 8 * 3 // 4, *4 * [top_k * 8 * hidden * 3 // 4 * 8]]
    draw = np.random.default_rng(0).standard_normal
    grid.ledger.reset()
    assert moved(grid, tokens(grid, draw((32, hidden))), weights(grid, draw((32, 8)))) == expected
    with Grid.dry((1, 1, 2), 2, expert=4, rank=grid.rank) as dry:
        made = lambda columns, layout: nn.Tensor(
            DistMatrix.random(dry, (32, columns), layout=layout), requires_grad=True
        )
        assert moved(dry, made(hidden, LAYOUT), made(8, Layout(LAYOUT.rows))) == expected


@pytest.mark.parallel([2])
@experts_on("1x1x2", 1, 2)
def test_a_tokens_experts_are_added_in_the_order_of_their_numbers(grid):
    """Weights and values of experts that were not chosen are not read; a token without experts is 0."""
    values = np.array([1.0, 1e16, -1e16, 1.0])
    chosen = np.ones((6, 4), bool)
    chosen[1, 2], chosen[2], chosen[5, 0] = False, False, False
    x, gates = tokens(grid, np.ones((6, 1))), np.where(chosen, values, np.nan)
    exchange, table = exchange_of(grid, x, chosen), weights(grid, gates)
    out = combine(dispatch(x, exchange), table, exchange)
    expected = np.zeros((6, 1))
    for token, expert in np.argwhere(chosen):
        expected[token] += values[expert]
    assert bits_of(out.gather()) == bits_of(expected)
    out.backward(spread(grid, np.full((6, 1), 2.0), LAYOUT))
    assert bits_of(x.grad.gather()) == bits_of(2 * expected)
    assert np.array_equal(to_numpy(table.grad.gather()), 2.0 * chosen)


@pytest.mark.parallel([2])
@experts_on("1x1x1", 2, 2)
def test_sixteen_bits_are_combined_in_float32_and_rounded_once(grid):
    draw = np.random.default_rng(3).standard_normal
    chosen, x, gates = np.ones((5, 4), bool), draw((5, 3)).astype("float16"), draw((5, 4)).astype("float32")
    held, table = tokens(grid, x, "float16"), weights(grid, gates, "float32")
    exchange = exchange_of(grid, held, chosen)
    out = combine(dispatch(held, exchange), table, exchange)
    total = np.zeros((5, 3), "float32")
    for expert in range(4):
        total += x.astype("float32") * gates[:, expert : expert + 1]
    assert out.dtype == "float16" and bits_of(out.gather()) == bits_of(total.astype("float16"))
    out.backward(spread(grid, np.ones((5, 3)), LAYOUT, dtype="float16"))
    assert table.grad.dtype == "float32" and held.grad.dtype == "float16"


@pytest.mark.parallel([2])
@experts_on("1x1x1", 2, 2)
def test_ranks_without_tokens_take_part(grid):
    """One token on one rank; no choices at all. No rank waits for another one (fastmoe #58)."""
    for chosen in (np.array([[True, False]]), np.zeros((3, 2), bool), np.eye(2, dtype=bool)[[1, 1, 1]]):
        x, gates = tokens(grid, np.full((len(chosen), 2), 2.0)), weights(grid, np.full(chosen.shape, 0.5))
        exchange = exchange_of(grid, x, chosen)
        out = combine(dispatch(x, exchange), gates, exchange)
        assert np.array_equal(to_numpy(out.gather()), np.ones((len(chosen), 2)) * chosen.any(1, keepdims=True))
        out.backward(spread(grid, np.ones(out.shape), LAYOUT))
        assert np.array_equal(to_numpy(gates.grad.gather()), 4.0 * chosen)


@pytest.mark.parallel([2])
@experts_on("1x1x1", 2, 2)
def test_what_does_not_fit_is_refused_on_every_rank(grid, fails):
    chosen = np.ones((4, 2), bool)
    x = tokens(grid, np.ones((4, 3)))
    here = chosen[: x.box.shape[0]]
    fails(GridError, "3 experts cannot be distributed evenly over 2 ranks", lambda: Exchange.of(grid, x, here, 3))
    fails(LayoutError, "at least 1", lambda: Exchange.of(grid, x, here, 0))
    wrong = here[: len(here) - grid.rank]  # on rank 1 only
    fails(DTypeError, "2 x 2; got bool of shape", lambda: Exchange.of(grid, x, wrong, 2))
    fails(DTypeError, "numpy array of bool", lambda: Exchange.of(grid, x, here.astype(int), 2))
    other = nn.relayout(x, Layout(("data", "z"), "y"))
    fails(LayoutError, "the last one x", lambda: Exchange.of(grid, other, here, 2))
    exchange = Exchange.of(grid, x, here, 2)
    rows, gates = dispatch(x, exchange), weights(grid, np.ones((4, 2)))
    fails(LayoutError, "the exchange was made for tokens of 4 x 3", lambda: dispatch(other, exchange))
    fails(LayoutError, "rows of `dispatch`", lambda: combine(x, gates, exchange))
    fails(LayoutError, "rows of `dispatch`", lambda: combine(rows, gates, Exchange.of(grid, x, here, 2)))
    fails(LayoutError, "the weights are 4 x 2", lambda: combine(rows, weights(grid, np.ones((4, 3))), exchange))
    fails(DTypeError, "the weights are float64", lambda: combine(rows, nn.cast(gates, "float32"), exchange))


def test_a_shared_expert_runs_under_the_exchanges():
    """Between `send_back` and `combine`, in both passes."""
    with Grid.dry((1, 1, 2), expert=2) as grid:
        made = lambda shape, layout: nn.Tensor(DistMatrix.random(grid, shape, layout=layout), requires_grad=True)
        x, gates, shared = (
            made((8, 4), LAYOUT),
            made((8, 4), Layout(LAYOUT.rows)),
            nn.Linear(grid, 4, 4, dtype="float64", bias=False),
        )
        exchange = exchange_of(grid, x, even(8, 4, 2))
        coming = send_back(dispatch(x, exchange), exchange)
        beside = shared(x)
        out = combine(coming, gates, exchange) + beside
        middle = len(grid.dry_run.actions)
        out.backward(out)
        assert under(grid.dry_run.actions[:middle], "combine") == 1
        assert under(grid.dry_run.actions[middle:], "combine backward") == 2


def under(actions, phase):
    """Number of GEMMs between the beginning and the wait of the exchange of a phase."""
    first = next(index for index, each in enumerate(actions) if (each.what, each.phase) == ("begin", phase))
    last = next(i for i, each in enumerate(actions) if (each.what, each.number) == ("wait", actions[first].number))
    return sum(each.what == "gemm" for each in actions[first:last])
