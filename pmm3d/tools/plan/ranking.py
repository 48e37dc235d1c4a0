"""A ranking of grids as tables and sentences on a terminal, as a picture, and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from ...model.candidates import FAMILIES, Candidate, Ranking
from ...model.ranking import lower_bound
from ...text import BYTE_UNITS, counted, figure, in_bytes, in_time
from ..output import FigureTable, check_writable, say_written, write_json
from ..plots import COLOURS, GREY, Part, bars, check_picture, picture, titled
from ..terminal import JOINT, console, joined, say
from .options import SECTIONS, Chosen

TERMS = ("gemm", "passes", "overhead", "x", "y", "z", "seq", "ulysses", "data", "pipe", "all")
"""Order of the columns of terms. Other terms follow."""
MOST_REASONS = 3
"""Largest number of dropped grids that are listed, besides presets."""
ALIKE = 0.0005
"""Relative difference below which two times are called equal."""
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
ENOUGH = 10
"""The unit of a table is the largest of which the best time is at least this many."""
LEAST_SHARE = 0.01
"""Smallest printed percentage of peak."""


class Shown(NamedTuple):
    """The best candidates, and the best candidate of each preset that is not among them."""

    best: list[Candidate]
    presets: list[Candidate]

    @property
    def all(self) -> list[Candidate]:
        return [*self.best, *self.presets]


def shown_of(ranking: Ranking, top: int) -> Shown:
    """Return the first `top` candidates, and the presets."""
    best = ranking.candidates[:top]
    first = {preset: next((each for each in ranking.candidates if each.preset == preset), None) for preset in FAMILIES}
    return Shown(best, [each for each in first.values() if each and each not in best])


def check_outputs(json: Path | None, drawn: Path | None, *files: Path | None) -> None:
    """Raise Pmm3dError if the file of --json, --plot or another option cannot be written."""
    check_writable(drawn, *files, text=json)
    if drawn:
        check_picture(drawn, "--plot")


def tell(*lines: str) -> None:
    """Print lines, wrapped to the width of the terminal."""
    width = console(sys.stdout).width - 1
    for line in lines:
        text = fill(joined(line), width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        say(text.replace(JOINT, " "))


def print_plan(
    chosen: Chosen,
    ranking: Ranking,
    top: int,
    unit: str,
    *,
    product: tuple[int, int, int] | None = None,
    sections: tuple[str, ...] = SECTIONS,
    whole: bool = True,
) -> None:
    """Print the machine, the tables, the dropped grids and the choice.

    unit      noun after the seconds, such as "a step"
    product   m, n, k of a product
    sections  sections of the machine whose sources are printed
    whole     whether the seconds include computation, so that the share of peak is known
    """
    machine, dtype, shown = chosen.machine, ranking.dtype, shown_of(ranking, top)
    peak = machine.peak.get(dtype, machine.peak.get(machine.stands_for(dtype), 0.0)) if whole else 0.0
    tell(*chosen.lines(dtype if whole else "", sections))
    screen = console(sys.stdout)
    for table in (_times(ranking, shown, peak, product), *_memory(shown)):
        screen.print()
        screen.print(table)
    tell(*dropped_lines(ranking), choice(ranking, unit))


def write_plan(chosen: Chosen, ranking: Ranking, top: int, json: Path | None, drawn: Path | None) -> None:
    """Write the files of --json and --plot."""
    if json:
        write_json(json, as_json(ranking))
    if drawn:
        draw(ranking, top, chosen.machine.name, drawn)
    say_written(json, drawn)


def as_json(ranking: Ranking) -> list[dict[str, Any]]:
    """Return the ranked grids, the best first. `bytes` is left out if `memory` is not predicted."""
    return [
        {
            "grid": candidate.grid._asdict(),
            "seconds": candidate.seconds,
            "terms": dict(candidate.terms),
            **({"memory": dict(candidate.memory), "bytes": candidate.bytes} if candidate.memory else {}),
            "preset": candidate.preset,
            "schedule": candidate.schedule,
            "settings": dict(candidate.settings),
        }
        for candidate in ranking.candidates
    ]


def dropped_lines(ranking: Ranking) -> Iterator[str]:
    """Yield the number of dropped grids and some of the reasons: the grid of least memory of each preset that has no
    candidate, and the first few of the rest."""
    if not ranking.dropped:
        return
    yield f"{len(ranking.dropped):,} of {counted(ranking.considered, 'grid')} dropped:"
    ranked = {candidate.preset for candidate in ranking.candidates}
    for preset in FAMILIES:
        if preset not in ranked and (of_it := [dropped for dropped in ranking.dropped if dropped.preset == preset]):
            yield _dropped(min(of_it, key=lambda dropped: (not dropped.memory, sum(dropped.memory.values()))))
    for dropped in [dropped for dropped in ranking.dropped if dropped.preset in ("", *ranked)][:MOST_REASONS]:
        yield _dropped(dropped)


def _dropped(candidate: Candidate) -> str:
    preset = f" {candidate.preset}" if candidate.preset else ""
    return f"  {candidate.grid}{preset}: {candidate.why_not}"


def choice(ranking: Ranking, unit: str) -> str:
    """Return a sentence that compares the best candidate with the next and the best preset. unit: see `print_plan`."""
    first, *others = ranking.candidates
    text = f"Choice: {first}" + (f" ({first.preset})" if first.preset else "")
    text += f", {in_time(first.seconds)} {unit}"
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
        return f"{100 * (1 - ratio):.2g}% less, too little to prefer it to the preset"
    return f"{100 * (ratio - 1):.2g}% longer" if ratio < 2 else f"{ratio:.3g} times as long"


def _times(ranking: Ranking, shown: Shown, peak: float, product: tuple[int, int, int] | None) -> FigureTable:
    """Return the table of times: time, share of peak, bytes over the lower bound, and each term."""
    best = shown.all[0].seconds
    scale, unit = next((each for each in UNITS if best >= ENOUGH * each[0]), UNITS[-1])
    decimals = decimals_of(best / scale)
    columns: dict[str, Callable[[Candidate], str]] = {
        unit: lambda candidate: figure(candidate.seconds / scale, decimals)
    }
    if peak:
        columns["peak %"] = lambda candidate: _share(100 * ranking.share_of_peak(candidate, peak))
    if product is not None and (bound := lower_bound(product, ranking.ranks, ranking.dtype)):
        columns["bytes over bound"] = lambda candidate: f"{candidate.bytes / bound:.2f}"
    for term in names((candidate.terms for candidate in shown.all), TERMS):
        columns[term] = lambda candidate, term=term: (  # type: ignore[misc]
            figure(candidate.terms.get(term, 0.0) / scale, decimals)
        )
    what = ranking.what[0].upper() + ranking.what[1:]
    return _table(f"[bold]{what} on {counted(ranking.ranks, 'rank')}, time in {unit}[/]", columns, shown)


def _memory(shown: Shown) -> Iterator[FigureTable]:
    """Yield the table of bytes of each kind, in one unit, if they are known."""
    most = max(sum(candidate.memory.values()) for candidate in shown.all)
    if not most:
        return
    unit = in_bytes(most).split()[1]
    scale = 1024 ** BYTE_UNITS.index(unit)
    decimals = decimals_of(most / scale)
    columns: dict[str, Callable[[Candidate], str]] = {
        "all": lambda candidate: _amount(sum(candidate.memory.values()) / scale, decimals)
    }
    for kind in names(candidate.memory for candidate in shown.all):
        columns[kind] = lambda candidate, kind=kind: (  # type: ignore[misc]
            _amount(candidate.memory.get(kind, 0) / scale, decimals)
        )
    yield _table(f"[bold]Memory of the fullest rank, in {unit}[/]", columns, shown)


def _table(title: str, columns: dict[str, Callable[[Candidate], str]], shown: Shown) -> FigureTable:
    """Return a table with a row for each candidate. A rule separates the presets."""
    schedules = ["schedule"] * any(candidate.schedule for candidate in shown.all)
    settings = names(candidate.settings for candidate in shown.all)
    heads = ["grid", *schedules, *settings, "preset"]
    table = FigureTable(title, ["", *heads, *columns], keys=1 + len(heads))
    for place, candidate in enumerate(shown.all, 1):
        figures = [of(candidate) for of in columns.values()]
        facts = {**vars(candidate), **candidate.settings}
        keys = [str(place) if place <= len(shown.best) else "", *(str(facts.get(head, "")) for head in heads)]
        table.add_row(*keys, *figures, end_section=place == len(shown.best))
    return table


def names(rows: Iterable[Iterable[str]], order: Sequence[str] = ()) -> list[str]:
    """Return every name once, beginning with the names in `order`."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in order if name in found] + [name for name in found if name not in order]


