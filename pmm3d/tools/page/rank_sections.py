"""Sections about the ranks of a run: times, bytes received, waits, memory, the step of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import cycle
from statistics import median

from ...nn.training.run_file import Columns, MemoryStep, Moved, PipelineStep, RankActions
from ...text import counted, in_bytes, in_time, number, percent
from ..memory_picture import draw_memory
from ..plots import COLOURS, Part, svg_text
from .drawings import time_bars
from .elements import Cell, Figure, Section, Table, Tile

MOST_ROWS, EXTREMES = 32, 6
"""Largest number of ranks that all get a bar. Of more ranks, the EXTREMES busiest, median and least busy are drawn."""
UNEVEN = 0.05
"""The load is uneven if other ranks wait for the busiest rank for more than this share of all time."""
COMPUTING = ("gemm", "elementwise", "update", "loss")
BLUES = ("#4477aa", "#66ccee", "#3d9970", "#8cc269", "#7a8ea3")
GREYS = ("#8a8a8a", "#a3a3a3", "#6f6f6f", "#bdbdbd", "#565656", "#d0d0d0")
NO_AXIS = {**dict.fromkeys(("all", "stage"), "agreement, signals"), "": "the loader"}
"""Name of a wait whose axis in the ledger is not an axis of the grid."""
PARTS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer",
    "step": "rest of a step",
    "batches": "batches",
    "agreement": "agreement",
    "validation": "validation",
    "log": "log and run.json",
    "checkpoint": "checkpoints",
}
"""Part of a run in which ranks neither compute nor wait -> its name on the page."""
REST = "other: outside of all parts"
SPREAD = (">least", ">median", ">most", ">on rank")
MOST_STAGES = 16
"""Largest number of ranks of a pipeline that are drawn."""
ACTIONS = {
    "F": ("forward", "#77aadd"),
    "B": ("backward", "#66bb77"),
    "I": ("backward for the input", "#66ccee"),
    "W": ("backward for the weights", "#ddcc66"),
}
Row = tuple[Cell | str, ...]
Kinds = dict[str, list[float]]
"""Kind of time -> seconds of each rank."""


def rank_tiles(ranks: Columns, moved: Sequence[Moved]) -> list[Tile]:
    """Return tiles with the share of waiting, the imbalance, and the memory."""
    order, ratio, excess = _imbalance(ranks, moved)
    waiting = sum(ranks.waited) / max(1e-9, sum(ranks.seconds))
    by_axis = _waited_by_axis(moved)
    most = [f", most for {_awaited(axis)}" for axis in sorted(by_axis, key=lambda axis: -sum(by_axis[axis]))[:1]]
    return [
        Tile("waiting", percent(waiting), "of the ranks' time" + "".join(most)),
        Tile(
            "imbalance",
            f"{ratio:.2f}",
            f"busy time of rank {order[0]}, the busiest, over the median",
            "bad" if excess > UNEVEN else "good",
        ),
        Tile("memory", in_bytes(max(ranks.peak_memory)), "resident, most of any rank"),
    ]


def time_section(ranks: Columns, moved: Sequence[Moved]) -> Section:
    """Return bars of the ranks' times, and a table of their extremes."""
    (kinds, colours), (order, ratio, excess) = _kinds(ranks, moved), _imbalance(ranks, moved)
    lead = (
        f"{'Uneven' if excess > UNEVEN else 'Even'} load: rank {order[0]}, the busiest, is busy for {ratio:.2f} "
        f'times the median, and other ranks wait for it for {percent(excess)} of the time. "Other" is Python, '
        "copies, sums of messages, and files."
    )
    if computed := sum(map(sum, ranks.computed.values())):
        lead += (
            f" For {percent(sum(ranks.off_core) / computed)} of the computing time, another process or thread had "
            "the core."
        )
    if any(ranks.saving):
        lead += f" The run waited {in_time(max(ranks.saving))} for checkpoints."
    drawn = list(range(len(order)))
    if len(drawn) > MOST_ROWS:
        lead += (
            f" Drawn of {len(drawn):,} ranks: the {EXTREMES} busiest, {EXTREMES} in the middle, and the "
            f"{EXTREMES} least busy. The table covers all ranks."
        )
        middle = len(order) // 2 - EXTREMES // 2
        drawn = [*order[:EXTREMES], *order[middle : middle + EXTREMES], *order[-EXTREMES:]]
    rows = [(f"rank {rank}", [Part(kind, seconds[rank]) for kind, seconds in kinds.items()]) for rank in drawn]
    spreads = [
        (kind, *_spread(seconds, in_time), percent(sum(seconds) / max(1e-9, sum(ranks.seconds))))
        for kind, seconds in kinds.items()
    ]
    return Section(
        "Time of each rank", lead, [Figure(time_bars(rows, colours))], [Table(("", *SPREAD, ">of all time"), spreads)]
    )


