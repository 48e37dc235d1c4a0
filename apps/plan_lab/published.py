"""The published weak scaling of GPT on Frontier beside simulated steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from measuring import markdown

from pmm3d.errors import Pmm3dError
from pmm3d.model.gpt import GPT
from pmm3d.model.gpt_ranking import Search, rank_by_machine
from pmm3d.model.machines import Machine, load
from pmm3d.model.simulation.noise import fit, slowest

MACHINE = "frontier"
BASE = 512
SEQUENCE, BATCH = 2048, 8192
"""16.8 million tokens at every size."""
SIZES = {512: (24, 4096, 32), 1024: (32, 5120, 40), 2048: (32, 7168, 56), 4096: (38, 9216, 72), 8192: (42, 12288, 96),
         16384: (84, 12288, 96), 32768: (96, 16384, 128)}
"""Ranks -> layers, hidden, heads: 5 to 320 billion parameters. SC'24, from memory but for those of 20, 40 and 80."""
PUBLISHED = {8192: 0.883, 16384: 0.790, 32768: 0.535}
"""Flop/s a rank beside 512 ranks (Singh et al., SC'24)."""
NEAR = 0.15
BASE_OF_PEAK = 0.411
"""At BASE: 22.0% of peak at 32,768 ranks, of which 53.5% is the efficiency."""
BISECTIONS = 12


class Point(NamedTuple):
    """Of a simulated step on the best grid. efficiency: of the rate of a rank at BASE, without noise."""

    ranks: int
    grid: str
    seconds: float
    rate: float
    efficiency: float


def simulated(machine: Machine, sizes: Iterable[int] = tuple(SIZES)) -> list[Point]:
    points: list[Point] = []
    for ranks in sizes:
        layers, hidden, heads = SIZES[ranks]
        gpt = GPT(layers, hidden, SEQUENCE, BATCH, heads)
        best = rank_by_machine(gpt, ranks, machine, Search(memory=machine.memory), top=1).candidates[0]
        rate = gpt.flop / best.seconds / ranks
        points.append(Point(ranks, str(best.grid), best.seconds, rate, rate / points[0].rate if points else 1.0))
    return points


def slower(machine: Machine, share: float) -> Machine:
    """The machine, with GEMMs that reach so much of their rates."""
    gemms = {dtype: replace(gemms, law=gemms.law._replace(rate=share * gemms.law.rate))
             for dtype, gemms in machine.gemms.items() if gemms.law is not None}
    return replace(machine, gemms=gemms)


def fitted_to_base(machine: Machine) -> tuple[Machine, float]:
    """(The machine on which a step of BASE ranks reaches its published share of peak, that share of its GEMM rate.)"""
    low, high = 0.1, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        point = simulated(slower(machine, middle), [BASE])[0]
        low, high = (middle, high) if point.rate < BASE_OF_PEAK * machine.peak["bfloat16"] else (low, middle)
    return slower(machine, high), high


def scaling() -> str:
    """Two tables: of the machine as its file says, and with the rate of its GEMMs fitted to the published base; noise
    fitted on the first published efficiency alone."""
    machine = load(MACHINE)
    fitted, share = fitted_to_base(machine)
    return "\n\n".join([f"{MACHINE} as its file says", table(machine),
                        f"{MACHINE} with {share:.3f} of the GEMM rate, fitted to {BASE_OF_PEAK:.1%} of peak on {BASE} "
                        "ranks", table(fitted)])


def table(machine: Machine) -> str:
    """Efficiencies of a machine beside those that were published."""
    points = {point.ranks: point for point in simulated(machine)}
    fitted_on = min(PUBLISHED)
    try:
        sigma = fit(PUBLISHED[fitted_on], points[fitted_on].efficiency, fitted_on, BASE)
        fitted = f"noise {sigma:.4f} of a rank's step, fitted on {fitted_on:,} ranks alone"
    except Pmm3dError as reason:
        sigma, fitted = 0.0, f"without noise: {reason}"
    rows = [["ranks", "parameters", "grid", "s a step", "of peak", "efficiency", "with noise", "published",
             "simulated / published"]]
    for ranks, point in points.items():
        layers, hidden, _ = SIZES[ranks]
        noisy = point.efficiency * slowest(sigma, BASE) / slowest(sigma, ranks)
        said = PUBLISHED.get(ranks)
        of_peak = point.rate / machine.peak["bfloat16"] / slowest(sigma, ranks)
        rows.append([str(ranks), f"{GPT(layers, hidden, SEQUENCE, BATCH).parameters / 1e9:.0f}e9", point.grid,
                     f"{point.seconds * slowest(sigma, ranks):.2f}", f"{of_peak:.1%}", f"{point.efficiency:.1%}",
                     f"{noisy:.1%}", f"{said:.1%}" if said else "", f"{noisy / said:.3f}" if said else ""])
    return f"{markdown(rows)}\n\n{fitted}; the others are to be within {NEAR:.0%}"
