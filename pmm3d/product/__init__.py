"""Matrices spread over a grid, their 3D product, and arithmetic around it."""

from .matrix import DistMatrix
from .multiply import matmul
from .newton_schulz import matrix_sign, newton_schulz, polar
from .rank_k import herk, syrk
from .repeated import MatmulPlan

__all__ = ["DistMatrix", "MatmulPlan", "herk", "matmul", "matrix_sign", "newton_schulz", "polar", "syrk"]
