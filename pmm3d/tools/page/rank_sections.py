"""Sections about the ranks of a run: times, bytes received, waits, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from ...text import in_bytes
from .elements import Cell, Figure, Section, Table, Tile
from .schema import Json
from .svg import Part, bars
from .words import in_seconds, number, percent

MOST_ROWS, EXTREMES = 32, 6
"""Ranks with a bar each; of more than that, so many that are busy longest, in the middle, and least."""
UNEVEN = 0.05
"""Share of all time that others wait for the rank which is busy longest, from which on it is told."""
COMPUTING = ("gemm", "elementwise", "update", "loss")
COLOURED = ("x", "y", "z", "data", "all")
"""Axes with a colour of their own."""
NO_AXIS = {**dict.fromkeys(("all", "stage"), "agreement, signals"), "": "the loader"}
"""What ranks wait for where the ledger gives no axis."""
SPREAD = (">least", ">median", ">most", ">on rank")
Row = tuple[Cell | str, ...]


class Kind(NamedTuple):
    """Something that time goes to: its CSS class and each rank's seconds."""

    name: str
    class_: str
    seconds: list[float]


def rank_tiles(record: Json) -> list[Tile]:
    """The verdicts."""
    ranks, (order, ratio, excess) = record["ranks"], _imbalance(record)
    waiting = sum(ranks["waited"]) / max(1e-9, sum(ranks["seconds"]))
    by_axis = _waited_by_axis(record)
    most = [f", most for {_awaited(axis)}" for axis in sorted(by_axis, key=lambda axis: -sum(by_axis[axis]))[:1]]
    tiles = [Tile("waiting", percent(waiting), "of the ranks' time" + "".join(most)),
             Tile("imbalance", f"{ratio:.2f}", f"time not waiting: rank {order[0]}, the longest, over the median",
                  "bad" if excess > UNEVEN else "good")]
    return [*tiles, Tile("memory", in_bytes(max(ranks["peak_memory"])), "resident, most of any rank")]


def time_section(record: Json) -> Section:
    """Stacked bars, and a table of extremes."""
    ranks, kinds, (order, ratio, excess) = record["ranks"], _kinds(record), _imbalance(record)
    drawn = list(range(len(order)))
    lead = (f"{'Uneven' if excess > UNEVEN else 'Even'} load: rank {order[0]}, which is busy longest, takes "
            f"{ratio:.2f} times the median, and others wait for it {percent(excess)} of the time.")
    computed = sum(map(sum, ranks["computed"].values()))
    if "off_core" in ranks and computed:
        lead += (f" {percent(sum(ranks['off_core']) / computed)} of the computing was without a core: another process, "
                 "or another thread of this one, had it.")
    if any(ranks["saving"]):
        lead += f" The run waited {in_seconds(max(ranks['saving']))} for checkpoints."
    if len(drawn) > MOST_ROWS:
        lead += (f" Drawn of {len(drawn):,} ranks: {EXTREMES} each that are busy longest, in the middle, and least; "
                 "the table covers all.")
        middle = len(order) // 2 - EXTREMES // 2
        drawn = [*order[:EXTREMES], *order[middle : middle + EXTREMES], *order[-EXTREMES:]]
    rows = [(f"rank {rank}", [Part(kind.name, kind.class_, kind.seconds[rank]) for kind in kinds]) for rank in drawn]
    spreads = [(kind.name, *_spread(kind.seconds, in_seconds),
                percent(sum(kind.seconds) / max(1e-9, sum(ranks["seconds"])))) for kind in kinds]
    legend = [(kind.class_, kind.name) for kind in kinds]
    return Section("Time of each rank", lead, [Figure(bars("time of each rank", rows, "s", in_seconds), legend)],
                   [Table(("", *SPREAD, ">of all time"), spreads)])


def _kinds(record: Json) -> list[Kind]:
    ranks, computed = record["ranks"], record["ranks"]["computed"]
    names = [name for name in dict.fromkeys((*COMPUTING, *computed)) if name in computed]
    kinds = [Kind(f"computing: {name}", f"compute{min(index, 4)}", computed[name]) for index, name in enumerate(names)]
    kinds += [Kind(f"waiting: {_awaited(axis)}", f"wait-{_colour(axis)}", seconds)
              for axis, seconds in _waited_by_axis(record).items()]
    rest = [max(0.0, whole - sum(kind.seconds[rank] for kind in kinds)) for rank, whole in enumerate(ranks["seconds"])]
    return [*kinds, Kind("rest: Python, copies, sums, files", "rest", rest)]


def _awaited(axis: str) -> str:
    return NO_AXIS.get(axis, f"axis {axis}")


