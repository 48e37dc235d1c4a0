"""The page of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from math import isfinite
from statistics import median

from ...layout import GridShape
from ...text import MOST_HOSTS, blas_in_words, in_bytes, names_in_words, ranks_in_words
from .checkpoint_section import NEEDS, checkpoint_section
from .elements import Cell, Figure, Page, Section, Table, Tile
from .grid_drawing import grid_section, ranks_of
from .inputs import RunFiles
from .network_section import network_facts, network_section, settings_section
from .pipeline_section import pipeline_section
from .rank_sections import memory_section, rank_tiles, time_section, volume_section, wait_section
from .schema import Json
from .svg import Point, chart
from .words import in_seconds, number, percent

CURVES = (("samples_per_second", "Rows trained per second", "rows/s", False, True),
          ("waiting", "Share of the time that rank 0 waited", "", False, True),
          ("lr", "Learning rate", "", False, True),
          ("gradient_norm", "2-norm of the gradient before clipping", "", True, False),
          ("loss_scale", "Scale of the loss (float16)", "", True, False),
          ("skipped", "Steps skipped so far, whose gradient was not finite", "", False, True))
"""Of a step: name in metrics.jsonl, caption, unit, whether the scale is logarithmic, whether it begins at 0."""
STATES = {"finished": "good", "failed": "bad", "broke off": "bad"}
DISTRIBUTION = "Weights: rows over y, then z; columns over x. Rows of a batch: over data, then z."
AVERAGED = 12
"""A moving average is over so many values that they cut the curve into so many pieces."""
Makers = tuple[tuple[Callable[[Json], Section | None], set[str]], ...]
MOST_EVENTS = 40
"""A table that one screen shows; run.json has the others."""


def run_page(run: RunFiles, mtbf: float | None = None) -> Page:
    """All that is known of the run; what is not is left out, and the notes say so. mtbf: `checkpoint_section`."""
    record = run.record
    makers: Makers = (*SECTIONS, (partial(checkpoint_section, mtbf=mtbf), NEEDS), *LAST)
    missing = ["Nothing is known of checkpoints, so how often to write them (--mtbf) cannot be said."]
    notes = run.notes + missing * (mtbf is not None and not record.keys() >= NEEDS)
    sections = [_curves(run.metrics), *(make(record) for make, parts in makers if record.keys() >= parts)]
    return Page(run.path.absolute().name, "training run", _facts(run), _tiles(run),
                [section for section in sections if section is not None], notes)


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    record = run.record
    facts = [("folder", str(run.path.absolute()))]
    if starts := record.get("starts"):
        began = starts[-1]["began"]
        start = f", start {len(starts)}" if len(starts) > 1 else ""
        facts.append(("when", f"{_when(began)} to {_when(record.get('written', began))}{start}"))
    if record.get("job"):
        facts.append(("job", record["job"]))
    facts += [*_place(record), *network_facts(record)]
    if program := record.get("program"):
        command = " ".join(record.get("command", ()))
        facts += [("BLAS", blas_in_words(program["blas"], program["kernel"], program["threads"])),
                  ("MPI", program["mpi"]), ("CPU", program["cpu"]),
                  ("program", f"pmm3d {program['pmm3d']}, Python {program['python']}: {command}")]
    return facts


def _place(record: Json) -> list[tuple[str, str]]:
    """The grid and its hosts."""
    hosts, facts = record.get("hosts", []), []
    if "grid" in record:
        grid = GridShape(**record["grid"])
        on = f" on {len(hosts)} host{'s' * (len(hosts) > 1)}" if hosts else ""
        facts.append(("grid", f"{grid}: {grid.size} ranks{on}"))
    if hosts:
        facts.append(("hosts", names_in_words((f"{host['name']} ({ranks_in_words(ranks_of(host))} on {host['cores']} "
                                               "cores)" for host in hosts), MOST_HOSTS)))
    if devices := record.get("devices"):
        facts.append(("devices", names_in_words(_devices(devices), MOST_HOSTS)))
    if "transport" in record:
        facts.append(("device memory", record["transport"]))
    return facts


def _devices(devices: list[Json]) -> list[str]:
    """Each device, and the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for row in devices:
        if "device" in row:
            ranks.setdefault(f"{row['name']} {row['pci']} of {row['host']}", []).append(row["rank"])
    return [f"{device} ({ranks_in_words(here)})" for device, here in ranks.items()]