def _share(share: float) -> str:
    return f"{share:.3g}" if share >= LEAST_SHARE else f"<{LEAST_SHARE}"


def _amount(value: float, decimals: int) -> str:
    """Return the value with this number of decimals, but with at least two significant digits.

    >>> _amount(0.7, 2), _amount(0.0312, 1), _amount(0, 1)
    ('0.70', '0.031', '0.0')
    """
    return f"{value:#.2g}" if 0 < value < 10 ** (1 - decimals) else f"{value:,.{decimals}f}"


def decimals_of(most: float) -> int:
    """Return the number of decimals with which the largest figure has three digits.

    >>> decimals_of(1.727), decimals_of(88.5), decimals_of(12345.6)
    (2, 1, 0)
    """
    return max(0, 3 - len(f"{most:.0f}"))


def draw(ranking: Ranking, top: int, machine: str, path: Path) -> None:
    """Draw a bar of the terms of each grid, the best at the top, presets at the bottom."""
    shown = shown_of(ranking, top)
    rows = [
        (
            f"{candidate} {candidate.preset}".rstrip(),
            [Part(term, candidate.terms[term]) for term in names([candidate.terms], TERMS)],
        )
        for candidate in shown.all
    ]
    with picture(path, 9, 1.8 + 0.4 * len(rows)) as figure:
        axes = figure.subplots()
        bars(
            axes,
            rows,
            {term: COLOURS.get({"passes": "elementwise", "overhead": "rest"}.get(term, term), GREY) for term in TERMS},
        )
        if shown.best and shown.presets:
            axes.axhline(len(shown.best) - 0.5, color="black", linewidth=0.5)
        axes.set_xlabel("seconds; x, y, ...: waits for messages along that axis; all: of all ranks")
        axes.set_title(titled(ranking.what, f"on {counted(ranking.ranks, 'rank')} of {machine}"))
