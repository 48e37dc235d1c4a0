"""Time per phase of each grid, as a picture."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from textwrap import fill

from ...errors import Pmm3dError, needs
from ...text import MOST_HOSTS, blas_in_words, counted, names_in_words
from ..page.bench_page import REST, product_parts
from .result import Result

COLOURS = {"computing: GEMM": "#4477aa", "waiting: gather A": "#ee6677", "waiting: gather B": "#ccbb44",
           "waiting: reduce C": "#aa3377", "waiting: redistribute": "#66ccee", "waiting: agreement": "#228833",
           REST: "#bbbbbb"}
LETTERS_AN_INCH = 10
"""Of a title of 10 points."""


def check_picture(path: Path) -> None:
    """Raises Pmm3dError unless the name ends as that of a picture does."""
    with needs("report", "--plot"):
        from matplotlib.backend_bases import FigureCanvasBase
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        endings = ", ".join(f".{ending}" for ending in sorted(known))
        raise Pmm3dError(f"cannot draw {path}: the name of a picture ends in one of {endings}")


def plot(results: list[Result], path: str) -> None:
    """A bar per grid, with the time that the limit allows."""
    with needs("report", "--plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = sorted(results, key=lambda result: result.speed.median)
    names = [result.shape + " (auto)" * (result.partition.auto and len(results) > 1) for result in results]
    figure, axes = pyplot.subplots(figsize=(9, 2.2 + 0.45 * len(results)), layout="constrained")
    ends = [0.0] * len(results)
    lengths = [{part.kind: part.length for part in product_parts(result.as_json())} for result in results]
    for label, color in COLOURS.items():
        if any(values := [parts.get(label, 0.0) for parts in lengths]):
            axes.barh(names, values, left=ends, label=label, color=color, height=0.7)
            ends = [end + value for end, value in zip(ends, values)]
    case, speed, environment = results[0].case, results[0].speed, results[0].environment
    axes.axvline(1e3 * speed.median * speed.ratio, color="black", linestyle="--", linewidth=1,
                 label=f"limit: the GEMM alone, {speed.cores} {speed.unit} x {speed.core_gflops:.1f} GFLOP/s")
    for name, result, end in zip(names, results, ends):
        axes.annotate(f" {result.speed.ratio:.2f} of the limit", (end, name), va="center", fontsize=9)
    axes.invert_yaxis()
    blas = blas_in_words(environment.blas, environment.kernel, environment.threads)
    hosts = names_in_words(environment.hosts, MOST_HOSTS)
    axes.set(xlabel="ms (one product; mean of the repetitions and of the ranks that took part)",
             ylabel="grid Gx x Gy x Gz")
    axes.set_title(titled(f"C = A B, m, n, k = {case.m}, {case.n}, {case.k}, {case.dtype}, "
                          f"{counted(results[0].partition.ranks, 'rank')}",
                          f"{hosts}: {environment.cpu}; {blas}; {date.today().isoformat()}"), fontsize=10)
    axes.margins(x=0.18)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def titled(*lines: str, inches: float = 9.0) -> str:
    """A title of 10 points, in lines that a picture of that width holds."""
    return "\n".join(fill(line, int(LETTERS_AN_INCH * inches)) for line in lines)
