"""Attention of local arrays: softmax(scale q k^T) v in blocks, with the log-sum-exp of each row.

Scores are computed for one block of queries and one block of keys at a time (Rabe, Staats 2021; Dao et al. 2022), so
memory is rows x block. Positions in the sequence determine the blocks, and the order of keys for a block of queries is
fixed. So the bits of a row do not depend on the other rows of an array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...arrays import Array, NumpyLibrary, Workspace, parallel_rows, random
from ...layout import LOW_PRECISION
from ..compute import array_namespace
from .visible import Dropout, Pair, Pairs, Rows, Visible, block_pairs

NONE = -float("inf")
"""Logarithm of an empty sum."""


class Partial(NamedTuple):
    """Attention to a part of the keys. out: (b, a, rows, size), mean of the values weighted with exp(score), or 0 if a
    query sees no key. lse: (b, a, rows), logarithm of the sum of exp(score), or -inf."""

    out: Array
    lse: Array


class _Block(NamedTuple):
    """A pair of blocks, and the options of its scores."""

    library: NumpyLibrary
    work: Workspace
    queries: Rows
    keys: Rows
    visible: Visible
    scale: float
    pair: Pair

    def bias(self, dtype: str) -> Array | None:
        """Bias of the scores: (1, rows, keys), or (b, rows, keys) with documents. Contains 0 if a query sees a key, and
        -inf otherwise. None if each query sees each key."""
        pair, documents = self.pair, (self.queries.document, self.keys.document)
        if pair.seen == "all":
            return None
        away = self.queries.position[pair.queries, None] - self.keys.position[None, pair.keys]
        mask = (away >= 0 if self.visible.causal else np.ones(away.shape, bool))[None]
        if self.visible.window is not None:
            mask = mask & (abs(away) < self.visible.window)
        if documents[0] is not None and documents[1] is not None:
            mask = mask & (documents[0][:, pair.queries, None] == documents[1][:, None, pair.keys])
        return self.library.from_numpy(np.where(mask, 0, NONE), dtype)

    def dropout_mask(self, dropout: Dropout, sequence: int, heads: slice, part: slice, dtype: str) -> Array:
        """Dropout mask of one sequence: (heads, rows of `part`, keys)."""
        head, length = np.arange(heads.start, heads.stop, heads.step) + dropout.head, dropout.length
        query = self.queries.position[self.pair.queries][part]
        place = ((sequence + dropout.sequence) * dropout.heads + head)[:, None] * length + query
        index = place[:, :, None] * length + self.keys.position[self.pair.keys]
        words = self.library.from_numpy(index, self.library.dtype(self.library.words(0, 1)))
        mask = random.at_least(random.bits(words, dropout.seed, dropout.stream), int(dropout.p * 2**64))
        return self.library.astype(mask, dtype)


def attend(
    library: NumpyLibrary,
    work: Workspace,
    q: Array,
    k: Array,
    v: Array,
    queries: Rows,
    keys: Rows,
    visible: Visible,
    scale: float,
    into: Partial,
    fresh: bool = True,
    part: str = "",
    bound: Pairs | None = None,
) -> None:
    """Compute the attention of queries to keys.

    q is (b, a, rows, size), with a stride of 1 along size. k and v are (b, a_kv, rows of keys, size). a is a multiple
    of a_kv: consecutive heads of q share a head of k and v. `into` is the result, in float32 for low precision. If
    `fresh` is False, `into` contains the attention to other keys, and these keys are merged. `part` "before" or "after"
    selects the first or the second list of pairs of `block_pairs`. `bound` is its result, if it is known.

    Torch arrays on the host without dropout use torch's flash kernel. All others use batched GEMMs, with work memory
    for a_kv x block x block scores. Low precision is computed in float32.

        >>> x, rows = np.ones((1, 2, 3, 4)), Rows(np.arange(3))
        >>> result = Partial(np.empty((1, 2, 3, 4)), np.empty((1, 2, 3)))
        >>> attend(NumpyLibrary(), Workspace(), x, x, x, rows, rows, Visible(), 0.5, result)
        >>> result.lse[0, 0].round(3).tolist()
        [2.0, 2.693, 3.099]
    """
    q, k, v = _widened(library, q, k, v)
    flash, dtype = _flash_serves(library, visible), library.dtype(q)
    every = block_pairs(queries, keys, visible) if bound is None else bound
    for rows, before, after in every if 0 not in q.shape else ():
        pairs = [*(before if part != "after" else ()), *(after if part != "before" else ())]
        target = Partial(into.out[:, :, rows], into.lse[:, :, rows])
        if fresh and not pairs:
            target.out[...], target.lse[...] = 0, NONE
        for number, pair in enumerate(pairs):
            block = _Block(library, work, queries, keys, visible, scale, pair)
            operands = q[:, :, rows], k[:, :, pair.keys], v[:, :, pair.keys]
            compute = _flash if flash else _blockwise
            if fresh and not number:
                compute(block, *operands, target)
                continue
            with (
                work.borrow(tuple(target.out.shape), dtype, library) as out,
                work.borrow(tuple(target.lse.shape), dtype, library) as lse,
            ):
                compute(block, *operands, Partial(out, lse))
                _merge(library, target, Partial(out, lse))


def attend_backward(
    library: NumpyLibrary,
    work: Workspace,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    queries: Rows,
    keys: Rows,
    visible: Visible,
    scale: float,
    dq: Array,
    dk: Array,
    dv: Array,
    fresh: bool = False,
    part: str = "",
    bound: Pairs | None = None,
) -> None:
    """Add the gradients by q, k and v to dq, dk and dv, in float32 or wider. Scores are computed again.

    `out` and `lse` are the attention of the queries to all of their keys, also on other ranks. `dout` is the gradient
    of `out`. If `fresh` is True, dq, dk and dv are overwritten. The other arguments are as in `attend`. The first lists
    of pairs (`block_pairs`) of all blocks of queries are processed before their second lists.
    """
    q, k, v, out, dout = _widened(library, q, k, v, out, dout)
    compute = _flash_backward if _flash_serves(library, visible) else _blockwise_backward
    every = block_pairs(queries, keys, visible) if bound is None else bound
    lists = every if 0 not in q.shape else []
    before, after = [pair for each in lists for pair in each[1]], [pair for each in lists for pair in each[2]]
    pairs = [*(before if part != "after" else ()), *(after if part != "before" else ())]
    unset = [{each[dim].start: each[dim].stop for each in pairs} for dim in range(2)]
    if fresh and [sum(stop - start for start, stop in each.items()) for each in unset] != [q.shape[2], k.shape[2]]:
        dq[...], dk[...], dv[...], fresh = 0, 0, 0, False
    for pair in pairs:
        rows, some, block = pair.queries, pair.keys, _Block(library, work, queries, keys, visible, scale, pair)
        betas = [0 if fresh and each.pop(part.start, None) else 1 for each, part in zip(unset, pair[:2])]
        compute(
            block,
            q[:, :, rows],
            k[:, :, some],
            v[:, :, some],
            out[:, :, rows],
            lse[:, :, rows],
            dout[:, :, rows],
            dq[:, :, rows],
            dk[:, :, some],
            dv[:, :, some],
            betas,
        )


def _widened(library: NumpyLibrary, *arrays: Array) -> list[Array]:
    return [library.astype(each, "float32") if library.dtype(each) in LOW_PRECISION else each for each in arrays]


def _merge(library: NumpyLibrary, target: Partial, part: Partial) -> None:
    """Merge attention to other keys into the target. Overwrites `part`."""
    if not library.has_data:
        library.passed("attention", *target, *part)
        return
    (out, lse), (more, lse_of_more) = target, part
    if library.on_host:  # numpy's exponentials do not depend on an element's place in the array
        lse, lse_of_more = library.to_numpy(lse), library.to_numpy(lse_of_more)
    xp = array_namespace(lse)
    both = xp.logaddexp(lse, lse_of_more)
    shift = xp.where(both == NONE, 0, both)
    weights = [xp.exp(each - shift)[..., None] for each in (lse, lse_of_more)]
    if library.on_host:
        weights = [library.from_numpy(weight, library.dtype(out)) for weight in weights]
    out *= weights[0]
    more *= weights[1]
    out += more
    lse[...] = both


def _flash_serves(library: NumpyLibrary, visible: Visible) -> bool:
    return library.kind == "torch" and visible.dropout is None


def _flash(block: _Block, q: Array, k: Array, v: Array, target: Partial) -> None:
    """Attention of one block of queries to one block of keys, by torch's kernel."""
    library, causal = block.library, block.pair.seen == "causal"
    if not library.has_data:
        _record(block, q, k, 2, target.out, target.lse)
        return
    bias = None if causal else block.bias(library.dtype(q))
    kernel = library.xp.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, causal, attn_mask=None if bias is None else bias[:, None], scale=block.scale)
    if bias is not None:  # torch returns 0 for a query that sees no key
        lse = lse.masked_fill((bias == NONE).all(-1)[:, None], NONE)
    target.out[...], target.lse[...] = out, lse


