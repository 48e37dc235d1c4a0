"""The curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import needs
from ..plots import titled
from .scaling import AS_IT_IS, VARIANTS, Curve

STYLES = {AS_IT_IS: ("#4477aa", "-"), "no oar": ("#ee6677", "--"), "no ors": ("#ccbb44", "--"),
          "no oag": ("#228833", "--"), "no buckets": ("#aa3377", "--"), "none": ("#555555", ":")}


def draw(curves: Sequence[Curve], what: str, path: Path) -> None:
    """Efficiency by ranks: a panel for each curve, a line for each choice of overlaps."""
    with needs("report", "--plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(6.5 * len(curves), 4.5), layout="constrained",
                                     squeeze=False)
    for curve, axes in zip(curves, panels[0]):
        for variant in VARIANTS:
            found = [(point.ranks, curve.efficiency(point, variant)) for point in curve.points]
            drawn = [(ranks, 100 * efficiency) for ranks, efficiency in found if efficiency is not None]
            colour, line = STYLES[variant]
            axes.plot(*zip(*drawn) if drawn else ([], []), label=variant, color=colour, linestyle=line, marker="o",
                      markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks([point.ranks for point in curve.points], [f"{point.ranks:,}" for point in curve.points],
                        rotation=45)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel="ranks", ylabel="efficiency, %, beside the first that fits, as configured",
                 title=f"{curve.kind} scaling")
        axes.grid(alpha=0.3)
    panels[0][0].legend(title="overlaps", frameon=False, fontsize=9)
    figure.suptitle(titled(what, inches=figure.get_figwidth()), fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
