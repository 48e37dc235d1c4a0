"""Matrices spread over a grid, their 3D product, and arithmetic around it."""

from typing import TYPE_CHECKING, Any

from .matrix import DistMatrix
from .multiply import matmul
from .repeated import MatmulPlan

if TYPE_CHECKING:  # loaded when they are first used
    from .rank_k import herk, syrk

__all__ = ["DistMatrix", "MatmulPlan", "herk", "matmul", "syrk"]


def __getattr__(name: str) -> Any:
    if name not in ("herk", "syrk"):
        raise AttributeError(f"module 'pmm3d.product' has no attribute {name!r}")
    from . import rank_k

    return getattr(rank_k, name)
