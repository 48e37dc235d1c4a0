"""The process grid as a drawing: a cuboid of boxes, a box a rank, for each replica along data and the axes beyond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any
from xml.etree.ElementTree import Element, tostring

from ...layout import Coords, GridShape
from ...text import ranks_in_words
from .elements import Figure, Section
from .svg import drawing, element, label, polygon

EDGE, DEPTH = 34.0, 15.0
LEFT, TOP, BETWEEN, FOOT = 40.0, 8.0, 50.0, 54.0
MOST_BOXES, LONGEST = 256, 32
MOST_REPLICAS, FEW_REPLICAS = 8, 3
SCHEMATIC = 4
"""Boxes along each axis of a grid that is too large for a box a rank."""
HOST_COLOURS = 8
MOST_HOSTS = 16
"""Hosts in the legend; a colour serves every eighth."""
Host = Mapping[str, Any]
"""As run.json has it: name, cores, and ranks as [first, last] of each span."""


def ranks_of(host: Host) -> list[int]:
    return [rank for first, last in host["ranks"] for rank in range(first, last + 1)]


def grid_drawing(shape: GridShape, hosts: Sequence[Host]) -> str:
    """SVG: boxes in the colours of their hosts; a grid too large for that as one cuboid with sizes along the edges."""
    whole, replicas = _is_drawn_whole(shape), _replicas(shape)
    drawn = GridShape(*shape[:3] if whole else (min(size, SCHEMATIC) for size in shape[:3]))
    host_of = {rank: index for index, host in enumerate(hosts) for rank in ranks_of(host)}
    wide, high = drawn.x * EDGE + drawn.z * DEPTH, drawn.y * EDGE + drawn.z * DEPTH
    width = replicas * (wide + BETWEEN) + LEFT
    svg = drawing(width, TOP + high + FOOT, f"the grid {shape}", "gridbox")
    for number in range(replicas):
        left, first = LEFT + number * (wide + BETWEEN), shape.position(number * shape.along("xyz"))
        for z in reversed(range(drawn.z)):
            for x, y in ((x, y) for y in range(drawn.y) for x in range(drawn.x)):
                coords = first._replace(x=x, y=y, z=z)
                rank = shape.rank(coords) if whole else None
                host = None if rank is None else host_of.get(rank)
                where = "" if host is None else f" on {hosts[host]['name']}"
                title = None if rank is None else f"rank {rank}{where}: {_in_words(coords._asdict())}"
                class_ = "host" if host is None else f"host host{host % HOST_COLOURS}"
                _draw_box(element(svg, "g", title=title, class_=class_), left, coords, drawn, rank)
        label(svg, f"x: {shape.x}", left + drawn.x * EDGE / 2, TOP + high + 16)
        label(svg, f"y: {shape.y}", left - 6, TOP + drawn.z * DEPTH + drawn.y * EDGE / 2 + 4, "end")
        label(svg, f"z: {shape.z}", left + wide - drawn.z * DEPTH / 2 + 8, TOP + high - drawn.z * DEPTH / 2 + 12,
              "start")
        beyond = {name: index for name, index, size in list(zip(shape.names, first, shape))[3:] if size > 1}
        if beyond:
            label(svg, _in_words(beyond), left + wide / 2, TOP + high + 44)
    svg.set("style", f"max-width: {width:.0f}px")
    return tostring(svg, "unicode")


def _in_words(indices: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {index}" for name, index in indices.items())


def _draw_box(group: Element, left: float, coords: Coords, drawn: GridShape, rank: int | None) -> None:
    """What is seen of a box: x to the right, y down, z into the page."""
    x0, x1 = (left + (coords.x + side) * EDGE + coords.z * DEPTH for side in (0, 1))
    y0, y1 = (TOP + (drawn.z - coords.z) * DEPTH + (coords.y + side) * EDGE for side in (0, 1))
    faces = {
        "top": (coords.y == 0, ((x0, y0), (x0 + DEPTH, y0 - DEPTH), (x1 + DEPTH, y0 - DEPTH), (x1, y0))),
        "side": (coords.x == drawn.x - 1, ((x1, y0), (x1 + DEPTH, y0 - DEPTH), (x1 + DEPTH, y1 - DEPTH), (x1, y1))),
        "front": (coords.z == 0, ((x0, y0), (x1, y0), (x1, y1), (x0, y1))),
    }
    for class_, (is_seen, corners) in faces.items():
        if is_seen:
            element(group, "polygon", class_=class_, points=polygon(corners))
    if rank is not None and coords.z == 0:
        element(group, "text", str(rank), class_="rank", x=(x0 + x1) / 2, y=(y0 + y1) / 2 + 4, text_anchor="middle")


def _is_drawn_whole(shape: GridShape) -> bool:
    """Whether each rank of a replica has its box."""
    return shape.along("xyz") <= MOST_BOXES and max(shape[:3]) <= LONGEST


def _replicas(shape: GridShape) -> int:
    return min(prod(shape[3:]), MOST_REPLICAS if shape.size <= MOST_BOXES else FEW_REPLICAS)


def grid_section(shape: GridShape, hosts: Sequence[Host], lead: str) -> Section:
    """The drawing, the colours of the first hosts, and in words what is not drawn."""
    whole, replicas = _is_drawn_whole(shape), _replicas(shape)
    lead += "" if whole else " Too many ranks to draw each: the edges carry the numbers."
    lead += f" {replicas} of {prod(shape[3:])} replicas are drawn." * (prod(shape[3:]) > replicas)
    legend = [(f"host{index % HOST_COLOURS}", f"{host['name']}: {ranks_in_words(ranks_of(host))}")
              for index, host in enumerate(hosts[:MOST_HOSTS] if whole else [])]
    return Section("Grid", lead, [Figure(grid_drawing(shape, hosts), legend)])
