"""What of a ranking is shown: the best, a grid of each preset, what was dropped, the choice in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...model.candidates import FAMILIES, Candidate, Ranking
from ...text import in_bytes, in_time

TERMS = ("gemm", "passes", "overhead", "x", "y", "z", "seq", "data", "pipe", "all")
"""In this order; others follow."""
MOST_REASONS = 3
ALIKE = 0.0005
"""Share by which seconds differ that are called as long."""


class Shown(NamedTuple):
    """The best candidates, and those of presets that are not among them."""

    best: list[Candidate]
    presets: list[Candidate]

    @property
    def all(self) -> list[Candidate]:
        return [*self.best, *self.presets]


def shown_of(ranking: Ranking, top: int) -> Shown:
    """The first `top`; and of each preset its best grid, if it is not among them."""
    best = ranking.candidates[:top]
    first = {preset: next((each for each in ranking.candidates if each.preset == preset), None) for preset in FAMILIES}
    return Shown(best, [each for each in first.values() if each and each not in best])


def names(rows: Iterable[Iterable[str]], order: Sequence[str] = ()) -> list[str]:
    """Every name once: those of the order first, in it."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in order if name in found] + [name for name in found if name not in order]


def dropped_lines(ranking: Ranking) -> Iterator[str]:
    """How many grids were dropped; what speaks against presets of which no grid is left, against the grid that holds
    least if some were priced, and against the first few others."""
    if not ranking.dropped:
        return
    yield f"{len(ranking.dropped):,} of {ranking.considered:,} grids dropped:"
    ranked = {candidate.preset for candidate in ranking.candidates}
    for preset in FAMILIES:
        if preset not in ranked and (of_it := [dropped for dropped in ranking.dropped if dropped.preset == preset]):
            yield _dropped(min(of_it, key=lambda dropped: (not dropped.memory, sum(dropped.memory.values()))))
    for dropped in [dropped for dropped in ranking.dropped if not dropped.preset][:MOST_REASONS]:
        yield _dropped(dropped)


def _dropped(candidate: Candidate) -> str:
    preset = f" {candidate.preset}" if candidate.preset else ""
    return f"  {candidate.grid}{preset}: {candidate.why_not}"


def choice(ranking: Ranking, unit: str) -> str:
    """The first candidate beside the second and the best preset, in a sentence. unit: "a step", "a product"."""
    first, *others = ranking.candidates
    text = f"Choice: {first}" + (f" ({first.preset})" if first.preset else "")
    text += f", {in_time(first.seconds) if first.seconds >= 1 else f'{1e3 * first.seconds:.4g} ms'} {unit}"
    if held := sum(first.memory.values()):
        text += f", {in_bytes(held)} on the fullest rank"
    if others:
        text += f"; the runner-up, {others[0]}, takes {_more(others[0], first)}"
    preset = next((candidate for candidate in ranking.candidates if candidate.preset), None)
    if preset is not None and not first.preset and preset is not others[0]:
        text += f"; the best preset, {preset.preset} as {preset.grid}, {_more(preset, first)}"
    return text


def _more(candidate: Candidate, first: Candidate) -> str:
    ratio = candidate.seconds / first.seconds if first.seconds else 1.0
    if abs(ratio - 1) < ALIKE:
        return "as long"
    if ratio < 1:
        return f"{100 * (1 - ratio):.2g}% less, too little to give the preset up for"
    return f"{100 * (ratio - 1):.2g}% longer" if ratio < 2 else f"{ratio:.3g} times as long"
