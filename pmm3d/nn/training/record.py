"""run.json: what a training run did, rank by rank, beside what the formulas say it should. For `pmm3d report`."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import datetime

from ... import __version__
from ...comm.hosts import hosts, mpi_name
from ...comm.ledger import Entry
from ...comm.words import spans
from ...layout import itemsize
from ...model import machine
from ...model.environment import job_id
from ..layers import MLP, Dropout, LayerNorm, Recompute
from ..memory import KEPT, MLPMemory
from ..volume import MLPVolume

FORMAT = 1
NAME = "run.json"
PATIENCE = 5.0
DIGITS = 6
MOST_EVENTS = 1000
FIGURES = ("calls", "sent", "received", "waited")


class RunRecord:
    """Written by rank 0 at the start of a run, with each checkpoint and at the end, as a whole each time.

    It covers the run from its latest start on; of earlier starts in the folder the totals are kept (`starts`). Times
    are seconds, sizes bytes; lists have one number a rank.

    trainer   whose run it is; it has a log
    """

    def __init__(self, trainer):
        self._trainer, self._grid, self._path = trainer, trainer.grid, trainer.log.folder / NAME
        self._begun, self._before, self._saving = None, {}, 0.0
        self._document: dict = {}
        self._from, self._warned = None, False

    def resumed(self, path) -> None:
        """The run goes on from a checkpoint."""
        self._from = str(path)

    def begin(self) -> None:
        """From here on counts. Collective."""
        trainer, grid = self._trainer, self._grid
        blas = machine.loaded_blas()
        nodes = hosts(grid.comm, blas.threads)
        self._before = {key: Entry(**asdict(entry)) for key, entry in grid.ledger.entries.items()}
        self._begun, self._saving = time.perf_counter(), 0.0
        if grid.rank == 0:
            earlier = _earlier(self._path) if trainer.step else {"starts": [], "events": []}
            start = {"began": _now(), "state": "running", "resumed": self._from, "from_step": trainer.step,
                     "ranks": grid.size, "hosts": len(nodes), "grid": list(grid.shape), "job": job_id()}
            self._document = {
                "format": FORMAT, "folder": str(trainer.log.folder.absolute()), "job": job_id(), "command": sys.argv,
                "program": _program(blas), "grid": grid.shape._asdict(),
                "hosts": [{"name": host.name, "ranks": spans(host.ranks), "cores": host.cores} for host in nodes],
                "network": _network(trainer.network), "settings": trainer.settings,
                "starts": [*earlier["starts"], start], "events": earlier["events"],
            }
            what = "resumed" if self._from else "started"
            self._event(what, f"{self._from or 'anew'}, on {grid.size} ranks, grid {grid.shape}")
        self.write("running")

    def saved(self, path, seconds: float) -> None:
        """A checkpoint was written, in so many seconds. Collective."""
        if self._begun is not None:
            self._saving += seconds
            self._event("checkpoint", str(path), seconds=round(seconds, DIGITS))
            self.write("running")

    def write(self, state: str) -> None:
        """Gather every rank's figures and write them. Collective."""
        if state != "running":
            self._event(state, f"after {self._trainer.passes.steps} steps")
        drain(self._grid)
        told = self._grid.comm.gather(self._mine())
        if self._grid.rank == 0:
            self._put(told)
            self._store(state)

    def broke_off(self, error: Exception) -> None:
        """The run ends with an error; rank 0 adds that to what is there."""
        self._event("failed", f"{type(error).__name__}: {error}")
        if self._grid.rank == 0:
            self._store("failed")

    def _event(self, what: str, text: str, **figures) -> None:
        if self._grid.rank == 0:
            events = self._document["events"]
            events.append({"when": _now(), "step": self._trainer.step, "what": what, "text": text, **figures})
            del events[:-MOST_EVENTS]

    def _mine(self) -> dict:
        """This rank's share of the record."""
        trainer, ledger = self._trainer, self._grid.ledger
        entries, computed = {}, {}
        for key, entry in ledger.entries.items():
            old = self._before.get(key, Entry())
            if entry.computed > old.computed:
                computed[key.operation] = computed.get(key.operation, 0.0) + entry.computed - old.computed
            figures = [getattr(entry, name) - getattr(old, name) for name in FIGURES]
            if (key.axis or figures[-1]) and any(figures):
                entries[tuple(key)] = figures
        model = self._model()
        moved = model.training(trainer.passes) if model is not None else {}
        return {
            "seconds": time.perf_counter() - self._begun, "saving": self._saving, "computed": computed,
            "peak_memory": machine.peak_memory(), "arrays": _arrays(trainer), "entries": entries,
            "model": {tuple(key): (entry.sent, entry.received) for key, entry in moved.items()},
        }

    def _model(self) -> MLPVolume | None:
        trainer = self._trainer
        if not isinstance(trainer.loss, str):
            return None
        return MLPVolume.of(trainer.network, trainer.optimizer, trainer.loss, clip=bool(trainer.clip),
                            accumulate=trainer.accumulate)

    def _put(self, told: list[dict]) -> None:
        """The ranks' shares as columns, and sums of them into the latest start."""
        trainer, document = self._trainer, self._document
        column = lambda name: [_short(rank[name]) for rank in told]
        operations = dict.fromkeys(name for rank in told for name in rank["computed"])
        keys = dict.fromkeys(key for rank in told for key in (*rank["entries"], *rank["model"]))
        predicted = _predicted_memory(trainer)
        document.update({
            "written": _now(), "step": trainer.step, "epoch": trainer.loader.epoch, "epochs": trainer.epochs,
            "figures": trainer.figures, "passes": _passes(trainer.passes),
            "modelled": self._model() is not None,
            "ranks": {
                "seconds": column("seconds"), "saving": column("saving"), "peak_memory": column("peak_memory"),
                "computed": {name: [_short(rank["computed"].get(name, 0.0)) for rank in told] for name in operations},
                "waited": [_short(sum(entry[3] for entry in rank["entries"].values())) for rank in told],
            },
            "moved": [_moved(key, told) for key in keys],
            "memory": {"held": {name: [rank["arrays"][name] for rank in told] for name in told[0]["arrays"]},
                       "predicted": predicted},
        })
        document["starts"][-1].update({
            "written": document["written"], "to_step": trainer.step, "steps": trainer.passes.steps,
            "seconds": max(column("seconds")), "computed": _short(sum(sum(rank["computed"].values()) for rank in told)),
            "waited": _short(sum(document["ranks"]["waited"])),
            **{name: sum(entry[index] for rank in told for entry in rank["entries"].values())
               for index, name in ((1, "sent"), (2, "received"))},
        })

    def _store(self, state: str) -> None:
        """A record that cannot be written is no reason to end a training."""
        self._document["state"] = self._document["starts"][-1]["state"] = state
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self._document) + "\n")
            os.replace(temporary, self._path)
        except OSError as error:
            if not self._warned:
                self._trainer.log.say(f"pmm3d: warning: {self._path} could not be written: {error.strerror}")
            self._warned = True


