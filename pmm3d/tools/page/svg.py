"""Drawings as SVG within a page: small, in the page's colours, with a title on what is worth pointing at."""

from __future__ import annotations

import json
from math import ceil, floor, isfinite, log10
from xml.etree import ElementTree

from markupsafe import Markup

from .text import number

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 34
MOST_POINTS = 400


def element(parent, tag: str, text: str | None = None, *, title: str | None = None, **attributes):
    """A child; attributes may end in _ (class_), and have _ for - (text_anchor)."""
    found = ElementTree.SubElement(parent, tag, {
        name.rstrip("_").replace("_", "-"): f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in attributes.items()})
    found.text = text
    if title:
        ElementTree.SubElement(found, "title").text = title
    return found


def drawing(width: float, height: float, label: str, class_: str):
    """An empty one. label: what it shows, for those who cannot see it."""
    return ElementTree.Element("svg", {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": label,
                                       "class": class_})


def markup(svg) -> Markup:
    return Markup(ElementTree.tostring(svg, encoding="unicode"))


def chart(label: str, series: dict, unit: str = "", log: bool = False, zero: bool = False) -> Markup | None:
    """Lines by step. series: name -> (steps, values); values that are not finite are left out, and counted.

    log    a logarithmic scale, where all values are positive;   zero   the scale begins at 0
    None if there is nothing to draw.
    """
    thin = {name: _thinned(*points) for name, points in series.items()}
    finite = {name: [(x, y) for x, y in points if isfinite(y)] for name, points in thin.items()}
    xs = [x for points in finite.values() for x, _ in points]
    ys = [y for points in finite.values() for _, y in points]
    if not xs:
        return None
    log = log and min(ys) > 0
    x_of, x_ticks = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, count=6, whole=True)
    y_of, y_ticks = _scale(0.0 if zero else min(ys), max(ys), HEIGHT - BOTTOM, TOP, log=log)
    svg = drawing(WIDTH, HEIGHT, label, "chart")
    for value in y_ticks:
        y = y_of(value)
        element(svg, "line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
        element(svg, "text", number(value), class_="tick", x=LEFT - 6, y=y + 4, text_anchor="end")
    for value in x_ticks:
        element(svg, "text", number(int(value)), class_="tick", x=x_of(value), y=HEIGHT - 16, text_anchor="middle")
    element(svg, "text", "step", class_="tick", x=WIDTH - RIGHT, y=HEIGHT - 2, text_anchor="end")
    element(svg, "text", unit, class_="tick", x=LEFT, y=HEIGHT - 2)
    hover = []
    for index, (name, points) in enumerate(thin.items()):
        for run in _runs(points):
            place = [(x_of(x), y_of(y)) for x, y in run]
            if len(run) == 1 or len(finite[name]) <= 40:
                for x, y in place:
                    element(svg, "circle", class_=f"dot series{index}", cx=x, cy=y, r=2.5)
            element(svg, "polyline", class_=f"line series{index}",
                    points=" ".join(f"{x:.1f},{y:.1f}" for x, y in place))
        hover.append({"name": name, "points": [[x, number(y), round(x_of(x), 1), round(y_of(y), 1)]
                                               for x, y in finite[name]]})
    svg.set("data-hover", json.dumps(hover, separators=(",", ":"), ensure_ascii=False))
    return markup(svg)


def _thinned(xs, ys) -> list[tuple[float, float]]:
    """The points, or the least and the largest value of each of so many pieces, and what is not finite."""
    points = list(zip(xs, ys))
    if len(points) <= MOST_POINTS:
        return points
    step, found = ceil(2 * len(points) / MOST_POINTS), []
    for start in range(0, len(points), step):
        piece = points[start : start + step]
        finite = [point for point in piece if isfinite(point[1])]
        chosen = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])} if finite else set()
        found += sorted(chosen) if finite else [piece[0]]
    return found


def _runs(points) -> list[list]:
    """Pieces of a line between values that are not finite."""
    runs, run = [], []
    for x, y in points:
        if isfinite(y):
            run.append((x, y))
        elif run:
            runs, run = [*runs, run], []
    return runs + [run] * bool(run)


def _scale(low: float, high: float, start: float, stop: float, log: bool = False, count: int = 5, whole: bool = False):
    """(function from values to places, values of ticks)."""
    if log:
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        ticks = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
        inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        powers = [tick for tick in inside if log10(tick) == round(log10(tick))]
        bottom, span = log10(low), (log10(high) - log10(low)) or 1.0
        place = lambda value: start + (log10(value) - bottom) / span * (stop - start)
        return place, (powers if len(inside) > 6 and len(powers) > 1 else inside) or [low, high]
    span = (high - low) or abs(high) or 1.0
    high = max(high, low + span * 1e-9) if high > low else low + span
    raw = (high - low) / count
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * digit for digit in (1, 2, 5, 10) if unit * digit >= raw * 0.999)
    step = max(1.0, step) if whole else step
    ticks = [index * step for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]
    return (lambda value: start + (value - low) / (high - low) * (stop - start)), ticks


def bars(label: str, rows: list[tuple[str, list[tuple[str, str, float, str]]]], unit: str, mark=None) -> Markup:
    """Stacked horizontal bars. rows: (name, [(kind, CSS class, length, what to say of it)]).

    mark   (length, text) of a line across all rows
    """
    height, left, gap = (22 if len(rows) <= 16 else 13), 110, 3
    longest = max([sum(part[2] for part in parts) for _, parts in rows] + [mark[0] if mark else 0.0, 1e-12])
    width, bottom = 1000, 30
    svg = drawing(width, len(rows) * height + bottom, label, "bars")
    to_x, ticks = _scale(0.0, longest, left, width - 30.0, count=6)
    for tick in ticks:
        element(svg, "line", class_="grid", x1=to_x(tick), x2=to_x(tick), y1=0, y2=len(rows) * height)
        element(svg, "text", f"{number(float(tick))} {unit}", class_="tick", x=to_x(tick), y=len(rows) * height + 16,
                text_anchor="middle")
    for index, (name, parts) in enumerate(rows):
        y, x = index * height, float(left)
        element(svg, "text", name, class_="tick", x=left - 8, y=y + height / 2 + 4, text_anchor="end")
        for kind, class_, length, said in parts:
            stop = x + length / longest * (width - 30.0 - left)
            element(svg, "rect", title=f"{name}: {kind} {said}", class_=class_, x=x, y=y + gap / 2,
                    width=max(0.0, stop - x), height=height - gap)
            x = stop
    if mark:
        element(svg, "line", title=mark[1], class_="mark", x1=to_x(mark[0]), x2=to_x(mark[0]), y1=0,
                y2=len(rows) * height)
    return markup(svg)
