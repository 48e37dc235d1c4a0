"""What of a ranking is shown: the best, a grid of each preset, what was dropped, the choice in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...comm.words import in_bytes
from ...model.candidates import Candidate, Ranking
from ...model.interval import in_time

TERMS = ("gemm", "passes", "overhead", "x", "y", "z", "data", "all")
"""In this order; others follow."""
PRESETS = ("ddp", "fsdp", "hsdp", "megatron")
MOST_REASONS = 3


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
    first = {preset: next((each for each in ranking.candidates if each.preset == preset), None) for preset in PRESETS}
    return Shown(best, [each for each in first.values() if each and each not in best])


def names(rows: Iterable[Iterable[str]], order: Sequence[str] = ()) -> list[str]:
    """Every name once: those of the order first, in it."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in order if name in found] + [name for name in found if name not in order]


def dropped_lines(ranking: Ranking) -> Iterator[str]:
    """How many grids were dropped, the first few with what speaks against them, and the presets among them."""
    if not ranking.dropped:
        return
    yield f"{len(ranking.dropped):,} of {ranking.considered:,} grids dropped:"
    first = ranking.dropped[:MOST_REASONS]
    ranked = {candidate.preset for candidate in ranking.candidates}
    presets = {dropped.preset: dropped for dropped in reversed(ranking.dropped)
               if dropped.preset and dropped.preset not in ranked}
    for preset in PRESETS:
        if preset in presets:
            yield _dropped(presets[preset])
    for each in first:
        if each not in presets.values():
            yield _dropped(each)


def _dropped(candidate: Candidate) -> str:
    preset = f" {candidate.preset}" if candidate.preset else ""
    return f"  {candidate.grid}{preset}: {candidate.why_not}"


def choice(ranking: Ranking, unit: str) -> str:
    """The first candidate beside the second and the best preset, in a sentence. unit: "a step", "a product"."""
    first, *others = ranking.candidates
    text = f"Choice: {first.grid}" + (f" ({first.preset})" if first.preset else "")
    text += f", {in_time(first.seconds) if first.seconds >= 1 else f'{1e3 * first.seconds:.4g} ms'} {unit}"
    if held := sum(first.memory.values()):
        text += f", {in_bytes(held)} on the fullest rank"
    if others:
        text += f"; the runner-up, {others[0].grid}, takes {_more(others[0], first)}"
    preset = next((candidate for candidate in ranking.candidates if candidate.preset), None)
    if preset is not None and not first.preset and preset is not others[0]:
        text += f"; the best preset, {preset.preset} as {preset.grid}, {_more(preset, first)}"
    return text


def _more(candidate: Candidate, first: Candidate) -> str:
    ratio = candidate.seconds / first.seconds if first.seconds else 1.0
    if ratio < 1.0005:
        return "as long"
    return f"{100 * (ratio - 1):.2g}% longer" if ratio < 2 else f"{ratio:.3g} times as long"
