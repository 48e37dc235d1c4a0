"""Matrices spread over a grid, their 3D product, and arithmetic around it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .matrix import DistMatrix
from .multiply import matmul
from .repeated import MatmulPlan

if TYPE_CHECKING:  # loaded when they are first used
    from .orthogonal import matrix_sign, newton_schulz, polar
    from .rank_k import herk, syrk

__all__ = ["DistMatrix", "MatmulPlan", "herk", "matmul", "matrix_sign", "newton_schulz", "polar", "syrk"]

_LATER = {"rank_k": ("herk", "syrk"), "orthogonal": ("matrix_sign", "newton_schulz", "polar")}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'pmm3d.product' has no attribute {name!r}")
