"""Choice of the next token of each sequence, from logits whose rows and columns are split over ranks.

Each rank offers the most probable tokens of its own columns. All ranks receive these candidates, and choose alike.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ...arrays import Array, NumpyLibrary, random
from ...comm import call
from ...layout import Box, Layout
from ...layout.layout import layout_of
from ...product import DistMatrix
from ..compute import TensorSpec
from ..tensor import Tensor, relayout

NUCLEUS, MORE = 256, 8
"""Number of candidates of each part of the columns for `top_p` without `top_k`. If the nucleus may contain other
tokens, each part offers MORE times as many."""


class Sampling:
    """Rule by which tokens are chosen, with options of `generate`.

    The token is the one with the largest sum of its logit and `temperature` times its noise (`_noisy`), among the
    tokens that `top_k` and `top_p` select. Noise has a Gumbel distribution, so this is a draw from
    softmax(logits / temperature). It depends on the seed, on the token, on the number of its sequence, and on `number`.

    number   number of the token after the prompt. Instructions of a recorded pass read it when they run
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int, vocabulary: int | None = None
    ):
        self.temperature, self.seed, self.vocabulary, self.number = temperature, seed, vocabulary, 0
        self.top_k = top_k if temperature else None
        self.top_p = top_p if temperature and top_p != 1 else None
        self._selects = self.top_k is not None or self.top_p is not None
        self._is_open = self.top_p is not None and self.top_k is None  # candidates may be too few
        self._spec: TensorSpec | None = None
        self._shard: Array = None

    def candidates(self, logits: Tensor, count: int | None = None) -> Tensor:
        """Candidates of all parts of the columns for each row of logits, on all ranks, float64. Collective.

        For each part, a row contains `count` logits in descending order, and their tokens. With `top_p` alone, it also
        contains the sum of `_weights` of the part. If all tokens can be drawn, noise is added to the logits.
        """
        grid, held, self._spec = logits.grid, logits.layout, logits.spec
        count = min(count or self.top_k or (NUCLEUS if self._is_open else 1), logits.shape[1])
        width = 2 * count + self._is_open
        local = grid.workspace.array((logits.box.shape[0], width), "float64", logits.library)
        offer = partial(self._offer, logits.library, logits.box, count)
        call(grid.engine, offer, logits.shard, local, writes=[local])
        layout, parts = layout_of(held.rows, held.cols, (), (1, width)), grid.shape.along(held.cols)
        return relayout(Tensor(DistMatrix(grid, local, (logits.shape[0], parts * width), layout)), Layout())

    def _offer(self, library: NumpyLibrary, box: Box, count: int, logits: Array, out: Array) -> None:
        """Write the candidates of this rank's part of the logits, whose rows and columns are those of the box."""
        self._shard = logits
        stop = box.c1 if self.vocabulary is None else max(box.c0, min(box.c1, self.vocabulary))
        x = np.array(library.to_numpy(logits)[:, : stop - box.c0], np.float64)
        made = np.zeros((len(x), 2 * count + self._is_open))
        made[:, :count] = -np.inf
        if x.size:
            unknown = np.isnan(x).any(1)
            x[unknown] = 0
            if self.temperature and not self._selects:
                x = self._noisy(x, np.arange(box.r0, box.r1)[:, None], np.arange(box.c0, stop))
            columns = most_probable(x, count)
            found = columns.shape[1]
            made[:, :found] = np.take_along_axis(x, columns, 1)
            made[:, count : count + found] = columns + box.c0
            if self._is_open:
                made[:, -1] = self._weights(x, made[:, :1]).sum(1)
            made[unknown, 0] = np.nan
        out[...] = library.from_numpy(made, "float64")

    def tokens(self, candidates: Tensor) -> np.ndarray:
        """Token of each row of the logits that were last passed to `candidates`; -1 if a logit is NaN, or all are -inf.
        Collective."""
        assert self._spec is not None
        columns, parts = self._spec.shape[1], self._spec.grid.shape.along(self._spec.layout.cols)
        while True:
            host = candidates.library.to_numpy(candidates.shard).reshape(candidates.shape[0], parts, -1)
            count = host.shape[2] // 2
            chosen = self._chosen(host, count, self._is_open and count < columns)
            if chosen is not None:
                return chosen
            candidates = self.candidates(Tensor(self._spec.matrix(self._shard)), MORE * count)

    def _chosen(self, candidates: np.ndarray, count: int, has_others: bool) -> np.ndarray | None:
        """Tokens of the rows of candidates (rows, parts, width), or None if a nucleus may contain other tokens."""
        values, tokens = (
            candidates[:, :, part].reshape(len(candidates), -1) for part in (slice(count), slice(count, 2 * count))
        )
        unknown = ~(values.max(1) > -np.inf)  # also if one is NaN
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.top_k if self._selects else 1]
        values, tokens = (np.take_along_axis(each, order, 1) for each in (values, tokens.astype(np.int64)))
        if self.top_p is not None:
            largest = values[:, :1]
            weights = self._weights(values, largest)
            total = weights.sum(1)
            if self._is_open:
                total = (self._weights(candidates[:, :, 0], largest) * candidates[:, :, -1]).sum(1)
            inside = weights.cumsum(1) - weights < self.top_p * total[:, None]
            least = candidates[:, :, count - 1].max(1)[:, None]  # all tokens with larger logits are candidates
            if has_others and (inside & (values <= least)).any():
                return None
            values = np.where(inside, values, -np.inf)
        if self._selects:
            values = self._noisy(values, np.arange(len(values))[:, None], tokens)
        chosen = np.take_along_axis(tokens, values.argmax(1)[:, None], 1)[:, 0]
        return np.where(unknown, -1, chosen)

    def _weights(self, logits: np.ndarray, largest: np.ndarray) -> np.ndarray:
        """exp((logits - largest) / temperature)."""
        with np.errstate(over="ignore", invalid="ignore"):  # a difference over a temperature near 0 is -inf
            return np.exp(
                np.where(logits == largest, 0, logits - largest) / self.temperature
            )  # also of infinite logits

    def _noisy(self, logits: np.ndarray, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Logits and `temperature` times noise, over the temperature if it is above 1: then no sum overflows."""
        return logits / max(1, self.temperature) + min(1, self.temperature) * self._noise(sequences, tokens)

    def _noise(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Noise of tokens of sequences, with a standard Gumbel distribution."""
        index = sequences.astype(np.uint64) * np.uint64(2**32) + tokens.astype(np.uint64)
        return -np.log(-np.log(random.uniform(NumpyLibrary(), index, self.seed, self.number)))


def most_probable(x: np.ndarray, count: int) -> np.ndarray:
    """Columns of the `count` largest elements of each row, in descending order. Equal elements are in ascending order.

    >>> most_probable(np.array([[2.0, 3.0, 2.0, 1.0]]), 2).tolist()
    [[1, 0]]
    """
    if count == 1:
        return x.argmax(1)[:, None]
    count = min(count, x.shape[1])
    least = np.partition(x, -count, axis=1)[:, -count]
    columns = [np.flatnonzero(row >= bound) for row, bound in zip(x, least)]
    return np.stack([each[np.argsort(-row[each], kind="stable")[:count]] for row, each in zip(x, columns)])
