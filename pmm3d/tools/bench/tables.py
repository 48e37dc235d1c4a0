"""What the benchmark measured, as tables on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Column, Table

from ...text import MOST_HOSTS, blas_in_words, counted, in_bytes, names_in_words
from ..figure_table import FigureTable
from ..page.bench_page import REST, whole_and_rest
from .result import Result, Speed


def print_result(result: Result, console: Console) -> None:
    """Everything about one product."""
    for part in (_headline, _environment, _product, _phases, _bytes, _bound):
        console.print(part(result))
    _print_advice(result, console)
    if result.partition.ranks == 1:
        console.print("One rank. For more: python -m pmm3d.launcher -n 8 -m pmm3d bench, or srun at a site")


def print_sweep(results: list[Result], console: Console) -> None:
    """Every grid side by side, the fastest first, with what they were measured on."""
    first = results[0]
    console.print(_headline(first))
    console.print(_environment(first))
    console.print(_rows("", {"limit": _limit(first.speed)}))
    table = FigureTable("[bold]Every grid[/]" + " (*: auto chooses it)" * any(one.partition.auto for one in results),
                        ("grid", "median ms", "GFLOP/s", "ratio", "computing ms", "waiting ms", "received",
                         "times bound", "ok"))
    for result in sorted(results, key=lambda result: result.speed.median):
        speed, traffic, idle = result.speed, result.traffic, result.partition.idle_ranks
        bound = f"{traffic.received / traffic.lower_bound_bytes:.2f}" if traffic.lower_bound_bytes else "-"
        name = result.shape + "*" * result.partition.auto + (f" ({idle:,} idle)" if idle else "")
        table.add_row(name, *_milliseconds(speed.median), _short(speed.gflops, 1), f"{speed.ratio:.3f}",
                      *_milliseconds(speed.computed_seconds, speed.waited_seconds), in_bytes(traffic.received), bound,
                      "yes" if result.check.verified else "NO")
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
    return _rows("[bold]Environment[/]", {
        "hosts": names_in_words(hosts, MOST_HOSTS),
        **({"devices": ", ".join(f"{number} x {name}" for name, number in devices)} if devices else {}),
        "CPU": found.cpu,
        "BLAS": blas_in_words(found.blas, found.kernel, found.threads), "MPI": found.mpi})


def _product(result: Result) -> Table:
    partition, speed, memory, check = result.partition, result.speed, result.memory, result.check
    idle = f", {counted(partition.idle_ranks, 'rank')} idle" if partition.idle_ranks else ""
    low, middle, high = (1e3 * figure for figure in (min(speed.seconds), speed.median, max(speed.seconds)))
    at_once = {"at once": f"[bold]{speed.at_once_ratio:.3f}[/] of {speed.at_once_gflops:.1f} GFLOP/s, that GEMM on all "
                          "cores together without a message"} if speed.at_once_gflops else {}
    beside = {} if result.reference is None else {
        "beside": f"[bold]{result.reference.share:.3f}[/] of the rate of {result.reference.name}, "
                  f"{result.reference.gflops:.1f} GFLOP/s, in turns"}
    colour = "green" if check.verified else "red" if check.verification != "not asked for" else "yellow"
    return _rows("[bold]Product[/]", {
        "grid": f"{result.shape} of {counted(partition.ranks, 'rank')}{idle}; {partition.panels} panel(s) along k; "
                f"overlap {partition.overlap}"
                + (f"; {' and '.join(partition.in_place)} read in place" if partition.in_place else ""),
        "blocks": ", ".join(f"{name} {rows} x {cols}" for name, (rows, cols) in partition.blocks.items()),
        "memory a rank": f"{in_bytes(memory.model_memory)} of matrices and work arrays "
                         f"({in_bytes(memory.workspace_bytes)} work); resident {in_bytes(memory.peak_memory)}, grew "
                         f"by {in_bytes(memory.resident_growth)} while measuring",
        "memory a node": f"{in_bytes(memory.node_memory)} resident at the peak, shared pages once",
        "time": f"median {middle:.2f} ms of {len(speed.seconds)} (from {low:.2f} to {high:.2f})",
        "rate": f"{speed.gflops:.1f} GFLOP/s",
        "limit": _limit(speed),
        "ratio": f"[bold]{speed.ratio:.3f}[/] of the limit; {speed.square_ratio:.3f} of {speed.square} cubed on all "
                 f"{speed.unit}",
        **at_once,
        **beside,
        "verified": f"[{colour}]{'yes' if check.verified else 'NO'}[/] ({check.verification})",
    })


def _phases(result: Result) -> FigureTable:
    speed, partition = result.speed, result.partition
    at_work, idle = partition.ranks - partition.idle_ranks, partition.idle_ranks
    whose = f"ms, mean of the repetitions and of {counted(at_work, 'rank')}"
    whose += f", without {idle:,} idle" if idle else ""
    if speed.unit != "cores":
        whose += "; of the host, which asks the devices"
    table = FigureTable(f"[bold]Time of one product[/] ({whose})",
                        ("phase", "all", "computing", "without a core", "waiting", "waiting, worst rank"))
    for name, phase in speed.phases.items():
        table.add_row(name, *_milliseconds(phase["computed"] + phase["waited"], *(
            phase[what] for what in ("computed", "off_core", "waited", "waited_max"))))
    whole, rest = whole_and_rest(result.as_json())
    table.add_row(REST, *_milliseconds(rest), "", "", "", "")
    table.add_row("whole product", *_milliseconds(whole, speed.computed_seconds, speed.off_core_seconds,
                                                  speed.waited_seconds), "", style="bold")
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


def _limit(speed: Speed) -> str:
    core = "x".join(map(str, speed.core_shape))
    return (f"{speed.cores} {speed.unit} x {speed.core_gflops:.1f} GFLOP/s (GEMM {core} on one {speed.unit[:-1]}; "
            f"{speed.square} cubed: {speed.square_core_gflops:.1f})")


def _rows(title: str, rows: dict[str, str]) -> Table:
    table = Table(Column(style="dim"), Column(overflow="fold"), title=title or None, title_justify="left",
                  show_header=False, box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _milliseconds(*seconds: float) -> Iterable[str]:
    return (_short(1e3 * figure, 2) for figure in seconds)


def _short(figure: float, digits: int) -> str:
    """With so many digits after the point; with none where there are enough before it."""
    return f"{figure:.{digits if figure < 1e4 else 0}f}"
