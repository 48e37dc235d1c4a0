"""A ranking of grids as tables and sentences on a terminal, as a picture, and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from ...model.candidates import FAMILIES, LOWER, Candidate, Ranking
from ...model.ranking import lower_bound
from ...text import BYTE_UNITS, counted, figure, in_bytes, in_short, in_time, in_toml, value_in_toml
from ..output import FigureTable, check_writable, say_written, write_json
from ..plots import COLOURS, GREY, Part, bars, check_picture, picture, titled
from ..terminal import JOINT, console, joined, say
from .options import SECTIONS, Chosen

TERMS = (
    "gemm",
    "passes",
    "overhead",
    "x",
    "y",
    "z",
    "seq",
    "ulysses",
    "data",
    "expert",
    "expert_z",
    "expert_data",
    "pipe",
    "all",
)
"""Order of the columns of terms. Other terms follow."""
ALIKE = 0.0005
"""Relative difference below which two times are called equal."""
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
ENOUGH = 10
"""The unit of a table is the largest of which the best time is at least this many."""
LEAST_SHARE = 0.01
"""Smallest printed percentage of peak."""
REST = "rest"
"""Column of the sum of the terms, or of the kinds of memory, that have no column of their own."""
OPTIONAL = "bytes over bound", "peak %"
"""Columns that are left out if the table does not fit the terminal without any terms."""
FOLDED = "grid", "settings"
"""Columns that are wrapped if the table does not fit even without `OPTIONAL`."""
UNBOUNDED = 10_000
"""Width of tables with --wide, in columns of the terminal."""


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


def check_outputs(
    json: Path | None,
    drawn: Path | None,
    *files: Path | None,
    picture: Path | None = None,
    memory_picture: Path | None = None,
) -> None:
    """Raise Pmm3dError if the file of --json, --plot, --picture or another option cannot be written."""
    check_writable(drawn, picture, memory_picture, *files, text=json)
    for path, option in ((drawn, "--plot"), (picture, "--picture"), (memory_picture, "--memory-picture")):
        if path:
            check_picture(path, option)


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
    memory: int | None = None,
    wide: bool = False,
    product: tuple[int, int, int] | None = None,
    sections: tuple[str, ...] = SECTIONS,
    whole: bool = True,
) -> None:
    """Print the machine, the tables, the numbers of grids that are not shown, and the choice.

    unit      noun after the seconds, such as "a step"
    memory    limit of the bytes on a rank. Default: the machine's
    wide      whether tables have all columns, also if they do not fit the terminal
    product   m, n, k of a product
    sections  sections of the machine whose sources are printed
    whole     whether the seconds include computation, so that the share of peak is known
    """
    machine, dtype, shown = chosen.machine, ranking.dtype, shown_of(ranking, top)
    peak = machine.peak.get(dtype, machine.peak.get(machine.stands_for(dtype), 0.0)) if whole else 0.0
    node, room = min(machine.ranks_per_node, ranking.ranks), _room(chosen, memory, ranking.ranks)
    tell(*chosen.lines(dtype if whole else "", sections))
    screen = console(sys.stdout, UNBOUNDED if wide else None)
    columns = [_times(ranking, shown, peak, product), *_memory(node, room, ranking, shown)]
    tables = [each.table(wide, screen.width) for each in columns]
    screen.print()
    screen.print(*tables)
    if any(REST in table.names for table in tables):
        tell(f"{REST}: the sum of the columns that do not fit; --wide prints all")
    tell(*hidden_lines(ranking, shown), *fitting_lines(ranking, memory or machine.memory))
    tell(choice(ranking, unit, node, room))


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


def hidden_lines(ranking: Ranking, shown: Shown) -> Iterator[str]:
    """Yield why grids are not shown: for each reason the number of grids, and of dropped grids an example. Examples are
    counted grids of presets that have no candidate, or else the first grid. The numbers and the shown grids add up to
    all grids. Presets without a candidate and without an example follow: their grid is counted with other settings."""
    priced, unpriced, lost = ranking.not_among(shown.all), ranking.without_price(), _lost(ranking)
    number = len({each.grid for each in shown.all})
    if priced or unpriced:
        yield f"Shown: {number:,} of {counted(ranking.considered, 'grid')}. The others:"
    for cause, some in priced.items():
        yield f"  {len(some):,}: {cause}" + f" (--top {len(ranking.candidates)} shows them)" * (cause == LOWER)
        if cause != LOWER:
            examples = [each for each in lost if each in some] or some[:1]
            lost = [each for each in lost if each not in examples]
            yield from map(_dropped, examples)
    for cause, count in unpriced.items():
        yield f"  {count:,}: {cause}"
    for each in lost:
        yield f"  no {each.preset} is left: {each}: {each.why_not}"


def _lost(ranking: Ranking) -> list[Candidate]:
    """Return, of each preset without a candidate, the dropped grid that needs least memory, or one without a price."""
    ranked = {candidate.preset for candidate in ranking.candidates}
    some = sorted(ranking.dropped, key=lambda dropped: (not dropped.memory, _bytes_of(dropped)))
    found = [next((each for each in some if each.preset == name), None) for name in FAMILIES if name not in ranked]
    return [each for each in found if each]


def _bytes_of(candidate: Candidate) -> int:
    return sum(candidate.memory.values())


def _dropped(candidate: Candidate) -> str:
    preset = f" {candidate.preset}" if candidate.preset else ""
    return f"    {candidate.grid}{preset}: {candidate.why_not}"


def _room(chosen: Chosen, memory: int | None, ranks: int) -> str:
    """Return a clause about the memory of a node, or about the limit of its ranks; "" if it is not known."""
    machine = chosen.machine
    if memory is not None:
        return f", limit {min(machine.ranks_per_node, ranks)} x {in_bytes(memory)}"
    whole = machine.memory * (chosen.own_ranks or machine.ranks_per_node)
    return f", which has {in_bytes(whole)}" if whole else ""


def fitting_lines(ranking: Ranking, limit: int) -> Iterator[str]:
    """Yield, for each grid that fits only with further settings, the cheapest ones, as keys of the configuration."""
    for each in ranking.candidates:
        without = [
            one
            for one in ranking.dropped
            if one.grid == each.grid and one.memory and one.settings.items() < each.settings.items()
        ]
        for plain in without[:1]:
            further = {key: value for key, value in each.settings.items() if key not in plain.settings}
            more = 100 * (each.seconds / plain.seconds - 1) if plain.seconds else 0.0
            yield (
                f"{each.grid} fits with: {in_toml(further)} ({in_bytes(_bytes_of(each))} of {in_bytes(limit)}, "
                f"{abs(more):.2g}% {'slower' if more >= 0 else 'faster'} than without, which needs "
                f"{in_bytes(_bytes_of(plain))})"
            )


def choice(ranking: Ranking, unit: str, node: int, room: str = "") -> str:
    """Return a sentence that compares the best candidate with the next and the best preset.

    unit   see `print_plan`
    node   number of ranks of the job on a node
    room   clause about the memory of a node
    """
    first, *others = ranking.candidates
    text = f"Choice: {first}" + (f" ({first.preset})" if first.preset else "")
    text += f", {in_time(first.seconds)} {unit}"
    if held := _bytes_of(first):
        text += f", {in_bytes(held)} on the fullest rank, {in_bytes(node * held)} on a node of {node} such ranks{room}"
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


@dataclass
class _Columns:
    """Columns of a table of candidates.

    keys     whether the table names settings and presets, besides the grids
    figures  heading -> text of a candidate
    parts    heading -> value of a candidate, in the unit of the table. They add up to a column of `figures`, so some
             can be replaced by their sum
    text     text of a value
    """

    title: str
    ranking: Ranking
    shown: Shown
    keys: bool
    figures: dict[str, Callable[[Candidate], str]]
    parts: dict[str, Callable[[Candidate], float]]
    text: Callable[[float], str]

    def table(self, wide: bool, width: int) -> FigureTable:
        """Return the table with all columns, or with those of the largest parts that fit the width. If one part is too
        many, figures are left out, and then names of rows are wrapped."""
        parts = dict(self.parts)
        found = self._table(wide, parts)
        while not wide and not found.fits(width) and len(parts) > 1:
            others = [name for name in parts if name != REST]
            least = sorted(others, key=self._largest)[: 1 if REST in parts else 2]
            rest = [parts.pop(name) for name in [*least, *([REST] if REST in parts else [])]]
            parts[REST] = lambda candidate, rest=tuple(rest): sum(of(candidate) for of in rest)  # type: ignore[misc]
            found = self._table(wide, parts)
        for name in OPTIONAL:
            if not wide and name in self.figures and not found.fits(width):
                del self.figures[name]
                found = self._table(wide, parts)
        if not wide and not found.fits(width):
            found.sentences = FOLDED
        return found

    def _largest(self, name: str) -> float:
        return max(self.parts[name](candidate) for candidate in self.shown.all)

    def _table(self, wide: bool, parts: Mapping[str, Callable[[Candidate], float]]) -> FigureTable:
        """Return the table with a row for each candidate. A rule separates the presets."""
        keys = self._keys(wide)
        table = FigureTable(self.title, ["", *keys, *self.figures, *parts], keys=1 + len(keys))
        for row, candidate in enumerate(self.shown.all):
            figures = [of(candidate) for of in self.figures.values()]
            figures += [self.text(of(candidate)) for of in parts.values()]
            place = self.ranking.candidates.index(candidate) + 1
            cells = [str(place), *(of(candidate) for of in keys.values()), *figures]
            table.add_row(*cells, end_section=row + 1 == len(self.shown.best))
        return table

    def _keys(self, wide: bool) -> dict[str, Callable[[Candidate], str]]:
        """Return the columns that name a row. With wide, each setting has a column of its own."""
        found: dict[str, Callable[[Candidate], str]] = {"grid": lambda candidate: str(candidate.grid)}
        if wide:
            found["schedule"] = lambda candidate: candidate.schedule
            for name in names(candidate.settings for candidate in self.shown.all):
                head = name.rpartition(".")[2]
                found[head] = lambda candidate, name=name: value_in_toml(  # type: ignore[misc]
                    candidate.settings.get(name, "")
                ).replace('"', "")
        elif self.keys:
            found["settings"] = _settings
        if wide or self.keys:
            found["preset"] = lambda candidate: candidate.preset
        return {head: of for head, of in found.items() if any(map(of, self.shown.all))}


def _settings(candidate: Candidate) -> str:
    """Return the schedule and the settings that are not off, in short."""
    return " ".join(filter(None, [candidate.schedule, in_short(candidate.settings)]))


def _times(ranking: Ranking, shown: Shown, peak: float, product: tuple[int, int, int] | None) -> _Columns:
    """Return the table of times: time, share of peak, bytes over the lower bound, and each term."""
    best = shown.all[0].seconds
    scale, unit = next((each for each in UNITS if best >= ENOUGH * each[0]), UNITS[-1])
    decimals = decimals_of(best / scale)
    figures: dict[str, Callable[[Candidate], str]] = {
        unit: lambda candidate: figure(candidate.seconds / scale, decimals)
    }
    if peak:
        figures["peak %"] = lambda candidate: _share(100 * ranking.share_of_peak(candidate, peak))
    if product is not None and (bound := lower_bound(product, ranking.ranks, ranking.dtype)):
        figures["bytes over bound"] = lambda candidate: f"{candidate.bytes / bound:.2f}"
    parts: dict[str, Callable[[Candidate], float]] = {
        term: lambda candidate, term=term: candidate.terms.get(term, 0.0) / scale  # type: ignore[misc]
        for term in names((candidate.terms for candidate in shown.all), TERMS)
    }
    title = f"[bold]{ranking.what[0].upper()}{ranking.what[1:]} on {counted(ranking.ranks, 'rank')}, time in {unit}[/]"
    return _Columns(title, ranking, shown, True, figures, parts, lambda value: figure(value, decimals))


def _memory(number: int, room: str, ranking: Ranking, shown: Shown) -> Iterator[_Columns]:
    """Yield the table of bytes on a rank, on a node of this number of ranks, and of each kind, in one unit, if they are
    known. room: clause about the memory of a node."""
    most = max(map(_bytes_of, shown.all))
    if not most:
        return
    unit = in_bytes(most).split()[1]
    scale = 1024 ** BYTE_UNITS.index(unit)
    decimals = decimals_of(most / scale)
    figures: dict[str, Callable[[Candidate], str]] = {
        "rank": lambda candidate: _amount(_bytes_of(candidate) / scale, decimals),
        "node": lambda candidate: _amount(number * _bytes_of(candidate) / scale, decimals_of(number * most / scale)),
    }
    parts: dict[str, Callable[[Candidate], float]] = {
        kind: lambda candidate, kind=kind: candidate.memory.get(kind, 0) / scale  # type: ignore[misc]
        for kind in names(candidate.memory for candidate in shown.all)
    }
    title = joined(f"[bold]Memory in {unit}: the fullest rank; a node of {counted(number, 'such rank')}{room}[/]")
    yield _Columns(title, ranking, shown, False, figures, parts, lambda value: _amount(value, decimals))


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
