"""Torch layers whose columns are split over axes of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import torch

from ..arrays import library_of
from ..comm import Grid
from ..errors import CheckpointError, DTypeError, LayoutError, Pmm3dError
from ..layout import FIRST, Box, Coords, Layout
from ..layout.layout import layout_of
from ..nn.compute import TensorSpec
from ..nn.dense import OTHER, linear, weight_layout
from ..nn.functional import fill_mask, layer_norm
from ..nn.linear_program import LinearProgram
from ..nn.seeds import Seeds, check_grid, derived
from ..nn.tensor import Tensor
from ..product import DistMatrix
from .boundary import gather_columns, own_columns
from .grid_parameter import ROWS, GridParameter, digest, precision_of
from .operation import BackwardPasses, OnTape, Operation, run

COLUMN_AXES = {"column": "y", "row": "x"}
"""The axis that splits the columns of a Linear3D's input, by its role."""
PROGRAMS = 16
"""Largest number of programs of a layer. The oldest one is dropped."""
EXTRA = "_extra_state"
"""Key under which torch stores the result of `get_extra_state` in a state dict."""


class OnGrid(torch.nn.Module):
    """A module that belongs to a grid."""

    def __init__(self, grid: Grid):
        super().__init__()
        check_grid(type(self).__name__, grid)
        self.grid = grid

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Pmm3dError(
            f"{type(self).__name__}: a module on a grid can be neither copied nor pickled: make it again "
            "with parallelize, and load model.state_dict() or full_state_dict(model)"
        )


