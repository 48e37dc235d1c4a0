"""The facts and tables of the benchmark, for the terminal and for the page, and its picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import date
from io import BytesIO
from pathlib import Path
from statistics import fmean

from rich.console import Console

from ...text import (
    MOST_HOSTS,
    blas_in_words,
    counted,
    figure,
    in_bytes,
    in_flops,
    in_time,
    milliseconds,
    names_in_words,
    percent,
)
from ..output import FigureTable, facts
from ..plots import Part, bars, picture, titled
from .result import COLOURS, NOT_ASKED_FOR, Result, time_parts


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print all figures of one product, or a table of all grids."""
    first = results[0]
    console.print(f"\n[bold]{title(first)}[/] ({kind(first)})")
    console.print(facts("[bold]Environment[/]", environment(first)))
    if len(results) > 1:
        console.print(facts("", {"limit": _limit(first)}))
        console.print(sweep(results))
    else:
        for part in (facts("[bold]Product[/]", product(first)), times(first), traffic(first)):
            console.print(part)
    if first.environment.advice:
        console.print(f"[yellow]{first.environment.advice}[/]")
    if first.ranks == 1 and len(results) == 1:
        console.print("One rank. For more: python -m pmm3d.launcher -n 8 -m pmm3d bench, or srun at a site")


def title(result: Result) -> str:
    return f"C = A B, m, n, k = {result.m}, {result.n}, {result.k}"


def kind(result: Result) -> str:
    """Return a description of the type of the elements and of the storage of the matrices."""
    by_columns = [name for name, order in zip("ABC", result.orders) if order == "F"]
    return (
        f"{'tf32' if result.tf32 else result.dtype}, {result.array}"
        + (f", stored {result.transpose}" if result.transpose != "nn" else "")
        + (f", {' and '.join(by_columns)} by columns" if by_columns and result.order != "C" else "")
        + (", in shared memory" if result.shared else "")
    )


def environment(result: Result) -> dict[str, str]:
    measured_on = result.environment
    hosts = [
        f"{host} ({counted(ranks, 'rank')} on {counted(cores, 'core')})"
        for host, ranks, cores in zip(measured_on.hosts, measured_on.ranks_per_host, measured_on.cores_per_host)
    ]
    devices = ", ".join(f"{number} x {name}" for name, number in Counter(measured_on.devices).items())
    return {
        "hosts": names_in_words(hosts, MOST_HOSTS),
        **({"devices": devices} if devices else {}),
        "CPU": measured_on.cpu,
        "BLAS": blas_in_words(measured_on.blas, measured_on.kernel, measured_on.threads),
        "MPI": measured_on.mpi,
    }


def product(result: Result) -> dict[str, str]:
    """Return the facts about one product, in rich's markup."""
    idle = f", {counted(result.idle_ranks, 'rank')} idle" if result.idle_ranks else ""
    in_place = f"; {' and '.join(result.in_place)} read in place" if result.in_place else ""
    low, middle, high = (in_time(figure) for figure in (min(result.seconds), result.median, max(result.seconds)))
    cube, together = result.cores * result.limit.square_core_gflops, result.limit.at_once_gflops
    lines = {
        "grid": f"{result.shape} of {counted(result.ranks, 'rank')}{idle}; {counted(result.panels, 'panel')} along k; "
        f"overlap {result.overlap}{in_place}",
        "blocks": ", ".join(f"{name} {rows} x {cols}" for name, (rows, cols) in result.blocks.items()),
        "memory a rank": f"{in_bytes(result.model_memory)} of matrices and work arrays "
        f"({in_bytes(result.workspace_bytes)} work); resident {in_bytes(result.peak_memory)}, grew "
        f"by {in_bytes(result.resident_growth)} while measuring",
        "memory a node": f"{in_bytes(result.node_memory)} resident at the peak, shared pages once",
        "time": f"median {middle} of {len(result.seconds)} (from {low} to {high})",
        "rate": in_flops(1e9 * result.gflops),
        "limit": _limit(result),
        "ratio": f"[bold]{result.ratio:.3f}[/] of the limit",
    }
    if not result.limit.is_cube:
        lines["ratio"] += (
            f"; {result.gflops / cube if cube else 0:.3f} of {result.limit.square} cubed on all {result.unit}"
        )
    if together:
        lines["at once"] = (
            f"[bold]{result.gflops / together:.3f}[/] of {in_flops(1e9 * together)}, the rate of that "
            "GEMM on all cores together without messages"
        )
    if result.reference is not None:
        lines["reference"] = (
            f"[bold]{result.reference.share:.3f}[/] of the rate of {result.reference.name}, "
            f"{in_flops(1e9 * result.reference.gflops)}, timed in turns"
        )
    bound, at_work = result.lower_bound_bytes, result.ranks - result.idle_ranks
    lines["lower bound"] = f"{bound:,.0f} bytes received, for any algorithm on {counted(at_work, 'rank')}"
    if bound:
        lines["lower bound"] += f"; this product received {result.received / bound:.3f} times that"
    verdict = "[green]yes[/]" if result.verified else "[red]NO[/]"
    asked = result.verification != NOT_ASKED_FOR
    return lines | {"verified": f"{verdict} ({result.verification})" if asked else f"[yellow]{NOT_ASKED_FOR}[/]"}


