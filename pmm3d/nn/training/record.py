"""Writer of run.json, the record of a training run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from ... import __version__
from ...comm import Entry, Grid, Key, hosts, mpi_name
from ...errors import check_regular
from ...io.disk import replace_file
from ...layout import PIPE, itemsize
from ...model import machine
from ...model.environment import job_id
from ...product import DistMatrix
from ...text import counted, spans
from ..containers import MLP
from ..dry import finish_all
from ..memory_trace import MemoryTrace
from ..module import Module
from ..pipeline.measured import Acted, described
from ..pipeline.network import Pipeline
from ..tensor import Tensor
from . import run_file as schema
from .log import logger
from .run_file import Event, RunFile, Start

RECORD = "run.json"
PATIENCE = 5.0
"""Largest number of seconds to wait for collectives that are under way."""
FIGURES = ("calls", "sent", "received", "waited")
COLUMNS = ("seconds", "saving", "off_core", "peak_memory")
Document = dict[str, Any]


class RunRecord:
    """Record of the work of each rank, for `pmm3d report`. Rank 0 writes it at the start and at the end of a run, and
    with each checkpoint. Figures of ranks are for the latest start; earlier starts have totals.

    resumed_from   the checkpoint from which the run continues;   retired   later checkpoints
    """

    def __init__(self, run: Any, folder: Path):
        self._run, self._grid, self._path = run, run.grid, folder / RECORD
        self.resumed_from: str | None = None
        self.retired: list[str] = []
        self._begun, self._saving = 0.0, 0.0
        self._before: dict[Key, Entry] = {}
        self._parts_before: dict[str, float] = {}
        self._file = RunFile()
        self._warned = False

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """Context of the run, which records start and end. Collective."""
        self._begin()
        try:
            yield
        except Exception as error:
            self._event("failed", f"{type(error).__name__}: {error}")
            self._store("failed")
            raise
        state = "finished" if self._run.done else "ended by a signal"
        self._event(state, f"after {counted(self._run.counts['steps'], 'step')}")
        self._write(state)

    def _begin(self) -> None:
        run, grid = self._run, self._grid
        blas = machine.blas_of(run.state.network.parameters()[0].library)
        nodes, devices = hosts(grid.comm, map(grid._host_of, range(grid.size)), blas.threads), grid.devices()
        self._before = {key: Entry(**asdict(entry)) for key, entry in grid.ledger.entries.items()}
        self._parts_before = dict(grid.ledger.parts)
        self._begun, self._saving = time.perf_counter(), 0.0
        if grid.rank == 0:
            starts, events, memory_step = _earlier(self._path) if run.step else ([], [], None)
            start = Start(
                began=_now(),
                state="running",
                resumed=self.resumed_from,
                from_step=run.step,
                ranks=grid.size,
                hosts=len(nodes),
                grid=grid.shape._asdict(),
                job=job_id(),
                auto=None if run.auto is None else run.auto.document(),
            )
            program = schema.Program(
                pmm3d=__version__,
                python=sys.version.split()[0],
                mpi=mpi_name(),
                kernel=blas.kernel,
                blas=f"{blas.name} {blas.version}",
                threads=blas.threads,
                cpu=machine.cpu().name,
            )
            self._file = RunFile(
                folder=str(self._path.parent.absolute()),
                job=start.job,
                command=sys.argv,
                program=program,
                grid=start.grid,
                network=_network(run.state.network),
                starts=[*starts, start],
                events=events,
                memory_step=memory_step,
                settings=json.loads(json.dumps(run.settings, default=str)),
                **device_facts(grid, devices),
                hosts=[schema.Host(name=host.name, ranks=spans(host.ranks), cores=host.cores) for host in nodes],
            )
            what = "resumed" if self.resumed_from else "started"
            self._event(what, f"{self.resumed_from or 'anew'}, on {counted(grid.size, 'rank')}, grid {grid.shape}")
            if self.retired:
                self._event("retired", ", ".join(self.retired))
        self._write("running")

    def saved(self, path: Path, seconds: float) -> None:
        """Record a checkpoint that is on the disk. Collective."""
        if self._begun:
            self._saving += seconds
            self._event("checkpoint", str(path), step=self._run.saved, seconds=seconds)
            self._write("running")

    def _event(self, what: str, text: str, step: int | None = None, seconds: float | None = None) -> None:
        """Add an event. step: default the current one."""
        if self._file.events is not None:
            self._file.events.append(
                Event(when=_now(), step=self._run.step if step is None else step, what=what, text=text, seconds=seconds)
            )

    def _write(self, state: str) -> None:
        """Gather the figures of all ranks, and write them. Collective."""
        drain(self._grid)
        ranks = self._grid.comm.gather(self._own_figures())
        if ranks is not None:
            self._merge(ranks)
            self._store(state)

    def _own_figures(self) -> Document:
        """Return this rank's part of the file."""
        computed: dict[str, float] = {}
        off_core, moved = 0.0, {}
        for key, entry in self._grid.ledger.entries.items():
            old = self._before.get(key, Entry())
            if entry.computed > old.computed:
                computed[key.operation] = computed.get(key.operation, 0.0) + entry.computed - old.computed
                off_core += max(0.0, entry.off_core - old.off_core)
            figures = [getattr(entry, name) - getattr(old, name) for name in FIGURES]
            if (key.axis or figures[-1]) and any(figures):
                moved[tuple(key)] = figures
        other = {
            name: max(0.0, spent - self._parts_before.get(name, 0.0)) for name, spent in self._grid.ledger.parts.items()
        }
        return {
            "seconds": time.perf_counter() - self._begun,
            "saving": self._saving,
            "computed": computed,
            "other": other,
            "off_core": off_core,
            "peak_memory": machine.peak_memory(),
            "held": _held(self._run),
            "moved": moved,
            "actions": _actions(self._grid),
        }

    def _merge(self, ranks: list[Document]) -> None:
        """Update the file from the parts of the ranks."""
        run, file, none = self._run, self._file, [0, 0, 0, 0.0]
        file.moved = [
            schema.Moved.model_validate(
                {
                    **dict(zip(("axis", "phase", "operation"), key)),
                    **{
                        name: [rank["moved"].get(key, none)[index] for rank in ranks]
                        for index, name in enumerate(FIGURES)
                    },
                }
            )
            for key in dict.fromkeys(key for rank in ranks for key in rank["moved"])
        ]
        file.ranks = columns = schema.Columns.model_validate(
            {
                "waited": [sum(figures[3] for figures in rank["moved"].values()) for rank in ranks],
                **{name: [rank[name] for rank in ranks] for name in COLUMNS},
                **{
                    kind: {
                        name: [rank[kind].get(name, 0.0) for rank in ranks]
                        for name in dict.fromkeys(name for rank in ranks for name in rank[kind])
                    }
                    for kind in ("computed", "other")
                },
            }
        )
        file.memory = schema.Memory(**{name: [rank["held"][name] for rank in ranks] for name in ranks[0]["held"]})
        step, trace = run.memory_trace or (0, None)
        if trace is not None and (file.memory_step is None or file.memory_step.step != step):
            file.memory_step = _memory_step(step, trace, run.predicted_trace())
        lines = [rank["actions"] for rank in ranks if rank["actions"]]
        if len(lines) > 1 and (pipeline := described(lines)):
            file.pipeline = schema.PipelineStep.model_validate(pipeline)
        file.written, file.step, file.epoch, file.epochs = _now(), run.step, run.loader.epoch, run.recipe.epochs
        file.steps, file.figures, file.passes = run.recipe.steps, run.figures, schema.Passes(**run.counts)
        file.loss_scale = None if run.state.scale is None else run.state.scale.state()
        if file.starts:
            start = file.starts[-1]
            start.written, start.to_step, start.steps = file.written, run.step, file.passes.steps
            start.seconds, start.waited = max(columns.seconds), sum(columns.waited)
            start.computed = sum(map(sum, columns.computed.values()), 0.0)
            start.sent, start.received = (
                sum(sum(getattr(entry, name)) for entry in file.moved) for name in ("sent", "received")
            )

    def _store(self, state: str) -> None:
        if not self._file.starts:  # not rank 0
            return
        self._file.state = self._file.starts[-1].state = state
        try:
            replace_file(self._path, json.dumps(self._file.model_dump(exclude_none=True)).encode() + b"\n")
        except (OSError, MemoryError) as error:
            if not self._warned:
                logger.warning(f"{self._path} could not be written: {error}")
            self._warned = True


