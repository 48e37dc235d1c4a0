"""Times of the ways of the collectives, as a picture."""

from __future__ import annotations

from ....errors import needs
from ....model.textbook import BY_NODES, DIRECT, RING, SERVER, STAGES, TOGETHER
from ..plot import titled
from .measure import MPI_BLOCKING, MPI_NONBLOCKING, Found
from .tables import in_words

COLOURS = {DIRECT: "#4477aa", RING: "#66ccee", STAGES: "#228833", BY_NODES: "#ee6677", TOGETHER: "#ccbb44",
           SERVER: "#aa3377", MPI_BLOCKING: "#000000", MPI_NONBLOCKING: "#888888"}


def plot(found: Found, path: str) -> None:
    """A row a group, a column a collective: seconds by bytes, with the least and the most of each."""
    with needs("report", "--plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups, operations = found.groups(), found.operations
    figure, grid = pyplot.subplots(len(groups), len(operations), squeeze=False, layout="constrained", sharex=True,
                                   figsize=(1 + 3.4 * len(operations), 1 + 2.8 * len(groups)))
    drawn = {}
    for group, places in zip(groups, grid):
        for operation, axes in zip(operations, places):
            for way, rows in found.of(operation, group).items():
                sizes, points = list(rows), list(rows.values())
                drawn[way], = axes.plot(sizes, [row.median for row in points], color=COLOURS[way], marker="o",
                                        markersize=3, linewidth=1.2, linestyle="--" if way.startswith("MPI") else "-")
                axes.fill_between(sizes, [min(row.seconds) for row in points], [max(row.seconds) for row in points],
                                  color=COLOURS[way], alpha=0.12, linewidth=0)
            axes.set(xscale="log", yscale="log", title=f"{operation}\n{in_words(group)}")
            axes.title.set_fontsize(9)
    for axes in grid[-1]:
        axes.set_xlabel("bytes of the whole")
    for places in grid:
        places[0].set_ylabel("seconds")
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(titled(f"{found.cpu}, {found.mpi}", inches=figure.get_figwidth()), fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