def times(result: Result) -> FigureTable:
    """Return a table of the parts of the time of a product, which add up to the whole."""
    whose = f"mean of the repetitions and of {counted(result.ranks - result.idle_ranks, 'rank')}"
    whose += f", without {result.idle_ranks:,} idle" if result.idle_ranks else ""
    whose += "" if result.unit == "cores" else "; of the host, which asks the devices"
    table = FigureTable(
        f"[bold]Time of one product[/] ({whose})",
        ("part", "ms", "share", "worst rank ms", "what it is"),
        sentences=("what it is",),
    )
    mean_seconds = fmean(result.seconds)
    for part in time_parts(result):
        most = "" if part.most is None else milliseconds(part.most)
        table.add_row(part.name, milliseconds(part.seconds), percent(part.seconds / mean_seconds), most, part.meaning)
    table.add_row(
        "whole product", milliseconds(mean_seconds), "", "", "the slowest rank of each repetition", style="bold"
    )
    return table


def traffic(result: Result) -> FigureTable:
    """Return a table of measured and modelled bytes by axis."""
    table = FigureTable("[bold]Bytes of one product[/] (largest rank)", ("axis", "sent", "model", "received"))
    columns = result.bytes_sent, result.bytes_model, result.bytes_received
    for axis in result.bytes_sent:
        table.add_row(axis, *(f"{column[axis]:,}" for column in columns))
    table.add_row("all", *(f"{sum(column.values()):,}" for column in columns), style="bold")
    return table


def sweep(results: Sequence[Result]) -> FigureTable:
    """Return a table with a row for each grid, the fastest first."""
    table = FigureTable(
        "[bold]Every grid[/]" + " (*: auto chooses it)" * any(one.auto for one in results),
        ("grid", "median ms", "GFLOP/s", "ratio", "computing ms", "waiting ms", "received", "times bound", "ok"),
    )
    for result in fastest_first(results):
        bound = f"{result.received / result.lower_bound_bytes:.2f}" if result.lower_bound_bytes else "-"
        verdict = "yes" if result.verified else "-" if result.verification == NOT_ASKED_FOR else "NO"
        name = result.shape + "*" * result.auto + (f" ({result.idle_ranks:,} idle)" if result.idle_ranks else "")
        table.add_row(
            name,
            milliseconds(result.median),
            figure(result.gflops, 1),
            f"{result.ratio:.3f}",
            milliseconds(result.computed_seconds),
            milliseconds(result.waited_seconds),
            in_bytes(result.received),
            bound,
            verdict,
        )
    return table


def fastest_first(results: Sequence[Result]) -> list[Result]:
    return sorted(results, key=lambda result: result.median)


def _limit(result: Result) -> str:
    limit, shape = result.limit, "x".join(map(str, result.limit.core_shape))
    cube = "" if limit.is_cube else f"; {limit.square} cubed: {in_flops(1e9 * limit.square_core_gflops)}"
    return (
        f"{result.cores} {result.unit} x {in_flops(1e9 * limit.core_gflops)} (GEMM {shape} on one "
        f"{result.unit[:-1]}{cube})"
    )


def draw(results: Sequence[Result], path: Path | BytesIO) -> None:
    """Draw a bar for each grid, and a line at the time of the limit. A BytesIO gets SVG."""
    results = fastest_first(results)
    rows = [
        (
            result.shape + " (auto)" * (result.auto and len(results) > 1),
            [Part(part.name, 1e3 * part.seconds) for part in time_parts(result)],
        )
        for result in results
    ]
    best, measured_on = results[0], results[0].environment
    with picture(path, 9, 2.2 + 0.45 * len(results)) as figure:
        axes = figure.subplots()
        bars(axes, rows, COLOURS)
        axes.axvline(1e3 * best.median * best.ratio, color="black", linestyle="--", linewidth=1)
        ends = [sum(part.length for part in parts) for _, parts in rows]
        for index, (result, end) in enumerate(zip(results, ends)):
            axes.annotate(
                f"{result.ratio:.2f} of the limit",
                (end, index),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        limit = f"the GEMM alone, {best.cores} {best.unit} x {in_flops(1e9 * best.limit.core_gflops)}"
        axes.set(
            xlabel="ms (one product; mean of the repetitions and of the ranks that took part)\n"
            f"dashed: the limit, {limit}",
            ylabel="grid Gx x Gy x Gz",
            xlim=(0, 1.2 * max(ends)),
        )
        if isinstance(path, Path):  # a page has its own title above the picture
            blas, hosts = environment(best)["BLAS"], names_in_words(measured_on.hosts, MOST_HOSTS)
            axes.set_title(
                titled(
                    f"{title(best)}, {best.dtype}, {counted(best.ranks, 'rank')}",
                    f"{hosts}: {measured_on.cpu}; {blas}; {date.today().isoformat()}",
                )
            )
