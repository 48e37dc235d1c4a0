"""What the planner says of what is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pmm3d.model.candidates import Candidate
from pmm3d.model.machines import Machine
from pmm3d.model.ranking import rank_products
from pmm3d.nn.training.config import Config, checked
from pmm3d.nn.training.planning import rank_training, step_of

from .cases import Product, grid_named, name_of
from .compared import Compared
from .measured import Measurement


def of_product(text: str, ranks: int, machine: Machine) -> list[Candidate]:
    """Every grid of exactly that many ranks."""
    product = Product.named(text)
    found = rank_products(product[:3], ranks, product.dtype, machine, exact=True, top=None)
    return found.candidates + found.dropped


def of_step(settings: Mapping[str, Any], ranks: int, machine: Machine) -> list[Candidate]:
    found = rank_training(checked({**settings}), ranks, machine)
    return found.candidates + found.dropped


def memory_of(config: Config, grid: str, ranks: int) -> list[dict[str, int]]:
    """Bytes by kind on each rank."""
    shape = grid_named(grid)
    return [dict(step_of(config, shape, ranks, rank).memory) for rank in range(ranks)]


def beside(measurement: Measurement, where: str, candidates: Iterable[Candidate]) -> Compared:
    """The measurement with what was said of its grids."""
    said = {name_of(candidate.grid): candidate for candidate in candidates}
    known = {grid: said[grid] for grid in measurement["rounds"] if grid in said}
    return Compared(measurement["what"], where, measurement["rounds"],
                    {grid: candidate.seconds for grid, candidate in known.items()}, spent=measurement["spent"],
                    terms={grid: dict(candidate.terms) for grid, candidate in known.items()})
