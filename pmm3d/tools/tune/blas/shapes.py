"""The local GEMMs of a job: of a product, or of a step of training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ....comm import Auto, Grid, chosen_shape
from ....errors import Pmm3dError
from ....layout import Layout
from ....model.ranking import best_grid
from ....product import DistMatrix, matmul

MOST = 12
"""GEMMs of a job that are timed: those with most operations."""


class Gemm(NamedTuple):
    """C (m, n) += A (m, k) B, how often in one product or step. form: "n" or "t" for A and B, as in BLAS: whether each
    lies by rows or by columns; C lies by rows."""

    m: int
    n: int
    k: int
    dtype: str
    form: str
    times: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k * (4 if self.dtype.startswith("complex") else 1)


def of_product(sizes: tuple[int, int, int], dtype: str, ranks: int) -> list[Gemm]:
    """Of rank 0 in C = A B on the grid that "auto" would choose without a measured machine."""
    with Grid.dry(best_grid(sizes, ranks)[:3]) as grid:
        m, n, k = sizes
        a = DistMatrix.random(grid, (m, k), seed=1, dtype=dtype)
        b = DistMatrix.random(grid, (k, n), seed=2, dtype=dtype, layout=Layout.B)
        matmul(a, b)
        assert grid.dry_run is not None
        return counted(grid.dry_run.actions)


def of_training(path: Path, ranks: int) -> list[Gemm]:
    """Of rank 0 in a step of a configuration, on its grid."""
    from ....nn.training import config
    from ....nn.training.dry_step import step_of

    loaded = config.load(path)
    shape = chosen_shape(loaded.grid.shape, loaded.grid.data, {}, ranks, None, "float32", None)
    if isinstance(shape, Auto):
        raise Pmm3dError('grid.shape = "auto" depends on what the BLAS reaches: name a grid (pmm3d plan ranks them)')
    return counted(step_of(loaded, shape, ranks).actions)


def counted(actions: list[Any]) -> list[Gemm]:
    """Equal ones together, those with most operations first."""
    found = Counter((action.m, action.n, action.k, action.dtype, action.form or "nn")
                    for action in actions if action.what == "gemm")
    gemms = [Gemm(*what, times) for what, times in found.items()]
    return sorted(gemms, key=lambda gemm: -gemm.flop * gemm.times)[:MOST]
