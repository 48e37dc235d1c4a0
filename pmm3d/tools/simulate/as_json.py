"""All figures of a simulation, as JSON has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .scaling import VARIANTS, Curve, Point
from .steps import Simulated, Simulator


def as_json(simulator: Simulator, found: Simulated, curves: Sequence[Curve], what: str) -> dict[str, Any]:
    """seconds are those of the slowest rank, with the noise; of rank 0 are memory, bytes and what is hidden."""
    return {
        "what": what, "machine": simulator.machine.name, "ranks": found.grid.size,
        "ranks_per_node": simulator.ranks_per_node, "grid": found.grid._asdict(), "noise": simulator.noise,
        "seconds": found.seconds, "terms": found.terms, "hidden": found.hidden, "alone": dict(found.alone),
        "received": found.received, "memory": found.step.memory, "flop": found.step.flop,
        "priced_as": found.priced_as(simulator.machine), "share_of_peak": found.share_of_peak(simulator.machine),
        "simulated": [{"rank": rank, "stands_for": ranks, "seconds": max(ended, default=0.0)}
                      for (rank, ranks), ended in zip(found.alike.items(), found.timeline.ended)],
        "scaling": {curve.kind: [_point(curve, point) for point in curve.points] for curve in curves},
    }


def _point(curve: Curve, point: Point) -> dict[str, Any]:
    return {
        "ranks": point.ranks, "batch": point.batch, "grid": point.grid._asdict() if point.grid else None,
        "seconds": point.seconds, "memory": point.memory, "why_not": point.why_not,
        "efficiency": {variant: curve.efficiency(point, variant) for variant in VARIANTS if variant in point.seconds},
    }
