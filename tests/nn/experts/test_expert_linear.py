"""A layer of experts by its operations: values and gradients of a dense reference, on each number of ranks along
"expert"; the same bits on all of them; the bytes of the formula."""

import numpy as np
import pytest
from loops import given
from networks import alike, on_grid, spread
from samples import bits_of, to_numpy

from pmm3d import DTypeError, Grid, Layout, LayoutError, nn
from pmm3d.nn.experts import Exchange, combine, dispatch, expert_linear, expert_weight_layout

pytestmark = pytest.mark.deadline(240)

TOKENS, HIDDEN, INNER, EXPERTS = 26, 6, 10, 4
SHAPES = {
    1: [("1x1x1", 1, 1, (1,))],
    2: [("1x1x1", 2, 1, (1, 2)), ("1x1x2", 1, 1, (1, 2)), ("2x1x1", 1, 1, (1,)), ("1x2x1", 1, 1, (1,))],
    4: [
        ("1x1x1", 4, 1, (1, 2, 4)), ("1x1x2", 2, 1, (1, 2, 4)), ("2x1x1", 2, 1, (1, 2)), ("1x2x2", 1, 1, (1, 2)),
        ("1x1x1", 2, 2, (1, 2)),
    ],
}  # fmt: skip
"""Number of ranks -> (shape, data, seq, numbers of ranks along expert)."""


def on_folds(comm, body, shapes=SHAPES):
    """Call body(grid) for each number of ranks along "expert" of each shape. Return shape -> results."""
    results = {}
    for shape, data, seq, numbers in shapes[comm.size]:
        results[shape, data, seq] = []
        for expert in numbers:
            with given(grid=shape, data=data, seq=seq, expert=expert):
                with Grid(comm, shape, data, seq=seq, expert=expert, device_transport="direct") as grid:
                    results[shape, data, seq].append(body(grid))
    return results


def table(tokens=TOKENS, experts=EXPERTS, seed=0):
    """Choices of all tokens. Expert 1 has no tokens, some tokens have none, and the others up to three experts."""
    chosen = np.random.default_rng(seed).random((tokens, experts)) < 0.5
    chosen[:, 1] = False
    chosen[3:5] = False
    return chosen


def layer(x, gates, ups, downs, exchange):
    inner = nn.relu(expert_linear(dispatch(x, exchange), ups, exchange))
    return combine(expert_linear(inner, downs, exchange), gates, exchange)


class Case:
    """A layer of experts: down(relu(up x)), weighted. k: axis of the columns of the tokens."""

    def __init__(self, dtype="float64", tokens=TOKENS, chosen=None, seed=0):
        draw = np.random.default_rng(seed).standard_normal
        self.dtype, self.chosen = dtype, table(tokens) if chosen is None else chosen
        experts = self.chosen.shape[1]
        self.x, self.g = draw((tokens, HIDDEN)), draw((tokens, HIDDEN))
        self.gates = draw((tokens, experts))
        self.ups, self.downs = draw((experts, HIDDEN, INNER)), draw((experts, INNER, HIDDEN))

    def dense(self):
        """Result, and the gradients of x, of the weights of tokens, and of the weights of experts."""
        out, dx, dgates = np.zeros_like(self.x), np.zeros_like(self.x), np.zeros_like(self.gates)
        dups, ddowns = np.zeros_like(self.ups), np.zeros_like(self.downs)
        for e in range(len(self.ups)):
            at = np.flatnonzero(self.chosen[:, e])
            rows = self.x[at] @ self.ups[e]
            inner, gate = np.maximum(rows, 0), self.gates[at, e : e + 1]
            y = inner @ self.downs[e]
            out[at] += gate * y
            dgates[at, e] = (self.g[at] * y).sum(1)
            dy = gate * self.g[at]
            ddowns[e] = inner.T @ dy
            drows = dy @ self.downs[e].T * (rows > 0)
            dups[e] = self.x[at].T @ drows
            dx[at] += drows @ self.ups[e].T
        return [out, dx, dgates, *dups, *ddowns]

    def tensors(self, grid, k="y", library=None):
        n = {"x": "y", "y": "x"}[k]
        rows = ("data", "z", *grid.shape.names[4:], n)
        options = {"library": library} if library else {}
        made = lambda array, layout, dtype: spread(grid, array, layout, dtype=dtype, **options)
        wide = "float32" if self.dtype in ("float16", "bfloat16") else self.dtype
        x = nn.Tensor(made(self.x, Layout(rows, k), self.dtype), requires_grad=True)
        gates = nn.Tensor(made(self.gates, Layout(rows), wide), requires_grad=True)
        ranks = grid.shape.expert
        precision = nn.Precision(self.dtype)
        weights = [
            [
                nn.Parameter(made(each, expert_weight_layout(e, each.shape[0], axis, ranks), self.dtype), precision)
                for e, each in enumerate(arrays)
            ]
            for arrays, axis in ((self.ups, k), (self.downs, n))
        ]
        exchange = Exchange.of(grid, x, self.chosen[x.box.r0 : x.box.r1].copy(), len(self.ups))
        return x, gates, *weights, exchange

    def run(self, grid, k="y", passes=1, **options):
        """The same as `dense`, gathered, by the operations on the grid."""
        x, gates, ups, downs, exchange = self.tensors(grid, k, **options)
        for _ in range(passes):
            out = layer(x, gates, ups, downs, exchange)
            out.backward(spread(grid, self.g, out.layout, x.library, dtype=self.dtype))
        gathered = [out.gather(), *(each.grad.gather() for each in (x, gates, *ups, *downs))]
        return [to_numpy(each, x.library) for each in gathered]


