"""The time line of a pipeline's ranks: as lines of text, and as a picture."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from ...errors import needs
from ...nn.pipeline import PipelineAction, PipelineSchedule, TimeLine

COLOURS = {"F": "#77aadd", "B": "#66bb77", "I": "#66ccee", "W": "#ddcc66", "OVERLAP_F_B": "#dd88bb"}
NAMES = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights",
         "OVERLAP_F_B": "forward and backward at once"}
LIGHTER = 0.5
"""Opacity of the stages of a rank but the first."""
LETTERS = 6
"""Width of a letter in the picture, in thousandths of its width."""


def text_lines(table: PipelineSchedule, line: TimeLine, width: int) -> list[str]:
    """A line for each rank, and one that explains the letters. width: of the terminal, in columns."""
    names = [f" {rank:>{len(str(table.ranks - 1))}} " for rank in range(table.ranks)]
    columns = max(1, width - len(names[0]) - 1)
    scale = columns / (line.makespan or 1.0)
    lines = list[str]()
    for name, timed in zip(names, line.ranks):
        cells = ["."] * columns
        for start, end, action in timed:
            first, last = round(start * scale), round(end * scale)
            cells[first:last] = label(table, action, last - first)
        lines.append(name + "".join(cells))
    several = ". Small letters: stages of a rank but its first" * (len(table.stages) > table.ranks)
    legend = (f"A column is {1 / scale:.3g}. F3: forward of micro-batch 3. B: backward; I and W: its parts, for the "
              f"input and for the weights. Dots: the rank waits{several}")
    return [*lines, *wrap(legend, width - 1, initial_indent=" ", subsequent_indent=" ")]


def label(table: PipelineSchedule, action: PipelineAction, width: int) -> str:
    """Kind and micro-batch of an action, or its kind alone, in so many columns. Small letters: not of the first stage
    of its rank."""
    kinds = [each.kind if _is_first(table, each.stage) else each.kind.lower() for each in action.each]
    whole = "".join(f"{kind}{each.micro}" for kind, each in zip(kinds, action.each))
    return (whole if len(whole) <= width else "".join(kinds)).ljust(width, "-")[:width]


def _is_first(table: PipelineSchedule, stage: int) -> bool:
    return stage == min(other for other, rank in table.stages.items() if rank == table.stages[stage])


def draw(table: PipelineSchedule, line: TimeLine, path: Path) -> None:
    """A bar for each rank, whose parts are its actions."""
    with needs("report", "--picture"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.35 * table.ranks), layout="constrained")
    kinds = dict.fromkeys(timed.action.kind for timed_line in line.ranks for timed in timed_line)
    for rank, timed_line in enumerate(line.ranks):
        for start, end, action in timed_line:
            own = _is_first(table, action.stage)
            axes.barh(rank, end - start, left=start, height=0.8, color=COLOURS[action.kind], edgecolor="white",
                      linewidth=0.4, alpha=1.0 if own else LIGHTER)
            text = "+".join(str(each.micro) for each in action.each)
            if end - start > len(text) * LETTERS * line.makespan / 1000:
                axes.text((start + end) / 2, rank, text, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(table.ranks), [f"rank {rank}" for rank in range(table.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, line.makespan)
    axes.set_xlabel("time, in the unit of the times given")
    axes.set_title(f"{Path(table.name).name}: {table.micro_batches} micro-batches, makespan {line.makespan:.5g}, "
                   f"bubble {100 * line.bubble:.1f}%", fontsize=10)
    figure.legend(handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in NAMES if kind in kinds],
                  loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