def _kinds(ranks: Columns, moved: Sequence[Moved]) -> tuple[Kinds, dict[str, str]]:
    """Return the kinds of time, which add up to the whole time of each rank, and their colours."""
    names = [name for name in dict.fromkeys((*COMPUTING, *ranks.computed)) if name in ranks.computed]
    computing = {f"computing: {name}": ranks.computed[name] for name in names}
    waiting = {f"waiting: {_awaited(axis)}": (axis, seconds) for axis, seconds in _waited_by_axis(moved).items()}
    other = {
        f"other: {PARTS.get(name, name)}": ranks.other[name]
        for name in dict.fromkeys((*PARTS, *ranks.other))
        if any(ranks.other.get(name, ()))
    }
    kinds = computing | {kind: seconds for kind, (_, seconds) in waiting.items()} | other
    kinds[REST] = [
        max(0.0, total - sum(seconds[rank] for seconds in kinds.values())) for rank, total in enumerate(ranks.seconds)
    ]
    colours = (
        dict(zip(computing, cycle(BLUES)))
        | {kind: COLOURS.get(axis, "#5fa8a0") for kind, (axis, _) in waiting.items()}
        | dict(zip(other, cycle(GREYS)))
    )
    return kinds, {**colours, REST: "#eeeeee"}


def _awaited(axis: str) -> str:
    return NO_AXIS.get(axis, f"axis {axis}")


def _waited_by_axis(moved: Sequence[Moved]) -> Kinds:
    """Return the seconds of each rank by axis, without axes for which no rank waited."""
    waited: Kinds = {}
    for entry in moved:
        so_far = waited.get(entry.axis, [0.0] * len(entry.waited))
        waited[entry.axis] = [one + other for one, other in zip(so_far, entry.waited)]
    return {axis: seconds for axis, seconds in waited.items() if any(seconds)}


def _imbalance(ranks: Columns, moved: Sequence[Moved]) -> tuple[list[int], float, float]:
    """Return the ranks in order, the busiest first; the busy time of the busiest rank over the median; and the mean
    extra time that the other ranks wait for messages, as a share of all time. A rank is busy if it does not wait for
    messages. Waiting for the loader counts as busy, because the other ranks wait for it too."""
    totals = ranks.seconds
    by_axis = [seconds for axis, seconds in _waited_by_axis(moved).items() if axis]
    waited = [sum(column) for column in zip(*by_axis)] or [0.0] * len(totals)
    busy = [max(1e-9, seconds - waits) for seconds, waits in zip(totals, waited)]
    order = sorted(range(len(totals)), key=lambda rank: waited[rank])
    others = (sum(waited) - waited[order[0]]) / max(1, len(waited) - 1)
    return order, busy[order[0]] / median(busy), (others - waited[order[0]]) / max(1e-9, sum(totals) / len(totals))


def _spread(values: Sequence[float], in_words: Callable[[float], str]) -> tuple[str, ...]:
    """Return the smallest, the median and the largest value, and the rank with the largest."""
    return (*map(in_words, (min(values), median(values), max(values))), number(values.index(max(values))))