@pytest.mark.parallel([1, 2, 4])
def test_values_and_gradients_are_those_of_a_dense_layer(comm):
    """Also with experts and ranks without tokens; bits do not depend on the number of ranks along expert."""
    case = Case()
    expected = case.dense()
    for shape, results in on_folds(comm, lambda grid: case.run(grid, "x" if grid.shape.y > 1 else "y")).items():
        for result in results:
            for got, wanted in zip(result, expected, strict=True):
                assert np.abs(got - wanted).max() <= 1e-12, shape
        assert all(alike(each, results[0]) for each in results)


@pytest.mark.parallel([2])
@on_grid("2x1x1")
def test_bytes_of_a_tensor_parallel_layer(grid):
    """On n, rows are gathered before the first product and reduce-scattered after the second one."""
    case = Case()
    x, gates, ups, downs, exchange = case.tensors(grid)
    r, own, h = exchange.rows.here, exchange.slices.here, HIDDEN
    grid.ledger.reset()
    out = combine(expert_linear(expert_linear(dispatch(x, exchange), ups, exchange), downs, exchange), gates, exchange)
    out.backward(spread(grid, case.g, out.layout))
    received = lambda phase: grid.ledger.total(axis="x", phase=phase).received // 8
    assert [received(phase) for phase in ("gather I", "reduce O", "gather dO", "reduce dI")] == [
        (r - own) * h, own * h, (r - own) * h, own * h
    ]  # fmt: skip
    assert grid.ledger.total(axis="expert").received == 0


@pytest.mark.parallel([2])
@on_grid("2x1x1")
def test_bits_do_not_depend_on_overlap(grid):
    case, results = Case(), []
    for overlap in (nn.Overlap(), nn.Overlap.none(), nn.Overlap(regather_inputs=True)):
        nn.Tape.of(grid).parallel.overlap = overlap
        results.append([bits_of(each) for each in case.run(grid)])
    assert results[1:] == results[:1] * 2


@pytest.mark.parallel([4])
@on_grid("1x1x2", 2)
def test_a_sharded_weight_is_gathered_and_two_passes_add_up(grid):
    """Weights are split over expert_z, and gradients are summed along expert_z and expert_data."""
    case, sizes = Case(), 2 * EXPERTS * HIDDEN * INNER
    grid.ledger.reset()
    received = lambda phase: grid.ledger.total(phase=phase).received // 8
    case.run(grid)
    assert [received(phase) for phase in ("gather W", "reduce dW", "reduce data")] == [sizes // 2] * 3
    once, twice = case.run(grid), case.run(grid, passes=2)
    for one, both in zip(once[1:], twice[1:]):
        assert np.abs(2 * one - both).max() <= 1e-11
    x, gates, ups, downs, exchange = case.tensors(grid)
    for each in ups:
        each.requires_grad_(False)
    out = layer(x, gates, ups, downs, exchange)
    out.backward(spread(grid, case.g, out.layout))
    assert all(each.grad is None for each in ups) and np.array_equal(to_numpy(x.grad.gather()), once[1])
    assert all(np.array_equal(to_numpy(each.grad.gather()), wanted) for each, wanted in zip(downs, once[-EXPERTS:]))


@pytest.mark.parallel([2])
@pytest.mark.parametrize("dtype, library", [("float16", "numpy"), ("bfloat16", "torch"), ("float64", "torch")])
@on_grid("1x1x1", 2, expert=2)
def test_types_and_libraries(grid, dtype, library):
    """16-bit products, with gradients of weights in float32, near the dense reference."""
    case = Case(dtype)
    for got, wanted in zip(case.run(grid, library=library), case.dense(), strict=True):
        assert np.abs(got - wanted).max() <= (1e-12 if dtype == "float64" else 0.06 * max(1, np.abs(wanted).max()))


@pytest.mark.parallel([2])
@on_grid("1x1x1", 2, expert=2)
def test_what_does_not_fit_is_refused_on_every_rank(grid, fails):
    x, _, ups, downs, exchange = Case().tensors(grid)
    rows = dispatch(x, exchange)
    fails(LayoutError, "there are 4 experts; got 3 weights", lambda: expert_linear(rows, ups[:3], exchange))
    fails(LayoutError, "needs weights of 6 rows, all of one shape", lambda: expert_linear(rows, downs, exchange))
    turned = [ups[1], ups[0], *ups[2:]]
    fails(LayoutError, "the weight of expert 0 is in", lambda: expert_linear(rows, turned, exchange))
    fails(LayoutError, "x has the rows of `dispatch`", lambda: expert_linear(x, ups, exchange))
    inner = expert_linear(rows, ups, exchange)
    other = Exchange.of(grid, x, table()[x.box.r0 : x.box.r1], EXPERTS)
    fails(LayoutError, "of the same exchange", lambda: expert_linear(inner, downs, other))
    fails(DTypeError, "", lambda: expert_linear(nn.cast(rows, "float32"), ups, exchange))