class ShardedModule(OnGrid):
    """A module whose parameters are shards of matrices.

    Attributes
    ----------
    home : dict of str to ((int, int), Layout)
        Shape and layout of each parameter as `pmm3d.nn` stores it: (inputs, outputs) for a weight, (1, outputs) for a
        vector.
    columns : int
        Columns of the input over all ranks.
    input : Layout
        Layout of the input.
    matrices : tuple of str
        Names of the parameters that are matrices in torch too.
    path : str
        Path of the module in the model, or a name of its own.
    partners : int
        Number of ranks whose losses are averaged; 1 for their sum.
    """

    matrices: tuple[str, ...] = ()
    partners = 1

    def __init__(
        self,
        grid: Grid,
        home: dict[str, tuple[tuple[int, int], Layout]],
        columns: int,
        input: Layout,
        dtype: Any,
        device: Any,
    ):
        super().__init__(grid)
        self.home, self.columns, self.input = home, columns, input
        self.path = f"{type(self).__name__} {next(BackwardPasses.of(grid).numbers)}"
        self.register_forward_pre_hook(_is_called)
        for name in home:
            size = self._box(name).shape if name in self.matrices else self._box(name).shape[1:]
            self.register_parameter(name, torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device)))

    def _box(self, name: str) -> Box:
        """Rows and columns of a parameter's matrix that this rank stores."""
        shape, layout = self.home[name]
        return layout.box(shape, self.grid.shape, self.grid.coords)

    def _held(self, name: str) -> GridParameter:
        """Return the GridParameter over the present memory of a parameter, with its present precision.

        Raises LayoutError if the parameter also belongs to a module that splits it in another way."""
        tensor = getattr(self, name)
        parameter = BackwardPasses.of(self.grid).hold(
            tensor, *self.home[name], f"{self.path}.{name}".lstrip("."), self.partners
        )
        weight = parameter.weight
        if (weight.shape, weight.layout) != self.home[name]:
            raise LayoutError(
                f"{self}: {name} is also {weight.name}, with the layout {weight.layout} of a {weight.shape[0]} x "
                f"{weight.shape[1]} matrix; here it is {self.home[name][1]}. Give one role to layers that share a "
                "weight, or give each its own weight"
            )
        weight.precision = precision_of(tensor)
        return parameter

    def _gather(self, name: str, root: int | None = None) -> torch.Tensor | None:
        """Gather a parameter of the plain module on every rank, or on `root`: None on other ranks. Collective."""
        gathered = self._held(name).weight.value.gather(root)
        return None if gathered is None else self._turned(name, gathered).clone(memory_format=torch.contiguous_format)

    def _load_plain(self, name: str, value: torch.Tensor) -> None:
        """Copy this rank's part of a parameter of the plain module. Local."""
        own = self._turned(name, value)[self._box(name).within(Box(0, 0, 0, 0))]
        with torch.no_grad():
            getattr(self, name).copy_(own.reshape(getattr(self, name).shape))

    def _plain_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the plain module's parameter."""
        rows, cols = self.home[name][0]
        return (cols, rows) if name in self.matrices else (cols,)

    def _turned(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Convert between a parameter of the plain module and its matrix in `pmm3d.nn`, in either direction."""
        if name in self.matrices:
            return value.T
        return value[0] if value.dim() == 2 else value[None]

    def _run(self, function: Callable[..., Tensor], x: torch.Tensor) -> torch.Tensor:
        """Run function(x, *parameters), an operation of `pmm3d.nn`. x has this rank's columns, or all columns."""
        passes, held = BackwardPasses.of(self.grid), [self._held(name) for name in self.home]
        self._check_type(x)
        x, records = self._own_part(x), torch.is_grad_enabled()
        passes.begin_forward()
        if self.grid.debug:
            passes.compare("a layer's input", [digest([x])], trains=records, cols=self.input.cols)
        for each in held:
            each.follow()
        return run(passes, self._operation(function, held, x, records), held, x)

    def _operation(
        self, function: Callable[..., Tensor], held: Sequence[GridParameter], x: torch.Tensor, records: bool
    ) -> Operation:
        """The operation of a call, whose gradients are computed if `records`."""
        return OnTape(
            self.grid,
            lambda operand: function(operand, *[each.weight for each in held]),
            self.input,
            self.columns,
            records,
            records and x.requires_grad,
        )

    def _check_type(self, x: torch.Tensor) -> None:
        weight = next((each for each in self._parameters.values() if each is not None), x)
        if not isinstance(x, torch.Tensor) or x.dtype != weight.dtype or x.device != weight.device:
            given = f"{x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise DTypeError(
                f"{self}: the input is {given}, the parameters {weight.dtype} on {weight.device}. Bring "
                "both to one type and device: model.to(...), x.to(...)"
            )
        if torch.is_autocast_enabled(weight.device.type):
            raise DTypeError(
                f"{self}: autocast does not reach in here: bring the model to one type (model.bfloat16()),"
                " or put this part of the forward pass into torch.autocast(..., enabled=False)"
            )

    def _own_part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the input, which has these or all columns. Raises LayoutError for other widths."""
        own, width = self._width, x.shape[-1] if x.dim() else -1
        if width not in (own, self.columns):
            raise LayoutError(
                f"{self}: an input of shape {tuple(x.shape)}; its columns are this rank's {own}, or all {self.columns}"
            )
        alone = self.grid.axis(self.input.cols[0]).size == 1
        is_own = alone or (width == own and self._own_width(FIRST) < self.columns)
        return x if is_own else own_columns(self.grid, x, self.columns, self.input)

    @cached_property
    def _width(self) -> int:
        """Number of input columns of this rank."""
        return self._own_width()

    def _own_width(self, coords: Coords | None = None) -> int:
        """Number of input columns of this rank, or of the rank at these coordinates."""
        return self.input.box((1, self.columns), self.grid.shape, coords or self.grid.coords).shape[1]

    def _splits(self, x: torch.Tensor) -> set[str]:
        """Axis that splits the columns of x if x can be this rank's part of this module's input; else no axis."""
        width = x.shape[-1] if x.dim() and x.is_floating_point() else -1
        return {*self.input.cols} if width == self._own_width() != self.columns else set()

    def get_extra_state(self) -> dict[str, Any]:
        """Shapes of the matrices, and boxes of this rank's shards. `load_state_dict` raises an error for others."""
        return {name: [*shape, *self._box(name)] for name, (shape, _) in self.home.items()}

    def set_extra_state(self, state: Any) -> None:
        """Do nothing, because `_load_from_state_dict` has compared the state."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        given, own = state_dict.get(f"{prefix}{EXTRA}"), self.get_extra_state()
        if given != own and any(f"{prefix}{name}" in state_dict for name in self.home):
            raise CheckpointError(
                f"{self}: the state dict has the shards of another rank or another grid, or it is "
                f"that of a plain module ({given}, here {own}). Each rank must load its own state "
                "dict, on the same grid. load_full_state_dict loads the result of full_state_dict, "
                "and the state dict of a plain module"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)


def _is_called(*_: object) -> None:
    """A hook that does nothing. It disables torch's fast paths, which read a module's weights without calling it."""


class Linear3D(ShardedModule):
    """x W^T + b by the schedule of `pmm3d.nn.linear`, with its overlaps, under torch's autograd.

    Parameters
    ----------
    in_features, out_features : int
        Features of all ranks, as in torch.nn.Linear.
    bias : bool
        Whether there is a bias.
    role : str
        "column" (default): axis y splits the columns of the input, and axis x those of the result. "row": x, then y.
        Layers with alternating roles need no communication between them. Megatron-LM is a grid of Gx x 1 x 1.
    unit : int
        Columns over x that no cut separates, such as those of a head.
    gather : bool
        Whether the result has all columns, on each rank.
    seed : int or None
        Seed of the initial values, which are uniform in +-1/sqrt(in_features) and the same on every grid. Default: the
        next seed of the grid (`pmm3d.nn.manual_seed`).
    initial : bool
        Whether the parameters get initial values.
    dtype : torch.dtype or None
        Element type of the parameters. Default: torch's.
    device : torch.device or str or None
        Device of the parameters. Default: torch's.

    Raises
    ------
    LayoutError
        For features below 1, and for heads that Gx does not divide.

    Notes
    -----
    The input is (..., columns). Its rows are those of this rank, the same on all ranks along x and y. It has this
    rank's columns, or all of them. The result is (..., columns).

    `weight` is this rank's shard, (inputs, outputs). When `backward()` ends, its gradient is that of the sum of all
    ranks' losses, or of their mean in a module of `parallelize`. torch.autograd.grad does not return it, and there is
    no second derivative.

    Examples
    --------
    >>> import torch
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import Linear3D
    >>> with Grid(shape="fsdp") as grid:
    ...     Linear3D(grid, 3, 4, gather=True)(torch.ones(2, 3)).shape
    torch.Size([2, 4])
    """

    matrices = ("weight",)

    def __init__(
        self,
        grid: Grid,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        role: str = "column",
        unit: int = 1,
        gather: bool = False,
        seed: int | None = None,
        initial: bool = True,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        if role not in COLUMN_AXES:
            raise LayoutError(f'Linear3D: the role is "column" or "row"; got {role!r}')
        if min(in_features, out_features) < 1:
            raise LayoutError(
                f"Linear3D: {in_features} in_features, {out_features} out_features: there must be one at least"
            )
        k = COLUMN_AXES[role]
        across = in_features if k == "x" else out_features
        if unit < 1 or across % unit or (unit > 1 and across // unit % grid.x.size):
            raise LayoutError(
                f"Linear3D: {across} columns over x are heads of {unit}: their number must be a multiple "
                f"of Gx = {grid.x.size}. Choose a grid whose x divides it"
            )
        units = (unit, 1) if k == "x" else (1, unit)
        home = {"weight": ((in_features, out_features), weight_layout(k, units))}
        if bias:
            home["bias"] = (1, out_features), layout_of((), (OTHER[k],), (), (1, units[1]))
        super().__init__(grid, home, in_features, layout_of(ROWS, (k,), (), (1, units[0])), dtype, device)
        self.in_features, self.out_features = in_features, out_features
        self.role, self.unit, self.gather = role, unit, gather
        self._output = layout_of(ROWS, (OTHER[k],), (), (1, units[1]))
        if not bias:
            self.register_parameter("bias", None)
        if initial:
            self._draw(Seeds.of(grid).next() if seed is None else seed)

    def _draw(self, seed: int) -> None:
        """Set random initial values, the same for any grid."""
        for stream, (name, (shape, layout)) in enumerate(self.home.items()):
            local = self._held(name).weight.local
            made = DistMatrix.random(
                self.grid,
                shape,
                seed=derived(seed, stream),
                layout=layout,
                dtype=library_of(local).dtype(local),
                library=library_of(local),
            )
            local[...] = made.local * self.in_features**-0.5

    def _operation(
        self, function: Callable[..., Tensor], held: Sequence[GridParameter], x: torch.Tensor, records: bool
    ) -> Operation:
        """The program of the first call with equal facts. A program belongs to the present memory of the weight."""
        first, *others = held
        weights, rows, programs = [each.weight for each in held], prod(x.shape[:-1]), first.programs
        learn, wanted = tuple([each.node is not None for each in weights]), records and x.requires_grad
        facts = rows, records, wanted, learn, first.weight.precision.tf32, *others
        program = programs.get(facts)
        recorder, kinds = self.grid.engine.recorder, {(each.dtype, each.library) for each in weights}
        if recorder is not None or self.grid.dry_run is not None or len(kinds) > 1:
            return super()._operation(function, held, x, records)
        if program is None:
            if len(programs) == PROGRAMS:
                del programs[next(iter(programs))]
            bias, saves = others[0].weight if others else None, records and (wanted or any(learn))
            program = LinearProgram(self.input, rows, first.weight, bias, wanted, learn[0], saves)
            programs[facts] = program
        return program

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._run(linear, x)
        return gather_columns(self.grid, out, self.out_features, self._output) if self.gather else out

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, role={self.role!r}{f', unit={self.unit}' * (self.unit > 1)}"
            f"{', gather=True' * self.gather}{', bias=False' * ('bias' not in self.home)}, grid={self.grid.shape}"
        )


class LayerNorm3D(ShardedModule):
    """torch.nn.LayerNorm over columns that an axis splits.

    Parameters
    ----------
    features : int
        Number of columns over all ranks.
    axis : str
        "x" or "y": the axis that splits the columns.
    eps : float
        As in torch.nn.LayerNorm.
    affine : bool
        Whether there is a weight (elementwise_affine in torch).
    bias : bool
        Whether there is a bias, if there is a weight.
    dtype : torch.dtype or None
        Element type of the parameters. Default: torch's.
    device : torch.device or str or None
        Device of the parameters. Default: torch's.

    Notes
    -----
    Input and result are (..., columns): this rank's rows and columns. Each rank receives a few numbers for each row.

    Examples
    --------
    >>> import torch
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import LayerNorm3D
    >>> with Grid(shape="ddp") as grid:
    ...     LayerNorm3D(grid, 4, "y")(torch.ones(2, 4)).tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """

    def __init__(
        self,
        grid: Grid,
        features: int,
        axis: str,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        layout = Layout((), axis)
        names = ["weight"] * affine + ["bias"] * (affine and bias)
        home = {name: ((1, features), layout) for name in names}
        super().__init__(grid, home, features, layout_of(ROWS, (axis,)), dtype, device)
        self.eps = eps
        with torch.no_grad():
            for name in names:
                self.get_parameter(name).fill_(name == "weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def norm(operand: Tensor, *learned: Tensor) -> Tensor:
            spec = operand.spec.like((1, self.columns), Layout((), self.input.cols))
            gain, bias = [*learned, *(_constant(spec, value) for value in (1.0, 0.0)[len(learned) :])]
            return layer_norm(operand, gain, bias, self.eps)

        return self._run(norm, x)

    def extra_repr(self) -> str:
        return f"{self.columns}, axis={self.input.cols[0]!r}, eps={self.eps}, grid={self.grid.shape}"


class Dropout3D(OnGrid):
    """torch.nn.Dropout with the mask of the whole batch: ranks that hold the same elements have the same mask.

    Parameters
    ----------
    p : float
        Probability that an element becomes 0, below 1.
    axis : str or None
        Axis that splits the columns. Default: each rank has all columns.

    Raises
    ------
    LayoutError
        For a wrong probability.

    Notes
    -----
    The seed of each mask is drawn from torch's generator, which must be in the same state on all ranks
    (`torch.manual_seed`). A module of `parallelize` compares it in each forward pass. If all ranks have equal numbers
    of rows and columns, the masks are the same on every grid.

    Examples
    --------
    >>> import torch
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import Dropout3D
    >>> with Grid(shape="ddp") as grid:
    ...     Dropout3D(grid, 0.0)(torch.ones(1, 2))
    tensor([[1., 1.]])
    """

    def __init__(self, grid: Grid, p: float = 0.5, axis: str | None = None):
        super().__init__(grid)
        if not 0 <= p < 1:
            raise LayoutError(f"Dropout3D: p is a probability below 1; got {p}")
        self.p, self.axis = p, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        seed = int(torch.randint(2**62, ()))
        grid, rows, columns = self.grid, x.shape[:-1].numel(), x.shape[-1]
        cols = () if self.axis is None else (self.axis,)
        parent_shape = rows * BackwardPasses.of(grid).partners, columns * grid.shape.along(cols)
        mask = x.new_empty((rows, columns), dtype=torch.uint8)
        fill_mask(
            mask, layout_of(ROWS, cols).box(parent_shape, grid.shape, grid.coords), parent_shape[1], self.p, seed, 0
        )
        return (x * mask.view(x.shape)).mul_(1 / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}, axis={self.axis!r}"


def _constant(spec: TensorSpec, value: float) -> Tensor:
    local = spec.new()
    local[...] = value
    return Tensor(spec.matrix(local))
