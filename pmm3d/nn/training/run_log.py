"""What a training run tells people and programs: the progress bar, metrics.jsonl, figures for Prometheus, and once it
is over curves.png. Rank 0 speaks."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ...errors import needs, printable
from ...io.disk import not_following, replace_file
from .best_effort import attempt
from .curves import curve, plot
from .metrics import METRICS, read_metrics

PICTURE = "curves.png"
logger = logging.getLogger("pmm3d.nn")


class RunLog:
    """The log of one run in a folder; on ranks other than 0 it does nothing.

    metrics.jsonl   a JSON object a line: {"step", "epoch", "loss", "lr", "samples_per_second", "waiting", "seconds"},
                    and {"step", "validation": {...}}. "waiting" is the share of the time since the line before that
                    rank 0 waited for messages or the loader, "lr" the rate that the step used. Of float16 also
                    {"loss_scale", "skipped"}: the next step's scale, and how many were skipped so far; a loss that was
                    not finite is left out. A resumed run goes on
                    in the same file; what lies beyond is cut off.
    curves.png      loss and validation by step, drawn when the process ends, so that nobody waits for it; or by `draw`

    What it cannot write or draw once the run has begun is said once in a warning, and the run goes on.

    bar             whether a progress bar is drawn
    prometheus      a .prom file that is to hold the latest figures, for a node exporter; see `prometheus.Textfile`

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(folder, rank=0, bar=False)
        ...     log.open(0, 1)
        ...     log.step({"step": 1, "loss": 0.5})
        ...     read_metrics(log.folder / METRICS)[0]["loss"]
        0.5
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, *, bar: bool = True,
                 prometheus: str | os.PathLike[str] | None = None):
        self.folder, self.speaks = Path(folder), rank == 0
        self._draws, self._begun, self._prometheus = bar, time.perf_counter(), prometheus
        self._bar: Any = None
        self._task: Any = None
        self._file: TextIO | None = None
        self._exporter: Any = None
        self._complained: set[str] = set()

    def open(self, step: int, total: int) -> None:
        """Begin, or go on after a step, of so many in all. Raises OSError where the folder cannot be written, and
        Pmm3dError where the file for Prometheus cannot."""
        if not self.speaks:
            return
        if self._prometheus is not None:
            from .prometheus import Textfile

            self._exporter = Textfile(Path(self._prometheus), self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / METRICS
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step else []
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a", opener=not_following)
        if self._draws:
            self._open_bar(step, total)

    def _open_bar(self, step: int, total: int) -> None:
        with needs("train", "the progress bar"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(),
                             TextColumn("{task.fields[said]}"), TimeRemainingColumn(),
                             console=Console(file=sys.stderr), auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task("training", total=total, completed=step, said="")

    def step(self, metrics: dict[str, float]) -> None:
        """A line about a step."""
        if not self.speaks:
            return
        self._write({**metrics, "seconds": round(time.perf_counter() - self._begun, 3)})
        self._export(metrics)
        if self._bar is not None and not attempt("the progress bar is gone", lambda: self._move_bar(metrics)):
            self._bar = None

    def _move_bar(self, metrics: Mapping[str, float]) -> None:
        said = (f"loss {metrics.get('loss', float('nan')):.4g}, {metrics['samples_per_second']:,.0f} samples/s, "
                f"waiting {metrics['waiting']:.0%}")
        self._bar.update(self._task, completed=metrics["step"], said=said)
        self._bar.refresh()

    def validation(self, step: int, epoch: int, figures: dict[str, float]) -> None:
        """A line about an evaluation."""
        if self.speaks:
            self._write({"step": step, "epoch": epoch, "validation": figures})
            self._export({"step": step, "epoch": epoch}, figures)
        self.say(f"step {step}: " + ", ".join(f"validation {name} {value:.4f}" for name, value in figures.items()))

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is on the disk."""
        self.say(f"step {step}: wrote {path}")
        if self._exporter is not None:
            self._export({"checkpoint_step": step, "checkpoint_timestamp_seconds": self._exporter.now()})

    def _export(self, figures: Mapping[str, float], validation: Mapping[str, float] | None = None) -> None:
        """For Prometheus; a file that cannot be written any more is given up, and the training goes on."""
        if self._exporter is None:
            return
        try:
            self._exporter.write(figures, validation)
        except OSError as error:
            logger.warning(f"{self._prometheus} cannot be written any more: {error.strerror}")
            self._exporter = None

    def say(self, text: str) -> None:
        """Print it, above the progress bar."""
        if not self.speaks:
            return
        try:
            if self._bar is not None and self._bar.console.is_terminal:
                self._bar.console.print(text, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError) as error:  # a terminal that is gone, or that cannot show a name
            self._complain(f"the run's messages cannot be printed: {error}")

    def _complain(self, text: str) -> None:
        if text not in self._complained:
            self._complained.add(text)
            logger.warning(text)

    def _write(self, line: dict[str, Any]) -> None:
        """What a full disk does not take is written with the next line."""
        if self._file is None:
            return
        path = self.folder / METRICS
        try:
            if not _is_at(path, self._file):
                self._begin_anew(path)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            self._complain(f"{path} cannot be written: {error.strerror}. The training goes on")

    def _begin_anew(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        old, self._file = self._file, open(path, "a", opener=not_following)
        if old is not None:
            old.close()
        logger.warning(f"{path} has been removed, renamed or replaced while the run goes on: its figures go on in a "
                       "new file of that name; those before are where the old one is now")

    def close(self) -> None:
        """The end of a run, whatever ended it."""
        if self._bar is not None:
            attempt("the progress bar could not be closed", self._bar.stop)
        if self._file is not None:
            attempt(f"{self.folder / METRICS} could not be closed", self._file.close)
        self._bar = self._file = None

    def draw_at_exit(self) -> None:
        """Have the process draw at its end: after everything that other ranks would wait for."""
        if self.speaks:
            atexit.register(self.draw)

    def draw(self) -> None:
        """curves.png, and the loss as a line for the terminal."""
        atexit.unregister(self.draw)
        if self.speaks and self.folder.is_dir():
            attempt(f"{self.folder / PICTURE} could not be drawn", self._draw)

    def _draw(self) -> None:
        metrics = self.folder / METRICS
        values = [line["loss"] for line in read_metrics(metrics) if "loss" in line]
        shown = curve(values, encoding=getattr(sys.stdout, "encoding", None))
        print(f"loss {shown} from {values[0]:.3g} to {values[-1]:.3g}" if values else "no loss yet", flush=True)
        plot(metrics, self.folder / PICTURE)
        print(printable(f"curves in {self.folder / PICTURE}"), flush=True)


def _is_at(path: Path, file: TextIO) -> bool:
    """Whether the file that is open is still the one at that path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
