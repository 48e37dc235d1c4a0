"""Drawings of a page, as SVG: curves by step, bars of times, the grid of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from math import ceil, isfinite, prod

from ...layout import GridShape, offsets
from ..plots import INK, LEGEND_COLUMNS, Part, bars, picture, svg_text

LINES = ("#4477aa", "#ee6677", INK)
"""Colours of curves: training, validation, moving average."""
HOSTS = ("#5b9be0", "#e4a35c", "#63b98a", "#c983c0", "#d7c04e", "#7fc4cf", "#e0837a", "#9a94d8")
NO_HOST = "#94a7ba"
MOST_DOTS = 40
"""Largest number of points of a curve that is drawn with dots."""
MOST_BOXES = 256
"""Largest number of ranks of a drawn grid."""
MOST_ROUTERS = 12
"""Largest number of routers of `expert_map` with a name."""
Point = tuple[float, float]
HostRanks = tuple[str, Sequence[Sequence[int]]]
"""Name of a host, and [first, last] of each span of its ranks."""


def curves(series: Mapping[str, Sequence[Point]], unit: str = "", log: bool = False, zero: bool = False) -> str:
    """Draw curves over steps. Return the SVG, or "" if no value is finite. Other values interrupt a curve.

    series   name -> (step, value) of each point
    unit     label of the values
    log      use a logarithmic scale if the values are positive and span more than a decade
    zero     begin the scale at 0
    """
    values = [value for points in series.values() for _, value in points if isfinite(value)]
    if not values:
        return ""
    from matplotlib.ticker import MaxNLocator

    with picture(drawn := BytesIO(), 4.6, 2.5) as figure:
        axes = figure.subplots()
        if log and max(values) > 10 * min(values) > 0:
            axes.set_yscale("log", subs=(2, 5))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}" if max(values) < 1000 * min(values) else "")
        for (name, points), colour in zip(series.items(), LINES):
            axes.plot(*zip(*points), ".-" if len(points) <= MOST_DOTS else "-", label=name, linewidth=1.2, color=colour)
        axes.set(xlabel="step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if zero and min(values) >= 0:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(series) > 1:
            axes.legend()
    return svg_text(drawn)


def expert_map(loads: Sequence[tuple[int, Mapping[str, Sequence[float]]]]) -> str:
    """Draw the tokens of each expert over steps, as colours: a row for each expert, below each other for each router.
    Return the SVG, or "" if no step has tokens. Steps whose routers or experts are not those of the last are left out.

    loads   (step, router -> tokens of each of its experts) of each step
    """
    sizes = {name: len(counts) for name, counts in loads[-1][1].items()} if loads else {}
    alike = [
        (step, [[count * len(counts) / sum(counts) for count in counts] for counts in of_routers.values()])
        for step, of_routers in loads
        if {name: len(counts) for name, counts in of_routers.items()} == sizes and all(map(sum, of_routers.values()))
    ]
    if not alike or not sizes:
        return ""
    rows = list(zip(*([share for shares in routers for share in shares] for _, routers in alike)))
    starts = offsets([*sizes.values()])
    with picture(drawn := BytesIO(), 4.6, min(7.0, 1.2 + 0.12 * max(12, len(rows)))) as figure:
        axes = figure.subplots()
        image = axes.imshow(rows, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
        figure.colorbar(image, ax=axes, label="over the mean")
        shown = range(0, len(alike), max(1, ceil(len(alike) / 5)))
        axes.set_xticks(shown, [f"{alike[index][0]:,}" for index in shown])
        named = range(0, len(sizes), ceil(len(sizes) / MOST_ROUTERS))
        names = [*sizes]
        axes.set_yticks([(starts[index] + starts[index + 1] - 1) / 2 for index in named], [names[i] for i in named])
        for start in starts[1:-1]:
            axes.axhline(start - 0.5, color="white", linewidth=1)
        axes.set_xlabel("step")
    return svg_text(drawn)


def time_bars(rows: Sequence[tuple[str, Sequence[Part]]], colours: Mapping[str, str]) -> str:
    """Draw a bar of seconds for each row (see `plots.bars`). Return the SVG."""
    kinds = {part.kind for _, parts in rows for part in parts if part.kind and part.length > 0}
    legend = ceil(len(kinds) / LEGEND_COLUMNS)
    with picture(drawn := BytesIO(), 10, 0.6 + 0.25 * len(rows) + 0.21 * legend) as figure:
        axes = figure.subplots()
        bars(axes, rows, colours)
        axes.set_xlabel("s")
    return svg_text(drawn)


def replicas_drawn(shape: GridShape) -> int:
    """Return the number of replicas of x, y and z that fit a drawing; 0 if one replica has too many ranks."""
    return min(prod(shape[3:]), MOST_BOXES // prod(shape[:3]))


def grid_map(shape: GridShape, hosts: Sequence[HostRanks]) -> str:
    """Draw the first replicas of a grid: a box for each rank, in the colour of its host. In a block, x runs to the
    right and y downward. Blocks along z are side by side, replicas below each other. "": there are too many ranks."""
    replicas = replicas_drawn(shape)
    if not replicas:
        return ""
    from matplotlib.patches import Patch

    host_of = {
        rank: index
        for index, (_, spans) in enumerate(hosts)
        for first, last in spans
        for rank in range(first, last + 1)
    }
    x, y, z = shape[:3]
    wide, high = z * (x + 1), replicas * (y + 1)
    ranks = range(replicas * x * y * z)
    lefts = [rank % x + rank // (x * y) % z * (x + 1) for rank in ranks]
    tops = [rank // x % y + rank // (x * y * z) * (y + 1) for rank in ranks]
    with picture(drawn := BytesIO(), min(10.0, 1.5 + 0.4 * wide), 0.8 + 0.3 * high) as figure:
        axes = figure.subplots()
        axes.barh(
            tops,
            1,
            1,
            lefts,
            edgecolor="white",
            linewidth=0.8,
            color=[HOSTS[host_of[rank] % len(HOSTS)] if rank in host_of else NO_HOST for rank in ranks],
        )
        for rank, left, top in zip(ranks, lefts, tops):
            axes.text(left + 0.5, top, str(rank), ha="center", va="center", fontsize=8, color="black")
        beyond = [shape.position(replica * x * y * z) for replica in range(replicas)]
        axes.set_yticks(
            [replica * (y + 1) + (y - 1) / 2 for replica in range(replicas)],
            [
                ", ".join(
                    f"{name} {coords[axis]}" for axis, name in enumerate(shape.names) if axis > 2 and shape[axis] > 1
                )
                for coords in beyond
            ],
        )
        axes.set_xticks([block * (x + 1) + x / 2 for block in range(z)], [f"z {block}" for block in range(z)])
        axes.set(xlim=(0, wide - 1), ylim=(high - 1.5, -0.5))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if host_of:
            axes.figure.legend(
                handles=[
                    Patch(color=HOSTS[index % len(HOSTS)], label=name)
                    for index, (name, _) in enumerate(hosts[: 2 * len(HOSTS)])
                ],
                loc="outside lower center",
                ncols=4,
            )
    return svg_text(drawn)
