"""run.json: what a training run did, rank by rank, beside what a dry run of it says it should. For `pmm3d report`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from ... import __version__
from ...comm import Entry, Grid, Key, hosts, mpi_name
from ...errors import check_regular
from ...io.disk import replace_file
from ...layout import itemsize
from ...model import machine
from ...model.environment import job_id
from ...product import DistMatrix
from ...text import spans
from ..layers import MLP, Module
from ..tensor import Tensor
from .best_effort import attempt
from .rehearsal import Model, settle
from .run import Run
from .run_log import logger

FORMAT = 1
NAME = "run.json"
PATIENCE = 5.0
"""Seconds for what is under way to come to its end."""
DIGITS = 6
MOST_EVENTS = 1000
MOST_LINES = 400
"""Of the network as a tree."""
FIGURES = ("calls", "sent", "received", "waited")
COLUMNS = ("seconds", "saving", "off_core", "peak_memory")
Document = dict[str, Any]


class RunRecord:
    """Written by rank 0 at the start of a run, with each checkpoint and at the end, as a whole each time.

    It covers the run from its latest start on; of earlier starts in the folder the totals are kept (`starts`). Times
    are seconds, sizes bytes; lists have one number a rank.

    resumed_from   the checkpoint from which the run goes on, or None
    retired        those of the branch that was left for it
    """

    def __init__(self, run: Run, folder: Path):
        self._run, self._grid, self._path = run, run.grid, folder / NAME
        self.resumed_from: str | None = None
        self._begun, self._saving = 0.0, 0.0
        self._before: dict[Key, Entry] = {}
        self._document: Document = {}
        self._warned = False
        self.retired: list[str] = []
        self._model = Model(run.state.network, run.state.optimizer, run.recipe.loss, bool(run.recipe.clip),
                            run.recipe.metrics, run.state.scale is not None)

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """As a context, the run: from its beginning on counts, and its end is recorded. Collective."""
        self._begin()
        try:
            yield
        except Exception as error:
            self._event("failed", f"{type(error).__name__}: {error}")
            if self._grid.rank == 0:
                self._store("failed")
            raise
        self._write("finished" if self._run.done else "ended by a signal")

    def _begin(self) -> None:
        run, grid = self._run, self._grid
        run.state.network.loaded()  # what was gathered before would not be moved again, unlike in the model
        blas = machine.blas_of(run.state.network.parameters()[0].library)
        nodes, devices = hosts(grid.comm, map(grid.host_of, range(grid.size)), blas.threads), grid.devices()
        self._before = {key: Entry(**asdict(entry)) for key, entry in grid.ledger.entries.items()}
        self._begun, self._saving = time.perf_counter(), 0.0
        if grid.rank == 0:
            starts, events = _earlier(self._path) if run.step else ([], [])
            start = {"began": _now(), "state": "running", "resumed": self.resumed_from, "from_step": run.step,
                     "ranks": grid.size, "hosts": len(nodes), "grid": grid.shape._asdict(), "job": job_id()}
            if run.auto is not None:
                start["auto"] = run.auto.document()
            self._document = {
                "format": FORMAT, "folder": str(self._path.parent.absolute()), "job": job_id(), "command": sys.argv,
                "program": _program(blas), "grid": grid.shape._asdict(),
                "hosts": [{"name": host.name, "ranks": spans(host.ranks), "cores": host.cores} for host in nodes],
                **_device_facts(grid, devices),
                "network": _network(run.state.network), "settings": run.settings,
                "starts": [*starts, start], "events": events,
            }
            what = "resumed" if self.resumed_from else "started"
            self._event(what, f"{self.resumed_from or 'anew'}, on {grid.size} ranks, grid {grid.shape}")
            if self.retired:
                self._event("retired", ", ".join(self.retired))
        self._write("running")

    def saved(self, path: Path, seconds: float) -> None:
        """A checkpoint is on the disk, for which the run waited so many seconds. Collective."""
        if self._begun:
            self._saving += seconds
            self._event("checkpoint", str(path), seconds=round(seconds, DIGITS))
            self._write("running")

    def _write(self, state: str) -> None:
        """Gather every rank's figures and write them. Collective."""
        if state != "running":
            self._event(state, f"after {self._run.passes.steps} steps")
        drain(self._grid)
        own: list[Document] = []
        attempt(f"{self._path} lacks this rank's figures", lambda: own.append(self._own_figures()))
        ranks = self._grid.comm.gather(own)
        if ranks is not None:
            attempt(f"{self._path} could not be brought up to date",
                    lambda: self._merge([rank for (rank,) in ranks]))
            self._store(state)

    def _event(self, what: str, text: str, **figures: float) -> None:
        if self._grid.rank == 0:
            events = self._document["events"]
            events.append({"when": _now(), "step": self._run.step, "what": what, "text": text, **figures})
            del events[:-MOST_EVENTS]

    def _own_figures(self) -> Document:
        """This rank's share of the record."""
        computed: dict[str, float] = {}
        off_core, entries = 0.0, {}
        for key, entry in self._grid.ledger.entries.items():
            old = self._before.get(key, Entry())
            if entry.computed > old.computed:
                computed[key.operation] = computed.get(key.operation, 0.0) + entry.computed - old.computed
                off_core += entry.off_core - old.off_core
            figures = [getattr(entry, name) - getattr(old, name) for name in FIGURES]
            if (key.axis or figures[-1]) and any(figures):
                entries[tuple(key)] = figures
        moved = self._model.volume(self._run.passes)
        return {"seconds": time.perf_counter() - self._begun, "saving": self._saving, "computed": computed,
                "off_core": off_core, "peak_memory": machine.peak_memory(), "arrays": _arrays(self._run),
                "entries": entries, "problem": self._model.problem,
                "model": {tuple(key): (entry.sent, entry.received) for key, entry in moved.items()}}

    def _merge(self, ranks: list[Document]) -> None:
        """The ranks' shares as columns, and sums of them into the latest start."""
        run, document = self._run, self._document
        columns = {name: [_rounded(rank[name]) for rank in ranks] for name in COLUMNS}
        operations = dict.fromkeys(name for rank in ranks for name in rank["computed"])
        keys = dict.fromkeys(key for rank in ranks for key in (*rank["entries"], *rank["model"]))
        problem = next((rank["problem"] for rank in ranks if rank["problem"]), "")
        document.update({
            "written": _now(), "step": run.step, "epoch": run.loader.epoch,
            "epochs": run.recipe.epochs, "steps": run.recipe.steps,
            "loss_scale": None if run.state.scale is None else run.state.scale.state(),
            "figures": run.figures, "passes": run.passes.summary(), "modelled": not problem, "not_modelled": problem,
            "ranks": {**columns,
                      "computed": {name: [_rounded(rank["computed"].get(name, 0.0)) for rank in ranks]
                                   for name in operations},
                      "waited": [_rounded(sum(entry[3] for entry in rank["entries"].values())) for rank in ranks]},
            "moved": [_moved(key, ranks) for key in keys],
            "memory": {"held": {name: [rank["arrays"][name] for rank in ranks] for name in ranks[0]["arrays"]},
                       "predicted": self._predicted_memory()},
        })
        document["starts"][-1].update({
            "written": document["written"], "to_step": run.step, "steps": run.passes.steps,
            "seconds": max(columns["seconds"]),
            "computed": _rounded(sum(sum(rank["computed"].values()) for rank in ranks)),
            "waited": _rounded(sum(document["ranks"]["waited"])),
            **{name: sum(entry[index] for rank in ranks for entry in rank["entries"].values())
               for index, name in ((1, "sent"), (2, "received"))},
        })

    def _predicted_memory(self) -> Document:
        """Part -> bytes of this rank; empty where there is no telling, and before the first step."""
        parts = self._model.memory()
        return {"parts": parts} if parts else {}

    def _store(self, state: str) -> None:
        """A record that cannot be written is no reason to end a training."""
        self._document["state"] = self._document["starts"][-1]["state"] = state
        try:
            replace_file(self._path, json.dumps(self._document).encode() + b"\n")
        except (OSError, MemoryError) as error:
            if not self._warned:
                logger.warning(f"{self._path} could not be written: {error}")
            self._warned = True


