"""Attention of local arrays: blocks and their order, fully masked rows, dropout, element types, dry runs."""

import numpy as np
import pytest
from loops import looped
from networks import alone
from samples import LIBRARIES, host_dtype, to_library, to_numpy
from scipy import special

from pmm3d import DistMatrix, Grid, nn
from pmm3d.arrays import Workspace, library_of
from pmm3d.layout import Layout
from pmm3d.nn.transformer import attention
from pmm3d.nn.transformer.kernel import Dropout, Partial, Rows, Visible, attend, attend_backward, block_pairs

B, A, SHARED, LENGTH, SIZE, BLOCK = 2, 4, 2, 12, 12, 4
ZIGZAG = np.array([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7])
MASKS = {
    "causal": Visible(block=BLOCK),
    "full": Visible(False, block=BLOCK),
    "window": Visible(True, 6, block=BLOCK),
    "full window": Visible(False, 3, block=BLOCK),
}
DROPS = Visible(True, None, Dropout(0.4, 3, 2, 0, 0, A, LENGTH), BLOCK)


def arrays(library="numpy", dtype="float64"):
    """q, k, v and the gradient of the result."""
    return [
        to_library(
            np.random.default_rng(seed).standard_normal((B, heads, LENGTH, SIZE)).astype(host_dtype(dtype)),
            library,
            dtype,
        )
        for seed, heads in enumerate((A, SHARED, SHARED, A))
    ]


def wide(array, shape, contents=0):
    library = library_of(array)
    made = library.empty(shape, "float64" if library.dtype(array) == "float64" else "float32")
    made[...] = contents
    return made


def attended(q, k, v, queries, parts, visible, scale=0.4, which=()):
    """The result for keys that arrive in parts, each as (rows of the arrays, Rows)."""
    into = Partial(wide(q, tuple(q.shape)), wide(q, tuple(q.shape[:3])))
    for number, ((rows, keys), part) in enumerate(zip(parts, which or [""] * len(parts))):
        arrays = q, k[:, :, rows], v[:, :, rows]
        attend(library_of(q), Workspace(), *arrays, queries, keys, visible, scale, into, not number, part)
    return into


def gradients(q, k, v, dout, result, parts, visible, scale=0.4, which=(), fresh=False):
    """dq, dk, dv for pairs of parts: ((rows, Rows) of queries, (rows, Rows) of keys)."""
    found = [wide(q, tuple(each.shape), np.nan if fresh else 0) for each in (q, k, v)]
    for ((rows, queries), (part, keys)), name in zip(parts, which or [""] * len(parts)):
        operands = q[:, :, rows], k[:, :, part], v[:, :, part]
        results = (each[:, :, rows] for each in (result.out, result.lse, dout))
        into = found[0][:, :, rows], found[1][:, :, part], found[2][:, :, part]
        options = queries, keys, visible, scale, *into, fresh, name
        attend_backward(library_of(q), Workspace(), *operands, *results, *options)
    return found


