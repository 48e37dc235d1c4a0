"""Generation of tokens: a network continues sequences, one token of each sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf, nextafter, ulp
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, NumpyLibrary
from ...comm import Grid, call, digest
from ...errors import LayoutError, Pmm3dError
from ...layout import Layout, natural, real, whole_number
from ...layout.layout import layout_of
from ...product import DistMatrix
from ..contexts import unchanged
from ..dry import Facts
from ..exchange import whole_of
from ..module import Module
from ..recorded_passes import Passes
from ..recorded_steps import facts_of_pass
from ..tensor import Tensor, relayout
from .blocks import CoreAttention
from .cache import Cache
from .embedding import Embedding
from .sampling import Sampling
from .sequence import INSIDE


def generate(
    network: Module,
    prompt: Any,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    end: int | Sequence[int] | None = None,
    seed: int = 0,
    vocabulary: int | None = None,
    on_token: Callable[[int, int], object] | None = None,
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
        Largest number of tokens to generate for each sequence.
    temperature : float
        Divisor of the logits before a draw. 0 takes the most probable token. Default: 1.
    top_k : int or None
        Number of the most probable tokens among which a token is drawn. Default: all tokens.
    top_p : float or None
        Probability, above 0 and at most 1. A token is drawn among the most probable tokens whose probabilities have at
        least this sum, and no more of them than needed. With `top_k`, their probabilities are those among the `top_k`
        tokens. Default: all tokens.
    end : int, sequence of int, or None
        Tokens after which a sequence ends, the `eos_token_id` of the transformers package. The generation stops when
        all sequences have ended. Default: none.
    seed : int
        Seed of the draws. A draw depends on the seed, the number of the sequence, and the number of the token.
        Default: 0.
    vocabulary : int or None
        Number of tokens that have a text, if the network has more: only these are generated. Default: all tokens.
    on_token : callable or None
        on_token(sequence, token) is called on every rank for each generated token, as soon as it is known, with the
        number of its sequence. Default: none.

    Returns
    -------
    numpy.ndarray or list of list of int
        int64, (sequences, tokens + generated) or (tokens + generated,), on every rank. A sequence that ended before the
        others repeats its last token. For a list of sequences of different lengths, a list of lists, without repeated
        tokens. The tokens are the same on every grid, unless rounding changes the order of two numbers.

    Raises
    ------
    LayoutError
        On every rank, for a prompt of another shape or type.
    Pmm3dError
        On every rank, for options out of range, for attention without a causal mask, and for logits that are NaN, or
        all -inf.

    Notes
    -----
    The first pass processes the prompt. Each further pass processes the last token of each sequence. Keys and values
    are cached: 2 (tokens + length) x layers x kv_heads x size elements for each sequence of a rank. Shorter prompts are
    padded on the left, and cost as much as the longest one. They have the tokens that they have alone, unless rotary
    positions have the scaling "dynamic", whose frequencies depend on the longest sequence.

    If a sequence becomes longer than the P positions of the network, a new token depends on the last P tokens only.
    These tokens then have other positions than before. So each pass processes P tokens of each sequence, and the cache
    contains P tokens. A network without positions, such as a Llama by default, has no such limit.

    Axes x and y split heads. Axes data, z, seq and ulysses split sequences. Each pass gathers the weights over z unless
    they are kept (see `Overlap.reshard_after_forward`). Ranks do not gather the logits. For each sequence, all ranks
    receive a token and its logit from each part of the columns of the logits: 16 bytes. With `top_k` they receive 16
    `top_k` bytes, and with `top_p` alone 4104 bytes, and more if a token that was not offered could be among those of
    `top_p`. In a pipeline, the other stages receive 8 bytes. `on_token` costs an agreement of all ranks in each pass.
    `on_token` can compute forward passes, and generate. It must not change weights.

    The drawn token has the largest sum of logit and noise, where noise is the Gumbel noise of the token times the
    temperature. So with another `top_k` or `top_p`, a seed often draws the same token.

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
    ends = _ends(end)
    options = (
        length,
        temperature,
        top_k,
        top_p,
        repr(end if ends is None else ends),
        seed,
        vocabulary,
        on_token is not None,
    )
    with grid.collective_call("generate", digest(repr([row.tolist() for row in rows])), *options, always=True):
        for row in rows:
            _check_prompt(row, 1 if ragged else 2)
        _check_options(length, top_k, seed, vocabulary, on_token)
        temperature = real(temperature, "generate: temperature must be a finite number, at least 0", 0, Pmm3dError)
        if top_p is not None:
            limits = "generate: top_p must be a number above 0, and at most 1"
            top_p = real(top_p, limits, ulp(0.0), Pmm3dError, nextafter(1, 2))
        _check_network(whole_of(network))
        most = min([vocabulary or inf, *(part.vocabulary for part in _embeddings(network))])
        if ends is None or any(not 0 <= token < most for token in ends):
            raise Pmm3dError(f"generate: end is a token, or a list of tokens, from 0 to less than {most}; got {end!r}")
    sampling = Sampling(temperature, top_k, top_p, seed, vocabulary)
    sequences = rows if ragged else [*np.atleast_2d(tokens)]
    made = _continued(network, sequences, length, sampling, ends, on_token)
    if ragged:
        return [row[begin:stop].tolist() for row, begin, stop in zip(*made)]
    return made.tokens[:, : max(made.stop)].reshape(*tokens.shape[:-1], -1)


def _array(prompt: Any) -> np.ndarray:
    """Return the tokens as an array; an array of objects for sequences of different lengths."""
    try:
        return np.asarray(prompt)
    except ValueError:
        return np.array(prompt, object)


def _ends(end: Any) -> list[int] | None:
    """Return the end tokens in ascending order, or None if they are no whole numbers."""
    try:
        return sorted({*map(whole_number, () if end is None else end if np.iterable(end) else [end])})
    except TypeError:
        return None


class Continuation(NamedTuple):
    """Continued sequences: their tokens (sequences, padding + tokens + length), and for each sequence the first column,
    and the column after its last generated token. A sequence that has ended repeats its last token."""

    tokens: np.ndarray
    begin: np.ndarray
    stop: np.ndarray


def _continued(
    network: Module,
    sequences: Sequence[np.ndarray],
    length: int,
    sampling: Sampling,
    ends: Sequence[int],
    on_token: Callable[[int, int], object] | None,
) -> Continuation:
    """Continue sequences. Collective."""
    parent, begin = network.parent_grid, max(map(len, sequences))
    padding = np.array([begin - len(row) for row in sequences])
    tokens = np.zeros((len(sequences), begin + length), np.int64)
    for row, first_of_row, given in zip(tokens, padding, sequences):
        row[first_of_row:begin] = given
    made = Continuation(tokens, padding, np.full(len(sequences), begin))
    goes_on = np.ones(len(sequences), bool)
    with network.evaluating(), unchanged(network.grid):
        longest = min(begin + length, longest_of(network) or begin + length)
        caches = [Cache(grid, longest) for grid in dict.fromkeys((network.grid, whole_of(network).grid))]
        forward, library = _Forward(network, caches, sampling), network.parameters()[0].library
        first, seen = 0, 0  # first: column of the token with position 0
        for place in range(begin, begin + length):
            if place - first > longest:
                if not first:
                    forward.vote_again()
                first = seen = place - longest
                for cache in caches:
                    cache.clear()
            sampling.number = place - begin
            with ExitStack() as attached:  # for this pass only, because on_token may compute others
                for cache in caches:
                    cache.begin(place - seen, np.maximum(padding - first, 0) if padding.max() > first else None)
                    attached.enter_context(cache)
                drawn, seen = forward(_batch(network.grid, library, tokens[:, seen:place])), place
            if drawn.min() < 0:
                raise Pmm3dError(
                    "generate: logits are NaN, or all are -inf, so no token can be chosen. Check whether all weights "
                    "are finite"
                )
            tokens[:, place] = np.where(goes_on, drawn, tokens[:, place - 1])
            made.stop[goes_on] = place + 1
            if on_token is not None:
                with parent.collective_call("generate: on_token", place, always=True):
                    for number in np.flatnonzero(goes_on):
                        on_token(int(number), int(tokens[number, place]))
            goes_on &= ~np.isin(drawn, ends)
            if not goes_on.any():
                break
    return made


class _Forward:
    """The next token of each sequence, (sequences,), by a pass.

    Passes with equal numbers of rows are recorded and replayed. The caches are facts, so the programs are those of one
    generation. Each replay reads the lengths of the caches, and the number of the token.
    """

    def __init__(self, network: Module, caches: list[Cache], sampling: Sampling):
        self._network, self._caches, self._sampling = network, caches, sampling
        self._passes = None if whole_of(network) is not network else Passes(network.grid, network.grid.everyone)
        facts = facts_of_pass(network) if self._passes is not None else ""
        self._facts = facts if isinstance(facts, str) else [*caches, *facts]

    def __call__(self, tokens: DistMatrix) -> np.ndarray:
        if self._passes is None:  # stages overlap, and the last one chooses
            library = self._network.parameters()[0].library
            form = Facts((tokens.shape[0] // self._caches[0].rows, 1), Layout(), "float64", library.kind)
            chosen: Tensor = self._network(tokens, end=(self._chosen, form))
            return chosen.library.to_numpy(chosen.shard)[:, 0].astype(np.int64)
        facts = self._facts if isinstance(self._facts, str) else [self._caches[0].rows, *self._facts]
        found = self._passes.run(facts, self._network, self._pass, [tokens], self._begin)
        return self._sampling.tokens(found)

    def vote_again(self) -> None:
        """Expect passes with another number of rows. All ranks call it in the same pass."""
        if self._passes is not None:
            self._passes.vote_again()

    def _begin(self) -> None:
        for cache in self._caches:
            cache.restart()

    def _pass(self, tokens: DistMatrix) -> Tensor:
        return self._candidates(self._network(tokens))

    def _candidates(self, logits: Tensor) -> Tensor:
        return self._sampling.candidates(_of_last(logits, self._caches[0].rows))

    def _chosen(self, logits: Tensor) -> Tensor:
        """Chosen tokens as a matrix (sequences, 1)."""
        chosen = self._sampling.tokens(self._candidates(logits))[:, None]
        local = logits.library.from_numpy(chosen, "float64")
        return Tensor(DistMatrix(logits.grid, local, chosen.shape, Layout()))


def longest_of(network: Module) -> int | None:
    """Return the number of positions of a network, or None without a limit."""
    return min((part.longest for part in _embeddings(network) if part.longest is not None), default=None)


def _embeddings(network: Module) -> list[Embedding]:
    return [part for _, part in whole_of(network).named_modules() if isinstance(part, Embedding)]


def _check_prompt(tokens: np.ndarray, dims: int) -> None:
    """Raises LayoutError. dims: largest number of dims of the tokens."""
    if tokens.dtype.kind not in "iu" or not 1 <= tokens.ndim <= dims or not tokens.size:
        raise LayoutError(
            "generate: the prompt must be an array of integers, (sequences, tokens) with at least one "
            "token, or (tokens,), or a list of sequences of different lengths; got "
            f"{tokens.dtype} of shape {tokens.shape}"
        )


def _check_options(length: int, top_k: int | None, seed: int, vocabulary: int | None, on_token: Any) -> None:
    """Raises Pmm3dError."""
    for name, number, least in (
        ("length", length, 0),
        ("seed", seed, 0),
        ("top_k", 1 if top_k is None else top_k, 1),
        ("vocabulary", 1 if vocabulary is None else vocabulary, 1),
    ):
        natural(number, f"generate: {name} is a whole number, at least {least}", least, Pmm3dError)
    if on_token is not None and not callable(on_token):
        raise Pmm3dError(f"generate: on_token is a function on_token(sequence, token), or None; got {on_token!r}")


def _check_network(network: Module) -> None:
    """Raises Pmm3dError."""
    for name, part in network.named_modules():
        if isinstance(part, CoreAttention) and not part.rule["causal"]:
            raise Pmm3dError(
                f"generate: rows of {name} attend to later rows, so the next token cannot be predicted "
                "alone. Use a network with causal attention: a GPT or a Llama"
            )


def _sequences(grid: Grid, rows: int) -> Layout:
    """Layout of tokens, with whole sequences split over data, z, seq and ulysses."""
    return Layout(tuple(axis for axis in ("data", "z", *INSIDE) if axis in grid.shape.names), units=(rows, 1))


def _batch(grid: Grid, library: NumpyLibrary, tokens: np.ndarray) -> DistMatrix:
    """Tokens (sequences, rows) on the network's grid."""
    shape, layout = (tokens.size, 1), _sequences(grid, tokens.shape[1])
    box = layout.box(shape, grid.shape, grid.coords)
    made = DistMatrix(grid, library.from_numpy(tokens.reshape(-1, 1)[box.r0 : box.r1], "int64"), shape, layout)
    made.labels_below = int(tokens.max()) + 1 if tokens.min() >= 0 else None
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
