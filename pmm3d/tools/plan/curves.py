"""Strong and weak scaling of a training: the time of a step by number of ranks, with and without each overlap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import Pmm3dError
from ...layout import GridShape
from ...nn.training.config import Config
from ...text import counted, percent
from ..output import FigureTable
from ..plots import picture, titled
from ..ranks import MOST_RANKS
from ..terminal import console
from .ranking import tell
from .step import Training

SPAN = 64
"""Largest over smallest number of ranks of a curve, if FROM is not given."""
FEW = 3
"""Number of grids that are simulated at a point, besides presets and grids like those of other points."""
AS_IT_IS = "as configured"
SWITCHES = ("oar", "ors", "oag", "buckets")
VARIANTS = (AS_IT_IS, *(f"no {switch}" for switch in SWITCHES), "none")
"""Choices of overlaps: as configured, without one of them, without any."""
STYLES = {
    AS_IT_IS: ("#4477aa", "-"),
    "no oar": ("#ee6677", "--"),
    "no ors": ("#ccbb44", "--"),
    "no oag": ("#228833", "--"),
    "no buckets": ("#aa3377", "--"),
    "none": ("#555555", ":"),
}
ALIKE = 0.5
"""Largest difference, in percent, between lines that coincide."""
Line = list[tuple[int, float]]
"""(ranks, efficiency in percent) of each point whose efficiency is known."""
GridOf = Callable[[Config, int], GridShape]
"""Function that returns the grid for a configuration and a number of ranks."""


@dataclass(frozen=True)
class Point:
    """A point of a curve.

    grid      grid of the ranks; None if no grid fits
    batch     rows of the batch, on all ranks together
    seconds   seconds of a step, by choice of overlaps
    memory    bytes on the fullest rank
    why_not   reason why the grid cannot be used, or ""
    """

    ranks: int
    batch: int
    grid: GridShape | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    memory: int = 0
    why_not: str = ""


@dataclass(frozen=True)
class Curve:
    """Points of one kind of scaling. kind: "strong": the same batch on more ranks; "weak": the batch grows as well."""

    kind: str
    points: list[Point]

    def efficiency(self, point: Point, variant: str = AS_IT_IS) -> float | None:
        """Return the efficiency relative to the first point that fits, as configured; None if a time is not known."""
        first = next((other for other in self.points if other.seconds and not other.why_not), None)
        if first is None or variant not in point.seconds:
            return None
        ideal = first.seconds[AS_IT_IS] * (first.ranks / point.ranks if self.kind == "strong" else 1)
        ideal *= point.batch / (first.batch * point.ranks / first.ranks) if self.kind == "weak" else 1
        return ideal / point.seconds[variant] if point.seconds[variant] else None

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "ranks": point.ranks,
                "batch": point.batch,
                "grid": point.grid._asdict() if point.grid else None,
                "seconds": point.seconds,
                "memory": point.memory,
                "why_not": point.why_not,
                "efficiency": {variant: self.efficiency(point, variant) for variant in point.seconds},
            }
            for point in self.points
        ]


def rank_counts(ranks: int, asked: str) -> list[int]:
    """Return the numbers of ranks of --curve: the powers of two in the range, and `ranks` if it is in the range.

        >>> rank_counts(48, "16:128"), rank_counts(4, "256")
        ([16, 32, 48, 64, 128], [4, 8, 16, 32, 64, 128, 256])

    Raises Pmm3dError for a text that is neither RANKS nor FROM:TO.
    """
    try:
        *first, last = map(int, asked.split(":", 1))
    except ValueError:
        first, last = [], 0
    begin = first[0] if first else max(1, min(ranks, last // SPAN))
    if not 1 <= begin <= last <= MOST_RANKS:
        raise Pmm3dError(
            f"--curve {asked!r} is not a range of ranks: give the largest number, as in 4096, or FROM:TO, "
            f"as in 64:4096; at most {MOST_RANKS:,}"
        )
    powers = [2**power for power in range(last.bit_length()) if begin <= 2**power <= last]
    return sorted({*powers, *([ranks] if begin <= ranks <= last else [])})


def best_grids(training: Training, ranks: int, best: GridShape) -> GridOf:
    """Return a function that finds the best grid of other numbers of ranks. It simulates the first few by estimated
    time, and grids like `best` and like the grid that it found last."""
    known = {(training.config.data.batch_size, ranks): best}

    def best_grid(config: Config, count: int) -> GridShape:
        key = config.data.batch_size, count
        if key not in known:
            last = [*known.values()][-1]
            known[key] = (
                training.ranking(
                    count, config, top=FEW, actions=0, also=[*_like(best, count, 1), *_like(last, count, 2)]
                )
                .candidates[0]
                .grid
            )
        return known[key]

    return best_grid


def _like(grid: GridShape, ranks: int, times: int) -> Iterator[GridShape]:
    """Yield `grid`, and `grid` with x, y or z multiplied by `times`, on these ranks. The other ranks are along data.
    They have no axis "expert", which the ranking chooses."""
    grid = grid.folded(1)
    for factors in {(1, 1, 1), (times, 1, 1), (1, times, 1), (1, 1, times)}:
        other = grid._replace(data=1, **{axis: size * factor for axis, size, factor in zip("xyz", grid, factors)})
        if ranks % other.size == 0:
            yield other._replace(data=ranks // other.size)


def curves_of(
    training: Training, ranks: int, counts: Sequence[int], grid_of: GridOf, told: Callable[[int, int], None]
) -> list[Curve]:
    """Return the strong and the weak curve. The configuration's batch is for `ranks`. told(points done, all points)."""
    curves = list[Curve]()
    for kind in ("strong", "weak"):
        points = list[Point]()
        for count in counts:
            points.append(_point(training, kind, ranks, count, grid_of))
            told(len(counts) * len(curves) + len(points), 2 * len(counts))
        curves.append(Curve(kind, points))
    return curves


