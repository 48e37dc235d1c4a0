"""The tables of the benchmark on a terminal."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from rich.console import Console
from rich.table import Table

from ...text import MOST_HOSTS, blas_in_words, counted, in_bytes, in_time, names_in_words
from ..formatting import figure, in_flops, milliseconds, percent
from ..output import FigureTable, facts
from .result import Result, time_parts


def print_results(results: list[Result], console: Console) -> None:
    """Print all figures of one product, or a table of every grid."""
    if len(results) > 1:
        print_sweep(results, console)
    else:
        print_result(results[0], console)


def print_result(result: Result, console: Console) -> None:
    """Print all figures of one product."""
    for part in (_headline, _environment, _product, _times, _bytes, _bound):
        console.print(part(result))
    _print_advice(result, console)
    if result.partition.ranks == 1:
        console.print("One rank. For more: python -m pmm3d.launcher -n 8 -m pmm3d bench, or srun at a site")


def print_sweep(results: list[Result], console: Console) -> None:
    """Print a line for each grid, the fastest first."""
    first = results[0]
    console.print(_headline(first))
    console.print(_environment(first))
    console.print(facts("", {"limit": _limit(first)}))
    table = FigureTable("[bold]Every grid[/]" + " (*: auto chooses it)" * any(one.partition.auto for one in results),
                        ("grid", "median ms", "GFLOP/s", "ratio", "computing ms", "waiting ms", "received",
                         "times bound", "ok"))
    for result in sorted(results, key=lambda result: result.speed.median):
        speed, traffic, idle = result.speed, result.traffic, result.partition.idle_ranks
        bound = f"{traffic.received / traffic.lower_bound_bytes:.2f}" if traffic.lower_bound_bytes else "-"
        name = result.shape + "*" * result.partition.auto + (f" ({idle:,} idle)" if idle else "")
        table.add_row(name, milliseconds(speed.median), figure(speed.gflops, 1), f"{speed.ratio:.3f}",
                      milliseconds(speed.computed_seconds), milliseconds(speed.waited_seconds),
                      in_bytes(traffic.received), bound, "yes" if result.check.verified else "NO")
    console.print(table)
    _print_advice(first, console)


def _print_advice(result: Result, console: Console) -> None:
    if result.environment.advice:
        console.print(f"[yellow]{result.environment.advice}[/]")


def _headline(result: Result) -> str:
    case = result.case
    kind = f"{'tf32' if case.tf32 else case.dtype}, {case.array}"
    kind += "" if case.transpose == "nn" else f", stored {case.transpose}"
    by_columns = [name for name, order in zip("ABC", result.partition.orders) if order == "F"]
    kind += f", {' and '.join(by_columns)} by columns" if by_columns and case.order != "C" else ""
    kind += ", in shared memory" if case.shared else ""
    return f"\n[bold]C = A B[/]  m, n, k = {case.m}, {case.n}, {case.k}  ({kind})"


def _environment(result: Result) -> Table:
    found = result.environment
    hosts = [f"{host} ({counted(ranks, 'rank')} on {counted(cores, 'core')})"
             for host, ranks, cores in zip(found.hosts, found.ranks_per_host, found.cores_per_host)]
    devices = Counter(found.devices).items()
    return facts("[bold]Environment[/]", {
        "hosts": names_in_words(hosts, MOST_HOSTS),
        **({"devices": ", ".join(f"{number} x {name}" for name, number in devices)} if devices else {}),
        "CPU": found.cpu,
        "BLAS": blas_in_words(found.blas, found.kernel, found.threads), "MPI": found.mpi})


def _product(result: Result) -> Table:
    partition, speed, memory, check = result.partition, result.speed, result.memory, result.check
    idle = f", {counted(partition.idle_ranks, 'rank')} idle" if partition.idle_ranks else ""
    low, middle, high = (in_time(figure) for figure in (min(speed.seconds), speed.median, max(speed.seconds)))
    cube, together = speed.cores * result.limit.square_core_gflops, result.limit.at_once_gflops
    at_once = {"at once": f"[bold]{speed.gflops / together:.3f}[/] of {in_flops(1e9 * together)}, that GEMM on all "
                          "cores together without a message"} if together else {}
    beside = {} if result.reference is None else {
        "beside": f"[bold]{result.reference.share:.3f}[/] of the rate of {result.reference.name}, "
                  f"{in_flops(1e9 * result.reference.gflops)}, in turns"}
    colour = "green" if check.verified else "red" if check.verification != "not asked for" else "yellow"
    return facts("[bold]Product[/]", {
        "grid": f"{result.shape} of {counted(partition.ranks, 'rank')}{idle}; {partition.panels} panel(s) along k; "
                f"overlap {partition.overlap}"
                + (f"; {' and '.join(partition.in_place)} read in place" if partition.in_place else ""),
        "blocks": ", ".join(f"{name} {rows} x {cols}" for name, (rows, cols) in partition.blocks.items()),
        "memory a rank": f"{in_bytes(memory.model_memory)} of matrices and work arrays "
                         f"({in_bytes(memory.workspace_bytes)} work); resident {in_bytes(memory.peak_memory)}, grew "
                         f"by {in_bytes(memory.resident_growth)} while measuring",
        "memory a node": f"{in_bytes(memory.node_memory)} resident at the peak, shared pages once",
        "time": f"median {middle} of {len(speed.seconds)} (from {low} to {high})",
        "rate": in_flops(1e9 * speed.gflops),
        "limit": _limit(result),
        "ratio": f"[bold]{speed.ratio:.3f}[/] of the limit; {speed.gflops / cube if cube else 0:.3f} of "
                 f"{result.limit.square} cubed on all {speed.unit}",
        **at_once,
        **beside,
        "verified": f"[{colour}]{'yes' if check.verified else 'NO'}[/] ({check.verification})",
    })


def _times(result: Result) -> FigureTable:
    """The parts of the time of a product, which add up to the whole."""
    speed, partition = result.speed, result.partition
    at_work, idle = partition.ranks - partition.idle_ranks, partition.idle_ranks
    whose = f"mean of the repetitions and of {counted(at_work, 'rank')}"
    whose += f", without {idle:,} idle" if idle else ""
    whose += "" if speed.unit == "cores" else "; of the host, which asks the devices"
    table = FigureTable(f"[bold]Time of one product[/] ({whose})",
                        ("part", "ms", "share", "worst rank ms", "what it is"), sentences=("what it is",))
    whole = fmean(speed.seconds)
    for part in time_parts(result.as_json()):
        most = "" if part.most is None else milliseconds(part.most)
        table.add_row(part.name, milliseconds(part.seconds), percent(part.seconds / whole), most, part.meaning)
    table.add_row("whole product", milliseconds(whole), "", "", "the slowest rank of each repetition", style="bold")
    return table


def _bytes(result: Result) -> FigureTable:
    table = FigureTable("[bold]Bytes of one product[/] (largest rank)", ("axis", "sent", "model", "received"))
    traffic = result.traffic
    columns = traffic.bytes_sent, traffic.bytes_model, traffic.bytes_received
    for axis in traffic.bytes_sent:
        table.add_row(axis, *(f"{column[axis]:,}" for column in columns))
    table.add_row("all", *(f"{sum(column.values()):,}" for column in columns), style="bold")
    return table


def _bound(result: Result) -> str:
    bound, ranks = result.traffic.lower_bound_bytes, result.partition.ranks - result.partition.idle_ranks
    over = f"; this product received {result.traffic.received / bound:.3f} times that" if bound else ""
    return f"Lower bound for any algorithm on {counted(ranks, 'rank')}: {bound:,.0f} bytes{over}"


def _limit(result: Result) -> str:
    speed, limit = result.speed, result.limit
    shape = "x".join(map(str, limit.core_shape))
    return (f"{speed.cores} {speed.unit} x {in_flops(1e9 * limit.core_gflops)} (GEMM {shape} on one {speed.unit[:-1]}; "
            f"{limit.square} cubed: {in_flops(1e9 * limit.square_core_gflops)})")