def _flash_backward(
    block: _Block,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    betas: Sequence[int],
) -> None:
    """dq = betas[0] dq + gradient by q. dk and dv likewise, with betas[1]."""
    library, causal = block.library, block.pair.seen == "causal"
    if not library.has_data:
        _record(block, q, k, 5, dq, dk, dv)
        return
    bias = None if causal else block.bias(library.dtype(q))
    kernel = library.xp.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = kernel(
        dout,
        q,
        k,
        v,
        out,
        lse.masked_fill(lse == NONE, 0),
        0.0,
        causal,
        attn_mask=None if bias is None else bias[:, None],
        scale=block.scale,
    )
    for total, part, beta in zip((dq, dk, dv), gradients, (betas[0], *2 * [betas[1]])):
        if beta:
            total += part
        else:
            total[...] = part


def _record(block: _Block, q: Array, k: Array, gemms: int, *results: Array) -> None:
    """Record a block in a dry run, with this number of GEMMs of the size of its scores."""
    from ...arrays import DryLibrary  # loaded by the dry run

    (b, a, rows, size), library = q.shape, block.library
    assert isinstance(library, DryLibrary)
    for _ in range(gemms):
        library.run.multiplied(b * a * rows, k.shape[2], size, library.dtype(q), "nt" if size > 1 else "nn")
    library.passed("attention", *results)