def drain(grid: Grid) -> None:
    """Wait for what is under way, but not for ever. To be called by all ranks."""
    if grid.dry_run is not None:
        settle(grid)
    deadline = time.monotonic() + PATIENCE
    while not grid.engine.idle() and time.monotonic() < deadline:
        grid.engine.poll()
        time.sleep(1e-4)


def _earlier(path: Path) -> tuple[list[Document], list[Document]]:
    """The starts and events of a record that is there; a start that did not say how it ended was killed."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        check_regular(path)
        document = json.loads(path.read_text())
        starts, events = list(document["starts"]), list(document["events"])
        for start in starts:
            start["state"] = "broke off" if start["state"] == "running" else start["state"]
        return starts, events
    return [], []


def _program(blas: machine.Blas) -> Document:
    return {"pmm3d": __version__, "python": sys.version.split()[0], "mpi": mpi_name(),
            "blas": f"{blas.name} {blas.version}", "kernel": blas.kernel, "threads": blas.threads,
            "cpu": machine.cpu().name}


def _device_facts(grid: Grid, devices: list[Document]) -> Document:
    """Where ranks have devices: which, and how their memory travels."""
    if all(row["device"] is None for row in devices):
        return {}
    return {"devices": devices, "transport": grid.transport.why}


def _network(network: Module) -> Document:
    first = network.parameters()[0]
    described = {"kind": type(network).__name__, "parameters": network.size, "dtype": first.dtype,
                 "precision": asdict(first.precision),
                 "library": first.library.name, "tree": _shortened(repr(network))}
    if type(network) is MLP:
        shapes = [parameter.shape for parameter in network.parameters() if not parameter.is_vector]
        described["sizes"] = [shapes[0][0], *(cols for _, cols in shapes)]
    return described


def _shortened(tree: str) -> str:
    """The first and the last lines of a tree that is long."""
    lines, half = tree.splitlines(), MOST_LINES // 2
    if len(lines) > MOST_LINES:
        lines[half:-half] = [f"... {len(lines) - 2 * half:,} lines ..."]
    return "\n".join(lines)


def _moved(key: tuple[str, ...], ranks: list[Document]) -> Document:
    """One kind of collective: a list over the ranks for each figure. The model's only where there is one."""
    moved: Document = dict(zip(("axis", "phase", "operation"), key))
    for index, name in enumerate(FIGURES):
        moved[name] = [_rounded(rank["entries"].get(key, (0, 0, 0, 0.0))[index]) for rank in ranks]
    if any(rank["model"] for rank in ranks):
        for index, name in enumerate(("model_sent", "model_received")):
            moved[name] = [rank["model"].get(key, (0, 0))[index] for rank in ranks]
    return moved


def _arrays(run: Run) -> dict[str, int]:
    """Bytes of the arrays on this rank, without those that a loader reads into."""
    weights = run.state.network.parameters()
    states = ([*run.state.optimizer.matrices(run.state.network.named_parameters()).values()]
              if run.passes.number("step") else [])
    gradients = sum(weight.box.size * itemsize(weight.precision.gradient) for weight in weights
                    if weight.accumulated.array is not None)
    return {"weights": _nbytes(weights), "gradients": gradients, "state": _nbytes(states),
            "work": run.grid.workspace.allocated}


def _nbytes(matrices: Iterable[Tensor | DistMatrix]) -> int:
    return sum(matrix.box.size * itemsize(matrix.dtype) for matrix in matrices)


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