def drain(grid) -> None:
    """Wait for what is under way, but not for ever. To be called by all ranks."""
    deadline = time.monotonic() + PATIENCE
    while not grid.engine.idle() and time.monotonic() < deadline:
        grid.engine.poll()
        time.sleep(1e-4)


def _earlier(path) -> dict:
    """The starts and events of a record that is there; a start that did not say how it ended was killed."""
    try:
        found = json.loads(path.read_text())
        earlier = {"starts": list(found["starts"]), "events": list(found["events"])}
        for start in earlier["starts"]:
            start["state"] = "broke off" if start["state"] == "running" else start["state"]
        return earlier
    except (OSError, ValueError, KeyError, TypeError):
        return {"starts": [], "events": []}


def _program(blas: machine.Blas) -> dict:
    return {"pmm3d": __version__, "python": sys.version.split()[0], "mpi": mpi_name(),
            "blas": f"{blas.name} {blas.version}", "kernel": blas.kernel, "threads": blas.threads,
            "cpu": machine.cpu().name}


def _network(network) -> dict:
    first = network.parameters()[0]
    found = {"kind": type(network).__name__, "parameters": network.size, "dtype": first.dtype,
             "library": first.library.name}
    if type(network) is MLP:
        shapes = [parameter.shape for parameter in network.parameters() if not parameter.is_vector]
        found["sizes"] = [shapes[0][0], *(cols for _, cols in shapes)]
    return found


def _moved(key: tuple, told: list[dict]) -> dict:
    """One kind of collective: a list over the ranks for each figure. The model's only where there is one."""
    found = dict(zip(("axis", "phase", "operation"), key))
    for index, name in enumerate(FIGURES):
        found[name] = [_short(rank["entries"].get(key, (0, 0, 0, 0.0))[index]) for rank in told]
    if any(rank["model"] for rank in told):
        for index, name in enumerate(("model_sent", "model_received")):
            found[name] = [rank["model"].get(key, (0, 0))[index] for rank in told]
    return found


def _arrays(trainer) -> dict[str, int]:
    """Bytes of the arrays on this rank, without those that a loader reads into."""
    matrices = lambda found: sum(matrix.box.size * itemsize(matrix.dtype) for matrix in found.values())
    parameters = trainer.network.parameters()
    held = [parameter for parameter in parameters if parameter.gradient is not None]
    return {
        "weights": matrices(trainer.network.matrices()),
        "gradients": sum(parameter.form.local_shape[0] * parameter.form.local_shape[1] * itemsize(parameter.dtype)
                         for parameter in held),
        "state": matrices(trainer.optimizer.matrices()) if trainer.passes.steps else 0,
        "work": trainer.grid.workspace.allocated,
    }


def _predicted_memory(trainer) -> dict:
    """Part -> bytes of the largest rank by `MLPMemory`, and "covers": what it leaves out, if anything. Empty for other
    networks."""
    network = trainer.network
    activation = _activation(network)
    rows = max(trainer.passes.trained, default=0)
    if type(network) is not MLP or activation not in KEPT or not rows:
        return {}
    modules = [module for _, module in network.named_modules()]
    model = MLPVolume.of(network, trainer.optimizer, "mse")
    memory = MLPMemory(model.sizes, rows, model.grid, activation, model.dtype, len(trainer.optimizer.state_names),
                       model.split_over_data, not all(model.kept()), 0, model.overlap.bucket_bytes)
    names = {LayerNorm: "LayerNorm", Dropout: "dropout", Recompute: "recomputing"}
    left_out = sorted({names[type(module)] for module in modules if type(module) in names})
    return {"parts": memory.parts(), "leaves_out": left_out}


def _activation(network) -> str:
    """The name of the function between the layers; "relu" where there is none."""
    if type(network) is not MLP:
        return ""
    layers = [layer for outer in network.layers
              for layer in (outer.module.layers if isinstance(outer, Recompute) else [outer])]
    return next((layer.__name__ for layer in layers if hasattr(layer, "__name__")), "relu")


def _passes(passes) -> dict:
    return {**asdict(passes), "trained": dict(passes.trained), "evaluated": dict(passes.evaluated)}


def _short(value):
    return round(value, DIGITS) if isinstance(value, float) else value


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
