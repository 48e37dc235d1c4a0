"""Layers that hold parameters on the grid: Linear, norms, dropout.

A function of one tensor is a layer too (`nn.relu`). A network of your own is a `Module` with layers as attributes and a
`forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import Any

from ..comm import Grid, call
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import Layout, natural, real
from ..layout.layout import layout_of, unit_of
from ..product import DistMatrix
from ..product.constructors import Library, Shape
from . import functional
from .arithmetic import cast
from .dense import ACTIVATIONS, OTHER, linear, weight_layout
from .module import Module, entered
from .parameter import Parameter, ParameterCollector, StandIn
from .precision import Precision
from .seeds import Seeds, check_grid, derived, seed_of
from .tensor import Tensor

Layer = Callable[..., Any]


def parameter(
    grid: Grid,
    shape: Shape,
    layout: Layout,
    *,
    seed: int | None = None,
    bound: float = 0.0,
    deviation: float | None = None,
    value: float = 0.0,
    dtype: str = "float32",
    library: Library | None = None,
    precision: Precision | str | None = None,
) -> Parameter:
    """New parameter with random values, which are the same on every grid. Collective.

    Parameters
    ----------
    shape, layout : (int, int), Layout
        Shape and layout of the parameter.
    seed : int or None
        Seed of the values. Default: the next seed of the grid (`manual_seed`).
    bound : float
        Half width of the interval of uniform values. Default: 0.
    deviation : float or None
        Standard deviation of normal values. Default: the values are uniform.
    value : float
        Mean of the values. Default: 0.
    dtype, library, precision
        As in `Linear`.

    Raises
    ------
    GridError
        If the grid leaves ranks idle.
    DTypeError
        If the library lacks a type of the precision.
    Pmm3dError
        If `deviation`, `bound` or `value` is not finite, or one of the first two is negative.
    """
    precision = Precision._of(precision, dtype)
    spread = bound if deviation is None else deviation
    if not (0 <= spread < inf and isfinite(value)):
        raise Pmm3dError(
            f"parameter: deviation or bound must be finite and at least 0, and value finite; got {spread} and {value}"
        )
    precision._check(grid.library(library))
    check_grid("parameter", grid)
    if seed is None:
        seed = Seeds.of(grid).next() if bound or deviation else 0
    collector: ParameterCollector = grid.attached.get(ParameterCollector) or ParameterCollector(grid)
    if collector.stands_in:
        made: Parameter = StandIn(grid, shape, layout, precision, grid.library(library))
    else:
        with grid.ledger.holding("weights"):
            value_of = DistMatrix.random(
                grid,
                shape,
                seed=seed,
                dtype=precision.compute,
                layout=layout,
                library=library,
                distribution="uniform" if deviation is None else "normal",
            )
        value_of.local[...] = value_of.local * spread + value
        made = Parameter(value_of, precision)
    collector.parameters.append(made)
    return made


def entering(x: Tensor, weight: Parameter) -> Tensor:
    """Cast an input of float32, or of the master weight's type, to the type of the weight."""
    wider = weight.precision.has_master and x.dtype in ("float32", weight.precision.master)
    return cast(x, weight.dtype) if wider else x


def _move(moved: Parameter, layout: Layout) -> None:
    if moved.layout != layout:
        moved._move(layout)