def _actions(grid: Grid) -> list[Acted]:
    """Return the actions of the last step on the first rank of each stage; nothing on others."""
    first = grid.coords is not None and not any(grid.coords.without(PIPE))
    return list(grid.ledger.actions) if first else []


def drain(grid: Grid) -> None:
    """Wait for collectives that are under way, at most for `PATIENCE` seconds. Collective."""
    if grid.dry_run is not None:
        finish_all(grid)
    deadline = time.monotonic() + PATIENCE
    while not grid.engine.idle() and time.monotonic() < deadline:
        grid.engine.poll()
        time.sleep(1e-4)


def _earlier(path: Path) -> tuple[list[Start], list[Event], schema.MemoryStep | None]:
    """Return the starts, the events and the recorded step of an existing file. A start that is still "running" was
    killed. If the file cannot be read, warn."""
    try:
        check_regular(path)
        document = json.loads(path.read_text())
        starts, events = map(Start.model_validate, document["starts"]), map(Event.model_validate, document["events"])
        step = document.get("memory_step")
        return (
            [
                start.model_copy(update={"state": "broke off"}) if start.state == "running" else start
                for start in starts
            ],
            [*events],
            None if step is None else schema.MemoryStep.model_validate(step),
        )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning(f"{path} cannot be read ({type(error).__name__}), so the record begins with this start")
    return [], [], None


