"""Networks on a grid without data: batches of a step, and the memory that it takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays import library_kind
from ..comm import Grid, set_node_maps
from ..errors import Pmm3dError
from ..layout import AXES, Layout
from ..product import DistMatrix
from .tensor import Tensor


class Facts(NamedTuple):
    """Shape, layout, type and kind of library of a matrix."""

    shape: tuple[int, int]
    layout: Layout
    dtype: str
    library: str

    @classmethod
    def of(cls, matrix: DistMatrix | Tensor) -> Facts:
        return cls(matrix.shape, matrix.layout, matrix.dtype, matrix.library.kind)

    def on(self, grid: Grid) -> DistMatrix:
        """Make such a matrix with arbitrary values. The type may be an integer type."""
        box = self.layout.box(self.shape, grid.shape, grid.coords)
        return DistMatrix(grid, grid.library(self.library).empty(box.shape, self.dtype), self.shape, self.layout)


def dry_grid(grid: Grid, rank: int | None = None) -> Grid:
    """Dry grid with the shape and hosts of this grid, or a stage of it, for a rank (default: this rank)."""
    parent, shape = grid.parent, grid.parent.shape
    made = Grid.dry(
        shape[:3],
        shape.data,
        grid.everyone.ranks[grid.rank if rank is None else rank],
        {name: getattr(shape, name) for name in shape.names if name not in AXES},
        parent.hosts,
        expert=shape.expert,
    )
    made.default_library = library_kind(grid.default_library)
    made.node_maps = dict(parent.node_maps)
    set_node_maps([*map(made.axis, (*shape.names, "everyone")), made.stage.everyone], made.node_maps)
    return made if parent is grid else made.stage


def finish_all(grid: Grid) -> None:
    """Wait for all collectives under way on a dry grid."""
    for pending in grid.engine.under_way():
        pending.wait()


def bytes_a_parameter(grid: Grid, network: Any) -> dict[str, float]:
    """Largest number of bytes per parameter that a dry grid has held so far, by kind.

    For bfloat16 with AdamW, these are 18 bytes in all after a step.

        >>> from pmm3d import nn
        >>> with Grid.dry((1, 1, 2)) as grid:
        ...     bytes_a_parameter(grid, nn.MLP(grid, [8, 8], precision="bfloat16", library="torch"))
        {'weights': 2.0, 'gradients': 0.0, 'state': 0.0}
    """
    own = max(1, sum(parameter.box.size for parameter in network.parameters()))
    return {kind: size / own for kind, size in memory(grid).items() if kind != "work"}


def memory(grid: Grid) -> dict[str, int]:
    """Largest number of bytes that a dry grid has held so far, by kind.

    Kinds are "weights", "gradients", "state" (of the optimizer), and "work" (activations and messages).
    """
    run = grid.dry_run
    if run is None:
        raise Pmm3dError("nn.dry.memory needs a grid without data (Grid.dry)")
    return {kind: run.most.get(kind, 0) for kind in ("weights", "gradients", "state")} | {
        "work": grid.workspace.allocated
    }
