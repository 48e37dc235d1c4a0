"""The page of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median

from ...comm.words import MOST_HOSTS, in_bytes, names_in_words, ranks_in_words
from ...layout import GridShape
from .elements import Cell, Figure, Page, Section, Table, Tile
from .grid_drawing import grid_section, ranks_of
from .inputs import Json, RunFiles
from .rank_sections import memory_section, rank_tiles, time_section, volume_section, wait_section
from .svg import Point, chart
from .words import in_seconds, number, percent, toml

CURVES = (("samples_per_second", "Rows trained per second", "rows/s", False, True),
          ("waiting", "Share of the time that rank 0 waited", "", False, True),
          ("lr", "Learning rate", "", False, True),
          ("gradient_norm", "2-norm of the gradient before clipping", "", True, False))
"""Of a step: name in metrics.jsonl, caption, unit, whether the scale is logarithmic, whether it begins at 0."""
STATES = {"finished": "good", "failed": "bad", "broke off": "bad"}
DISTRIBUTION = "Weights: rows over y, then z; columns over x. Rows of a batch: over data, then z."
MOST_EVENTS = 40
"""A table that one screen shows; run.json has the others."""


def run_page(run: RunFiles) -> Page:
    """All that is known of the run; what is not is left out, and the notes say so."""
    record = run.record
    sections = [_curves(run.metrics)]
    if record.get("ranks"):
        sections += [time_section(record), volume_section(record), wait_section(record), memory_section(record)]
    if record:
        sections += [grid_section(GridShape(**record["grid"]), record["hosts"], DISTRIBUTION), _history(record),
                     _settings(record)]
    return Page(run.path.absolute().name, "training run", _facts(run), _tiles(run),
                [section for section in sections if section is not None], run.notes)


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    record = run.record
    facts = [("folder", str(run.path.absolute()))]
    if not record:
        return facts
    program, network, hosts, starts = record["program"], record["network"], record["hosts"], record["starts"]
    grid, began = GridShape(**record["grid"]), starts[-1]["began"]
    names = names_in_words((f"{host['name']} ({ranks_in_words(ranks_of(host))} on {host['cores']} cores)"
                            for host in hosts), MOST_HOSTS)
    kind = "-".join(map(str, network["sizes"])) if "sizes" in network else network["kind"]
    start = f", start {len(starts)}" if len(starts) > 1 else ""
    return [
        *facts, ("when", f"{_when(began)} to {_when(record.get('written', began))}{start}"),
        *([("job", record["job"])] if record["job"] else []),
        ("grid", f"{grid}: {grid.size} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"), ("hosts", names),
        ("network", f"{kind}, {network['parameters']:,} parameters, {network['dtype']}, {network['library']}"),
        ("BLAS", f"{program['blas']}, kernel {program['kernel']}, {program['threads']} thread(s) a rank"),
        ("MPI", program["mpi"]), ("CPU", program["cpu"]),
        ("program", f"pmm3d {program['pmm3d']}, Python {program['python']}: {' '.join(map(str, record['command']))}"),
    ]


def _tiles(run: RunFiles) -> list[Tile]:
    record, metrics, tiles = run.record, run.metrics, []
    if record:
        state = record.get("state", "running")
        note = f"epoch {record['epoch']} of {record['epochs']}" if "epoch" in record else ""
        if state == "running" and run.owner:
            note += f"; the lock names process {run.owner.get('pid')} on {run.owner.get('host')}"
        tiles.append(Tile("state", "not finished" if state == "running" else state, note, STATES.get(state, "")))
    steps = [line for line in metrics if "loss" in line]
    if steps:
        first, last = _number(steps[0]["loss"]), _number(steps[-1]["loss"])
        tiles.append(Tile("loss", number(last), f"{number(first)} at step {steps[0]['step']}",
                          "" if isfinite(last) else "bad"))
        tiles.append(Tile("steps", number(steps[-1]["step"])))
    validated: Json = next((line["validation"] for line in reversed(metrics) if "validation" in line), {})
    tiles += [Tile(f"validation {name}", number(_number(value))) for name, value in validated.items()]
    rates = [line["samples_per_second"] for line in steps[len(steps) // 2 :] if "samples_per_second" in line]
    if rates:
        tiles.append(Tile("rows per second", number(median(rates)), "median of the later half"))
    return tiles + (rank_tiles(record) if record.get("ranks") else [])


def _curves(metrics: list[Json]) -> Section | None:
    steps = [line for line in metrics if "loss" in line]
    validated = [{"step": line["step"], **line["validation"]} for line in metrics
                 if isinstance(line.get("validation"), dict)]
    losses = {"training": _points(steps, "loss")} | ({"validation": _points(validated, "loss")} if validated else {})
    measures = dict.fromkeys(name for line in validated for name in line if name not in ("step", "loss"))
    figures = [_figure("Loss", "loss", losses, log=True),
               *(_figure(f"Validation: {name}", name, {name: _points(validated, name)}) for name in measures),
               *(_figure(caption, caption, {caption: _points(steps, name)}, unit, log, zero)
                 for name, caption, unit, log, zero in CURVES)]
    drawn = [figure for figure in figures if figure.drawing]
    return Section("Curves", figures=drawn) if drawn else None


def _figure(caption: str, shows: str, series: Mapping[str, list[Point]], unit: str = "", log: bool = False,
            zero: bool = False) -> Figure:
    lost = sum(not isfinite(value) for points in series.values() for _, value in points)
    legend = [(f"series{index}", name) for index, name in enumerate(series)] if len(series) > 1 else []
    return Figure(chart(f"{shows} by step", series, unit, log, zero), legend,
                  caption + (f" ({lost} values are not finite and not drawn)" if lost else ""))


def _points(lines: Iterable[Json], name: str) -> list[Point]:
    return [(line["step"], _number(line[name])) for line in lines if name in line]


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _history(record: Json) -> Section:
    starts = [(_when(start["began"]), Cell(start["state"], STATES.get(start["state"], "")),
               *(number(start.get(name)) for name in ("steps", "from_step", "to_step", "ranks")),
               str(_shape(start["grid"])), in_seconds(start.get("seconds", 0.0)),
               percent(start.get("waited", 0.0) / max(1e-9, start.get("seconds", 0.0) * start["ranks"])),
               in_bytes(start.get("received", 0)), start["job"] or "–") for start in record["starts"]]
    events = [(_when(event["when"]), number(event["step"]), event["what"],
               event["text"] + (f" ({in_seconds(event['seconds'])})" if "seconds" in event else ""))
              for event in record["events"]]
    caption = f"The last {MOST_EVENTS} of {len(events)} events" if len(events) > MOST_EVENTS else "Events"
    head = ("began", "state", ">steps", ">from", ">to", ">ranks", "grid", ">time", ">waited", ">moved by all", "job")
    return Section("Events", "Figures of ranks on this page are of the last start only." if len(starts) > 1 else "",
                   tables=[Table(head, starts, "Starts"),
                           Table(("when", ">step", "what", ""), events[-MOST_EVENTS:], caption)])


def _shape(grid: Mapping[str, int] | list[int]) -> GridShape:
    """As run.json has it: sizes by axis; in starts of earlier versions four numbers."""
    return GridShape(**grid) if isinstance(grid, Mapping) else GridShape(*grid)


def _settings(record: Json) -> Section | None:
    settings = record.get("settings") or {}
    known = settings and all(isinstance(values, dict) for values in settings.values())
    return Section("Configuration", text=toml(settings)) if known else None


def _when(stamp: str) -> str:
    return stamp.replace("T", " ")
