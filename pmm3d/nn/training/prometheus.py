"""Figures of a run for a node exporter's textfile collector (https://github.com/prometheus/node_exporter)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import Pmm3dError, needs
from ...model.environment import job_id

GAUGES = {
    "step": "Steps of the optimizer done",
    "epoch": "Passes over the data done",
    "loss": "Loss of the last step logged",
    "lr": "Learning rate",
    "samples_per_second": "Rows trained per second since the line before",
    "waiting": "Share of the time since the line before that rank 0 waited for messages or the loader, 0 to 1",
    "gradient_norm": "2-norm of the gradient before it was clipped",
    "checkpoint_step": "Step of the last checkpoint written by this start",
    "checkpoint_timestamp_seconds": "When the last checkpoint was written, Unix time",
    "updated_timestamp_seconds": "When these figures were written, Unix time",
}
LABELS = ("run", "job")


class Textfile:
    """A file of gauges pmm3d_*, replaced as a whole each time, with the labels run (its folder) and job ("" outside of
    a batch system). Raises Pmm3dError if the file cannot be written at first; `write` then raises OSError only.

    Time stamps are Unix time as the clock had it when this was made, and from then on counted by one that is never
    set: those of one start never go back, and the difference of two is what really passed. A clock that is set
    during a run is followed by the next start.
    """

    def __init__(self, path: Path, run: Path):
        with needs("monitor", "training.prometheus"):
            from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
        if path.suffix != ".prom":
            raise Pmm3dError(f"training.prometheus = {str(path)!r}: node exporters read files that end in .prom only")
        self._made, self._counted = time.time(), time.monotonic()
        registry, self._labels = CollectorRegistry(), (str(run.absolute()), job_id() or "")
        self._store: Callable[[], None] = lambda: write_to_textfile(str(path), registry)
        self._gauges = {name: Gauge(f"pmm3d_{name}", text, LABELS, registry=registry) for name, text in GAUGES.items()}
        self._scores = Gauge("pmm3d_validation", "Figures of the last validation", [*LABELS, "figure"],
                             registry=registry)
        try:
            self.write({})
        except OSError as error:
            raise Pmm3dError(f"training.prometheus = {str(path)!r} cannot be written: {error.strerror}. Name a file in "
                             "a folder that is there and that this user may write to") from None

    def now(self) -> float:
        """The time stamp of this moment."""
        return self._made + time.monotonic() - self._counted

    def write(self, figures: Mapping[str, float], validation: Mapping[str, float] | None = None) -> None:
        """Set the gauges that are named, and write all that were ever set."""
        for name, value in {**figures, "updated_timestamp_seconds": self.now()}.items():
            if name in self._gauges:
                self._gauges[name].labels(*self._labels).set(value)
        for name, value in (validation or {}).items():
            self._scores.labels(*self._labels, name).set(value)
        self._store()
