"""Products of the rows of experts with the experts' weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...arrays import Array, add_up, copy_into
from ...comm import Pending, assign
from ...errors import LayoutError
from ...layout import Layout
from ...layout.layout import SINGLE, Units, layout_of
from ...model.stages import in_pairs
from ..arithmetic import check_alike
from ..compute import TensorSpec, gemm
from ..contract import LazyMatrix
from ..dense import OTHER
from ..overlapped_gemm import PendingGradient, gemm_then_relayout
from ..parallel import BackwardSync
from ..parameter import Parameter
from ..ragged_rows import same_rows
from ..tensor import Tensor
from .exchange import AXIS, Exchange


def expert_weight_layout(expert: int, rows: int, k: str, ranks: int, units: Units = SINGLE) -> Layout:
    """Layout of the weight of an expert: rows over k, sharded over "expert_z"; columns over the other one of x and y.

    All rows are on the ranks with index `expert` % `ranks` along the axis "expert". Other ranks store nothing.

    Parameters
    ----------
    expert, rows : int
        Number of the expert, and rows of its weight.
    k : str
        Axis that splits the columns of the layer's input: "x" or "y".
    ranks : int
        Ranks along the axis "expert".
    units : tuple of two int
        Rows and columns that no cut over x, y and "expert_z" separates. Default: 1.

    Examples
    --------
    >>> from pmm3d.nn.experts import expert_weight_layout
    >>> expert_weight_layout(5, 8, "y", 4).rows
    ('expert:1', 'y', 'expert_z')
    """
    owner, (row_unit, col_unit) = f"{AXIS}:{expert % ranks}", units
    by_axis = ((owner, rows), (k, row_unit), ("expert_z", row_unit))
    return layout_of((owner, k, "expert_z"), (OTHER[k],), (), (by_axis, col_unit))


def expert_linear(x: Tensor, weights: Sequence[Parameter], exchange: Exchange, *, tf32: bool | None = None) -> Tensor:
    """O = I W of each expert, for the rows that it received. Collective.

    Parameters
    ----------
    x : Tensor
        I: rows of `dispatch`, with columns over k; or the result of such a product, with columns over n. Elementwise
        functions may have been applied.
    weights : sequence of Parameter
        W of each of the E experts, (columns of I, columns of O), in `expert_weight_layout`; also those that other ranks
        store.
    exchange : Exchange
        The exchange of `dispatch`.
    tf32 : bool or None
        As in `linear`.

    Returns
    -------
    Tensor
        O. If the columns of I are over k, they are over n, and the rows are those of all ranks along n. If the columns
        of I are over n, they are over k, and the rows are those of `dispatch`; their sum may be in progress.

    Raises
    ------
    LayoutError
        If rows, shapes or layouts do not fit.
    GridError, DTypeError
        If grids, libraries or types differ.

    Notes
    -----
    Let r be the rows of all ranks along n, which have Gn ranks, and h and f the columns of I on k and of O on n of a
    rank. Each rank receives

        columns over k   forward   (Gn-1)/Gn r h  +  2 (Gk-1)/Gk r f
                         backward  (Gn-1)/Gn r h
        columns over n   forward   (Gn-1)/Gn r h
                         backward  (Gn-1)/Gn r h  +  2 (Gk-1)/Gk r f

    elements, and gathers and reduce-scatters its experts' weights over "expert_z" as `linear` does over z. There is one
    GEMM for each chunk of the exchange, and gradients of weights are sums of the chunks' products: over the ranks along
    n in order, then pairwise over the sources along z, then data. So the values do not depend on the number of ranks
    along "expert"; docs/experts.md, "Bits", lists the conditions. The sums over "expert_z" and "expert_data" continue
    them. An expert without rows has the gradient 0.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> from pmm3d.nn.experts import Exchange, dispatch, expert_linear, expert_weight_layout
    >>> with Grid(MPI.COMM_SELF) as grid:
    ...     layout = Layout(("data", "z", "x"), "y")
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j, layout=layout))
    ...     exchange = Exchange.of(grid, x, np.ones((x.box.r1, 2), bool), 2)
    ...     weights = [nn.Parameter(DistMatrix.full(grid, (2, 1), value, layout=expert_weight_layout(e, 2, "y", 1)))
    ...                for e, value in enumerate((5.0, 7.0))]
    ...     expert_linear(dispatch(x, exchange), weights, exchange).local
    array([[5.],
           [7.]])
    """
    is_up = _checked(x, weights, exchange)
    units = 1, weights[0].layout.units[1]
    rows = exchange.token_rows
    shape: Any = (exchange.rows if is_up else exchange.slices, weights[0].shape[1])
    layout = (
        layout_of(rows, (exchange.n,), (), units) if is_up else layout_of((*rows, exchange.n), (exchange.k,), (), units)
    )
    products = _Products(
        exchange,
        [weights[expert] for expert in exchange.own],
        x.spec,
        x.spec.like(shape, layout),
        weights[0].precision.tf32 if tf32 is None else tf32,
    )
    if is_up:
        return products.up(x, weights)
    return products.down(x, weights)


class _Products(NamedTuple):
    """Products of one call.

    own       weights of this rank's experts
    came, out   specs of I and O
    """

    exchange: Exchange
    own: list[Parameter]
    came: TensorSpec
    out: TensorSpec
    tf32: bool

    def up(self, x: Tensor, weights: Sequence[Parameter]) -> Tensor:
        """The product of rows that are gathered over n, summed over k."""
        overlap, layout = x.tape.parallel.overlap, self.out.layout
        inputs = self.gathered(x.shard, "gather I")
        fill = lambda out, beta, _: self.multiply(inputs, out, x.tape.phase)
        product = LazyMatrix(self.partial(layout), self.out.local_shape, fill, "reduce O")
        out = gemm_then_relayout(self.out, product, layout).wait()
        regathers, wanted, learns = overlap.regather_inputs, x.requires_grad, [each.requires_grad for each in weights]

        def rule(gradient: Array, *saved: Array) -> list[Any]:
            of_input = PendingGradient(*self.scattered(gradient, "reduce dI", "backward")) if wanted else None
            if of_input is not None and not overlap.oar:
                of_input.wait()
            if regathers:
                saved = tuple([self.gathered(each, "gather I") for each in saved])
            return [of_input, *self.of_weights(saved, gradient, weights, learns)]

        kept = x if regathers or inputs is x.shard else inputs
        return self.result(x, weights, out, rule, kept if any(learns) else None)

    def down(self, x: Tensor, weights: Sequence[Parameter]) -> Tensor:
        """The product of rows on all ranks along n, with a reduce-scatter of its rows over n."""
        local, pending = self.scattered(x.shard, "reduce O", x.tape.phase)
        wanted, learns, came = x.requires_grad, [each.requires_grad for each in weights], self.came

        def rule(gradient: Array, *saved: Array) -> list[Any]:
            gradient, of_input = self.gathered(gradient, "gather dO"), None
            if wanted:
                fill = lambda out, beta, _: self.multiply(gradient, out, "backward", transposed=True)
                of_input = LazyMatrix(self.partial(came.layout), came.local_shape, fill, "reduce dI")
            return [of_input, *self.of_weights(saved, gradient, weights, learns)]

        return self.result(x, weights, local, rule, x if any(learns) else None, pending)

    def partial(self, layout: Layout) -> Layout:
        """The layout with partial sums over k."""
        return layout_of(layout.rows, layout.cols, (self.exchange.k,), layout.units)

    def result(
        self,
        x: Tensor,
        weights: Sequence[Parameter],
        local: Array,
        rule: Callable[..., list[Any]],
        kept: Tensor | Array | None,
        pending: Pending | None = None,
    ) -> Tensor:
        saved = {} if kept is None else {"expert_linear.input": kept}
        shape, layout = self.out.shape, self.out.layout
        return x.from_op(local, (x, *weights), rule, keep=saved, shape=shape, layout=layout, pending=pending)

    def multiply(self, rows: Array, out: Array, phase: str, transposed: bool = False) -> None:
        """Compute out = I W, or I W^T, of each chunk of rows."""
        for number, weight in enumerate(self.own):
            full = BackwardSync.of(self.came.grid).weights.gathered(weight, phase)
            factor = full.T if transposed else full
            for chunks in self.exchange.chunks(number):
                for start, stop in chunks:
                    if start < stop:
                        gemm(self.came, rows[start:stop], factor, out[start:stop], tf32=self.tf32)

    def gathered(self, array: Array, phase: str) -> Array:
        """Gather the rows of all ranks along n."""
        axis, counts = self.came.grid.axis(self.exchange.n), self.exchange.gathered
        if axis.size == 1:
            return array
        out = self.came.new((sum(counts), array.shape[1]))
        with self.came.grid.ledger.phase(phase):
            return axis._all_gather_into(array, out, counts).wait()

    def scattered(self, rows: Array, message: str, phase: str) -> tuple[Array, Pending | None]:
        """Multiply rows of all ranks along n by W (forward) or W^T, and begin to sum this rank's rows over n. Return
        the array of the sum, and the collective that writes it, or None."""
        axis, counts, forward = self.came.grid.axis(self.exchange.n), self.exchange.gathered, message == "reduce O"
        spec = self.out if forward else self.came
        products = spec.new((rows.shape[0], spec.local_shape[1]))
        self.multiply(rows, products, phase, transposed=not forward)
        if axis.size == 1:
            return products, None
        out = spec.new()
        with spec.grid.ledger.phase(message):
            return out, axis._reduce_scatter_into(products, out, counts)

    def of_weights(
        self, saved: Sequence[Array], gradient: Array, weights: Sequence[Parameter], learns: Sequence[bool]
    ) -> list[LazyMatrix | None]:
        """Gradients of the weights of all experts, as sums over this rank's rows."""
        others = tuple([axis for axis in self.exchange.token_rows if axis not in ("data", "z")])
        made = list[LazyMatrix | None]()
        for expert, (weight, wanted) in enumerate(zip(weights, learns)):
            layout, sums = weight.layout, ("expert_data", *others)
            if not wanted:
                made.append(None)
            elif expert in self.exchange.own:
                inputs, number = saved[0], self.exchange.own.index(expert)
                partial = layout_of(layout.rows[:2], layout.cols, ("expert_z", *sums), layout.units)
                fill = self.filling(number, inputs, gradient)
                made.append(LazyMatrix(partial, (inputs.shape[1], gradient.shape[1]), fill, "reduce dW"))
            else:
                partial = layout_of(layout.rows, layout.cols, sums, layout.units)
                made.append(LazyMatrix(partial, weight.spec.local_shape, lambda out, beta, _: None, "reduce dW"))
        return made

    def filling(self, number: int, inputs: Array, gradient: Array) -> Callable[[Array, int, slice], None]:
        """Function that computes out = beta out + I^T dO of the rows of this rank's expert `number`."""
        spec, grid = self.came, self.came.grid
        across, library = grid.shape.z // grid.shape.expert_z, spec.library

        def fill(out: Array, beta: int, _: slice) -> None:
            wide, shape = spec.accumulation.dtype, tuple(out.shape)
            unused = [] if beta or library.dtype(out) != wide else [out]

            def of_source(chunks: list[tuple[int, int]]) -> Array | None:
                total, begun = None, 0
                for start, stop in chunks:
                    if start < stop:
                        if total is None:
                            total = unused.pop() if unused else spec.accumulation.new(shape)
                        gemm(spec, inputs[start:stop].T, gradient[start:stop], total, begun, tf32=self.tf32)
                        begun = 1
                return total

            def add(one: Array | None, other: Array | None) -> Array | None:
                if one is None or other is None:
                    return other if one is None else one
                add_up(library, [one, other], one)
                return one

            sources = [*self.exchange.chunks(number)]
            places = [sources[first : first + across] for first in range(0, len(sources), across)]
            total = in_pairs((in_pairs(map(of_source, place), add) for place in places), add)
            if total is None:
                if not beta:
                    assign(grid.engine, out, 0)
            elif beta:
                add_up(library, [out, total], out)
            elif total is not out:
                copy_into(library, total, out)

        return fill


