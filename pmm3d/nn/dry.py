"""Networks on a grid without data: what a step sends, computes and holds, told by the network itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

from ..arrays import library_kind
from ..comm import Grid, set_node_maps
from ..errors import Pmm3dError
from ..layout import AXES, Layout
from ..product import DistMatrix
from .module import Module
from .optim import Optimizer
from .parameter import Parameter
from .tape import Tape

Made = TypeVar("Made", Module, tuple[Module, Optimizer])


class Facts(NamedTuple):
    """All of a matrix but its grid and its values; `library` by its kind."""

    shape: tuple[int, int]
    layout: Layout
    dtype: str
    library: str

    @classmethod
    def of(cls, matrix: DistMatrix) -> Facts:
        return cls(matrix.shape, matrix.layout, matrix.dtype, matrix.library.kind)

    def on(self, grid: Grid) -> DistMatrix:
        """A matrix like it with arbitrary values, of integers too."""
        box = self.layout.box(self.shape, grid.shape, grid.coords)
        return DistMatrix(grid, grid.library(self.library).empty(box.shape, self.dtype), self.shape, self.layout)


def dry_grid(grid: Grid, rank: int | None = None) -> Grid:
    """A grid without data of the same shape and hosts, or a stage of one; the rank is the same if left out."""
    whole, shape = grid.whole, grid.whole.shape
    made = Grid.dry(shape[:3], shape.data, grid.everyone.ranks[grid.rank if rank is None else rank],
                    {name: getattr(shape, name) for name in shape.names if name not in AXES}, whole.hosts)
    made.default_library = library_kind(grid.default_library)
    made.node_maps = dict(whole.node_maps)
    set_node_maps([*map(made.axis, (*shape.names, "everyone")), made.stage.everyone], made.node_maps)
    return made if whole is grid else made.stage


def twin(made: Made, grid: Grid) -> Made:
    """A copy of a network, or of (network, optimizer), on a grid without data of the same axes: parameters of the same
    shapes, layouts, types and names; and the same overlap. Nothing is sent.

    Raises Pmm3dError for a network that cannot be copied, or holds matrices that are no parameters.

        >>> from pmm3d import nn
        >>> with Grid(shape="fsdp") as grid, dry_grid(grid) as dry:
        ...     twin(nn.MLP(grid, [3, 4, 2]), dry).size
        26
    """
    network = made[0] if isinstance(made, tuple) else made
    memo: dict[int, Any] = {id(network.grid): grid}
    for parameter in network.parameters():
        memo[id(parameter)] = _dry_parameter(parameter, grid)
    if isinstance(made, tuple):
        memo[id(made[1]._state)] = {}
    mine, its = Tape.of(network.grid).parallel, Tape.of(grid).parallel
    its.overlap, its.weights.budget = mine.overlap, mine.weights.budget
    try:
        return deepcopy(made, memo)
    except Exception as error:
        raise Pmm3dError(f"{type(network).__name__} cannot be copied to a grid without data: {error}") from None


def _dry_parameter(parameter: Parameter, grid: Grid) -> Parameter:
    with grid.ledger.holding("weights"):
        copy = Parameter(Facts.of(parameter.stored).on(grid), parameter.precision)
    copy._learn(parameter.requires_grad)
    copy.name, own, its = parameter.name, parameter.accumulated, copy.accumulated
    its.split_over, its.scattered = own.split_over, own.scattered
    return copy


def settle(grid: Grid) -> None:
    """Wait for all collectives under way; of a dry grid."""
    for pending in grid.engine.under_way():
        pending.wait()


def bytes_a_parameter(grid: Grid, network: Module) -> dict[str, float]:
    """Bytes by kind that a dry grid has held so far for each parameter of the network that this rank has a part of: 18
    in all of bfloat16 with AdamW once a step was taken.

        >>> from pmm3d import nn
        >>> with Grid.dry((1, 1, 2)) as grid:
        ...     bytes_a_parameter(grid, nn.MLP(grid, [8, 8], precision="bfloat16", library="torch"))
        {'weights': 2.0, 'gradients': 0.0, 'state': 0.0}
    """
    own = max(1, sum(parameter.box.size for parameter in network.parameters()))
    return {kind: size / own for kind, size in memory(grid).items() if kind != "work"}


def memory(grid: Grid) -> dict[str, int]:
    """Bytes by kind that a dry grid has held so far, the most of each: weights, gradients, state of the optimizer, and
    "work": all buffers of the workspace, for activations and messages."""
    run = grid.dry_run
    if run is None:
        raise Pmm3dError("the memory of a grid with data is that of its arrays; a dry run is on Grid.dry")
    return {kind: run.most.get(kind, 0) for kind in ("weights", "gradients", "state")} | {
        "work": grid.workspace.allocated}
