"""Predicted and measured times of every grid: the first choice, the best grid, and statistics, in tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import nan
from statistics import mean, median, quantiles
from typing import Any

from records import Rows

from pmm3d.layout import GridShape
from pmm3d.model.candidates import preset_of
from pmm3d.model.machines import groups_of

TOP = 3
CLOSE = 1.10
"""Largest ratio of the times of the first choice and the best grid that counts as close."""
NEAR = 0.10
"""Largest relative difference of a simulated and a measured step that counts as near."""
KINDS = ("weights", "gradients", "state", "work")


def grid_named(name: str) -> GridShape:
    return GridShape(*map(int, name.split("x")))


class Compared:
    """Times of a product or a step on all grids.

    what, where   the product or step, and the ranks
    rounds        grid -> measured seconds of each round
    predicted     grid -> seconds
    order         grids, the first choice first. Default: by predicted seconds
    more          further data: "kind", "spent", "terms", "ranks_per_node"
    """

    def __init__(
        self,
        what: str,
        where: str,
        rounds: Mapping[str, Sequence[float]],
        predicted: Mapping[str, float],
        order: Sequence[str] = (),
        **more: Any,
    ):
        if {*rounds} != {*predicted}:
            raise ValueError(f"{what}: measured on {', '.join(rounds)}, predicted for {', '.join(predicted)}")
        self.what, self.where, self.rounds, self.predicted, self.more = what, where, rounds, predicted, more
        self.order = [*order] or sorted(predicted, key=predicted.__getitem__)

    @cached_property
    def measured(self) -> dict[str, float]:
        """Grid -> median of its rounds."""
        return {grid: median(seconds) for grid, seconds in self.rounds.items()}

    @property
    def chosen(self) -> str:
        return self.order[0]

    @cached_property
    def best(self) -> str:
        return min(self.measured, key=self.measured.__getitem__)

    def beside(self, grid: str, other: str) -> float:
        """Time of one grid / time of another within a round: the median over the rounds."""
        return median(own / its for own, its in zip(self.rounds[grid], self.rounds[other]))

    @property
    def ratio(self) -> float:
        """Time of the chosen grid / time of the best grid; at least 1."""
        return max(1.0, self.beside(self.chosen, self.best))

    @property
    def place(self) -> int:
        """Place of the best grid in the predicted order, from 1."""
        return self.order.index(self.best) + 1

    @property
    def tied(self) -> list[str]:
        """Grids that were no slower than the best in at least a third of the rounds, so each could be the best."""
        faster = {
            grid: sum(own <= its for own, its in zip(times, self.rounds[self.best]))
            for grid, times in self.rounds.items()
        }
        return [grid for grid, times in self.rounds.items() if 3 * faster[grid] >= len(times)]

    @property
    def place_of_tied(self) -> int:
        """The best place of a tied grid."""
        return min(self.order.index(grid) for grid in self.tied) + 1

    @cached_property
    def correlation(self) -> float:
        """Rank correlation (Spearman) of predicted and measured times."""
        return _spearman([self.predicted[grid] for grid in self.measured], [*self.measured.values()])

    @cached_property
    def repeated(self) -> float:
        """Rank correlation of the even and the odd rounds: the limit for a prediction."""
        halves = [
            [median(seconds[first::2]) for seconds in self.rounds.values()]
            for first in (0, 1)
            if all(len(seconds) > 1 for seconds in self.rounds.values())
        ]
        return _spearman(*halves) if halves else nan

    @cached_property
    def noise(self) -> float:
        """Interquartile range of a grid's rounds over their median, after division of each round by its common
        slowdown; the mean of the grids."""
        rounds = list(zip(*self.rounds.values()))
        if len(rounds) < 2:
            return nan
        pace = [median(own / middle for own, middle in zip(turn, self.measured.values())) for turn in rounds]
        spreads = []
        for seconds in self.rounds.values():
            low, _, high = quantiles([own / slow for own, slow in zip(seconds, pace)], n=4, method="inclusive")
            spreads.append((high - low) / median(seconds))
        return mean(spreads)

    @property
    def error(self) -> float:
        """Predicted / measured time of the best grid."""
        return self.predicted[self.best] / self.measured[self.best]

    @cached_property
    def preset(self) -> str:
        """The fastest grid of the presets."""
        return min((grid for grid in self.measured if preset_of(grid_named(grid))), key=self.measured.__getitem__)

    @property
    def beside_preset(self) -> float:
        """Time of the chosen grid / time of the fastest preset: not slower if at most 1."""
        return self.beside(self.chosen, self.preset)


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic) if len(one) > 1 else nan


def table(found: Iterable[Compared], *, presets: bool = False) -> Rows:
    """A row for each comparison. presets: compared with the fastest preset too."""
    rows = [
        [
            "",
            "ranks",
            "first choice",
            "measured best",
            "chosen / best",
            "place of the best",
            "rank correlation",
            "of the rounds",
            "noise",
            "predicted / measured",
            *(["chosen / best preset"] if presets else []),
        ]
    ]
    for one in found:
        ms = lambda grid: f"{grid}: {1e3 * one.measured[grid]:.2f} ms"
        tied = f" (tied: {one.place_of_tied})" if one.place_of_tied < one.place else ""
        beside = [f"{one.beside_preset:.3f} ({preset_of(grid_named(one.preset))} {one.preset})"] if presets else []
        rows.append(
            [
                one.what,
                one.where,
                ms(one.chosen),
                ms(one.best),
                f"{one.ratio:.3f}",
                f"{one.place}{tied}",
                f"{one.correlation:.2f}",
                f"{one.repeated:.2f}",
                f"{one.noise:.1%}",
                f"{one.error:.2f}",
                *beside,
            ]
        )
    return rows


def totals(found: Sequence[Compared], *, presets: bool = False) -> str:
    """Numbers of comparisons within the limits, for each set of ranks."""
    lines = []
    for where in dict.fromkeys(one.where for one in found):
        these = [one for one in found if one.where == where]
        close, top = sum(one.ratio <= CLOSE for one in these), sum(one.place <= TOP for one in these)
        tied, correlations = sum(one.place_of_tied <= TOP for one in these), [one.correlation for one in these]
        line = (
            f"{where}: first choice within {CLOSE - 1:.0%} on {close} of {len(these)}, best in top three on {top} "
            f"(or one tied with it: {tied}), rank correlation: least {min(correlations):.2f}, "
            f"median {median(correlations):.2f}"
        )
        if presets:
            line += f"; chosen / best preset: at most {max(one.beside_preset for one in these):.3f}"
        lines.append(line)
    return "\n".join(lines)


def every_grid(one: Compared) -> tuple[str, Rows]:
    """Predicted and measured times of all grids with their terms, in ms."""
    terms, spent = one.more.get("terms", {}), one.more.get("spent", {})
    names = list(dict.fromkeys(name for parts in terms.values() for name in parts))
    rows = [["grid", "measured", "computed", "waited", "predicted", "/ measured", *names]]
    for grid in sorted(one.measured, key=one.measured.__getitem__):
        real, said = one.measured[grid], one.predicted[grid]
        seconds = [
            real,
            *(spent.get(grid, {}).get(name, nan) for name in ("computed", "waited")),
            said,
            *(terms.get(grid, {}).get(name, 0.0) for name in names),
        ]
        cells = [f"{1e3 * each:.2f}" for each in seconds]
        rows.append([grid, *cells[:4], f"{said / real:.2f}", *cells[4:]])
    return f"{one.what}, {one.where}, ms", rows


def grid_by_grid(found: Sequence[Compared]) -> tuple[str, Rows]:
    """A row for each grid, a column for each comparison: measured ms (predicted / measured)."""
    rows = [["grid", *(one.what for one in found)]]
    for grid in found[0].measured:
        rows.append(
            [
                grid,
                *(f"{1e3 * one.measured[grid]:.2f} ({one.predicted[grid] / one.measured[grid]:.2f})" for one in found),
            ]
        )
    ratios = [one.predicted[grid] / seconds for one in found for grid, seconds in one.measured.items()]
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    return (
        f"Measured, ms (predicted / measured): within {NEAR:.0%} on {near} of {len(ratios)}; "
        f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}"
    ), rows


def inner_axes(found: Sequence[Compared]) -> tuple[str, Rows]:
    """A row for each comparison on nodes: the axes inside a node, for the first choice and for the measured best."""
    rows = [["", "ranks", "first choice", "inside a node", "measured best", "inside a node", "chosen / best"]]
    for one in found:
        cells = [(grid, _inside(grid, one.more["ranks_per_node"])) for grid in (one.chosen, one.best)]
        rows.append([one.what, one.where, *cells[0], *cells[1], f"{one.ratio:.3f}"])
    return "Axes inside a node", rows


def axes_of_grids(found: Sequence[Compared]) -> tuple[str, Rows]:
    """A row for each grid, the fastest first: its time / that of the best grid, measured and predicted, as medians of
    all comparisons on the same nodes; how often it was chosen, and was the best."""
    rows = [["grid", "inside a node", "measured / best", "predicted / first", "chosen", "best"]]
    times = {
        grid: [
            median(side(one)[grid] / min(side(one).values()) for one in found)
            for side in (lambda one: one.measured, lambda one: one.predicted)
        ]
        for grid in found[0].measured
    }
    for grid in sorted(times, key=times.__getitem__):
        rows.append(
            [
                grid,
                _inside(grid, found[0].more["ranks_per_node"]),
                *(f"{each:.2f}" for each in times[grid]),
                *(
                    str(sum(grid == its for its in side))
                    for side in ([one.chosen for one in found], [one.best for one in found])
                ),
            ]
        )
    return "Medians over all products", rows


def _inside(grid: str, ranks_per_node: int) -> str:
    """The axes inside a node."""
    groups = groups_of(grid_named(grid), ranks_per_node)
    return ", ".join(name for name, group in groups.items() if group.size > 1 and group.nodes == 1) or "none"


Held = Mapping[str, int]
"""Bytes by kind on a rank."""


def memory_table(said: Mapping[str, Sequence[Held]], held: Mapping[str, Sequence[Held]]) -> tuple[str, Rows]:
    """A row for each run: the bytes of the fullest rank, and the largest difference on any rank. Also the whole
    prediction and the growth of that rank's process, if the system provides it."""
    rows = [["", *KINDS, "held", "predicted", "differs by", "predicted, with batches", "process grew by"]]
    least, most = 0.0, 0.0
    for name, ranks in held.items():
        sums = [[sum(rank[kind] for kind in KINDS) for rank in side] for side in (ranks, said[name])]
        differences = [its / own - 1 for own, its in zip(*sums)]
        least, most = min(least, *differences), max(most, *differences)
        fullest = sums[0].index(max(sums[0]))
        everything, grew = sum(said[name][fullest].values()), ranks[fullest].get("process", 0)
        cells = [
            f"{nbytes / 2**20:.2f}"
            for nbytes in (*(ranks[fullest][kind] for kind in KINDS), *(side[fullest] for side in sums))
        ]
        rows.append(
            [
                name,
                *cells,
                f"{max(differences, key=abs):+.2%}",
                f"{everything / 2**20:.2f}",
                f"{grew / 2**20:.2f} ({grew / everything:.2f})" if grew else "",
            ]
        )
    return (
        f"MiB; predicted - held on all ranks of all runs: {least:+.2%} to {most:+.2%}. Held is counted by the "
        "library. The growth of the process is counted by the system, with MPI, files and the allocator"
    ), rows
