"""Matrices spread over a grid, their 3D product, and arithmetic around it; as ScaLAPACK has them too."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .matrix import DistMatrix
from .multiply import matmul
from .repeated import MatmulPlan

if TYPE_CHECKING:  # loaded when they are first used
    from .blacs import BlacsContext, Descriptor
    from .pblas import PgemmPlan, pgemm
    from .rank_k import herk, syrk
    from .redistribution import Redistribution, pgemr2d

_LATER = {"BlacsContext": "blacs", "Descriptor": "blacs", "PgemmPlan": "pblas", "pgemm": "pblas", "herk": "rank_k",
          "syrk": "rank_k", "Redistribution": "redistribution", "pgemr2d": "redistribution"}  # fmt: skip

__all__ = [
    "BlacsContext", "Descriptor", "DistMatrix", "MatmulPlan", "PgemmPlan", "Redistribution", "herk", "matmul", "pgemm",
    "pgemr2d", "syrk",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pmm3d.product' has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)
