"""The section about a pipeline: the time line of its last step, simulated beside real."""

from __future__ import annotations

from .elements import Figure, Section, Table
from .schema import Json
from .svg import Part, bars
from .words import in_seconds, number, percent

MOST_RANKS = 16
"""Ranks with two lines each."""
KINDS = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
CLASSES = {kind: f"compute{index}" for index, kind in enumerate(KINDS)}


def pipeline_section(record: Json) -> Section:
    """A line for each rank, as it was and as it was simulated, and the bubble of both."""
    lines = {name: record["pipeline"][name] for name in ("real", "simulated")}
    ranks = len(lines["real"]["ranks"])
    lead = ("The last step that was recorded. The simulation has the same actions in the same order: each takes the "
            "mean time of its kind on its stage, and messages take no time. So its bubble is that of the schedule. A "
            "bubble is the part of the time from a rank's first action to its last one in which the rank with the most "
            "work waits.")
    if ranks > MOST_RANKS:
        lead += f" Drawn are the first {MOST_RANKS} of {ranks:,} ranks along pipe."
    rows = [(f"rank {rank}" if name == "real" else f"simulated {rank}", _parts(own)) for name, line in lines.items()
            for rank, own in enumerate(line["ranks"][:MOST_RANKS])]
    used = {part.class_.partition(" ")[0] for _, parts in rows for part in parts}
    legend = [(CLASSES[kind], text) for kind, text in KINDS.items() if CLASSES[kind] in used]
    table = Table(("", ">makespan", ">bubble"), [(name, in_seconds(line["makespan"]), percent(line["bubble"]))
                                                 for name, line in lines.items()])
    return Section(f"Pipeline of {number(ranks)} ranks", lead,
                   [Figure(bars("time line of a step of the pipeline", rows, "s", in_seconds), legend)], [table])


def _parts(own: Json) -> list[Part]:
    """The actions of a rank, and its waits between them."""
    parts, now = [], 0.0
    for action, start, end in zip(own["actions"], own["start"], own["end"]):
        kind = next((letter for letter in action if letter in KINDS), "F")
        parts += [Part("waits", "idle", max(0.0, start - now)), Part(action, f"{CLASSES[kind]} action", end - start)]
        now = end
    return parts
