"""Pictures by matplotlib: style, check of file names, bars, schedules. pyplot is not used, because it keeps figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from ..errors import Pmm3dError, needs
from ..model.rounds import Schedule

INK = "#1c2024"
"""Colour of text and axes. `svg_text` replaces it by the text colour of the page."""
GREY = "#bbbbbb"
COLOURS = {
    "gemm": "#4477aa",
    "elementwise": "#66ccee",
    "x": "#ee6677",
    "y": "#ccbb44",
    "z": "#aa3377",
    "data": "#228833",
    "pipe": "#ddaa77",
    "seq": "#997700",
    "ulysses": "#66aa55",
    "expert": "#ee8866",
    "expert_z": "#cc88aa",
    "expert_data": "#88bb88",
    "all": "#b98aa8",
    "rest": GREY,
}
"""Colours of kinds of work, and of the axes for which ranks wait."""
STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "pmm3d",
    "path.simplify_threshold": 1.0,
}
"""matplotlib's settings. A line of many points is simplified to about one point a pixel, extremes included. With a
hashsalt, equal pictures have equal bytes."""
DPI = 130
LEGEND_COLUMNS = 4
"""Columns of the legend of bars."""
LETTERS_AN_INCH = 10
"""Letters of an inch of a title of 10 points."""


def check_picture(path: Path, option: str) -> None:
    """Raise Pmm3dError if matplotlib cannot write the file type of a picture. Commands call it before their work.

    option   the command's option that names the file, for the error about a missing package
    """
    with needs("report", option):
        from matplotlib.backend_bases import FigureCanvasBase
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        endings = ", ".join(f".{ending}" for ending in sorted(known))
        raise Pmm3dError(f"cannot draw {path}: the name of a picture ends in one of {endings}")


@contextmanager
def picture(path: Path | BytesIO, width: float, height: float) -> Iterator[Any]:
    """As a context: an empty `matplotlib.figure.Figure`, which is written at the end of the context.

    path            the file; its suffix is the file type. A BytesIO gets SVG
    width, height   in inches

        >>> with picture(drawn := BytesIO(), 4, 2) as figure:
        ...     _ = figure.subplots().plot([1, 2], [3, 4])
        >>> svg_text(drawn)[:4]
        '<svg'
    """
    with needs("report", "a picture"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        if isinstance(path, BytesIO):
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(path, format="svg", transparent=True, metadata=nothing)
        else:
            figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)


def svg_text(drawn: BytesIO) -> str:
    """Return a picture as an SVG element for an HTML page, in the page's text colour."""
    text = drawn.getvalue().decode()
    return text[text.index("<svg") :].replace(INK, "currentColor")


class Part(NamedTuple):
    """A part of a bar. kind: label in the legend, and key of the colour; "" is a gap."""

    kind: str
    length: float


def bars(axes: Any, rows: Sequence[tuple[str, Sequence[Part]]], colours: Mapping[str, str]) -> None:
    """Draw stacked horizontal bars, the first row at the top, and a legend of their kinds below the axes.

    rows      (label, parts) of each bar
    colours   kind -> colour, in the order of the legend. A kind without a colour is grey
    """
    from matplotlib.patches import Patch

    for index, (_, parts) in enumerate(rows):
        ends = [0.0, *accumulate(part.length for part in parts)]
        drawn = [(start, part) for start, part in zip(ends, parts) if part.kind and part.length > 0]
        axes.broken_barh(
            [(start, part.length) for start, part in drawn],
            (index - 0.4, 0.8),
            linewidth=0.4,
            edgecolor="white",
            facecolors=[colours.get(part.kind, GREY) for _, part in drawn],
        )
    used = dict.fromkeys(part.kind for _, parts in rows for part in parts if part.kind and part.length > 0)
    kinds = sorted(used, key=lambda kind: list(colours).index(kind) if kind in colours else len(colours))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.figure.legend(
        handles=[Patch(color=colours.get(kind, GREY), label=kind) for kind in kinds],
        loc="outside lower center",
        ncols=LEGEND_COLUMNS,
    )


def draw_schedules(schedules: Sequence[Schedule], path: Path, per_node: int = 0) -> None:
    """Draw the messages of a collective: a column for each round, and a line from the sender to the receiver.

    schedules   those of all ranks, such as `pmm3d.model.schedule.all_gather` returns. A line is wider for a larger
                message; a message without rows is dotted. A dot is a sum
    per_node    ranks of each node, between which lines are drawn; 0: no such lines
    """
    rounds = max(len(table.rounds) for table in schedules)
    largest = max((span.rows for table in schedules for each in table.rounds for _, span in each.sends), default=0) or 1
    with picture(path, 1.2 + 1.7 * rounds, 1 + 0.35 * len(schedules)) as figure:
        axes = figure.subplots()
        for rank, table in enumerate(schedules):
            axes.axhline(rank, color=GREY, linewidth=0.5, zorder=0)
            for number, each in enumerate(table.rounds):
                for peer, span in each.sends:
                    width = 0.5 + 2 * span.rows / largest
                    style = "-|>" if span.rows else "->"
                    look = {"linewidth": width, "color": COLOURS["gemm"], "linestyle": "-" if span.rows else ":"}
                    axes.annotate(
                        "", (number + 0.85, peer), (number + 0.1, rank), arrowprops={"arrowstyle": style, **look}
                    )
                if any(len(total.parts) > 1 for total in each.sums):
                    axes.plot(number + 0.92, rank, "o", markersize=5, color=COLOURS["x"])
        for rank in range(per_node, len(schedules), per_node) if per_node else ():
            axes.axhline(rank - 0.5, color=INK, linewidth=1)
        axes.set_xticks([number + 0.5 for number in range(rounds)], [f"round {number + 1}" for number in range(rounds)])
        axes.set_yticks(range(len(schedules)), [f"rank {rank}" for rank in range(len(schedules))])
        axes.set(xlim=(0, rounds), ylim=(len(schedules) - 0.5, -0.5))


def titled(*lines: str, inches: float = 9.0) -> str:
    """Break the lines of a title of 10 points to fit a picture of this width."""
    return "\n".join(fill(line, int(LETTERS_AN_INCH * inches)) for line in lines)
