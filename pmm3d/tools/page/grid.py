"""The process grid as a drawing: a block of boxes, a box a rank, for each replica of the data axis."""

from __future__ import annotations

from markupsafe import Markup

from ...layout import Coords, GridShape
from .svg import drawing, element, markup
from .text import spans

EDGE, DEPTH = 34.0, 15.0
MOST_BOXES, LONGEST = 256, 32
MOST_REPLICAS, FEW_REPLICAS = 8, 3
SCHEMATIC = GridShape(4, 4, 4)
HOST_COLOURS = 8
MOST_HOSTS = 16


def grid_drawing(shape: GridShape, hosts: list[dict]) -> Markup:
    """Boxes in the colours of their hosts; a grid too large for that as one box with its sizes along the edges."""
    tensor, whole, replicas = shape._replace(data=1), drawn_whole(shape), _replicas(shape)
    drawn = tensor if whole else GridShape(*(min(size, limit) for size, limit in zip(tensor, SCHEMATIC)))
    host_of, names = _host_of(hosts), [host["name"] for host in hosts]
    wide = drawn.x * EDGE + drawn.z * DEPTH
    high = drawn.y * EDGE + drawn.z * DEPTH
    svg = drawing(replicas * (wide + 50) + 40, high + 62, f"the grid {shape}", "gridbox")
    for data in range(replicas):
        left = 40 + data * (wide + 50)
        for z in reversed(range(drawn.z)):
            for y in range(drawn.y):
                for x in range(drawn.x):
                    rank = shape.rank(Coords(x, y, z, data)) if whole else None
                    _box(svg, left, Coords(x, y, z, data), drawn, rank, host_of.get(rank), names)
        _edges(svg, left, drawn, shape, wide, high)
        if shape.data > 1:
            element(svg, "text", f"data {data}", class_="tick", x=left + wide / 2, y=high + 52, text_anchor="middle")
    svg.set("style", f"max-width: {replicas * (wide + 50) + 40:.0f}px")
    return markup(svg)


def drawn_whole(shape: GridShape) -> bool:
    """Whether each rank of a replica has its box."""
    tensor = shape._replace(data=1)
    return tensor.size <= MOST_BOXES and max(tensor) <= LONGEST


def _replicas(shape: GridShape) -> int:
    return min(shape.data, MOST_REPLICAS if shape.size <= MOST_BOXES else FEW_REPLICAS)


def told(shape: GridShape) -> str:
    """What the drawing leaves out."""
    parts, replicas = [], _replicas(shape)
    if not drawn_whole(shape):
        parts.append("Too many ranks to draw each: the edges carry the numbers.")
    if shape.data > replicas:
        parts.append(f"{replicas} of {shape.data} replicas are drawn.")
    return " ".join(parts)


def host_legend(hosts: list[dict]) -> list[dict]:
    """Name, ranks and colour of the first hosts."""
    return [{"name": host["name"], "ranks": spans(host["ranks"]), "class": f"host{index % HOST_COLOURS}"}
            for index, host in enumerate(hosts[:MOST_HOSTS])]


def _host_of(hosts: list[dict]) -> dict[int, int]:
    return {rank: index for index, host in enumerate(hosts) for first, last in host["ranks"]
            for rank in range(first, last + 1)}


def _box(svg, left: float, place: GridShape, drawn: GridShape, rank: int | None, host: int | None,
         names: list[str]) -> None:
    """x to the right, y down, z into the page."""
    x0 = left + place.x * EDGE + place.z * DEPTH
    y0 = 8 + (drawn.z - 1 - place.z) * DEPTH + DEPTH + place.y * EDGE
    class_ = "host" if host is None else f"host host{host % HOST_COLOURS}"
    there = "" if host is None else f" on {names[host]}"
    title = None if rank is None else f"rank {rank}{there}: x {place.x}, y {place.y}, z {place.z}, data {place.data}"
    group = element(svg, "g", title=title, class_=class_)
    polygon = lambda kind, *points: element(group, "polygon", class_=kind,
                                            points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))
    if place.y == 0:
        polygon("top", (x0, y0), (x0 + DEPTH, y0 - DEPTH), (x0 + EDGE + DEPTH, y0 - DEPTH), (x0 + EDGE, y0))
    if place.x == drawn.x - 1:
        polygon("side", (x0 + EDGE, y0), (x0 + EDGE + DEPTH, y0 - DEPTH), (x0 + EDGE + DEPTH, y0 + EDGE - DEPTH),
                (x0 + EDGE, y0 + EDGE))
    if place.z == 0:
        polygon("front", (x0, y0), (x0 + EDGE, y0), (x0 + EDGE, y0 + EDGE), (x0, y0 + EDGE))
        if rank is not None:
            element(group, "text", str(rank), class_="rank", x=x0 + EDGE / 2, y=y0 + EDGE / 2 + 4, text_anchor="middle")


def _edges(svg, left: float, drawn: GridShape, shape: GridShape, wide: float, high: float) -> None:
    bottom = 8 + drawn.z * DEPTH + drawn.y * EDGE
    element(svg, "text", f"x: {shape.x}", class_="tick", x=left + drawn.x * EDGE / 2, y=bottom + 16,
            text_anchor="middle")
    element(svg, "text", f"y: {shape.y}", class_="tick", x=left - 6, y=8 + drawn.z * DEPTH + drawn.y * EDGE / 2 + 4,
            text_anchor="end")
    element(svg, "text", f"z: {shape.z}", class_="tick", x=left + drawn.x * EDGE + drawn.z * DEPTH / 2 + 8,
            y=bottom - drawn.z * DEPTH / 2 + 12)