def _checked(x: Tensor, weights: Sequence[Parameter], exchange: Exchange) -> bool:
    """Whether the columns of x are over k. Raises an error of `expert_linear`."""
    if x.grid is not exchange.grid:
        raise LayoutError(f"expert_linear: x is on the grid {x.grid.shape}, the exchange on {exchange.grid.shape}")
    if len(weights) != exchange.experts or not all(isinstance(each, Parameter) for each in weights):
        raise LayoutError(
            f"expert_linear: there are {exchange.experts} experts; got {len(weights)} weights. Each is a Parameter, "
            "also on ranks that do not store it"
        )
    check_alike("expert_linear", x, *weights)
    rows, cols = weights[0].shape
    if rows != x.shape[1] or any(each.shape != (rows, cols) for each in weights):
        raise LayoutError(
            f"expert_linear: an input of {x.shape[1]} columns needs weights of {x.shape[1]} rows, all of one shape; "
            f"got {', '.join(f'{each.shape[0]} x {each.shape[1]}' for each in weights)}"
        )
    k = x.layout.cols[0] if x.layout.cols in (("x",), ("y",)) else exchange.k
    ranks = exchange.grid.axis(AXIS).size
    for expert, each in enumerate(weights):
        wanted = expert_weight_layout(expert, rows, k, ranks)
        if (each.layout.rows, each.layout.cols, each.layout.sums) != (wanted.rows, wanted.cols, ()):
            raise LayoutError(
                f"expert_linear: for columns of I over {k}, the weight of expert {expert} is in {wanted}, in any "
                f"units; got {each.layout}"
            )
    is_up = k == exchange.k
    wanted_rows = (*exchange.token_rows, exchange.n) if is_up else exchange.token_rows
    same = same_rows(x.shape[0], exchange.slices if is_up else exchange.rows)
    if not same or x.layout.rows != wanted_rows or x.layout.sums:
        raise LayoutError(
            f"expert_linear: with columns over {k}, x has the rows of "
            f"{'`dispatch`' if is_up else 'a product with columns over n'} of the same exchange, over "
            f"{', '.join(wanted_rows)}; got {x.shape[0]} x {x.shape[1]} in {x.layout}"
        )
    return is_up
