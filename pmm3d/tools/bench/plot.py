"""Time per phase of each grid, as a picture."""

from __future__ import annotations

from pathlib import Path

from ...errors import Pmm3dError, needs
from ..page.bench_page import product_parts
from .result import Result

COLOURS = {"computing: GEMM": "#4477aa", "waiting: gather A": "#ee6677", "waiting: gather B": "#ccbb44",
           "waiting: reduce C": "#aa3377", "waiting: redistribute": "#66ccee", "waiting: agreement": "#228833",
           "copies, sums, the rest": "#bbbbbb"}


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
    names = [result.shape for result in results]
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.45 * len(results)), layout="constrained")
    ends = [0.0] * len(results)
    lengths = [{part.name: part.length for part in product_parts(result.as_json())} for result in results]
    for label, color in COLOURS.items():
        if any(values := [parts.get(label, 0.0) for parts in lengths]):
            axes.barh(names, values, left=ends, label=label, color=color, height=0.7)
            ends = [end + value for end, value in zip(ends, values)]
    case, speed = results[0].case, results[0].speed
    axes.axvline(1e3 * speed.median * speed.ratio, color="black", linestyle="--", linewidth=1,
                 label="limit: the GEMM alone")
    for name, result in zip(names, results):
        axes.annotate(f" {result.speed.ratio:.2f}", (1e3 * result.speed.median, name), va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="ms (mean over the ranks, one product)", ylabel="grid Gx x Gy x Gz",
             title=f"C = A B, m, n, k = {case.m}, {case.n}, {case.k}, {case.dtype}, {results[0].partition.ranks} ranks")
    axes.margins(x=0.08)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
