"""The mixture of experts: a router, experts, and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from ...comm import Grid
from ...errors import Pmm3dError, hint
from ...layout import Layout
from ...layout.layout import layout_of, unit_of
from .. import functional
from ..arithmetic import add, multiply
from ..dense import OTHER
from ..feed_forward import FeedForward, gate_unit, scaled_deviation
from ..layers import Layer, Linear, check_activations, check_sizes, check_switches, entering, parameter
from ..module import Module, entered
from ..parameter import Parameter
from ..parts import split
from ..seeds import check_grid, derived, seed_of
from ..tensor import Tensor, relayout
from .exchange import Exchange, check_shares, combine, dispatch, send_back
from .expert_linear import expert_linear, expert_weight_layout
from .routing import Router, with_penalty

__all__ = ["MoE"]


class ExpertLinear(Module):
    """Weight (inputs, outputs) of an expert, for `expert_linear`. It is stored on the ranks of the expert.

    cols, unit: as of `Linear`; held: number of rows that stay on one rank.
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        expert: int,
        inputs: int,
        outputs: int,
        *,
        cols: str,
        held: int = 1,
        unit: int = 1,
        **options: Any,
    ):
        self.grid, self.expert = grid, expert
        layout = expert_weight_layout(expert, inputs, cols, grid.shape.expert, (held, unit))
        self.weight = parameter(grid, (inputs, outputs), layout, bound=inputs**-0.5, **options)

    def move(self, cols: str, held: int, unit: int) -> None:
        """Move the weight to the layout of an input with columns over `cols`. Collective."""
        layout = expert_weight_layout(self.expert, self.weight.shape[0], cols, self.grid.shape.expert, (held, unit))
        if self.weight.layout != layout:
            self.weight._move(layout)


class Expert(Module):
    """Weights of one expert: `up` (hidden, inner), or twice as many columns if it is gated, and `down` (inner, hidden).
    The rank `number` modulo P along the axis "expert" of P ranks owns it."""

    replays = True

    def __init__(
        self, grid: Grid, number: int, hidden: int, inner: int, unit: int, *, seed: int, deviation: float | None,
        residual: float, **options: Any,
    ):  # fmt: skip
        self.grid, self.unit = grid, unit
        columns = inner * (2 if unit else 1)
        self.up = ExpertLinear(
            grid, number, hidden, columns, cols="y", unit=2 * unit or 1, seed=derived(seed, 0), deviation=deviation,
            **options,
        )  # fmt: skip
        self.down = ExpertLinear(
            grid, number, inner, hidden, cols="x", held=unit or 1, seed=derived(seed, 1),
            deviation=scaled_deviation("MoE", deviation, residual), **options,
        )  # fmt: skip

    def move(self, cols: str, unit: int) -> None:
        """Move the weights to the layout of an input with columns over `cols` in these units. Collective."""
        self.up.move(cols, unit, 2 * self.unit or 1)
        self.down.move(OTHER[cols], self.unit or 1, unit)


