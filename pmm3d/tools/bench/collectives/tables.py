"""What was measured of the collectives, as tables on a terminal."""

from __future__ import annotations

from math import inf

from rich.console import Console

from ....comm.words import in_bytes
from ....model.textbook import cost, crossovers, ways
from ...figure_table import FigureTable
from .measure import MPI_BLOCKING, Found, Row

KIND = tuple[int, int, int]


def print_found(found: Found, console: Console) -> None:
    """Times, crossovers, and the model beside them."""
    as_if = f", looked at as if on {found.as_if} nodes" if found.as_if else ""
    console.print(f"[bold]Collectives[/] of {found.ranks} ranks on {found.hosts} node(s){as_if}, float32\n{found.cpu}; "
                  f"{found.mpi}\nMicroseconds of the slowest rank, median and half the spread; [bold]the fastest[/]; * "
                  "what the library does by itself")
    for group in found.groups():
        for operation in found.operations:
            console.print(f"\n[bold]{operation}[/], {in_words(group)}")
            console.print(times(found, operation, group))
    console.print("\n[bold]Fastest[/] from which size on")
    console.print(crossings(found))
    group, nbytes = found.groups()[0], max(row.nbytes for row in found.rows)
    console.print(f"\n[bold]By alpha, beta and gamma[/]: {1e6 * found.alpha:.1f} us a step, {_rate(found.beta)} "
                  f"received, {_rate(found.gamma)} added\n{in_words(group)}, {in_bytes(nbytes)}; bytes of the rank "
                  "with most")
    console.print(textbook(found, group, nbytes))


def times(found: Found, operation: str, group: KIND) -> FigureTable:
    """Of one collective in one group: a row a way, a column a size."""
    rows = found.of(operation, group)
    sizes = list(rows[MPI_BLOCKING])
    across = any(row.across for points in rows.values() for row in points.values())
    table = FigureTable("", ("way", *map(in_bytes, sizes), *(["last: into a node"] if across else [])))
    medians = _medians(rows, sizes)
    fastest = [min(medians, key=lambda way: medians[way][index]) for index in range(len(sizes))]
    for way, points in rows.items():
        table.add_row(way, *(_cell(points.get(size), way == best) for size, best in zip(sizes, fastest)),
                      *([_crossed(points.get(sizes[-1]))] if across else []))
    return table


def crossings(found: Found) -> FigureTable:
    """Which way is the fastest from which size on, and which is the library's there."""
    table = FigureTable("", ("collective", "way", "from", "the library's way"), keys=2, left=("the library's way",))
    for group in found.groups():
        table.add_row("", f"[bold]{in_words(group)}[/]")
        for operation in found.operations:
            rows = found.of(operation, group)
            sizes = list(rows[MPI_BLOCKING])
            for size, way in crossovers(sizes, _medians(rows, sizes)):
                chosen = [name for name, points in rows.items() if size in points and points[size].chosen]
                table.add_row(operation, way, in_bytes(size), *chosen)
    return table


def textbook(found: Found, group: KIND, nbytes: int) -> FigureTable:
    """What alpha, beta and gamma say of a group and a size."""
    table = FigureTable("", ("way", "steps", "received", "across", "added", "model us", "us"))
    inside = group[1] if group[2] > 1 and group[0] == group[1] * group[2] else 1
    for operation in found.operations:
        rows = found.of(operation, group)
        table.add_row(f"[bold]{operation}[/]")
        for way in ways(operation, inside):
            known, row = cost(operation, way, group[0], nbytes, inside), rows.get(way, {}).get(nbytes)
            seconds = known.seconds(found.alpha, found.beta, found.gamma)
            across = in_bytes(known.across) if known.across else ""
            table.add_row(way, str(known.steps), in_bytes(known.received), across,
                          in_bytes(known.added) if known.added else "", f"{1e6 * seconds:.0f}",
                          f"{1e6 * row.median:.0f}" if row else "-")
    return table


def in_words(group: KIND) -> str:
    """8 ranks, 4 on each of 2 nodes."""
    ranks, inside, nodes = group
    if nodes == 1:
        return f"{ranks} ranks on a node"
    most = "" if ranks == inside * nodes else "up to "
    return f"{ranks} ranks, {most}{inside} on each of {nodes} nodes"


def _medians(rows: dict[str, dict[int, Row]], sizes: list[int]) -> dict[str, list[float]]:
    return {way: [points[size].median if size in points else inf for size in sizes] for way, points in rows.items()}


def _cell(row: Row | None, best: bool) -> str:
    if row is None:
        return "-"
    spread = (max(row.seconds) - min(row.seconds)) / row.median / 2
    text = f"{1e6 * row.median:.0f}{'*' if row.chosen else ''} {100 * spread:.0f}%"
    return f"[bold]{text}[/]" if best else text


def _crossed(row: Row | None) -> str:
    return "-" if row is None or row.way.startswith(MPI_BLOCKING) else in_bytes(row.across)


def _rate(seconds: float) -> str:
    return f"{1e-9 / seconds:.2f} GB/s" if seconds else "no time"
