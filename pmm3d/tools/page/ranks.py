"""Sections about what the ranks of a run did: times, bytes beside the model, waits, memory."""

from __future__ import annotations

from ...comm.words import in_bytes
from .parts import Cell, Figure, Section, Table, Tile
from .svg import bars
from .text import median, number, seconds, share

MOST_ROWS = 32
EXTREMES = 6
UNEVEN = 0.05
"""Share of all time that the rank which computes longest computes more than the mean, from which on it is told."""
COMPUTING = ("gemm", "elementwise", "update", "loss")
AXES = {"x": "axis x", "y": "axis y", "z": "axis z", "data": "axis data", "all": "agreement, signals",
        "": "the loader"}
"""What ranks wait for, by the axis that the ledger gives."""


def tiles(record: dict) -> list[Tile]:
    """The verdicts."""
    table = record["ranks"]
    waiting = sum(table["waited"]) / max(1e-9, sum(table["seconds"]))
    slowest, ratio, excess = _imbalance(record)
    worst = [AXES[axis] for axis, _ in sorted(_by_axis(record).items(), key=lambda entry: -sum(entry[1]))][:1]
    found = [Tile("waiting", share(waiting), ", most for ".join(["of the ranks' time", *worst])),
             Tile("imbalance", f"{ratio:.2f}", f"computing: rank {slowest}, the longest, over the mean",
                  "bad" if excess > UNEVEN else "good")]
    if record["modelled"]:
        off = [entry for entry in record["moved"] if not _equal(entry)]
        found.append(Tile("bytes", "as modelled" if not off else "off the model",
                          f"kinds of collectives that differ: {len(off)}" if off else "on every rank, axis, phase",
                          "bad" if off else "good"))
    return found + [Tile("memory", in_bytes(max(table["peak_memory"])), "resident, most of any rank")]


def times(record: dict) -> Section:
    """Stacked bars, and a table of extremes."""
    table, kinds = record["ranks"], _kinds(record)
    ranks = range(len(table["seconds"]))
    rows = [(f"rank {rank}", _stack(kinds, rank)) for rank in ranks]
    note = ""
    if len(rows) > MOST_ROWS:
        rows = _chosen(record, rows)
        note = (f" Drawn of {len(ranks):,} ranks: {EXTREMES} each that compute longest, in the middle, and least; the "
                "table covers all.")
    slowest, ratio, excess = _imbalance(record)
    said = "Uneven load" if excess > UNEVEN else "Even load"
    said += (f": rank {slowest}, which computes longest, takes {ratio:.2f} times the mean, and others wait for it "
             f"{share(excess)} of the time.")
    saving = max(table["saving"])
    said += f" Writing checkpoints took {seconds(saving)}, waits in it included." if saving else ""
    legend = tuple((class_, kind) for kind, (class_, _) in kinds.items())
    spread = [(kind, *_spread(values, seconds), share(sum(values) / max(1e-9, sum(table["seconds"]))))
              for kind, (_, values) in kinds.items()]
    return Section("Time of each rank", said + note,
                   [Figure("", bars("time of each rank", rows, "s"), legend, wide=True)],
                   [Table(("", ">least", ">median", ">most", ">on rank", ">of all time"), spread)])


def _kinds(record: dict) -> dict[str, tuple[str, list[float]]]:
    """Name -> (CSS class, seconds of each rank), of everything that time goes to."""
    table, found = record["ranks"], {}
    computed = sorted(table["computed"].items(),
                      key=lambda entry: COMPUTING.index(entry[0]) if entry[0] in COMPUTING else len(COMPUTING))
    for index, (name, values) in enumerate(computed):
        found[f"computing: {name}"] = f"compute{min(index, 4)}", values
    for axis, values in _by_axis(record).items():
        if any(values):
            found[f"waiting: {AXES[axis]}"] = f"wait-{axis or 'loader'}", values
    known = [sum(column) for column in zip(*(values for _, values in found.values()))] or [0.0] * len(table["seconds"])
    found["rest: Python, copies, sums, files"] = "rest", [max(0.0, whole - sure) for whole, sure in
                                                          zip(table["seconds"], known)]
    return found


def _by_axis(record: dict) -> dict[str, list[float]]:
    found = {axis: [0.0] * len(record["ranks"]["seconds"]) for axis in AXES}
    for entry in record["moved"]:
        found[entry["axis"]] = [old + new for old, new in zip(found[entry["axis"]], entry["waited"])]
    return {axis: values for axis, values in found.items() if any(values)}


def _stack(kinds: dict, rank: int) -> list[tuple[str, str, float, str]]:
    return [(kind, class_, values[rank], seconds(values[rank])) for kind, (class_, values) in kinds.items()]


def _chosen(record: dict, rows: list) -> list:
    """The rows of the ranks that compute longest, of those in the middle, of those that compute least."""
    order = _order(record)
    middle = len(order) // 2 - EXTREMES // 2
    return [rows[rank] for rank in (*order[:EXTREMES], *order[middle : middle + EXTREMES], *order[-EXTREMES:])]


def _order(record: dict) -> list[int]:
    """Ranks, those that compute longest first."""
    computed = _computed(record)
    return sorted(range(len(computed)), key=lambda rank: -computed[rank])


def _computed(record: dict) -> list[float]:
    ranks = record["ranks"]
    return [sum(column) for column in zip(*ranks["computed"].values())] or [0.0] * len(ranks["seconds"])