def _items(q: Array, k: Array) -> Iterator[tuple[int, slice]]:
    """Yield (sequence, query heads) for each batched GEMM. Its query heads use different heads of k and v."""
    a, group = q.shape[1], q.shape[1] // max(1, k.shape[1])
    for sequence in range(q.shape[0]):
        for first in range(group):
            yield sequence, slice(first, a, group)


def _transposed(library: NumpyLibrary, array: Array) -> Array:
    """View of (items, rows, columns) with rows and columns exchanged."""
    if library.has_data:
        return array.swapaxes(1, 2)
    (items, rows, cols), strides = array.shape, library.strides(array)
    return library.as_strided(array, (items, cols, rows), (strides[0], strides[2], strides[1]))


def _blockwise(block: _Block, q: Array, k: Array, v: Array, target: Partial) -> None:
    """Attention of one block of queries to one block of keys, by batched GEMMs."""
    library, work, dtype = block.library, block.work, block.library.dtype(q)
    biases = block.bias(dtype) if library.has_data else None
    for sequence, heads in _items(q, k):
        out, key = target.out[sequence, heads], k[sequence]
        with work.borrow((*out.shape[:2], key.shape[1]), dtype, library) as scores:
            library.gemm_batched(q[sequence, heads], _transposed(library, key), scores, block.scale, 0, work)
            lse = target.lse[sequence, heads]
            inverse = _exponentials(block, scores, _of(biases, sequence), sequence, heads, lse)
            library.gemm_batched(scores, v[sequence], out, 1, 0, work)
        out *= inverse


