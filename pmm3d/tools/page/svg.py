"""Drawings as SVG within a page: small, in the page's colours, with a title on what is worth pointing at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from math import ceil, floor, isfinite, log10
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from .words import number, short

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 24, 44
MOST_TICKS, FEWEST_TICKS = 5, 3
MOST_POINTS = 400
"""Of a line: about one a pixel; of more, least and largest of each step are drawn."""
MOST_DOTS = 40
"""Points of a line that each get a dot."""
BARS_WIDTH, BARS_LEFT, BARS_RIGHT, BARS_FOOT, BARS_GAP = 1000, 110.0, 970.0, 30, 3
Point = tuple[float, float]


def element(parent: Element, tag: str, text: str | None = None, *, title: str | None = None,
            **attributes: object) -> Element:
    """A child; attributes may end in _ (class_), and have _ for - (text_anchor)."""
    child = SubElement(parent, tag, {
        name.rstrip("_").replace("_", "-"): f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in attributes.items()})
    child.text = text
    if title:
        SubElement(child, "title").text = title
    return child


def label(parent: Element, text: str, x: float, y: float, anchor: str = "middle") -> None:
    """Small text. anchor: where x is in it: start, middle, end."""
    element(parent, "text", text, class_="tick", x=x, y=y, text_anchor=anchor)


def drawing(width: float, height: float, shows: str, class_: str) -> Element:
    """An empty one. shows: what will be seen, for those who cannot see it."""
    return Element("svg", {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": shows, "class": class_})


def polygon(points: Iterable[Point]) -> str:
    """The points as SVG writes them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def chart(shows: str, series: Mapping[str, Sequence[Point]], unit: str = "", log: bool = False,
          zero: bool = False) -> str:
    """Lines by step, the last one on top. series: name -> (step, value) of each point; at values that are not finite a
    line is broken.

    log    a logarithmic scale, where all values are positive;   zero   the scale begins at 0
    Empty if there is nothing to draw.
    """
    thin = {name: _thinned(points) for name, points in series.items()}
    finite = {name: [point for point in points if isfinite(point[1])] for name, points in thin.items()}
    xs, ys = ([point[axis] for points in finite.values() for point in points] for axis in (0, 1))
    if not xs:
        return ""
    x_of, x_ticks = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, count=6, whole=True)
    y_of, y_ticks = _scale(0.0 if zero else min(ys), max(ys), HEIGHT - BOTTOM, TOP, log=log and min(ys) > 0)
    svg = drawing(WIDTH, HEIGHT, shows, "chart")
    for value in y_ticks:
        y = y_of(value)
        element(svg, "line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
        label(svg, short(value), LEFT - 6, y + 4, "end")
    for value in x_ticks:
        label(svg, short(value), x_of(value), HEIGHT - BOTTOM + 18)
    label(svg, "step", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6)
    label(svg, unit, LEFT, TOP - 10, "start")
    for index, points in enumerate(thin.values()):
        _draw_line(svg, index, [(x_of(x), y_of(y) if isfinite(y) else y) for x, y in points])
    hover = [{"name": name, "points": [[x, number(y), round(x_of(x), 1), round(y_of(y), 1)] for x, y in points]}
             for name, points in finite.items()]
    svg.set("data-hover", json.dumps(hover, separators=(",", ":"), ensure_ascii=False))
    return tostring(svg, "unicode")


def _draw_line(svg: Element, index: int, points: Sequence[Point]) -> None:
    """Pieces between values that are not finite, with dots where there are few points."""
    few = sum(isfinite(y) for _, y in points) <= MOST_DOTS
    for piece in [list(piece) for finite, piece in groupby(points, lambda point: isfinite(point[1])) if finite]:
        for x, y in piece if few or len(piece) == 1 else ():
            element(svg, "circle", class_=f"dot series{index}", cx=x, cy=y, r=2.5)
        element(svg, "polyline", class_=f"line series{index}", points=polygon(piece))


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """The points, or the least and the largest value of each of so many pieces, and what is not finite."""
    if len(points) <= MOST_POINTS:
        return points
    step = ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), step):
        piece = points[start : start + step]
        by_value = sorted((point for point in piece if isfinite(point[1])), key=lambda point: point[1])
        kept += sorted({by_value[0], by_value[-1]}) if by_value else piece[:1]
    return kept


def _scale(low: float, high: float, start: float, stop: float, log: bool = False, count: int = MOST_TICKS,
           whole: bool = False) -> tuple[Callable[[float], float], list[float]]:
    """(from values to coordinates, values of ticks). whole: ticks at whole numbers."""
    if log:
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        ticks = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
        inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        powers = [tick for tick in inside if log10(tick) == round(log10(tick))]
        decade = (stop - start) / (log10(high / low) or 1.0)
        shown = powers if len(inside) > 6 and len(powers) > 1 else inside
        if len(shown) < FEWEST_TICKS:
            shown = _scale(low, high, start, stop)[1]
        apart = ceil(len(shown) / (MOST_TICKS + 1))
        return lambda value: start + log10(value / low) * decade, shown[::apart]
    span = (high - low) or abs(high) or 1.0
    high = max(high, low + span * 1e-9) if high > low else low + span
    raw = (high - low) / count
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * digit for digit in (1, 2, 5, 10) if unit * digit >= raw * 0.999)
    step = max(1.0, step) if whole else step
    ticks = [index * step for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]
    return lambda value: start + (value - low) / (high - low) * (stop - start), ticks


class Part(NamedTuple):
    """A piece of a bar, in the colour of a CSS class."""

    name: str
    class_: str
    length: float


def bars(shows: str, rows: Sequence[tuple[str, Sequence[Part]]], unit: str, in_words: Callable[[float], str],
         mark: tuple[float, str] | None = None) -> str:
    """Stacked horizontal bars. rows: name and parts of each; in_words: of a length; mark: (length, name) of a line
    across all rows."""
    height = 22 if len(rows) <= 16 else 13
    bottom = len(rows) * height
    longest = max([sum(part.length for part in parts) for _, parts in rows] + [mark[0] if mark else 0.0, 1e-12])
    svg = drawing(BARS_WIDTH, bottom + BARS_FOOT, shows, "bars")
    x_of, ticks = _scale(0.0, longest, BARS_LEFT, BARS_RIGHT, count=6)
    for tick in ticks:
        element(svg, "line", class_="grid", x1=x_of(tick), x2=x_of(tick), y1=0, y2=bottom)
        label(svg, f"{number(float(tick))} {unit}", x_of(tick), bottom + 16)
    for index, (name, parts) in enumerate(rows):
        y, before = index * height, 0.0
        label(svg, name, BARS_LEFT - 8, y + height / 2 + 4, "end")
        for part in parts:
            x, before = x_of(before), before + part.length
            element(svg, "rect", title=f"{name}: {part.name} {in_words(part.length)}", class_=part.class_, x=x,
                    y=y + BARS_GAP / 2, width=x_of(before) - x, height=height - BARS_GAP)
    if mark:
        x = x_of(mark[0])
        element(svg, "line", title=f"{mark[1]}: {in_words(mark[0])}", class_="mark", x1=x, x2=x, y1=0, y2=bottom)
    return tostring(svg, "unicode")