class MoE(Module):
    """Mixture of experts: y = sum of g_e expert_e(x), over the experts that a `Router` chooses for each token.

    An expert is an MLP without biases, down(activation(up x)), or if gated, down(activation(gate x) * up x).

    Parameters
    ----------
    grid : Grid
        The grid of the parameters. `Grid(comm, shape, data, expert=P)` distributes the experts over P of the ranks
        along z and data.
    hidden, inner : int
        Columns of the input and of the result, and columns between the layers of an expert.
    experts : int
        Number of experts, E. Expert e belongs to the ranks with the index e modulo P along "expert".
    top_k : int
        Number of experts of a token. Default: 2.
    activation : callable or str
        As in `FeedForward`. Default: "gelu_tanh".
    gated : bool
        Whether experts have a gate, as in `FeedForward`. Default: False.
    shared : int
        Columns between the layers of the shared expert, a `FeedForward` of all tokens whose result is added. Default:
        0, no shared expert.
    shared_gate : bool
        Whether the result of the shared expert is multiplied by sigmoid(x w), as in Qwen2-MoE. Default: False.
    activations : str
        As in `linear`, for the shared expert.
    deviation, residual, seed
        As in `Attention`. `residual` is for the last layer of each expert.
    router : mapping or None
        Further arguments of the `Router`, such as {"capacity": 1.25, "balance": 0.01}. `MoE` itself passes `top_k`,
        `deviation`, the seed, and the options to its router. Default: none.
    **options
        `dtype`, `library` and `precision`, as in `Linear`.

    Raises
    ------
    GridError
        If the ranks along "expert" do not divide the experts.
    LayoutError, Pmm3dError
        For values out of range, also of the `Router`, and for names that are no further arguments of it.

    Notes
    -----
    net(x): x is (T, hidden), with rows over data, z, and axes of sequences; the result has the layout of x.

    Parameters are `router.weight` (hidden, E), `experts.e.up.weight`, `experts.e.down.weight`, `shared.up.weight`,
    `shared.down.weight` and `shared_gate.weight`. Names, shapes and initial values do not depend on the grid. The rows
    of an expert's weight are over "expert" (one index), the axis of the input's columns, and "expert_z". Dense layers
    see the ranks along "expert" as ranks along z and data.

    Let k be the axis of the columns of x, and n the other one of x and y. A rank has h = hidden / Gk columns of the
    T_here tokens of its part of the batch along data, z and axes of sequences, and f = inner / Gn columns between the
    layers of an expert. With e experts a token, and P ranks along "expert", it receives in a step with even routing

        router               `Router.route`, with T_here / Gn rows
        numbers of tokens    E (P-1)/P + (Gn-1) E
        dispatch, combine    4 (P-1)/P e T_here/Gn h
        sums over n          4 (Gn-1)/Gn e T_here h
        sums over k          2 (Gk-1)/Gk e T_here (up + f), where up is f, or 2 f if experts are gated
        result, gradient     2 (Gn-1)/Gn T_here h, if the rows of x are not split over n
        weights of experts   as those of `linear`, of E/P experts, over "expert_z" and "expert_data" in place of z, data

    elements, in the forward and backward passes together. Tokens that all ranks along n hold are sent once: each of
    these ranks sends its part of them.

    The result and the gradients have the same bits for each P of a grid; docs/experts.md, "Bits", lists the conditions.
    The results of experts return while the shared expert is computed, and their gradients while its gradients are.

    `loss.item()` does not contain the losses of the router. `Router` says how a loop of your own weighs them.

    Steps with experts are not replayed, because the number of rows of each expert differs from step to step.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.MoE(grid, 8, 16, 4, seed=0)
    ...     x = DistMatrix.random(grid, (6, 8), dtype="float32")
    ...     net(x).shape, list(net.named_parameters())[:3], net.size
    ((6, 8), ['router.weight', 'experts.0.up.weight', 'experts.0.down.weight'], 1056)
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int = 2,
        *,
        activation: Layer | str = "gelu_tanh",
        gated: bool = False,
        shared: int = 0,
        shared_gate: bool = False,
        activations: str = "replicated",
        deviation: float | None = None,
        residual: float = 1.0,
        seed: int | None = None,
        router: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        check_grid("MoE", grid)
        check_sizes("MoE", hidden=hidden, inner=inner, experts=experts, **({"shared": shared} if shared else {}))
        check_switches("MoE", gated=gated, shared_gate=shared_gate)
        check_activations("MoE", activations)
        if shared_gate and not shared:
            raise Pmm3dError("MoE: shared_gate is for the shared expert: pass shared=, its number of columns, too")
        check_shares("MoE", experts, grid.shape.expert)
        self.grid = grid
        self.activation = functional.activation_named(activation) if isinstance(activation, str) else activation
        self.unit = gate_unit(inner) if gated else 0
        seed = seed_of(grid, seed)
        common: dict[str, Any] = {"deviation": deviation, **options}
        of_router = {**common, **router_options(router)}
        self.router = Router(grid, hidden, experts, top_k, seed=derived(seed, 0), **of_router)
        self.experts = [
            Expert(grid, number, hidden, inner, self.unit, residual=residual, seed=derived(seed, 3 + number), **common)
            for number in range(experts)
        ]
        self.shared = self.shared_gate = None
        if shared:
            self.shared = FeedForward(
                grid, hidden, shared, self.activation, gated=gated, bias=False, activations=activations,
                residual=residual, seed=derived(seed, 1), **common,
            )  # fmt: skip
        if shared_gate:
            self.shared_gate = Linear(grid, hidden, 1, False, seed=derived(seed, 2), **common)

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        if self not in placed and columns is not None and columns.cols in (("x",), ("y",)):
            [axis] = columns.cols
            unit = unit_of(columns.units[1], axis)
            for each in self.experts:
                each.move(axis, 1 if each.up.weight.shape[0] % unit else unit)
            placed.add(self)
        for part in (self.router, self.shared, self.shared_gate):
            if part is not None:
                part._assign_layout(columns, placed)
        return self._columns

    @property
    def _columns(self) -> Layout:
        """Layout of the columns of the input and of the result."""
        layout = self.experts[0].down.weight.layout
        return layout_of((), layout.cols, (), (1, unit_of(layout.units[1], layout.cols[0])))

    def forward(self, x: Tensor) -> Tensor:
        entered(self, x, self._columns)
        columns = self._columns
        ups, downs = ([getattr(each, name).weight for each in self.experts] for name in ("up", "down"))
        tokens = relayout(entering(x, ups[0]), slices(x.layout, columns))
        routed = self.router.route(tokens)
        exchange = Exchange.of(self.grid, tokens, routed.chosen, len(self.experts))
        results = self._of_experts(dispatch(tokens, exchange), ups, downs, exchange)
        returning = send_back(results, exchange)
        beside = self._beside(x)  # under the exchange
        out = combine(returning, routed.gates, exchange)
        if routed.penalty is not None:
            out = with_penalty(out, routed.penalty)
        out = relayout(out, layout_of(x.layout.rows, columns.cols, (), (x.layout.units[0], columns.units[1])))
        return out if beside is None else add(out, beside)

    def _of_experts(
        self, x: Tensor, ups: Sequence[Parameter], downs: Sequence[Parameter], exchange: Exchange
    ) -> Tensor:
        """Results of the experts of this rank, for the rows that they received."""
        x = expert_linear(x, ups, exchange)
        if not self.unit:
            return expert_linear(self.activation(x), downs, exchange)
        gate, factor = split(x, [self.unit, self.unit])
        return expert_linear(multiply(self.activation(gate), factor), downs, exchange)

    def _beside(self, x: Tensor) -> Tensor | None:
        """Result of the shared expert, or None."""
        if self.shared is None:
            return None
        out: Tensor = self.shared(x)
        if self.shared_gate is None:
            return out
        gate = functional.sigmoid(self.shared_gate(x))
        return multiply(out, relayout(gate, layout_of(gate.layout.rows, (), (), (gate.layout.units[0], 1))))


FROM_LAYER = "grid", "hidden", "experts", "top_k", "deviation", "seed", "cols", "dtype", "library", "precision"
"""Arguments of its router that `MoE` sets."""


def router_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the further arguments of a router.

    >>> router_options({"balance": 0.01})
    {'balance': 0.01}
    """
    if not isinstance(given or {}, Mapping):
        raise Pmm3dError(
            f'MoE: router is a mapping of arguments of `Router`, such as {{"balance": 0.01}}; got {given!r}'
        )
    known = [name for name in signature(Router).parameters if name not in FROM_LAYER]
    for name in given or {}:
        if name == "cols":
            raise Pmm3dError("MoE: the router follows the columns of the input of MoE. Leave cols out of router")
        if name in FROM_LAYER:
            raise Pmm3dError(f"MoE: MoE sets {name} of its router. Pass {name} to MoE itself, and not in router")
        if name not in known:
            raise Pmm3dError(f"MoE: a router has no argument {name!r}{hint(str(name), known)}")
    return dict(given or {})


def slices(held: Layout, columns: Layout) -> Layout:
    """Layout of tokens in which no two ranks hold the same elements. held: their layout before; columns: layout of the
    columns, over x or y. The other one of both also splits the rows, inside the units of a sequence.

    >>> slices(Layout(("data", "z"), "y", units=(8, 1)), Layout((), "y"))
    Layout(rows=('data', 'z', 'x'), cols=('y',), units=((('data', 8), ('z', 8)), 1))
    """
    [k] = columns.cols
    rows = tuple(axis for axis in held.rows if axis not in OTHER)
    if not {"data", "z"} <= set(rows):
        rows = ("data", "z", *(axis for axis in rows if axis not in ("data", "z")))
    unit = held.units[0]
    if held.rows != (*rows, OTHER[k]) and isinstance(unit, int) and unit != 1:
        unit = tuple((axis, unit) for axis in rows)
    return layout_of((*rows, OTHER[k]), (k,), (), (unit, columns.units[1]))
