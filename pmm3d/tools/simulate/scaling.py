"""What a step takes on more and more ranks, with and without each overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import Pmm3dError
from ...layout import GridShape
from ...nn.training.config import Config
from .steps import Simulator

MOST = 32_768
"""Ranks to which the curves go."""
SPAN = 64
"""Times fewer ranks at which they begin."""
AS_IT_IS = "as configured"
SWITCHES = ("oar", "ors", "oag", "buckets")
VARIANTS = (AS_IT_IS, *(f"no {switch}" for switch in SWITCHES), "none")
"""The overlaps: as configured, without one of them, without any."""
Chosen = Callable[[Config, int], GridShape]


@dataclass(frozen=True)
class Point:
    """A number of ranks.

    grid      of the ranks; None if there is none
    batch     rows of the batch, over all ranks
    seconds   of a step, by what of the overlaps is on
    memory    bytes on the fullest rank
    why_not   what is in the way, if something is
    """

    ranks: int
    batch: int
    grid: GridShape | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    memory: int = 0
    why_not: str = ""


@dataclass(frozen=True)
class Curve:
    """kind: "strong", of the same batch on more ranks; "weak", of a batch that grows with them."""

    kind: str
    points: list[Point]

    def efficiency(self, point: Point, variant: str = AS_IT_IS) -> float | None:
        """Beside the first point that has a time and fits in memory, of the step as configured."""
        first = next((other for other in self.points if other.seconds and not other.why_not), None)
        if first is None or variant not in point.seconds:
            return None
        ideal = first.seconds[AS_IT_IS] * (first.ranks / point.ranks if self.kind == "strong" else 1)
        ideal *= point.batch / (first.batch * point.ranks / first.ranks) if self.kind == "weak" else 1
        return ideal / point.seconds[variant] if point.seconds[variant] else None


def rank_counts(ranks: int, first: int | None, last: int | None) -> list[int]:
    """Powers of two from the first to the last, and the number of ranks that is asked for, if it lies between.

        >>> rank_counts(48, 16, 128)
        [16, 32, 48, 64, 128]
    """
    last = max(ranks, MOST) if last is None else last
    first = max(1, min(ranks, last // SPAN)) if first is None else first
    if not 1 <= first <= last:
        raise Pmm3dError(f"the curves cannot go from {first} to {last} ranks: give --from-ranks below --to-ranks")
    powers = [2**power for power in range(last.bit_length()) if first <= 2**power <= last]
    return sorted({*powers, *([ranks] if first <= ranks <= last else [])})


def curves(simulator: Simulator, kinds: Sequence[str], ranks: int, counts: Sequence[int], chosen: Chosen,
           tell: Callable[[int, int], None]) -> list[Curve]:
    """A curve of each kind. The configuration's batch, or all rows of the file if they are fewer, is that of so many
    `ranks`.

    chosen   the grid for a configuration on a number of ranks. Raises Pmm3dError if there is none
    tell     told how many steps of how many are simulated
    """
    simulator, total, done = simulator.unbounded(), len(kinds) * len(counts), 0
    found = []
    for kind in kinds:
        points = []
        for count in counts:
            tell(done, total)
            points.append(_point(simulator, kind, ranks, count, chosen))
            done += 1
        found.append(Curve(kind, points))
    tell(total, total)
    return found


def _point(simulator: Simulator, kind: str, ranks: int, count: int, chosen: Chosen) -> Point:
    config = simulator.config
    batch = config.data.batch_size if kind == "strong" else max(1, round(config.data.batch_size * count / ranks))
    config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": batch})})
    seconds: dict[str, float] = {}
    memory, grid = 0, None
    try:
        grid = chosen(config, count)
        for variant, changed in _variants(config):
            step = simulator.of(grid, changed, alone=True)
            seconds[variant] = step.seconds
            if variant == AS_IT_IS:
                memory = sum(step.step.memory.values())
    except Pmm3dError as error:
        return Point(count, batch, grid, why_not=str(error))
    limit = simulator.machine.memory
    return Point(count, batch, grid, seconds, memory, "not enough memory" if 0 < limit < memory else "")


def _variants(config: Config) -> Iterator[tuple[str, Config]]:
    """The configuration, and others that differ in what is on of the overlaps."""
    for variant in VARIANTS:
        off = {"none": SWITCHES, AS_IT_IS: ()}.get(variant, (variant.removeprefix("no "),))
        overlap = config.overlap.model_copy(update=dict.fromkeys(off, False))
        yield variant, config.model_copy(update={"overlap": overlap})
