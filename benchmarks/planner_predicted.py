"""What the planner says of what is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pmm3d.comm.replay import tasks
from pmm3d.model.candidates import Candidate
from pmm3d.model.machines import Machine, groups_of
from pmm3d.model.ranking import rank_products
from pmm3d.model.simulation import simulate
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.planning import rank_training

from .cases import Product, grid_named, name_of
from .compared import Compared
from .measured import Measurement
from .places import Here

ALL = 2**62
"""Bytes of gathered weights that a rank keeps: all that there are, as where memory is not short."""


def of_product(text: str, ranks: int, machine: Machine) -> list[Candidate]:
    """Every grid of exactly that many ranks."""
    product = Product.named(text)
    found = rank_products(product[:3], ranks, product.dtype, machine, exact=True, top=10**6)
    return found.candidates + found.dropped


def of_step(settings: Mapping[str, Any], ranks: int, machine: Machine) -> list[Candidate]:
    found = rank_training(checked({**settings}), ranks, machine)
    return found.candidates + found.dropped


def memory_of(settings: Mapping[str, Any], grid: str) -> list[dict[str, int]]:
    """Bytes by kind on each rank of a grid of one node."""
    steps, shape = DrySteps(checked({**settings}), keep=ALL), grid_named(grid)
    return [steps.of(shape, shape.size, rank).memory for rank in range(shape.size)]


def beside(measurement: Measurement, kind: str, place: Here, candidates: Iterable[Candidate]) -> Compared:
    """The measurement with what was said of its grids, by candidates in their order.

    kind   of the measurement, as `measured.run` names it
    """
    known = {name: candidate for candidate in candidates
             if (name := name_of(candidate.grid)) in measurement["rounds"]}
    return Compared(measurement["what"], str(place), measurement["rounds"],
                    {grid: candidate.seconds for grid, candidate in known.items()}, kind=kind, order=[*known],
                    ranks_per_node=place.ranks_per_node, spent=measurement["spent"],
                    terms={grid: {**candidate.terms} for grid, candidate in known.items()})


def simulated(settings: Mapping[str, Any], grid: str, machine: Machine) -> float:
    """Seconds of a step of all ranks of a grid, each by its own dry run."""
    steps, shape = DrySteps(checked({**settings}), keep=ALL), grid_named(grid)
    per_node = machine.ranks_per_node
    groups = groups_of(shape, per_node)
    return simulate([tasks(steps.of(shape, per_node, rank).actions, machine, groups)
                     for rank in range(shape.size)]).seconds
