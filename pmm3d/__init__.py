"""pmm3d: distributed dense matrix products by the 3D algorithm, on nothing but MPI.

The public names are loaded when they are first used, so that the command line can set the environment of the BLAS
before numpy loads it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers
    from .comm import Axis, Grid, Pending
    from .errors import (
        CheckpointError,
        DataError,
        DisagreementError,
        DTypeError,
        GridError,
        LauncherError,
        LayoutError,
        MemoryLimitError,
        MissingPackageError,
        NotPositiveDefiniteError,
        OutOfMemoryError,
        Pmm3dError,
    )
    from .layout import BlockCyclic, Blocks, Box, GridShape, Layout
    from .linalg import (
        cholesky,
        cholesky_qr,
        cholesky_solve,
        hemm,
        her2k,
        herk,
        phemm,
        pher2k,
        pherk,
        pposv,
        ppotrf,
        ppotrs,
        psymm,
        psyr2k,
        psyrk,
        ptrmm,
        ptrsm,
        ptrtri,
        symm,
        syr2k,
        syrk,
        triangular_inverse,
        trmm,
        trsm,
    )
    from .product import (
        BlacsContext,
        Descriptor,
        DistMatrix,
        MatmulPlan,
        PgemmPlan,
        Redistribution,
        matmul,
        matmul_batched,
        matrix_sign,
        newton_schulz,
        pgeadd,
        pgemm,
        pgemr2d,
        polar,
        ptran,
        ptranc,
        ptranu,
    )

__version__ = "0.1.0"

_ROOMS = {
    "comm": ("Axis", "Grid", "Pending"),
    "errors": ("CheckpointError", "DataError", "DisagreementError", "DTypeError", "GridError", "LauncherError",
               "LayoutError", "MemoryLimitError", "MissingPackageError", "NotPositiveDefiniteError",
               "OutOfMemoryError", "Pmm3dError"),
    "layout": ("BlockCyclic", "Blocks", "Box", "GridShape", "Layout"),
    "linalg": ("cholesky", "cholesky_qr", "cholesky_solve", "hemm", "her2k", "herk", "phemm", "pher2k", "pherk",
               "pposv", "ppotrf", "ppotrs", "psymm", "psyr2k", "psyrk", "ptrmm", "ptrsm", "ptrtri", "symm", "syr2k",
               "syrk", "triangular_inverse", "trmm", "trsm"),
    "product": ("BlacsContext", "Descriptor", "DistMatrix", "MatmulPlan", "PgemmPlan", "Redistribution", "matmul",
                "matmul_batched", "matrix_sign", "newton_schulz", "pgeadd", "pgemm", "pgemr2d", "polar", "ptran",
                "ptranc", "ptranu"),
}  # fmt: skip
__all__ = [
    "Axis", "BlacsContext", "BlockCyclic", "Blocks", "Box", "CheckpointError", "DTypeError", "DataError", "Descriptor",
    "DisagreementError", "DistMatrix", "Grid", "GridError", "GridShape", "LauncherError", "Layout", "LayoutError",
    "MatmulPlan", "MemoryLimitError", "MissingPackageError", "NotPositiveDefiniteError", "OutOfMemoryError", "Pending",
    "PgemmPlan", "Pmm3dError", "Redistribution", "__version__", "cholesky", "cholesky_qr", "cholesky_solve", "hemm",
    "her2k", "herk", "matmul", "matmul_batched", "matrix_sign", "newton_schulz", "pgeadd", "pgemm", "pgemr2d", "phemm",
    "pher2k", "pherk", "polar", "pposv", "ppotrf", "ppotrs", "psymm", "psyr2k", "psyrk", "ptran", "ptranc", "ptranu",
    "ptrmm", "ptrsm", "ptrtri", "symm", "syr2k", "syrk", "triangular_inverse", "trmm", "trsm",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f".{room}", __name__), name)
    raise AttributeError(f"module 'pmm3d' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
