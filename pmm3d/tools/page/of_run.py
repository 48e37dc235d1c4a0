"""The page of a training run."""

from __future__ import annotations

from math import isfinite

from ...comm.words import in_bytes
from ...layout import GridShape
from . import ranks
from .grid import drawn_whole, grid_drawing, host_legend, told
from .parts import Cell, Figure, Page, Section, Table, Tile
from .source import Source
from .svg import chart
from .text import median, number, seconds, share, spans, toml

CURVES = (("samples_per_second", "Rows trained per second", "rows/s", False, True),
          ("waiting", "Share of the time that rank 0 waited", "", False, True),
          ("lr", "Learning rate", "", False, True),
          ("gradient_norm", "2-norm of the gradient before clipping", "", True, False))
MOST_EVENTS = 40
MOST_HOSTS = 8


def sections(source: Source) -> Page:
    """All that is known of the run; what is not is left out, and the notes say so."""
    record = source.record
    parts = [_curves(source.metrics)]
    if record.get("ranks"):
        parts += [ranks.times(record), ranks.volumes(record), ranks.waits(record), ranks.memory(record)]
    if record:
        parts += [_grid(record), _history(record), _settings(record)]
    return Page(title=source.path.absolute().name, subtitle="training run", facts=_facts(source),
                tiles=_tiles(source), sections=[part for part in parts if part is not None], notes=source.notes)


def _facts(source: Source) -> list[tuple[str, str]]:
    record = source.record
    facts = [("folder", str(source.path.absolute()))]
    if not record:
        return facts
    program, network, hosts = record["program"], record["network"], record["hosts"]
    last, grid = record["starts"][-1], GridShape(**record["grid"])
    names = ", ".join(f"{host['name']} (ranks {spans(host['ranks'])} on {host['cores']} cores)"
                      for host in hosts[:MOST_HOSTS])
    more = f" and {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else ""
    kind = "-".join(map(str, network["sizes"])) if "sizes" in network else network["kind"]
    facts += [
        ("when", f"{_when(last['began'])} to {_when(record.get('written', last['began']))}"
                 + (f", start {len(record['starts'])}" if len(record["starts"]) > 1 else "")),
        ("job", record["job"]) if record["job"] else None,
        ("grid", f"{grid}: {grid.size} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"),
        ("hosts", names + more),
        ("network", f"{kind}, {network['parameters']:,} parameters, {network['dtype']}, {network['library']}"),
        ("BLAS", f"{program['blas']}, kernel {program['kernel']}, {program['threads']} thread(s) a rank"),
        ("MPI", program["mpi"]), ("CPU", program["cpu"]),
        ("program", f"pmm3d {program['pmm3d']}, Python {program['python']}: {' '.join(map(str, record['command']))}"),
    ]
    return [fact for fact in facts if fact]


