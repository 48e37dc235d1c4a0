"""A ranking as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.table import Column, Table

from ...comm.words import in_bytes
from ...model.candidates import Candidate, Ranking
from ...model.ranking import lower_bound
from .shown import TERMS, Shown, names

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
LEAST_SHARE = 0.01
"""Percent of peak; less is not told."""
ENOUGH = 10
"""Of a unit in which times are told."""
WIDE = 1e5
"""From here on figures are in thousands."""
HEADERS = {"overhead": "over\nhead", "activations": "activ-\nations", "gradients": "gradi-\nents",
           "workspace": "work-\nspace"}
BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
"""Of `in_bytes`."""


def print_ranking(console: Console, ranking: Ranking, shown: Shown, peak: float,
                  product: tuple[int, int, int] | None = None) -> None:
    """Two tables: where the time goes, and what is held. peak: flop/s of a rank; 0 if seconds are no whole step."""
    for title, table in (_times(ranking, shown, peak, product), *_memory(shown)):
        console.print(f"\n[bold]{title}[/]")
        console.print(table)
    if any(candidate.estimated for candidate in shown.all):
        console.print("~ by formulas: there are too many grids to simulate each")


def _times(ranking: Ranking, shown: Shown, peak: float, product: tuple[int, int, int] | None) -> tuple[str, Table]:
    """Seconds, share of peak, bytes over the lower bound, and each term."""
    best = shown.all[0].seconds
    scale, unit = next((each for each in UNITS if best >= ENOUGH * each[0]), UNITS[-1])
    decimals = decimals_of(best / scale)
    columns: dict[str, Callable[[Candidate], str]] = {
        unit: lambda candidate: "~" * candidate.estimated + figure(candidate.seconds / scale, decimals)}
    if peak:
        columns["peak\n%"] = lambda candidate: _share(100 * ranking.share_of_peak(candidate, peak))
    if product is not None and (bound := lower_bound(product, ranking.ranks, ranking.dtype)):
        columns["bytes over\nbound"] = lambda candidate: f"{candidate.bytes / bound:.2f}"
    if any(candidate.overlap for candidate in shown.all):
        columns["overlap"] = lambda candidate: candidate.overlap
    for term in names((candidate.terms for candidate in shown.all), TERMS):
        columns[HEADERS.get(term, term)] = lambda candidate, term=term: (  # type: ignore[misc]
            figure(candidate.terms.get(term, 0.0) / scale, decimals))
    what = ranking.what[0].upper() + ranking.what[1:]
    return f"{what} on {ranking.ranks:,} ranks, time in {unit}", _table(columns, shown)


def _memory(shown: Shown) -> Iterator[tuple[str, Table]]:
    """Each kind, in the unit of the most; nothing where nothing is known."""
    most = max(sum(candidate.memory.values()) for candidate in shown.all)
    if not most:
        return
    unit = in_bytes(most).split()[1]
    scale = 1024 ** BYTES.index(unit)
    decimals = decimals_of(most / scale)
    columns: dict[str, Callable[[Candidate], str]] = {
        "all": lambda candidate: f"{sum(candidate.memory.values()) / scale:,.{decimals}f}"}
    for kind in names(candidate.memory for candidate in shown.all):
        columns[HEADERS.get(kind, kind)] = lambda candidate, kind=kind: (  # type: ignore[misc]
            f"{candidate.memory.get(kind, 0) / scale:,.{decimals}f}")
    yield f"Memory of the fullest rank, in {unit}", _table(columns, shown)


def _table(columns: dict[str, Callable[[Candidate], str]], shown: Shown) -> Table:
    """A line for each candidate; presets below a rule. Figures that do not fit are folded, not cut."""
    headers = [Column(name, justify="right", overflow="fold", no_wrap=name == "overlap") for name in columns]
    table = Table(Column("", justify="right"), Column("grid", no_wrap=True), Column("preset", no_wrap=True), *headers,
                  box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for place, candidate in enumerate(shown.all, 1):
        figures = [of(candidate) for of in columns.values()]
        table.add_row(str(place) if place <= len(shown.best) else "", str(candidate.grid), candidate.preset, *figures,
                      end_section=place == len(shown.best))
    return table


def _share(share: float) -> str:
    """Of three digits, in percent."""
    return f"{share:.3g}" if share >= LEAST_SHARE else f"<{LEAST_SHARE}"


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