def dense(q, k, v, dout, visible, weights=1.0, seen=True, scale=0.4):
    """Result, lse and gradients from the matrix of all scores, in float64. weights: factors of the weights of the
    values."""
    q, k, v, dout = (np.asarray(each, "float64") for each in (q, k, v, dout))
    k, v = (each.repeat(A // SHARED, 1) for each in (k, v))
    away = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    mask = seen & ((away >= 0) | (not visible.causal)) & (abs(away) < (visible.window or LENGTH))
    scores = np.where(mask, q @ k.swapaxes(2, 3) * scale, -np.inf)
    lse = special.logsumexp(scores, 3)
    with np.errstate(invalid="ignore"):  # a row without a key
        p = np.nan_to_num(special.softmax(scores, 3))
    dp = (dout @ v.swapaxes(2, 3)) * weights
    ds = p * (dp - (dp * p).sum(3, keepdims=True)) * scale
    fold = lambda each: each.reshape(B, SHARED, A // SHARED, LENGTH, SIZE).sum(2)
    return (p * weights) @ v, lse, ds @ k, fold(ds.swapaxes(2, 3) @ q), fold((p * weights).swapaxes(2, 3) @ dout)


def bits(arrays, rows=slice(None)):
    return [np.ascontiguousarray(to_numpy(each)[:, :, rows]).tobytes() for each in arrays]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("visible", [*MASKS.values(), DROPS], ids=[*MASKS, "dropout"])
@looped("order", [np.arange(LENGTH), ZIGZAG])
def test_bits_do_not_depend_on_how_rows_are_spread(library, visible, order):
    """In one call, and in parts of queries and keys that meet in the order of a ring; stored in two orders."""
    q, k, v, dout = (to_library(to_numpy(each)[:, :, order], library) for each in arrays(library, "float32"))
    everything, turns = (slice(None), Rows(order)), ("before", "", "", "after")
    whole = attended(q, k, v, everything[1], [everything], visible)
    slopes = gradients(q, k, v, dout, whole, [(everything, everything)], visible)
    parts = [(slice(start, stop), Rows(order[start:stop])) for start, stop in ((0, 4), (4, 8), (8, LENGTH))]
    for number, (rows, queries) in enumerate(parts):
        keys = [parts[(number - hop) % 3] for hop in range(4)]
        found = attended(q[:, :, rows], k, v, queries, keys, visible, which=turns)
        assert bits(found) == bits(whole, rows)
    pairs = [(parts[number], parts[(number - hop) % 3]) for hop in range(4) for number in range(3)]
    found = gradients(q, k, v, dout, whole, pairs, visible, which=[each for each in turns for _ in range(3)])
    assert bits(found) == bits(slopes)


@pytest.mark.parametrize(
    ("library", "dtype"),
    [
        *((library, dtype) for library in LIBRARIES for dtype in ("float64", "float32", "float16")),
        ("torch", "bfloat16"),
    ],
)
@looped("visible", MASKS.values())
def test_masks_and_types_are_those_of_all_scores(library, dtype, visible):
    operands, rows = arrays(library, dtype), (slice(None), Rows(np.arange(LENGTH)))
    wanted = dense(*map(to_numpy, operands), visible)
    result = attended(*operands[:3], rows[1], [rows], visible)
    found = [*result, *gradients(*operands, result, [(rows, rows)], visible)]
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(to_numpy(one) - other).max() < (1e-12 if dtype == "float64" else 2e-5)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient(library):
    operands = arrays(library)
    documents = np.array([LENGTH * [0], LENGTH * [1]])
    others = np.array([LENGTH * [5], 6 * [1] + 6 * [7]])
    queries, keys = Rows(np.arange(LENGTH), documents), Rows(np.arange(LENGTH), others)
    result = attended(*operands[:3], queries, [(slice(None), keys)], MASKS["full"])
    seen = (documents[:, :, None] == others[:, None])[:, None]
    wanted = dense(*map(to_numpy, operands), MASKS["full"], seen=seen)
    found = [*result, *gradients(*operands, result, [((slice(None), queries), (slice(None), keys))], MASKS["full"])]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(to_numpy(one), other, atol=1e-12)
    assert np.isneginf(to_numpy(result.lse)[0]).all()
    assert not to_numpy(result.out)[0].any()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("visible", [*MASKS.values(), DROPS], ids=[*MASKS, "dropout"])
def test_fresh_gradients_are_those_that_are_added_to_zeros(library, visible):
    """With one block, with several, and with fully masked blocks of queries and keys."""
    operands, position = arrays(library), np.arange(LENGTH)
    everything = slice(None), Rows(position)
    packed = [
        (slice(None), Rows(position, np.repeat([numbers], B, 0))) for numbers in (8 * [0] + 4 * [1], 4 * [0] + 8 * [2])
    ]
    for queries, keys, block in ((everything, everything, BLOCK), (everything, everything, LENGTH), (*packed, BLOCK)):
        sees = visible._replace(block=block)
        result = attended(*operands[:3], queries[1], [keys], sees)
        added, fresh = (gradients(*operands, result, [(queries, keys)], sees, fresh=each) for each in (False, True))
        for one, other in zip(fresh, added, strict=True):
            np.testing.assert_array_equal(to_numpy(one), to_numpy(other))


def test_blocks_that_no_query_sees_are_not_computed():
    rows = Rows(np.arange(24))
    numbers = lambda queries, keys, visible: [
        len(before + after) for _, before, after in block_pairs(queries, keys, visible)
    ]
    assert numbers(rows, rows, MASKS["causal"]) == [1, 2, 3, 4, 5, 6]
    assert numbers(rows, rows, MASKS["window"]) == [1, 2, 3, 3, 3, 3]
    packed = Rows(rows.position, np.repeat([[0, 1, 2]], 8, axis=1))
    assert numbers(packed, packed, MASKS["full"]) == 6 * [2]
    assert numbers(Rows(np.arange(8, 12)), Rows(np.arange(12, 24)), MASKS["causal"]) == [0]
    pairs = [pair for _, before, _ in block_pairs(rows, rows, MASKS["causal"]) for pair in before]
    assert {pair.seen for pair in pairs} == {"all", "causal"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_dropout_depends_on_the_place_in_the_batch_only(library):
    q, k, v, dout = arrays(library)
    rows = slice(None), Rows(np.arange(LENGTH))
    one = to_library(np.broadcast_to(np.eye(LENGTH), v.shape).copy(), library)  # so that the result is the weights
    weights, plain = (
        to_numpy(attended(q, k, one, rows[1], [rows], each).out) for each in (DROPS, DROPS._replace(dropout=None))
    )
    seen = np.tril(np.ones((LENGTH, LENGTH), bool))
    kept = np.where(seen, weights / np.where(seen, plain, 1), 0)
    assert np.isin(kept.round(9), np.round([0, 1 / 0.6], 9)).all()
    assert abs((kept[:, :, seen] == 0).mean() - 0.4) < 0.05
    result = attended(q, k, v, rows[1], [rows], DROPS)
    found = [*result, *gradients(q, k, v, dout, result, [(rows, rows)], DROPS)]
    for one, other in zip(found, dense(*map(to_numpy, (q, k, v, dout)), DROPS, kept), strict=True):
        np.testing.assert_allclose(to_numpy(one), other, atol=1e-12)
    other_half = DROPS._replace(dropout=DROPS.dropout._replace(sequence=1, head=2))
    part = attended(q[1:, 2:], k[1:, 1:], v[1:, 1:], rows[1], [rows], other_half)
    assert bits([part.out]) == bits([result.out[1:, 2:]])


@pytest.mark.parallel([1])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@looped("options", [{}, {"dropout": 0.1}, {"block": 8}, {"block": 8, "dropout": 0.1}])
def test_a_dry_run_takes_the_memory_of_a_run(comm, library, options):
    def memory(grid):
        local = grid.library(library).made((128, 64), "float32", lambda: np.ones((128, 64)))
        x = DistMatrix(grid, local, (128, 64), Layout("data", units=(64, 1)))
        x = nn.Tensor(x, requires_grad=True)
        for _ in range(2):
            out = attention(x, x, x, size=16, **options)
            out.backward(out)
        return grid.workspace.allocated

    with alone() as grid, Grid.dry((1, 1, 1)) as dry:
        assert memory(dry) == memory(grid) > 0
        flop = sum(each.m * each.n * each.k for each in dry.dry_run.actions if each.what == "gemm")
        pairs, rows = (36, 8) if "block" in options else (1, 64)
        assert flop == 2 * 7 * pairs * 2 * 4 * rows * rows * 16
