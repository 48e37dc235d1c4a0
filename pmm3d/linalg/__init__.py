"""Linear algebra on block-cyclic and distributed matrices by blocked algorithms, whose operations are products."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported at first use
    from .one_triangle import hemm, symm, trmm
    from .positive_definite import pposv, ppotrf, ppotrs
    from .qr import cholesky_qr
    from .rank_k import pher2k, pherk, psyr2k, psyrk
    from .squares import her2k, herk, syr2k, syrk
    from .symmetric import phemm, psymm
    from .systems import cholesky, cholesky_solve, triangular_inverse, trsm
    from .triangular import ptrsm, ptrtri
    from .triangular_product import ptrmm

_LATER = {
    "one_triangle": ("hemm", "symm", "trmm"),
    "positive_definite": ("pposv", "ppotrf", "ppotrs"),
    "qr": ("cholesky_qr",),
    "rank_k": ("pher2k", "pherk", "psyr2k", "psyrk"),
    "squares": ("her2k", "herk", "syr2k", "syrk"),
    "symmetric": ("phemm", "psymm"),
    "systems": ("cholesky", "cholesky_solve", "triangular_inverse", "trsm"),
    "triangular": ("ptrsm", "ptrtri"),
    "triangular_product": ("ptrmm",),
}  # fmt: skip

__all__ = [
    "cholesky", "cholesky_qr", "cholesky_solve", "hemm", "her2k", "herk", "phemm", "pher2k", "pherk", "pposv", "ppotrf",
    "ppotrs", "psymm", "psyr2k", "psyrk", "ptrmm", "ptrsm", "ptrtri", "symm", "syr2k", "syrk", "triangular_inverse",
    "trmm", "trsm",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'pmm3d.linalg' has no attribute {name!r}")
