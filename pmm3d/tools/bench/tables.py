"""Results of the benchmark for people: tables on a terminal, a picture, JSON."""

from __future__ import annotations

import json
from statistics import median

from rich.console import Console
from rich.table import Table

from ...comm.words import in_bytes
from .measure import Result


def print_result(result: Result, console: Console) -> None:
    """Everything about one product."""
    console.print(_headline(result))
    console.print(_environment(result))
    console.print(_product(result))
    console.print(_phases(result))
    console.print(_bytes(result))
    console.print(_bound(result))
    if result.environment["advice"]:
        console.print(f"[yellow]{result.environment['advice']}[/]")
    if result.ranks == 1:
        console.print("One rank. For more: python -m pmm3d.launcher -n 8 -m pmm3d bench, or srun at a site")


def _headline(result: Result) -> str:
    kind = f"{result.dtype}, {result.array}" + ("" if result.transpose == "nn" else f", stored {result.transpose}")
    return f"\n[bold]C = A B[/]  m, n, k = {result.m}, {result.n}, {result.k}  ({kind})"


def _rows(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def _environment(result: Result) -> Table:
    found = result.environment
    table = _rows("[bold]Environment[/]")
    hosts = ", ".join(f"{host} ({ranks} ranks on {cores} cores)" for host, ranks, cores in
                      zip(found["hosts"][:8], found["ranks_per_host"], found["cores_per_host"]))
    more = len(found["hosts"]) - 8
    table.add_row("hosts", hosts + (f" and {more} more" if more > 0 else ""))
    table.add_row("CPU", found["cpu"])
    table.add_row("BLAS", f"{found['blas']}, kernel {found['kernel']}, {found['threads']} thread(s) a rank")
    table.add_row("MPI", found["mpi"])
    return table


def _product(result: Result) -> Table:
    table = _rows("[bold]Product[/]")
    idle = f", {result.idle_ranks} ranks idle" if result.idle_ranks else ""
    table.add_row("grid", f"{'x'.join(map(str, result.grid))} of {result.ranks} ranks{idle}; "
                          f"{result.steps} step(s) along k, {result.panels} panel(s) of C")
    table.add_row("blocks", ", ".join(f"{name} {rows} x {cols}" for name, (rows, cols) in result.blocks.items()))
    table.add_row("memory a rank", f"{in_bytes(result.model_memory)} of matrices and work arrays "
                                   f"({in_bytes(result.workspace_bytes)} work); resident "
                                   f"{in_bytes(result.peak_memory)}, grew by {in_bytes(result.resident_growth)} "
                                   "while measuring")
    low, middle, high = min(result.seconds), median(result.seconds), max(result.seconds)
    table.add_row("time", f"median {1e3 * middle:.2f} ms of {len(result.seconds)} "
                          f"(from {1e3 * low:.2f} to {1e3 * high:.2f})")
    table.add_row("rate", f"{result.gflops:.1f} GFLOP/s")
    shape = "x".join(map(str, result.core_shape))
    table.add_row("limit", f"{result.cores} cores x {result.core_gflops:.1f} GFLOP/s (GEMM {shape} on one core; "
                           f"2048 cubed: {result.square_core_gflops:.1f})")
    table.add_row("ratio", f"[bold]{result.ratio:.3f}[/] of the limit")
    colour = "green" if result.verified else "red" if result.verification != "not asked for" else "yellow"
    table.add_row("verified", f"[{colour}]{'yes' if result.verified else 'NO'}[/] ({result.verification})")
    return table


def _phases(result: Result) -> Table:
    table = Table(title="[bold]Time of one product[/] (ms, mean over the ranks)", title_justify="left")
    for column in ("phase", "computing", "waiting", "waiting, worst rank"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name, phase in result.phases.items():
        table.add_row(name, *(f"{1e3 * phase[key]:.2f}" for key in ("computed", "waited", "waited_max")))
    table.add_row("all", f"{1e3 * result.computed_seconds:.2f}", f"{1e3 * result.waited_seconds:.2f}", "", style="bold")
    return table


def _bytes(result: Result) -> Table:
    table = Table(title="[bold]Bytes of one product[/] (largest rank)", title_justify="left")
    for column in ("axis", "sent", "model", "received"):
        table.add_column(column, justify="left" if column == "axis" else "right")
    for axis in "xyz":
        table.add_row(axis, *(f"{figures[axis]:,}" for figures in
                              (result.bytes_sent, result.bytes_model, result.bytes_received)))
    totals = [sum(figures.values()) for figures in (result.bytes_sent, result.bytes_model, result.bytes_received)]
    table.add_row("all", *(f"{total:,}" for total in totals), style="bold")
    return table


def _bound(result: Result) -> str:
    bound, received = result.lower_bound_bytes, sum(result.bytes_received.values())
    over = f"; this product received {received / bound:.3f} times that" if bound else ""
    return f"Lower bound for any algorithm on {result.ranks - result.idle_ranks} ranks: {bound:,.0f} bytes{over}"


def print_sweep(results: list[Result], console: Console) -> None:
    """Every grid side by side, the fastest first."""
    table = Table(title="[bold]Every grid[/]", title_justify="left")
    for column in ("grid", "median ms", "GFLOP/s", "ratio", "computing ms", "waiting ms", "received", "x bound", "ok"):
        table.add_column(column, justify="left" if column == "grid" else "right")
    for result in sorted(results, key=lambda result: median(result.seconds)):
        received, bound = sum(result.bytes_received.values()), result.lower_bound_bytes
        table.add_row(
            "x".join(map(str, result.grid)), f"{1e3 * median(result.seconds):.2f}", f"{result.gflops:.1f}",
            f"{result.ratio:.3f}", f"{1e3 * result.computed_seconds:.2f}", f"{1e3 * result.waited_seconds:.2f}",
            in_bytes(received), f"{received / bound:.2f}" if bound else "-", "yes" if result.verified else "NO",
        )
    console.print(table)


def write_json(results: list[Result], path: str) -> None:
    """One object, or a list of them for a sweep."""
    found = [result.as_json() for result in results]
    with open(path, "w") as file:
        json.dump(found[0] if len(found) == 1 else found, file, indent=1)


def plot(results: list[Result], path: str) -> None:
    """Time per phase, a bar per grid, with the time that the limit allows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = sorted(results, key=lambda result: median(result.seconds))
    names = ["x".join(map(str, result.grid)) for result in results]
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.45 * len(results)), layout="constrained")
    ends = [0.0] * len(results)
    for label, color, values in _bars(results):
        axes.barh(names, values, left=ends, label=label, color=color, height=0.7)
        ends = [end + value for end, value in zip(ends, values)]
    first = results[0]
    limit = 1e3 * median(first.seconds) * first.ratio
    axes.axvline(limit, color="black", linestyle="--", linewidth=1, label="limit: the GEMM alone")
    for name, result in zip(names, results):
        axes.annotate(f" {result.ratio:.2f}", (1e3 * median(result.seconds), name), va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="ms (mean over the ranks, one product)", ylabel="grid Gx x Gy x Gz",
             title=f"C = A B, m, n, k = {first.m}, {first.n}, {first.k}, {first.dtype}, {first.ranks} ranks")
    axes.margins(x=0.08)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(results: list[Result]):
    """(label, colour, ms of each result) of the stacked parts of a product's time."""
    def figure(phase, key):
        return [1e3 * result.phases.get(phase, {}).get(key, 0.0) for result in results]

    parts = [("computing: GEMM", "#4477aa", figure("multiply", "computed"))]
    for phase, color in (("gather A", "#ee6677"), ("gather B", "#ccbb44"), ("reduce C", "#aa3377"),
                         ("redistribute", "#66ccee")):
        values = figure(phase, "waited")
        if any(values):
            parts.append((f"waiting: {phase}", color, values))
    known = [sum(column) for column in zip(*(values for _, _, values in parts))]
    rest = [max(0.0, 1e3 * median(result.seconds) - sure) for result, sure in zip(results, known)]
    return [*parts, ("copies, sums, agreement", "#bbbbbb", rest)]