def _tiles(run: RunFiles) -> list[Tile]:
    record, metrics, tiles = run.record, run.metrics, []
    if record:
        state = record.get("state", "running")
        note = f"epoch {record['epoch']}" + (f" of {record['epochs']}" if "epochs" in record else "") \
            if "epoch" in record else ""
        if state == "running" and run.owner:
            note += f"; the lock names process {run.owner.get('pid')} on {run.owner.get('host')}"
        tiles.append(Tile("state", "not finished" if state == "running" else state, note, STATES.get(state, "")))
    steps = [line for line in metrics if "loss" in line]
    if steps:
        first, last = _number(steps[0]["loss"]), _number(steps[-1]["loss"])
        tiles.append(Tile("loss", number(last), f"{number(first)} at step {steps[0]['step']}",
                          "" if isfinite(last) else "bad"))
        tiles.append(Tile("steps", number(steps[-1]["step"])))
    if scale := record.get("loss_scale"):
        tiles.append(Tile("skipped steps", number(scale["skipped"]), f"loss scale {number(scale['value'])}"))
    validated: Json = next((line["validation"] for line in reversed(metrics) if line.get("validation")), {})
    tiles += [Tile(f"validation {name}", number(_number(value))) for name, value in validated.items()]
    rates = [line["samples_per_second"] for line in steps[len(steps) // 2 :] if line.get("samples_per_second")]
    if rates:
        tiles.append(Tile("rows per second", number(median(rates)), "median of the later half"))
    return tiles + (rank_tiles(record) if record.keys() >= {"ranks", "moved", "grid"} else [])


def _curves(metrics: list[Json]) -> Section | None:
    steps = [line for line in metrics if "loss" in line]
    validated = [{"step": line["step"], **line["validation"]} for line in metrics
                 if isinstance(line.get("validation"), dict)]
    losses = {"training": _points(steps, "loss")} | ({"validation": _points(validated, "loss")} if validated else {})
    losses |= _smoothed(losses["training"])
    measures = dict.fromkeys(name for line in validated for name in line if name not in ("step", "loss"))
    figures = [_figure("Loss", "loss", losses, log=True),
               *(_figure(f"Validation: {name}", name, {name: _points(validated, name)}) for name in measures),
               *(_figure(caption, caption, {caption: _points(steps, name)}, unit, log, zero)
                 for name, caption, unit, log, zero in CURVES)]
    drawn = [figure for figure in figures if figure.drawing]
    return Section("Curves", figures=drawn) if drawn else None


def _smoothed(points: list[Point]) -> dict[str, list[Point]]:
    """The mean of each value and those before it, under what it is called; empty where there are few."""
    width = len(points) // AVERAGED
    if width < 2:
        return {}
    finite = [(step, value) for step, value in points if isfinite(value)]
    sums = [0.0, *accumulate(value for _, value in finite)]
    means = [(step, (sums[index + 1] - sums[index + 1 - width]) / width)
             for index, (step, _) in enumerate(finite) if index + 1 >= width]
    return {f"training, mean of {width} values": means}


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
               str(GridShape(**start["grid"])), in_seconds(start["seconds"]),
               percent(start["waited"] / max(1e-9, start["seconds"] * start["ranks"])),
               in_bytes(start["received"]), start.get("job") or "–") for start in record["starts"]]
    events = [(_when(event["when"]), number(event.get("step")), event["what"],
               event["text"] + (f" ({in_seconds(event['seconds'])})" if "seconds" in event else ""))
              for event in record.get("events", ())]
    caption = f"The last {MOST_EVENTS} of {len(events)} events" if len(events) > MOST_EVENTS else "Events"
    head = ("began", "state", ">steps", ">from", ">to", ">ranks", "grid", ">time", ">waited", ">moved by all", "job")
    return Section("Events", "Figures of ranks on this page are of the last start only." if len(starts) > 1 else "",
                   tables=[Table(head, starts, "Starts"),
                           Table(("when", ">step", "what", ""), events[-MOST_EVENTS:], caption)])


def _grid(record: Json) -> Section:
    return grid_section(GridShape(**record["grid"]), record.get("hosts", []), DISTRIBUTION)


def _when(stamp: str) -> str:
    return stamp.replace("T", " ")


SECTIONS: Makers = (
    (network_section, {"network"}), (pipeline_section, {"pipeline"}), (time_section, {"ranks", "moved", "grid"}),
    (volume_section, {"ranks", "moved", "passes"}), (wait_section, {"ranks", "moved"}),
    (memory_section, {"ranks", "memory"}), (_grid, {"grid"}))
"""In order; what each needs of the record."""
LAST: Makers = ((_history, {"starts"}), (settings_section, {"settings"}))
"""After that about checkpoints."""