class Linear(Module):
    """x W + b.

    Parameters
    ----------
    inputs, outputs : int
        Columns of x and of the result.
    bias : bool
        Whether there is a bias. Default: True.
    seed : int or None
        Seed of the initial values, which are uniform in +-1/sqrt(inputs) as in torch. Default: the next seed of the
        grid (`manual_seed`).
    deviation : float or None
        Standard deviation of normal initial weights; biases are then 0. Default: the weights are uniform.
    cols : str
        Axis that splits the columns of x: "y" (default) or "x". `Sequential` and `Module.settle` choose the axis of the
        input. In other cases the input is relaid out.
    activations : str
        "replicated" (default) or "sharded", as in `linear`. net(x, activations=...) replaces it for one call.
    unit : int
        Columns of the result that stay on one rank, such as those of a head. Default: 1.
    weight : Parameter or None
        Weight (inputs, outputs) of another layer, which this layer shares. It determines `cols`, `unit`, and the type
        and library of the bias. Default: a new weight.
    dtype : str
        Element type of the parameters. Default: "float32".
    library : str or None
        Array library of the parameters. Default: the library of the grid.
    precision : str, Precision or None
        "float32", "tf32", "bfloat16", "float16", "float64", or a `Precision`. Default: `dtype`. x may be float32.

    Raises
    ------
    LayoutError
        If `outputs` is no multiple of `unit`, or if shape, `cols` or `unit` are not those of `weight`. A value that
        equals the default counts as left out.
    DTypeError
        If `dtype`, `library` or `precision` are not those of `weight`, in the same way.
    GridError
        If `weight` is on another grid.
    Pmm3dError
        For `deviation` together with `weight`.

    Notes
    -----
    `linear` states the layouts and the bytes that are sent.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     layer = nn.Linear(grid, 3, 2)
    ...     layer(DistMatrix.random(grid, (5, 3), dtype="float32")).shape, layer.weight.shape
    ((5, 2), (3, 2))
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        seed: int | None = None,
        deviation: float | None = None,
        cols: str = "y",
        activations: str = "replicated",
        unit: int = 1,
        weight: Parameter | None = None,
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
    ):
        check_grid("Linear", grid)
        check_sizes("Linear", inputs=inputs, outputs=outputs, unit=unit)
        if outputs % unit:
            raise LayoutError(
                f"Linear: the {outputs} outputs are no multiple of the unit, the {unit} columns of one "
                "head: pass outputs = heads * unit"
            )
        check_activations("Linear", activations)
        self.grid, self.activations = grid, activations
        seed = seed_of(grid, seed)
        options: dict[str, Any] = {"dtype": dtype, "library": library, "precision": precision}
        bound = inputs**-0.5
        if weight is None:
            weight = parameter(
                grid,
                (inputs, outputs),
                weight_layout(cols, (1, unit)),
                seed=derived(seed, 0),
                bound=bound,
                deviation=deviation,
                **options,
            )
        else:
            cols, unit = _check_shared(grid, weight, (inputs, outputs), cols, unit, deviation, **options)
            options = {"library": weight.library.kind, "precision": weight.precision}
        self.weight = weight
        self.bias: Parameter | None = None
        if bias:
            across = Layout((), OTHER[cols], units=(1, unit))
            self.bias = parameter(
                grid, (1, outputs), across, seed=derived(seed, 1), bound=bound if deviation is None else 0.0, **options
            )

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        unit = self.weight.layout.units[1]
        if self not in placed and columns is not None and columns.cols in (("x",), ("y",)):
            [axis] = columns.cols
            inner = unit_of(columns.units[1], axis)
            _move(self.weight, weight_layout(axis, (1 if self.weight.shape[0] % inner else inner, unit)))
            if self.bias is not None:
                _move(self.bias, Layout((), OTHER[axis], units=(1, unit)))
            placed.add(self)
        return Layout((), self.weight.layout.cols, units=(1, unit))

    def forward(self, x: Tensor, activations: str | None = None) -> Tensor:
        k, units = self.weight.layout.rows[0], self.weight.layout.units
        entered(self, x, layout_of((), (k,), (), (1, units[0])))
        return linear(entering(x, self.weight), self.weight, self.bias, activations=activations or self.activations)


def _check_shared(
    grid: Grid,
    weight: Parameter,
    shape: Shape,
    cols: str,
    unit: int,
    deviation: float | None,
    dtype: str,
    library: Library | None,
    precision: Precision | str | None,
) -> tuple[str, int]:
    """Return `cols` and `unit` of a shared weight. Raise an error if an argument of `Linear` contradicts the weight."""
    if weight.grid is not grid:
        raise GridError("Linear: the shared weight is on another grid: pass its grid")
    if not weight.layout.rows:
        raise LayoutError(
            f"Linear: the shared weight is a vector, {weight.shape[0]} x {weight.shape[1]}: pass the weight of a layer"
        )
    axis, held = weight.layout.rows[0], unit_of(weight.layout.units[1], weight.layout.cols[0])
    if deviation is not None:
        raise Pmm3dError(
            f"Linear: deviation={deviation} is for initial values, and the shared weight has values "
            "already: leave deviation or weight out"
        )
    if weight.shape != shape or unit not in (1, held) or cols not in ("y", axis):
        raise LayoutError(
            f"Linear: the shared weight is {weight.shape[0]} x {weight.shape[1]}, cols={axis!r}, "
            f"unit={held}. It does not fit {shape[0]} inputs, {shape[1]} outputs, cols={cols!r}, "
            f"unit={unit}: leave cols and unit out, or pass those of the weight"
        )
    if (precision is not None or dtype != "float32") and Precision._of(precision, dtype) != weight.precision:
        raise DTypeError(
            f"Linear: the shared weight has {weight.precision}, the arguments name "
            f"{Precision._of(precision, dtype)}: leave dtype and precision out"
        )
    if library is not None and weight.grid.library(library).kind != weight.library.kind:
        raise DTypeError(
            f"Linear: the shared weight is an array of {weight.library.kind}, and library names "
            f"{weight.grid.library(library).kind}: leave library out"
        )
    return axis, held


class RMSNorm(Module):
    """x / sqrt(mean of x^2 + eps) * gain, along the columns. See `rms_norm`.

    Parameters
    ----------
    features : int
        Columns of x.
    eps : float
        Added to the mean square. Default: 1e-6.
    cols : str
        Axis that splits the columns of x, as in `Linear`.
    unit : int or None
        Normalize each unit of this number of columns, such as each head. `gain` is then (1, unit), replicated. Default:
        all columns are one unit.
    dtype, library, precision
        As in `Linear`.

    Raises
    ------
    LayoutError
        If `features` is no multiple of `unit`.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     list(nn.RMSNorm(grid, 4).named_parameters()), nn.RMSNorm(grid, 4, unit=2).size
    (['gain'], 2)
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        features: int,
        eps: float = 1e-6,
        *,
        cols: str = "y",
        unit: int | None = None,
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
    ):
        check_grid(type(self).__name__, grid)
        check_sizes(type(self).__name__, features=features, unit=features if unit is None else unit)
        if unit is not None and features % unit:
            raise LayoutError(f"{type(self).__name__}: {features} features are no multiple of the unit, {unit} columns")
        self.grid, self.eps = grid, real(eps, f"{type(self).__name__}: eps is a number of at least 0", 0, Pmm3dError)
        self.features, self.unit = features, unit
        self.gain = parameter(
            grid,
            (1, features if unit is None else unit),
            Layout((), cols if unit is None else ()),
            value=1.0,
            dtype=dtype,
            library=library,
            precision=precision,
        )

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        if self.unit is not None:
            return columns
        if self not in placed and columns is not None and columns.cols:
            if self.gain.shape[1] % unit_of(columns.units[1], columns.cols[0]):
                columns = Layout((), columns.cols)
            for _, moved in self.children():
                if isinstance(moved, Parameter):
                    _move(moved, columns)
            placed.add(self)
        return self.gain.layout

    def forward(self, x: Tensor) -> Tensor:
        if self.unit is None:
            entered(self, x, self.gain.layout)
        elif x.shape[1] != self.features:
            raise LayoutError(f"RMSNorm: the input has {x.shape[1]} columns, the layer {self.features}")
        return functional.rms_norm(entering(x, self.gain), self.gain, self.eps, unit=self.unit)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(variance + eps) * gain + bias, along the columns. See `layer_norm`.

    Parameters
    ----------
    grid, features
        As in `RMSNorm`.
    eps : float
        Added to the variance. Default: 1e-5.
    cols, dtype, library, precision
        As in `RMSNorm`.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     list(nn.LayerNorm(grid, 4).named_parameters())
    ['gain', 'bias']
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        features: int,
        eps: float = 1e-5,
        *,
        cols: str = "y",
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
    ):
        super().__init__(grid, features, eps, cols=cols, dtype=dtype, library=library, precision=precision)
        self.bias = parameter(grid, (1, features), Layout((), cols), dtype=dtype, library=library, precision=precision)

    def forward(self, x: Tensor) -> Tensor:
        entered(self, x, self.gain.layout)
        return functional.layer_norm(entering(x, self.gain), self.gain, self.bias, self.eps)


