"""Matrices spread over a grid, and their 3D product."""

from .matrix import DistMatrix
from .multiply import matmul

__all__ = ["DistMatrix", "matmul"]
