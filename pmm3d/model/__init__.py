"""Plans made before a run: plans and costs of products, rankings of grids, machine descriptions. Modules here import no
MPI, no BLAS and no array library."""

from .plan import Operand, ProductPlan, RankPlan
from .planning import plan_product
from .ranking import best_grid, lower_bound, ranked_grids

__all__ = ["Operand", "ProductPlan", "RankPlan", "best_grid", "lower_bound", "plan_product", "ranked_grids"]
