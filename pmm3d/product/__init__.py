"""Distributed matrices, their 3D product and their arithmetic, and an interface to ScaLAPACK's layouts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .matmul_plan import MatmulPlan, matmul
from .matrix import DistMatrix

if TYPE_CHECKING:  # imported at first use
    from .batch import matmul_batched
    from .blacs import BlacsContext, Descriptor
    from .orthogonal import matrix_sign, newton_schulz, polar
    from .pblas import PgemmPlan, pgemm
    from .redistribution import Redistribution
    from .transposes import pgeadd, pgemr2d, ptran, ptranc, ptranu

_LATER = {
    "batch": ("matmul_batched",),
    "blacs": ("BlacsContext", "Descriptor"),
    "orthogonal": ("matrix_sign", "newton_schulz", "polar"),
    "pblas": ("PgemmPlan", "pgemm"),
    "redistribution": ("Redistribution",),
    "transposes": ("pgeadd", "pgemr2d", "ptran", "ptranc", "ptranu"),
}  # fmt: skip

__all__ = [
    "BlacsContext", "Descriptor", "DistMatrix", "MatmulPlan", "PgemmPlan", "Redistribution", "matmul", "matmul_batched",
    "matrix_sign", "newton_schulz", "pgeadd", "pgemm", "pgemr2d", "polar", "ptran", "ptranc", "ptranu",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'pmm3d.product' has no attribute {name!r}")
