"""The page of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import isfinite, nan, prod
from statistics import median

from ...layout import GridShape
from ...nn.training.run_file import RunFile
from ...text import counted, in_bytes, in_time, number, percent
from .drawings import Point, curves, expert_map, grid_map, replicas_drawn
from .elements import Cell, Figure, Page, Section, Table, Tile
from .facts import run_facts, settings_section, when
from .inputs import Line, RunFiles
from .rank_sections import collectives_section, memory_section, pipeline_section, rank_tiles, time_section

CURVES = (
    ("samples_per_second", "Rows trained per second", "rows/s", False, True),
    ("waiting", "Share of the time that rank 0 waited", "", False, True),
    ("lr", "Learning rate", "", False, True),
    ("gradient_norm", "2-norm of the gradient before clipping", "", True, False),
    ("loss_scale", "Scale of the loss (float16)", "", True, False),
    ("skipped", "Steps skipped so far, whose gradient was not finite", "", False, True),
    ("router_loss", "Losses of the routers, which the loss does not contain", "", False, True),
    ("imbalance", "Tokens of the busiest expert over the mean, before capacity", "", False, False),
    ("dropped", "Share of tokens' experts that capacity dropped", "", False, True),
)
"""Figures of a step: name in metrics.jsonl, caption, unit, `log` and `zero` of `curves`."""
EXPERTS = "Tokens of each expert over the mean, before capacity, by router"
STATES = {"finished": "good", "failed": "bad", "broke off": "bad"}
DISTRIBUTION = "Weights: rows over y, then z; columns over x. Rows of a batch: over data, then z."
AVERAGED = 12
"""The width of the moving average is the number of points divided by this number."""
MOST_EVENTS = 40
"""Largest number of events in the table, which fits one screen. run.json contains all events."""


def run_page(run: RunFiles) -> Page:
    """Return the page of the known parts of a run. Notes name the missing parts."""
    record = run.record or RunFile()
    sections = [_curves(run.metrics), *_sections(record)]
    return Page(
        run.path.absolute().name,
        "training run",
        [("folder", str(run.path.absolute())), *run_facts(record)],
        _tiles(run),
        [section for section in sections if section is not None],
        run.notes,
    )


def _sections(record: RunFile) -> Iterator[Section | None]:
    """Yield the sections below the curves."""
    ranks, moved = record.ranks, record.moved
    if record.network and record.network.tree:
        yield Section("Network", text=record.network.tree)
    if record.pipeline:
        yield pipeline_section(record.pipeline)
    if ranks and moved is not None:
        yield time_section(ranks, moved)
        yield collectives_section(ranks, moved, record.passes.steps if record.passes else 0)
    if ranks and record.memory:
        yield memory_section(ranks, dict(record.memory), record.memory_step)
    if record.grid:
        shape = GridShape(**record.grid)
        replicas, drawn = prod(shape[3:]), replicas_drawn(shape)
        lead = DISTRIBUTION
        if drawn < replicas:
            lead += f" {drawn} of {replicas} replicas are drawn." if drawn else " Too many ranks to draw."
        drawing = grid_map(shape, [(host.name, host.ranks) for host in record.hosts or ()])
        yield Section("Grid", lead, [Figure(drawing)] if drawing else [])
    if record.starts:
        yield _history(record)
    if record.settings:
        yield settings_section(record.settings)


def _tiles(run: RunFiles) -> list[Tile]:
    record, metrics, tiles = run.record, run.metrics, []
    if record:
        note = "" if record.epoch is None else f"epoch {record.epoch}"
        note += "" if record.epoch is None or record.epochs is None else f" of {record.epochs}"
        if record.state == "running" and run.owner:
            note += f"; the lock names process {run.owner.get('pid')} on {run.owner.get('host')}"
        tiles.append(
            Tile(
                "state",
                "not finished" if record.state == "running" else record.state,
                note,
                STATES.get(record.state, ""),
            )
        )
    steps = _steps(metrics)
    if steps:
        first, last = _finite(steps[0].loss), _finite(steps[-1].loss)
        tiles.append(
            Tile("loss", number(last), f"{number(first)} at step {steps[0].step}", "" if isfinite(last) else "bad")
        )
        tiles.append(Tile("steps", number(steps[-1].step)))
    if record and (scale := record.loss_scale) and {"skipped", "value"} <= scale.keys():
        tiles.append(Tile("skipped steps", number(scale["skipped"]), f"loss scale {number(scale['value'])}"))
    validated = next((line.validation for line in reversed(metrics) if line.validation), {})
    tiles += [Tile(f"validation {name}", number(_finite(value))) for name, value in validated.items()]
    rates = [line.samples_per_second for line in steps[len(steps) // 2 :] if line.samples_per_second]
    if rates:
        tiles.append(Tile("rows per second", number(median(rates)), "median of the later half"))
    if record and record.ranks and record.moved is not None:
        tiles += rank_tiles(record.ranks, record.moved)
    return tiles


def _steps(metrics: Iterable[Line]) -> list[Line]:
    return [line for line in metrics if "loss" in line.model_fields_set]


def _curves(metrics: list[Line]) -> Section | None:
    steps = _steps(metrics)
    validated = [(line.step, line.validation) for line in metrics if line.validation is not None]
    loss: list[Point] = [(line.step, _finite(line.loss)) for line in steps]
    measures: dict[str, list[Point]] = {}
    for step, values in validated:
        for name, value in values.items():
            measures.setdefault(name, []).append((step, _finite(value)))
    losses = {"training": loss} | ({"validation": measures.pop("loss")} if "loss" in measures else {}) | _smoothed(loss)
    figures = [
        _figure("Loss", losses, log=True),
        *(_figure(f"Validation: {name}", {name: points}) for name, points in measures.items()),
        *(
            _figure(
                caption,
                {
                    caption: [
                        (line.step, _finite(getattr(line, name))) for line in steps if name in line.model_fields_set
                    ]
                },
                unit,
                log,
                zero,
            )
            for name, caption, unit, log, zero in CURVES
        ),
        Figure(expert_map([(line.step, line.experts) for line in steps if line.experts]), EXPERTS),
    ]
    drawn = [figure for figure in figures if figure.drawing]
    return Section("Curves", figures=drawn) if drawn else None


def _smoothed(points: list[Point]) -> dict[str, list[Point]]:
    """Return the moving average by its name; {} if there are few points."""
    width = len(points) // AVERAGED
    if width < 2:
        return {}
    finite = [(step, value) for step, value in points if isfinite(value)]
    sums = [0.0, *accumulate(value for _, value in finite)]
    means = [
        (step, (sums[index + 1] - sums[index + 1 - width]) / width)
        for index, (step, _) in enumerate(finite)
        if index + 1 >= width
    ]
    return {f"training, mean of {width} values": means} if means else {}


def _figure(
    caption: str, series: Mapping[str, list[Point]], unit: str = "", log: bool = False, zero: bool = False
) -> Figure:
    lost = sum(not isfinite(value) for points in series.values() for _, value in points)
    note = f" ({counted(lost, 'value')} not drawn, because not finite)" if lost else ""
    return Figure(curves(series, unit, log, zero), caption + note)


def _finite(value: float | None) -> float:
    return nan if value is None else value


def _history(record: RunFile) -> Section:
    """Return tables of the starts and events of the run."""
    starts, events = record.starts or [], record.events or []
    of_starts = [
        (
            when(start.began),
            Cell(start.state, STATES.get(start.state, "")),
            number(start.steps),
            number(start.from_step),
            number(start.to_step),
            number(start.ranks),
            str(GridShape(**start.grid)),
            in_time(start.seconds),
            percent(start.waited / max(1e-9, start.seconds * start.ranks)),
            in_bytes(start.received),
            start.job or "–",
        )
        for start in starts
    ]
    of_events = [
        (
            when(event.when),
            number(event.step),
            event.what,
            event.text + (f" ({in_time(event.seconds)})" if event.seconds is not None else ""),
        )
        for event in events
    ]
    lead = "The figures of ranks on this page cover the last start only. " if len(starts) > 1 else ""
    if written := [event.seconds for event in events if event.what == "checkpoint" and event.seconds is not None]:
        ranks = starts[-1].ranks if starts else "RANKS"
        lead += (
            f"The run waited {in_time(median(written))} for a checkpoint, the median of {len(written)}. To print "
            f"how often to write a checkpoint: pmm3d plan train CONFIG --ranks {ranks} --mtbf HOURS "
            f"--write-seconds {median(written):.3g}"
        )
    caption = f"The last {MOST_EVENTS} of {len(events)} events" if len(events) > MOST_EVENTS else "Events"
    head = ("began", "state", ">steps", ">from", ">to", ">ranks", "grid", ">time", ">waited", ">moved by all", "job")
    return Section(
        "Events",
        lead,
        tables=[
            Table(head, of_starts, "Starts"),
            Table(("when", ">step", "what", ""), of_events[-MOST_EVENTS:], caption),
        ],
    )