def device_facts(grid: Grid, devices: list[Document]) -> dict[str, Any]:
    """Return the devices of the ranks and the transport of their memory; an empty dict if there are no devices."""
    if all(row["device"] is None for row in devices):
        return {}
    return {"devices": [schema.Device(**row) for row in devices], "transport": grid.transport.why}


def _network(network: Module) -> schema.Network:
    first, uncut = network.parameters()[0], network.dry if isinstance(network, Pipeline) else network
    shapes = [parameter.shape for parameter in uncut.parameters() if not parameter.is_vector]
    return schema.Network(
        kind=type(uncut).__name__,
        parameters=uncut.size,
        dtype=first.dtype,
        tree=repr(uncut),
        precision=asdict(first.precision),
        library=first.library.name,
        sizes=[shapes[0][0], *(cols for _, cols in shapes)] if type(uncut) is MLP else [],
    )


def _held(run: Any) -> dict[str, int]:
    """Return the bytes of the arrays on this rank, without the loader's."""
    weights = run.state.network.parameters()
    gradients = sum(int(weight.grad_buffer.array.nbytes) for weight in weights if weight.grad_buffer.array is not None)
    return {
        "weights": _nbytes(weights),
        "gradients": gradients,
        "state": run.state.network.grid.ledger.memory.get("state", 0),
        "work": run.grid.workspace.allocated,
    }


def _memory_step(step: int, trace: MemoryTrace, predicted: MemoryTrace | None) -> schema.MemoryStep:
    measured = trace.document("time in ms", lambda seconds: 1e3 * seconds)
    return schema.MemoryStep(
        step=step,
        measured=schema.MemorySeries(**measured),
        predicted=None if predicted is None else schema.MemorySeries(**predicted.document("actions")),
    )


def _nbytes(matrices: Iterable[Tensor | DistMatrix]) -> int:
    return sum(matrix.box.size * itemsize(matrix.dtype) for matrix in matrices)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
