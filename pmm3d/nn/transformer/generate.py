"""Generation of tokens: a network continues sequences, one token of each sequence at a time."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from ...arrays import Array, NumpyLibrary
from ...comm import Grid, call, digest
from ...errors import LayoutError, Pmm3dError
from ...layout import Layout, natural
from ...layout.layout import layout_of
from ...product import DistMatrix
from ..contexts import unchanged
from ..exchange import whole_of
from ..module import Module
from ..recorded_passes import Passes
from ..recorded_steps import facts_of_pass
from ..tensor import Tensor, relayout
from .blocks import CoreAttention
from .cache import Cache
from .embedding import Embedding
from .sequence import INSIDE


def generate(
    network: Module,
    prompt: Any,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Any:
    """Continue each sequence of a prompt by generated tokens. Collective.

    Parameters
    ----------
    network : Module
        A GPT or a Llama, or another network of layers `Embedding` and `Attention`. It can be a `Pipeline`.
    prompt : array of int
        (sequences, tokens), the same on all ranks, or one sequence (tokens,), with at least one token. Or a list of
        sequences of different lengths.
    length : int
        Number of tokens to generate for each sequence.
    temperature : float
        Divisor of the logits before a draw. 0 takes the most probable token. Default: 1.
    top_k : int or None
        Number of the most probable tokens among which a token is drawn. Default: all tokens.
    seed : int
        Seed of the draws. A draw depends on the seed, the number of the sequence, and the number of the token.
        Default: 0.
    vocabulary : int or None
        Number of tokens that have a text, if the network has more: only these are generated. Default: all tokens.

    Returns
    -------
    numpy.ndarray or list of list of int
        int64, (sequences, tokens + length) or (tokens + length,), on every rank. For sequences of different lengths, a
        list of lists. The tokens are the same on every grid, unless rounding changes the order of two logits, or the
        token that a random number selects.

    Raises
    ------
    LayoutError
        On every rank, for a prompt of another shape or type.
    Pmm3dError
        On every rank, for options out of range, for attention without a causal mask, and for logits that are NaN.

    Notes
    -----
    The first pass processes the prompt. Each further pass processes the last token of each sequence. Keys and values
    are cached: 2 (tokens + length) x layers x kv_heads x size elements for each sequence of a rank.

    If a sequence becomes longer than the P positions of the network, a new token depends on the last P tokens only.
    These tokens then have other positions than before. So each pass processes P tokens of each sequence, and the cache
    contains P tokens. A network without positions, such as a Llama by default, has no such limit.

    Axes x and y split heads. Axes data, z, seq and ulysses split sequences. Each pass gathers the weights over z unless
    they are kept (see `Overlap.reshard_after_forward`). Rank 0 receives the logits of the last tokens, and draws.

    Sequences of equal length are processed together, one length after the other. There is no padding.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.GPT(grid, vocabulary=5, positions=8, layers=1, hidden=8, heads=2, seed=0)
    ...     nn.generate(net, [[1, 2]], 3, temperature=0).shape
    (1, 5)
    """
    tokens, grid = _array(prompt), network.parent_grid
    ragged = tokens.dtype == object and tokens.ndim == 1
    rows = [*map(_array, tokens)] if ragged else [tokens]
    asked = digest(repr([row.tolist() for row in rows])), length, temperature, top_k, seed, vocabulary
    with grid.collective_call("generate", *asked, always=True):
        natural(
            1 if vocabulary is None else vocabulary, "generate: vocabulary is a whole number, at least 1", 1, Pmm3dError
        )
        for row in rows:
            _check(whole_of(network), row, 1 if ragged else 2, length, temperature, top_k, seed)
    sequences = rows if ragged else [*np.atleast_2d(tokens)]
    made: list[Any] = [None] * len(sequences)
    for size in dict.fromkeys(map(len, sequences)):
        numbers = [number for number, row in enumerate(sequences) if len(row) == size]
        continued = _continued(
            network,
            np.stack([sequences[number] for number in numbers]),
            numbers,
            length,
            temperature,
            top_k,
            seed,
            vocabulary,
        )
        for number, row in zip(numbers, continued):
            made[number] = row
    return [row.tolist() for row in made] if ragged else np.stack(made).reshape(*tokens.shape[:-1], -1)


def _array(prompt: Any) -> np.ndarray:
    """Return the tokens as an array; an array of objects for sequences of different lengths."""
    try:
        return np.asarray(prompt)
    except ValueError:
        return np.array(prompt, object)


def _continued(
    network: Module,
    sequences: np.ndarray,
    numbers: list[int],
    length: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    vocabulary: int | None,
) -> np.ndarray:
    """Continue sequences of equal length. Collective. numbers: their numbers in the prompt, for the draws."""
    parent, (count, begin) = network.parent_grid, sequences.shape
    tokens = np.concatenate([sequences, np.zeros((count, length), np.int64)], axis=1, dtype=np.int64)
    with ExitStack() as stack:
        grids = dict.fromkeys((network.grid, whole_of(network).grid))
        longest = min(begin + length, longest_of(network) or begin + length)
        caches = [stack.enter_context(Cache(grid, longest)) for grid in grids]
        stack.enter_context(network.evaluating())
        stack.enter_context(unchanged(network.grid))
        forward, library = _Forward(network, caches), network.parameters()[0].library
        first, seen, outputs = 0, 0, None  # first: number of the token with position 0
        for place in range(begin, begin + length):
            if place - first > longest:
                if not first:
                    forward.vote_again()
                first = seen = place - longest
                for cache in caches:
                    cache.clear()
            for cache in caches:
                cache.begin(place - seen)
            logits = forward(_batch(network.grid, library, tokens[:, seen:place], outputs))
            outputs, values = logits.shape[1], logits.gather(0)
            drawn = np.zeros(count, np.int64)
            with parent.collective_call("generate", place, always=True):
                if parent.rank == 0:
                    draws = np.asarray(np.random.default_rng([seed, place - begin]).random(max(numbers) + 1))[numbers]
                    drawn = choose(logits.library.to_numpy(values)[:, :vocabulary], draws, temperature, top_k)
            tokens[:, place], seen = parent.comm.bcast(drawn), place
    return tokens


class _Forward:
    """Logits of the last row of each sequence in a pass: (sequences, vocabulary).

    Passes with equal numbers of rows are recorded and replayed. The caches are facts, so the programs are those of one
    generation. Each replay reads the lengths of the caches.
    """

    def __init__(self, network: Module, caches: list[Cache]):
        self._network, self._caches = network, caches
        self._passes = None if whole_of(network) is not network else Passes(network.grid, network.grid.everyone)
        facts = facts_of_pass(network) if self._passes is not None else ""
        self._facts = facts if isinstance(facts, str) else [*caches, *facts]

    def __call__(self, tokens: DistMatrix) -> Tensor:
        if self._passes is None:  # stages overlap
            return self._pass(tokens)
        facts = self._facts if isinstance(self._facts, str) else [self._caches[0].rows, *self._facts]
        return self._passes.run(facts, self._network, self._pass, [tokens], self._begin)

    def vote_again(self) -> None:
        """Expect passes with another number of rows. All ranks call it in the same pass."""
        if self._passes is not None:
            self._passes.vote_again()

    def _begin(self) -> None:
        for cache in self._caches:
            cache.restart()

    def _pass(self, tokens: DistMatrix) -> Tensor:
        return _of_last(self._network(tokens), self._caches[0].rows)


def longest_of(network: Module) -> int | None:
    """Return the number of positions of a network, or None without a limit."""
    parts = [part for _, part in whole_of(network).named_modules() if isinstance(part, Embedding)]
    return min((part.longest for part in parts if part.longest is not None), default=None)


def choose(logits: np.ndarray, draws: np.ndarray, temperature: float, top_k: int | None) -> np.ndarray:
    """Choose a token for each row of logits (rows, vocabulary). draws: (rows,), uniform in [0, 1). Equal logits are
    ordered by token. Raises Pmm3dError for logits that are NaN.

        >>> logits = np.log([[1.0, 6.0, 3.0]])
        >>> [choose(logits, np.array([draw]), 1.0, 2).item() for draw in (0.0, 0.66, 0.67)]
        [1, 1, 2]
    """
    if np.isnan(logits).any():
        raise Pmm3dError("generate: logits are NaN, so no token can be chosen. Check whether all weights are finite")
    if temperature == 0:
        return logits.argmax(axis=1)
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    best = np.take_along_axis(logits, order, axis=1)
    with np.errstate(over="ignore"):  # a difference over a temperature near 0 is -inf, a probability of 0
        ends = np.exp((best - best[:, :1]) / temperature).cumsum(axis=1)
    place = (ends <= draws[:, None] * ends[:, -1:]).sum(axis=1)
    return np.take_along_axis(order, place.clip(max=order.shape[1] - 1)[:, None], axis=1)[:, 0]


def _check(
    network: Module, tokens: np.ndarray, dims: int, length: int, temperature: float, top_k: int | None, seed: int
) -> None:
    """Raises LayoutError or Pmm3dError. dims: largest number of dims of the tokens."""
    if tokens.dtype.kind not in "iu" or not 1 <= tokens.ndim <= dims or not tokens.size:
        raise LayoutError(
            "generate: the prompt must be an array of integers, (sequences, tokens) with at least one "
            "token, or (tokens,), or a list of sequences of different lengths; got "
            f"{tokens.dtype} of shape {tokens.shape}"
        )
    for name, number, least in ("length", length, 0), ("seed", seed, 0), ("top_k", 1 if top_k is None else top_k, 1):
        natural(number, f"generate: {name} is a whole number, at least {least}", least, Pmm3dError)
    if not 0 <= temperature < float("inf"):
        raise Pmm3dError(f"generate: temperature must be a finite number, at least 0, got {temperature}")
    for name, part in network.named_modules():
        if isinstance(part, CoreAttention) and not part.rule["causal"]:
            raise Pmm3dError(
                f"generate: rows of {name} attend to later rows, so the next token cannot be predicted "
                "alone. Use a network with causal attention: a GPT or a Llama"
            )


def _sequences(grid: Grid, rows: int) -> Layout:
    """Layout of tokens, with whole sequences split over data, z, seq and ulysses."""
    return Layout(tuple(axis for axis in ("data", "z", *INSIDE) if axis in grid.shape.names), units=(rows, 1))


def _batch(grid: Grid, library: NumpyLibrary, tokens: np.ndarray, vocabulary: int | None) -> DistMatrix:
    """Tokens (sequences, rows) on the network's grid. vocabulary: None makes the embedding check the tokens."""
    shape, layout = (tokens.size, 1), _sequences(grid, tokens.shape[1])
    box = layout.box(shape, grid.shape, grid.coords)
    made = DistMatrix(grid, library.from_numpy(tokens.reshape(-1, 1)[box.r0 : box.r1], "int64"), shape, layout)
    made.labels_below = vocabulary
    return made


def _of_last(logits: Tensor, rows: int) -> Tensor:
    """Logits of the last row of each sequence, (sequences, vocabulary)."""
    held, axes = logits.layout, _sequences(logits.grid, rows).rows
    x = relayout(logits, layout_of(axes, held.cols, (), (rows, held.units[1])))
    here, cols = x.shard.shape
    last = x.library.empty((here // rows, cols), x.dtype)
    call(x.grid.engine, partial(_take_last, rows), x.shard, last)
    layout = layout_of(axes, held.cols, (), (1, held.units[1]))
    return Tensor(DistMatrix(x.grid, last, (x.shape[0] // rows, x.shape[1]), layout))


def _take_last(rows: int, x: Array, out: Array) -> None:
    """Copy the last row of each sequence."""
    out[...] = x.reshape(out.shape[0], rows, out.shape[1])[:, -1]
