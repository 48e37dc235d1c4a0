"""Matrices spread over a grid, and their 3D product."""

from .matrix import DistMatrix
from .multiply import matmul
from .repeated import MatmulPlan

__all__ = ["DistMatrix", "MatmulPlan", "matmul"]
