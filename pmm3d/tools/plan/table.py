"""A ranking as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Column, Table

from ...comm.words import in_bytes
from ...model.candidates import Candidate, Ranking
from ...model.ranking import lower_bound
from .shown import TERMS, Shown, names

MOST_DIGITS = 4
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def print_ranking(console: Console, ranking: Ranking, shown: Shown, peak: float,
                  product: tuple[int, int, int] | None = None) -> None:
    """Two tables: where the time goes, and what is held. peak: flop/s of a rank, 0 if seconds are no whole step."""
    console.print(_times(ranking, shown, peak, product))
    if any(candidate.memory for candidate in shown.all):
        console.print(_memory(shown))


def _times(ranking: Ranking, shown: Shown, peak: float, product: tuple[int, int, int] | None) -> Table:
    """Seconds, share of peak, bytes over the lower bound, and each term."""
    scale, unit = next((each for each in UNITS if shown.all[0].seconds >= each[0]), UNITS[-1])
    columns: dict[str, Callable[[Candidate], str]] = {
        unit: lambda candidate: figure(candidate.seconds / scale)}
    if peak:
        columns["peak"] = lambda candidate: f"{100 * ranking.share_of_peak(candidate, peak):.3g}%"
    if product is not None and (bound := lower_bound(product, ranking.ranks, ranking.dtype)):
        columns["bytes over\nbound"] = lambda candidate: f"{candidate.bytes / bound:.2f}"
    for term in names((candidate.terms for candidate in shown.all), TERMS):
        columns[term] = lambda candidate, term=term: figure(  # type: ignore[misc]
            candidate.terms.get(term, 0.0) / scale)
    return _table(f"[bold]{ranking.what} on {ranking.ranks:,} ranks[/], time in {unit}", columns, shown)


def _memory(shown: Shown) -> Table:
    columns: dict[str, Callable[[Candidate], str]] = {
        "all": lambda candidate: in_bytes(sum(candidate.memory.values()))}
    for kind in names(candidate.memory for candidate in shown.all):
        columns[kind] = lambda candidate, kind=kind: in_bytes(candidate.memory.get(kind, 0))  # type: ignore[misc]
    return _table("[bold]Memory[/] of the fullest rank", columns, shown)


def _table(title: str, columns: dict[str, Callable[[Candidate], str]], shown: Shown) -> Table:
    """A line for each candidate; presets below a rule. Figures that do not fit are folded, not cut."""
    headers = [Column(name, justify="right", overflow="fold") for name in columns]
    table = Table(Column("", justify="right"), Column("grid", overflow="fold"), Column("preset"), *headers, title=title,
                  title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for rows in (shown.best, shown.presets):
        for place, candidate in rows:
            table.add_row(str(place), str(candidate.grid), candidate.preset, *(of(candidate) for of in columns.values()))
        table.add_section()
    return table


def figure(value: float) -> str:
    """Four digits, without zeros that say nothing.

        >>> figure(1.72684), figure(12345.6), figure(0.0), figure(0.00001)
        ('1.727', '12,346', '0', '1e-05')
    """
    return f"{value:,.0f}" if value >= 10**MOST_DIGITS else f"{value:.{MOST_DIGITS}g}"