def _imbalance(record: dict) -> tuple[int, float, float]:
    """The rank that computes longest; its time over the mean; the difference as a share of all time."""
    computed, whole = _computed(record), record["ranks"]["seconds"]
    mean, slowest = sum(computed) / len(computed), _order(record)[0]
    return (slowest, computed[slowest] / mean if mean else 1.0,
            (computed[slowest] - mean) / max(1e-9, sum(whole) / len(whole)))


def _spread(values, told) -> tuple[str, str, str, str]:
    """Least, median and most of any rank, and which rank that is."""
    return told(min(values)), told(median(values)), told(max(values)), number(values.index(max(values)))


def volumes(record: dict) -> Section:
    """What was received, beside the model."""
    steps = max(1, record["passes"]["steps"])
    head = ("axis", "phase", "operation", ">calls", ">received, busiest rank", ">a step", ">all ranks", ">model",
            ">ratio", "")
    rows = [_volume(entry, steps, record["modelled"]) for entry in record["moved"]
            if any(entry["received"]) or any(entry.get("model_received", ()))]
    busiest = max(map(sum, zip(*(entry["received"] for entry in record["moved"]))), default=0)
    lead = (f"The busiest rank received {in_bytes(busiest)}, {in_bytes(busiest / steps)} a step (of {number(steps)} "
            "steps, evaluations included).")
    if not record["modelled"]:
        lead += (" There is no model of this network or loss: formulas are known for nn.MLP with the losses "
                 "cross_entropy, mse and mae.")
    elif not rows:
        lead = "Nothing was moved" + (": there is one rank." if len(record["ranks"]["seconds"]) == 1 else " yet.")
    return Section("Ledger beside the model", lead, tables=[Table(head, rows)] if rows else [])


def _volume(entry: dict, steps: int, modelled: bool) -> tuple:
    received = entry["received"]
    most, whole = max(received), sum(received)
    told = (entry["axis"], _phase(entry), entry["operation"], number(max(entry["calls"])),
            in_bytes(most), in_bytes(most / steps), in_bytes(whole))
    if not modelled:
        return *told, "–", "–", ""
    expected = sum(entry.get("model_received", [0]))
    ratio = f"{whole / expected:.4f}" if expected else "–"
    wrong = sum(here != there for here, there in zip(received, entry.get("model_received", [])))
    verdict = Cell("equal", "good") if _equal(entry) else Cell(f"off on {wrong} of {len(received)} ranks", "bad")
    exact = f"{whole:,} bytes measured, {expected:,} modelled"
    return *told, Cell(in_bytes(expected), title=exact), Cell(ratio, title=exact), verdict


def _equal(entry: dict) -> bool:
    none = [0] * len(entry["sent"])
    return (entry["sent"], entry["received"]) == (entry.get("model_sent", none), entry.get("model_received", none))


def _phase(entry: dict) -> str:
    """The phase, or what is done outside of phases."""
    unnamed = {"all": "signals", "": "input"}.get(entry["axis"], "validation")
    return entry["phase"] or ("agreement" if "agreement" in entry["operation"] else unnamed)


def waits(record: dict) -> Section:
    """Who waited for what."""
    whole = sum(record["ranks"]["seconds"])
    waited = [entry for entry in record["moved"] if sum(entry["waited"]) > 1e-4 * whole]
    most = max((sum(entry["waited"]) for entry in waited), default=1.0)
    rows = [(entry["axis"] or "–", _phase(entry), entry["operation"], *_spread(entry["waited"], seconds),
             Cell(share(sum(entry["waited"]) / whole), bar=sum(entry["waited"]) / most))
            for entry in sorted(waited, key=lambda entry: -sum(entry["waited"]))]
    head = ("axis", "phase", "operation", ">least", ">median", ">most", ">on rank", ">of all time")
    return Section("Waits", "Time in which a rank could do nothing but wait; what ran under computation is not in it. "
                            "Entries below 0.01 % are left out.", tables=[Table(head, rows)] if rows else [])


def memory(record: dict) -> Section:
    """What the arrays take, beside the formula."""
    held, predicted = record["memory"]["held"], record["memory"]["predicted"]
    parts = dict(predicted.get("parts", {}))
    rows = []
    for name in ("weights", "gradients", "state"):
        rows.append(_held(name, held[name], parts.pop(name, None)))
    rows.append(_held("work: activations, messages, ...", held["work"], sum(parts.values()) if parts else None,
                      ", ".join(f"{name} {in_bytes(value)}" for name, value in parts.items() if value)))
    whole = [sum(column) for column in zip(*held.values())]
    rows.append(_held("all arrays", whole, sum(predicted["parts"].values()) if predicted else None))
    peak = record["ranks"]["peak_memory"]
    lead = (f"Resident at most: {in_bytes(min(peak))} to {in_bytes(max(peak))} a rank (most on rank "
            f"{peak.index(max(peak))}), which has Python, libraries and the buffers of the loader in it, and not what "
            "a device holds.")
    if predicted.get("leaves_out"):
        lead += f" The formula leaves out {' and '.join(predicted['leaves_out'])}."
    elif not predicted:
        lead += " The formula is for nn.MLP only, and after a step."
    return Section("Memory of each rank", lead,
                   tables=[Table(("", ">least", ">median", ">most", ">on rank", ">formula", ">ratio"), rows)])


def _held(name: str, values: list[int], formula: int | None, detail: str = "") -> tuple:
    ratio = f"{max(values) / formula:.2f}" if formula else "–"
    return name, *_spread(values, in_bytes), Cell("–" if formula is None else in_bytes(formula), title=detail), ratio
