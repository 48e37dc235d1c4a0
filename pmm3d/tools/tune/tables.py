"""What was measured of a machine, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from ...model.machines import Machine
from ...text import in_bytes
from ..output import FigureTable
from .fitting import Fitted
from .measure import Report

SHOWN_GEMMS = (64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (1024, 16, 1024), (16, 1024, 1024)


def print_report(report: Report, console: Console) -> None:
    """Everything, in a screen or two."""
    machine = report.machine
    console.print(f"\n[bold]{machine.name}[/]: {len(report.hosts)} ranks on {len(set(report.hosts))} node(s), "
                  f"{in_bytes(machine.memory)} a rank")
    console.print(_gemms(machine))
    console.print(_passes(machine))
    if machine.collectives:
        console.print(_collectives(machine))
        console.print(_laws(report.fit))
    for place, share in machine.hidden.items():
        console.print(f"hidden under GEMMs, {place} a node: {share:.0%} of an all-reduce" if place == "inside" else
                      f"hidden under GEMMs, across nodes: {share:.0%} of an all-reduce")
    console.print("in steps of training a GEMM or a pass took {:+.1f} us, a collective inside a node {:+.1f} us, "
                  "across nodes {:+.1f} us".format(*(1e6 * each for each in machine.in_steps)))
    _print_doubts(report, console)


def _print_doubts(report: Report, console: Console) -> None:
    if report.thrown:
        console.print(f"[yellow]{report.thrown} samples were thrown away: the clock had jumped, or a rank stood "
                      "still[/]")
    if report.left_out:
        console.print(f"[yellow]{report.left_out} points were not measured: the time was up. --budget 2 takes "
                      "longer[/]")
    if report.unlike:
        console.print(f"[yellow]unlike the first host, in CPU, MPI, BLAS or settings: {', '.join(report.unlike)}[/]")
    for one in report.slow:
        console.print(f"[yellow]rank {one.rank} (host {report.hosts[one.rank]}) was slow in {one.section}: "
                      f"{one.ratio:g} times the median of the ranks[/]")


def _gemms(machine: Machine) -> FigureTable:
    rows = []
    for dtype, found in machine.gemms.items():
        for form, points in found.forms.items():
            rates = (f"{points.rate(*shape) / 1e9:.2f}" for shape in SHOWN_GEMMS)
            rows.append((dtype, form, *rates, f"{max(points.flops) / 1e9:.2f}"))
    shapes = (" x ".join(map(str, shape)).replace(" x ", "x\n", 2) for shape in SHOWN_GEMMS)
    return _table("[bold]GEMM[/] GFLOP/s of a rank, m x n x k", ("dtype", "form", *shapes, "best"), rows)


def _passes(machine: Machine) -> FigureTable:
    rows = [(name, f"{1e6 * one.overhead:.1f}", f"{one.rate / 1e9:.2f}") for name, one in machine.passes.items()]
    return _table("[bold]Passes over memory[/] of a rank", ("pass", "overhead us", "GB/s"), rows)


def _collectives(machine: Machine) -> FigureTable:
    rows = []
    for row in machine.collectives:
        rate = row.nbytes[-1] / row.seconds[-1] / 1e9
        rows.append((row.operation, str(row.inside), str(row.nodes), f"{1e6 * row.seconds[0]:.1f}",
                     in_bytes(row.nbytes[-1]), f"{rate:.3f}"))
    return _table("[bold]Collectives[/], all groups at once",
                  ("operation", "inside", "nodes", "latency us", "largest", "GB/s"), rows)


def _laws(fit: Fitted) -> FigureTable:
    rows = []
    for operation, law in fit.laws.items():
        figures = (f"{1e6 * figure:.1f}" for figure in law[:3])
        rates = (f"{1e-9 / figure:.2f}" if figure else "-" for figure in law[3:5])
        misfit = fit.misfits.get(operation)
        errors = (f"{misfit.median:.0%}", f"{misfit.largest:.0%}") if misfit else ("-", "-")
        rows.append((operation, *figures, *rates, *errors))
    return _table("[bold]Laws[/] where nothing was measured: us a call and a message, GB/s, relative misfit",
                  ("operation", "start", "message inside", "message across", "GB/s inside", "GB/s across", "median",
                   "largest"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> FigureTable:
    table = FigureTable(title, columns)
    for row in rows:
        table.add_row(*row)
    return table