def _tiles(source: Source) -> list[Tile]:
    record, metrics = source.record, source.metrics
    steps = [line for line in metrics if "loss" in line]
    tiles = []
    if record:
        state = record.get("state", "running")
        note = f"epoch {record['epoch']} of {record['epochs']}" if "epoch" in record else ""
        if state == "running" and source.owner:
            note += f"; the lock names process {source.owner.get('pid')} on {source.owner.get('host')}"
        colour = {"finished": "good", "failed": "bad"}.get(state, "")
        tiles.append(Tile("state", "not finished" if state == "running" else state, note, colour))
    if steps:
        first, last = _number(steps[0]["loss"]), _number(steps[-1]["loss"])
        tiles.append(Tile("loss", number(last), f"{number(first)} at step {steps[0]['step']}",
                          "" if isfinite(last) else "bad"))
        tiles.append(Tile("steps", number(steps[-1]["step"])))
    for name, value in next((line["validation"] for line in reversed(metrics) if "validation" in line), {}).items():
        tiles.append(Tile(f"validation {name}", number(_number(value))))
    rates = [line["samples_per_second"] for line in steps[len(steps) // 2 :] if "samples_per_second" in line]
    if rates:
        tiles.append(Tile("rows per second", number(median(rates)), "median of the later half"))
    return tiles + (ranks.tiles(record) if record.get("ranks") else [])


def _curves(metrics: list[dict]) -> Section | None:
    steps = [line for line in metrics if "loss" in line]
    validated = [line for line in metrics if isinstance(line.get("validation"), dict)]
    loss = {"training": _points(steps, "loss")}
    if validated:
        loss["validation"] = _points([{"step": line["step"], **line["validation"]} for line in validated], "loss")
    drawn = [("Loss", chart("loss by step", loss, log=True), loss)]
    for name in dict.fromkeys(name for line in validated for name in line["validation"] if name != "loss"):
        series = {name: _points([{"step": line["step"], **line["validation"]} for line in validated], name)}
        drawn.append((f"Validation: {name}", chart(f"{name} by step", series), series))
    for name, caption, unit, log, zero in CURVES:
        series = {caption: _points(steps, name)}
        drawn.append((caption, chart(f"{caption} by step", series, unit, log, zero), series))
    figures = [Figure(caption + _missing(series), drawing, _legend(series)) for caption, drawing, series in drawn
               if drawing is not None]
    return Section("Curves", figures=figures) if figures else None


def _points(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], _number(line[name])) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def _number(value) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _missing(series: dict) -> str:
    lost = sum(not isfinite(value) for _, values in series.values() for value in values)
    return f" ({lost} values are not finite and not drawn)" if lost else ""


def _legend(series: dict) -> tuple[tuple[str, str], ...]:
    return tuple((f"series{index}", name) for index, name in enumerate(series)) if len(series) > 1 else ()


def _grid(record: dict) -> Section:
    shape, hosts = GridShape(**record["grid"]), record["hosts"]
    legend = tuple((entry["class"], f"{entry['name']}: ranks {entry['ranks']}")
                   for entry in host_legend(hosts) if drawn_whole(shape))
    lead = "Weights: rows over y, then z; columns over x. Rows of a batch: over data, then z."
    figure = Figure("", grid_drawing(shape, hosts), legend, wide=True)
    return Section("Grid", f"{lead} {told(shape)}".strip(), [figure])


def _history(record: dict) -> Section:
    head = ("began", "state", ">steps", ">from", ">to", ">ranks", "grid", ">time", ">waited", ">moved by all", "job")
    starts = [(
        _when(start["began"]), _state(start), number(start.get("steps")), number(start["from_step"]),
        number(start.get("to_step")), number(start["ranks"]), str(GridShape(*start["grid"])),
        seconds(start.get("seconds", 0.0)),
        share(start.get("waited", 0.0) / max(1e-9, start.get("seconds", 0.0) * start["ranks"])),
        in_bytes(start.get("received", 0)), start["job"] or "–",
    ) for start in record["starts"]]
    events = record["events"]
    rows = [(_when(event["when"]), number(event["step"]), event["what"],
             event["text"] + (f" ({seconds(event['seconds'])})" if "seconds" in event else "")) for event in events]
    left_out = len(rows) - MOST_EVENTS
    return Section("Events", "Figures of ranks on this page are of the last start only." if len(starts) > 1 else "",
                   tables=[Table(head, starts, "Starts"),
                           Table(("when", ">step", "what", ""), rows[-MOST_EVENTS:],
                                 f"The last {MOST_EVENTS} of {len(rows)} events" if left_out > 0 else "Events")])


def _state(start: dict) -> Cell:
    return Cell(start["state"], {"finished": "good", "failed": "bad", "broke off": "bad"}.get(start["state"], ""))


def _settings(record: dict) -> Section | None:
    settings = record.get("settings")
    if not settings or not all(isinstance(values, dict) for values in settings.values()):
        return None
    return Section("Configuration", text=toml(settings), folded=True)


def _when(stamp: str) -> str:
    return stamp.replace("T", " ")
