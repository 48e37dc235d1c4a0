"""What is decided and known before anything runs: the plan of a product, its cost, grids ranked, the machine. Pure: no
MPI, no BLAS, no array library."""

from .plan import Operand, ProductPlan, RankPlan
from .planning import plan_product
from .ranking import best_grid, lower_bound, ranked_grids

__all__ = ["Operand", "ProductPlan", "RankPlan", "best_grid", "lower_bound", "plan_product", "ranked_grids"]