class Dropout(Module):
    """Zero each element with probability p while the network trains.

    Parameters
    ----------
    p : float
        Probability, at least 0 and below 1. Default: 0.5.
    seed : int or None
        Seed of the masks. Default: the next seed of the grid (`manual_seed`).

    Raises
    ------
    Pmm3dError
        For another `p`.

    Notes
    -----
    A mask depends on the seed, the number of the call, and row and column in the whole batch. So it is the same on
    every grid. See `dropout`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.Dropout(grid, 0.5, seed=0)(DistMatrix.from_function(grid, (1, 4), lambda i, j: 0 * j + 1)).gather()
    array([[2., 0., 2., 0.]])
    """

    replays, arguments = True, ("calls",)

    def __init__(self, grid: Grid, p: float = 0.5, seed: int | None = None):
        check_grid("Dropout", grid)
        self.grid, self.p, self.calls = grid, functional.check_probability("Dropout: p", p), 0
        self.seed = seed_of(grid, seed)

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        return columns

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        call(self.grid.engine, self._count)
        return functional.dropout(x, self.p, self.seed, lambda: self.calls)

    def _count(self) -> None:
        self.calls += 1


def check_sizes(what: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        natural(size, f"{what}: {name} is a whole number, at least 1", 1, LayoutError)


def check_switches(what: str, error: type[Exception] = LayoutError, **switches: Any) -> None:
    """Raise `error` for values that are neither true nor false."""
    for name, given in switches.items():
        if given not in (True, False):
            raise error(f"{what}: {name} is true or false; got {given!r}")


def check_activations(what: str, activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise Pmm3dError(f'{what}: activations are "replicated" or "sharded"; got {activations!r}')
