"""Pictures of a run: curves.png, and the loss as a line of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import isfinite, log
from pathlib import Path

from ...errors import needs
from ...io.disk import replace_file
from .metrics import read_metrics

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"


def curve(values: Sequence[float], width: int = 48, encoding: str | None = "utf-8") -> str:
    """A line of blocks, as high as the logarithms of positive numbers; of other signs where the encoding has none.

        >>> curve([4, 2, 1], encoding="ascii")
        '#=_'
    """
    blocks = BLOCKS if _encodable(BLOCKS, encoding) else ASCII
    chosen = [values[index * len(values) // width] for index in range(width)] if len(values) > width else values
    heights = [log(value) for value in chosen if value > 0 and isfinite(value)]
    if not heights:
        return ""
    low, span = min(heights), max(heights) - min(heights) or 1.0
    return "".join(blocks[round((height - low) / span * (len(blocks) - 1))] for height in heights)


def _encodable(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plot(metrics: Path, picture: Path) -> None:
    """Draw the loss, and what was validated, by step."""
    with needs("report", "curves.png"):
        from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    validated = [line for line in lines if "validation" in line]
    scores = [name for name in (validated[-1]["validation"] if validated else {}) if name != "loss"]
    figure = Figure(figsize=(5 + 4 * bool(scores), 3.6))
    left, *right = figure.subplots(1, 1 + bool(scores), squeeze=False)[0]
    steps = [line for line in lines if "loss" in line]
    left.plot([line["step"] for line in steps], [line["loss"] for line in steps], label="training", linewidth=0.8)
    for axes, name in zip([left, *right * len(scores)], ["loss", *scores] if validated else []):
        points = [line["step"] for line in validated], [line["validation"].get(name) for line in validated]
        axes.plot(*points, "o-", label="validation", markersize=3)
        axes.set(xlabel="step", ylabel=f"validation {name}")
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    figure.tight_layout()
    drawn = BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    replace_file(picture, drawn.getvalue())