def _of(biases: Array | None, sequence: int) -> Array | None:
    return None if biases is None else biases[sequence % biases.shape[0]]


def _exponentials(block: _Block, scores: Array, bias: Array | None, sequence: int, heads: slice, lse: Array) -> Array:
    """Replace scores by exp(score - row maximum), with dropout, and set lse. Return the factor that normalizes the sum
    of values."""
    library, dropout = block.library, block.visible.dropout
    if not library.has_data:
        library.passed("attention", scores, lse)
        return 1.0
    xp, dtype, factor = array_namespace(scores), library.dtype(scores), 1 if dropout is None else 1 / (1 - dropout.p)
    inverse = library.empty((*lse.shape, 1), dtype)

    def compute(part: slice) -> None:
        own = scores[:, part]
        if bias is not None:
            own += bias[part]
        largest = xp.max(own, axis=2, keepdims=True)
        largest = xp.where(largest == NONE, 0, largest)
        own -= largest
        xp.exp(own, out=own)
        total = xp.sum(own, axis=2, keepdims=True)
        none = total == 0
        total = xp.where(none, 1, total)
        lse[:, part] = xp.where(none, NONE, largest + xp.log(total))[:, :, 0]
        inverse[:, part] = factor / total
        if dropout is not None:
            own *= block.dropout_mask(dropout, sequence, heads, part, dtype)

    _by_queries(library, compute, scores)
    return inverse


def _by_queries(library: NumpyLibrary, compute: Callable[[slice], None], scores: Array) -> None:
    """Call compute(rows) on slices of scores (heads, rows, keys) that fit the CPU's cache."""
    heads, rows, keys = scores.shape
    parallel_rows(library, compute, (rows, heads * keys))


def _blockwise_backward(
    block: _Block,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    betas: Sequence[int],
) -> None:
    library, work, dtype = block.library, block.work, block.library.dtype(q)
    biases = block.bias(dtype) if library.has_data else None
    for sequence, heads in _items(q, k):
        queries, key, slope = q[sequence, heads], k[sequence], dout[sequence, heads]
        shape, of_keys = (*queries.shape[:2], key.shape[1]), betas[1] if heads.start == 0 else 1
        with work.borrow(shape, dtype, library) as weights, work.borrow(shape, dtype, library) as slopes:
            library.gemm_batched(queries, _transposed(library, key), weights, block.scale, 0, work)
            library.gemm_batched(slope, _transposed(library, v[sequence]), slopes, 1, 0, work)
            _slopes(
                block,
                weights,
                slopes,
                _of(biases, sequence),
                sequence,
                heads,
                lse[sequence, heads],
                out[sequence, heads],
                slope,
            )
            library.gemm_batched(slopes, key, dq[sequence, heads], block.scale, betas[0], work)
            library.gemm_batched(_transposed(library, slopes), queries, dk[sequence], block.scale, of_keys, work)
            library.gemm_batched(_transposed(library, weights), slope, dv[sequence], 1, of_keys, work)


def _slopes(
    block: _Block,
    weights: Array,
    slopes: Array,
    bias: Array | None,
    sequence: int,
    heads: slice,
    lse: Array,
    out: Array,
    dout: Array,
) -> None:
    """Replace scores by softmax weights, and gradients of weights by gradients of scores."""
    library, dropout = block.library, block.visible.dropout
    if not library.has_data:
        library.passed("attention", weights, slopes)
        return
    xp = array_namespace(weights)

    def compute(part: slice) -> None:
        own, slope, log = weights[:, part], slopes[:, part], lse[:, part, None]
        if bias is not None:
            own += bias[part]
        own -= xp.where(log == NONE, 0, log)
        xp.exp(own, out=own)
        if dropout is not None:
            mask = block.dropout_mask(dropout, sequence, heads, part, library.dtype(own)) * (1 / (1 - dropout.p))
            slope *= mask
        slope -= xp.sum(dout[:, part] * out[:, part], axis=2, keepdims=True)
        slope *= own
        if dropout is not None:
            own *= mask

    _by_queries(library, compute, weights)