def collectives_section(ranks: Columns, moved: Sequence[Moved], steps: int) -> Section:
    """Return a table of received bytes and waits of each collective, the longest waits first. steps: of the run."""
    total, busiest = max(1e-9, sum(ranks.seconds)), max(map(sum, zip(*(entry.received for entry in moved))), default=0)
    share = (
        f", or {in_bytes(busiest / steps)} for each of {counted(steps, 'step')}, evaluations included" if steps else ""
    )
    lead = (
        f"The busiest rank received {in_bytes(busiest)}{share}. Communication during computation does not count "
        "as a wait."
    )
    entries = sorted(moved, key=lambda entry: -sum(entry.waited))
    rows: list[Row] = [
        (
            entry.axis or "–",
            _phase(entry),
            entry.operation,
            number(max(entry.calls)),
            in_bytes(max(entry.received)),
            in_bytes(sum(entry.received)),
            *_spread(entry.waited, in_time),
            Cell(percent(sum(entry.waited) / total), bar=sum(entry.waited) / total),
        )
        for entry in entries
        if any(entry.received) or sum(entry.waited) > 1e-4 * total
    ]
    if not rows:
        lead = "Nothing was moved" + (": there is one rank." if len(ranks.seconds) == 1 else " yet.")
    head = (
        "axis",
        "phase",
        "operation",
        ">calls",
        ">received, busiest rank",
        ">all ranks",
        ">least wait",
        ">median",
        ">most",
        ">on rank",
        ">of all time",
    )
    return Section("Collectives", lead, tables=[Table(head, rows)] if rows else [])


def _phase(entry: Moved) -> str:
    """Return the phase, or a name for collectives outside of phases."""
    unnamed = {"all": "signals", "stage": "signals", "": "input"}.get(entry.axis, "validation")
    return entry.phase or ("agreement" if "agreement" in entry.operation else unnamed)


def memory_section(ranks: Columns, held: dict[str, list[int]], step: MemoryStep | None = None) -> Section:
    """Return a table of the bytes of the ranks' arrays, and pictures of a recorded step. held: kind of array -> bytes
    of each rank."""
    names = {"work": "work: activations, messages, ..."}
    rows = [(names.get(name, name), *_spread(values, in_bytes)) for name, values in held.items()]
    rows.append(("all arrays", *_spread([sum(column) for column in zip(*held.values())], in_bytes)))
    peak = ranks.peak_memory
    lead = (
        f"Resident at most: {in_bytes(min(peak))} to {in_bytes(max(peak))} a rank (most on rank "
        f"{peak.index(max(peak))}). This includes Python, libraries and the buffers of the loader, but not the "
        "memory of a device."
    )
    figures, text = list[Figure](), ""
    if step is not None:
        panels = {"predicted": step.predicted, "measured": step.measured}
        documents = {label: dict(each) for label, each in panels.items() if each is not None}
        draw_memory(drawn := BytesIO(), documents, f"Arrays of rank 0 in step {step.step}")
        figures, text = [Figure(svg_text(drawn))], step.measured.text
    return Section("Memory of each rank", lead, figures, [Table(("", *SPREAD), rows)], text)


def pipeline_section(step: PipelineStep) -> Section:
    """Return the time lines of the last step of a pipeline, measured and simulated, and their bubbles."""
    lines, ranks = {"real": step.real, "simulated": step.simulated}, len(step.real.ranks)
    lead = (
        "The last recorded step. The simulation has the same actions in the same order. Each action takes the mean "
        "time of its kind on its stage, and messages take no time, so the simulated bubble is the schedule's. The "
        "bubble is the share of the time between its first and last action in which the rank with the most work "
        "waits."
    )
    if ranks > MOST_STAGES:
        lead += f" The drawing shows the first {MOST_STAGES} of {ranks:,} ranks along pipe."
    rows = [
        (f"rank {rank}" if name == "real" else f"simulated {rank}", _actions(own))
        for name, line in lines.items()
        for rank, own in enumerate(line.ranks[:MOST_STAGES])
    ]
    table = Table(
        ("", ">makespan", ">bubble"),
        [(name, in_time(line.makespan), percent(line.bubble)) for name, line in lines.items()],
    )
    return Section(
        f"Pipeline of {counted(ranks, 'rank')}", lead, [Figure(time_bars(rows, dict(ACTIONS.values())))], [table]
    )


def _actions(own: RankActions) -> list[Part]:
    """Return the actions of a rank, and its waits between them as gaps."""
    parts, now = [], 0.0
    for action, start, end in zip(own.actions, own.start, own.end):
        kind = next((letter for letter in action if letter in ACTIONS), "F")
        parts += [Part("", max(0.0, start - now)), Part(ACTIONS[kind][0], end - start)]
        now = end
    return parts
