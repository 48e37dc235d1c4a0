"""Routers: the experts of each token, the weights of their results, and the losses that balance the experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, random
from ...comm import Grid, assign
from ...errors import DTypeError, LayoutError, Pmm3dError, hint
from ...layout import LOW_PRECISION, Layout, RaggedRows, natural, real
from ...layout.layout import layout_of, unit_of
from ...product.constructors import Library
from ..arithmetic import cast, check_alike
from ..compute import TensorSpec, check_real
from ..layers import check_sizes, check_switches, parameter
from ..module import Module, entered
from ..parameter import Parameter
from ..precision import Precision
from ..seeds import check_grid, derived, seed_of
from ..tape import Tape
from ..tensor import Tensor, relayout
from .choice import Choice, Tokens, best_experts, evenly, of_experts, of_tokens
from .gates import Gates, logits_of

SCORES = ("softmax", "sigmoid")
CHOICES = ("tokens", "experts")


class Routed(NamedTuple):
    """Result of `Router.route`.

    Parameters
    ----------
    gates : Tensor
        (T, E), the weight of each assignment of a token to an expert, 0 for other pairs. It is float32, or float64 for
        a float64 input. Its rows have the layout of the input's, and each rank has all columns.
    chosen : numpy.ndarray
        (rows of this rank, E), bool: the assignments that are carried out. Those that capacity dropped are False.
    penalty : Tensor or None
        1 x 1, the balance loss and the z-loss of the tokens of all ranks, times their factors; the same on all ranks.
        None without these losses, and outside of training.
    counts : numpy.ndarray
        (E,), int64, tokens of all ranks that chose each expert, before capacity.
    dropped : int
        Assignments that capacity dropped, on all ranks; 0 outside of training.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid
    >>> with Grid(shape="ddp") as grid:
    ...     routed = Router(grid, 8, 4, 2).route(Tensor(DistMatrix.ones(grid, (6, 8), dtype="float32")))
    ...     routed.gates.shape, routed.counts.sum(), routed.dropped
    ((6, 4), np.int64(12), 0)
    """

    gates: Tensor
    chosen: np.ndarray
    penalty: Tensor | None
    counts: np.ndarray
    dropped: int


class Load(NamedTuple):
    """Load of the experts in a step, over all calls of `Router.route`, which are the step's micro-batches.

    Parameters
    ----------
    counts : numpy.ndarray
        (E,), int64, tokens of the step that chose each expert, before capacity.
    dropped : int
        Assignments of the step that capacity dropped.
    penalty : float
        Mean of the penalties, weighted by the rows of the calls; 0 without losses of the router.
    rows : int
        Tokens of the step.

    Examples
    --------
    >>> one, other = Load(np.array([3, 5]), 1, 0.5, 4), Load(np.array([2, 2]), 0, 2.0, 2)
    >>> one.plus(other)
    Load(counts=array([5, 7]), dropped=1, penalty=1.0, rows=6)
    """

    counts: np.ndarray
    dropped: int
    penalty: float
    rows: int

    def plus(self, other: Load) -> Load:
        """Load of both."""
        rows = self.rows + other.rows
        mean = (self.penalty * self.rows + other.penalty * other.rows) / max(1, rows)
        return Load(self.counts + other.counts, self.dropped + other.dropped, mean, rows)


class Router(Module):
    """Choice of the experts of each token.

    Parameters
    ----------
    hidden, experts : int
        Columns of the input (h), and number of experts (E).
    top_k : int
        Experts of a token (k), at most E. Default: 2.
    scores : str
        "softmax" (default): probabilities over all experts, of which the largest are chosen. "sigmoid": a number from 0
        to 1 for each expert by itself (DeepSeek-V3).
    normalize : bool or None
        Divide the scores of a token by the sum of those of its chosen experts. With "softmax" this equals a softmax
        over the chosen logits, as in Mixtral. False: as in Switch, OLMoE and Qwen2-MoE. Default: True if tokens choose
        several experts.
    scale : float
        Factor of all gates, above 0. Default: 1.
    choice : str
        "tokens" (default): each token chooses `top_k` experts. "experts": each expert chooses its C tokens with the
        largest scores among the T tokens (Zhou et al. 2022).
    capacity : float or None
        Factor f, above 0. With "tokens", an expert accepts its first C = int(f k T / E) tokens, at least 1, in the
        order of the T rows; other assignments are dropped. This limit is for training only: outside of training,
        nothing is dropped. With "experts", C is the number of tokens of each expert, at most T, also outside of
        training. Default: nothing is dropped; 1 for "experts".
    balance : float
        Factor of the balance loss E / (k T) sum_i n_i p_i, at least 0. n_i is the number of tokens that chose expert i,
        and p_i the mean of its probability. The loss is 1 if all experts are equal. Default: 0.
    z_loss : float
        Factor of the mean of (log sum_i exp(logit_i))^2 (Zoph et al. 2022), at least 0. Default: 0.
    jitter : float
        Multiply the input of the router by uniform numbers from 1 - jitter to 1 + jitter, in training. At least 0 and
        below 1. Default: 0.
    bias_rate : float
        Balance without a loss (Wang et al. 2024). If it is not 0, the router has a `bias`, which is added to the scores
        for the choice only. After each step it changes by this number, up for an expert with fewer tokens than the
        mean, down for one with more. Default: 0.
    deviation : float or None
        Standard deviation of normal initial weights. Default: uniform in +-1/sqrt(hidden).
    seed : int or None
        Seed of the initial values and of the jitter. Default: the next seed of the grid (`manual_seed`).
    cols : str
        Axis that splits the columns of the input, as in `Linear`.
    dtype, library, precision
        As in `Linear`. The weight is float64 if GEMMs of the network are, else float32.

    Attributes
    ----------
    weight : Parameter
        (h, E), rows split like the columns of the input, and replicated over the other axes.
    bias : Parameter or None
        (1, E), not trained by gradients. Checkpoints contain it.
    last : Load or None
        Load of the experts in the last step: in all calls in training since `after_step` was called and a new step
        began. Calls without gradients do not count.

    Raises
    ------
    LayoutError, Pmm3dError
        For invalid arguments.
    DTypeError
        If the library lacks a type of the precision.

    Notes
    -----
    The router computes in float32 or float64, whatever the precision of the network.

    The T tokens are the rows of the matrix on all ranks: the batch, or one micro-batch of it. So capacity and the
    balance loss count the tokens of one micro-batch.

    If logits are equal, the expert with the lowest number is chosen first, or the token with the lowest row of the
    matrix. So equal logits give the same choice on every grid, also with rows in "zigzag" order. Logits are sums over
    the columns of the input. If another number of ranks splits these columns, the last bits of the logits may differ.

    Expert choice is not causal: whether an expert chooses a token depends on later tokens of the sequence, which a
    language model does not know when it generates text. Each expert has the same number of tokens, so there is no
    balance loss. A token may be chosen by any number of experts, also by none.

    With normalize=True and top_k=1 all gates are 1, so only the losses of the router train it.

    `train_step` and `Trainer` weigh the losses of a micro-batch by its share of the rows of the step, and call
    `after_step`, which changes the bias. In a loop of your own with several micro-batches, set the share:

        share = len(x) / rows  # rows: of all micro-batches of the step
        with nn.Tape.of(grid).set(share=share):
            (loss(net(x), y) * share).backward()

    After each step, call `after_step` of each module in `net.named_modules()`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     router = nn.Router(grid, 8, 4, 2, balance=0.01, seed=1)
    ...     routed = router.route(nn.Tensor(DistMatrix.random(grid, (6, 8), dtype="float32")))
    ...     routed.counts.sum(), routed.penalty.shape
    (np.int64(12), (1, 1))
    """

    arguments = ("calls", "last", "_in_step")
    varies = "a router chooses other experts in each step"

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        experts: int,
        top_k: int = 2,
        *,
        scores: str = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
        choice: str = "tokens",
        capacity: float | None = None,
        balance: float = 0.0,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        bias_rate: float = 0.0,
        deviation: float | None = None,
        seed: int | None = None,
        cols: str = "y",
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
    ):
        check_grid("Router", grid)
        check_sizes("Router", hidden=hidden, experts=experts)
        self.grid, self.experts = grid, experts
        self.top_k = natural(top_k, f"Router: top_k is a number from 1 to {experts} experts", 1, Pmm3dError, experts)
        self.scores, self.choice = _one_of("scores", scores, SCORES), _one_of("choice", choice, CHOICES)
        self.normalize = choice == "tokens" and top_k > 1 if normalize is None else normalize
        check_switches("Router", normalize=self.normalize)
        self.scale = _positive("scale", scale)
        self.capacity = None if capacity is None else _positive("capacity", capacity)
        self.balance, self.z_loss, self.bias_rate = (
            real(value, f"Router: {name} is a number of at least 0", 0, Pmm3dError)
            for name, value in (("balance", balance), ("z_loss", z_loss), ("bias_rate", bias_rate))
        )
        self.jitter = real(jitter, "Router: jitter is a number of at least 0 and below 1", 0, Pmm3dError, 1)
        if choice == "experts" and (self.balance or self.bias_rate):
            raise Pmm3dError(
                'Router: with choice="experts" each expert has the same number of tokens, so there is nothing to '
                f"balance; got balance={balance}, bias_rate={bias_rate}: leave them out"
            )
        compute = Precision._of(precision, dtype).compute
        kind = "float32" if compute in LOW_PRECISION else compute
        seed, self.calls = seed_of(grid, seed), 0
        self.seed = derived(seed, 1)
        self.weight = parameter(
            grid,
            (hidden, experts),
            Layout(_one_of("cols", cols, ("y", "x"))),
            seed=derived(seed, 0),
            bound=hidden**-0.5,
            deviation=deviation,
            dtype=kind,
            library=library,
        )
        check_real("Router", self.weight.spec)
        self.bias: Parameter | None = None
        if self.bias_rate:
            self.bias = parameter(grid, (1, experts), Layout(), dtype=kind, library=library)
            self.bias._learn(False)
        self.last: Load | None = None
        self._in_step = False
        """Whether `last` is the load of a step that has not ended."""

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        if self not in placed and columns is not None and columns.cols in (("x",), ("y",)):
            [axis] = columns.cols
            unit = unit_of(columns.units[1], axis)
            layout = layout_of((axis,), (), (), (1 if self.weight.shape[0] % unit else unit, 1))
            if self.weight.layout != layout:
                self.weight._move(layout)
            placed.add(self)
        return columns

    def route(self, x: Tensor) -> Routed:
        """Choose the experts of the tokens. Collective.

        Parameters
        ----------
        x : Tensor
            (T, h), the tokens. Rows over any axes except that of the columns, columns split like the rows of the
            weight. An input in another layout is relaid out, and the gates have the rows of the new layout. x is
            16-bit, float32, or of the type of the weight.

        Returns
        -------
        Routed

        Raises
        ------
        LayoutError
            If x has not h columns, and for ragged rows.
        GridError, DTypeError
            If grids, libraries or types do not fit.

        Notes
        -----
        Let t be the rows of a rank, h its columns of x, and k their axis. Each rank receives

            logits, forward              2 (Gk-1)/Gk t E
            choice, forward              2 (G-1)/G c, along each axis of the rows
            gradient of gates, backward  2 (Gk-1)/Gk t E, if it has partial sums over k, as that of `combine`
            gradient of the weight       2 (G-1)/G h E, along each axis of the rows

        elements, those of the choice in float64. If an array is small, its sum is a gather, of (G-1) times the array. c
        is E; with a capacity E for each run of consecutive rows (one of each rank, or two with "zigzag"); with a
        balance loss E more, and with a z-loss 1 more. With choice="experts", a rank receives instead (G-1) times 2 E C
        elements along the last axis of the rows, G times more along the axis before, and so on. If a rank has less than
        C rows, C is their number.

        A step with a router is not replayed. In a `Recompute`, the choice of the first pass is used again.
        """
        if x.grid.engine.recorder is not None:
            x.grid.engine.recorder.refuse(self.varies)
        x, tape = self._input(x), x.tape
        if self.training or tape.recording:
            self.calls += 1
        if self.training and self.jitter:
            x = x * _noise(x.spec, x, self.jitter, self.seed, self.calls)
        logits = logits_of(x, self.weight)
        rule = self._rule(logits.spec)
        scores = rule.scores_of(logits.shard)
        choice = self._choice(logits, scores, rule)
        value = rule.penalty(choice)
        gates, penalty = rule.results(logits, scores, choice, value)
        if self.training and tape.recording and tape.phase != "recompute":
            load = Load(choice.counts, choice.dropped, value, x.shape[0])
            self.last = self.last.plus(load) if self._in_step and self.last is not None else load
            self._in_step = True
        return Routed(gates, choice.accepted, penalty, choice.counts, choice.dropped)

    def after_step(self, taken: bool = True) -> None:
        if taken and self.bias is not None and self._in_step and self.last is not None:
            counts = self.last.counts
            up = np.sign(counts.mean() - counts)[None] * self.bias_rate
            self.bias.local[...] += self.bias.library.from_numpy(up, self.bias.dtype)
            self.bias.version += 1
        self._in_step = False

    def _input(self, x: Tensor) -> Tensor:
        """The tokens in the type of the weight, with columns split like its rows."""
        if isinstance(x.shape[0], RaggedRows):
            x.shape[0].refuse()
        if x.tape.tile is not None:
            x.tape.tile.refuse("a Router")
        if x.shape[1] != self.weight.shape[0]:
            raise LayoutError(f"Router: the input has {x.shape[1]} columns, the router {self.weight.shape[0]}")
        check_alike("Router", x, self.weight, one_type=False)
        check_real("Router", x.spec)
        if x.dtype == "float64" and self.weight.dtype != "float64":
            raise DTypeError('Router: the input is float64, the router float32: make it with dtype="float64"')
        k, (unit, _) = self.weight.layout.rows[0], self.weight.layout.units
        entered(self, x, layout_of((), (k,), (), (1, unit)))
        [k], (unit, _) = self.weight.layout.rows, self.weight.layout.units
        rows = tuple(axis for axis in x.layout.rows if axis != k)
        return cast(relayout(x, layout_of(rows, (k,), (), (x.layout.units[0], unit))), self.weight.dtype)

    def _rule(self, spec: TensorSpec) -> Gates:
        """Functions from logits to gates and losses. There are no losses outside of training."""
        count = max(1, spec.shape[0])
        of_balance = self.balance * self.experts / (self.top_k * count) / count if self.training else 0.0
        of_z = self.z_loss / count if self.training else 0.0
        return Gates(spec, self.scores, self.normalize, self.scale, of_balance, of_z)

    def _choice(self, logits: Tensor, scores: Array, rule: Gates) -> Choice:
        """Choose the experts, or return the choice of the first pass. Collective in the first pass."""
        tape, spec = logits.tape, logits.spec
        held = tape.first_pass if tape.recording else None
        if held is not None and (self, self.calls) in held:
            choice: Choice = held[self, self.calls]
            return choice
        numbers = rule.numbers(logits.shard, scores)
        library, count, by_experts = spec.library, spec.shape[0], self.choice == "experts"
        limited = self.capacity is not None and self.training
        size = self._size(count) if limited or by_experts else None
        with spec.grid.ledger.phase("router"):
            if by_experts and size is not None:
                choice = of_experts(spec, library.to_numpy(scores), size, numbers)
            else:  # the order of the logits is that of the scores, without their equal values after rounding
                ranked = library.to_numpy(logits.shard)
                if self.bias is not None:
                    ranked = library.to_numpy(scores) + library.to_numpy(self.bias.shard)
                marks = best_experts(ranked, self.top_k) if library.has_data else np.zeros(spec.local_shape, bool)
                choice = of_tokens(spec, marks, size, numbers)
        if not library.has_data:
            choice = evenly(spec, choice, self.top_k, size, by_experts)
        if held is not None:
            held[self, self.calls] = choice
        return choice

    def _size(self, count: int) -> int:
        """Largest number of tokens of an expert, of `count` tokens of the batch."""
        size = max(1, int((self.capacity or 1.0) * self.top_k * count / self.experts))
        return min(size, count) if self.choice == "experts" else size


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise Pmm3dError(f"Router: {name} is {' or '.join(map(repr, known))}; got {value!r}{hint(str(value), known)}")
    return str(value)


def _positive(name: str, value: Any) -> float:
    number = real(value, f"Router: {name} is a number above 0", 0, Pmm3dError)
    if not number:
        raise Pmm3dError(f"Router: {name} is a number above 0; got {value!r}")
    return number


def _noise(spec: TensorSpec, x: Tensor, jitter: float, seed: int, stream: int) -> Tensor:
    """Uniform numbers from 1 - jitter to 1 + jitter for each element. They depend on its row and column in the matrix,
    so they are the same on every grid, in every order of storage."""
    library, noise = spec.library, spec.new()
    if library.has_data:
        values = lambda index: 1 + jitter * (2 * random.uniform(library, index, seed, stream) - 1)
        tokens = Tokens.of(spec)
        rows = np.empty_like(tokens.rows)
        rows[tokens.order] = tokens.rows
        words = library.words(0, spec.shape[0])[library.from_numpy(rows, "int64")]
        random.fill_by(values, noise, x.box, spec.shape[1], words)
    else:
        library.passed("router jitter", noise)
    return Tensor(spec.matrix(noise))


def with_penalty(x: Tensor, penalty: Tensor | None) -> Tensor:
    """x, with a penalty that is added to the loss in the backward pass.

    Parameters
    ----------
    x : Tensor
        (m, n), in any layout, on which the loss depends.
    penalty : Tensor or None
        1 x 1, the same on all ranks, for the rows of one micro-batch. None: the result is x.

    Returns
    -------
    Tensor
        x, in its layout. Nothing is sent.

    Notes
    -----
    The value of the loss does not contain the penalty. Its gradient is the factor of the loss (`Tape.scale`) times the
    micro-batch's share of the rows of the step (`Tape.share`). So a step has the mean of the penalties of its
    micro-batches, weighted by their rows, also in a pipeline. The share is 1 in a loop of your own, unless you set it
    during the backward pass: with Tape.of(grid).set(share=...).

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x, weight = (nn.Tensor(DistMatrix.ones(grid, (1, 1), layout=Layout()), requires_grad=True) for _ in "ab")
    ...     with_penalty(x, weight * 3).backward(scale=2)
    ...     x.grad.local.item(), weight.grad.local.item()
    (2.0, 6.0)
    """
    if penalty is None:
        return x
    spec, grid = penalty.spec, x.grid

    def rule(gradient: Array) -> tuple[Array, Array]:
        tape, seed = Tape.of(grid), spec.new()
        assign(grid.engine, seed, tape.scale * tape.share)
        return gradient, seed

    return x.from_op(x.shard, (x, penalty), rule)
