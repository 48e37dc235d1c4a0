"""Exchange of tokens with the ranks that own experts: dispatch, and the weighted sum of the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, NumpyLibrary, copy_into
from ...comm import Grid, Pending
from ...errors import DTypeError, GridError, LayoutError
from ...layout import Layout, RaggedRows, natural
from ...layout.layout import layout_of
from ..compute import TensorSpec, check_real, computing, sums_along
from ..contract import Gradient
from ..dense import OTHER
from ..overlapped_gemm import PendingGradient
from ..ragged_rows import same_rows
from ..tensor import Tensor

AXIS = "expert"
"""The axis along which experts are distributed."""


class Turn(NamedTuple):
    """The i-th expert of each token that has more than i experts, in ascending order of the experts' numbers.

    rows    tokens of this rank, in ascending order; slice(None): all of them
    slots   for each of these tokens, its position among the rows that this rank sends
    gates   for each of these tokens, the position of its weight in the flattened table of weights
    """

    rows: Any
    slots: Array
    gates: Array


@dataclass(frozen=True, eq=False)
class Exchange:
    """Which rows of a matrix of tokens go to which expert. `Exchange.of` makes it, for one call of a layer.

    Expert e belongs to the ranks with index e % P along the axis "expert", of P ranks. A rank sends its rows sorted by
    (owner, expert, token). A rank receives rows sorted by (source, own expert, token), and after a gather over n by
    (rank along n, source, own expert, token). A chunk is the rows of one source rank for one expert. Chunks do not
    depend on P.

    Attributes
    ----------
    layout, shape
        Layout and shape of the tokens: rows over data, z, further axes, and n; columns over k.
    k, n : str
        Axis that splits the columns of the tokens, and the other one of x and y.
    own : list of int
        Numbers of this rank's experts.
    sent, received : list of int
        Rows for each rank along the axis "expert", and from each.
    gathered : list of int
        Rows of each rank along n after the exchange.
    slices, rows : RaggedRows
        Number of rows that this rank receives, and this number summed over n.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> from pmm3d.nn.experts import Exchange
    >>> with Grid(MPI.COMM_SELF) as grid:
    ...     x = nn.Tensor(DistMatrix.ones(grid, (3, 2), layout=Layout(("data", "z", "x"), "y")))
    ...     chosen = np.array([[True, False], [True, True], [False, True]])[: x.box.r1]
    ...     exchange = Exchange.of(grid, x, chosen, 2)
    ...     exchange.own, exchange.sent, list(exchange.chunks(0))
    ([0, 1], [4], [[(0, 2)]])
    """

    grid: Grid
    layout: Layout
    shape: tuple[int, int]
    k: str
    n: str
    experts: int
    own: list[int]
    sent: list[int]
    received: list[int]
    gathered: list[int]
    slices: RaggedRows
    rows: RaggedRows
    tokens: Array
    """Row of each token that this rank sends, in the order in which they are sent."""
    gates: Array
    """Position of the weight of each sent row in the flattened table of weights."""
    turns: list[Turn]
    edges: np.ndarray
    """Bounds of the chunks, in the order of the received rows: (ranks along n) x P x (own experts) + 1 numbers."""

    @classmethod
    def of(cls, grid: Grid, x: Tensor, chosen: np.ndarray, experts: int) -> Exchange:
        """Exchange the numbers of rows. Collective.

        Parameters
        ----------
        x : Tensor
            (T, h), the tokens. Rows over data, z, further axes, and n; columns over k. k is y and n is x, or the other
            way round.
        chosen : array of bool, (rows here, experts)
            Whether an expert receives a token, for the rows of x on this rank; a numpy array, equal on the ranks along
            k. A token may have no expert.
        experts : int
            Number of experts, a multiple of P.

        Raises
        ------
        LayoutError, DTypeError, GridError
            On every rank, if the tokens have another layout, if the table does not fit them on any rank, or if the
            number of experts is no multiple of P.

        Notes
        -----
        Each rank receives 8 E (P-1)/P bytes, and 8 E for each further rank along n (phase "expert counts" of the
        ledger). A step with it is not replayed, because the numbers differ from step to step.

        On a dry grid, all ranks are assumed to choose as this rank does.
        """
        with grid.collective_call("Exchange", experts, x.shape, str(x.layout)):
            n = _checked(grid, x, chosen, experts)
        if grid.engine.recorder is not None:
            grid.engine.recorder.refuse("the numbers of tokens of experts differ from step to step")
        axis = grid.axis(AXIS)
        order = [expert for owner in range(axis.size) for expert in range(owner, experts, axis.size)]
        totals = chosen.sum(0, dtype=np.int64)[order]
        counts = _counts_of_all(grid, n, totals)
        here = grid.axis(n).index
        gathered = counts.sum((1, 2)).tolist()
        library = x.library
        rows, gates, turns = (_sent if library.has_data else _sent_dry)(library, chosen, order)
        return cls(
            grid,
            x.layout,
            x.shape,
            x.layout.cols[0],
            n,
            experts,
            order[axis.index * (experts // axis.size) :][: experts // axis.size],
            totals.reshape(axis.size, -1).sum(1).tolist(),
            counts[here].sum(1).tolist(),
            gathered,
            RaggedRows(gathered[here]),
            RaggedRows(sum(gathered)),
            rows,
            gates,
            turns,
            np.concatenate([[0], counts.ravel().cumsum()]),
        )

    @property
    def token_rows(self) -> tuple[str, ...]:
        """Axes that split the rows of the tokens, without n."""
        return self.layout.rows[:-1]

    def chunks(self, number: int) -> Iterator[list[tuple[int, int]]]:
        """Yield, for each source along the axis "expert", the bounds of the chunks of this rank's expert `number`, in
        the order of the ranks along n."""
        sources = len(self.received)
        for source in range(sources):
            places = [(part * sources + source) * len(self.own) + number for part in range(len(self.gathered))]
            yield [(int(self.edges[place]), int(self.edges[place + 1])) for place in places]

    def start(self, spec: TensorSpec, array: Array, phase: str, back: bool = False) -> tuple[Array, Pending | None]:
        """Begin to send rows to the owners of their experts, or back. Return the received rows, and the collective that
        writes them, or None."""
        axis = self.grid.axis(AXIS)
        if axis.size == 1:
            return array, None
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        out = spec.new((sum(received), array.shape[1]))
        with self.grid.ledger.phase(phase):
            return out, axis._all_to_all_into(array, out, sent, received)


def dispatch(x: Tensor, exchange: Exchange) -> Tensor:
    """Send the tokens to the ranks that own their experts. Collective.

    Parameters
    ----------
    x : Tensor
        (T, h), in the layout of the exchange.

    Returns
    -------
    Tensor
        Rows of this rank's experts, h columns. Ragged rows over the axes of the tokens; columns over k. The exchange
        may be in progress: the first use of the values waits.

    Raises
    ------
    LayoutError
        If x is not in the layout and shape of the exchange.

    Notes
    -----
    A rank receives a row of h columns (its part of them) for each choice of one of its experts by a token of another
    rank along "expert", so a token with two experts on one rank is sent there twice. With even routing to k' experts a
    token, a rank with t tokens receives k' t h (P-1)/P elements.
    The ledger's phases are "dispatch" and "dispatch backward". Ranks along n send different rows. The gradient of a
    token is the sum of those of its experts, in ascending order of their numbers, in float32 for 16-bit types.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> from pmm3d.nn.experts import Exchange, dispatch
    >>> with Grid(MPI.COMM_SELF) as grid:
    ...     layout = Layout(("data", "z", "x"), "y")
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j, layout=layout))
    ...     exchange = Exchange.of(grid, x, np.ones((x.box.r1, 2), bool), 2)
    ...     dispatch(x, exchange).local
    array([[0., 1.],
           [0., 1.]])
    """
    _check_tokens("dispatch", x, exchange)
    spec, grid = x.spec, x.grid
    rows = spec.new((exchange.tokens.shape[0], spec.local_shape[1]))
    with computing(grid, "dispatch", name="dispatch"):
        rows[...] = x.shard[exchange.tokens]
    local, pending = exchange.start(spec, rows, "dispatch")

    def rule(gradient: Array) -> tuple[Array]:
        rows = PendingGradient(*exchange.start(spec, gradient, "dispatch backward", back=True)).wait()
        return (_summed(spec, rows, None, exchange, "dispatch backward"),)

    return x.from_op(
        local,
        (x,),
        rule,
        shape=(exchange.slices, x.shape[1]),  # type: ignore[arg-type]
        layout=layout_of(x.layout.rows, x.layout.cols, (), (1, x.layout.units[1])),
        pending=pending,
    )


class Returning(NamedTuple):
    """Results of experts on their way back; see `send_back`."""

    y: Tensor
    rows: PendingGradient


def send_back(y: Tensor, exchange: Exchange) -> Returning:
    """Begin to send the results of experts back, for `combine`. Collective.

    Operations between this call and `combine`, such as a shared expert, run under the exchange. Their backward pass
    runs under the exchange of the gradients.

    Parameters
    ----------
    y : Tensor
        As in `combine`, also for the errors.
    """
    if not same_rows(y.shape[0], exchange.slices) or y.layout.splitting != exchange.layout.splitting:
        raise LayoutError(
            f"combine: y has the rows of `dispatch` with the same exchange, in {exchange.layout}; got {y.shape[0]} x "
            f"{y.shape[1]} in {y.layout}"
        )
    return Returning(y, PendingGradient(*exchange.start(y.spec, y.shard, "combine", back=True)))


def combine(y: Tensor | Returning, gates: Tensor, exchange: Exchange) -> Tensor:
    """Send the results of experts back, and add those of each token, times their weights. Collective.

    Parameters
    ----------
    y : Tensor or Returning
        Results for the rows of `dispatch`, in its layout, of any number of columns; or the value of `send_back`.
    gates : Tensor
        (T, E), the weight of each expert for each token. Rows as the tokens; all columns on each rank. The type is that
        of y, or float32 if y is 16-bit. Weights of experts that were not chosen are not read.

    Returns
    -------
    Tensor
        (T, h). Rows as the tokens, columns over k. A token without experts is 0.

    Raises
    ------
    LayoutError, DTypeError
        If shapes, layouts or types do not fit.

    Notes
    -----
    The bytes are those of `dispatch` in the other direction (phases "combine" and "combine backward"). A token's
    experts are added in ascending order of their numbers, in float32 for 16-bit types, and rounded once. The gradient
    by the weights has partial sums over k.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> from pmm3d.nn.experts import Exchange, combine, dispatch
    >>> with Grid(MPI.COMM_SELF) as grid:
    ...     layout = Layout(("data", "z", "x"), "y")
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j, layout=layout))
    ...     gates = nn.Tensor(DistMatrix.full(grid, (1, 2), 0.25, layout=Layout(layout.rows)))
    ...     exchange = Exchange.of(grid, x, np.ones((x.box.r1, 2), bool), 2)
    ...     combine(dispatch(x, exchange), gates, exchange).gather()
    array([[0. , 0.5]])
    """
    y, returning = y if isinstance(y, Returning) else send_back(y, exchange)
    _check_gates(y, gates, exchange)
    spec, of_gates, grid = y.spec, gates.spec, y.grid
    wants_y, wants_gates = y.requires_grad, gates.requires_grad
    rows = returning.wait()
    result = spec.like((exchange.shape[0], y.shape[1]), _with_columns(exchange.layout, y))
    out = _summed(result, rows, gates.shard, exchange, "combine")

    def rule(gradient: Array, gates: Array, *rows: Array) -> tuple[PendingGradient | None, Gradient | None]:
        of_y = of_weights = None
        with computing(grid, "combine", name="combine backward"):
            of_rows = gradient[exchange.tokens]
        if wants_y:
            sent = spec.new(tuple(of_rows.shape))
            with computing(grid, "combine", name="combine backward"):
                sent[...] = _wide(spec, of_rows) * gates.reshape(-1)[exchange.gates][:, None]
            of_y = PendingGradient(*exchange.start(spec, sent, "combine backward"))
        if wants_gates:
            array = of_gates.new()
            with computing(grid, "combine", name="combine backward"):
                array[...] = 0
                array.reshape(-1)[exchange.gates] = sums_along(_wide(spec, of_rows) * rows[0], 1)
            layout = of_gates.layout
            of_weights = Gradient(array, layout_of(layout.rows, (), (exchange.k,), layout.units))
        return of_y, of_weights

    saved = {"combine.gates": gates} | ({"combine.rows": rows} if wants_gates else {})
    return y.from_op(out, (y, gates), rule, keep=saved, shape=result.shape, layout=result.layout)


def check_shares(what: str, experts: int, ranks: int) -> None:
    """Raise GridError unless the ranks along "expert" hold equally many experts."""
    if experts % ranks:
        raise GridError(
            f"{what}: {experts} experts cannot be distributed evenly over {ranks} ranks along expert. Choose a number "
            "of ranks that divides the number of experts"
        )


def _checked(grid: Grid, x: Tensor, chosen: Any, experts: int) -> str:
    """Return n. Raises an error of `Exchange.of`."""
    natural(experts, "Exchange: the number of experts is a whole number of at least 1", 1, LayoutError)
    check_shares("Exchange", experts, grid.shape.expert)
    if x.grid is not grid:
        raise GridError(f"Exchange: the tokens are on another Grid ({x.grid.shape}) than the exchange ({grid.shape})")
    check_real("Exchange", x.spec)
    layout = x.layout
    k = layout.cols[0] if len(layout.cols) == 1 else ""
    if k not in OTHER or layout.rows[-1:] != (OTHER[k],) or layout.sums or not {"data", "z"} <= {*layout.rows}:
        raise LayoutError(
            "Exchange: the rows of the tokens are over data, z, further axes, and the last one x; their columns are "
            f'over y (or x and y exchanged); got {layout}. nn.relayout(x, Layout(("data", "z", "x"), "y")) '
            "distributes them"
        )
    wanted = x.box.shape[0], experts
    if not isinstance(chosen, np.ndarray) or chosen.dtype != bool or chosen.shape != wanted:
        got = f"{chosen.dtype} of shape {chosen.shape}" if isinstance(chosen, np.ndarray) else type(chosen).__name__
        raise DTypeError(
            f"Exchange: the table of choices is a numpy array of bool with a row for each token of this rank, and a "
            f"column for each expert, {wanted[0]} x {wanted[1]}; got {got}"
        )
    return OTHER[k]


def _counts_of_all(grid: Grid, n: str, totals: np.ndarray) -> np.ndarray:
    """Return the numbers of rows that the ranks along n receive: (ranks along n, P, own experts).

    totals: rows that this rank sends to each expert, sorted by owner
    """
    axis, across = grid.axis(AXIS), grid.axis(n)
    own = len(totals) // axis.size
    received, counts = totals.copy(), np.zeros((across.size, len(totals)), np.int64)
    with grid.ledger.phase("expert counts"):
        if axis.size > 1:
            axis._all_to_all_into(totals, received, [own] * axis.size, [own] * axis.size).wait()
        across._all_gather_into(received[None], counts, [1] * across.size).wait()
    if grid.dry_run is not None:
        counts[...] = np.tile(totals.reshape(axis.size, own)[axis.index], axis.size)
    return counts.reshape(across.size, axis.size, own)


def _sent(library: NumpyLibrary, chosen: np.ndarray, order: list[int]) -> tuple[Array, Array, list[Turn]]:
    """Return `tokens`, `gates` and `turns` of an exchange. order: experts, those of the first owner first."""
    places, tokens = np.nonzero(np.ascontiguousarray(chosen.T[order]))
    numbers = np.asarray(order, np.int64)[places]
    gates = tokens * chosen.shape[1] + numbers
    turns = [*_turns(library, chosen, tokens, numbers)]
    return library.from_numpy(tokens, "int64"), library.from_numpy(gates, "int64"), turns


def _sent_dry(library: NumpyLibrary, chosen: np.ndarray, order: list[int]) -> tuple[Array, Array, list[Turn]]:
    """`_sent` in a dry run: arrays of the same sizes, in little time for millions of tokens."""
    counts = chosen.sum(1)

    def index(size: int) -> Array:
        return library.empty((size,), "int64")

    each = [int(np.count_nonzero(counts > turn)) for turn in range(counts.max(initial=0))]
    turns = [Turn(slice(None) if size == len(chosen) else index(size), index(size), index(size)) for size in each]
    return index(sum(each)), index(sum(each)), turns


def _turns(library: NumpyLibrary, chosen: np.ndarray, tokens: np.ndarray, numbers: np.ndarray) -> Iterator[Turn]:
    """Yield the turns. tokens, numbers: token and expert of each sent row."""
    slots = np.empty(chosen.shape, np.int64)
    slots[tokens, numbers] = np.arange(len(tokens))
    by_token, experts = np.nonzero(chosen)
    counts = chosen.sum(1)
    place = np.arange(len(by_token)) - np.repeat(counts.cumsum() - counts, counts)
    for turn in range(counts.max(initial=0)):
        at = np.flatnonzero(place == turn)
        rows, columns = by_token[at], experts[at]
        index = slots[rows, columns], rows * chosen.shape[1] + columns
        every = slice(None) if len(rows) == len(chosen) else library.from_numpy(rows, "int64")
        yield Turn(every, *[library.from_numpy(each, "int64") for each in index])


def _check_tokens(name: str, x: Tensor, exchange: Exchange) -> None:
    if x.grid is not exchange.grid or x.layout != exchange.layout or x.shape != exchange.shape:
        raise LayoutError(
            f"{name}: the exchange was made for tokens of {exchange.shape[0]} x {exchange.shape[1]} in "
            f"{exchange.layout}; got {x.shape[0]} x {x.shape[1]} in {x.layout}"
        )


def _check_gates(y: Tensor, gates: Tensor, exchange: Exchange) -> None:
    layout = exchange.layout
    if gates.shape != (exchange.shape[0], exchange.experts) or (gates.layout.rows, gates.layout.cols) != (
        layout.rows,
        (),
    ):
        raise LayoutError(
            f"combine: the weights are {exchange.shape[0]} x {exchange.experts}, with the rows of the tokens "
            f"{layout.rows} and whole columns; got {gates.shape[0]} x {gates.shape[1]} in {gates.layout}"
        )
    if gates.dtype != y.spec.accumulation.dtype:
        raise DTypeError(
            f"combine: for results of {y.dtype} the weights are {y.spec.accumulation.dtype}; got {gates.dtype}. "
            "nn.cast converts them"
        )


def _with_columns(layout: Layout, y: Tensor) -> Layout:
    """The layout of the tokens with the units of the columns of y."""
    return layout_of(layout.rows, layout.cols, (), (layout.units[0], y.layout.units[1]))


def _summed(spec: TensorSpec, rows: Array, gates: Array | None, exchange: Exchange, name: str) -> Array:
    """Sum of the rows of each token, times their weights, in the order of the turns. spec: of the tokens."""
    out = spec.new()
    total = out if spec.accumulation is spec else spec.accumulation.new()
    with computing(spec.grid, name.partition(" ")[0], name=name):
        if not exchange.turns or not isinstance(exchange.turns[0].rows, slice):
            total[...] = 0
        for number, turn in enumerate(exchange.turns):
            part = _wide(spec, rows[turn.slots])
            if gates is not None:
                part *= gates.reshape(-1)[turn.gates][:, None]
            if number == 0:
                total[turn.rows] = part
            else:
                total[turn.rows] += part
        if total is not out:
            copy_into(spec.library, total, out)
    return out


def _wide(spec: TensorSpec, array: Array) -> Array:
    """The array in the type in which elements are summed."""
    wide = spec.accumulation.dtype
    return array if wide == spec.dtype else spec.library.astype(array, wide)
