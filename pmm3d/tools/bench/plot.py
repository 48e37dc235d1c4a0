"""Time per phase of each grid, as a picture."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import needs
from .result import Result

COLOURS = {"gather A": "#ee6677", "gather B": "#ccbb44", "reduce C": "#aa3377", "redistribute": "#66ccee"}


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
    for label, color, values in _bars(results):
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


def _bars(results: list[Result]) -> Iterator[tuple[str, str, list[float]]]:
    """(label, colour, ms of each result) of the stacked parts of a product's time."""
    def figures(phase: str, key: str) -> list[float]:
        return [1e3 * result.speed.phases.get(phase, {}).get(key, 0.0) for result in results]

    parts = [("computing: GEMM", "#4477aa", figures("multiply", "computed"))]
    parts += [(f"waiting: {phase}", color, figures(phase, "waited")) for phase, color in COLOURS.items()]
    known = [sum(column) for column in zip(*(values for _, _, values in parts))]
    rest = [max(0.0, 1e3 * result.speed.median - sure) for result, sure in zip(results, known)]
    yield from (part for part in parts if part is parts[0] or any(part[2]))
    yield "copies, sums, agreement", "#bbbbbb", rest
