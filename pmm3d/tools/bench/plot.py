"""The parts of the time of a product on each grid, as a picture."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from ...text import MOST_HOSTS, blas_in_words, counted, names_in_words
from ..formatting import in_flops
from ..plots import Part, bars, picture, titled
from .result import Result, time_parts

COLOURS = {"GEMM": "#4477aa", "GEMM, no core": "#aaccee", "wait: gather A": "#ee6677", "wait: gather B": "#ccbb44",
           "wait: reduce C": "#aa3377", "wait: redistribute": "#66ccee", "wait: agreement": "#228833"}


def draw(results: list[Result], path: Path) -> None:
    """Draw a bar for each grid, and the time that the limit allows."""
    results = sorted(results, key=lambda result: result.speed.median)
    rows = [(result.shape + " (auto)" * (result.partition.auto and len(results) > 1),
             [Part(part.name, 1e3 * part.seconds) for part in time_parts(result.as_json())]) for result in results]
    case, speed, environment = results[0].case, results[0].speed, results[0].environment
    blas = blas_in_words(environment.blas, environment.kernel, environment.threads)
    hosts = names_in_words(environment.hosts, MOST_HOSTS)
    with picture(path, 9, 2.2 + 0.45 * len(results)) as figure:
        axes = figure.subplots()
        bars(axes, rows, COLOURS)
        axes.axvline(1e3 * speed.median * speed.ratio, color="black", linestyle="--", linewidth=1)
        ends = [sum(part.length for part in parts) for _, parts in rows]
        for index, (result, end) in enumerate(zip(results, ends)):
            axes.annotate(f" {result.speed.ratio:.2f} of the limit", (end, index), va="center", fontsize=9)
        limit = f"the GEMM alone, {speed.cores} {speed.unit} x {in_flops(1e9 * results[0].limit.core_gflops)}"
        axes.set(xlabel="ms (one product; mean of the repetitions and of the ranks that took part)\n"
                        f"dashed: the limit, {limit}", ylabel="grid Gx x Gy x Gz", xlim=(0, 1.2 * max(ends)))
        axes.set_title(titled(f"C = A B, m, n, k = {case.m}, {case.n}, {case.k}, {case.dtype}, "
                              f"{counted(results[0].partition.ranks, 'rank')}",
                              f"{hosts}: {environment.cpu}; {blas}; {date.today().isoformat()}"))
