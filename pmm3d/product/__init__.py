"""Matrices spread over a grid, and their 3D product; as ScaLAPACK has them too."""

from .blacs import BlacsContext, Descriptor
from .matrix import DistMatrix
from .multiply import matmul
from .pblas import PgemmPlan, pgemm
from .redistribution import Redistribution, pgemr2d
from .repeated import MatmulPlan

__all__ = [
    "BlacsContext", "Descriptor", "DistMatrix", "MatmulPlan", "PgemmPlan", "Redistribution", "matmul", "pgemm", "pgemr2d",
]  # fmt: skip
