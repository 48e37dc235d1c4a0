"""Where the time of each grid goes, as a picture."""

from __future__ import annotations

from pathlib import Path

from ...errors import needs
from ...model.candidates import Ranking
from ..plots import titled
from .shown import TERMS, Shown, names

COLOURS = {"gemm": "#4477aa", "passes": "#66ccee", "overhead": "#bbbbbb", "x": "#ee6677", "y": "#ccbb44",
           "z": "#aa3377", "data": "#228833", "pipe": "#ddaa77", "all": "#000000"}


def plot(ranking: Ranking, shown: Shown, machine: str, path: Path) -> None:
    """A bar a grid, the best above, presets below; its parts are the terms."""
    with needs("report", "--plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [f"{candidate} {candidate.preset}".rstrip() for candidate in shown.all]
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.4 * len(bars)), layout="constrained")
    ends = [0.0] * len(bars)
    for term in names((candidate.terms for candidate in shown.all), TERMS):
        values = [candidate.terms.get(term, 0.0) for candidate in shown.all]
        if any(values):
            label = f"{term}: collectives" if term in TERMS[3:] else term
            axes.barh(bars, values, left=ends, label=label, color=COLOURS.get(term, "#888888"), height=0.7)
            ends = [end + value for end, value in zip(ends, values)]
    if shown.best and shown.presets:
        axes.axhline(len(shown.best) - 0.5, color="black", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(titled(ranking.what, f"on {ranking.ranks:,} ranks of {machine}"), fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