def _colour(axis: str) -> str:
    return axis if axis in COLOURED else "other" if axis else "loader"


def _waited_by_axis(record: Json) -> dict[str, list[float]]:
    """Seconds of each rank, of the axes that were waited for."""
    axes = dict.fromkeys([*record["grid"], *NO_AXIS])
    waited = {axis: [entry["waited"] for entry in record["moved"] if entry["axis"] == axis] for axis in axes}
    sums = {axis: [sum(column) for column in zip(*entries)] for axis, entries in waited.items()}
    return {axis: seconds for axis, seconds in sums.items() if any(seconds)}


def _imbalance(record: Json) -> tuple[list[int], float, float]:
    """The ranks, those that are busy longest first; the first one's time over the median; and what the others wait
    longer for messages than it does, on average, as a share of all time. Whatever keeps a rank busy counts, its loader
    too: the others wait for all of it."""
    whole = record["ranks"]["seconds"]
    by_axis = [seconds for axis, seconds in _waited_by_axis(record).items() if axis]
    waited = [sum(column) for column in zip(*by_axis)] or [0.0] * len(whole)
    busy = [max(1e-9, seconds - waits) for seconds, waits in zip(whole, waited)]
    order = sorted(range(len(whole)), key=lambda rank: waited[rank])
    others = (sum(waited) - waited[order[0]]) / max(1, len(waited) - 1)
    return order, busy[order[0]] / median(busy), (others - waited[order[0]]) / max(1e-9, sum(whole) / len(whole))


def _spread(values: Sequence[float], in_words: Callable[[float], str]) -> tuple[str, ...]:
    """Least, median and most of any rank, and which rank that is."""
    return (*map(in_words, (min(values), median(values), max(values))), number(values.index(max(values))))


def volume_section(record: Json) -> Section:
    """Bytes received, by collective."""
    steps = max(1, record["passes"]["steps"])
    rows = [_volume(entry, steps) for entry in record["moved"] if any(entry["received"])]
    busiest = max(map(sum, zip(*(entry["received"] for entry in record["moved"]))), default=0)
    lead = (f"The busiest rank received {in_bytes(busiest)}, {in_bytes(busiest / steps)} a step (of {number(steps)} "
            "steps, evaluations included).")
    if not rows:
        lead = "Nothing was moved" + (": there is one rank." if len(record["ranks"]["seconds"]) == 1 else " yet.")
    head = ("axis", "phase", "operation", ">calls", ">received, busiest rank", ">a step", ">all ranks")
    return Section("Ledger", lead, tables=[Table(head, rows)] if rows else [])


def _volume(entry: Json, steps: int) -> Row:
    received = entry["received"]
    most = max(received)
    return (entry["axis"], _phase(entry), entry["operation"], number(max(entry["calls"])), in_bytes(most),
            in_bytes(most / steps), in_bytes(sum(received)))


def _phase(entry: Json) -> str:
    """The phase, or what is done outside of phases."""
    unnamed = {"all": "signals", "stage": "signals", "": "input"}.get(entry["axis"], "validation")
    return entry["phase"] or ("agreement" if "agreement" in entry["operation"] else unnamed)


def wait_section(record: Json) -> Section:
    """Who waited for what."""
    whole = sum(record["ranks"]["seconds"])
    waits = sorted(((sum(entry["waited"]), entry) for entry in record["moved"]), key=lambda wait: -wait[0])
    rows = [(entry["axis"] or "–", _phase(entry), entry["operation"], *_spread(entry["waited"], in_seconds),
             Cell(percent(waited / whole), bar=waited / waits[0][0]))
            for waited, entry in waits if waited > 1e-4 * whole]
    head = ("axis", "phase", "operation", *SPREAD, ">of all time")
    return Section("Waits", "Time in which a rank could do nothing but wait; what ran under computation is not in it. "
                            "Entries below 0.01 % are left out.", tables=[Table(head, rows)] if rows else [])


def memory_section(record: Json) -> Section:
    """Bytes of the arrays of each rank."""
    held = record["memory"]["held"]
    names = {"work": "work: activations, messages, ..."}
    rows = [(names.get(name, name), *_spread(values, in_bytes)) for name, values in held.items()]
    rows.append(("all arrays", *_spread([sum(column) for column in zip(*held.values())], in_bytes)))
    peak = record["ranks"]["peak_memory"]
    lead = (f"Resident at most: {in_bytes(min(peak))} to {in_bytes(max(peak))} a rank (most on rank "
            f"{peak.index(max(peak))}). This includes Python, libraries and the buffers of the loader, but not the "
            "memory of a device.")
    return Section("Memory of each rank", lead, tables=[Table(("", *SPREAD), rows)])
