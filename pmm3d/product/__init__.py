"""Matrices spread over a grid, and their 3D product."""

from .matrix import DistMatrix
from .multiply import matmul
from .newton_schulz import matrix_sign, newton_schulz, polar
from .repeated import MatmulPlan

__all__ = ["DistMatrix", "MatmulPlan", "matmul", "matrix_sign", "newton_schulz", "polar"]
