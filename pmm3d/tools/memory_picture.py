"""Pictures of the memory of a step over time, by kind of array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..text import BYTE_UNITS, in_bytes
from .plots import GREY, INK, LEGEND_COLUMNS, picture, titled

COLOURS = {
    "weights": "#4477aa",
    "experts": "#88aadd",
    "gradients": "#228833",
    "state": "#ccbb44",
    "gathered weights": "#66ccee",
    "activations": "#ee6677",
    "work": "#aa3377",
    "messages": "#ddaa77",
}
"""Colours of kinds of arrays."""


def draw_memory(
    path: Path | BytesIO, panels: Mapping[str, Mapping[str, Any]], title: str, limit: int | None = None
) -> None:
    """Draw panels below each other, with the same scale of bytes: stacked areas by kind, the peak, and the limit.
    Times of several panels are shares of the step.

    panels   label -> `MemoryTrace.document`;   limit   of the bytes of a rank, or None
    """
    from matplotlib.patches import Patch

    most = max(each["peak"] for each in panels.values())
    name = in_bytes(most).split()[1]
    scale = 1024 ** BYTE_UNITS.index(name)
    with picture(path, 9, 1.0 + 2.6 * len(panels)) as figure:
        every = figure.subplots(len(panels), squeeze=False)[:, 0]
        kinds = dict[str, None]()
        for axes, (label, document) in zip(every, panels.items()):
            kinds |= dict.fromkeys(document["held"])
            times, unit = document["at"], document["unit"]
            if len(panels) > 1:
                times, unit = [at / (times[-1] or 1) for at in times], f"share of the step's {unit.split()[0]}"
            _stacked(axes, times, document["held"], scale)
            axes.axhline(document["peak"] / scale, color=INK, linewidth=0.8, linestyle=":")
            axes.annotate(
                f"{label}: peak {in_bytes(document['peak'])}",
                (0.01, document["peak"] / scale),
                xycoords=("axes fraction", "data"),
                va="bottom",
                fontsize=8,
            )
            shown = limit is not None and limit < 2 * most
            if limit is not None and shown:
                axes.axhline(limit / scale, color=COLOURS["activations"], linewidth=1)
                axes.annotate(
                    "limit", (0.99, limit / scale), xycoords=("axes fraction", "data"), ha="right", va="bottom"
                )
            axes.set(
                xlabel=unit,
                ylabel=name,
                ylim=(0, 1.15 * max(most, limit if limit is not None and shown else 0) / scale),
            )
        every[0].set_title(titled(title))
        figure.legend(
            handles=[Patch(color=COLOURS.get(kind, GREY), label=kind) for kind in kinds],
            loc="outside lower center",
            ncols=LEGEND_COLUMNS,
        )


def _stacked(axes: Any, times: Sequence[float], held: Mapping[str, Sequence[int]], scale: float) -> None:
    tops = accumulate(held.values(), lambda low, values: [below + value for below, value in zip(low, values)])
    for kind, top in reversed([*zip(held, tops)]):
        axes.stairs([each / scale for each in top], [*times, times[-1]], fill=True, color=COLOURS.get(kind, GREY))
    axes.set_xlim(min(times, default=0.0), max(times, default=1.0) or 1.0)
