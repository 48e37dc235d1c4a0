"""Choice of the experts of each token, on the host: the best experts of a token, the best tokens of an expert, and the
tokens that an expert accepts. The result is the same on every grid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ...layout import GridShape, Layout, Placement, offsets
from ..compute import TensorSpec, stacked
from ..statistics import sum_over


class Choice(NamedTuple):
    """Experts of the tokens of this rank's rows.

    chosen     (rows, E), whether the token chose the expert, or the expert the token
    accepted   the assignments that are carried out: those of `chosen` that capacity did not drop
    counts     (E,), tokens of all ranks that chose each expert
    dropped    assignments that capacity dropped, on all ranks
    sums       sums of further numbers over all rows of the matrix
    """

    chosen: np.ndarray
    accepted: np.ndarray
    counts: np.ndarray
    dropped: int
    sums: np.ndarray


class Tokens(NamedTuple):
    """Tokens of this rank's rows, in the order of the rows of the matrix. An order of storage, such as "zigzag", stores
    them in another order.

    rows      row of the matrix of each token
    order     index of the token in storage
    starts    first token of each run of consecutive rows
    lengths   number of tokens of each run
    places    number of each run among the runs of all ranks
    runs      number of runs of all ranks
    """

    rows: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    runs: int

    @classmethod
    def of(cls, spec: TensorSpec) -> Tokens:
        """Tokens of the rows of a tensor.

        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid(shape="ddp") as grid:
        ...     Tokens.of(TensorSpec.of(DistMatrix.ones(grid, (3, 2), layout=Layout()))).rows
        array([0, 1, 2])
        """
        layout = Layout(spec.layout.rows, units=(spec.layout.units[0], 1))
        return _tokens(spec.shape[0], layout, spec.grid.shape, spec.grid.rank)


@lru_cache(maxsize=64)
def _tokens(count: int, layout: Layout, grid: GridShape, rank: int) -> Tokens:
    tiling = Placement((count, 1), layout, grid)
    part, parts = tiling.tiles(rank)[0].row, range(tiling.rows.parts)
    runs = sorted((run for each in parts for run in tiling.rows.runs(each)), key=attrgetter("start"))
    own = [(place, run) for place, run in enumerate(runs) if run.part == part]
    lengths = [run.stop - run.start for _, run in own]
    return Tokens(
        _joined([np.arange(run.start, run.stop) for _, run in own]),
        _joined([np.arange(run.local, run.local + length) for (_, run), length in zip(own, lengths)]),
        np.array(offsets(lengths)[:-1], np.int64),
        np.array(lengths, np.int64),
        np.array([place for place, _ in own], np.int64),
        len(runs),
    )


def _joined(ranges: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *ranges])


def best_experts(ranked: np.ndarray, top_k: int) -> np.ndarray:
    """Mark the `top_k` largest numbers of each row; of equal ones, those of the first columns.

    >>> best_experts(np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), 1)
    array([[False,  True, False],
           [ True, False, False]])
    """
    chosen, left, rows = np.zeros(ranked.shape, bool), ranked.copy(), np.arange(len(ranked))
    for _ in range(top_k):  # faster than a stable sort of all columns
        best = left.argmax(1) if len(rows) else rows
        chosen[rows, best], left[rows, best] = True, -np.inf
    missing = top_k - chosen.sum(1, keepdims=True)
    if missing.any():  # all other numbers of the row are -inf
        chosen |= (~chosen).cumsum(1) <= missing
    return chosen


def of_tokens(spec: TensorSpec, chosen: np.ndarray, capacity: int | None, numbers: np.ndarray) -> Choice:
    """Choice in which tokens chose experts, and each expert accepts its first `capacity` tokens in the order of the
    rows of the matrix (None: all tokens). Collective: one all-reduce over the axes of the rows, of E numbers and the
    further `numbers`; with a capacity, of E numbers for each run of consecutive rows of a rank.

    numbers: of this rank's rows, for `Choice.sums`
    """
    experts = chosen.shape[1]
    tokens = None if capacity is None else Tokens.of(spec)
    table = np.zeros((1 if tokens is None else tokens.runs, experts))
    if tokens is None:
        table[0] = chosen.sum(0)
    elif len(tokens.starts):
        table[tokens.places] = np.add.reduceat(chosen[tokens.order], tokens.starts, axis=0, dtype=float)
    both = sum_over(spec.grid, np.concatenate([table.reshape(-1), numbers]), spec.layout.rows)
    table, sums = both[: table.size].reshape(table.shape).astype(np.int64), both[table.size :]
    counts = table.sum(0)
    if tokens is None or capacity is None:
        return Choice(chosen, chosen, counts, 0, sums)
    before = (table.cumsum(0) - table)[tokens.places]
    accepted = _first(chosen, tokens, before, capacity)
    return Choice(chosen, accepted, counts, int(np.maximum(counts - capacity, 0).sum()), sums)


def _first(chosen: np.ndarray, tokens: Tokens, before: np.ndarray, capacity: int) -> np.ndarray:
    """Table of the chosen experts that accept the token. before: for each run, number of tokens of earlier rows that
    chose each expert."""
    ordered = chosen[tokens.order]
    position = ordered.cumsum(0) - ordered
    position += np.repeat(before - position[tokens.starts], tokens.lengths, axis=0)
    accepted = np.empty_like(chosen)
    accepted[tokens.order] = ordered & (position < capacity)
    return accepted


def of_experts(spec: TensorSpec, scores: np.ndarray, capacity: int, numbers: np.ndarray) -> Choice:
    """Choice in which each expert chooses its `capacity` tokens with the largest scores, of equal ones those of the
    first rows of the matrix. Collective: along each axis of G ranks that splits the rows, a rank receives (G-1) times
    the scores and rows of the candidates, at most `capacity` for each rank and expert.

    numbers: as in `of_tokens`
    """
    tokens, experts = Tokens.of(spec), scores.shape[1]
    rows = np.empty(len(tokens.rows))
    rows[tokens.order] = tokens.rows
    largest = min(capacity, _most_rows(spec))
    candidates = np.full((largest, 2 * experts), np.inf)  # -score and row of each candidate
    own = np.argsort(-scores[tokens.order], axis=0, kind="stable")[:largest]
    candidates[: len(own), :experts] = -np.take_along_axis(scores[tokens.order], own, 0)
    candidates[: len(own), experts:] = tokens.rows[own]
    for name in reversed(spec.layout.rows):
        axis = spec.grid.axis(name)
        if axis.size > 1:
            candidates = stacked(axis, candidates).reshape(-1, 2 * experts)
    negated, of_rows = candidates[:, :experts], candidates[:, experts:]
    last = np.lexsort((of_rows, negated), axis=0)[capacity - 1 : capacity]
    limit, row = np.take_along_axis(negated, last, 0), np.take_along_axis(of_rows, last, 0)
    chosen = (-scores < limit) | ((-scores == limit) & (rows[:, None] <= row))
    sums = sum_over(spec.grid, numbers, spec.layout.rows) if numbers.size else numbers
    return Choice(chosen, chosen, np.full(experts, capacity), 0, sums)


def _most_rows(spec: TensorSpec) -> int:
    """Largest number of rows of a rank."""
    layout = Layout(spec.layout.rows, units=(spec.layout.units[0], 1))
    return Placement((spec.shape[0], 1), layout, spec.grid.shape).rows.spacing.most


def evenly(spec: TensorSpec, choice: Choice, top_k: int, capacity: int | None, by_experts: bool) -> Choice:
    """Replace the choice on a grid without data by an even one. Token i chooses the experts (i top_k + j) mod E.
    by_experts: each expert chooses `capacity` tokens at equal distances."""
    tokens, experts, count = Tokens.of(spec), choice.chosen.shape[1], spec.shape[0]
    accepted = chosen = np.zeros_like(choice.chosen)
    if by_experts and capacity:
        for expert in range(experts):
            taken = (np.arange(capacity) * experts + expert) * count // (capacity * experts)
            chosen[tokens.order, expert] = np.isin(tokens.rows, taken)
        return choice._replace(chosen=chosen, accepted=chosen)
    number = tokens.rows[:, None] * top_k + np.arange(top_k)
    chosen[tokens.order[:, None], number % experts] = True
    if capacity is not None:
        accepted = np.zeros_like(chosen)
        accepted[tokens.order[:, None], number % experts] = number // experts < capacity
    counts = count * top_k // experts + (np.arange(experts) < count * top_k % experts)
    dropped = 0 if capacity is None else int(np.maximum(counts - capacity, 0).sum())
    return Choice(chosen, accepted, counts, dropped, choice.sums)
