"""Keys that a query of attention sees, and the pairs of blocks for which scores are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 512
"""Number of positions of a block of queries or keys."""


class Rows(NamedTuple):
    """Positions (rows,) of queries or keys in their sequences, and document numbers (b, rows) or None."""

    position: np.ndarray
    document: np.ndarray | None = None


class Dropout(NamedTuple):
    """Dropout of the softmax weights. The mask depends on seed, stream, and a weight's place in the whole batch.

    `sequence` and `head` are the first sequence and the first query head of the local arrays. `heads` is the number of
    all query heads, and `length` the number of rows of a sequence.
    """

    p: float
    seed: int
    stream: int
    sequence: int
    head: int
    heads: int
    length: int


class Visible(NamedTuple):
    """Mask and dropout of the scores, as in `attention`, and number of positions of a block."""

    causal: bool = True
    window: int | None = None
    dropout: Dropout | None = None
    block: int = BLOCK


class Pair(NamedTuple):
    """A block of queries and a block of keys. seen: "all", "causal" (keys up to a query's own row), or "some"."""

    queries: slice
    keys: slice
    seen: str


Pairs = list[tuple[slice, list[Pair], list[Pair]]]
"""Result of `block_pairs`."""


def block_pairs(queries: Rows, keys: Rows, visible: Visible) -> Pairs:
    """Blocks of queries in the order of storage, each with two lists of pairs in the order of computation.

    The first list contains the blocks of keys from the queries' own block down to the first block. The second list
    contains the blocks from the last down to the block after their own. Where the keys do not contain the queries'
    block, all blocks are in the first list. Pairs whose scores are all masked are omitted.

        >>> rows = Rows(np.arange(6))
        >>> [len(before) for _, before, after in block_pairs(rows, rows, Visible(block=2))]
        [1, 2, 3]
        >>> [len(before) for _, before, after in block_pairs(rows, rows, Visible(window=2, block=2))]
        [1, 2, 2]
    """
    parts, by_rows = _blocks(keys.position, visible.block), list[tuple[slice, list[Pair], list[Pair]]]()
    own = {int(keys.position[part.start]) // visible.block: index for index, part in enumerate(parts)}

    def seen(rows: slice, parts: Sequence[slice]) -> list[Pair]:
        pairs = (Pair(rows, part, _seen(queries, rows, keys, part, visible)) for part in parts)
        return [pair for pair in pairs if pair.seen]

    for rows in _blocks(queries.position, visible.block):
        index = own.get(int(queries.position[rows.start]) // visible.block, len(parts) - 1)
        by_rows.append((rows, seen(rows, parts[index::-1] if parts else ()), seen(rows, parts[:index:-1])))
    return by_rows


def _blocks(position: np.ndarray, block: int) -> list[slice]:
    """Slices of adjacent rows whose positions are in the same block."""
    if not len(position):
        return []
    edges = [0, *(np.flatnonzero(np.diff(position // block)) + 1).tolist(), len(position)]
    return list(map(slice, edges[:-1], edges[1:]))


def _seen(queries: Rows, rows: slice, keys: Rows, part: slice, visible: Visible) -> str:
    """`Pair.seen` of two blocks, or "" if no query sees a key."""
    q, k = queries.position[rows], keys.position[part]
    nearest, farthest = int(q.min() - k.max()), int(q.max() - k.min())
    reach = visible.window or np.inf
    if farthest <= -reach or nearest >= reach or (visible.causal and farthest < 0):
        return ""
    if queries.document is not None and keys.document is not None:
        own, others = queries.document[:, rows], keys.document[:, part]
        if ((own.min(1) > others.max(1)) | (own.max(1) < others.min(1))).all():
            return ""
        if (own != own[:, :1]).any() or (others != own[:, :1]).any():
            return "some"
    if nearest > -reach and farthest < reach and not (visible.causal and nearest < 0):
        return "all"
    ascending = np.array_equal(q, k) and bool((np.diff(q) > 0).all())
    return "causal" if ascending and visible.causal and farthest < reach else "some"
