"""A simulated step and its curves, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from ...model.simulation.replay import WORDS
from ...text import in_bytes, in_time
from ..formatting import percent
from ..output import FigureTable
from .scaling import VARIANTS, Curve, Point
from .steps import Simulated, Simulator

NAMES = {"gemm": "GEMM", "passes": "passes over memory", "overhead": "overhead of Python", "noise": "noise"}
BAR = 30
LARGEST = 10
MOST_CLASSES = 4


def print_step(simulator: Simulator, found: Simulated, what: str, console: Console) -> None:
    """All of one step."""
    machine, memory = simulator.machine, sum(found.step.memory.values())
    nodes = -(-found.grid.size // simulator.ranks_per_node)
    console.print(f"\n[bold]A step of {escape(what)}[/] on grid {found.grid}: {found.grid.size:,} ranks on {nodes:,} "
                  f"node{'s' * (nodes > 1)} of {escape(machine.name)}, {in_time(found.seconds)}")
    share = found.share_of_peak(machine)
    rate = simulator.steps.rows * simulator.steps.micro_batches / (found.seconds or 1)
    console.print(f"{rate:,.0f} rows per second" + (f", {percent(share)} of the peak in {found.dtype}" if share else "")
                  + f"; simulated: {_classes(found.alike)}")
    for dtype, other in found.priced_as(machine).items():
        console.print(f"[yellow]{escape(machine.name)} has no figures for GEMMs in {dtype}: priced as {other}[/]")
    console.print(_terms(found, console))
    console.print(_axes(found))
    console.print(_largest(simulator, found))
    console.print(_memory(found.step.memory))
    if 0 < machine.memory < memory:
        console.print(f"[yellow]A rank of {escape(machine.name)} has {in_bytes(machine.memory)}, less than the "
                      f"{in_bytes(memory)} of this step: more ranks along x, y or z hold less each[/]")


def print_curve(curve: Curve, console: Console) -> None:
    """A row for each number of ranks."""
    how = "the same batch" if curve.kind == "strong" else "a batch that grows with the ranks"
    title = f"[bold]{curve.kind.capitalize()} scaling[/]: {how}; ms a step, by the overlaps that are on"
    table = FigureTable(title, ("ranks", "grid", "batch", *VARIANTS, "efficiency"))
    for point in curve.points:
        efficiency = curve.efficiency(point)
        table.add_row(f"{point.ranks:,}", str(point.grid or "-"), f"{point.batch:,}",
                      *(_milliseconds(point, variant) for variant in VARIANTS),
                      "-" if efficiency is None else percent(efficiency))
    console.print(table)
    console.print("no oar, no ors, no oag: all-reduces, reduce-scatters or all-gathers do not overlap computation; no "
                  "buckets: sums of gradients do not; none: nothing does")
    few = [point for point in curve.points if point.grid and point.batch < point.grid.data * point.grid.z]
    if few:
        console.print(f"[yellow]From {few[0].ranks:,} ranks on, a batch of {few[0].batch:,} leaves ranks along data "
                      "and z without a row[/]")
    for point in curve.points:
        if point.why_not:
            held = f" (it holds {in_bytes(point.memory)} a rank)" if point.memory else ""
            console.print(f"[yellow]{point.ranks:,} ranks: {escape(point.why_not)}{held}[/]")


def _milliseconds(point: Point, variant: str) -> str:
    seconds = point.seconds.get(variant)
    return "-" if seconds is None else f"{1e3 * seconds:,.4g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _classes(alike: Mapping[int, int]) -> str:
    shown = [f"rank {rank} for {ranks:,}" for rank, ranks in list(alike.items())[:MOST_CLASSES]]
    more = f" and {len(alike) - MOST_CLASSES} more" if len(alike) > MOST_CLASSES else ""
    return ", ".join(shown) + more


def _terms(found: Simulated, console: Console) -> FigureTable:
    table = FigureTable("[bold]Time of the slowest rank[/]", ("what", "ms", "share", ""), left=("",))
    block = "█" if _takes(console, "█") else "#"
    for name, seconds in sorted(found.terms.items(), key=lambda term: -term[1]):
        share = seconds / found.seconds if found.seconds else 0.0
        table.add_row(NAMES.get(name, f"waiting: {name}"), _short(seconds), percent(share), block * round(BAR * share))
    table.add_row("together", _short(found.seconds), "", "", style="bold")
    return table


def _takes(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _axes(found: Simulated) -> FigureTable:
    table = FigureTable("[bold]Communication of rank 0[/]", ("axis", "received", "ms by itself", "ms hidden",
                                                             "ms waited"))
    waits, received = found.timeline.waits(0), found.received
    for axis, seconds in found.alone.items():
        if axis not in WORDS.values():
            table.add_row(axis, in_bytes(received.get(axis, 0)), _short(seconds), _short(found.hidden[axis]),
                          _short(waits.get(axis, 0.0)))
    table.add_row("together", in_bytes(found.step.received), "", "", "", style="bold")
    return table


def _largest(simulator: Simulator, found: Simulated) -> FigureTable:
    table = FigureTable("[bold]What takes longest of rank 0[/], each by itself", ("what", "times", "ms"))
    for share in simulator.largest(found)[:LARGEST]:
        table.add_row(escape(share.what), f"{share.times:,}", _short(share.seconds))
    return table


def _memory(memory: Mapping[str, int]) -> FigureTable:
    table = FigureTable("[bold]Memory of rank 0[/]", ("what", ""))
    for kind, nbytes in memory.items():
        table.add_row(kind, in_bytes(nbytes))
    table.add_row("together", in_bytes(sum(memory.values())), style="bold")
    return table


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"
