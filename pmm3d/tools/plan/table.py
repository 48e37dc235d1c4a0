"""A ranking as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console

from ...model.candidates import Candidate, Ranking
from ...model.ranking import lower_bound
from ...text import in_bytes
from ..output import FigureTable
from .shown import TERMS, Shown, names

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
LEAST_SHARE = 0.01
"""Percent of peak; less is not told."""
ENOUGH = 10
"""Of a unit in which times are told."""
WIDE = 1e5
"""From here on figures are in thousands."""
BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
"""Of `in_bytes`."""


def print_ranking(console: Console, ranking: Ranking, shown: Shown, peak: float,
                  product: tuple[int, int, int] | None = None) -> None:
    """Two tables: where the time goes, and what is held. peak: flop/s of a rank; 0 if seconds are no whole step."""
    for table in (_times(ranking, shown, peak, product), *_memory(shown)):
        console.print()
        console.print(table)


def _times(ranking: Ranking, shown: Shown, peak: float, product: tuple[int, int, int] | None) -> FigureTable:
    """Seconds, share of peak, bytes over the lower bound, and each term."""
    best = shown.all[0].seconds
    scale, unit = next((each for each in UNITS if best >= ENOUGH * each[0]), UNITS[-1])
    decimals = decimals_of(best / scale)
    columns: dict[str, Callable[[Candidate], str]] = {
        unit: lambda candidate: figure(candidate.seconds / scale, decimals)}
    if peak:
        columns["peak %"] = lambda candidate: _share(100 * ranking.share_of_peak(candidate, peak))
    if product is not None and (bound := lower_bound(product, ranking.ranks, ranking.dtype)):
        columns["bytes over bound"] = lambda candidate: f"{candidate.bytes / bound:.2f}"
    for term in names((candidate.terms for candidate in shown.all), TERMS):
        columns[term] = lambda candidate, term=term: (  # type: ignore[misc]
            figure(candidate.terms.get(term, 0.0) / scale, decimals))
    what = ranking.what[0].upper() + ranking.what[1:]
    return _table(f"[bold]{what} on {ranking.ranks:,} ranks, time in {unit}[/]", columns, shown)


def _memory(shown: Shown) -> Iterator[FigureTable]:
    """Each kind, in the unit of the most; nothing where nothing is known."""
    most = max(sum(candidate.memory.values()) for candidate in shown.all)
    if not most:
        return
    unit = in_bytes(most).split()[1]
    scale = 1024 ** BYTES.index(unit)
    decimals = decimals_of(most / scale)
    columns: dict[str, Callable[[Candidate], str]] = {
        "all": lambda candidate: _amount(sum(candidate.memory.values()) / scale, decimals)}
    for kind in names(candidate.memory for candidate in shown.all):
        columns[kind] = lambda candidate, kind=kind: (  # type: ignore[misc]
            _amount(candidate.memory.get(kind, 0) / scale, decimals))
    yield _table(f"[bold]Memory of the fullest rank, in {unit}[/]", columns, shown)


def _table(title: str, columns: dict[str, Callable[[Candidate], str]], shown: Shown) -> FigureTable:
    """A line for each candidate; presets below a rule."""
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


def _share(share: float) -> str:
    """Of three digits, in percent."""
    return f"{share:.3g}" if share >= LEAST_SHARE else f"<{LEAST_SHARE}"


def _amount(value: float, decimals: int) -> str:
    """With so many digits after the point; two digits that count of what would have fewer.

        >>> _amount(0.7, 2), _amount(0.0312, 1), _amount(0, 1)
        ('0.70', '0.031', '0.0')
    """
    return f"{value:#.2g}" if 0 < value < 10 ** (1 - decimals) else f"{value:,.{decimals}f}"


def figure(value: float, decimals: int) -> str:
    """With so many digits after the point; what would be wider than a column, in thousands.

        >>> figure(1727.4, 0), figure(171757.0, 0)
        ('1,727', '172k')
    """
    return f"{value:,.{decimals}f}" if value < WIDE else f"{value / 1000:,.0f}k"


def decimals_of(most: float) -> int:
    """Digits after the point, so that the most has three.

        >>> decimals_of(1.727), decimals_of(88.5), decimals_of(12345.6)
        (2, 1, 0)
    """
    return max(0, 3 - len(f"{most:.0f}"))