def _point(training: Training, kind: str, ranks: int, count: int, grid_of: GridOf) -> Point:
    config = training.config
    batch = config.data.batch_size if kind == "strong" else max(1, round(config.data.batch_size * count / ranks))
    config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": batch})})
    grid, seconds, memory, why_not = None, dict[str, float](), 0, ""
    try:
        grid = grid_of(config, count)
        for variant, changed in _variants(config):
            step = training.on(grid, changed)
            seconds[variant] = training.seconds(step)
            if variant == AS_IT_IS:
                memory, why_not = sum(step.memory.values()), step.why_not
    except Pmm3dError as error:
        why_not = str(error)
    return Point(count, batch, grid, seconds, memory, why_not)


def _variants(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield each choice of overlaps and its configuration."""
    for variant in VARIANTS:
        off = {"none": SWITCHES, AS_IT_IS: ()}.get(variant, (variant.removeprefix("no "),))
        overlap = config.overlap.model_copy(update=dict.fromkeys(off, False))
        yield variant, config.model_copy(update={"overlap": overlap})


def print_curve(curve: Curve, training: Training) -> None:
    """Print a row for each number of ranks, and the reasons why grids cannot be used."""
    how = "the same batch" if curve.kind == "strong" else "a batch that grows with the ranks"
    table = FigureTable(
        f"[bold]{curve.kind.capitalize()} scaling[/]: {how}; ms a step, by the overlaps that are on",
        ("ranks", "grid", "batch", *VARIANTS, "efficiency"),
        keys=2,
    )
    for point in curve.points:
        efficiency = curve.efficiency(point)
        table.add_row(
            f"{point.ranks:,}",
            str(point.grid or "-"),
            f"{point.batch:,}",
            *(_milliseconds(point, variant) for variant in VARIANTS),
            "-" if efficiency is None else percent(efficiency),
        )
    screen = console(sys.stdout)
    screen.print()
    screen.print(table)
    warnings = [training.warning(point.grid, point.batch) for point in curve.points if point.grid]
    tell(
        *[warning for warning in warnings if warning][:1],
        *(f"{counted(point.ranks, 'rank')}: {point.why_not}" for point in curve.points if point.why_not),
    )


def _milliseconds(point: Point, variant: str) -> str:
    seconds = point.seconds.get(variant)
    return "-" if seconds is None else f"{1e3 * seconds:,.4g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def draw_curves(curves: Sequence[Curve], what: str, path: Path) -> None:
    """Draw efficiency over ranks: a panel for each curve, a line for each choice of overlaps. Lines that coincide in
    all panels are drawn as one line with several names."""
    lines = list[tuple[list[Line], list[str]]]()
    for variant in STYLES:
        of_variant = [_line(curve, variant) for curve in curves]
        same = [variants for drawn, variants in lines if all(map(_coincide, drawn, of_variant))]
        if same:
            same[0].append(variant)
        else:
            lines.append((of_variant, [variant]))
    with picture(path, 6.5 * len(curves), 4.5) as figure:
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        for number, (curve, axes) in enumerate(zip(curves, panels)):
            ranks = [point.ranks for point in curve.points]
            for drawn, variants in lines:
                colour, line = STYLES[variants[0]]
                axes.plot(
                    *zip(*drawn[number]) if drawn[number] else ([], []),
                    label=" = ".join(variants),
                    color=colour,
                    linestyle=line,
                    marker="o",
                    markersize=3,
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(ranks, [f"{count:,}" for count in ranks], rotation=45)
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set(xlabel="ranks", ylabel="efficiency, %", title=f"{curve.kind} scaling")
            axes.grid(alpha=0.3)
        panels[0].legend(title="overlaps")
        what = titled(what, "100%: the fewest ranks that fit, as configured", inches=figure.get_figwidth())
        figure.suptitle(what, fontsize=10)


def _line(curve: Curve, variant: str) -> Line:
    return [
        (point.ranks, 100 * share) for point in curve.points if (share := curve.efficiency(point, variant)) is not None
    ]


def _coincide(one: Line, other: Line) -> bool:
    """Return whether two lines look the same in a picture."""
    return len(one) == len(other) and all(
        ranks == others and abs(share - another) < ALIKE for (ranks, share), (others, another) in zip(one, other)
    )
